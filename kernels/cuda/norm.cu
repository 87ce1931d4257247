// LayerNorm and RMSNorm. A row belongs to a group of threads, one warp or a few, which keep it in
// registers between the passes, K vectors a thread: each row is read once. Forward, a group has one
// row; other groups hide its waiting. Backward, a fixed number of groups walks over the rows, so
// that a thread meets the same columns in each and keeps its part of dw and db in registers; there
// are few of them, so each asks for its next rows ahead, by asynchronous copies into shared memory.
// A second kernel adds up the blocks in order: no atomics, the same bits every run.
// The "long" kernels are for rows that a group cannot hold, or that are no whole aligned vectors:
// a block has a row and reads it again in each pass, mostly from the caches.
// RMSNorm is LayerNorm without mean and bias: `mean` is then null.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kMostVectors = 4;     // of a thread
constexpr int kMostWarps = 8;       // of a row
constexpr int kBlockThreads = 128;  // of a block, where a row is one warp
constexpr int kLongThreads = 512;   // of a block of the long kernels, at most
constexpr int kAhead = 2;           // rows that a group of the backward pass has asked for
constexpr int kBackwardBlocks = 4;  // of a multiprocessor, at most

// Forward blocks of 256 threads that must fit a multiprocessor: as many registers as the vectors
// need without spilling, 64 or 80.
constexpr int forward_blocks(int K) { return K < kMostVectors ? 4 : 3; }

template <class T>
struct NormForward {
    T* out;
    float *mean, *rstd;
    const T *x, *w, *b;
    int64_t rows;
    int C;
    float eps, over_C;  // 1 / C
};

template <class T>
struct NormBackward {
    T* dx;
    float* partial;  // (blocks, 2 or 1, C): dw, then db unless RMSNorm
    const T *dout, *x, *w;
    const float *mean, *rstd;
    int64_t rows;
    int C;
};

struct Pair {
    float a, b;
    __device__ void operator+=(const Pair& o) {
        a += o.a;
        b += o.b;
    }
};
__device__ __forceinline__ Pair warp_sum(Pair x) { return {warp_sum(x.a), warp_sum(x.b)}; }

// Sum over the threads of a row: the x dimension of the block, which has one row unless a row is
// one warp. `slot` alternates between calls so that one barrier a call is enough.
template <class V>
__device__ __forceinline__ V row_sum(V v, int slot) {
    __shared__ V warps[2][kLongThreads / 32];
    v = warp_sum(v);
    if (blockDim.x == 32) return v;
    if (threadIdx.x % 32 == 0) warps[slot][threadIdx.x / 32] = v;
    __syncthreads();
    v = warps[slot][0];
    for (int i = 1; i < int(blockDim.x / 32); ++i) v += warps[slot][i];
    return v;
}

// The columns of a thread in a row held by its group: W from each of at(0), ... at(K - 1), which
// are a constant apart. Only those with live[k] are in the row; the others hold zeros.
template <class T, int K>
struct Columns {
    static constexpr int W = vector_width<T>;
    int first;
    bool live[K];

    __device__ __forceinline__ explicit Columns(int C)
        : first(int(threadIdx.x / 32 * K * 32 + threadIdx.x % 32) * W) {
#pragma unroll
        for (int k = 0; k < K; ++k) live[k] = at(k) < C;
    }
    __device__ __forceinline__ int at(int k) const { return first + k * 32 * W; }
    __device__ __forceinline__ void read(Vec<T, W> (&v)[K], const T* row) const {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            v[k] = Vec<T, W>::zero();
            if (live[k]) v[k] = load<W>(row + at(k));
        }
    }
    __device__ __forceinline__ void write(T* row, const Vec<T, W> (&v)[K]) const {
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (live[k]) store(row + at(k), v[k]);
    }
    // f(k, i) for all of them, unrolled.
    template <class F>
    __device__ __forceinline__ static void each(F f) {
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
            for (int i = 0; i < W; ++i) f(k, i);
    }
};

template <class T, int K>
__global__ void __launch_bounds__(32 * kMostWarps, forward_blocks(K))
    norm_forward_kernel(const NormForward<T> a) {
    constexpr int W = vector_width<T>;
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.rows) return;
    const Columns<T, K> columns(a.C);
    Vec<T, W> x[K], w[K], b[K];
    columns.read(x, a.x + row * a.C);
    columns.read(w, a.w);  // with x, so that they wait together
    if (a.b) columns.read(b, a.b);
    float mean = 0, squares[2] = {};  // two sums, which do not wait for each other
    if (a.mean) {
        float sum[2] = {};
        columns.each([&](int k, int i) { sum[i % 2] += x[k].get(i); });
        mean = row_sum(sum[0] + sum[1], 0) * a.over_C;
    }
    columns.each([&](int k, int i) {
        const float d = columns.live[k] ? x[k].get(i) - mean : 0.0f;
        squares[i % 2] += d * d;
    });
    const float rstd = rsqrtf(row_sum(squares[0] + squares[1], 1) * a.over_C + a.eps);
    T* const out = a.out + row * a.C;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto y = Vec<T, W>::of([&](int i) {
            const float scaled = (x[k].get(i) - mean) * rstd * w[k].get(i);
            return a.b ? scaled + b[k].get(i) : scaled;
        });
        if (columns.live[k]) store(out + columns.at(k), y);
    }
    if (threadIdx.x == 0) {
        if (a.mean) a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

// W: vectors, or single elements.
template <class T, int W>
__global__ void __launch_bounds__(kLongThreads) norm_forward_long_kernel(const NormForward<T> a) {
    const int64_t row = blockIdx.x;
    const T* const x = a.x + row * a.C;
    const auto each = [&](auto f) {
#pragma unroll 4
        for (int c = int(threadIdx.x) * W; c < a.C; c += int(blockDim.x) * W) f(c, load<W>(x + c));
    };
    float mean = 0, squares = 0;
    if (a.mean) {
        float sum = 0;
        each([&](int, const Vec<T, W>& v) {
            for (int i = 0; i < W; ++i) sum += v.get(i);
        });
        mean = row_sum(sum, 0) * a.over_C;
    }
    each([&](int, const Vec<T, W>& v) {
        for (int i = 0; i < W; ++i) squares += (v.get(i) - mean) * (v.get(i) - mean);
    });
    const float rstd = rsqrtf(row_sum(squares, 1) * a.over_C + a.eps);
    each([&](int c, const Vec<T, W>& v) {
        const Vec<T, W> w = load<W>(a.w + c), b = a.b ? load<W>(a.b + c) : Vec<T, W>::zero();
        store(a.out + row * a.C + c,
              Vec<T, W>::of([&](int i) { return (v.get(i) - mean) * rstd * w.get(i) + b.get(i); }));
    });
    if (threadIdx.x == 0) {
        if (a.mean) a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

// A gradient behind the weight. Never folded into a sum, so that the mean of equal gradients is
// that gradient, and g - mean(g) vanishes.
__device__ __forceinline__ float weighted(float d, float w) { return __fmul_rn(d, w); }

// dx = before + rstd * (g - mean(g) - hat * mean(g * hat)) with g = dout * w, hat = (x - mean) *
// rstd, and means over the row; no mean(g) in RMSNorm. g - mean(g) first: where x hardly varies
// rstd is large, and rstd * g and rstd * mean(g) would each round to more than their difference.
struct RowGradient {
    float mean, rstd, shift, slope;

    __device__ RowGradient(float mean_, float rstd_, Pair sums, int C, bool layernorm)
        : mean(mean_),
          rstd(rstd_),
          shift(layernorm ? sums.a / float(C) : 0.0f),
          slope(rstd * rstd * rstd * sums.b / float(C)) {}
    // sums: of g and of g * (x - mean)
    __device__ __forceinline__ float operator()(float before, float x, float g) const {
        return before + rstd * (g - shift) - slope * (x - mean);
    }
};

// Shared memory: kAhead slots of x, dout and dx of the rows to come, each thread's vectors side by
// side with those of its neighbours; in the end dw[C], db[C] of each group.
template <class T, int K>
__global__ void __launch_bounds__(32 * kMostWarps) norm_backward_kernel(const NormBackward<T> a) {
    constexpr int W = vector_width<T>;
    extern __shared__ uint4 slots[];
    const bool layernorm = a.mean != nullptr;
    const int threads = int(blockDim.x * blockDim.y);
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    const int64_t step = int64_t(gridDim.x) * blockDim.y;
    const Columns<T, K> columns(a.C);
    const auto vectors = [&](int slot, int k) {
        return slots + (slot * K + k) * 3 * threads + thread;
    };

    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, coming = row;
    const auto ask = [&](int slot) {  // for row `coming`
        if (coming < a.rows) {
            const int64_t at = coming * a.C + columns.first;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                uint4* const to = vectors(slot, k);
                const int64_t from = columns.live[k] ? at + k * 32 * W : 0;
                copy16(to, a.x + from, columns.live[k]);
                copy16(to + threads, a.dout + from, columns.live[k]);
                copy16(to + 2 * threads, a.dx + from, columns.live[k]);
            }
        }
        commit_copies();
        coming += step;
    };
    for (int slot = 0; slot < kAhead; ++slot) ask(slot);
    float next_mean = 0, next_rstd = 0;
    const auto ask_statistics = [&](int64_t of) {
        if (of >= a.rows) return;
        if (layernorm) next_mean = a.mean[of];
        next_rstd = a.rstd[of];
    };
    ask_statistics(row);
    Vec<T, W> w[K];
    columns.read(w, a.w);
    float dw[K][W] = {}, db[K][W] = {};

    for (int slot = 0, turn = 0; row < a.rows; row += step, turn ^= 1) {
        const float mean = next_mean, rstd = next_rstd;
        ask_statistics(row + step);
        wait_copies<kAhead - 1>();
        Vec<T, W> x[K], d[K], dx[K];
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const uint4* const from = vectors(slot, k);
            x[k] = reinterpret_cast<const Vec<T, W>&>(from[0]);
            d[k] = reinterpret_cast<const Vec<T, W>&>(from[threads]);
            dx[k] = reinterpret_cast<const Vec<T, W>&>(from[2 * threads]);
        }
        Pair sums{0, 0};
        columns.each([&](int k, int i) {
            const float g = weighted(d[k].get(i), w[k].get(i)), centred = x[k].get(i) - mean;
            sums.a += g;
            sums.b += g * centred;
            dw[k][i] += d[k].get(i) * rstd * centred;
        });
        if (layernorm) columns.each([&](int k, int i) { db[k][i] += d[k].get(i); });
        const RowGradient gradient(mean, rstd, row_sum(sums, turn), a.C, layernorm);
#pragma unroll
        for (int k = 0; k < K; ++k)
            dx[k] = Vec<T, W>::of([&](int i) {
                return gradient(dx[k].get(i), x[k].get(i), weighted(d[k].get(i), w[k].get(i)));
            });
        columns.write(a.dx + row * a.C, dx);
        ask(slot);
        slot = slot + 1 == kAhead ? 0 : slot + 1;
    }
    wait_copies<0>();
    __syncthreads();
    const int width = layernorm ? 2 * a.C : a.C;
    float* const groups = reinterpret_cast<float*>(slots);
    float* const mine = groups + threadIdx.y * width;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (!columns.live[k]) continue;
        float* const to = mine + columns.at(k);
        reinterpret_cast<Vec<float, W>&>(*to) = reinterpret_cast<const Vec<float, W>&>(dw[k]);
        if (layernorm)
            reinterpret_cast<Vec<float, W>&>(to[a.C]) =
                reinterpret_cast<const Vec<float, W>&>(db[k]);
    }
    __syncthreads();
    for (int c = thread; c < width; c += threads) {
        float total = 0;
        for (int group = 0; group < int(blockDim.y); ++group) total += groups[group * width + c];
        a.partial[int64_t(blockIdx.x) * width + c] = total;
    }
}

// Shared memory: dw[C], db[C]. A thread owns their columns that it reads.
template <class T, int W>
__global__ void __launch_bounds__(kLongThreads) norm_backward_long_kernel(const NormBackward<T> a) {
    extern __shared__ uint4 owned[];
    float *const dw = reinterpret_cast<float*>(owned), *const db = dw + a.C;
    const bool layernorm = a.mean != nullptr;
    const auto each = [&](auto f) {
#pragma unroll 2
        for (int c = int(threadIdx.x) * W; c < a.C; c += int(blockDim.x) * W) f(c);
    };
    const auto add = [](float* sums, auto f) {
        Vec<float, W>& s = reinterpret_cast<Vec<float, W>&>(*sums);
        s = Vec<float, W>::of([&](int i) { return s.v[i] + f(i); });
    };
    const int width = layernorm ? 2 * a.C : a.C;
    for (int c = int(threadIdx.x); c < width; c += int(blockDim.x)) dw[c] = 0;
    __syncthreads();
    int turn = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        const T *const x = a.x + row * a.C, *const dout = a.dout + row * a.C;
        T* const dx = a.dx + row * a.C;
        const float mean = layernorm ? a.mean[row] : 0.0f, rstd = a.rstd[row];
        Pair sums{0, 0};
        each([&](int c) {
            const Vec<T, W> v = load<W>(x + c), d = load<W>(dout + c), w = load<W>(a.w + c);
            for (int i = 0; i < W; ++i) {
                const float g = weighted(d.get(i), w.get(i));
                sums.a += g;
                sums.b += g * (v.get(i) - mean);
            }
            add(dw + c, [&](int i) { return d.get(i) * rstd * (v.get(i) - mean); });
            if (layernorm) add(db + c, [&](int i) { return d.get(i); });
        });
        const RowGradient gradient(mean, rstd, row_sum(sums, turn), a.C, layernorm);
        each([&](int c) {
            const Vec<T, W> v = load<W>(x + c), d = load<W>(dout + c), w = load<W>(a.w + c);
            const Vec<T, W> before = load<W>(dx + c);
            store(dx + c, Vec<T, W>::of([&](int i) {
                      return gradient(before.get(i), v.get(i), weighted(d.get(i), w.get(i)));
                  }));
        });
    }
    __syncthreads();
    for (int c = int(threadIdx.x); c < width; c += int(blockDim.x))
        a.partial[int64_t(blockIdx.x) * width + c] = dw[c];
}

// --- launchers -----------------------------------------------------------------------------------
// How a row is shared out. vectors: of each thread, 0 for the long kernels. width: elements of an
// access.
struct RowPlan {
    int vectors, width;
    dim3 block;
};

static RowPlan plan_row(int C, int width, bool aligned) {
    if (!aligned || C % width != 0) width = 1;
    const int vectors = C / width, warps = int(divide_up(vectors, 32 * kMostVectors));
    if (width > 1 && warps <= kMostWarps) {
        const int each = int(divide_up(vectors, 32 * warps));
        return {each, width, warps == 1 ? dim3(32, kBlockThreads / 32) : dim3(32 * warps)};
    }
    return {0, width, dim3(std::min(kLongThreads, int(divide_up(vectors, 32)) * 32))};
}

// f(std::integral_constant<int, K>{}).
template <class F>
static void dispatch_vectors(int K, F&& f) {
    switch (K) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        default: return f(std::integral_constant<int, kMostVectors>{});
    }
}

template <class T>
static void forward(const char* name, Stream& stream, const NormForward<T>& a) {
    const bool aligned = aligned16(a.out) && aligned16(a.x) && aligned16(a.w) && aligned16(a.b);
    const RowPlan plan = plan_row(a.C, vector_width<T>, aligned);
    const Grid grid{.blocks = divide_up(a.rows, plan.block.y), .threads = plan.block};
    if (plan.vectors > 0)
        dispatch_vectors(plan.vectors, [&](auto K) {
            launch(name, stream, grid, norm_forward_kernel<T, decltype(K)::value>, a);
        });
    else if (plan.width > 1)
        launch(name, stream, grid, norm_forward_long_kernel<T, vector_width<T>>, a);
    else
        launch(name, stream, grid, norm_forward_long_kernel<T, 1>, a);
}

int64_t norm_workspace(const WorkspaceDims& d) {
    const int64_t blocks = kBackwardBlocks * int64_t(most_multiprocessors);
    return std::min(blocks, std::max<int64_t>(d.rows, 1)) * 2 * d.channels * 4;
}

template <class T>
static void backward(const char* name, Stream& stream, NormBackward<T> a, float* dw, float* db) {
    const bool aligned = aligned16(a.dx) && aligned16(a.dout) && aligned16(a.x) && aligned16(a.w);
    const RowPlan plan = plan_row(a.C, vector_width<T>, aligned);
    const int64_t groups = plan.block.y, sums = (a.mean ? 2 : 1) * int64_t(a.C) * 4;
    const int64_t ahead = int64_t(kAhead) * plan.vectors * 3 * plan.block.x * groups * 16;
    const int64_t shared = std::max(groups * sums, ahead);
    CHECK(shared + 1024 <= shared_limit(), ": ", name, " of rows of ", a.C, " channels, at most ",
          (shared_limit() - 1024) * a.C / sums);
    const auto walk = [&](auto kernel) {
        // One wave: a block beyond it would start when the others end.
        const int64_t fit = std::min(resident_blocks(kernel, plan.block, shared), kBackwardBlocks);
        const int64_t blocks = std::min(divide_up(a.rows, groups), fit * multiprocessors());
        a.partial = static_cast<float*>(workspace(stream, blocks * sums, name));
        launch(name, stream, {.blocks = blocks, .threads = plan.block, .shared = shared}, kernel,
               a);
        reduce_partials(name, stream, dw, db, a.partial, blocks, a.C);  // rows are [dw | db]
    };
    if (plan.vectors > 0)
        dispatch_vectors(plan.vectors,
                         [&](auto K) { walk(norm_backward_kernel<T, decltype(K)::value>); });
    else if (plan.width > 1)
        walk(norm_backward_long_kernel<T, vector_width<T>>);
    else
        walk(norm_backward_long_kernel<T, 1>);
}

static void check_norm(const char* name, const Tensor& like, const Tensor& w, const Tensor& stat,
                       DType act) {
    const int64_t C = w.numel();
    CHECK(C > 0 && like.dim(-1) == C, ": ", name, " of ", like.shape.str(), " with ", C,
          " weights");
    expect(like, name, act, like.numel());
    expect(w, name, act, C);
    expect(stat, name, DType::f32, like.numel() / C);
}

void CudaKernels::layernorm_forward(Stream& stream, Tensor out, Tensor mean, Tensor rstd, Tensor x,
                                    Tensor w, Tensor b, double eps) {
    const char* name = "layernorm_forward";
    check_norm(name, x, w, rstd, precision_.act);
    expect(out, name, precision_.act, x.numel());
    expect(mean, name, DType::f32, rstd.numel());
    expect(b, name, precision_.act, w.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        forward<T>(name, stream,
                   {static_cast<T*>(out.data), mean.as<float>(), rstd.as<float>(),
                    static_cast<const T*>(x.data), static_cast<const T*>(w.data),
                    static_cast<const T*>(b.data), rstd.numel(), int(w.numel()), float(eps),
                    1.0f / float(w.numel())});
    });
}

void CudaKernels::rmsnorm_forward(Stream& stream, Tensor out, Tensor rstd, Tensor x, Tensor w,
                                  double eps) {
    const char* name = "rmsnorm_forward";
    check_norm(name, x, w, rstd, precision_.act);
    expect(out, name, precision_.act, x.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        forward<T>(name, stream,
                   {static_cast<T*>(out.data), nullptr, rstd.as<float>(),
                    static_cast<const T*>(x.data), static_cast<const T*>(w.data), nullptr,
                    rstd.numel(), int(w.numel()), float(eps), 1.0f / float(w.numel())});
    });
}

void CudaKernels::layernorm_backward(Stream& stream, Tensor dx, Tensor dw, Tensor db, Tensor dout,
                                     Tensor x, Tensor w, Tensor mean, Tensor rstd) {
    const char* name = "layernorm_backward";
    check_norm(name, x, w, rstd, precision_.act);
    expect(dx, name, precision_.act, x.numel());
    expect(dout, name, precision_.act, x.numel());
    expect(mean, name, DType::f32, rstd.numel());
    expect(dw, name, DType::f32, w.numel());
    expect(db, name, DType::f32, w.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        backward<T>(name, stream,
                    {static_cast<T*>(dx.data), nullptr, static_cast<const T*>(dout.data),
                     static_cast<const T*>(x.data), static_cast<const T*>(w.data), mean.as<float>(),
                     rstd.as<float>(), rstd.numel(), int(w.numel())},
                    dw.as<float>(), db.as<float>());
    });
}

void CudaKernels::rmsnorm_backward(Stream& stream, Tensor dx, Tensor dw, Tensor dout, Tensor x,
                                   Tensor w, Tensor rstd) {
    const char* name = "rmsnorm_backward";
    check_norm(name, x, w, rstd, precision_.act);
    expect(dx, name, precision_.act, x.numel());
    expect(dout, name, precision_.act, x.numel());
    expect(dw, name, DType::f32, w.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        backward<T>(name, stream,
                    {static_cast<T*>(dx.data), nullptr, static_cast<const T*>(dout.data),
                     static_cast<const T*>(x.data), static_cast<const T*>(w.data), nullptr,
                     rstd.as<float>(), rstd.numel(), int(w.numel())},
                    dw.as<float>(), nullptr);
    });
}

}  // namespace torus::cuda
