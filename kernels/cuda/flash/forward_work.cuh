// How the attention forward is divided: tile shapes and shared memory, the query tiles that blocks
// draw from a counter, and the thread that copies their tiles in. See forward.cuh.
#pragma once
#include "kernels/cuda/flash/documents.cuh"
#include "kernels/cuda/flash/params.h"
#include "kernels/cuda/flash/softmax.cuh"
#include "kernels/cuda/flash/wgmma.cuh"

namespace torus::flash {

// Exact: the head dim is D. Else p.head_dim < D or, at 96, also equal to it.
template <class T, int D, int Consumers, bool Exact = D % 64 == 0>
struct ForwardTile {
    using Element = T;
    static constexpr bool exact = Exact;
    static constexpr int d = D, n = 128, consumers = Consumers, m = 64 * consumers;
    static constexpr int threads = 128 * (1 + consumers), stages = 2;
    static constexpr int producer_registers = consumers == 2 ? 40 : 32;
    static constexpr int consumer_registers = consumers == 2 ? 232 : 160;
    // o leaves after the first softmax of the next tile, not before it, where fewer warpgroups are
    // there to work meanwhile: its copy begins with a barrier.
    static constexpr bool late_copy = consumers == 2;
    // By signs is shorter, but its exponentials come in one piece. At head dim 64, where they take
    // as long as the products, all warps come to want them at the same time, and a quarter is lost.
    using Softmax = std::conditional_t<(d > 96), SoftmaxBySigns<T, n / 2>, SoftmaxByMaximum<n / 2>>;
    static constexpr uint32_t rows_bytes = 64 * D * 2;  // queries, and later o, of a warpgroup
    static constexpr uint32_t q_bytes = consumers * rows_bytes, kv_bytes = n * D * 2;
    // offsets in shared memory
    static constexpr uint32_t q_at = 0, k_at = q_at + stages * q_bytes;
    static constexpr uint32_t v_at = k_at + stages * kv_bytes;
    static constexpr int shared_bytes = v_at + stages * kv_bytes + 1024;  // 1024: alignment
};

struct ForwardBarriers {
    uint64_t q_full[2], q_empty[2], k_full[2], k_empty[2], v_full[2], v_empty[2];
    uint64_t work_full[2], work_empty[2];
};

// One tile of work: M query rows of one head against `count` key tiles from key `origin` on. Tiles
// of keys that begin where a document does have no edge there.
struct ForwardWork {
    int m, head, batch;  // negative head: no more work
    int origin, count;
};

// The key tiles that query tile m sees from key `origin` on, by the causal rule.
template <class Tile>
DEVICE int count_key_tiles(const Mask& mask, int m, int origin) {
    const int keys = mask.high(min((m + 1) * Tile::m, mask.queries) - 1) - origin;
    return max(keys + Tile::n - 1, 0) / Tile::n;
}

// Unit number -> tile of work; heavy query tiles first within a section of heads, which are the
// late ones when there are no documents.
template <class Tile>
DEVICE ForwardWork find_tile(const ForwardParams& p, int unit) {
    const int section = unit / (p.section_heads * p.m_tiles);
    const int inside = unit - section * p.section_heads * p.m_tiles;
    const int first = section * p.section_heads;
    const int count = min(p.section_heads, p.all_heads - first);
    const int head = first + inside % count;  // counted through all batches
    ForwardWork w{p.m_tiles - 1 - inside / count, head % p.heads, head / p.heads, 0, 0};
    if (p.order) {
        const int row = w.batch * p.m_tiles;
        w.m = p.order[row + inside / count];
        w.origin = p.origins[row + w.m], w.count = p.lengths[row + w.m];
    } else {
        w.count = count_key_tiles<Tile>(p.mask, w.m, 0);
    }
    return w;
}

// One warp per (batch, query tile): where the keys begin that it sees, and how many tiles they are.
template <class Tile>
__global__ void __launch_bounds__(32)
    count_keys_kernel(const Mask mask, int32_t* lengths, int32_t* origins, int m_tiles,
                      int32_t* counter) {
    const int batch = blockIdx.x / m_tiles, m = blockIdx.x % m_tiles;
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
    int low = mask.keys;
    UNROLL for (int i = 0; i < Tile::m; i += 32) {
        const int row = m * Tile::m + i + int(threadIdx.x);
        if (row < mask.queries) low = min(low, mask.low(batch, row));
    }
    low = __reduce_min_sync(~0u, low);
    if (threadIdx.x > 0) return;
    lengths[blockIdx.x] = count_key_tiles<Tile>(mask, m, low), origins[blockIdx.x] = low;
}

// One thread that keeps the copies coming.
template <class Tile>
DEVICE void forward_produce(const ForwardParams& p, ForwardBarriers& bar, ForwardWork* slots,
                            uint32_t shared) {
    tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v);
    int kv_loads = 0, q_loads = 0;              // tiles so far; they go to the two stages in turn
    int count = 0, top = 0, batch = 0, kv = 0;  // key tiles of the unit at work; the last one's key
    auto load = [&](const CUtensorMap* map, uint32_t at, uint64_t* full, uint64_t* empty, int i) {
        const int stage = (kv_loads + i) % 2;
        barrier_wait(empty + stage, ((kv_loads + i) / 2 + 1) % 2);
        barrier_expect(full + stage, Tile::kv_bytes);
        load_tile<Tile::d, Tile::n>(shared + at + stage * Tile::kv_bytes, map, full + stage,
                                    top - i * Tile::n, kv, batch, keep_in_l2);
    };
    auto load_k = [&](int i) { load(&p.k, Tile::k_at, bar.k_full, bar.k_empty, i); };
    auto load_v = [&](int i) { load(&p.v, Tile::v_at, bar.v_full, bar.v_empty, i); };
    // In each turn a tile of work is found while the last keys of the one before it are at work,
    // and its first loads follow. Its number is drawn no earlier than two steps before: what a
    // block holds nobody else can take, so long tiles and drawn ones would end late together.
    int unit = blockIdx.x;
    auto draw = [&] { unit = p.counter ? int(gridDim.x) + atomicAdd(p.counter, 1) : p.tiles; };
#pragma unroll 1
    for (int turn = 0;; ++turn) {
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
            if (i == count - 1) draw();
            load_k(i), load_v(i - 1);
        }
        if (turn > 0 && count < 2) draw();
        ForwardWork w{-1, -1, 0, 0, 0};
        if (unit < p.tiles) w = find_tile<Tile>(p, unit);
        barrier_wait(&bar.work_empty[turn % 2], (turn / 2 + 1) % 2);
        slots[turn % 2] = w;
        barrier_arrive(&bar.work_full[turn % 2]);
        if (count > 0) load_v(count - 1), kv_loads += count;
        if (w.head < 0) break;
        count = w.count, top = w.origin + (count - 1) * Tile::n;
        batch = w.batch, kv = w.head / p.group;
        if (count <= 0) continue;
        load_k(0);
        const int stage = q_loads % 2;
        barrier_wait(&bar.q_empty[stage], (q_loads / 2 + 1) % 2);
        barrier_expect(&bar.q_full[stage], Tile::q_bytes);
        for (int i = 0; i < Tile::consumers; ++i)
            load_tile<Tile::d, 64>(
                shared + Tile::q_at + stage * Tile::q_bytes + i * Tile::rows_bytes, &p.q,
                &bar.q_full[stage], w.m * Tile::m + i * 64, w.head, batch, pass_through);
        ++q_loads;
    }
}

}  // namespace torus::flash
