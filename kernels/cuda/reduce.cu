// Sums over whole tensors (fp64, so that a gradient norm does not depend on how it is cut), the
// optimizer's control values, and the second stage of every reduction over rows. Both stages have a
// fixed shape: the same bits each run.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kThreads = 512, kMaxBlocks = 1024;

// Sum over the block in a fixed order; the result is valid in thread 0.
static __device__ double block_sum(double x) {
    __shared__ double warps[kThreads / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    if (threadIdx.x == 0)
        for (int w = 0; w < kThreads / 32; ++w) x += warps[w];
    return x;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(double* partial, const T* x, int64_t n, bool squares, bool vectors) {
    constexpr int W = vector_width<T>;
    const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * kThreads;
    const int64_t body = vectors ? n / W : 0;
    double total = 0;
    const auto add = [&](double v) { total += squares ? v * v : v; };
    for (int64_t i = first; i < body; i += step) {
        const Vec<T, W> v = load<W>(x + i * W);
        for (int k = 0; k < W; ++k) add(double(v.get(k)));
    }
    for (int64_t i = body * W + first; i < n; i += step) add(double(convert<Acc<T>>(x[i])));
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

static __global__ void __launch_bounds__(kThreads)
    sum_final_kernel(double* out, const double* partial, int count, bool accumulate) {
    double total = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *out = accumulate ? *out + total : total;
}

// 32 columns by 32 groups of partial sums: group g adds partials g, g + 32, ...; then the groups
// are added in order.
static __global__ void __launch_bounds__(1024)
    reduce_partials_kernel(float* out, float* second, const float* partial, int64_t count,
                           int64_t cols) {
    __shared__ float groups[32][32];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const int64_t col = int64_t(blockIdx.x) * 32 + lane, width = second ? 2 * cols : cols;
    float total = 0;
    if (col < width) {
#pragma unroll 4
        for (int64_t i = group; i < count; i += 32) total += partial[i * width + col];
    }
    groups[group][lane] = total;
    __syncthreads();
    if (group > 0 || col >= width) return;
    for (int g = 1; g < 32; ++g) total += groups[g][lane];
    (col < cols ? out[col] : second[col - cols]) += total;
}

static __global__ void grad_control_kernel(double* control, const double* sum_squares,
                                           double max_norm, const LossScale rule) {
    double& scale = control[Control::loss_scale];
    const double norm = sqrt(*sum_squares) / scale;
    control[Control::norm] = norm;
    if (!isfinite(norm)) {
        control[Control::coefficient] = 0;
        control[Control::skipped] += 1;
        control[Control::skipped_now] += 1;
        control[Control::good] = 0;
        if (rule.window > 0) scale = fmax(rule.lowest, scale / 2);
        return;
    }
    const double clip = max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    control[Control::coefficient] = clip / scale;
    control[Control::applied] += 1;
    control[Control::skipped_now] = 0;
    control[Control::good] += 1;
    if (rule.window > 0 && control[Control::good] >= double(rule.window)) {
        scale = fmin(rule.highest, 2 * scale);
        control[Control::good] = 0;
    }
}

// --- launchers -----------------------------------------------------------------------------------
int64_t reduce_workspace() { return kMaxBlocks * int64_t(sizeof(double)); }

static void sum_of(const char* name, Stream& stream, const Tensor& out, const Tensor& x,
                   bool squares, bool accumulate) {
    expect(out, name, DType::f64, 1);
    expect(x, name, x.dtype, x.numel());
    double* partial = static_cast<double*>(workspace(stream, reduce_workspace(), name));
    const int64_t n = x.numel();
    const int64_t blocks =
        std::min<int64_t>(kMaxBlocks, divide_up(n * size_of(x.dtype), 16 * kThreads * 4));
    dispatch_float(x.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        launch(name, stream, {.blocks = blocks, .threads = kThreads}, sum_kernel<T>, partial,
               static_cast<const T*>(x.data), n, squares, aligned16(x.data));
    });
    launch(name, stream, {.blocks = 1, .threads = kThreads}, sum_final_kernel,
           static_cast<double*>(out.data), partial, int(blocks), accumulate);
}

void CudaKernels::sum(Stream& stream, Tensor out, Tensor x, bool accumulate) {
    sum_of("sum", stream, out, x, false, accumulate);
}

void CudaKernels::sum_squares(Stream& stream, Tensor out, Tensor x, bool accumulate) {
    sum_of("sum_squares", stream, out, x, true, accumulate);
}

void reduce_partials(const char* op, Stream& stream, float* out, float* second,
                     const float* partial, int64_t count, int64_t cols) {
    launch(op, stream, {.blocks = divide_up(second ? 2 * cols : cols, 32), .threads = 1024},
           reduce_partials_kernel, out, second, partial, count, cols);
}

void CudaKernels::grad_control(Stream& stream, Tensor control, Tensor sum_squares, double max_norm,
                               const LossScale& rule) {
    expect(control, "grad_control: control", DType::f64, Control::size);
    expect(sum_squares, "grad_control: sum_squares", DType::f64, 1);
    launch("grad_control", stream, {.blocks = 1, .threads = 1}, grad_control_kernel,
           static_cast<double*>(control.data), static_cast<const double*>(sum_squares.data),
           max_norm, rule);
}

}  // namespace torus::cuda
