// Helpers of the data tests: a folder that vanishes, files, random bytes, and the error rule.
#pragma once
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "data/data.h"
#include "data/files.h"
#include "kernels/check.h"
#include "test/test.h"

namespace torus {

class TempFolder {
public:
    TempFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "torus-data-XXXXXX").string();
        CHECK(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~TempFolder() { std::filesystem::remove_all(path_); }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

inline void write_text(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
}

inline std::string write_shard(const std::string& path, const std::vector<int32_t>& ids,
                               int64_t vocab = 50257) {
    TokenShardWriter writer(path, vocab);
    writer.append(ids);
    writer.finish();
    return path;
}

inline std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
    std::vector<int32_t> ids;
    tokenizer.encode(text, ids);
    return ids;
}

inline std::string random_bytes(std::mt19937& random, size_t n) {
    std::string bytes(n, '\0');
    for (char& c : bytes) c = char(random() & 255);
    return bytes;
}

// `run` must throw Error with this code and a one-line message that holds `part`.
template <class Run>
void expect_error(Exit code, const std::string& part, const Run& run) {
    CAPTURE(part);
    try {
        run();
        FAIL_TEST("no error was thrown");
    } catch (const Error& e) {
        const std::string message = e.what();
        CAPTURE(message);
        EXPECT_EQ(int(e.code), int(code));
        EXPECT(message.find(part) != std::string::npos);
        EXPECT(message.find('\n') == std::string::npos);
    }
}

}  // namespace torus
