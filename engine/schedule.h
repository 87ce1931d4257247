// Learning rate of a step. Warm-up is linear from lr/warmup to lr; then cosine or linear to
// min_lr_fraction * lr at the last step, constant, or wsd: constant, then 1 - sqrt over the last
// decay_fraction of the steps (Hagele et al. 2024).
#pragma once
#include "engine/config.h"

namespace torus {

double learning_rate(const Config&, int64_t step);  // step from 0

}  // namespace torus
