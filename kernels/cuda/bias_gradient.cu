// Bias gradients: column sums of a linear's output gradient, in a fixed order. (cuBLASLt can give
// them as an epilogue: beside dGELU that takes over twice the time of both apart; in the weight's
// product it costs about twice this pass at two of three sizes, docs/performance.md.)
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kColumnWarps = 8;

// One block: 32 * W columns and a share of the rows; its warps take rows in turn and add up in
// order.
template <class T, int W>
__global__ void __launch_bounds__(32 * kColumnWarps)
    column_sums_kernel(float* partial, const T* x, int64_t rows, int64_t cols, int64_t pitch,
                       int64_t tiles) {
    __shared__ float parts[kColumnWarps][32 * W];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t share = blockIdx.x / tiles, shares = gridDim.x / tiles;
    const int64_t col = (blockIdx.x % tiles * 32 + lane) * W;
    float sum[W] = {};
    if (col < cols) {
#pragma unroll 4
        for (int64_t r = share * kColumnWarps + warp; r < rows; r += shares * kColumnWarps) {
            const Vec<T, W> v = load<W>(x + r * pitch + col);
            for (int k = 0; k < W; ++k) sum[k] += v.get(k);
        }
    }
    for (int k = 0; k < W; ++k) parts[warp][k * 32 + lane] = sum[k];
    __syncthreads();
    if (warp > 0 || col >= cols) return;
    for (int w = 1; w < kColumnWarps; ++w)
        for (int k = 0; k < W; ++k) sum[k] += parts[w][k * 32 + lane];
    for (int k = 0; k < W; ++k) partial[share * cols + col + k] = sum[k];
}

// --- launchers -----------------------------------------------------------------------------------
// Shares of the rows, so that about four blocks run on each multiprocessor.
static int64_t row_shares(int64_t rows, int64_t tiles) {
    return std::clamp<int64_t>(divide_up(4 * int64_t(multiprocessors()), tiles), 1,
                               std::max<int64_t>(divide_up(rows, 4 * kColumnWarps), 1));
}

int64_t bias_gradient_workspace(const WorkspaceDims& d) {
    // shares * columns; shares * tiles is about four blocks a multiprocessor
    return (4 * int64_t(most_multiprocessors) * 32 * 8 + d.features) * 4;
}

void bias_gradient(Stream& stream, float* db, const Matrix& dout) {
    const char* name = "bias_gradient";
    dispatch_width(dout.dtype, vectorizable(dout), [&](auto type, auto width) {
        using T = typename decltype(type)::type;
        constexpr int W = decltype(width)::value;
        const int64_t tiles = divide_up(dout.cols, 32 * W), shares = row_shares(dout.rows, tiles);
        float* partial = static_cast<float*>(workspace(stream, shares * dout.cols * 4, name));
        launch(name, stream, {.blocks = shares * tiles, .threads = 32 * kColumnWarps},
               column_sums_kernel<T, W>, partial, dout.as<T>(), dout.rows, dout.cols, dout.pitch,
               tiles);
        reduce_partials(name, stream, db, nullptr, partial, shares, dout.cols);
    });
}

}  // namespace torus::cuda
