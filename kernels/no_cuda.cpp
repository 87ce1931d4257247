// Stands in for kernels/cuda where the build found no CUDA compiler.
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/kernels.h"

namespace torus {

std::string cuda_unavailable_reason() {
    return "this program was built without CUDA (the build's table says what was missing)";
}

std::unique_ptr<Kernels> make_cuda_kernels(DType, int) {
    fail(Exit::no_device, "--device cuda: ", cuda_unavailable_reason(),
         "; build with it (cmake --preset cuda) or use --device cpu");
}

std::unique_ptr<Kernels> make_cuda_planner(DType) {
    fail(Exit::no_device, "--plan --device cuda: ", cuda_unavailable_reason(),
         "; the plan of a GPU needs no GPU, but a build with CUDA: cmake --preset cuda");
}

std::string cudnn_attention_refusal(int64_t, int64_t) { return cuda_unavailable_reason(); }

void use_cudnn_attention(Kernels&) {
    fail(Exit::usage, "--attention cudnn: ", cuda_unavailable_reason());
}

}  // namespace torus
