// LayerNorm and RMSNorm. A group of 32 to 256 threads owns a row and keeps it in registers between
// the passes, K vectors a thread: each row is read once. Going backward a fixed number of blocks
// walks over the rows; a thread always meets the same columns, so it keeps its part of dw and db in
// registers too, and a second kernel adds up the blocks in order: no atomics, the same bits every
// run. K = 0 is the form for rows that are no whole vectors or too long (C above 8192 halves): it
// reads element by element, and again for each pass.
// RMSNorm is LayerNorm without mean and bias: `mean` is then null.
#include <climits>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kThreads = 256;       // of a block at most
constexpr int kMostVectors = 4;     // of a thread
constexpr int kBackwardBlocks = 4;  // of a multiprocessor, at most

template <class T>
struct NormForward {
    T* out;
    float *mean, *rstd;
    const T *x, *w, *b;
    int64_t rows;
    int C;
    float eps;
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

// Sum over the threads of a row (x dimension of the block). `slot` alternates between calls so that
// one barrier a call is enough.
template <class V>
__device__ __forceinline__ V row_sum(V v, int slot) {
    __shared__ V warps[2][kThreads / 32];
    v = warp_sum(v);
    if (blockDim.x == 32) return v;
    const int first = threadIdx.y * (blockDim.x / 32), mine = first + threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) warps[slot][mine] = v;
    __syncthreads();
    v = warps[slot][first];
    for (int i = 1; i < int(blockDim.x / 32); ++i) v += warps[slot][first + i];
    return v;
}

// Elements of one access.
template <class T, int K>
constexpr int norm_width = K ? vector_width<T> : 1;

// The part of one row that a thread owns. Rows past the end have no columns.
template <class T, int K>
struct RowPart {
    static constexpr int W = norm_width<T, K>;
    const T* row;
    int C;  // 0 past the end
    Vec<T, W> held[K ? K : 1];

    __device__ __forceinline__ RowPart(const T* x, int64_t index, int64_t rows, int columns)
        : row(x + index * columns), C(index < rows ? columns : 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int c = int(threadIdx.x + k * blockDim.x) * W;
            if (c < C) held[k] = load<W>(row + c);
        }
    }
    // f(k, column, vector k) for all vectors of this thread; k is 0 where none are held.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        if constexpr (K > 0) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int c = int(threadIdx.x + k * blockDim.x) * W;
                if (c < C) f(k, c, held[k]);
            }
        } else {
            for (int c = int(threadIdx.x); c < C; c += int(blockDim.x)) f(0, c, load<W>(row + c));
        }
    }
    // Vector k, at column c.
    __device__ __forceinline__ Vec<T, W> at(int k, int c) const {
        if constexpr (K > 0)
            return held[k];
        else
            return load<W>(row + c);
    }
};

template <class T, int K>
__global__ void __launch_bounds__(kThreads) norm_forward_kernel(const NormForward<T> a) {
    constexpr int W = norm_width<T, K>;
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const RowPart<T, K> x(a.x, row, a.rows, a.C);
    float mean = 0;
    if (a.mean) {
        float sum = 0;
        x.each([&](int, int, const Vec<T, W>& v) {
            for (int i = 0; i < W; ++i) sum += v.get(i);
        });
        mean = row_sum(sum, 0) / float(a.C);
    }
    float squares = 0;
    x.each([&](int, int, const Vec<T, W>& v) {
        for (int i = 0; i < W; ++i) squares += (v.get(i) - mean) * (v.get(i) - mean);
    });
    const float rstd = 1.0f / sqrtf(row_sum(squares, 1) / float(a.C) + a.eps);
    const auto normed = [&](int c, const Vec<T, W>& v) {
        const Vec<T, W> w = load<W>(a.w + c);
        Vec<T, W> b, y;
        if (a.b) b = load<W>(a.b + c);
        for (int i = 0; i < W; ++i)
            y.set(i, (v.get(i) - mean) * rstd * w.get(i) + (a.b ? b.get(i) : 0.0f));
        return y;
    };
    T* const out = a.out + row * a.C;
    if constexpr (K > 0) {  // all loads before the first store, so that they wait together
        Vec<T, W> y[K];
        x.each([&](int k, int c, const Vec<T, W>& v) { y[k] = normed(c, v); });
        x.each([&](int k, int c, const Vec<T, W>&) { store(out + c, y[k]); });
    } else {
        x.each([&](int, int c, const Vec<T, W>& v) { store(out + c, normed(c, v)); });
    }
    if (row < a.rows && threadIdx.x == 0) {
        if (a.mean) a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

// Shared memory: dw[C], db[C] of each row group; during the walk only where K = 0.
template <class T, int K>
__global__ void __launch_bounds__(kThreads) norm_backward_kernel(const NormBackward<T> a) {
    constexpr int W = norm_width<T, K>;
    extern __shared__ float sums[];
    const bool layernorm = a.mean != nullptr;
    const int kinds = layernorm ? 2 : 1;
    float* const shared_dw = sums + threadIdx.y * kinds * a.C;
    float* const shared_db = shared_dw + a.C;
    float dw[K ? K : 1][W] = {}, db[K ? K : 1][W] = {};
    for (int c = int(threadIdx.x); c < kinds * a.C; c += int(blockDim.x)) shared_dw[c] = 0;
    __syncthreads();

    int slot = 0;
    for (int64_t base = int64_t(blockIdx.x) * blockDim.y; base < a.rows;
         base += int64_t(gridDim.x) * blockDim.y, slot ^= 1) {
        const int64_t row = base + threadIdx.y;
        const RowPart<T, K> x(a.x, row, a.rows, a.C), dout(a.dout, row, a.rows, a.C);
        const RowPart<T, K> before(a.dx, row, a.rows, a.C);
        const float mean = layernorm && row < a.rows ? a.mean[row] : 0.0f;
        const float rstd = row < a.rows ? a.rstd[row] : 0.0f;
        Pair s{0, 0};  // sums of dout * w and of dout * w * x_hat
        x.each([&](int k, int c, const Vec<T, W>& xv) {
            const Vec<T, W> w = load<W>(a.w + c), d = dout.at(k, c);
            for (int i = 0; i < W; ++i) {
                const float g = d.get(i), hat = (xv.get(i) - mean) * rstd;
                s.a += g * w.get(i);
                s.b += g * w.get(i) * hat;
                if constexpr (K > 0) {
                    dw[k][i] += g * hat;
                    db[k][i] += g;
                } else {
                    shared_dw[c] += g * hat;
                    if (layernorm) shared_db[c] += g;
                }
            }
        });
        s = row_sum(s, slot);
        const float mean_d = layernorm ? s.a / float(a.C) : 0.0f, mean_dx = s.b / float(a.C);
        x.each([&](int k, int c, const Vec<T, W>& xv) {
            const Vec<T, W> w = load<W>(a.w + c), d = dout.at(k, c);
            Vec<T, W> dx = before.at(k, c);
            for (int i = 0; i < W; ++i) {
                const float hat = (xv.get(i) - mean) * rstd;
                dx.set(i, dx.get(i) + rstd * (d.get(i) * w.get(i) - mean_d - hat * mean_dx));
            }
            store(a.dx + row * a.C + c, dx);
        });
    }
    if constexpr (K > 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int c = int(threadIdx.x + k * blockDim.x) * W;
            if (c >= a.C) continue;
            for (int i = 0; i < W; ++i) {
                shared_dw[c + i] = dw[k][i];
                if (layernorm) shared_db[c + i] = db[k][i];
            }
        }
    }
    __syncthreads();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    for (int c = thread; c < kinds * a.C; c += threads) {
        float total = 0;
        for (int group = 0; group < int(blockDim.y); ++group)
            total += sums[group * kinds * a.C + c];
        a.partial[int64_t(blockIdx.x) * kinds * a.C + c] = total;
    }
}

// --- launchers -----------------------------------------------------------------------------------
// How a row is shared out: threads, and vectors of each (0: element by element).
struct RowPlan {
    int threads = kThreads, vectors = 0;
};

// The plan with the fewest idle threads; of equal ones that with the most vectors a thread, which
// spend less on the sums over threads.
static RowPlan plan_row(int C, int width, bool aligned) {
    RowPlan best;
    if (!aligned || C % width != 0) return best;
    const int vectors = C / width;
    int least = INT_MAX;
    for (int threads = 32; threads <= kThreads; threads *= 2) {
        const int each = int(divide_up(vectors, threads)), idle = each * threads - vectors;
        if (each > kMostVectors || idle >= least) continue;
        best = {threads, each};
        least = idle;
    }
    return best;
}

// f(std::integral_constant<int, K>{}).
template <class F>
static void dispatch_vectors(int K, F&& f) {
    switch (K) {
        case 0: return f(std::integral_constant<int, 0>{});
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
    const dim3 block(plan.threads, kThreads / plan.threads);
    dispatch_vectors(plan.vectors, [&](auto K) {
        launch(name, stream, {.blocks = divide_up(a.rows, block.y), .threads = block},
               norm_forward_kernel<T, decltype(K)::value>, a);
    });
}

int64_t norm_workspace(const WorkspaceDims& d) {
    const int64_t blocks = kBackwardBlocks * int64_t(most_multiprocessors);
    return std::min(blocks, std::max<int64_t>(d.rows, 1)) * 2 * d.channels * 4;
}

template <class T>
static void backward(const char* name, Stream& stream, NormBackward<T> a, float* dw, float* db) {
    const int kinds = a.mean ? 2 : 1;
    const bool aligned = aligned16(a.dx) && aligned16(a.dout) && aligned16(a.x) && aligned16(a.w);
    const RowPlan plan = plan_row(a.C, vector_width<T>, aligned);
    const dim3 block(plan.threads, std::max(1, 128 / plan.threads));
    const int64_t shared = int64_t(block.y) * kinds * a.C * 4;
    CHECK(shared + 1024 <= shared_limit(), ": ", name, " of rows of ", a.C, " channels, at most ",
          (shared_limit() - 1024) / 4 / kinds);
    dispatch_vectors(plan.vectors, [&](auto K) {
        const auto kernel = norm_backward_kernel<T, decltype(K)::value>;
        // One wave: a block beyond it would start when the others end.
        const int64_t fit = std::min(resident_blocks(kernel, block, shared), kBackwardBlocks);
        const int64_t blocks =
            std::min<int64_t>(divide_up(a.rows, block.y), fit * multiprocessors());
        a.partial = static_cast<float*>(workspace(stream, blocks * kinds * a.C * 4, name));
        launch(name, stream, {.blocks = blocks, .threads = block, .shared = shared}, kernel, a);
        reduce_partials(name, stream, dw, db, a.partial, blocks, a.C);  // rows are [dw | db]
    });
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
                    static_cast<const T*>(b.data), rstd.numel(), int(w.numel()), float(eps)});
    });
}

void CudaKernels::rmsnorm_forward(Stream& stream, Tensor out, Tensor rstd, Tensor x, Tensor w,
                                  double eps) {
    const char* name = "rmsnorm_forward";
    check_norm(name, x, w, rstd, precision_.act);
    expect(out, name, precision_.act, x.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        forward<T>(
            name, stream,
            {static_cast<T*>(out.data), nullptr, rstd.as<float>(), static_cast<const T*>(x.data),
             static_cast<const T*>(w.data), nullptr, rstd.numel(), int(w.numel()), float(eps)});
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
