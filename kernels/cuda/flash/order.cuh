// The order of work with packed documents: a block that drew a long tile late would end after all
// others, so the longest tiles come first. (Without documents a causal mask alone gives an order.)
#pragma once
#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

constexpr int order_threads = 1024;

// order[i] of a batch: the number of the tile with the i-th largest length, of equals the later one
// first. One block per batch, of `count` tiles.
static __global__ void __launch_bounds__(order_threads)
    order_kernel(int32_t* order, const int32_t* lengths, int count) {
    __shared__ int4 part[order_threads / 4];  // of the lengths
    order += int64_t(blockIdx.x) * count, lengths += int64_t(blockIdx.x) * count;
    for (int i0 = 0; i0 < count; i0 += order_threads) {
        const int i = i0 + int(threadIdx.x), length = i < count ? lengths[i] : 0;
        int rank = 0;
        for (int j0 = 0; j0 < count; j0 += order_threads) {
            const int j = j0 + int(threadIdx.x);
            __syncthreads();
            reinterpret_cast<int32_t*>(part)[threadIdx.x] = j < count ? lengths[j] : INT32_MIN;
            __syncthreads();
            if (i >= count) continue;
            const int quads = (min(order_threads, count - j0) + 3) / 4;
#pragma unroll 8
            for (int q = 0; q < quads; ++q) {
                const int4 other = part[q];
                const int k = j0 + 4 * q;  // what is as long counts where it comes later
                rank += other.x > length - (k > i);
                rank += other.y > length - (k + 1 > i);
                rank += other.z > length - (k + 2 > i);
                rank += other.w > length - (k + 3 > i);
            }
        }
        if (i < count) order[rank] = i;
    }
}

}  // namespace torus::flash
