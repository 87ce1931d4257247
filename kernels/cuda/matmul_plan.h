// A matrix product as cuBLASLt knows it: what is multiplied, its descriptors, and the algorithms
// that can do it. Stated in column-major terms, D (m,n) = op(A) op(B) + beta * C; a row-major
// matrix is a column-major one transposed.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"

namespace torus::cuda {

constexpr int64_t kMatmulWorkspace = 32 << 20;

struct Algorithm : cublasLtMatmulAlgo_t {};  // a name of its own: nvcc stumbles over vectors of it

// Throws Error(internal), or out_of_memory, with the name of the call that failed.
void check(cublasStatus_t status, const char* what);

// The power of two that an address is a multiple of, at most 256.
int64_t alignment(const void* p);

enum class Epilogue : uint8_t { none, gelu, gelu_backward };

struct Product {  // C has D's type and is D or another matrix
    DType in, out;
    bool trans_a = false, trans_b = false;
    int64_t m, n, k;
    const void *a, *b, *c;
    void* d;
    int64_t lda, ldb, ldc, ldd;
    const void* bias = nullptr;  // (m), of D's type
    float beta = 0;
    Epilogue epilogue = Epilogue::none;
    void* aux = nullptr;  // (m,n), contiguous: gelu writes its input there, gelu_backward reads it
};

// The descriptors of a product, and the algorithm that runs it.
struct Plan {
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
    Algorithm algo{};

    explicit Plan(const Product& p);
    ~Plan();
    Plan(const Plan&) = delete;

    void point(const Product& p);  // to other addresses of bias and aux
};

// What the library proposes, the best by its own model first; empty when it has nothing.
// Sums over k go in a fixed order: splits that meet in D by atomics are left out.
std::vector<Algorithm> proposals(cublasLtHandle_t handle, const Plan& plan, const Product& p);

// Whether an algorithm, proposed or not, can run this product, as `proposals` would have it.
bool usable(cublasLtHandle_t handle, const Plan& plan, const Algorithm& algo);

}  // namespace torus::cuda
