#include "kernels/cuda/matmul_plan.h"

#include <algorithm>

#include "kernels/check.h"

namespace torus::cuda {

namespace {

constexpr int kMostProposals = 16;
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // through the workspace

cublasLtEpilogue_t epilogue_of(const Product& p) {
    switch (p.epilogue) {
        case Epilogue::gelu:
            return p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        case Epilogue::gelu_backward: return CUBLASLT_EPILOGUE_DGELU;
        case Epilogue::none: break;
    }
    return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

cudaDataType_t cuda_type(DType t) {
    switch (t) {
        case DType::f32: return CUDA_R_32F;
        case DType::bf16: return CUDA_R_16BF;
        case DType::f16: return CUDA_R_16F;
        default: fail(Exit::internal, "matmul: no product of ", name_of(t));
    }
}

template <class V>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const V& value) {
    check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
}

cublasLtMatrixLayout_t layout(DType type, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t l = nullptr;
    check(cublasLtMatrixLayoutCreate(&l, cuda_type(type), uint64_t(rows), uint64_t(cols), ld),
          "cublasLtMatrixLayoutCreate");
    return l;
}

}  // namespace

void check(cublasStatus_t status, const char* what) {
    const bool memory = status == CUBLAS_STATUS_ALLOC_FAILED;
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(memory ? Exit::out_of_memory : Exit::internal, "cuBLASLt: ", what, ": ",
             cublasLtGetStatusString(status));
}

int64_t alignment(const void* p) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(p);
    return int64_t(std::min<uintptr_t>(a & (~a + 1), 256));
}

Plan::Plan(const Product& p) {
    check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.aux) set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.m);
    point(p);
    a = layout(p.in, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.lda);
    b = layout(p.in, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n, p.ldb);
    c = layout(p.out, p.m, p.n, p.ldc);
    d = layout(p.out, p.m, p.n, p.ldd);
}

Plan::~Plan() {
    for (cublasLtMatrixLayout_t l : {a, b, c, d})
        if (l) cublasLtMatrixLayoutDestroy(l);
    if (desc) cublasLtMatmulDescDestroy(desc);
}

void Plan::point(const Product& p) {
    if (p.bias) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux) set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
}

std::vector<Algorithm> proposals(cublasLtHandle_t handle, const Plan& plan, const Product& p) {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kMatmulWorkspace));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment(p.a)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment(p.b)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment(p.c)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment(p.d)));
    cublasLtMatmulHeuristicResult_t results[kMostProposals];
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, plan.desc, plan.a, plan.b, plan.c, plan.d,
                                       preference, kMostProposals, results, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<Algorithm> list;
    if (status != CUBLAS_STATUS_SUCCESS) return list;
    for (int i = 0; i < found; ++i) list.push_back({results[i].algo});
    return list;
}

bool usable(cublasLtHandle_t handle, const Plan& plan, const Algorithm& algo) {
    cublasLtMatmulHeuristicResult_t result{};
    uint32_t reduction = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoCheck(handle, plan.desc, plan.a, plan.b, plan.c, plan.d, &algo,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= size_t(kMatmulWorkspace) &&
           cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                &reduction, sizeof reduction,
                                                &written) == CUBLAS_STATUS_SUCCESS &&
           (reduction & ~kReductions) == 0;
}

}  // namespace torus::cuda
