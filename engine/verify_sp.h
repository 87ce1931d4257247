// --verify-sp: before a long run, its own model, precision, mode and mesh on a short batch, against
// rank 0 alone with whole sequences. A wrong exchange is then an error in the first seconds, not a
// curve that bends days later.
#pragma once
#include "engine/setup.h"
#include "engine/world.h"

namespace torus {

// Compares loss, gradient norm and the norm of each tensor's gradient of one optimizer step: prints
// one line, or throws Error(internal) on every rank. Collective, on the arranged world. The weights
// are those that --model names or --seed draws, also when the run then resumes a checkpoint.
// Memory, weights and device state are its own and gone at the return, so the run after it has the
// same bits as without.
void verify_sp(const Config&, const Setup&, World&);

}  // namespace torus
