// Stands in for cudnn_attention.cpp where the build found no cuDNN.
#include "kernels/cuda/cudnn_attention.h"

namespace torus {

std::string cudnn_version() { return {}; }

std::string cudnn_attention_refusal(int64_t, int64_t) {
    return "this program was built without cuDNN: apt-get install libcudnn9-dev-cuda-13, then "
           "build again; or take --attention flash";
}

namespace cuda {

int64_t cudnn_workspace_bytes(const AttentionSizes&) { return 0; }

std::unique_ptr<CudnnAttention> make_cudnn_attention() {
    fail(Exit::usage, "--attention: ", cudnn_attention_refusal(0, 0));
}

}  // namespace cuda
}  // namespace torus
