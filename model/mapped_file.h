// A file mapped read-only, with its size fixed at opening: every reader checks offsets against
// size() before it touches a byte.
#pragma once
#include <cstdint>
#include <string>

namespace torus {

class MappedFile {
public:
    // Throws Error(missing_input), Error(permission) or Error(bad_data), naming the path.
    explicit MappedFile(std::string path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const char* data() const { return static_cast<const char*>(data_); }
    int64_t size() const { return size_; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
    void* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace torus
