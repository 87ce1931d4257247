// What is common to all backends: precision rules, and ops that are others in a row.
#include "kernels/kernels.h"

namespace torus {

Precision precision_of(DType dtype) {
    switch (dtype) {
        case DType::f64: return {DType::f64, DType::f64, DType::f64, DType::f64, DType::f64};
        case DType::f32: return {DType::f32, DType::f32, DType::f32, DType::f32, DType::f32};
        case DType::bf16:
        case DType::f16: return {dtype, DType::f32, DType::f32, DType::f32, DType::f32};
        default: break;
    }
    fail(Exit::usage, "cannot compute in ", name_of(dtype), "; use bf16, fp16, fp32 or fp64");
}

void Kernels::tune_matmul(const std::string&) {
    fail(Exit::usage, "--tune-matmul is for the GPU; leave it out with --device cpu");
}

void Kernels::matmul_gelu_forward(Stream& s, Tensor out, Tensor pre, Tensor x, Tensor w,
                                  Tensor bias) {
    matmul_forward(s, pre, x, w, bias, {});
    gelu_forward(s, out, pre);
}

void Kernels::matmul_gelu_backward_input(Stream& s, Tensor dpre, Tensor dout, Tensor w,
                                         Tensor pre) {
    matmul_backward_input(s, dpre, dout, w, false);
    gelu_backward(s, dpre, dpre, pre);
}

}  // namespace torus
