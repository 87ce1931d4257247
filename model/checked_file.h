// A file being written, with every return value checked: Error(io) or Error(permission) with the
// path and the system's reason.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torus {

class CheckedFile {
public:
    explicit CheckedFile(std::string path);  // created, or emptied when it exists
    CheckedFile(CheckedFile&& o) noexcept;
    CheckedFile& operator=(CheckedFile&&) = delete;
    ~CheckedFile();  // closes; data still buffered is lost, so call finish()

    void write(const void* data, int64_t bytes);
    void finish();  // flush, fsync, close

private:
    void flush();
    [[noreturn]] void failed(const char* what) const;

    std::string path_;
    int fd_ = -1;
    std::vector<char> buffer_;  // gathers small pieces; large ones go straight to the file
};

}  // namespace torus
