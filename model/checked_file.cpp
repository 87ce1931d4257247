// See checked_file.h. Plain write(2) instead of stdio: one buffer, and errors where they happen.
#include "model/checked_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/check.h"

namespace torus {
namespace {

constexpr size_t buffer_bytes = size_t(1) << 20;

bool write_all(int fd, const char* data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t n = ::write(fd, data, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        data += n;
        bytes -= size_t(n);
    }
    return true;
}

}  // namespace

CheckedFile::CheckedFile(std::string path) : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) failed("cannot be created");
}

CheckedFile::CheckedFile(CheckedFile&& o) noexcept
    : path_(std::move(o.path_)), fd_(o.fd_), buffer_(std::move(o.buffer_)) {
    o.fd_ = -1;
}

CheckedFile::~CheckedFile() {
    if (fd_ >= 0) ::close(fd_);
}

void CheckedFile::failed(const char* what) const {
    const int error = errno;
    const bool denied = error == EACCES || error == EPERM || error == EROFS;
    fail(denied ? Exit::permission : Exit::io, path_, ": ", what, ": ", std::strerror(error),
         error == ENOSPC ? "; free some space or write elsewhere" : "");
}

void CheckedFile::write(const void* data, int64_t bytes) {
    CHECK(fd_ >= 0 && bytes >= 0);
    const char* from = static_cast<const char*>(data);
    if (buffer_.size() + size_t(bytes) > buffer_bytes) flush();
    if (size_t(bytes) > buffer_bytes) {
        if (!write_all(fd_, from, size_t(bytes))) failed("write failed");
    } else {
        buffer_.insert(buffer_.end(), from, from + bytes);
    }
}

void CheckedFile::flush() {
    if (!write_all(fd_, buffer_.data(), buffer_.size())) failed("write failed");
    buffer_.clear();
}

void CheckedFile::finish() {
    CHECK(fd_ >= 0);
    flush();
    if (::fsync(fd_) != 0) failed("fsync failed");
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd) != 0) failed("close failed");
}

}  // namespace torus
