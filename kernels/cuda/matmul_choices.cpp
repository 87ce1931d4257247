#include "kernels/cuda/matmul_choices.h"

#include <fstream>
#include <sstream>

#include "kernels/check.h"

namespace torus::cuda {

ProductKey key_of(const Product& p) {
    const int64_t flags = int64_t(p.in) | int64_t(p.out) << 4 | int64_t(p.trans_a) << 8 |
                          int64_t(p.trans_b) << 9 | int64_t(p.bias != nullptr) << 10 |
                          int64_t(p.beta != 0) << 11 | int64_t(p.epilogue) << 12;
    return {flags,
            p.m,
            p.n,
            p.k,
            p.lda,
            p.ldb,
            p.ldc,
            p.ldd,
            alignment(p.a),
            alignment(p.b),
            alignment(p.c),
            alignment(p.d),
            p.bias ? alignment(p.bias) : 0,
            p.aux ? alignment(p.aux) : 0};
}

Product product_of(const ProductKey& key) {
    const auto bits = [&](int shift, int count) { return key[0] >> shift & ((1 << count) - 1); };
    const auto address = [&](int part) { return reinterpret_cast<void*>(key[size_t(part)]); };
    return {.in = DType(bits(0, 4)),
            .out = DType(bits(4, 4)),
            .trans_a = bits(8, 1) != 0,
            .trans_b = bits(9, 1) != 0,
            .m = key[1],
            .n = key[2],
            .k = key[3],
            .a = address(8),
            .b = address(9),
            .c = address(10),
            .d = address(11),
            .lda = key[4],
            .ldb = key[5],
            .ldc = key[6],
            .ldd = key[7],
            .bias = address(12),
            .beta = bits(11, 1) ? 1.0f : 0.0f,
            .epilogue = Epilogue(bits(12, 4)),
            .aux = address(13)};
}

static std::string head_of(const std::string& device) {
    return concat("cublasLt ", cublasLtGetVersion(), " ", device);
}

std::optional<std::map<ProductKey, Choice>> read_choices(const std::string& file,
                                                         const std::string& device) {
    std::ifstream in(file);
    std::string line;
    if (!in || !std::getline(in, line) || line != head_of(device)) return {};
    std::map<ProductKey, Choice> choices;
    while (std::getline(in, line)) {
        std::istringstream fields(line);
        ProductKey key{};
        Choice choice{};
        for (int64_t& part : key) fields >> part;
        for (uint64_t& word : choice.algo.data) fields >> word;
        fields >> choice.ms >> choice.first_ms;
        require(bool(fields), Exit::bad_data, "--tune-matmul: ", file,
                " has a broken line; delete the file to time again: ", line);
        choices[key] = choice;
    }
    return choices;
}

void start_choices(const std::string& file, const std::string& device) {
    std::ofstream out(file, std::ios::trunc);
    out << head_of(device) << '\n';
    require(bool(out), Exit::io, "--tune-matmul: ", file, " cannot be written");
}

void append_choice(const std::string& file, const ProductKey& key, const Choice& choice) {
    std::ofstream out(file, std::ios::app);
    for (int64_t part : key) out << part << ' ';
    for (uint64_t word : choice.algo.data) out << word << ' ';
    out << choice.ms << ' ' << choice.first_ms << '\n';
    require(bool(out), Exit::io, "--tune-matmul: ", file, " cannot be written");
}

}  // namespace torus::cuda
