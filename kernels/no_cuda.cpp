// Stands in for kernels/cuda where the build found no CUDA compiler.
#include "kernels/kernels.h"

namespace torus {

std::string cuda_unavailable_reason() {
    return "this program was built without CUDA (the build's table says what was missing)";
}

std::unique_ptr<Kernels> make_cuda_kernels(DType, int) {
    fail(Exit::usage, "--device cuda: ", cuda_unavailable_reason());
}

}  // namespace torus
