// Algorithms chosen by timing: the products stay right although each candidate ran on the real
// operands, the choice is kept in a file, and a later run that reads it gives the same bits.
#include <filesystem>
#include <fstream>

#include "kernels/cuda/matmul_choices.h"
#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

struct TemporaryFile {
    std::string path = (std::filesystem::temp_directory_path() / "torus_matmul_test.txt").string();
    TemporaryFile() { std::filesystem::remove(path); }
    ~TemporaryFile() { std::filesystem::remove(path); }
    std::string text() const {
        std::ifstream in(path);
        return {std::istreambuf_iterator<char>(in), {}};
    }
};

constexpr int64_t N = 320, C = 192, O = 256;

// out with bias and residual in place, and dw added to, twice each.
std::vector<double> products(Gpu& gpu) {
    DeviceValue x(gpu, DType::bf16, {N, C}, random_values("x", N * C)),
        w(gpu, DType::bf16, {O, C}, random_values("w", O * C)),
        bias(gpu, DType::bf16, {O}, random_values("bias", O)),
        out(gpu, DType::bf16, {N, O}, random_values("out", N * O)),
        dw(gpu, DType::f32, {O, C}, random_values("dw", O * C));
    for (int repeat = 0; repeat < 2; ++repeat) {
        gpu.k->matmul_forward(gpu.stream, out.tensor(), x.tensor(), w.tensor(), bias.tensor(),
                              out.tensor());
        gpu.k->matmul_backward_weight(gpu.stream, dw.tensor(), {}, out.tensor(), x.tensor(), true);
    }
    std::vector<double> all = out.all(), more = dw.all();
    all.insert(all.end(), more.begin(), more.end());
    return all;
}

}  // namespace

TEST_CASE("tuned products are right, and kept in a file") {
    const TemporaryFile file;
    Gpu plain(DType::bf16), tuned(DType::bf16), later(DType::bf16);
    const std::vector<double> want = products(plain);
    tuned.k->tune_matmul(file.path);
    EXPECT(relative_error(products(tuned), want) < 1e-2);
    const std::string kept = file.text();
    EXPECT(std::count(kept.begin(), kept.end(), '\n') == 3);  // what made it, and two products
    const std::vector<double> again = products(tuned);
    EXPECT(file.text() == kept);
    later.k->tune_matmul(file.path);
    EXPECT(same_bits(products(later), again));
    EXPECT(file.text() == kept);
}

TEST_CASE("a product's key says all that its algorithm depends on") {
    cuda::ProductKey key{};
    for (int64_t flags : {0x011, 0x111, 0x613, 0xA30, 0x1511, 0x2211, 0x31FF})
        for (size_t part = 0; part < key.size(); ++part) {
            for (size_t i = 1; i < key.size(); ++i) key[i] = i < 8 ? int64_t(100 + i) : 16 << i % 4;
            key[0] = flags;
            key[12] = flags & 0x400 ? 32 : 0;
            if (part >= 8 && (part != 12 || key[12] != 0)) key[part] *= 2;
            EXPECT(cuda::key_of(cuda::product_of(key)) == key);
        }
}

TEST_CASE("a tuning file of another GPU is replaced, a broken one refused") {
    const TemporaryFile file;
    Gpu gpu(DType::bf16);
    std::ofstream(file.path) << "cublasLt 1 another GPU\n1 2 3\n";
    gpu.k->tune_matmul(file.path);
    const std::string head = file.text();
    EXPECT(head.find("another") == std::string::npos);
    std::ofstream(file.path, std::ios::app) << "1 2 x\n";
    EXPECT_THROWS_AS(gpu.k->tune_matmul(file.path), Error);
}
