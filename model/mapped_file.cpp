// See mapped_file.h. The descriptor is closed at once: the mapping keeps the file alive.
#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/check.h"

namespace torus {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
    const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        const Exit code = errno == EACCES ? Exit::permission : Exit::missing_input;
        fail(code, path_, ": cannot be opened: ", std::strerror(errno), "; check the path");
    }
    struct stat info {};
    int error = ::fstat(fd, &info) == 0 ? 0 : errno;
    const bool regular = error == 0 && S_ISREG(info.st_mode);
    if (regular && info.st_size > 0) {
        size_ = info.st_size;
        data_ = ::mmap(nullptr, size_t(size_), PROT_READ, MAP_PRIVATE, fd, 0);
        if (data_ == MAP_FAILED) {
            error = errno;
            data_ = nullptr;
        }
    }
    ::close(fd);
    require(error == 0, Exit::io, path_, ": cannot be read: ", std::strerror(error));
    require(regular, Exit::bad_data, path_, ": not a regular file");
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(data_, size_t(size_));
}

}  // namespace torus
