// cuDNN's fused attention in place of ours (--attention cudnn): a cross-check and a peer to measure
// against, through the library's C backend API. It does what a whole sequence on one rank needs,
// full or causal with grouped heads, in bf16 and fp16; the last bits of its dq differ from run to
// run. A build without cuDNN has no_cudnn.cpp instead.
#pragma once
#include <memory>
#include <string>

#include "kernels/kernels.h"

namespace torus {

std::string cudnn_version();  // "9.19.0"; empty in a build without it

// What keeps this program from training with cuDNN's attention on sequences of T tokens at head dim
// D, and what to do; empty when nothing does.
std::string cudnn_attention_refusal(int64_t T, int64_t D);

// From now on attention goes through cuDNN, except for queries that do not start where the keys do
// (a sample's key-value cache). What cuDNN cannot do (first_key, carry, accumulate, fp32, a head
// dim that is no multiple of 8 or above 128) throws Error(usage). Throws Error(usage) when
// `kernels` is not the CUDA backend or the build has no cuDNN.
void use_cudnn_attention(Kernels& kernels);

namespace cuda {

struct AttentionSizes {
    int64_t B, Tq, Tk, H, Hk, D;
};
// Of a forward or backward call.
int64_t cudnn_workspace_bytes(const AttentionSizes&);

struct CudnnAttention {  // of the current device
    virtual ~CudnnAttention() = default;
    // A plan is made, in about half a second, at the first call of each shape and layout.
    virtual void forward(const Stream&, const Attn&, void* workspace) = 0;
    virtual void backward(const Stream&, const AttnGrad&, void* workspace) = 0;  // needs o
};
std::unique_ptr<CudnnAttention> make_cudnn_attention();

}  // namespace cuda
}  // namespace torus
