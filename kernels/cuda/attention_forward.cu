// Attention forward for bf16 and fp16 on mma.sync (sm_80 and up), after FlashAttention-2 (Dao
// 2023): a block owns 64 queries of one head and walks over the keys they can see with an online
// softmax; keys and values of the next tile travel while this one is multiplied. Tiles that no
// query of the block sees are never visited, tiles that all see are not masked.
#include "kernels/cuda/attention.cuh"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
// Keys of a tile: as many as shared memory (99 KB on sm_89) allows in two stages.
template <int D>
constexpr int forward_keys = D <= 128 ? 64 : 32;

template <int D>
constexpr int64_t forward_shared = int64_t(kRows + 4 * forward_keys<D>) * (D + 8) * 2;

// Scores -> probabilities (not yet divided) in place. m is the running maximum of the scores in
// units of log2, l the running sum, both of rows lane/4 and lane/4 + 8; the result is the factor by
// which earlier sums shrink.
template <int N>
__device__ __forceinline__ void online_softmax(float (&s)[N / 8][4], float (&m)[2], float (&l)[2],
                                               float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = m[r];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) top = fmaxf(top, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
        top = quad_max(top);
        const float base = top == -INFINITY ? 0.0f : top;  // a row that has seen no key yet
        shrink[r] = exp2f(m[r] - base);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                s[j][e] = exp2f(s[j][e] - base);
                sum += s[j][e];
            }
        }
        l[r] = l[r] * shrink[r] + sum;  // of this lane; the quad is added up at the end
        m[r] = top;
    }
}

// Divides, merges into the running output when there is one, and writes o and lse.
template <class T, int D>
__device__ __forceinline__ void finish_rows(const ForwardArgs<T>& a, float (&o)[D / 8][4],
                                            const float (&m)[2], const float (&l)[2], int64_t b,
                                            int64_t h, int64_t first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t row = first_row + lane / 4 + 8 * r;
        const float sum = quad_sum(l[r]);
        if (row >= a.s.Tq) continue;
        float* lse = a.lse.at(b, row, h);
        float mine = sum > 0 ? m[r] * kLn2 + logf(sum) : -INFINITY;
        float weight = sum > 0 ? 1 / sum : 0.0f, earlier = 0;
        if (a.carry) {
            const float old = *lse, top = fmaxf(old, mine);
            if (top == -INFINITY) continue;  // still nothing seen
            const float both = top + logf(expf(old - top) + expf(mine - top));
            earlier = expf(old - both);
            weight *= expf(mine - both);
            mine = both;
        }
        __syncwarp(0xfu << (lane & ~3));  // the quad, which has read lse
        if (lane % 4 == 0) *lse = mine;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int64_t d = j * 8 + lane % 4 * 2 + e;
                if (d >= a.s.D) continue;
                const float x = o[j][2 * r + e] * weight;
                if (a.carry) {
                    float* p = a.running.at(b, row, h) + d;
                    *p = earlier > 0 ? earlier * *p + x : x;
                } else {
                    a.o.at(b, row, h)[d] = convert<T>(x);
                }
            }
        }
    }
}

template <class T, int D>
__global__ void __launch_bounds__(32 * kWarps) attention_forward_kernel(const ForwardArgs<T> a) {
    constexpr int N = forward_keys<D>, pitch = D + 8;
    extern __shared__ __align__(16) uint8_t shared[];
    T* const q = reinterpret_cast<T*>(shared);
    T* const keys = q + kRows * pitch;       // two stages
    T* const values = keys + 2 * N * pitch;  // two stages
    const AttnShape& s = a.s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Later queries see more keys: start with them.
    const int64_t tiles = (s.Tq + kRows - 1) / kRows, all_heads = s.B * s.H;
    const int64_t tile = tiles - 1 - blockIdx.x / all_heads;
    const int64_t b = blockIdx.x % all_heads / s.H, h = blockIdx.x % s.H;
    const int64_t hk = h / (s.H / s.Hk), row0 = tile * kRows, first_row = row0 + warp * 16;

    // Keys that any query here sees, and those that all see.
    const int64_t end_row = min(row0 + kRows, s.Tq);
    const int begin =
        s.first_key ? s.clip(s.tile_keys.least[b * s.tile_keys.tiles + tile] - s.k0) : 0;
    const int end = s.last(end_row - 1) + 1;
    const int all_begin =
        s.first_key ? s.clip(s.tile_keys.most[b * s.tile_keys.tiles + tile] - s.k0) : 0;
    const int all_end = s.last(row0) + 1;

    float o[D / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    clear(o);
    int first[2], last[2];  // visible keys of this lane's two rows
    for (int r = 0; r < 2; ++r) {
        first[r] = s.first(b, first_row + lane / 4 + 8 * r);
        last[r] = s.last(first_row + lane / 4 + 8 * r);
    }
    const auto fetch = [&](int key, int stage) {
        load_tile<N, D>(keys + stage * N * pitch, a.k, b, hk, key, s.Tk, s.D, s.vectors);
        load_tile<N, D>(values + stage * N * pitch, a.v, b, hk, key, s.Tk, s.D, s.vectors);
    };
    const int key0 = begin / N * N;
    if (begin < end) {
        load_tile<kRows, D>(q, a.q, b, h, row0, s.Tq, s.D, s.vectors);
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
        float scores[N / 8][4];
        clear(scores);
        rows_times_tile<N, D>(scores, q + warp * 16 * pitch, keys + stage * N * pitch);
        const bool masked = key < all_begin || key + N > all_end;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = key + j * 8 + lane % 4 * 2 + e % 2;
                scores[j][e] *= scale;
                if (masked && (column < first[e / 2] || column > last[e / 2]))
                    scores[j][e] = -INFINITY;
            }
        }
        float shrink[2];
        online_softmax<N>(scores, m, l, shrink);
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[j][e] *= shrink[e / 2];
        weights_times_tile<N, D, D>(o, scores, values + stage * N * pitch);
        __syncthreads();
    }
    finish_rows<T, D>(a, o, m, l, b, h, first_row);
}

// --- launchers -----------------------------------------------------------------------------------
void attention_forward_mma(Stream& stream, const Attn& a, const AttnShape& s) {
    dispatch(a.q.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if constexpr (!std::is_same_v<T, float>) {
            ForwardArgs<T> args{s,
                                heads_of<const T>(a.q),
                                heads_of<const T>(a.k),
                                heads_of<const T>(a.v),
                                heads_of<T>(a.o),
                                heads_of<float>(a.o),
                                stats_of<float>(a.lse),
                                a.carry};
            dispatch_head_dim(s.D, [&](auto dim) {
                constexpr int D = decltype(dim)::value;
                launch("attention_forward", stream,
                       {.blocks = divide_up(s.Tq, kRows) * s.B * s.H,
                        .threads = 32 * kWarps,
                        .shared = forward_shared<D>},
                       attention_forward_kernel<T, D>, args);
            });
        }
    });
}

}  // namespace torus::cuda
