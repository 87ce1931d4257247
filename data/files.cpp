// File helpers: see files.h. Plain POSIX calls, because each of them reports its error once and
// only once (an error found by fsync or close is lost when nobody looks).
#include "data/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "kernels/check.h"

namespace torus::data {
namespace {

Exit exit_code(int error) {
    if (error == ENOENT || error == ENOTDIR) return Exit::missing_input;
    if (error == EACCES || error == EPERM || error == EROFS) return Exit::permission;
    return Exit::io;
}

const char* advice(int error) {
    switch (error) {
        case ENOENT:
        case ENOTDIR: return "check the path";
        case EACCES:
        case EPERM: return "check the permissions";
        case EROFS: return "choose a folder that can be written";
        case EMFILE: return "raise the limit of open files (ulimit -n) or use fewer shards";
        case ENOSPC: return "free some space or choose another folder";
        case ELOOP: return "check the symbolic links";
        default: return "check the disk";
    }
}

[[noreturn]] void fail_io(const std::string& path, const char* what, int error) {
    fail(exit_code(error), path, ": cannot ", what, ": ", std::strerror(error), "; ",
         advice(error));
}

// A failed write is an I/O error even when the folder has vanished or is read-only, except that
// scripts want to know about permissions.
[[noreturn]] void fail_write(const std::string& path, const char* what, int error) {
    const Exit code = exit_code(error) == Exit::permission ? Exit::permission : Exit::io;
    fail(code, path, ": cannot ", what, ": ", std::strerror(error), "; ", advice(error));
}

std::string folder_of(const std::string& path) {
    const std::string folder = std::filesystem::path(path).parent_path().string();
    return folder.empty() ? "." : folder;
}

}  // namespace

File File::open_to_read(const std::string& path) {
    File file;
    file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file.fd_ < 0) fail_io(path, "open", errno);
    return file;
}

File::File(File&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }

File& File::operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

void File::close() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

int64_t File::size(const std::string& path) const {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) fail_io(path, "read its size", errno);
    require(S_ISREG(status.st_mode), Exit::bad_data, path,
            ": not a regular file; give the path of a file");
    return int64_t(status.st_size);
}

void File::read_at(const std::string& path, int64_t offset, void* out, int64_t n) const {
    uint8_t* to = static_cast<uint8_t*>(out);
    while (n > 0) {
        const ssize_t got = ::pread(fd_, to, size_t(n), off_t(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            fail(Exit::io, path, ":byte ", offset, ": cannot read: ", std::strerror(errno),
                 "; check the disk");
        require(got > 0, Exit::bad_data, path, ":byte ", offset,
                ": the file ended while it was read, so it has been cut or replaced; restore it "
                "and start again");
        to += got;
        offset += got;
        n -= got;
    }
}

NewFile::NewFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".tmp.XXXXXX") {
    file_.fd_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
    if (file_.fd_ < 0) fail_write(path_, "create", errno);
    if (::fchmod(file_.fd_, 0644) != 0) fail_write(path_, "set its permissions", errno);
}

NewFile::~NewFile() {
    if (file_.fd() >= 0) ::unlink(temporary_.c_str());
}

void NewFile::write(const void* bytes, int64_t n) {
    write_at(end_, bytes, n);
    end_ += n;
}

void NewFile::write_at(int64_t offset, const void* bytes, int64_t n) {
    const uint8_t* from = static_cast<const uint8_t*>(bytes);
    while (n > 0) {
        const ssize_t put = ::pwrite(file_.fd(), from, size_t(n), off_t(offset));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) fail_write(path_, "write", put < 0 ? errno : EIO);
        from += put;
        offset += put;
        n -= put;
    }
}

void NewFile::read_at(int64_t offset, void* out, int64_t n) const {
    file_.read_at(temporary_, offset, out, n);
}

void NewFile::publish() {
    if (::fsync(file_.fd()) != 0) fail_write(path_, "flush to disk", errno);
    const int fd = file_.fd_;
    file_.fd_ = -1;
    if (::close(fd) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
        const int error = errno;
        ::unlink(temporary_.c_str());
        fail_write(path_, "finish", error);
    }
    const std::string folder = folder_of(path_);
    const int folder_fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0) fail_write(folder, "open", errno);
    // Some network file systems cannot sync a folder and say EINVAL: the rename stands.
    const int error = ::fsync(folder_fd) != 0 ? errno : 0;
    ::close(folder_fd);
    if (error != 0 && error != EINVAL) fail_write(folder, "flush to disk", error);
}

std::string read_file(const std::string& path, int64_t limit) {
    const File file = File::open_to_read(path);
    const int64_t size = file.size(path);
    require(size <= limit, Exit::bad_data, path, ": ", size, " bytes, at most ", limit,
            " are allowed here; check that it is the file you meant");
    std::string bytes(size_t(size), '\0');
    file.read_at(path, 0, bytes.data(), size);
    return bytes;
}

void write_file(const std::string& path, std::string_view bytes) {
    NewFile file(path);
    file.write(bytes.data(), int64_t(bytes.size()));
    file.publish();
}

void make_folders(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    require(!error && is_folder(path), Exit::permission, path,
            ": cannot create the folder: ", error ? error.message() : "a file of that name exists",
            "; choose another folder");
}

bool is_folder(const std::string& path) {
    std::error_code error;
    return std::filesystem::is_directory(path, error);
}

bool is_file(const std::string& path) {
    std::error_code error;
    return std::filesystem::is_regular_file(path, error);
}

uint64_t hash_bytes(std::string_view bytes, uint64_t hash) {
    for (const char c : bytes) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
    return hash;
}

std::string hex(uint64_t value) {
    std::string digits(16, '0');
    for (int i = 15; i >= 0; --i, value >>= 4) digits[size_t(i)] = "0123456789abcdef"[value & 15];
    return digits;
}

}  // namespace torus::data
