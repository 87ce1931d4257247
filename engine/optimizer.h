// Optimizer: global gradient norm, clip, AdamW over the flat ranges. A step whose norm is not
// finite changes nothing but the count of skipped steps. No host synchronisation.
#pragma once
#include "engine/config.h"
#include "engine/params.h"

namespace torus {

class Optimizer {
public:
    Optimizer(Kernels&, Parameters&, const Config&);
    void plan(Layout&) const;  // owner "optimizer/"
    void bind(const Arena&);
    // Norm, unscale and clip, update at learning rate `lr`; the gradients are those of all ranks.
    void step(Stream&, double lr);

private:
    Kernels& k_;
    Parameters& params_;
    double beta1_, beta2_, eps_, weight_decay_, grad_clip_;
    uint64_t seed_;       // of stochastic rounding
    Tensor sum_squares_;  // f64 (1)
};

}  // namespace torus
