// Attention forward for Hopper, after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): one
// warpgroup only moves tiles with TMA, two others own 64 query rows each and run the softmax of one
// key tile under the matrix products of its neighbours, their own and the other warpgroup's.
// Blocks stay on their multiprocessor and draw tiles from a counter, the longest first, so that the
// loads of the next tile run under the end of the last one. Within a section of heads whose keys
// and values fit the L2 cache, tiles of the same query range follow one another.
// D head dim, M query rows and N keys of a tile; see docs/flash_attention.md.
#pragma once
#include "kernels/cuda/flash/params.h"
#include "kernels/cuda/flash/wgmma.cuh"

namespace torus::flash {

template <class T, int D, int N>
struct ForwardTile {
    using Element = T;
    static constexpr int d = D, n = N, consumers = 2, m = 64 * consumers;
    static constexpr int threads = 128 * (1 + consumers), stages = 2;
    static constexpr int producer_registers = 40, consumer_registers = 232;
    // The code of the consumers once for each warpgroup and stage, so that the addresses of tiles
    // are constants. At D 64, where fewer cycles go by between its instructions, so much code comes
    // too slowly from the instruction cache.
    static constexpr bool copies = D == 128;
    static constexpr uint32_t q_bytes = m * D * 2, kv_bytes = N * D * 2;
    static constexpr int shared_bytes = q_bytes + 2 * stages * kv_bytes + 1024;  // 1024: alignment
};

struct ForwardBarriers {
    uint64_t q_full, q_empty;
    uint64_t k_full[2], k_empty[2], v_full[2], v_empty[2];
    uint64_t work_full[2], work_empty[2];
};

// One tile of work: M query rows of one head against the key tiles [begin, end), of which those in
// [full_begin, full_end) are visible to every row.
struct ForwardWork {
    int m, head;  // head counts through all batches; negative: no more work
    int begin, end, full_begin, full_end;
};

// Tile number -> query tile and head; heavy tiles (late queries) first within a section of heads.
DEVICE void find_tile(const ForwardParams& p, int tile, ForwardWork& w) {
    const int section = tile / (p.section_heads * p.m_tiles);
    const int inside = tile - section * p.section_heads * p.m_tiles;
    const int first = section * p.section_heads;
    const int count = min(p.section_heads, p.all_heads - first);
    w.m = p.m_tiles - 1 - inside / count;
    w.head = first + inside % count;
}

// The key tiles that some (begin, end) or all (full_*) rows of the tile see. By a whole warp.
template <int M, int N>
DEVICE void find_keys(const Mask& mask, int batch, ForwardWork& w) {
    const int first = w.m * M, last = min(first + M, mask.queries) - 1;
    int low_min = 0, low_max = 0;
    if (mask.first_key) {
        low_min = mask.keys;
        for (int row = first + int(threadIdx.x % 32); row <= last; row += 32) {
            const int low = mask.low(batch, row);
            low_min = min(low_min, low), low_max = max(low_max, low);
        }
        low_min = __reduce_min_sync(~0u, low_min), low_max = __reduce_max_sync(~0u, low_max);
    }
    w.begin = low_min / N, w.end = (mask.high(last) + N - 1) / N;
    w.full_begin = (low_max + N - 1) / N, w.full_end = mask.high(first) / N;
}

template <class Tile>
DEVICE void forward_produce(const ForwardParams& p, ForwardBarriers& bar, ForwardWork* slots,
                            uint32_t shared) {
    const uint32_t q_tile = shared, k_tile = shared + Tile::q_bytes;
    const uint32_t v_tile = k_tile + Tile::stages * Tile::kv_bytes;
    const bool leader = threadIdx.x == 0;
    if (leader) tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v);
    // Key tiles loaded into either stage, and query tiles. With copies the first keys of a query
    // tile always go to stage 0.
    int uses[2] = {0, 0}, q_loads = 0;
    int tile = blockIdx.x;
    for (int turn = 0;; ++turn) {
        ForwardWork w{-1, -1, 0, 0, 0, 0};
        int next = p.tiles;
        if (tile < p.tiles) {
            if (leader && p.counter) next = int(gridDim.x) + atomicAdd(p.counter, 1);
            find_tile(p, tile, w);
            find_keys<Tile::m, Tile::n>(p.mask, w.head / p.heads, w);
        }
        if (leader) {
            barrier_wait(&bar.work_empty[turn % 2], (turn / 2 + 1) % 2);
            slots[turn % 2] = w;
            barrier_arrive(&bar.work_full[turn % 2]);
        }
        if (w.head < 0) break;
        if (leader && w.begin < w.end) {
            const int batch = w.head / p.heads, head = w.head % p.heads, kv = head / p.group;
            const int start = Tile::copies ? 0 : (uses[0] + uses[1]) % 2;
            auto load = [&](const CUtensorMap* map, uint32_t to, uint64_t* full, uint64_t* empty,
                            int i, int row) {
                const int stage = (start + i) % 2;
                barrier_wait(empty + stage, ((stage ? uses[1] : uses[0]) + i / 2 + 1) % 2);
                barrier_expect(full + stage, Tile::kv_bytes);
                tma_load(to + stage * Tile::kv_bytes, map, full + stage, row, kv, batch,
                         keep_in_l2);
            };
            const int count = w.end - w.begin, top = w.end - 1;
            load(&p.k, k_tile, bar.k_full, bar.k_empty, 0, top * Tile::n);
            barrier_wait(&bar.q_empty, (q_loads + 1) % 2);
            barrier_expect(&bar.q_full, Tile::q_bytes);
            tma_load(q_tile, &p.q, &bar.q_full, w.m * Tile::m, head, batch, pass_through);
#pragma unroll 1
            for (int i = 1; i < count; ++i) {
                load(&p.k, k_tile, bar.k_full, bar.k_empty, i, (top - i) * Tile::n);
                load(&p.v, v_tile, bar.v_full, bar.v_empty, i - 1, (top - i + 1) * Tile::n);
            }
            load(&p.v, v_tile, bar.v_full, bar.v_empty, count - 1, w.begin * Tile::n);
            const int more = (count + 1) / 2, fewer = count / 2;
            uses[0] += start ? fewer : more, uses[1] += start ? more : fewer, ++q_loads;
        }
        tile = __shfl_sync(~0u, next, 0);
    }
}

// Running maximum and sum of two rows, and the softmax of one tile of scores in place.
// `top` follows the maximum only when that has grown by more than a factor 2^8, so that the output
// is seldom rescaled; probabilities then reach 256, which changes no relative precision.
template <int N>
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    float decay[2];  // what the output so far shrinks by

    // Scores of keys that a row does not see become -inf. column: key number of s[0].
    DEVICE void mask(float (&s)[N / 2], int column, const int (&low)[2], const int (&high)[2]) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const int base = column - low[r];
            const uint32_t visible = uint32_t(max(high[r] - low[r], 0));
            UNROLL for (int i = 2 * r; i < N / 2; i += 4) {
                s[i] = uint32_t(base + i / 4 * 8) < visible ? s[i] : -INFINITY;
                s[i + 1] = uint32_t(base + i / 4 * 8 + 1) < visible ? s[i + 1] : -INFINITY;
            }
        }
    }
    DEVICE void step(float (&s)[N / 2], float scale_log2) {
        UNROLL for (int r = 0; r < 2; ++r) {
            float high = s[2 * r];
            UNROLL for (int i = 2 * r; i < N / 2; i += 4) high = fmaxf(high, fmaxf(s[i], s[i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            high = (high - top[r]) * scale_log2 > 8.f ? high : top[r];
            const float safe = high == -INFINITY ? 0.f : high;  // a row without keys so far
            decay[r] = exp2_fast((top[r] - safe) * scale_log2);
            top[r] = high;
            const float shift = safe * scale_log2;
            float even = 0, odd = 0;
            UNROLL for (int i = 2 * r; i < N / 2; i += 4) {
                s[i] = exp2_fast(fmaf(s[i], scale_log2, -shift));
                s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, -shift));
                even += s[i], odd += s[i + 1];
            }
            sum[r] = sum[r] * decay[r] + (even + odd);
        }
    }
};

// Divides by the sum and writes two rows of o and lse; with carry merges them into what is there.
template <class T, int D>
DEVICE void forward_store(const ForwardParams& p, int head_number, int row0, float (&o)[D / 2],
                          const float (&top)[2], float (&sum)[2]) {
    const int batch = head_number / p.heads, head = head_number % p.heads, quad = threadIdx.x % 4;
    UNROLL for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int row = row0 + 8 * r;
        const bool inside = row < p.mask.queries, empty = !(sum[r] > 0);
        float weight = empty ? 0.f : 1.f / sum[r];
        float lse = empty ? -INFINITY : top[r] * p.scale + __logf(sum[r]);
        float* const lse_at = p.lse + int64_t(head_number) * p.mask.queries + row;
        const int64_t at = batch * p.o_pitch.batch + row * p.o_pitch.row + head * p.o_pitch.head;
        if (p.carry) {
            if (!inside || empty) continue;
            const float before = *lse_at, high = fmaxf(before, lse);
            const float old_part = __expf(before - high), new_part = __expf(lse - high);
            __syncwarp(0xFu << (threadIdx.x % 32 / 4 * 4));  // the quad has read lse
            const float total = old_part + new_part;
            const float keep = old_part / total;
            weight *= new_part / total;
            if (quad == 0) *lse_at = high + __logf(total);
            float* const to = static_cast<float*>(p.o) + at + 2 * quad;
            UNROLL for (int j = 0; j < D / 8; ++j) {
                float2 x = *reinterpret_cast<float2*>(to + 8 * j);
                x.x = x.x * keep + o[4 * j + 2 * r] * weight;
                x.y = x.y * keep + o[4 * j + 2 * r + 1] * weight;
                *reinterpret_cast<float2*>(to + 8 * j) = x;
            }
            continue;
        }
        if (inside && quad == 0) *lse_at = lse;
        T* const to = static_cast<T*>(p.o) + at + 8 * quad;
        UNROLL for (int j = 0; j < D / 8; j += 4) {
            uint32_t x[4];
            UNROLL for (int i = 0; i < 4; ++i) x[i] =
                pack<T>(o[4 * (j + i) + 2 * r] * weight, o[4 * (j + i) + 2 * r + 1] * weight);
            transpose_quad(x);
            if (inside) *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// A consumer warpgroup. Group: an int, or such a constant; `stage`, `here` and `next` likewise.
template <class Tile, class Group>
struct ForwardConsumer {
    using T = typename Tile::Element;
    static constexpr int D = Tile::d, N = Tile::n;
    const ForwardParams& p;
    ForwardBarriers& bar;
    const uint32_t shared;
    const Group group;
    // Parities of the loads to wait for, by stage; where the keys of the next query tile begin.
    uint32_t k_phases = 0, v_phases = 0, q_phase = 0;
    int start = 0;
    float s[N / 2], o[D / 2];
    uint32_t probability[N / 4];
    Softmax<N> soft;
    int low[2], high[2];  // the keys of this thread's two rows

    DEVICE bool elected() const { return threadIdx.x % 128 == 0; }

    template <class Stage>
    DEVICE void scores(Stage stage) {                         // s = Q K^T, asynchronous
        const uint32_t q_tile = shared + group * (64 * 128);  // this warpgroup's rows of each panel
        const uint32_t k_tile = shared + Tile::q_bytes + stage * Tile::kv_bytes;
        barrier_wait(&bar.k_full[stage], k_phases >> stage & 1);
        k_phases ^= 1 << stage;
        wgmma_fence();
        UNROLL for (int k = 0; k < D / 16; ++k)
            wgmma_ss<T, N, 0, 0>(s, k_major<Tile::m>(q_tile, k), k_major<N>(k_tile, k), k > 0);
        wgmma_commit();
    }
    template <class Stage>
    DEVICE void output(Stage stage) {  // o += P V, asynchronous
        const uint32_t v_tile = shared + Tile::q_bytes + (Tile::stages + stage) * Tile::kv_bytes;
        barrier_wait(&bar.v_full[stage], v_phases >> stage & 1);
        v_phases ^= 1 << stage;
        wgmma_fence();
        UNROLL for (int k = 0; k < N / 16; ++k)
            wgmma_rs<T, D, 1>(o, probability + 4 * k, mn_major<N>(v_tile, k), 1);
        wgmma_commit();
    }
    DEVICE void hide(const ForwardWork& w, int n) {
        if (n >= w.full_end || n < w.full_begin)
            soft.mask(s, n * N + 2 * (threadIdx.x % 4), low, high);
    }

    // The first scores of a query tile.
    template <class Stage>
    DEVICE void begin(const ForwardWork& w, Stage stage) {
        scores(stage);
        wgmma_wait<0>();
        pin(s);
        if (elected()) barrier_arrive(&bar.k_empty[stage]);
        hide(w, w.end - 1);
        soft.step(s, p.scale_log2);
        repack<T>(s, probability);
    }
    // The scores of key tile n, which lies in stage `next`, and the output of the one before.
    template <class Stage, class Next>
    DEVICE void step(const ForwardWork& w, int n, Stage here, Next next) {
        scores(next);
        output(here);
        wgmma_wait<1>();
        pin(s);
        if (elected()) barrier_arrive(&bar.k_empty[next]);
        hide(w, n);
        soft.step(s, p.scale_log2);
        // Never true. It makes the branch depend on every probability, so that ptxas cannot move
        // their computation behind the wait, away from under the product.
        if (soft.sum[0] < 0 || soft.sum[1] < 0) __trap();
        wgmma_wait<0>();
        pin(o);
        if (elected()) barrier_arrive(&bar.v_empty[here]);
        repack<T>(s, probability);
        if (__any_sync(~0u, soft.decay[0] != 1.f || soft.decay[1] != 1.f))
            UNROLL for (int i = 0; i < D / 2; ++i) o[i] *= soft.decay[i / 2 % 2];
    }
    template <class Stage>
    DEVICE void finish(Stage here) {
        if (elected()) barrier_arrive(&bar.q_empty);
        output(here);
        wgmma_wait<0>();
        pin(o);
        if (elected()) barrier_arrive(&bar.v_empty[here]);
    }

    // All key tiles of a query tile.
    DEVICE void walk(const ForwardWork& w) {
        constexpr std::integral_constant<int, 0> first;
        constexpr std::integral_constant<int, 1> second;
        barrier_wait(&bar.q_full, q_phase);
        q_phase ^= 1;
        int n = w.end - 2;
        if constexpr (Tile::copies) {
            begin(w, first);
#pragma unroll 1
            for (; n > w.begin; n -= 2) {
                step(w, n, first, second);
                step(w, n - 1, second, first);
            }
            if (n == w.begin) {
                step(w, n, first, second);
                finish(second);
            } else {
                finish(first);
            }
        } else {
            int here = start;
            begin(w, here);
#pragma unroll 1
            for (; n >= w.begin; --n) {
                step(w, n, here, here ^ 1);
                here ^= 1;
            }
            finish(here);
            start = here ^ 1;
        }
    }

    DEVICE void run(const ForwardWork* slots) {
        const int lane = threadIdx.x % 32;
        const int row_in_tile = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
        for (int turn = 0;; ++turn) {
            barrier_wait(&bar.work_full[turn % 2], turn / 2 % 2);
            ForwardWork w = slots[turn % 2];
            // The same for all threads to the compiler, too.
            w.begin = __shfl_sync(~0u, w.begin, 0), w.end = __shfl_sync(~0u, w.end, 0);
            w.head = __shfl_sync(~0u, w.head, 0);
            __syncwarp();  // all lanes have read the slot
            if (lane == 0) barrier_arrive(&bar.work_empty[turn % 2]);
            if (w.head < 0) break;
            const int row = w.m * Tile::m + row_in_tile, batch = w.head / p.heads;
            UNROLL for (int r = 0; r < 2; ++r) {
                const bool inside = row + 8 * r < p.mask.queries;
                low[r] = inside ? p.mask.low(batch, row + 8 * r) : 0;
                high[r] = inside ? p.mask.high(row + 8 * r) : 0;
            }
            soft = {};
            UNROLL for (int i = 0; i < D / 2; ++i) o[i] = 0;
            if (w.begin < w.end) walk(w);
            forward_store<T, D>(p, w.head, row, o, soft.top, soft.sum);
        }
    }
};

template <class Tile, class Group>
DEVICE ForwardConsumer<Tile, Group> forward_consumer(const ForwardParams& p, ForwardBarriers& bar,
                                                     uint32_t shared, Group group) {
    return {p, bar, shared, group};
}

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
#ifdef TORUS_SM90A
    extern __shared__ uint8_t raw[];
    __shared__ ForwardBarriers bar;
    __shared__ ForwardWork slots[2];
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        barrier_init(&bar.q_full, 1), barrier_init(&bar.q_empty, Tile::consumers);
        for (int i = 0; i < Tile::stages; ++i) {
            barrier_init(&bar.k_full[i], 1), barrier_init(&bar.k_empty[i], Tile::consumers);
            barrier_init(&bar.v_full[i], 1), barrier_init(&bar.v_empty[i], Tile::consumers);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(&bar.work_full[i], 1);
            barrier_init(&bar.work_empty[i], 4 * Tile::consumers);  // one arrival a warp
        }
        barrier_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_shrink<Tile::producer_registers>();
        if (threadIdx.x < 32) forward_produce<Tile>(p, bar, slots, shared);
    } else {
        registers_grow<Tile::consumer_registers>();
        if constexpr (!Tile::copies)
            forward_consumer<Tile>(p, bar, shared, group - 1).run(slots);
        else if (group == 1)
            forward_consumer<Tile>(p, bar, shared, std::integral_constant<int, 0>{}).run(slots);
        else
            forward_consumer<Tile>(p, bar, shared, std::integral_constant<int, 1>{}).run(slots);
    }
#endif
}

}  // namespace torus::flash
