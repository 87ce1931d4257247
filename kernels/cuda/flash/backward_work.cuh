// How the attention backward is divided: tile shapes and shared memory, the units of work that
// blocks draw from a counter, and the thread that copies their tiles in. See backward.cuh.
#pragma once
#include "kernels/cuda/flash/params.h"
#include "kernels/cuda/flash/wgmma.cuh"

namespace torus::flash {

struct BackwardBarriers {
    uint64_t k_full, k_empty, v_full, v_empty;
    uint64_t q_full[2], q_empty[2], dout_full[2], dout_empty[2];
    uint64_t work_full[2], work_empty[2];
};

// Where a swizzled tile may begin.
constexpr uint32_t next_tile(uint32_t at) { return (at + 1023) / 1024 * 1024; }

// Exact: the head dim is D. Else p.head_dim < D or, at 96, also equal to it.
template <class T, int D, Sum How, bool Exact = D % 64 == 0>
struct BackwardTile {
    using Element = T;
    using Single = BackwardTile;
    using Barriers = BackwardBarriers;
    static constexpr Sum sum = How;
    static constexpr bool exact = Exact;
    static constexpr int d = D, m = D == 64 ? 128 : 64, n = 128, consumers = 2, threads = 384;
    static constexpr int cluster = 1;  // blocks that work on one unit, a key tile each
    static constexpr int unit_keys = n;
    // Whether units are cut where documents begin. By query tiles of 128 rows that gains nothing:
    // these would have to begin with the keys.
    static constexpr bool cuts = m == 64;
    static constexpr int producer_registers = 24, consumer_registers = 240;
    static constexpr bool delayed = D > 64;  // dQ of a step runs in the next one
    // Whether it then runs under the arithmetic on dS, or dV does and dq is added to memory under
    // the next scores: which is 2% slower at D 96 if there is nothing to round, else 10% faster.
    static constexpr bool dq_first = delayed && How == Sum::plain;
    // The warpgroups share dQ by rows at M 128, by columns at M 64. Of K they then read halves of
    // the columns, which must begin at a panel: at D 96 its panels are narrower.
    static constexpr int dq_columns = D == 64 ? D : D / 2;
    static constexpr int panel = panel_columns(D), k_panel = D % 64 == 0 ? 64 : 16;
    // dQ goes to memory through shared memory and the copy engine, or straight from the registers.
    static constexpr bool by_copy = How == Sum::fixed || D == 64;
    static constexpr int dq_pieces = 1;  // in which a warpgroup's dQ passes through shared memory
    static constexpr uint32_t kv_bytes = n * D * 2, q_bytes = m * D * 2;
    static constexpr uint32_t ds_bytes = m * n * 2, dq_bytes = by_copy ? m * D * 4 : 0;
    // Whether lse and delta are subtracted by the products. Three bf16 numbers hold every bit of a
    // float; fp16 has not the range.
    static constexpr bool columns = std::is_same_v<T, __nv_bfloat16>;
    using Stats = RowStats<m, columns>;
    // With sums in fixed point a pair has no room for the first visible key of each row.
    static constexpr bool low_nearby = D < 128 || How != Sum::fixed;
    static constexpr uint32_t stats_bytes = low_nearby ? Stats::factor_at : Stats::low_at;
    static constexpr uint32_t ones_bytes = columns ? 256 : 0;
    static constexpr uint32_t small_bytes = 2 * stats_bytes + ones_bytes;
    // Offsets in shared memory. Something follows the ones: compute-sanitizer takes a product's
    // operand, which these are twice, for 2 KB in a row.
    static constexpr uint32_t k_at = 0, v_at = k_at + kv_bytes, q_at = v_at + kv_bytes;
    static constexpr uint32_t dout_at = q_at + 2 * q_bytes, stats_at = dout_at + 2 * q_bytes;
    static constexpr uint32_t ones_at = stats_at + 2 * stats_bytes;
    static constexpr uint32_t ds_at = next_tile(stats_at + small_bytes);
    static constexpr uint32_t dq_at = ds_at + 2 * ds_bytes;
    static constexpr int shared_bytes = dq_at + dq_bytes + 1024;
};

// The keys of one block in a unit of work, in one register: the first, a multiple of 8, and how
// many of the tile's 128 there are, rounded up to 8. The rest belongs to the next unit.
struct TileKeys {
    uint32_t bits;

    DEVICE static TileKeys of(int first, int end) {
        return {uint32_t(first / 8) << 5 | uint32_t(min(max(end - first + 7, 0) / 8, 16))};
    }
    DEVICE int first() const { return int(bits >> 5) * 8; }
    DEVICE int end() const { return first() + int(bits & 31) * 8; }  // perhaps behind all keys
};

// A key tile of one kv head against the query tiles [begin, end) of the query heads of one part.
struct BackwardWork {
    TileKeys keys;
    int n, kv_head;  // n: of the unit among those of its head; negative kv_head: no more work
    int head;        // the first query head of the part, counted through all batches
    int begin, end;
    uint32_t phase;  // parity of the loads of K and V
    int batch, part;
};

// The first tile of M queries that see this key by the causal rule.
template <int M>
DEVICE int first_query(const Mask& mask, int key) {
    return mask.causal ? max(key - mask.shift, 0) / M : 0;
}

// The row statistics of a stage come with its queries, and may be overwritten when these may: all
// products of a step follow its reads. Consumers say so once more by a barrier that racecheck
// understands; it follows neither products nor one thread's arrival for its warp.
template <class Tile>
DEVICE void stats_read(int stage) {
    named_arrive<Tile::threads - 96>(4 + stage);  // all consumers, and the producer's warp
}
template <class Tile>
DEVICE void stats_wait(int stage) {
    named_sync<Tile::threads - 96>(4 + stage);
}

// The other factors of RowStats::columns, in shared memory: eight equal rows of eight numbers that
// pick out -lse / scale, and eight for -delta. The sixteen that a product sums over are these
// twice, so they are halves. By all threads; a barrier follows.
template <class Tile>
DEVICE void write_ones(uint32_t shared) {
    constexpr uint32_t low = 0x3F00, high = 0x3F000000, both = low | high;  // 0.5 in bf16
    if (!Tile::columns || threadIdx.x >= 16) return;
    const uint32_t to = shared + Tile::ones_at + threadIdx.x * 16;
    if (threadIdx.x < 8)
        store_shared(to, both, low, 0, 0);
    else
        store_shared(to, 0, high, both, 0);
    fence_async();
}

// By one thread, before anything waits.
template <class Tile>
DEVICE void init_barriers(BackwardBarriers& bar) {
    barrier_init(&bar.k_full, 1), barrier_init(&bar.k_empty, Tile::consumers);
    barrier_init(&bar.v_full, 1), barrier_init(&bar.v_empty, Tile::consumers);
    for (int i = 0; i < 2; ++i) {
        barrier_init(&bar.q_full[i], 1);
        barrier_init(&bar.q_empty[i], Tile::cluster * Tile::consumers);
        barrier_init(&bar.dout_full[i], 1);
        if (Tile::cluster == 1) barrier_init(&bar.dout_empty[i], Tile::consumers);
        barrier_init(&bar.work_full[i], 1);
        barrier_init(&bar.work_empty[i], 4 * Tile::consumers);  // one arrival a warp
    }
}

// Unit number -> key tile, head and part. Parts in order, since each adds to what the one before it
// left; of the key tiles the longest first, which are the low ones when there is no other order.
// By the producer, with its few registers, so that consumers need not wait for divisions.
template <class Tile>
DEVICE void find_unit(const BackwardParams& p, int unit, volatile BackwardWork& w) {
    {
        const int per_head = p.parts * p.key_units;
        const int section = unit / (p.section_heads * per_head);
        const int inside = unit - section * p.section_heads * per_head;
        const int first = section * p.section_heads;
        const int count = min(p.section_heads, p.batches * p.kv_heads - first);
        w.part = inside / (p.key_units * count);
        w.n = inside / count - w.part * p.key_units;
        w.head = first + inside % count;
    }
    w.batch = w.head / p.kv_heads, w.kv_head = w.head % p.kv_heads;
    w.head = w.head * p.group + w.part * p.part_heads;
    KeyUnit keys{w.n * Tile::unit_keys, (w.n + 1) * Tile::unit_keys, 0, p.m_tiles};
    if (p.list) {
        w.n = p.order[w.batch * p.key_units + w.n];
        keys = p.list[w.batch * p.key_units + w.n];
    }
    const int begin = max(keys.begin, min(first_query<Tile::m>(p.mask, keys.first), p.m_tiles));
    w.begin = begin, w.end = max(begin, keys.stop);
    if (Tile::cluster > 1) keys.first += int(cluster_rank()) * Tile::n;
    w.keys.bits = TileKeys::of(keys.first, keys.end).bits;
}
// Writes the next unit of work where consumers read it, once that is free; false behind the last.
template <class Tile>
DEVICE bool publish(const BackwardParams& p, BackwardBarriers& bar, volatile BackwardWork& slot,
                    int turn, int unit, uint32_t phase) {
    barrier_wait(&bar.work_empty[turn % 2], (turn / 2 + 1) % 2);
    const bool any = unit < p.units;
    slot.phase = phase;
    if (any)
        find_unit<Tile>(p, unit, slot);
    else
        slot.kv_head = -1;
    barrier_arrive(&bar.work_full[turn % 2]);
    return any;
}

DEVICE int first_key(const volatile BackwardWork& w) { return TileKeys{w.keys.bits}.first(); }

// One thread that keeps the copies coming. It has 24 registers, so it reads its unit of work back
// from shared memory where it can.
template <class Tile>
DEVICE void backward_produce(const BackwardParams& p, BackwardBarriers& bar, BackwardWork* slots,
                             uint32_t shared) {
    tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v), tma_prefetch(&p.dout);
    int step = 0;
    uint32_t kv_free = 1;  // parity of the end of the last unit
    int unit = blockIdx.x;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        volatile BackwardWork* const slot = slots + turn % 2;
        if (!publish<Tile>(p, bar, *slot, turn, unit, kv_free ^ 1)) return;
        int m = slot->begin, left = (slot->end - m) * p.part_heads;
        int head = slot->head - slot->batch * p.heads;
        if (left > 0) {
            barrier_wait(&bar.k_empty, kv_free);
            barrier_expect(&bar.k_full, Tile::kv_bytes);
            load_tile<Tile::d, Tile::n, Tile::k_panel>(shared + Tile::k_at, &p.k, &bar.k_full,
                                                       first_key(*slot), slot->kv_head, slot->batch,
                                                       pass_through);
        }
        bool first = true;
#pragma unroll 1
        for (; left > 0; --left, ++step) {
            const int s = step % 2;
            const uint32_t empty = (step / 2 + 1) % 2;
            barrier_wait(&bar.q_empty[s], empty);
            barrier_expect(&bar.q_full[s], Tile::q_bytes + Tile::stats_bytes);
            if (step > 1) stats_wait<Tile>(s);
            bulk_load(shared + Tile::stats_at + s * Tile::stats_bytes,
                      static_cast<const typename Tile::Stats*>(p.stats) +
                          int64_t((slot->batch * p.heads + head) * p.m_tiles + m),
                      Tile::stats_bytes, &bar.q_full[s]);
            load_tile<Tile::d, Tile::m>(shared + Tile::q_at + s * Tile::q_bytes, &p.q,
                                        &bar.q_full[s], m * Tile::m, head, slot->batch, keep_in_l2);
            if (first) {
                barrier_wait(&bar.v_empty, kv_free);
                barrier_expect(&bar.v_full, Tile::kv_bytes);
                load_tile<Tile::d, Tile::n>(shared + Tile::v_at, &p.v, &bar.v_full,
                                            first_key(*slot), slot->kv_head, slot->batch,
                                            pass_through);
                kv_free ^= 1;
                first = false;
            }
            barrier_wait(&bar.dout_empty[s], empty);
            barrier_expect(&bar.dout_full[s], Tile::q_bytes);
            load_tile<Tile::d, Tile::m>(shared + Tile::dout_at + s * Tile::q_bytes, &p.dout,
                                        &bar.dout_full[s], m * Tile::m, head, slot->batch,
                                        keep_in_l2);
            if (++m == slot->end) m = slot->begin, ++head;
        }
        unit = p.counter ? int(block_count()) + atomicAdd(p.counter, 1) : p.units;
    }
}

}  // namespace torus::flash
