// Softmax cross-entropy and its gradient in place, one block a row: one read for an online maximum
// and sum (Milakov & Gimelshein 2018), a second read, which finds the row in L2, for the gradient.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kThreads = 1024;
constexpr int kFetched = 4;  // vectors that a thread asks for before it uses the first

// exp(x - top); fp32 is the exact mode, halves take the hardware's power of two.
template <class T>
__device__ __forceinline__ float exponential(float x, float top) {
    if constexpr (std::is_same_v<T, float>) return expf(x - top);
    constexpr float log2e = 1.4426950408889634f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * log2e - top * log2e));
    return y;
}

// A running maximum and the sum of exp(x - maximum); the empty one is {-inf, 0}.
struct OnlineSum {
    float top, sum;
};

template <class T>
__device__ __forceinline__ OnlineSum combine(OnlineSum a, OnlineSum b) {
    const float top = fmaxf(a.top, b.top);
    if (top == -INFINITY) return {top, 0.0f};
    return {top, a.sum * exponential<T>(a.top, top) + b.sum * exponential<T>(b.top, top)};
}

template <class T>
__device__ __forceinline__ OnlineSum warp_combine(OnlineSum s) {
    for (int lane = 16; lane > 0; lane >>= 1)
        s = combine<T>(s, {__shfl_xor_sync(0xffffffffu, s.top, lane),
                           __shfl_xor_sync(0xffffffffu, s.sum, lane)});
    return s;
}

template <class T>
__device__ __forceinline__ OnlineSum block_combine(OnlineSum s) {
    __shared__ OnlineSum warps[kThreads / 32];
    static_assert(kThreads == 32 * 32);
    s = warp_combine<T>(s);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    return warp_combine<T>(warps[threadIdx.x % 32]);
}

// This thread's part of the row's first V columns.
template <class T, int W>
__device__ __forceinline__ OnlineSum online_sum(const T* x, int V) {
    constexpr int step = kThreads * W;
    OnlineSum s{-INFINITY, 0};
    for (int first = int(threadIdx.x) * W; first < V; first += kFetched * step) {
        Vec<T, W> v[kFetched];
        // f(value) for each fetched value in front of V.
        const auto each = [&](auto f) {
#pragma unroll
            for (int u = 0; u < kFetched; ++u) {
                const int c = first + u * step;
                if (c + W <= V) {
                    for (int k = 0; k < W; ++k) f(v[u].get(k));
                } else if (c < V) {
                    for (int k = 0; k < W; ++k)
                        if (c + k < V) f(v[u].get(k));
                }
            }
        };
#pragma unroll
        for (int u = 0; u < kFetched; ++u)
            if (first + u * step < V) v[u] = load<W>(x + first + u * step);
        float top = s.top;
        each([&](float value) { top = fmaxf(top, value); });
        if (top == -INFINITY) continue;
        float sum = s.sum * exponential<T>(s.top, top);
        each([&](float value) { sum += exponential<T>(value, top); });
        s = {top, sum};
    }
    return s;
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    classifier_kernel(float* loss, const T* logits, T* dlogits, const int32_t* targets, int V,
                      int Vp, float dloss, const double* loss_scale) {
    const int64_t row = blockIdx.x;
    const int target = targets[row];
    const T* x = logits + row * Vp;
    T* dx = dlogits ? dlogits + row * Vp : nullptr;
    if (target < 0) {  // ignored: no loss, no gradient
        if (threadIdx.x == 0) loss[row] = 0;
        Vec<T, W> zero;
        for (int k = 0; k < W; ++k) zero.set(k, 0.0f);
        if (dx)
            for (int c = int(threadIdx.x) * W; c < Vp; c += kThreads * W) store(dx + c, zero);
        return;
    }
    const OnlineSum s = block_combine<T>(online_sum<T, W>(x, V));
    const float at_target = convert<float>(x[target]);
    if (threadIdx.x == 0) loss[row] = logf(s.sum) + s.top - at_target;
    if (!dx) return;
    __syncthreads();  // all have read the target's logit before dlogits overwrites it
    if (loss_scale) dloss *= float(*loss_scale);
    const float factor = dloss / s.sum;
    for (int c = int(threadIdx.x) * W; c < Vp; c += kThreads * W) {
        Vec<T, W> v = load<W>(x + c), d;
        for (int k = 0; k < W; ++k)
            d.set(k, c + k < V ? exponential<T>(v.get(k), s.top) * factor : 0.0f);
        store(dx + c, d);
    }
    if (target / W % kThreads == int(threadIdx.x))  // the thread that wrote that vector
        dx[target] = convert<T>(exponential<T>(at_target, s.top) * factor - dloss);
}

// --- launchers -----------------------------------------------------------------------------------
void CudaKernels::classifier(Stream& stream, Tensor loss, Tensor logits, Tensor dlogits,
                             Tensor targets, int64_t V, double dloss, Tensor loss_scale) {
    const int64_t n = targets.numel(), Vp = logits.dim(-1);
    expect(loss, "classifier: loss", DType::f32, n);
    expect(targets, "classifier: targets", DType::i32, n);
    expect(logits, "classifier: logits", precision_.act, n * Vp);
    if (dlogits) expect(dlogits, "classifier: dlogits", precision_.act, n * Vp);
    if (loss_scale) expect(loss_scale, "classifier: loss_scale", DType::f64, 1);
    CHECK(V > 0 && V <= Vp && Vp < int64_t(1) << 30, ": vocabulary ", V, " of ", Vp);
    const bool vectors =
        vectorizable(as_matrix(logits, "logits")) && (!dlogits || aligned16(dlogits.data));
    dispatch_width(precision_.act, vectors, [&](auto type, auto width) {
        using T = typename decltype(type)::type;
        launch("classifier", stream, {.blocks = n, .threads = kThreads},
               classifier_kernel<T, decltype(width)::value>, loss.as<float>(),
               static_cast<const T*>(logits.data), static_cast<T*>(dlogits.data),
               targets.as<int32_t>(), int(V), int(Vp), float(dloss),
               static_cast<const double*>(loss_scale.data));
    });
}

}  // namespace torus::cuda
