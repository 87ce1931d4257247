// What packed documents change in how work is divided. The keys of the backward are cut into units
// of work anew where a long document begins: a unit that lies in two documents would walk over the
// queries of both with all of its keys. And the longest units come first: a block that drew one
// late would end after all others. (Without documents a causal mask alone gives an order.)
#pragma once
#include "kernels/cuda/flash/params.h"
#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

// The keys from one cut to the next, and the number of the first unit that they have.
struct Span {
    int first, end, unit;
};

// A document has a cut at its begin if it has as many query rows as four units, as it may cost one.
constexpr int cut_units = 4;
inline int64_t most_cuts(int64_t queries, int64_t unit) { return queries / (cut_units * unit); }

// The query row at which a document of 2 * step rows or more begins that covers row k * step, but
// not the one `step` before, and row (k + 1) * step; else -1. Found in any mask, if only of use in
// one whose first keys ascend.
DEVICE int document_begin(const Mask& mask, int batch, int k, int step) {
    const int row = k * step;
    if (row + step >= mask.queries) return -1;
    const int low = mask.low(batch, row);
    if (low == mask.keys || low != mask.low(batch, row + step)) return -1;
    int begin = row, before = max(row - step, -1);
    if (before >= 0 && mask.low(batch, before) == low) return -1;
    while (begin - before > 1) {
        const int middle = (before + begin) / 2;
        (mask.low(batch, middle) == low ? begin : before) = middle;
    }
    const int last = begin + 2 * step - 1;
    return last < mask.queries && mask.low(batch, last) == low ? begin : -1;
}

// One block per batch. Divides the keys where long documents begin, at multiples of 8, into at most
// cuts + 1 pieces; behind them pieces (B, cuts + 2) have the number of keys and of units.
constexpr int cut_threads = 256;
static __global__ void __launch_bounds__(cut_threads)
    cut_kernel(const Mask mask, Piece* pieces, int cuts, int unit) {
    __shared__ int found[cut_threads];
    const int batch = blockIdx.x, lane = threadIdx.x % 32, step = cut_units / 2 * unit;
    pieces += int64_t(batch) * (cuts + 2);
    int count = 0;
    Piece piece{0, 0};
    auto close = [&](int at) {
        if (threadIdx.x == 0) pieces[count] = piece;
        ++count, piece = {at, piece.unit + (at - piece.first + unit - 1) / unit};
    };
    for (int k = 0; k * step < mask.queries; k += cut_threads) {
        const int begin = document_begin(mask, batch, k + int(threadIdx.x), step);
        __syncthreads();
        found[threadIdx.x] = begin < 0 ? 0 : mask.low(batch, begin) / 8 * 8;
        __syncthreads();
        if (threadIdx.x >= 32) continue;
        for (int i = 0; i < cut_threads; i += 32)
            for (uint32_t some = __ballot_sync(~0u, found[i + lane] > 0); some; some &= some - 1) {
                const int at = found[i + __ffs(int(some)) - 1];
                if (at > piece.first && count < cuts) close(at);
            }
    }
    if (threadIdx.x >= 32) return;
    close(mask.keys);
    for (int i = count + lane; i < cuts + 2; i += 32) pieces[i] = piece;
}

// Where a unit of a batch lies, by a warp: behind the last one at the end of an empty span.
DEVICE Span span_of(const Piece* pieces, int batch, int cuts, int unit, int end) {
    if (!pieces) return {0, end, 0};
    pieces += int64_t(batch) * (cuts + 2);
    int before = 0;  // pieces but the first that begin with this unit or before it
    for (int i = 1 + int(threadIdx.x % 32); i < cuts + 2; i += 32) before += pieces[i].unit <= unit;
    before = __reduce_add_sync(~0u, before);
    return {pieces[before].first, before > cuts ? end : pieces[before + 1].first,
            pieces[before].unit};
}

constexpr int order_warps = 8;  // of a block, each for one unit
inline unsigned order_blocks(int64_t batches, int64_t count) {
    return unsigned(batches * ((count + order_warps - 1) / order_warps));
}

// order[i] of a batch: the number of the unit with the i-th largest length, of equals the later one
// first.
static __global__ void __launch_bounds__(32 * order_warps)
    order_kernel(int32_t* order, const int32_t* lengths, int count) {
    const int blocks = (count + order_warps - 1) / order_warps, batch = blockIdx.x / blocks;
    const int unit = (blockIdx.x - batch * blocks) * order_warps + int(threadIdx.x / 32);
    if (unit >= count) return;
    order += int64_t(batch) * count, lengths += int64_t(batch) * count;
    const int length = lengths[unit];
    int before = 0;
    for (int other = int(threadIdx.x % 32); other < count; other += 32)
        before += lengths[other] > length - (other > unit);
    before = __reduce_add_sync(~0u, before);
    if (threadIdx.x % 32 == 0) order[before] = unit;
}

}  // namespace torus::flash
