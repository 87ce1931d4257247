// The attention backward at D 128 by pairs: clusters of two blocks, which add half as much to
// memory. The block of rank r owns one of two neighbouring key tiles and has its dK and dV as in
// backward.cuh; both walk over the same query tiles. They send each other their dS, and then each
// has 64 of the 128 columns of the dQ of both key tiles, for which it also keeps those columns of
// the other's keys. Queries and dout are loaded once for both, half by each.
//
// The two warpgroups of a block take turns: tile t of the block's count goes to warpgroup t % 2, as
// 64 x 64 x 256, in step t + 1. A product of 32 columns in every step instead would read shared
// memory faster than it can.
//
// Whatever a block waits for, the other does in an earlier step: there is no circle.
#pragma once
#include "kernels/cuda/flash/backward.cuh"

namespace torus::flash {

struct PairBarriers : BackwardBarriers {  // q_empty stands for dout, too
    uint64_t ds_full[2], other_full[2];   // dS of this block and of the other one
    uint64_t ds_empty[2];                 // this block's dS has been used, here and there
    uint64_t unit_full, unit_empty;       // the number of the next unit, from rank 0 to rank 1
};

// What a pair's block keeps beside its tiles.
struct PairControl {
    PairBarriers bar;
    BackwardWork slots[2];
    int32_t unit;
};

template <class T, Sum How>
struct PairTile : BackwardTile<T, 128, How> {
    using Single = BackwardTile<T, 128, How>;
    using Barriers = PairBarriers;
    static constexpr int cluster = 2, unit_keys = 256, dq_pieces = 2;
    static constexpr bool dq_first = How != Sum::fixed;                // else 8% slower
    static constexpr uint32_t dq_bytes = Single::by_copy ? 16384 : 0;  // 8 KB a warpgroup
    static constexpr uint32_t k_half = Single::n * 128, q_half = Single::m * 128;  // a panel
    // offsets in shared memory; the other block's keys are the 64 columns that dQ needs
    static constexpr uint32_t k_at = 0, v_at = k_at + Single::kv_bytes;
    static constexpr uint32_t other_k_at = v_at + Single::kv_bytes, q_at = other_k_at + k_half;
    static constexpr uint32_t dout_at = q_at + 2 * Single::q_bytes;
    static constexpr uint32_t stats_at = dout_at + 2 * Single::q_bytes;
    static constexpr uint32_t ones_at = stats_at + 2 * Single::stats_bytes;
    static constexpr uint32_t control_at = stats_at + Single::small_bytes;
    static constexpr uint32_t ds_at = next_tile(control_at + sizeof(PairControl));
    static constexpr uint32_t other_ds_at = ds_at + 2 * Single::ds_bytes;
    static constexpr uint32_t dq_at = other_ds_at + 2 * Single::ds_bytes;
    static constexpr int shared_bytes = dq_at + dq_bytes;
    static_assert(shared_bytes <= 232448 && control_at % 16 == 0);
};

// One thread of each block. Rank 0 draws the units for both.
template <class Tile>
DEVICE void pair_produce(const BackwardParams& p, PairControl& control, uint32_t shared) {
    PairBarriers& bar = control.bar;
    tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v), tma_prefetch(&p.dout);
    int step = 0;
    uint32_t kv_free = 1;  // parity of the end of the last unit
    int unit = blockIdx.x / 2;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        volatile BackwardWork* const slot = control.slots + turn % 2;
        if (!publish<Tile>(p, bar, *slot, turn, unit, kv_free ^ 1)) return;
        int m = slot->begin, left = (slot->end - m) * p.part_heads;
        int head = slot->head - slot->batch * p.heads;
        if (left > 0) {
            barrier_wait(&bar.k_empty, kv_free);
            barrier_expect(&bar.k_full, Tile::kv_bytes);
            for (int i = 0; i < 2; ++i)
                tma_load(shared + Tile::k_at + i * Tile::k_half, &p.k, &bar.k_full,
                         first_key(*slot), slot->kv_head, slot->batch, pass_through, 0, i);
        }
        bool first = true;
#pragma unroll 1
        for (; left > 0; --left, ++step) {
            const int s = step % 2;
            barrier_wait(&bar.q_empty[s], (step / 2 + 1) % 2);
            const uint32_t to = shared + s * Tile::q_bytes + cluster_rank() * Tile::q_half;
            barrier_expect(&bar.q_full[s], Tile::q_bytes + Tile::stats_bytes);
            tma_load_both(to + Tile::q_at, &p.q, &bar.q_full[s], m * Tile::m, head, slot->batch,
                          keep_in_l2, cluster_rank());
            if (step > 1) stats_wait<Tile>(s);
            bulk_load(shared + Tile::stats_at + s * Tile::stats_bytes,
                      static_cast<const typename Tile::Stats*>(p.stats) +
                          int64_t((slot->batch * p.heads + head) * p.m_tiles + m),
                      Tile::stats_bytes, &bar.q_full[s]);
            if (first) {
                barrier_wait(&bar.v_empty, kv_free);
                barrier_expect(&bar.v_full, Tile::kv_bytes + Tile::k_half);
                const int keys = first_key(*slot);
                const int other_keys = keys + (cluster_rank() == 0 ? Tile::n : -Tile::n);
                tma_load(shared + Tile::v_at, &p.v, &bar.v_full, keys, slot->kv_head, slot->batch,
                         pass_through);
                tma_load(shared + Tile::other_k_at, &p.k, &bar.v_full, other_keys, slot->kv_head,
                         slot->batch, pass_through, 0, cluster_rank());
                kv_free ^= 1;
                first = false;
            }
            barrier_expect(&bar.dout_full[s], Tile::q_bytes);
            tma_load_both(to + Tile::dout_at, &p.dout, &bar.dout_full[s], m * Tile::m, head,
                          slot->batch, keep_in_l2, cluster_rank());
            if (++m == slot->end) m = slot->begin, ++head;
        }
        if (!p.counter) {
            unit = p.units;
        } else if (cluster_rank() == 0) {
            unit = int(cluster_count()) + atomicAdd(p.counter, 1);
            barrier_wait(&bar.unit_empty, (turn + 1) % 2);
            send_word(address_in(1, shared_address(&control.unit)), unit,
                      address_in(1, shared_address(&bar.unit_full)));
        } else {
            barrier_expect(&bar.unit_full, 4);
            barrier_wait(&bar.unit_full, turn % 2);
            unit = *static_cast<volatile int32_t*>(&control.unit);
            barrier_arrive_in(0, &bar.unit_empty);
        }
    }
}

template <class Tile>
struct PairConsumer : BackwardConsumer<Tile> {
    using Base = BackwardConsumer<Tile>;
    using Base::M, Base::D, Base::p, Base::bar, Base::shared, Base::dk, Base::dv;
    using typename Base::Place, typename Base::Query;

    // As in backward.cuh, but for the count: steps done, modulo four, in the lowest two bits, and
    // above them units done. Two registers would be one too many.
    DEVICE void run(const BackwardWork* slots) {
        for (uint32_t count = 0;; count += 4) {
            const uint32_t turn = count >> 2;
            barrier_wait(&bar.work_full[turn & 1], turn >> 1 & 1);
            const BackwardWork w = slots[turn & 1];
            if (w.kv_head < 0) break;
            if (w.begin < w.end) {
                walk(w, count);
            } else {
                UNROLL for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
            }
            asm volatile("" ::: "memory");
            this->store(slots[count >> 2 & 1]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&bar.work_empty[count >> 2 & 1]);
        }
        if (threadIdx.x % 128 == 0) bulk_wait();
    }

    static DEVICE uint32_t stage_of(uint32_t step) { return step & 1; }
    static DEVICE uint32_t phase_of(uint32_t step) { return step >> 1 & 1; }
    // Whether this warpgroup makes dq of the step before this one.
    static DEVICE bool has_turn(uint32_t step) {
        return ((step ^ (thread_number() / 128)) & 1) == 0;
    }

    // Both blocks have the same w but for its key tile, and so the same steps.
    DEVICE void walk(const BackwardWork& w, uint32_t& step) {
        float s[M / 2];
        const int width = w.end - w.begin;
        int left = p.part_heads * width;
        Query now = this->begin_of(w);
        uint32_t tid = thread_number();  // read under the last product of a step, for the next one
        auto advance = [&] {
            ++now.m, ++now.tile, --left;
            step = (step & ~3u) | ((step + 1) & 3);
            if (now.m == w.end) now.m -= width, now.tile += p.m_tiles - width;
        };
        // Of the step before; counted back, which spares a register in every step.
        auto tile_before = [&] {
            return now.tile - 1 - (now.m == w.end - width ? p.m_tiles - width : 0);
        };
        barrier_wait(&bar.k_full, w.phase);
        barrier_wait(&bar.q_full[stage_of(step)], phase_of(step));
        this->begin_scores(s, Place(shared), stage_of(step));
        barrier_wait(&bar.v_full, w.phase);
        wgmma_wait<0>();
        pin(s);
        one_step<true, false>(s, w.keys, now, tile_before, step, left > 1, tid);
        advance();
#pragma unroll 1
        while (left > 0) {
            if (has_turn(step))
                one_step<false, true>(s, w.keys, now, tile_before, step, left > 1, tid);
            else
                one_step<false, false>(s, w.keys, now, tile_before, step, left > 1, tid);
            advance();
        }
        const Place at(shared);
        if (has_turn(step)) {
            float dq[32];
            begin_dq(dq, at, step - 1);
            const float2 factor = this->load_factors(tile_before(), at);
            wgmma_wait<0>();
            end_dq(dq, at, step - 1, tile_before(), factor);
        }
        if (at.elected) barrier_arrive(&bar.k_empty), barrier_arrive(&bar.v_empty);
    }

    // This block's columns of dq, asynchronous, in two groups of products: those over its own keys
    // need not wait for what the other block sends.
    DEVICE void begin_dq(float (&dq)[32], const Place& at, uint32_t step) {
        const uint32_t base = Base::operand(at.shared);
        // By the shuffle ptxas knows that all lanes have the same, which spares registers.
        const uint32_t ds =
            __shfl_sync(~0u, base + Tile::ds_at + stage_of(step) * Tile::ds_bytes, 0);
        barrier_wait(&bar.ds_full[stage_of(step)], phase_of(step));
        wgmma_fence();
        for_keys(dq, ds, base + Tile::k_at + cluster_rank() * Tile::k_half, 0);
        wgmma_commit();
        barrier_wait(&bar.other_full[stage_of(step)], phase_of(step));
        wgmma_fence();
        for_keys(dq, ds + (Tile::other_ds_at - Tile::ds_at), base + Tile::other_k_at, 1);
        wgmma_commit();
    }
    // dq (64 x 64) (+)= dS K over one key tile.
    DEVICE void for_keys(float (&dq)[32], uint32_t ds, uint32_t k_tile, int accumulate) {
        UNROLL for (int k = 0; k < Tile::n / 16; ++k) wgmma_ss<typename Base::T, 64, 0, 1>(
            dq, k_major<M>(ds, k), mn_major<Tile::n>(k_tile, k), accumulate || k > 0);
    }
    DEVICE void end_dq(float (&dq)[32], const Place& at, uint32_t step, int tile,
                       const float2& factor) {
        pin(dq);
        if (at.elected) {
            barrier_arrive(&bar.ds_empty[stage_of(step)]);
            barrier_arrive_in(cluster_rank() ^ 1, &bar.ds_empty[stage_of(step)]);
            if constexpr (Tile::by_copy) bulk_wait_read();  // the last dq has left its buffer
        }
        if constexpr (Tile::by_copy) at.sync();
        this->add_dq(dq, at, int(cluster_rank()), tile, factor);
    }

    // Gives this warpgroup's dS, just written, to the products of both blocks.
    DEVICE void send_ds(const Place& at, uint32_t stage) {
        constexpr uint32_t bytes = Tile::ds_bytes / 2;
        fence_async();
        at.sync();
        if (!at.elected) return;
        const uint32_t from = at.shared + Tile::ds_at + stage * Tile::ds_bytes + at.group * bytes;
        const uint32_t other = cluster_rank() ^ 1;
        barrier_arrive(&bar.ds_full[stage]);
        barrier_expect(&bar.other_full[stage], bytes);
        bulk_send(address_in(other, from + (Tile::other_ds_at - Tile::ds_at)), from, bytes,
                  address_in(other, shared_address(&bar.other_full[stage])));
    }

    // One query tile, as in backward.cuh. A warpgroup makes dQ of every second one.
    template <bool First, bool HasTurn, class TileBefore>
    DEVICE void one_step(float (&s)[M / 2], TileKeys keys, Query now, TileBefore tile_before,
                         uint32_t step, bool more, uint32_t& tid) {
        constexpr bool dq_first = Tile::dq_first && HasTurn;
        float dp[M / 2], dq[32];
        uint32_t p16[M / 4], ds16[M / 4];
        const uint32_t stage = stage_of(step);
        const Place before_dp(shared, tid);
        const uint32_t stats = before_dp.shared + Tile::stats_at + stage * Tile::stats_bytes;
        const uint32_t lse_at = stats + before_dp.lane % 4 * 8;
        barrier_wait(&bar.dout_full[stage], phase_of(step));
        this->begin_dp(dp, before_dp, stage);
        this->mask(s, before_dp, keys, now, stats);
        this->probabilities(s, p16, lse_at);
        const Place at(shared);
        const uint32_t q = at.shared + Tile::q_at + stage * Tile::q_bytes;
        const uint32_t dout = at.shared + Tile::dout_at + stage * Tile::q_bytes;
        if constexpr (dq_first) {
            begin_dq(dq, at, step - 1);
        } else {
            wgmma_fence();
            this->add_product(dv, p16, dout, First);
        }
        wgmma_wait<dq_first ? 2 : 1>();
        pin(dp);
        this->differences(
            dp, p16, ds16,
            at.shared + Tile::stats_at + stage * Tile::stats_bytes + 4 * M + at.lane % 4 * 8);
        barrier_wait(&bar.ds_empty[stage], phase_of(step) ^ 1);
        this->store_ds(at, stage, ds16);
        wgmma_fence();
        if constexpr (dq_first) this->add_product(dv, p16, dout, First);
        this->add_product(dk, ds16, q, First);
        send_ds(at, stage);
        float2 factor;
        if constexpr (HasTurn) {
            if constexpr (!dq_first) begin_dq(dq, at, step - 1);
            const int before = tile_before();
            factor = this->load_factors(before, at);
            wgmma_wait<dq_first ? 2 : 3>();
            if constexpr (dq_first) end_dq(dq, at, step - 1, before, factor);
        }
        if (more) barrier_wait(&bar.q_full[stage ^ 1], phase_of(step + 1));
        this->begin_scores(s, at, stage ^ 1);
        wgmma_wait<1>();
        pin(dv), pin(dk);
        if (at.elected) {
            barrier_arrive(&bar.q_empty[stage]);
            barrier_arrive_in(cluster_rank() ^ 1, &bar.q_empty[stage]);
        }
        stats_read<Tile>(stage);
        if constexpr (HasTurn && !dq_first) end_dq(dq, at, step - 1, tile_before(), factor);
        tid = thread_number();
        wgmma_wait<0>();
        pin(s);
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    pair_kernel(const __grid_constant__ BackwardParams p) {
#ifdef TORUS_SM90A
    extern __shared__ __align__(16) uint8_t memory[];  // at 1024, which the host checks
    PairControl& control = *reinterpret_cast<PairControl*>(memory + Tile::control_at);
    PairBarriers& bar = control.bar;
    if (threadIdx.x == 0) {
        init_barriers<Tile>(bar);
        for (int i = 0; i < 2; ++i) {
            barrier_init(&bar.ds_full[i], Tile::consumers);
            barrier_init(&bar.other_full[i], Tile::consumers), barrier_init(&bar.ds_empty[i], 2);
        }
        barrier_init(&bar.unit_full, 1), barrier_init(&bar.unit_empty, 1);
        barrier_init_done();
    }
    const uint32_t shared = shared_address(memory);
    write_ones<Tile>(shared);
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_shrink<Tile::producer_registers>();
        if (threadIdx.x < 32) {
            if (threadIdx.x > 0) return;  // stats_wait would wait for the warp's other threads
            pair_produce<Tile>(p, control, shared);
        }
    } else {
        registers_grow<Tile::consumer_registers>();
        PairConsumer<Tile> consumer{{p, bar, shared}};
        consumer.run(control.slots);
    }
    cluster_sync();  // of all threads still there: the other may reach into this shared memory
#endif
}

}  // namespace torus::flash
