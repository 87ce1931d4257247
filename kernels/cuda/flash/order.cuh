// The order of work with packed documents: a block that drew a long tile late would end after all
// others, so the longest tiles come first. (Without documents a causal mask alone gives an order.)
#pragma once
#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

constexpr int order_threads = 1024;

// order[i]: the number of the tile with the i-th largest length, of equals the later one first. By
// a whole block, which has written the lengths.
DEVICE void order_by_length(int32_t* order, const int32_t* lengths, int count) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += order_threads) {
        const int length = lengths[i];
        int rank = 0;
#pragma unroll 8
        for (int j = 0; j < count; ++j) {
            const int other = lengths[j];
            rank += other > length || (other == length && j > i);
        }
        order[rank] = i;
    }
}

}  // namespace torus::flash
