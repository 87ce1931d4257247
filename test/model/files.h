// Files for tests of readers: a folder of its own that goes away, and bad files in bulk.
#pragma once
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "kernels/check.h"

namespace torus {

class TempFolder {
public:
    TempFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "torus-XXXXXX").string();
        CHECK(::mkdtemp(pattern.data()) != nullptr);
        path_ = pattern;
    }
    ~TempFolder() { std::filesystem::remove_all(path_); }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    CHECK(file.good());
}

inline std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    CHECK(file.good());
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The message of the Error that f() throws, with its exit code in front: "65 file: ..."; "none"
// when it throws nothing. Any other exception passes through and fails the test.
template <class F>
std::string error_of(const F& f) {
    try {
        f();
    } catch (const Error& e) {
        return std::to_string(int(e.code)) + " " + e.what();
    }
    return "none";
}

}  // namespace torus
