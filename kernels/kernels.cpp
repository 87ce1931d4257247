// What is common to all backends: precision rules.
#include "kernels/kernels.h"

namespace torus {

Precision precision_of(DType dtype) {
    switch (dtype) {
        case DType::f64: return {DType::f64, DType::f64, DType::f64, DType::f64};
        case DType::f32: return {DType::f32, DType::f32, DType::f32, DType::f32};
        case DType::bf16:
        case DType::f16: return {dtype, DType::f32, DType::f32, DType::f32};
        default: break;
    }
    fail(Exit::usage, "cannot compute in ", name_of(dtype), "; use bf16, fp16, fp32 or fp64");
}

}  // namespace torus
