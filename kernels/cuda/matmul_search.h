// The fastest of cuBLASLt's algorithms for a product, by timing. The library proposes about eight,
// which are not always the best it has: others come from its proposals for products of nearly the
// same shape, and from changing one attribute of the best so far (tile, cluster, order of blocks).
#pragma once
#include <functional>

#include "kernels/cuda/matmul_plan.h"

namespace torus::cuda {

struct Choice {
    Algorithm algo;
    float ms, first_ms;  // its time, and that of the library's first choice; 0: not timed
};

// Queues the product with an algorithm; false when the library refuses.
using RunProduct = std::function<bool(const Algorithm&)>;

// Times algorithms on the operands at hand; `proposed` is not empty. D, which a product may add to,
// is kept aside and put back. An algorithm that the library did not propose for this product is
// taken only when it gives the same bits twice, and to rounding those of proposed[0]. That one is
// taken when there is no memory to keep D, or when nothing is faster by more than 1%. Takes a
// few seconds for a product of a large model.
Choice find_fastest(cublasLtHandle_t handle, cudaStream_t stream, const Product& p,
                    const Plan& plan, const std::vector<Algorithm>& proposed,
                    const RunProduct& run);

}  // namespace torus::cuda
