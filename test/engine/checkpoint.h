// A small checkpoint to save and compare, shared by the checkpoint tests.
#pragma once
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "test/test.h"

namespace torus::test {

namespace fs = std::filesystem;

struct TempDir {
    fs::path path;
    TempDir() {
        std::string name = (fs::temp_directory_path() / "torus_checkpoint_XXXXXX").string();
        REQUIRE_TRUE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~TempDir() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

inline std::string read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

inline void write(const fs::path& path, const std::string& bytes) {
    fs::remove(path);  // ext4 would flush a file that is cut and written anew
    std::ofstream(path, std::ios::binary) << bytes;
}

inline ModelConfig tiny_model() {
    ModelConfig c;
    c.family = "gpt2";
    c.hf_model_type = "gpt2";
    c.L = 2, c.C = 8, c.H = c.Hk = 2, c.D = 4, c.F = 32, c.V = 11, c.max_T = 16;
    return c;
}

// Values are a function of `step`, so that states of different steps differ in every tensor.
inline SavedTensor tensor(const std::string& name, DType dtype, const Shape& shape, int64_t step) {
    return {name, dtype, shape, [=](void* dst) {
                const int64_t bytes = shape.numel() * size_of(dtype);
                uint64_t x = uint64_t(step) * 977 + name.size() * 31 + uint64_t(name[0]);
                for (int64_t i = 0; i < bytes; ++i) {
                    x = x * 6364136223846793005u + 1442695040888963407u;
                    static_cast<uint8_t*>(dst)[i] = uint8_t(x >> 56);
                }
            }};
}

inline CheckpointFiles files_at(int64_t step, int64_t rows = 11) {
    CheckpointFiles f;
    f.config = tiny_model();
    f.model = {tensor("wte.weight", DType::f32, {rows, 8}, step),
               tensor("ln_f.weight", DType::f32, {8}, step)};
    f.optimizer = {tensor("m.wte.weight", DType::f32, {rows, 8}, step),
                   tensor("v.wte.weight", DType::f32, {rows, 8}, step),
                   tensor("control", DType::f64, {4}, step)};
    return f;
}

inline CheckpointState state_at(int64_t step, const std::string& run = "run-a") {
    return {.step = step,
            .next_sequence = step * 3,
            .run_id = run,
            .data_fingerprint = "0123",
            .config_toml = "lr = 1 # \"ü\"\n",
            .model_json = "gpt2 L2",
            .precision = "fp32"};
}

// The tensors of the checkpoint are those of `step`.
inline void expect_content(const std::string& dir, int64_t step) {
    const auto source = open_safetensors(dir + "/optimizer.safetensors");
    for (const SavedTensor& t : files_at(step).optimizer) {
        const Tensor found = source->find(t.name);
        std::vector<char> expected(size_t(found.bytes()));
        t.fill(expected.data());
        EXPECT(found.dtype == t.dtype);
        EXPECT(found.shape == t.shape);
        EXPECT_EQ(std::memcmp(found.data, expected.data(), expected.size()), 0);
    }
}

inline std::string newest_in(const std::string& dir) {
    return fs::path(CheckpointStore(dir).newest()).filename().string();
}

inline std::vector<std::string> folders_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(dir))
        if (e.is_directory()) names.push_back(e.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

struct Failure {
    Exit code = Exit::ok;
    std::string text;
    bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};

template <class F>
Failure failure_of(F&& f) {
    try {
        f();
    } catch (const Error& e) {
        return {e.code, e.what()};
    }
    return {};
}

}  // namespace torus::test
