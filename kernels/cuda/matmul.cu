// Matrix products on cuBLASLt. Descriptors and the algorithm are made once per shape and kept. fp32
// products use fp32 arithmetic, never TF32. Weight gradients add into fp32 by beta = 1, which keeps
// gradient accumulation exact over micro-batches.
#include <map>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/matmul_choices.h"

namespace torus::cuda {

class Matmul {
public:
    Matmul() = default;
    ~Matmul() {
        if (handle_) cublasLtDestroy(handle_);
    }
    Matmul(const Matmul&) = delete;

    void run(const char* op, Stream& stream, const Product& p);
    // False, and nothing is queued, when the library has no algorithm for this product.
    bool try_run(const char* op, Stream& stream, const Product& p);
    void tune(const std::string& file, const std::string& device);

private:
    std::unique_ptr<Plan> make_plan(const char* op, Stream& stream, const Product& p);
    cublasStatus_t launch(const char* op, Stream& stream, const Product& p, const Plan& plan,
                          const Algorithm& algo);
    Algorithm tuned(const char* op, Stream& stream, const Product& p, const Plan& plan,
                    const std::vector<Algorithm>& proposed);

    cublasLtHandle_t handle_ = nullptr;  // made at the first product: planning has no GPU
    std::map<ProductKey, std::unique_ptr<Plan>> plans_;
    std::string tuning_file_;
    std::map<ProductKey, Choice> tuned_;
};

bool Matmul::try_run(const char* op, Stream& stream, const Product& p) {
    if (p.m == 0 || p.n == 0) return true;
    CHECK(stream.handle, ": ", op, " was queued without a stream");
    const Range range(op);
    if (!handle_) check(cublasLtCreate(&handle_), "cublasLtCreate");
    const ProductKey key = key_of(p);
    auto found = plans_.find(key);
    if (found == plans_.end()) found = plans_.emplace(key, make_plan(op, stream, p)).first;
    Plan* const plan = found->second.get();
    if (!plan) return false;
    plan->point(p);
    check(launch(op, stream, p, *plan, plan->algo), op);
    return true;
}

void Matmul::run(const char* op, Stream& stream, const Product& p) {
    if (!try_run(op, stream, p))
        fail(Exit::internal, "cuBLASLt has no algorithm for ", op, " (m ", p.m, ", n ", p.n, ", k ",
             p.k, ", pitches ", p.lda, ", ", p.ldb, ", ", p.ldd, ") in ", name_of(p.in));
}

cublasStatus_t Matmul::launch(const char* op, Stream& stream, const Product& p, const Plan& plan,
                              const Algorithm& algo) {
    const float alpha = 1;
    return cublasLtMatmul(handle_, plan.desc, &alpha, p.a, plan.a, p.b, plan.b, &p.beta, p.c,
                          plan.c, p.d, plan.d, &algo, workspace(stream, kMatmulWorkspace, op),
                          kMatmulWorkspace, static_cast<cudaStream_t>(stream.handle));
}

// Null when the library has no algorithm.
std::unique_ptr<Plan> Matmul::make_plan(const char* op, Stream& stream, const Product& p) {
    auto plan = std::make_unique<Plan>(p);
    const auto kept = tuned_.find(key_of(p));
    if (kept != tuned_.end() && usable(handle_, *plan, kept->second.algo)) {
        plan->algo = kept->second.algo;
        return plan;
    }
    const std::vector<Algorithm> proposed = proposals(handle_, *plan, p);
    if (proposed.empty()) return nullptr;
    plan->algo = tuning_file_.empty() ? proposed[0] : tuned(op, stream, p, *plan, proposed);
    return plan;
}

// --- tuning --------------------------------------------------------------------------------------
Algorithm Matmul::tuned(const char* op, Stream& stream, const Product& p, const Plan& plan,
                        const std::vector<Algorithm>& proposed) {
    const auto run = [&](const Algorithm& a) {
        return launch(op, stream, p, plan, a) == CUBLAS_STATUS_SUCCESS;
    };
    const Choice best =
        find_fastest(handle_, static_cast<cudaStream_t>(stream.handle), p, plan, proposed, run);
    append_choice(tuning_file_, key_of(p), best);
    return best.algo;
}

void Matmul::tune(const std::string& file, const std::string& device) {
    tuning_file_ = file;
    plans_.clear();
    const auto kept = read_choices(file, device);
    if (!kept) start_choices(file, device);
    tuned_ = kept.value_or(std::map<ProductKey, Choice>());
}

void CudaKernels::tune_matmul(const std::string& file) { matmul_->tune(file, device_->name()); }

// --- launchers -----------------------------------------------------------------------------------
int64_t matmul_workspace() { return kMatmulWorkspace; }

CudaKernels::CudaKernels(DType dtype, std::unique_ptr<Device> device)
    : device_(std::move(device)),
      precision_(precision_of(dtype)),
      matmul_(std::make_unique<Matmul>()) {}
CudaKernels::~CudaKernels() = default;

int64_t CudaKernels::workspace_bytes(const WorkspaceDims& d) const {
    return std::max({embedding_workspace(d), norm_workspace(d), matmul_workspace(),
                     bias_gradient_workspace(d), attention_workspace(d), reduce_workspace()});
}

static Matrix matrix(const Tensor& t, const char* name, DType dtype, int64_t rows, int64_t cols) {
    const Matrix m = as_matrix(t, name);
    CHECK(m.dtype == dtype && m.rows == rows && m.cols == cols, ": ", name, " is ",
          name_of(m.dtype), " ", t.shape.str(), ", expected ", rows, " rows of ", cols, " in ",
          name_of(dtype));
    return m;
}

// out (N,O) = x (N,C) w (O,C)^T
static Product times_transposed(const Matrix& out, const Matrix& x, const Tensor& w) {
    return {.in = x.dtype,
            .out = out.dtype,
            .trans_a = true,
            .m = out.cols,
            .n = out.rows,
            .k = x.cols,
            .a = w.data,
            .b = x.data,
            .c = out.data,
            .d = out.data,
            .lda = x.cols,
            .ldb = x.pitch,
            .ldc = out.pitch,
            .ldd = out.pitch};
}

// dx (N,C) = dout (N,O) w (O,C)
static Product times(const Matrix& dx, const Matrix& dout, const Tensor& w) {
    return {.in = dout.dtype,
            .out = dx.dtype,
            .m = dx.cols,
            .n = dx.rows,
            .k = dout.cols,
            .a = w.data,
            .b = dout.data,
            .c = dx.data,
            .d = dx.data,
            .lda = dx.cols,
            .ldb = dout.pitch,
            .ldc = dx.pitch,
            .ldd = dx.pitch};
}

void CudaKernels::matmul_forward(Stream& stream, Tensor out, Tensor x, Tensor w, Tensor bias,
                                 Tensor residual) {
    const DType act = precision_.act;
    const int64_t O = w.dim(0), C = w.dim(1), N = as_matrix(x, "matmul_forward").rows;
    const Matrix mx = matrix(x, "matmul_forward: x", act, N, C);
    const Matrix mo = matrix(out, "matmul_forward: out", act, N, O);
    expect(w, "matmul_forward: w", act, O * C);
    if (bias) expect(bias, "matmul_forward: bias", act, O);
    Product p = times_transposed(mo, mx, w);
    p.bias = bias.data;
    if (residual) {
        const Matrix mr = matrix(residual, "matmul_forward: residual", act, N, O);
        p.c = mr.data;
        p.ldc = mr.pitch;
        p.beta = 1;
    }
    matmul_->run("matmul_forward", stream, p);
}

void CudaKernels::matmul_backward_input(Stream& stream, Tensor dx, Tensor dout, Tensor w,
                                        bool accumulate) {
    const DType act = precision_.act;
    const int64_t O = w.dim(0), C = w.dim(1), N = as_matrix(dx, "matmul_backward_input").rows;
    const Matrix md = matrix(dout, "matmul_backward_input: dout", act, N, O);
    const Matrix mx = matrix(dx, "matmul_backward_input: dx", act, N, C);
    expect(w, "matmul_backward_input: w", act, O * C);
    Product p = times(mx, md, w);
    p.beta = accumulate ? 1 : 0;
    matmul_->run("matmul_backward_input", stream, p);
}

// What cuBLASLt's GELU epilogues ask of their second matrix; and in fp32 they are left alone, so
// that the exact mode has one GELU.
static bool fusable(const Tensor& pre, int64_t cols) {
    return pre.dtype != DType::f32 && cols % 8 == 0 && aligned16(pre.data);
}

void CudaKernels::matmul_gelu_forward(Stream& stream, Tensor out, Tensor pre, Tensor x, Tensor w,
                                      Tensor bias) {
    const DType act = precision_.act;
    const int64_t O = w.dim(0), C = w.dim(1), N = as_matrix(x, "matmul_gelu_forward").rows;
    const Matrix mx = matrix(x, "matmul_gelu_forward: x", act, N, C);
    expect(out, "matmul_gelu_forward: out", act, N * O);
    expect(pre, "matmul_gelu_forward: pre", act, N * O);
    expect(w, "matmul_gelu_forward: w", act, O * C);
    if (bias) expect(bias, "matmul_gelu_forward: bias", act, O);
    Product p = times_transposed(matrix(out, "matmul_gelu_forward: out", act, N, O), mx, w);
    p.bias = bias.data;
    p.epilogue = Epilogue::gelu;
    p.aux = pre.data;
    if (!fusable(pre, O) || !matmul_->try_run("matmul_gelu_forward", stream, p))
        Kernels::matmul_gelu_forward(stream, out, pre, x, w, bias);
}

void CudaKernels::matmul_gelu_backward_input(Stream& stream, Tensor dpre, Tensor dout, Tensor w,
                                             Tensor pre) {
    const DType act = precision_.act;
    const int64_t O = w.dim(0), C = w.dim(1);
    const int64_t N = as_matrix(dout, "matmul_gelu_backward_input").rows;
    const Matrix md = matrix(dout, "matmul_gelu_backward_input: dout", act, N, O);
    expect(dpre, "matmul_gelu_backward_input: dpre", act, N * C);
    expect(pre, "matmul_gelu_backward_input: pre", act, N * C);
    expect(w, "matmul_gelu_backward_input: w", act, O * C);
    Product p = times(matrix(dpre, "matmul_gelu_backward_input: dpre", act, N, C), md, w);
    p.epilogue = Epilogue::gelu_backward;
    p.aux = pre.data;
    if (!fusable(pre, C) || !matmul_->try_run("matmul_gelu_backward_input", stream, p))
        Kernels::matmul_gelu_backward_input(stream, dpre, dout, w, pre);
}

void CudaKernels::matmul_backward_weight(Stream& stream, Tensor dw, Tensor db, Tensor dout,
                                         Tensor x, bool accumulate) {
    const char* name = "matmul_backward_weight";
    const DType act = precision_.act;
    const int64_t O = dw.dim(0), C = dw.dim(1), N = as_matrix(x, name).rows;
    const Matrix md = matrix(dout, "matmul_backward_weight: dout", act, N, O);
    const Matrix mx = matrix(x, "matmul_backward_weight: x", act, N, C);
    expect(dw, "matmul_backward_weight: dw", DType::f32, O * C);
    if (N == 0) {
        if (!accumulate) fill(stream, dw, 0);
        return;
    }
    matmul_->run(name, stream,
                 {.in = act,
                  .out = DType::f32,
                  .trans_b = true,
                  .m = C,
                  .n = O,
                  .k = N,
                  .a = mx.data,
                  .b = md.data,
                  .c = dw.data,
                  .d = dw.data,
                  .lda = mx.pitch,
                  .ldb = md.pitch,
                  .ldc = C,
                  .ldd = C,
                  .beta = accumulate ? 1.0f : 0.0f});
    if (!db) return;
    expect(db, "matmul_backward_weight: db", DType::f32, O);
    bias_gradient(stream, db.as<float>(), md);
}

}  // namespace torus::cuda
