// Flash attention for Hopper (sm_90a): the fast path behind Kernels::attention_forward and
// attention_backward. Host code asks `supported` first and takes another kernel when it says no
// (other GPU, type, head dim or alignment). What the calls compute is defined by kernels.h.
#pragma once
#include <cuda_runtime.h>

#include "kernels/kernels.h"

namespace torus::flash {

// D 128 or a multiple of 8 up to 96 (64, 96 and 128 waste nothing; docs/flash_attention.md), bf16
// or fp16, scale > 0, rows and heads of q, k, v, o at multiples of 16 bytes.
bool forward_supported(const Attn&);
bool backward_supported(const AttnGrad&);

// Scratch memory (256-byte aligned) that a call uses until it has run on its stream; the backward's
// is 0 for a head dim that is not supported.
int64_t forward_workspace_bytes(int64_t batch, int64_t queries);
int64_t backward_workspace_bytes(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                                 int64_t keys, int64_t head_dim);

void forward(cudaStream_t, const Attn&, void* workspace);

// The backward's kernel: blocks by themselves, or clusters of two where there are such kernels
// (bf16, D 128, more than 128 keys), or whichever is faster. dq differs in its last bits.
enum class Blocks { best, single, pairs };

// deterministic: the same inputs give the same bits in every run; otherwise the last bits of dq
// depend on the order in which blocks finish. (The forward, dk and dv give the same bits in any
// case.)
void backward(cudaStream_t, const AttnGrad&, void* workspace, bool deterministic = true,
              Blocks = Blocks::best);

}  // namespace torus::flash
