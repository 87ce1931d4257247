// Softmax cross-entropy and its gradient in place, one block a row: a pass for an online maximum
// and sum (Milakov & Gimelshein 2018), and one for the gradient. Between them the row stays in
// shared memory, so that it is read from memory once; of a row too long for that, the rest is read
// again, mostly from L2. Two blocks of a multiprocessor overlap: one loads while the other
// computes.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kThreads = 512, kMostThreads = 1024;  // of a block: of a short and of a long row
constexpr int kShortBytes = 104 << 10;  // of a row: two of them fit the 227 KB of Hopper
constexpr int kGroup = 2;               // vectors of a thread that are waited for together
constexpr int kMostGroups = 7;
constexpr int kFetched = 4;  // vectors that a thread asks for at once where they are not held

template <class T>
struct Classifier {
    float* loss;
    const T* logits;
    T* dlogits;
    const int32_t* targets;
    int V, Vp;
    int held;  // vectors of each thread in shared memory
    float dloss;
    const double* loss_scale;  // optional
};

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
    __shared__ OnlineSum warps[kMostThreads / 32];
    s = warp_combine<T>(s);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    return warp_combine<T>(lane < blockDim.x / 32 ? warps[lane] : OnlineSum{-INFINITY, 0.0f});
}

template <class T, int W>
__device__ __forceinline__ OnlineSum add_vector(OnlineSum s, const Vec<T, W>& v) {
    float top = v.get(0);
#pragma unroll
    for (int k = 1; k < W; ++k) top = fmaxf(top, v.get(k));
    if (top > s.top) s = {top, s.sum * exponential<T>(s.top, top)};
    if (s.top == -INFINITY) return s;
#pragma unroll
    for (int k = 0; k < W; ++k) s.sum += exponential<T>(v.get(k), s.top);
    return s;
}

// For all but the last `groups` groups; the instruction wants a constant.
__device__ __forceinline__ void wait_copies(int groups) {
    static_assert(kMostGroups == 7);
    switch (groups) {
        case 0: return wait_copies<0>();
        case 1: return wait_copies<1>();
        case 2: return wait_copies<2>();
        case 3: return wait_copies<3>();
        case 4: return wait_copies<4>();
        case 5: return wait_copies<5>();
        default: return wait_copies<6>();
    }
}

template <class T, int W>
__global__ void __launch_bounds__(kMostThreads) classifier_kernel(const Classifier<T> a) {
    extern __shared__ uint4 held[];  // vector i of the row belongs to thread i % threads
    const int thread = int(threadIdx.x), threads = int(blockDim.x);
    const int64_t row = blockIdx.x;
    const int vectors = a.Vp / W, each = (vectors + threads - 1) / threads;
    const T* const x = a.logits + row * a.Vp;
    T* const dx = a.dlogits ? a.dlogits + row * a.Vp : nullptr;
    const int target = a.targets[row];
    if (target < 0) {  // ignored: no loss, no gradient
        if (thread == 0) a.loss[row] = 0;
        if (dx)
            for (int i = thread; i < vectors; i += threads) store(dx + i * W, Vec<T, W>::zero());
        return;
    }
    for (int j = 0; j < a.held; ++j) {
        const int i = j * threads + thread;
        copy16(&held[i], x + (i < vectors ? i * W : 0), i < vectors);
        if (j % kGroup == kGroup - 1 || j == a.held - 1) commit_copies();
    }
    const float at_target = convert<float>(x[target]);

    const auto of_held = [&](int j) {
        return reinterpret_cast<const Vec<T, W>&>(held[j * threads + thread]);
    };
    // f(i, vector i) where some of its columns are in front of V; the others become -inf.
    const auto with = [&](int j, Vec<T, W> v, auto f) {
        const int i = j * threads + thread;
        if (i * W + W <= a.V) {
            f(i, v);
        } else if (i * W < a.V) {
#pragma unroll
            for (int k = 0; k < W; ++k)
                if (i * W + k >= a.V) v.v[k] = convert<T>(-INFINITY);
            f(i, v);
        }
    };
    // The same for this thread's vectors that are not held.
    const auto with_rest = [&](auto f) {
        for (int j = a.held; j < each; j += kFetched) {
            Vec<T, W> v[kFetched];
#pragma unroll
            for (int u = 0; u < kFetched; ++u) {
                const int i = (j + u) * threads + thread;
                if (i * W < a.V) v[u] = load<W>(x + i * W);
            }
#pragma unroll
            for (int u = 0; u < kFetched; ++u) with(j + u, v[u], f);
        }
    };

    OnlineSum s{-INFINITY, 0};
    const auto add = [&](int, const Vec<T, W>& v) { s = add_vector<T, W>(s, v); };
    const int groups = (a.held + kGroup - 1) / kGroup;
    for (int g = 0; g < groups; ++g) {
        wait_copies(groups - 1 - g);
#pragma unroll
        for (int j = g * kGroup; j < (g + 1) * kGroup; ++j)
            if (j < a.held) with(j, of_held(j), add);
    }
    with_rest(add);
    s = block_combine<T>(s);  // all have read the target's logit before dlogits overwrites it
    if (thread == 0) a.loss[row] = logf(s.sum) + s.top - at_target;
    if (!dx) return;

    const float dloss = a.loss_scale ? a.dloss * float(*a.loss_scale) : a.dloss;
    const float factor = dloss / s.sum;
    const auto put = [&](int i, const Vec<T, W>& v) {
        store(dx + i * W,
              Vec<T, W>::of([&](int k) { return exponential<T>(v.get(k), s.top) * factor; }));
    };
#pragma unroll 2
    for (int j = 0; j < a.held; ++j) with(j, of_held(j), put);
    with_rest(put);
    for (int i = (a.V + W - 1) / W + thread; i < vectors; i += threads)
        store(dx + i * W, Vec<T, W>::zero());
    if (target / W % threads == thread)  // the thread that wrote that vector
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
    const int64_t row_bytes = Vp * size_of(precision_.act);
    const int64_t threads = row_bytes <= kShortBytes ? kThreads : kMostThreads;
    int64_t held = 0;  // where there is no second pass, copies would only delay the first
    if (vectors && dlogits)
        held = std::min({divide_up(row_bytes, 16 * threads), int64_t(kMostGroups * kGroup),
                         std::min<int64_t>(shared_limit() - 1024, 114 << 10) / (16 * threads)});
    dispatch_width(precision_.act, vectors, [&](auto type, auto width) {
        using T = typename decltype(type)::type;
        const Classifier<T> args{.loss = loss.as<float>(),
                                 .logits = static_cast<const T*>(logits.data),
                                 .dlogits = static_cast<T*>(dlogits.data),
                                 .targets = targets.as<int32_t>(),
                                 .V = int(V),
                                 .Vp = int(Vp),
                                 .held = int(held),
                                 .dloss = float(dloss),
                                 .loss_scale = static_cast<const double*>(loss_scale.data)};
        launch("classifier", stream,
               {.blocks = n, .threads = unsigned(threads), .shared = held * threads * 16},
               classifier_kernel<T, decltype(width)::value>, args);
    });
}

}  // namespace torus::cuda
