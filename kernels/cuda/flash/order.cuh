// The order of work with packed documents: a block that drew a long tile late would end after all
// others, so the longest tiles come first. (Without documents a causal mask alone gives an order.)
#pragma once
#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

constexpr int order_warps = 8;  // of a block, each for one tile
inline unsigned order_blocks(int64_t batches, int64_t count) {
    return unsigned(batches * ((count + order_warps - 1) / order_warps));
}

// order[i] of a batch: the number of the tile with the i-th largest length, of equals the later one
// first.
static __global__ void __launch_bounds__(32 * order_warps)
    order_kernel(int32_t* order, const int32_t* lengths, int count) {
    const int blocks = (count + order_warps - 1) / order_warps, batch = blockIdx.x / blocks;
    const int tile = (blockIdx.x - batch * blocks) * order_warps + int(threadIdx.x / 32);
    if (tile >= count) return;
    order += int64_t(batch) * count, lengths += int64_t(batch) * count;
    const int length = lengths[tile];
    int before = 0;
    for (int other = int(threadIdx.x % 32); other < count; other += 32)
        before += lengths[other] > length - (other > tile);
    before = __reduce_add_sync(~0u, before);
    if (threadIdx.x % 32 == 0) order[before] = tile;
}

}  // namespace torus::flash
