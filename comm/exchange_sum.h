// An all-reduce by exchanges and additions. Where copy engines exchange, what runs meanwhile keeps
// the multiprocessors, of which the kernels of NCCL's all-reduce take a share until they are done.
#pragma once
#include "comm/comm.h"
#include "kernels/kernels.h"

namespace torus {

// x (n) = sum over ranks of x, of a floating-point type: each rank adds up its part of x, in rank
// order, and gives it to the others, so all have the same bits. `others`, of x's type, takes the
// parts of P - 1 ranks: four elements of each or more; x is summed in as many pieces as that makes
// necessary. Each rank sends 2 (P - 1) / P of x.
void sum_by_exchange(Kernels&, Stream&, Comm&, Tensor x, Tensor others);

}  // namespace torus
