// Attention backward for Hopper. A block owns N = 128 keys of one key-value head, 64 for each of
// its two consumer warpgroups, keeps dK and dV in registers and walks over the query tiles of all
// query heads of the group, so that dK and dV need no atomics. Scores are computed transposed (S^T
// = K Q^T, dP^T = V dO^T): P^T and dS^T then are A operands straight from registers for dV += P^T
// dO and dK += dS^T Q, and only dS passes through shared memory, for dQ = dS K.
//
// dQ is a sum over blocks, added up in memory: in fp32 in whatever order the blocks come, or so
// that the order does not matter (params.h: Sum). docs/flash_attention.md derives the gradients and
// the error of the latter.
#pragma once
#include "kernels/cuda/flash/backward_work.cuh"

namespace torus::flash {

// x rounded to a multiple of ulp(unit), unit = 1.5 * 2^e with |x| < 2^(e+1).
DEVICE float to_rounded(float x, float unit) {
    const float m = copysignf(unit, x);
    return __fsub_rn(__fadd_rn(x, m), m);
}
// round(x * unit) as an integer of 32 bits, |x * unit| < 2^30, unit a power of two. In two parts of
// 20 and 11 bits on the multiply-add units; the conversion instruction runs at a quarter of their
// rate on the unit that the exponentials keep busy. The added 1.5 * 2^23 brings an integer into the
// low bits of a float; `offset` makes what it leaves in the sum vanish modulo 2^32.
DEVICE int to_fixed(float x, float unit) {
    constexpr float one_and_half = 12582912.f;  // bits 0x4B400000
    constexpr float offset = one_and_half + float(0xB4C00000u >> 11);
    const float high = fmaf(x, unit * (1.f / 2048), offset);
    const float rest = fmaf(x, unit, fmaf(high, -2048.f, offset * 2048.f));
    return __float_as_int(high) * 2048 + __float_as_int(rest + one_and_half);
}

// Two rows (row, row + 8) of dk or dv, with `add` added to what is there; what lies at `end` or
// past the last column is left out.
template <class Tile>
DEVICE void store_rows(const BackwardParams& p, void* data, const Pitch& pitch, int batch, int head,
                       int row, int end, bool add, const float (&x)[Tile::d / 2]) {
    using T = typename Tile::Element;
    constexpr int D = Tile::d;
    const int quad = threadIdx.x % 4;
    UNROLL for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < end;
        const int64_t at = batch * pitch.batch + (row + 8 * r) * pitch.row + head * pitch.head;
        if (p.wide) {
            if (!inside) continue;
            float* const to = static_cast<float*>(data) + at + 2 * quad;
            UNROLL for (int j = 0; j < D / 8; ++j) {
                if (!Tile::exact && 8 * j >= p.head_dim) break;
                float2 sum = make_float2(0, 0);
                if (add) sum = __ldcg(reinterpret_cast<const float2*>(to + 8 * j));
                sum.x += x[4 * j + 2 * r], sum.y += x[4 * j + 2 * r + 1];
                *reinterpret_cast<float2*>(to + 8 * j) = sum;
            }
            continue;
        }
        T* const to = static_cast<T*>(data) + at + 8 * quad;
        UNROLL for (int j = 0; j < D / 8; j += 4) {
            uint32_t y[4];
            UNROLL for (int i = 0; i < 4; ++i) y[i] =
                pack<T>(x[4 * (j + i) + 2 * r], x[4 * (j + i) + 2 * r + 1]);
            transpose_quad(y);
            if (inside && (Tile::exact || 8 * (j + quad) < p.head_dim))
                *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}

// The consumer warpgroups. dK and dV fill half of the registers and the tiles in flight nearly all
// of the rest, so little else is kept: addresses are computed again in every step, and the unit of
// work is read again at its end.
template <class Tile>
struct BackwardConsumer {
    using T = typename Tile::Element;
    static constexpr int D = Tile::d, M = Tile::m, dq_columns = Tile::dq_columns;
    const BackwardParams& p;
    typename Tile::Barriers& bar;
    const uint32_t shared;
    float dk[D / 2], dv[D / 2];

    // Where this thread stands.
    struct Place {
        uint32_t shared;
        int group, warp, lane;
        bool elected;
        DEVICE explicit Place(uint32_t base) : Place(base, thread_number()) {}
        DEVICE Place(uint32_t base, uint32_t tid) : shared(opaque(base)) {
            group = int(tid / 128) - 1, warp = tid / 32 % 4, lane = tid % 32,
            elected = tid % 128 == 0;
        }
        // This thread's first row of dq in its query tile, and of dk and dv in its key tile.
        DEVICE int dq_row() const { return (D == 64 ? group * 64 : 0) + warp * 16 + lane / 4; }
        DEVICE int key_row() const { return group * 64 + warp * 16 + lane / 4; }
        DEVICE void sync() const {  // this warpgroup
            if (group == 0)
                named_sync<2, 128>();
            else
                named_sync<3, 128>();
        }
    };

    DEVICE void run(const BackwardWork* slots) {
        int step = 0;
        for (int turn = 0;; ++turn) {
            barrier_wait(&bar.work_full[turn % 2], turn / 2 % 2);
            const BackwardWork* const slot = slots + turn % 2;
            const BackwardWork w = *slot;
            if (w.kv_head < 0) break;
            if (w.begin < w.end) {
                walk(w, step);
            } else {
                UNROLL for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
            }
            asm volatile("" ::: "memory");
            store(*slot);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&bar.work_empty[turn % 2]);
        }
        if (threadIdx.x % 128 == 0) bulk_wait();
    }

    DEVICE void store(const BackwardWork& w) {
        const Place at(shared);
        const int head = w.batch * p.kv_heads + w.kv_head;
        const int row = w.keys.first() + at.key_row(), end = min(w.keys.end(), p.mask.keys);
        int32_t* const flag = p.flags + (int64_t(head) * p.key_units + w.n) * 4 +
                              (Tile::cluster > 1 ? cluster_rank() * 2 : 0) + at.group;
        UNROLL for (int i = 0; i < D / 2; ++i) dk[i] *= p.scale;
        if (w.part > 0) {
            if (at.elected) flag_wait(flag, w.part);
            at.sync();
            if (!p.wide)
                for_partial(head, row, end, [](float& x, float& y, const float2* from) {
                    const float2 sum = __ldcg(from);
                    x += sum.x, y += sum.y;
                });
        }
        if (w.part + 1 == p.parts || p.wide) {
            const bool add = p.add_kv || w.part > 0;
            store_rows<Tile>(p, p.dv, p.dv_pitch, w.batch, w.kv_head, row, end, add, dv);
            store_rows<Tile>(p, p.dk, p.dk_pitch, w.batch, w.kv_head, row, end, add, dk);
        } else {
            for_partial(head, row, end,
                        [](float x, float y, float2* to) { *to = make_float2(x, y); });
        }
        if (w.part + 1 < p.parts) {
            __threadfence();
            at.sync();
            if (at.elected) flag_set(flag, w.part + 1);
        }
    }
    // Visits this thread's part of dk and dv, two numbers at a time, and where it waits for the
    // next part: by eights of keys, so that units may begin at any of these.
    template <class Visit>
    DEVICE void for_partial(int head, int row, int end, Visit visit) {
        const int lane = threadIdx.x % 32;
        const int64_t eights = (p.mask.keys + 7) / 8;
        UNROLL for (int r = 0; r < 2; ++r) {
            const int eight = row / 8 + r;
            if (eight * 8 >= end) continue;
            float2* const at = p.partial + (head * eights + eight) * (8 * D) + lane;
            UNROLL for (int j = 0; j < D / 8; ++j) {
                visit(dk[4 * j + 2 * r], dk[4 * j + 2 * r + 1], at + j * 32);
                visit(dv[4 * j + 2 * r], dv[4 * j + 2 * r + 1], at + (D / 8 + j) * 32);
            }
        }
    }

    // A query tile of a unit: number in its head, and counted through all heads.
    struct Query {
        int m, tile;
    };

    DEVICE Query begin_of(const BackwardWork& w) { return {w.begin, w.head * p.m_tiles + w.begin}; }

    // All query tiles of one unit. The scores of a step are begun at the end of the step before it,
    // and its dQ runs in the step after it (Tile::delayed).
    DEVICE void walk(const BackwardWork& w, int& step) {
        float s[M / 2];
        const int width = w.end - w.begin;
        int left = p.part_heads * width;
        Query now = begin_of(w);
        int before = 0;                  // the tile whose dq is to come
        uint32_t tid = thread_number();  // read under the last product of a step, for the next one
        auto advance = [&] {
            before = now.tile;
            ++now.m, ++now.tile, ++step, --left;
            if (now.m == w.end) now.m -= width, now.tile += p.m_tiles - width;
        };
        barrier_wait(&bar.k_full, w.phase);
        barrier_wait(&bar.q_full[step % 2], step / 2 % 2);
        begin_scores(s, Place(shared), step % 2);
        barrier_wait(&bar.v_full, w.phase);
        wgmma_wait<0>();
        pin(s);
        one_step<true>(s, w.keys, now, before, step, left > 1, tid);
        advance();
#pragma unroll 1
        while (left > 0) {
            one_step<false>(s, w.keys, now, before, step, left > 1, tid);
            advance();
        }
        const Place at(shared);
        if constexpr (Tile::delayed) {
            float dq[dq_columns / 2];
            begin_dq(dq, at, step % 2 ^ 1);
            const float2 factor = load_factors(before, at);
            wgmma_wait<0>();
            pin(dq);
            add_dq(dq, at, at.group, before, factor);
        } else {
            send_dq_before(at, before);
        }
        if (at.elected) barrier_arrive(&bar.k_empty), barrier_arrive(&bar.v_empty);
    }

    // Addresses as matrix descriptors take them: in a cluster bits 24 and up say which block.
    static DEVICE uint32_t operand(uint32_t address) {
        return Tile::cluster > 1 ? address & 0xFFFFFF : address;
    }
    // x (64 keys x M queries) = A B^T, A: this warpgroup's rows of K or V, in panels of PanelA
    // columns, B: Q or dO of that stage; asynchronous. Ones: which of `ones` picks the columns of
    // the row statistics that come first.
    template <int PanelA, int Ones>
    DEVICE void product(float (&x)[M / 2], const Place& at, uint32_t a, uint32_t b, int stage) {
        const uint32_t base = operand(at.shared);
        wgmma_fence();
        if constexpr (Tile::columns) {
            // All rows of A are the same eight numbers twice, each row of B is eight twice.
            const uint32_t ones = base + Tile::ones_at + Ones * 128;
            const uint32_t columns = base + Tile::stats_at + stage * Tile::stats_bytes;
            wgmma_ss<T, M, 0, 0>(x, unswizzled<0, 0>(ones), unswizzled<128, 0>(columns), 0);
        }
        UNROLL for (int k = 0; k < D / 16; ++k) wgmma_ss<T, M, 0, 0>(
            x, k_major<Tile::n, PanelA>(base + a + at.group * (PanelA * 128), k),
            k_major<M, Tile::panel>(base + b, k), Tile::columns || k > 0);
        wgmma_commit();
    }
    // The scores of the queries in a stage (less lse / scale), and dP (less delta).
    DEVICE void begin_scores(float (&s)[M / 2], const Place& at, int stage) {
        product<Tile::k_panel, 0>(s, at, Tile::k_at, Tile::q_at + stage * Tile::q_bytes, stage);
    }
    DEVICE void begin_dp(float (&dp)[M / 2], const Place& at, int stage) {
        product<Tile::panel, 1>(dp, at, Tile::v_at, Tile::dout_at + stage * Tile::q_bytes, stage);
    }
    // dq (64 rows of this warpgroup's share of the tile) = dS K, asynchronous.
    DEVICE void begin_dq(float (&dq)[dq_columns / 2], const Place& at, int stage) {
        const uint32_t ds = at.shared + Tile::ds_at + stage * Tile::ds_bytes;
        const uint32_t k_tile = at.shared + Tile::k_at;
        if (Tile::by_copy && at.elected) bulk_wait_read();  // the last dq has left its buffer
        named_sync<1, 256>();                               // dS is whole
        wgmma_fence();
        UNROLL for (int k = 0; k < Tile::n / 16; ++k) wgmma_ss<T, dq_columns, 0, 1>(
            dq, k_major<M>(ds + (D == 64 ? at.group * 8192 : 0), k),
            mn_major<Tile::n, Tile::k_panel>(k_tile + (D == 64 ? 0 : at.group * (Tile::n * D)), k),
            k > 0);
        wgmma_commit();
    }
    // The units of this thread's two rows of dq.
    DEVICE float2 load_factors(int tile, const Place& at) {
        if constexpr (Tile::sum == Sum::plain) return make_float2(1, 1);
        const float* const from =
            static_cast<const typename Tile::Stats*>(p.stats)[tile].factor + at.dq_row();
        return make_float2(__ldg(from), __ldg(from + 8));
    }
    // 64 rows of dq, the `part`-th half of its tile, on their way to memory, in the order of the
    // accumulators; where dq is not delayed only to shared memory, see send_dq_before.
    DEVICE void add_dq(const float (&dq)[dq_columns / 2], const Place& at, int part, int tile,
                       const float2& factor) {
        constexpr int numbers = dq_columns / 2;  // of a thread
        const int64_t base = int64_t(tile) * (M * D) + part * (M * D / 2);
        const int thread = at.warp * 32 + at.lane;
        auto addend = [&](int i) {  // its 32 bits
            const float x = dq[i], unit = i / 2 % 2 ? factor.y : factor.x;
            if constexpr (Tile::sum == Sum::fixed) return to_fixed(x, unit);
            return __float_as_int(Tile::sum == Sum::rounded ? to_rounded(x, unit) : x);
        };
        if constexpr (!Tile::by_copy) {
            float4* const to = static_cast<float4*>(p.sums) + base / 4 + thread;
            UNROLL for (int i = 0; i < numbers; i += 4)
                red_add(to + i * 32, __int_as_float(addend(i)), __int_as_float(addend(i + 1)),
                        __int_as_float(addend(i + 2)), __int_as_float(addend(i + 3)));
        } else {
            const uint32_t to = dq_stage(at) + thread * 16;
            UNROLL for (int first = 0; first < numbers; first += dq_count) {
                if (first > 0) {
                    send_dq(at, base + (first - dq_count) * 128);
                    if (at.elected) bulk_wait_read();
                    at.sync();
                }
                UNROLL for (int i = first; i < first + dq_count; i += 4) store_shared(
                    to + (i - first) * 512, addend(i), addend(i + 1), addend(i + 2), addend(i + 3));
            }
            if constexpr (Tile::delayed) send_dq(at, base + (numbers - dq_count) * 128);
        }
    }
    // What a thread has in shared memory of dq at a time, and where its warpgroup's lies.
    static constexpr int dq_count = dq_columns / 2 / Tile::dq_pieces;
    DEVICE static uint32_t dq_stage(const Place& at) {
        return at.shared + Tile::dq_at + at.group * (dq_count * 512);
    }
    // From there on its way to memory, `to` numbers into the sums.
    DEVICE void send_dq(const Place& at, int64_t to) {
        fence_async();
        at.sync();
        if (!at.elected) return;
        if constexpr (Tile::sum == Sum::fixed)
            bulk_add_s32(static_cast<int32_t*>(p.sums) + to, dq_stage(at), dq_count * 512);
        else
            bulk_add_f32(static_cast<float*>(p.sums) + to, dq_stage(at), dq_count * 512);
        bulk_commit();
    }
    // Where dq is not delayed, it is sent in the next step: a fence right behind the stores would
    // wait for them.
    DEVICE void send_dq_before(const Place& at, int tile) {
        send_dq(at, int64_t(tile) * (M * D) + at.group * (M * D / 2));
    }

    // Scores of keys that a query does not see become -inf: where the causal rule or the last key
    // of the unit cuts the tiles of keys and queries m, and where a document of queries begins in
    // the keys or later.
    DEVICE void mask(float (&s)[M / 2], const Place& at, TileKeys keys, Query now, uint32_t stats) {
        const int m = now.m;
        const int first = keys.first(), key = first + at.key_row(), column = 2 * (at.lane % 4);
        const int end = Tile::cuts ? min(keys.end(), p.mask.keys) : p.mask.keys;
        if (first + Tile::n > min(p.mask.high(m * M), end)) {
            UNROLL for (int r = 0; r < 2; ++r) {
                const int query = key + 8 * r < end ? p.mask.seen_from(key + 8 * r) : m * M + M;
                const uint32_t visible = columns_between<M>(query - m * M - column, M);
                UNROLL for (int i = 0; i < M / 4; ++i) {
                    float& x = s[i / 2 * 4 + 2 * r + i % 2];
                    x = visible >> i & 1 ? x : -INFINITY;
                }
            }
        }
        using Stats = typename Tile::Stats;
        if (p.mask.first_key && first < load_shared_i2(stats + Stats::bounds_at).y) {
            UNROLL for (int j = 0; j < M / 8; ++j) {
                const int row = 8 * j + column;
                int2 low;
                if constexpr (Tile::low_nearby)
                    low = load_shared_i2(stats + Stats::low_at + row * 4);
                else
                    low = __ldg(reinterpret_cast<const int2*>(
                        static_cast<const Stats*>(p.stats)[now.tile].low + row));
                UNROLL for (int i = 0; i < 4; ++i) if (key + i / 2 * 8 < (i % 2 ? low.y : low.x))
                    s[4 * j + i] = -INFINITY;
            }
        }
    }

    // P^T of the masked scores, in 16 bits; lse_at: this thread's columns in shared memory, if they
    // are not part of the scores.
    DEVICE void probabilities(const float (&s)[M / 2], uint32_t (&p16)[M / 4], uint32_t lse_at) {
        uint32_t signs = 0;
        UNROLL for (int j = 0; j < M / 8; ++j) {
            const float2 lse2 = Tile::columns ? make_float2(0, 0) : load_shared_f2(lse_at + 32 * j);
            p16[2 * j] = pack<T>(exp2_fast(fmaf(s[4 * j], p.scale_log2, -lse2.x)),
                                 exp2_fast(fmaf(s[4 * j + 1], p.scale_log2, -lse2.y)));
            p16[2 * j + 1] = pack<T>(exp2_fast(fmaf(s[4 * j + 2], p.scale_log2, -lse2.x)),
                                     exp2_fast(fmaf(s[4 * j + 3], p.scale_log2, -lse2.y)));
            signs |= p16[2 * j] | p16[2 * j + 1];
        }
        // Never true. It makes the branch depend on every probability, so that ptxas cannot move
        // their computation behind the wait, away from under the product.
        if (signs & 0x80008000u) __trap();
    }
    // dS^T = P^T (dP^T - delta); delta_at likewise.
    DEVICE void differences(const float (&dp)[M / 2], const uint32_t (&p16)[M / 4],
                            uint32_t (&ds16)[M / 4], uint32_t delta_at) {
        UNROLL for (int j = 0; j < M / 8; ++j) {
            const float2 delta =
                Tile::columns ? make_float2(0, 0) : load_shared_f2(delta_at + 32 * j);
            const float2 upper = unpack<T>(p16[2 * j]), lower = unpack<T>(p16[2 * j + 1]);
            ds16[2 * j] =
                pack<T>(upper.x * (dp[4 * j] - delta.x), upper.y * (dp[4 * j + 1] - delta.y));
            ds16[2 * j + 1] =
                pack<T>(lower.x * (dp[4 * j + 2] - delta.x), lower.y * (dp[4 * j + 3] - delta.y));
        }
    }
    // Rows of dS, 64 of its columns.
    DEVICE void store_ds(const Place& at, int stage, const uint32_t (&ds16)[M / 4]) {
        const uint32_t ds_to = at.shared + Tile::ds_at + stage * Tile::ds_bytes +
                               at.group * (M * 128) + (at.lane / 16 * 8 + at.lane % 8) * 128 +
                               ((at.warp * 32 + at.lane / 8 % 2 * 16) ^ (at.lane % 8 * 16));
        UNROLL for (int k = 0; k < M / 16; ++k)
            store_matrix_transposed(ds_to + k * 2048, ds16 + 4 * k);
    }
    // dV += P^T dO or dK += dS^T Q, asynchronous; the first step of a unit overwrites them.
    DEVICE void add_product(float (&sum)[D / 2], const uint32_t (&a)[M / 4], uint32_t tile,
                            bool first) {
        UNROLL for (int k = 0; k < M / 16; ++k) wgmma_rs<T, D, 1>(
            sum, a + 4 * k, mn_major<M, Tile::panel>(operand(tile), k), !first || k > 0);
        wgmma_commit();
    }

    // One query tile. s: its scores, then those of the next one; behind the last one there is none,
    // and the product of whatever lies there is not used.
    template <bool First>
    DEVICE void one_step(float (&s)[M / 2], TileKeys keys, Query now, int before, int step,
                         bool more, uint32_t& tid) {
        float dp[M / 2], dq[dq_columns / 2];
        uint32_t p16[M / 4], ds16[M / 4];
        const int stage = step % 2;
        const Place before_dp(shared, tid);
        const uint32_t stats = before_dp.shared + Tile::stats_at + stage * Tile::stats_bytes;
        const uint32_t lse_at = stats + before_dp.lane % 4 * 8;
        barrier_wait(&bar.dout_full[stage], step / 2 % 2);
        begin_dp(dp, before_dp, stage);
        if constexpr (!Tile::delayed && !First) send_dq_before(before_dp, before);
        mask(s, before_dp, keys, now, stats);
        probabilities(s, p16, lse_at);
        const Place at(shared);
        const uint32_t q = at.shared + Tile::q_at + stage * Tile::q_bytes;
        const uint32_t dout = at.shared + Tile::dout_at + stage * Tile::q_bytes;
        constexpr bool has_dq = !Tile::delayed || !First, dq_first = Tile::dq_first && has_dq;
        if constexpr (dq_first) {
            begin_dq(dq, at, stage ^ 1);
        } else {
            wgmma_fence();
            add_product(dv, p16, dout, First);
        }
        wgmma_wait<1>();
        pin(dp);
        const uint32_t delta_at =
            at.shared + Tile::stats_at + stage * Tile::stats_bytes + 4 * M + at.lane % 4 * 8;
        differences(dp, p16, ds16, delta_at);
        store_ds(at, stage, ds16);
        wgmma_fence();
        if constexpr (dq_first) add_product(dv, p16, dout, First);
        add_product(dk, ds16, q, First);
        if constexpr (!Tile::by_copy || !Tile::delayed || First)
            fence_async();  // dS, for both warpgroups' products; else the fence of add_dq does it
        const int dq_tile = Tile::delayed ? before : now.tile;
        float2 factor;
        if constexpr (has_dq) {
            if constexpr (!dq_first) begin_dq(dq, at, Tile::delayed ? stage ^ 1 : stage);
            factor = load_factors(dq_tile, at);
        }
        auto release = [&] {
            pin(dv), pin(dk);
            if (at.elected)
                barrier_arrive(&bar.dout_empty[stage]), barrier_arrive(&bar.q_empty[stage]);
            stats_read<Tile>(stage);
        };
        auto finish_dq = [&] {
            pin(dq);
            add_dq(dq, at, at.group, dq_tile, factor);
        };
        // A wait for dV before the scores are begun: without one ptxas serializes the products.
        if constexpr (!Tile::delayed) {
            wgmma_wait<1>();
            release();
        } else if constexpr (has_dq) {
            wgmma_wait<2>();
            if constexpr (dq_first)
                finish_dq();
            else
                pin(dv);
        }
        if (more) barrier_wait(&bar.q_full[stage ^ 1], (step + 1) / 2 % 2);
        begin_scores(s, at, stage ^ 1);
        wgmma_wait<1>();
        if constexpr (Tile::delayed) release();
        if constexpr (has_dq && !dq_first) finish_dq();
        tid = thread_number();
        wgmma_wait<0>();
        pin(s);
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
#ifdef TORUS_SM90A
    extern __shared__ uint8_t raw[];
    __shared__ BackwardBarriers bar;
    __shared__ BackwardWork slots[2];
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        init_barriers<Tile>(bar);
        barrier_init_done();
    }
    write_ones<Tile>(shared);
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_shrink<Tile::producer_registers>();
        if (threadIdx.x == 0) backward_produce<Tile>(p, bar, slots, shared);
    } else {
        registers_grow<Tile::consumer_registers>();
        BackwardConsumer<Tile> consumer{p, bar, shared};
        consumer.run(slots);
    }
#endif
}

}  // namespace torus::flash
