// The small kernels around the attention backward: `measure` finds the largest keys and values of
// each head (for the units of dq), `prepare` lays out what the main kernel reads per query row and
// clears the sums, `find` divides the keys when there is a first_key, and `finish` turns the
// sums into dq. All are bound by memory traffic and small beside the main kernel.
#pragma once
#include "kernels/cuda/flash/backward.cuh"
#include "kernels/cuda/flash/documents.cuh"

namespace torus::flash {

constexpr int pass_threads = 256;

DEVICE float keep_nan_max(float a, float b) { return a > b || a != a ? a : b; }

// The lanes that read a row of a tile's columns, eight each, and a power of two.
constexpr int row_lanes(int D) { return D == 64 ? 8 : 16; }

// Eight consecutive 16-bit values as floats; zeros when they are not there.
template <class T>
DEVICE void load8(const T* from, bool there, float (&x)[8]) {
    const uint4 raw = there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    UNROLL for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        } else {
            const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            x[2 * i] = y.x, x[2 * i + 1] = y.y;
        }
    }
}

// Grid (chunks, B * Hk): a chunk of keys of one head.
template <class T, int D, bool Exact>
__global__ void __launch_bounds__(pass_threads) measure_kernel(const BackwardParams p) {
    constexpr int lanes = row_lanes(D), rows = pass_threads / lanes;
    __shared__ float2 part[pass_threads / 32];
    const int head = blockIdx.y, batch = head / p.kv_heads, h = head % p.kv_heads;
    const int size = (p.mask.keys + p.chunks - 1) / p.chunks;
    const int first = blockIdx.x * size, last = min(first + size, p.mask.keys);
    const T* const k = static_cast<const T*>(p.k_data) + batch * p.k_pitch.batch +
                       h * p.k_pitch.head + threadIdx.x % lanes * 8;
    const T* const v = static_cast<const T*>(p.v_data) + batch * p.v_pitch.batch +
                       h * p.v_pitch.head + threadIdx.x % lanes * 8;
    const bool there = Exact || threadIdx.x % lanes * 8 < p.head_dim;
    float largest = 0, norm = 0;
    for (int row0 = first; row0 < last; row0 += rows) {
        const int row = min(row0 + int(threadIdx.x) / lanes, last - 1);  // whole warps take part
        float x[8], y[8], sum = 0;
        load8(k + row * p.k_pitch.row, there, x);
        load8(v + row * p.v_pitch.row, there, y);
        UNROLL for (int i = 0; i < 8; ++i) {
            largest = keep_nan_max(fabsf(x[i]), largest);
            sum = fmaf(y[i], y[i], sum);
        }
        UNROLL for (int n = lanes / 2; n > 0; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
        norm = keep_nan_max(sum, norm);
    }
    UNROLL for (int n = 16; n > 0; n /= 2) {
        largest = keep_nan_max(__shfl_xor_sync(~0u, largest, n), largest);
        norm = keep_nan_max(__shfl_xor_sync(~0u, norm, n), norm);
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = make_float2(largest, norm);
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < pass_threads / 32; ++i) {
        largest = keep_nan_max(part[i].x, largest);
        norm = keep_nan_max(part[i].y, norm);
    }
    p.maxima[int64_t(head) * p.chunks + blockIdx.x] = make_float2(largest, norm);
}

// The bits of three bf16 numbers, the largest first, whose sum is x to 2^-24.
DEVICE uint3 in_three(float x) {
    uint32_t bits[3];
    UNROLL for (int i = 0; i < 3; ++i) {
        const __nv_bfloat16 part = __float2bfloat16_rn(x);
        bits[i] = __bfloat16_as_ushort(part);
        x -= __bfloat162float(part);
    }
    return make_uint3(bits[0], bits[1], bits[2]);
}

// One block per (batch, head, query tile).
template <class Tile>
__global__ void __launch_bounds__(pass_threads) prepare_kernel(const BackwardParams p) {
    using T = typename Tile::Element;
    constexpr int D = Tile::d, M = Tile::m;
    constexpr int lanes = row_lanes(D), rows = pass_threads / lanes;
    __shared__ float norms[M];
    __shared__ float2 top;
    __shared__ int low_min, low_max;
    const int tile = blockIdx.x, bh = tile / p.m_tiles, m = tile % p.m_tiles;
    const int batch = bh / p.heads, head = bh % p.heads, warp = threadIdx.x / 32;
    if (tile == 0 && threadIdx.x == 0 && p.counter) *p.counter = 0;
    const int64_t flags = int64_t(p.batches) * p.kv_heads * p.key_units * 4;
    for (int64_t i = int64_t(tile) * pass_threads + threadIdx.x; i < flags;
         i += int64_t(gridDim.x) * pass_threads)
        p.flags[i] = 0;
    if (threadIdx.x == 0) low_min = p.mask.keys, low_max = 0;
    if (Tile::sum != Sum::plain && warp == 0) {
        const float2* const from =
            p.maxima + int64_t(batch * p.kv_heads + head / p.group) * p.chunks;
        float2 x = make_float2(0, 0);
        for (int i = threadIdx.x; i < p.chunks; i += 32)
            x.x = keep_nan_max(from[i].x, x.x), x.y = keep_nan_max(from[i].y, x.y);
        UNROLL for (int n = 16; n > 0; n /= 2) {
            x.x = keep_nan_max(__shfl_xor_sync(~0u, x.x, n), x.x);
            x.y = keep_nan_max(__shfl_xor_sync(~0u, x.y, n), x.y);
        }
        if (threadIdx.x == 0) top = x;
    }
    if constexpr (Tile::sum != Sum::plain) {
        const T* const dout = static_cast<const T*>(p.dout_data) + batch * p.dout_pitch.batch +
                              head * p.dout_pitch.head + threadIdx.x % lanes * 8;
        const bool there = Tile::exact || threadIdx.x % lanes * 8 < p.head_dim;
        UNROLL for (int r = threadIdx.x / lanes; r < M; r += rows) {
            const int row = min(m * M + r, p.mask.queries - 1);
            float x[8], sum = 0;
            load8(dout + row * p.dout_pitch.row, there, x);
            UNROLL for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
            UNROLL for (int n = lanes / 2; n > 0; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
            if (threadIdx.x % lanes == 0) norms[r] = sqrtf(sum);
        }
    }
    int4* const sums = static_cast<int4*>(p.sums) + int64_t(tile) * (M * D / 4);
    UNROLL for (int i = threadIdx.x; i < M * D / 4; i += pass_threads) sums[i] =
        make_int4(0, 0, 0, 0);
    __syncthreads();
    using Stats = typename Tile::Stats;
    Stats& stats = static_cast<Stats*>(p.stats)[tile];
    if (threadIdx.x < M) {
        const int r = threadIdx.x, row = m * M + r;
        const bool inside = row < p.mask.queries;
        const auto of_row = [&](const float* stat, const Pitch& pitch) {
            return stat[batch * pitch.batch + head * pitch.head + row];
        };
        const float lse = inside ? of_row(p.lse, p.lse_pitch) : -INFINITY;
        const float delta = inside ? of_row(p.delta, p.delta_pitch) : 0.f;
        if constexpr (Tile::columns) {
            const uint3 a = in_three(lse == -INFINITY ? -1e30f : -lse / p.scale);
            const uint3 b = in_three(-delta);
            stats.columns[r] = make_uint4(a.x | a.y << 16, a.z | b.x << 16, b.y | b.z << 16, 0);
        } else {
            stats.lse2[r] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;
            stats.delta[r] = delta;
        }
        if constexpr (Tile::sum != Sum::plain) {
            // |dq| <= sum_j P_ij |dP_ij - delta_i| |k_j|, and so any part of the sum; 2% for
            // rounding
            const float bound = 1.02f * (norms[r] * sqrtf(top.y) + fabsf(delta)) * top.x;
            const bool finite = bound < INFINITY && lse < INFINITY;  // else dq becomes NaN
            // 2^30 units for the bound, or 1.5 * 2^e for a bound in [2^e, 2^(e+1))
            const float wish = Tile::sum == Sum::fixed ? 1073741824.f / fmaxf(bound, 1e-25f)
                                                       : fmaxf(bound, 1e-25f);
            const uint32_t power = __float_as_uint(wish) & 0x7F800000u;
            const uint32_t unit = Tile::sum == Sum::fixed ? power : power | 0x400000u;
            stats.factor[r] = finite ? __uint_as_float(unit) : NAN;
        }
        const int low = inside ? p.mask.low(batch, row) : 0;
        stats.low[r] = low;
        if (inside) atomicMin(&low_min, low), atomicMax(&low_max, low);
    }
    __syncthreads();
    if (threadIdx.x == 0) stats.low_min = low_min, stats.low_max = low_max;
}

// One warp per (batch, unit of its keys).
template <int M, class Stats>
__global__ void __launch_bounds__(32) find_kernel(const BackwardParams p, int unit_keys) {
    const int batch = blockIdx.x / p.key_units, unit = blockIdx.x % p.key_units;
    const Span span = span_of(p.pieces, batch, p.cuts, unit, p.mask.keys);
    const int first = span.first + (unit - span.unit) * unit_keys;
    KeyUnit found{0, 0, p.m_tiles, 0};
    if (first < span.end) found.first = first, found.end = min(first + unit_keys, span.end);
    const Stats* const stats =
        static_cast<const Stats*>(p.stats) + int64_t(batch) * p.heads * p.m_tiles;
    for (int m = threadIdx.x; m < p.m_tiles; m += 32)
        if (stats[m].low_min < found.end)
            found.begin = min(found.begin, m), found.stop = max(found.stop, m + 1);
    found.begin = __reduce_min_sync(~0u, found.begin);
    found.stop = __reduce_max_sync(~0u, found.stop);
    if (threadIdx.x > 0) return;
    p.list[blockIdx.x] = found;
    p.lengths[blockIdx.x] = found.stop - max(found.begin, first_query<M>(p.mask, found.first));
}

// One block per (batch, head, query tile); the threads stand for the consumers of the main kernel.
template <class Tile>
__global__ void __launch_bounds__(pass_threads) finish_kernel(const BackwardParams p) {
    using T = typename Tile::Element;
    constexpr int D = Tile::d, M = Tile::m, count = Tile::dq_columns / 8;
    const int tile = blockIdx.x, bh = tile / p.m_tiles, m = tile % p.m_tiles;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, quad = lane % 4;
    const int row = (D == 64 ? group * 64 : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int4* const from = static_cast<const int4*>(p.sums) + int64_t(tile) * (M * D / 4) +
                             group * (count * 128) + threadIdx.x % 128;
    const int column = D == 64 ? 0 : group * Tile::dq_columns;  // the warpgroup's first
    int4 sum[count];
    UNROLL for (int i = 0; i < count; ++i) sum[i] = from[i * 128];
    const auto inside = [&](int r) { return m * M + row + 8 * r < p.mask.queries; };
    const auto offset = [&](int r) {  // in dq
        return bh / p.heads * p.dq_pitch.batch + (m * M + row + 8 * r) * p.dq_pitch.row +
               bh % p.heads * p.dq_pitch.head + column;
    };
    // What is added to, read before anything is written, so that all of it is under way at a time.
    float2 old[2][count] = {};
    if (p.add_q) UNROLL for (int r = 0; r < 2; ++r) {
            const float* const at = static_cast<const float*>(p.dq) + offset(r) + 2 * quad;
            UNROLL for (int i = 0; i < count;
                        ++i) if (inside(r) && (Tile::exact || column + 8 * i < p.head_dim))
                old[r][i] = *reinterpret_cast<const float2*>(at + 8 * i);
        }
    const auto& stats = static_cast<const typename Tile::Stats*>(p.stats)[tile];
    UNROLL for (int r = 0; r < 2; ++r) {
        const float unit = Tile::sum == Sum::fixed ? p.scale / stats.factor[row + 8 * r] : p.scale;
        float x[2 * count];
        UNROLL for (int i = 0; i < count; ++i) {
            const int even = r ? sum[i].z : sum[i].x, odd = r ? sum[i].w : sum[i].y;
            x[2 * i] = (Tile::sum == Sum::fixed ? float(even) : __int_as_float(even)) * unit;
            x[2 * i + 1] = (Tile::sum == Sum::fixed ? float(odd) : __int_as_float(odd)) * unit;
        }
        if (p.wide) {
            if (!inside(r)) continue;
            float* const to = static_cast<float*>(p.dq) + offset(r) + 2 * quad;
            UNROLL for (int i = 0; i < count; ++i) {
                if (!Tile::exact && column + 8 * i >= p.head_dim) break;
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(old[r][i].x + x[2 * i], old[r][i].y + x[2 * i + 1]);
            }
            continue;
        }
        T* const to = static_cast<T*>(p.dq) + offset(r) + 8 * quad;
        UNROLL for (int i = 0; i < count; i += 4) {
            uint32_t y[4] = {};
            UNROLL for (int j = 0; j < 4 && i + j < count; ++j) y[j] =
                pack<T>(x[2 * (i + j)], x[2 * (i + j) + 1]);
            transpose_quad(y);
            const bool there =
                Tile::exact || (i + quad < count && column + 8 * (i + quad) < p.head_dim);
            if (inside(r) && there)
                *reinterpret_cast<uint4*>(to + 8 * i) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}

}  // namespace torus::flash
