// Validation loss: the mean over valid targets of a fixed run of sequences, the same at every call.
#pragma once
#include "engine/planner.h"
#include "engine/world.h"

namespace torus {

struct EvalResult {
    double loss = 0;     // per valid target
    int64_t tokens = 0;  // valid targets
};

// `batches` micro-batches of each data-parallel rank from the loader's start, at most one pass over
// its sequences. Collective: the same result on every rank.
EvalResult evaluate(Machine&, World&, const Loader&, int64_t B, int64_t batches);

// Reads a device f64 scalar; synchronises.
double read_f64(Machine&, Tensor scalar);

}  // namespace torus
