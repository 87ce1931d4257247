// Attention backward for bf16 and fp16 on mma.sync (sm_80 and up), in two deterministic passes
// without atomics. The key pass: a block owns 64 keys, walks over the queries of all heads that
// share them and keeps dk and dv in registers; it computes transposed scores, so that probabilities
// leave one product as accumulators and enter the next as operands. The query pass: a block owns 64
// queries, walks over their keys and keeps dq. Head dims above 128 do the key pass in two slices of
// columns, which is what the registers hold.
#include "kernels/cuda/attention.cuh"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
// Rows of a streamed tile: what fits beside two owned tiles in 99 KB, in two stages of two tiles.
template <int D>
constexpr int streamed_rows = D <= 64    ? 64
                              : D <= 128 ? 32
                                         : 16;
template <int D>
constexpr int64_t backward_shared = int64_t(2 * kRows + 4 * streamed_rows<D>) * (D + 8) * 2;
template <int D>
constexpr int slice_columns = D <= 128 ? D : D / 2;

// --- the key pass
template <int N>
struct QueryStats {  // of the columns that a lane holds of a transposed score tile
    float lse[N / 4], delta[N / 4];
};

// Transposed scores (keys x queries) -> probabilities in p and, in place of dp, their gradients.
template <int N>
__device__ __forceinline__ void score_gradients(const AttnShape& s, float (&p)[N / 8][4],
                                                float (&dp)[N / 8][4], const QueryStats<N>& stats,
                                                int64_t b, int64_t query, int64_t key,
                                                bool masked) {
    const int lane = threadIdx.x % 32;
    const float scale = s.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int64_t row = query + j * 8 + lane % 4 * 2 + c;
            int first = 0, last = 0;
            if (masked) {
                first = s.first(b, row);
                last = row < s.Tq ? s.last(row) : -1;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int64_t column = key + lane / 4 + 8 * r;
                const int e = 2 * r + c;
                const bool hidden = masked && (column < first || column > last);
                p[j][e] = hidden ? 0.0f : exp2f(p[j][e] * scale - stats.lse[2 * j + c]);
                dp[j][e] = p[j][e] * (dp[j][e] - stats.delta[2 * j + c]);
            }
        }
    }
}

// First tile of `rows` queries at or after `tile` with a query that may see keys up to `last_key`
// (global): one that starts in a document of its own after them is passed over.
__device__ __forceinline__ int64_t next_tile(const TileKeys& keys, int64_t b, int64_t tile,
                                             int64_t last_key) {
    if (!keys.least) return tile;
    const int lane = threadIdx.x % 32;
    for (; tile < keys.tiles; tile += 32) {
        const bool sees =
            tile + lane < keys.tiles && keys.least[b * keys.tiles + tile + lane] <= last_key;
        const unsigned any = __ballot_sync(0xffffffffu, sees);
        if (any) return tile + __ffs(int(any)) - 1;
    }
    return keys.tiles;
}

template <class T, int D>
__global__ void __launch_bounds__(32 * kWarps) attention_keys_kernel(const BackwardArgs<T> a) {
    constexpr int N = streamed_rows<D>, C = slice_columns<D>, pitch = D + 8, slices = D / C;
    extern __shared__ __align__(16) uint8_t shared[];
    T* const keys = reinterpret_cast<T*>(shared);
    T* const values = keys + kRows * pitch;
    T* const queries = values + kRows * pitch;  // two stages
    T* const douts = queries + 2 * N * pitch;   // two stages
    const AttnShape& s = a.s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t all_heads = s.B * s.Hk * slices, group = s.H / s.Hk;
    // Earlier keys are seen by more queries: start with them.
    const int64_t key0 = blockIdx.x / all_heads * kRows;
    const int slice = int(blockIdx.x % slices);
    const int64_t hk = blockIdx.x / slices % s.Hk, b = blockIdx.x / slices / s.Hk % s.B;
    const int64_t last_key = min(key0 + kRows, s.Tk) - 1;

    // Tiles of queries, numbered through all heads of the group.
    const int64_t tiles = (s.Tq + N - 1) / N;
    const int64_t first_tile = s.causal ? min(max(key0 - s.shift, int64_t(0)) / N, tiles) : 0;
    const auto seek = [&](int64_t head, int64_t tile) {  // the next tile to visit, or group * tiles
        for (; head < group; ++head, tile = first_tile) {
            tile = next_tile(s.tile_keys, b, tile, last_key + s.k0);
            if (tile < tiles) return head * tiles + tile;
        }
        return group * tiles;
    };
    const auto after = [&](int64_t at) { return seek(at / tiles, at % tiles + 1); };
    QueryStats<N> stats;
    const auto fetch = [&](int64_t at, int stage) {
        const int64_t h = hk * group + at / tiles, row = at % tiles * N;
        load_tile<N, D>(queries + stage * N * pitch, a.q, b, h, row, s.Tq, s.D, s.vectors);
        load_tile<N, D>(douts + stage * N * pitch, a.dout, b, h, row, s.Tq, s.D, s.vectors);
    };
    const auto load_stats = [&](int64_t at) {
        const int64_t row = at % tiles * N;
        const int64_t h = hk * group + at / tiles;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const int64_t r = row + i / 2 * 8 + lane % 4 * 2 + i % 2;
            // Rows past the end get probability 0.
            stats.lse[i] = r < s.Tq ? *a.lse.at(b, r, h) * kLog2e : INFINITY;
            stats.delta[i] = r < s.Tq ? *a.delta.at(b, r, h) : 0.0f;
        }
    };

    float dk[C / 8][4], dv[C / 8][4];
    clear(dk);
    clear(dv);
    int64_t at = seek(0, first_tile);
    const int64_t done = group * tiles;
    if (at < done) {
        load_tile<kRows, D>(keys, a.k, b, hk, key0, s.Tk, s.D, s.vectors);
        load_tile<kRows, D>(values, a.v, b, hk, key0, s.Tk, s.D, s.vectors);
        fetch(at, 0);
    }
    commit_copies();
    for (int stage = 0; at < done; stage ^= 1) {
        const int64_t next = after(at);
        if (next < done) fetch(next, stage ^ 1);
        commit_copies();
        load_stats(at);
        wait_copies<1>();
        __syncthreads();
        const T* const q = queries + stage * N * pitch;
        const T* const d = douts + stage * N * pitch;
        float p[N / 8][4], dp[N / 8][4];
        clear(p);
        clear(dp);
        rows_times_tile<N, D>(p, keys + warp * 16 * pitch, q);
        rows_times_tile<N, D>(dp, values + warp * 16 * pitch, d);
        const int64_t tile = at % tiles, row = tile * N;
        const bool all_see =
            row + N <= s.Tq && s.last(row) >= last_key &&
            (!s.first_key || s.tile_keys.most[b * s.tile_keys.tiles + tile] <= key0 + s.k0);
        score_gradients<N>(s, p, dp, stats, b, row, key0 + warp * 16, !all_see);
        weights_times_tile<N, C, D>(dv, p, d + slice * C);
        weights_times_tile<N, C, D>(dk, dp, q + slice * C);
        __syncthreads();
        at = next;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t key = key0 + warp * 16 + lane / 4 + 8 * r;
        if (key >= s.Tk) continue;
#pragma unroll
        for (int j = 0; j < C / 8; ++j) {
            const int64_t col = slice * C + j * 8 + lane % 4 * 2;
            store_gradient(a.dk, a.dk_sum, a.wide, a.add_kv, b, key, hk, col, s.D,
                           dk[j][2 * r] * s.scale, dk[j][2 * r + 1] * s.scale);
            store_gradient(a.dv, a.dv_sum, a.wide, a.add_kv, b, key, hk, col, s.D, dv[j][2 * r],
                           dv[j][2 * r + 1]);
        }
    }
}

// --- the query pass
template <class T, int D>
__global__ void __launch_bounds__(32 * kWarps) attention_queries_kernel(const BackwardArgs<T> a) {
    constexpr int N = streamed_rows<D>, pitch = D + 8;
    extern __shared__ __align__(16) uint8_t shared[];
    T* const queries = reinterpret_cast<T*>(shared);
    T* const douts = queries + kRows * pitch;
    T* const keys = douts + kRows * pitch;   // two stages
    T* const values = keys + 2 * N * pitch;  // two stages
    const AttnShape& s = a.s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t tiles = (s.Tq + kRows - 1) / kRows, all_heads = s.B * s.H;
    const int64_t row0 = (tiles - 1 - blockIdx.x / all_heads) * kRows;
    const int64_t b = blockIdx.x % all_heads / s.H, h = blockIdx.x % s.H;
    const int64_t hk = h / (s.H / s.Hk), end_row = min(row0 + kRows, s.Tq);

    // Keys that any query here sees, and those that all see, from the tables of N queries.
    int begin = 0, all_begin = 0;
    if (s.first_key) {
        const int64_t from = b * s.tile_keys.tiles;
        begin = int(s.Tk);
        for (int64_t t = row0 / N; t < (end_row + N - 1) / N; ++t) {
            begin = min(begin, s.clip(s.tile_keys.least[from + t] - s.k0));
            all_begin = max(all_begin, s.clip(s.tile_keys.most[from + t] - s.k0));
        }
    }
    const int end = s.last(end_row - 1) + 1, all_end = s.last(row0) + 1;

    int first[2], last[2];
    float lse[2], delta[2];
    for (int r = 0; r < 2; ++r) {
        const int64_t row = row0 + warp * 16 + lane / 4 + 8 * r;
        first[r] = s.first(b, row);
        last[r] = s.last(row);
        lse[r] = row < s.Tq ? *a.lse.at(b, row, h) * kLog2e : INFINITY;
        delta[r] = row < s.Tq ? *a.delta.at(b, row, h) : 0.0f;
    }
    const auto fetch = [&](int key, int stage) {
        load_tile<N, D>(keys + stage * N * pitch, a.k, b, hk, key, s.Tk, s.D, s.vectors);
        load_tile<N, D>(values + stage * N * pitch, a.v, b, hk, key, s.Tk, s.D, s.vectors);
    };
    float dq[D / 8][4];
    clear(dq);
    const int key0 = begin / N * N;
    if (begin < end) {
        load_tile<kRows, D>(queries, a.q, b, h, row0, s.Tq, s.D, s.vectors);
        load_tile<kRows, D>(douts, a.dout, b, h, row0, s.Tq, s.D, s.vectors);
        fetch(key0, 0);
    }
    commit_copies();
    const float scale = s.scale * kLog2e;
    int stage = 0;
    for (int key = key0; begin < end && key < end; key += N, stage ^= 1) {
        if (key + N < end) fetch(key + N, stage ^ 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        float p[N / 8][4], dp[N / 8][4];
        clear(p);
        clear(dp);
        rows_times_tile<N, D>(p, queries + warp * 16 * pitch, keys + stage * N * pitch);
        rows_times_tile<N, D>(dp, douts + warp * 16 * pitch, values + stage * N * pitch);
        const bool masked = key < all_begin || key + N > all_end;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = key + j * 8 + lane % 4 * 2 + e % 2, r = e / 2;
                const bool hidden = masked && (column < first[r] || column > last[r]);
                const float weight = hidden ? 0.0f : exp2f(p[j][e] * scale - lse[r]);
                dp[j][e] = weight * (dp[j][e] - delta[r]);
            }
        }
        weights_times_tile<N, D, D>(dq, dp, keys + stage * N * pitch);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t row = row0 + warp * 16 + lane / 4 + 8 * r;
        if (row >= s.Tq) continue;
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            store_gradient(a.dq, a.dq_sum, a.wide, a.add_q, b, row, h, j * 8 + lane % 4 * 2, s.D,
                           dq[j][2 * r] * s.scale, dq[j][2 * r + 1] * s.scale);
    }
}

// --- launchers -----------------------------------------------------------------------------------
int attention_backward_rows(int64_t D) {
    int rows = 0;
    dispatch_head_dim(D, [&](auto dim) { rows = streamed_rows<decltype(dim)::value>; });
    return rows;
}

void attention_backward_mma(Stream& stream, const AttnGrad& a, const AttnShape& s) {
    dispatch(a.q.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if constexpr (!std::is_same_v<T, float>) {
            const BackwardArgs<T> args{s,
                                       heads_of<const T>(a.q),
                                       heads_of<const T>(a.k),
                                       heads_of<const T>(a.v),
                                       heads_of<const T>(a.dout),
                                       stats_of<const float>(a.lse),
                                       stats_of<const float>(a.delta),
                                       heads_of<T>(a.dq),
                                       heads_of<T>(a.dk),
                                       heads_of<T>(a.dv),
                                       heads_of<float>(a.dq),
                                       heads_of<float>(a.dk),
                                       heads_of<float>(a.dv),
                                       a.dq.dtype == DType::f32,
                                       a.add_q,
                                       a.add_kv};
            dispatch_head_dim(s.D, [&](auto dim) {
                constexpr int D = decltype(dim)::value;
                Grid grid{.blocks = divide_up(s.Tk, kRows) * s.B * s.Hk * (D / slice_columns<D>),
                          .threads = 32 * kWarps,
                          .shared = backward_shared<D>};
                launch("attention_backward", stream, grid, attention_keys_kernel<T, D>, args);
                grid.blocks = divide_up(s.Tq, kRows) * s.B * s.H;
                launch("attention_backward", stream, grid, attention_queries_kernel<T, D>, args);
            });
        }
    });
}

}  // namespace torus::cuda
