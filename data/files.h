// Small file helpers of the data layer: every return value is checked, a new file appears under its
// name only when it is complete and on the disk, and a read never trusts a size it has not seen.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace torus::data {

// An open file descriptor.
class File {
public:
    File() = default;
    static File open_to_read(const std::string& path);  // Error(missing_input | permission | io)
    ~File() { close(); }
    File(File&& other) noexcept;
    File& operator=(File&& other) noexcept;
    int fd() const { return fd_; }
    int64_t size(const std::string& path) const;  // Error(bad_data) when it is not a regular file
    // Exactly n bytes from `offset`; Error(bad_data) when the file has become shorter.
    void read_at(const std::string& path, int64_t offset, void* out, int64_t n) const;
    void close() noexcept;

private:
    friend class NewFile;
    int fd_ = -1;
};

// A file written under a temporary name next to its final one; publish() makes it durable and
// renames it. Dropped without publish(), it leaves nothing behind.
class NewFile {
public:
    explicit NewFile(std::string path);
    ~NewFile();
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;
    void write(const void* bytes, int64_t n);                     // at the end
    void write_at(int64_t offset, const void* bytes, int64_t n);  // over what is there
    void read_at(int64_t offset, void* out, int64_t n) const;     // back from what was written
    void publish();                                               // fsync, rename, fsync folder

private:
    std::string path_, temporary_;
    File file_;
    int64_t end_ = 0;
};

// The whole file; Error(bad_data) above `limit` bytes.
std::string read_file(const std::string& path, int64_t limit);
void write_file(const std::string& path, std::string_view bytes);
void make_folders(const std::string& path);  // like mkdir -p; Error(permission)
bool is_folder(const std::string& path);
bool is_file(const std::string& path);

// FNV-1a, 64 bits: for names of cache entries and for fingerprints, not against an adversary.
constexpr uint64_t hash_start = 0xcbf29ce484222325u;
uint64_t hash_bytes(std::string_view bytes, uint64_t hash = hash_start);
std::string hex(uint64_t value);  // 16 digits

}  // namespace torus::data
