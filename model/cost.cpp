// FLOP of training, counted as in the scaling-law papers: 2 per weight and token forward, 4
// backward, plus attention's two products over the visible half of a causal matrix. Recompute is
// not counted, so the figure does not depend on the memory settings.
#include "model/model.h"

namespace torus {

Cost cost_of(const ModelConfig& c) {
    const ParamTable t = family(c.family).params(c);
    int64_t layer = 0;
    for (const ParamSpec& s : t.layer)
        if (s.shape.rank == 2) layer += s.shape.numel();
    return {.params = parameter_count(c), .matmul_params = c.L * layer + c.V * c.C};
}

double Cost::flops_per_token(const ModelConfig& c, int64_t S) const {
    return 6.0 * double(matmul_params) + 6.0 * double(c.L) * double(c.H * c.D) * double(S);
}

}  // namespace torus
