// Attention forward for Hopper, after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): one
// warpgroup only moves tiles with TMA, two or three others own 64 query rows each and run the
// softmax of one key tile under the matrix products of its neighbours, their own and the other
// warpgroups'. Blocks stay on their multiprocessor and draw query tiles from a counter, the longest
// first; the last product of one runs beside the first of the next. Within a section of heads whose
// keys and values fit the L2 cache, tiles of the same query range follow one another.
// D columns (the head dim, or a little more), M query rows and N keys of a tile; see
// docs/flash_attention.md.
#pragma once
#include "kernels/cuda/flash/forward_work.cuh"
#include "kernels/cuda/flash/softmax.cuh"

namespace torus::flash {

// The end of two rows of a query tile: what divides their output, and their log-sum-exp.
struct RowEnds {
    float weight[2], lse[2];

    template <class Softmax>
    DEVICE RowEnds(const Softmax& soft, float scale) {
        UNROLL for (int r = 0; r < 2; ++r) {
            float sum = soft.sum[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const bool empty = !(sum > 0);
            weight[r] = empty ? 0.f : __fdividef(1.f, sum);
            lse[r] = empty ? -INFINITY : soft.log_sum(r, sum, scale);
        }
    }
};

// Merges two rows of o and lse into what is there.
template <class Tile>
DEVICE void forward_merge(const ForwardParams& p, const ForwardWork& w, int row0,
                          const float (&o)[Tile::d / 2], const RowEnds& ends) {
    const int quad = threadIdx.x % 4;
    UNROLL for (int r = 0; r < 2; ++r) {
        const int row = row0 + 8 * r;
        if (row >= p.mask.queries || ends.lse[r] == -INFINITY) continue;
        float* const lse_at = p.lse_at(w.batch, w.head, row);
        const float before = *lse_at, high = fmaxf(before, ends.lse[r]);
        const float old_part = __expf(before - high), new_part = __expf(ends.lse[r] - high);
        __syncwarp(0xFu << (threadIdx.x % 32 / 4 * 4));  // the quad has read lse
        const float total = old_part + new_part, keep = __fdividef(old_part, total);
        const float weight = ends.weight[r] * __fdividef(new_part, total);
        if (quad == 0) *lse_at = high + __logf(total);
        float* const to = static_cast<float*>(p.o) + w.batch * p.o_pitch.batch +
                          row * p.o_pitch.row + w.head * p.o_pitch.head + 2 * quad;
        UNROLL for (int j = 0; j < Tile::d / 8; ++j) {
            if (!Tile::exact && 8 * j >= p.head_dim) break;
            float2 x = make_float2(0, 0);
            if (keep > 0) x = *reinterpret_cast<float2*>(to + 8 * j);
            x.x = x.x * keep + o[4 * j + 2 * r] * weight;
            x.y = x.y * keep + o[4 * j + 2 * r + 1] * weight;
            *reinterpret_cast<float2*>(to + 8 * j) = x;
        }
    }
}

// Writes two rows of o into the warpgroup's 64 rows of shared memory, from where TMA takes them.
template <class T, int D>
DEVICE void forward_stage(uint32_t to, const float (&o)[D / 2], const RowEnds& ends) {
    constexpr int chunks = panel_columns(D) / 8;  // of 16 bytes in a row of a panel
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // Four 8 x 8 tiles at a time, two above each other; this lane names a row of one of them.
    const uint32_t rows = to + (warp * 16 + lane % 16) * (chunks * 16);
    const uint32_t swizzle = (lane / 16 ^ lane % 8 / (8 / chunks)) * 16;
    UNROLL for (int j = 0; j < D / 8; j += 2) {
        uint32_t x[4];
        UNROLL for (int i = 0; i < 4; ++i) {
            const int at = 4 * (j + i / 2) + 2 * (i % 2);
            x[i] = pack<T>(o[at] * ends.weight[i % 2], o[at + 1] * ends.weight[i % 2]);
        }
        store_matrix(rows + j / chunks * (chunks * 1024) + (j % chunks * 16 ^ swizzle), x);
    }
}

// Two rows of o and lse for queries that see no key.
template <class Tile>
DEVICE void store_nothing(const ForwardParams& p, const ForwardWork& w, int row0) {
    using T = typename Tile::Element;
    if (p.carry) return;
    const int quad = threadIdx.x % 4;
#pragma unroll 1
    for (int row = row0; row < min(row0 + 9, p.mask.queries); row += 8) {
        if (quad == 0) *p.lse_at(w.batch, w.head, row) = -INFINITY;
        const int64_t at =
            w.batch * p.o_pitch.batch + row * p.o_pitch.row + w.head * p.o_pitch.head;
        T* const to = static_cast<T*>(p.o) + at + 8 * quad;
#pragma unroll 1
        for (int i = 0; i < Tile::d; i += 32)
            if (Tile::exact || i + 8 * quad < p.head_dim)
                *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
    }
}

// A consumer warpgroup. One copy of its code serves all warpgroups and stages: with more, at each
// change of the query tile much of it had to come anew into the instruction caches.
template <class Tile>
struct ForwardConsumer {
    using T = typename Tile::Element;
    static constexpr int D = Tile::d, N = Tile::n, panel = panel_columns(D);
    const ForwardParams& p;
    ForwardBarriers& bar;
    const uint32_t shared;
    const int group;
    const ForwardWork* const slots;
    // What to wait for, in one register. Bits 0 and 1: parity of the loads of K, by stage; 2 and 3:
    // of V; 4: stage of the queries, 5: parity of their load; 6: stage of the key tile whose scores
    // are known; 7: the other stage of the queries has still to be given back; 8 and up: units of
    // work so far.
    uint32_t phases = 1 << 6;
    float s[N / 2], o[D / 2];
    uint32_t probability[N / 4];
    typename Tile::Softmax soft;
    int low[2];                // first keys of this thread's two rows
    int full_begin, full_end;  // key tiles that all rows of the warp see

    DEVICE bool elected() const { return threadIdx.x % 128 == 0; }
    DEVICE int first_row(const ForwardWork& w) const { return w.m * Tile::m + group * 64; }
    DEVICE int row_of(const ForwardWork& w) const {  // the first; the second is 8 rows below
        return first_row(w) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    }

    DEVICE ForwardWork take() {
        const uint32_t slot = phases >> 8 & 1;
        barrier_wait(&bar.work_full[slot], phases >> 9 & 1);
        ForwardWork w = slots[slot];
        // The same for all threads to the compiler, too.
        w.origin = __shfl_sync(~0u, w.origin, 0), w.count = __shfl_sync(~0u, w.count, 0);
        w.head = __shfl_sync(~0u, w.head, 0), w.batch = __shfl_sync(~0u, w.batch, 0);
        __syncwarp();  // all lanes have read the slot
        if (threadIdx.x % 32 == 0) barrier_arrive(&bar.work_empty[slot]);
        phases += 1 << 8;
        return w;
    }

    // This warpgroup's rows of the queries in a stage.
    DEVICE uint32_t queries(uint32_t stage) const {
        return shared + Tile::q_at + stage * Tile::q_bytes + group * Tile::rows_bytes;
    }
    DEVICE uint32_t queries() const { return queries(phases >> 4 & 1); }
    DEVICE void wait_for_queries() { barrier_wait(&bar.q_full[phases >> 4 & 1], phases >> 5 & 1); }
    DEVICE void leave_queries() {
        phases ^= 1 << 4 | (phases << 1 & 1 << 5);  // behind stage 1 the parity changes
    }
    // Once o, which took their place, has left it.
    DEVICE void give_back_queries() {
        if (phases & 1 << 7 && elected()) {
            bulk_wait_read();
            barrier_arrive(&bar.q_empty[~phases >> 4 & 1]);
        }
        phases &= ~(1u << 7);
    }
    DEVICE int stage() const { return phases >> 6 & 1; }
    DEVICE void sync() const {  // this warpgroup
        named_sync<128>(1 + group);
    }
    DEVICE void wait_for_keys(int stage) {
        barrier_wait(&bar.k_full[stage], phases >> stage & 1);
        phases ^= 1 << stage;
    }
    DEVICE void wait_for_values(int stage) {
        barrier_wait(&bar.v_full[stage], phases >> (2 + stage) & 1);
        phases ^= 4 << stage;
    }
    DEVICE void scores(uint32_t q_tile, int stage) {  // s = Q K^T, asynchronous
        const uint32_t k_tile = shared + Tile::k_at + stage * Tile::kv_bytes;
        wgmma_fence();
        UNROLL for (int k = 0; k < D / 16; ++k) wgmma_ss<T, N, 0, 0>(
            s, k_major<64, panel>(q_tile, k), k_major<N, panel>(k_tile, k), k > 0);
        wgmma_commit();
    }
    DEVICE void output(int stage) {  // o += P V, asynchronous
        const uint32_t v_tile = shared + Tile::v_at + stage * Tile::kv_bytes;
        wgmma_fence();
        UNROLL for (int k = 0; k < N / 16; ++k)
            wgmma_rs<T, D, 1>(o, probability + 4 * k, mn_major<N, panel>(v_tile, k), 1);
        wgmma_commit();
    }
    // Where the keys end that this thread's rows see.
    DEVICE void ends_of_keys(const ForwardWork& w, int (&high)[2]) const {
        UNROLL for (int r = 0; r < 2; ++r) {
            const int row = row_of(w) + 8 * r;
            high[r] = row < p.mask.queries ? p.mask.high(row) : 0;
        }
    }
    DEVICE void hide(const ForwardWork& w, int n) {
        if (n < full_end && n >= full_begin) return;
        int high[2];
        ends_of_keys(w, high);
        hide_keys(s, w.origin + n * N + 2 * (threadIdx.x % 4), low, high);
    }
    // Never traps. The branch depends on every probability, so that ptxas cannot move their
    // computation behind the wait, away from under the product.
    DEVICE void keep_before_wait() {
        if (soft.sum[0] < 0 || soft.sum[1] < 0) __trap();
    }

    // The scores of key tile n, and the output of the one before.
    DEVICE void step(const ForwardWork& w, int n, uint32_t q_tile) {
        const int here = stage(), next = here ^ 1;
        phases ^= 1 << 6;
        wait_for_keys(next);
        scores(q_tile, next);
        wait_for_values(here);
        output(here);
        wgmma_wait<1>();
        pin(s);
        if (elected()) barrier_arrive(&bar.k_empty[next]);
        hide(w, n);
        soft.step(s, p.scale_log2);
        keep_before_wait();
        wgmma_wait<0>();
        pin(o);
        if (elected()) barrier_arrive(&bar.v_empty[here]);
        give_back_queries();
        repack<T>(s, probability);
        if (soft.shrinks()) UNROLL for (int i = 0; i < D / 2; ++i) o[i] *= soft.decay[i / 2 % 2];
    }
    // A step from one query tile to the next, so that the products do not stop between them: the
    // last output of `w`, which is stored, and the first scores of the tile after it, which is
    // returned. Either may be absent (head < 0); its product then runs on whatever lies there, and
    // is not used. What the products need comes first, the rest under them.
    DEVICE ForwardWork turn_over(const ForwardWork& w) {
        const bool from = w.head >= 0;
        give_back_queries();
        const uint32_t old_stage = phases >> 4 & 1;
        const int here = stage(), next = here ^ 1;
        phases ^= 1 << 6;
        if (from) wait_for_values(here), leave_queries();
        output(here);
        ForwardWork after = take();
        while (after.head >= 0 && after.count <= 0) {
            store_nothing<Tile>(p, after, row_of(after));
            after = take();
        }
        const bool to = after.head >= 0;
        if (to) {
            wait_for_queries();
            wait_for_keys(next);
            if (Tile::consumers == 3 && cut_range(after)) {
                wait_for_values(next);
                if (elected())
                    barrier_arrive(&bar.k_empty[next]), barrier_arrive(&bar.v_empty[next]);
                phases ^= 1 << 6;
                wait_for_keys(here);
            }
        }
        scores(queries(), stage());
        UNROLL for (int r = 0; r < 2; ++r) {  // from memory
            const int row = row_of(after) + 8 * r;
            low[r] = to && row < p.mask.queries ? p.mask.first(after.batch, row) : INT32_MIN;
        }
        const RowEnds ends(soft, p.scale);
        wgmma_wait<1>();
        pin(o);
        if (from) {
            if (elected()) barrier_arrive(&bar.v_empty[here]);
            store(w, old_stage, ends);
            if (!Tile::late_copy) send(w, old_stage);
        }
        low[0] = p.mask.local(low[0]), low[1] = p.mask.local(low[1]);
        full_begin = (__reduce_max_sync(~0u, max(low[0], low[1])) - after.origin + N - 1) / N;
        full_end = (p.mask.high(__shfl_sync(~0u, row_of(after), 0)) - after.origin) / N;
        UNROLL for (int i = 0; i < D / 2; ++i) o[i] = 0;
        wgmma_wait<0>();
        pin(s);
        if (to && elected()) barrier_arrive(&bar.k_empty[stage()]);
        hide(after, after.count - 1);
        int high[2];
        ends_of_keys(after, high);
        soft.begin(s, p.scale_log2, low, high);
        repack<T>(s, probability);
        if (from) {
            if (Tile::late_copy) send(w, old_stage);
            phases |= 1 << 7;
        }
        return after;
    }
    // Whether the last key tile of w is beyond what this warpgroup's rows see, and then leaves it
    // out. More than one cannot be: the rows of a query tile have no more than two ends.
    DEVICE bool cut_range(ForwardWork& w) {
        const int first = first_row(w), high = p.mask.high(min(first + 63, p.mask.queries - 1));
        const bool cut = w.count - 1 > max((high - 1 - w.origin) / N, 0);
        w.count -= cut;
        return cut;
    }
    // The output of w: merged into memory, or into the place of its queries, from where `send`
    // takes it.
    DEVICE void store(const ForwardWork& w, uint32_t stage, const RowEnds& ends) {
        if (p.carry) return forward_merge<Tile>(p, w, row_of(w), o, ends);
        forward_stage<T, D>(queries(stage), o, ends);
        fence_async();
        if (threadIdx.x % 4 > 0) return;
        UNROLL for (int r = 0; r < 2; ++r) {  // after the fence, which would wait for it
            const int row = row_of(w) + 8 * r;
            if (row < p.mask.queries) *p.lse_at(w.batch, w.head, row) = ends.lse[r];
        }
    }
    DEVICE void send(const ForwardWork& w, uint32_t stage) {
        if (p.carry) return;
        sync();
        if (elected()) {
            store_tile<D, 64>(&p.o_map, queries(stage), w.m * Tile::m + group * 64, w.head,
                              w.batch);
            bulk_commit();
        }
    }
    // All key tiles of w but the first, whose scores are known, and the last output.
    DEVICE void walk(const ForwardWork& w) {
        // The reduction brings the address into a uniform register, where descriptors are made.
        const uint32_t q_tile = __reduce_max_sync(~0u, queries());
#pragma unroll 1
        for (int n = w.count - 2; n >= 0; --n) step(w, n, q_tile);
    }

    DEVICE void run() {
        ForwardWork w{-1, -1, 0, 0, 0};
#pragma unroll 1
        while (true) {
            w = turn_over(w);
            if (w.head < 0) break;
            walk(w);
        }
        if (elected()) bulk_wait();  // shared memory outlives the last store
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
#ifdef TORUS_SM90A
    extern __shared__ uint8_t raw[];
    __shared__ ForwardBarriers bar;
    __shared__ ForwardWork slots[2];
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::stages; ++i) {
            barrier_init(&bar.q_full[i], 1), barrier_init(&bar.q_empty[i], Tile::consumers);
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
        if (threadIdx.x == 0) forward_produce<Tile>(p, bar, slots, shared);
    } else {
        registers_grow<Tile::consumer_registers>();
        ForwardConsumer<Tile>{p, bar, shared, group - 1, slots}.run();
    }
#endif
}

}  // namespace torus::flash
