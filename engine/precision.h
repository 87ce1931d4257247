// What --dtype, --moments, --master-weights and --loss-scale mean together: the types in which a
// run keeps its numbers, and the loss scale.
#pragma once
#include <string>

#include "engine/config.h"
#include "kernels/kernels.h"

namespace torus {

// The backend's types, with the optimizer's state as the flags ask. Error(usage) when they do not
// fit together.
Precision run_precision(const Config&, const Precision& backend);

// Where the loss scale starts and whether it moves; "auto" scales fp16 only. Error(usage).
LossScale run_loss_scale(const Config&, DType act);
// A power of two within the bounds.
bool is_loss_scale(double);

// What a checkpoint and the run that resumes it must share: "fp32", "fp32, moments bf16", "bf16".
std::string state_types(const Precision&);

}  // namespace torus
