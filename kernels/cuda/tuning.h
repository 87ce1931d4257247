// Choosing cuBLASLt's algorithms by timing (what --tune-matmul turns on).
#pragma once
#include <string>

#include "kernels/kernels.h"

namespace torus {

// From now on the first product of each shape times the candidates on its own operands and keeps
// the fastest; choices are read from and added to `file`, so that a later run with the same library
// on the same GPU type makes the same choices (and so the same bits) without timing. Throws
// Error(usage) when `kernels` is not the CUDA backend. Must not be called while a stream is
// captured.
void tune_matmul(Kernels& kernels, const std::string& file);

}  // namespace torus
