// Shared by the portable attention kernels (sm_80 and up; kernels/cuda/flash has the Hopper ones):
// arguments, the visibility rule as ranges of keys, tiles in shared memory, and mma.sync m16n8k16
// with its fragment layouts. Rows of a tile are padded by 16 bytes, so that the eight rows of an
// ldmatrix fall into different banks for every head dim used.
#pragma once
#include "kernels/cuda/common.cuh"
#include "kernels/kernels.h"

namespace torus::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kWarps = 4, kRows = 16 * kWarps;  // of a block, and rows that it owns

// (B,T,H,D) with strides in elements.
template <class T>
struct Heads {
    T* data;
    int64_t batch, row, head;
    __device__ T* at(int64_t b, int64_t t, int64_t h) const {
        return data + b * batch + t * row + h * head;
    }
};
template <class T>
Heads<T> heads_of(const Tensor& t) {
    return {static_cast<T*>(t.data), t.pitch(0), t.pitch(1), t.pitch(2)};
}
// A (B,H,T) tensor seen as (B,T,H,1).
template <class T>
Heads<T> stats_of(const Tensor& t) {
    return {static_cast<T*>(t.data), t.pitch(0), 1, t.pitch(1)};
}

// Smallest and largest first_key over each run of `rows` queries, (B, tiles); see attention.cu.
struct TileKeys {
    const int32_t *least = nullptr, *most = nullptr;
    int64_t tiles = 0;
};

// Dims and mask of a call. Query row i sees keys [first(i), last(i)], local numbers.
struct AttnShape {
    int64_t B, Tq, Tk, H, Hk, D;
    int64_t shift;  // q0 - k0
    int64_t k0;
    const int32_t* first_key;  // (B,Tq) or null
    int64_t first_key_pitch;
    TileKeys tile_keys;
    bool causal;
    bool vectors;  // all rows are whole 16-byte vectors
    float scale;

    __device__ int first(int64_t b, int64_t row) const {
        if (!first_key || row >= Tq) return 0;
        return clip(first_key[b * first_key_pitch + row] - k0);
    }
    __device__ int last(int64_t row) const {
        return int(causal ? min(max(row + shift, int64_t(-1)), Tk - 1) : Tk - 1);
    }
    __device__ int clip(int64_t key) const { return int(min(max(key, int64_t(0)), Tk)); }
};

template <class T>
struct ForwardArgs {
    AttnShape s;
    Heads<const T> q, k, v;
    Heads<T> o;
    Heads<float> running;  // with carry: o
    Heads<float> lse;
    bool carry;
};

template <class T>
struct BackwardArgs {
    AttnShape s;
    Heads<const T> q, k, v, dout;
    Heads<const float> lse, delta;
    Heads<T> dq, dk, dv;
    Heads<float> dq_sum, dk_sum, dv_sum;  // with `wide`, instead of these
    bool wide, add_q, add_kv;
};

// Launchers of each family of kernels. The mma.sync ones want s.tile_keys in tiles of kRows queries
// forward and of attention_backward_rows(D) backward.
int attention_backward_rows(int64_t D);
void attention_forward_mma(Stream&, const Attn&, const AttnShape&);
void attention_backward_mma(Stream&, const AttnGrad&, const AttnShape&);
void attention_forward_fp32(Stream&, const Attn&, const AttnShape&);
void attention_backward_fp32(Stream&, const AttnGrad&, const AttnShape&);

// Writes the gradient of two neighbouring columns, d and d + 1.
template <class T>
__device__ __forceinline__ void store_gradient(const Heads<T>& out, const Heads<float>& sum,
                                               bool wide, bool add, int64_t b, int64_t t, int64_t h,
                                               int64_t d, int64_t D, float x0, float x1) {
    if (wide) {
        float* p = sum.at(b, t, h) + d;
        if (d < D) p[0] = add ? p[0] + x0 : x0;
        if (d + 1 < D) p[1] = add ? p[1] + x1 : x1;
    } else {
        T* p = out.at(b, t, h) + d;
        if (d < D) p[0] = convert<T>(x0);
        if (d + 1 < D) p[1] = convert<T>(x1);
    }
}

#ifdef __CUDACC__
// --- tiles in shared memory ----------------------------------------------------------------------
// Rows [first, first + N) of one head into a tile of D columns (padded head dim), zeros where the
// tensor ends. The block copies together; asynchronous when rows are whole vectors.
template <int N, int D, class T>
__device__ void load_tile(T* tile, const Heads<const T>& x, int64_t b, int64_t h, int64_t first,
                          int64_t rows, int64_t dims, bool vectors) {
    constexpr int pitch = D + 8, chunks = D / 8;
    if (vectors) {
        for (int i = threadIdx.x; i < N * chunks; i += 32 * kWarps) {
            const int r = i / chunks, c = i % chunks * 8;
            const bool valid = first + r < rows && c < dims;
            copy16(tile + r * pitch + c, x.at(b, valid ? first + r : 0, h) + (valid ? c : 0),
                   valid);
        }
    } else {
        for (int i = threadIdx.x; i < N * D; i += 32 * kWarps) {
            const int r = i / D, c = i % D;
            tile[r * pitch + c] =
                first + r < rows && c < dims ? x.at(b, first + r, h)[c] : convert<T>(0.0f);
        }
    }
}

// --- tensor cores --------------------------------------------------------------------------------
// Fragments of one warp. Accumulator c of a 16 x 8 tile: lane l holds rows l/4 and l/4 + 8, columns
// 2 (l%4) and the next.
using Fragment = uint32_t[4];

__device__ __forceinline__ void load_matrices(Fragment& r, const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}
__device__ __forceinline__ void load_matrices_transposed(Fragment& r, const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment& a, uint32_t b0,
                                             uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc (16 x N) += rows (16 x D) * tile (N x D)^T; `rows` points at this warp's 16 rows.
template <int N, int D, class T>
__device__ __forceinline__ void rows_times_tile(float (&acc)[N / 8][4], const T* rows,
                                                const T* tile) {
    constexpr int pitch = D + 8;
    const int lane = threadIdx.x % 32;
    const T* a_at = rows + lane % 16 * pitch + lane / 16 * 8;
    const T* b_at = tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        Fragment a, b;
        load_matrices(a, a_at + k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            load_matrices(b, b_at + n * pitch + k);
            multiply_add<T>(acc[n / 8], a, b[0], b[1]);
            multiply_add<T>(acc[n / 8 + 1], a, b[2], b[3]);
        }
    }
}

// acc (16 x C) += weights (16 x N, accumulators rounded to T) * tile (N x D)[:, C columns].
template <int N, int C, int D, class T>
__device__ __forceinline__ void weights_times_tile(float (&acc)[C / 8][4],
                                                   const float (&weights)[N / 8][4],
                                                   const T* tile) {
    constexpr int pitch = D + 8;
    const int lane = threadIdx.x % 32;
    const T* b_at = tile + lane % 16 * pitch + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        const auto& left = weights[k / 8];
        const auto& right = weights[k / 8 + 1];
        const Fragment a = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]),
                            pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
#pragma unroll
        for (int c = 0; c < C; c += 16) {
            Fragment b;
            load_matrices_transposed(b, b_at + k * pitch + c);
            multiply_add<T>(acc[c / 8], a, b[0], b[1]);
            multiply_add<T>(acc[c / 8 + 1], a, b[2], b[3]);
        }
    }
}

template <int N>
__device__ __forceinline__ void clear(float (&acc)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][e] = 0;
}

// Sum and maximum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
#endif

// Calls f(padded head dim) with the smallest one that holds D.
template <class F>
void dispatch_head_dim(int64_t D, F&& f) {
    if (D <= 32)
        f(std::integral_constant<int, 32>{});
    else if (D <= 64)
        f(std::integral_constant<int, 64>{});
    else if (D <= 96)
        f(std::integral_constant<int, 96>{});
    else if (D <= 128)
        f(std::integral_constant<int, 128>{});
    else if (D <= 192)
        f(std::integral_constant<int, 192>{});
    else
        f(std::integral_constant<int, 256>{});
}

}  // namespace torus::cuda
