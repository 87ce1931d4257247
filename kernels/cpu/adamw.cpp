// AdamW (Loshchilov & Hutter 2019), the order of operations of PyTorch's, and the control block
// that scales, clips or skips a step: it lives in device memory so that no step waits for the host.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus {
namespace {

enum Control { norm, coefficient, applied, skipped };  // the four numbers of a control tensor

// The constants of one step, in the type of the masters.
template <class T>
struct Step {
    Step(const AdamW& a, const double* control)
        : gradient(T(control[coefficient])),
          decay(T(1 - a.lr * a.weight_decay)),
          one_minus_beta1(T(1 - a.beta1)),
          beta2(T(a.beta2)),
          one_minus_beta2(T(1 - a.beta2)),
          root_correction2(T(std::sqrt(1 - std::pow(a.beta2, control[applied])))),
          size(T(a.lr / (1 - std::pow(a.beta1, control[applied])))),
          eps(T(a.eps)) {}
    T gradient, decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, size, eps;
};

template <class T>
CLONES void update(const Step<T>& s, T* p, T* m, T* v, const T* grad, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const T g = s.gradient * grad[i];
        const T mi = m[i] + s.one_minus_beta1 * (g - m[i]);
        const T vi = s.beta2 * v[i] + s.one_minus_beta2 * g * g;
        const T denominator = std::sqrt(vi) / s.root_correction2 + s.eps;
        p[i] = s.decay * p[i] - s.size * (mi / denominator);
        m[i] = mi;
        v[i] = vi;
    }
}

// param[begin, end) from master.
template <class T>
void publish(const AdamW& a, int64_t begin, int64_t end) {
    const T* master = a.master.as<T>();
    if (a.param.dtype == dtype_of<T>) {
        if (a.param.data != a.master.data)
            std::copy(master + begin, master + end, a.param.as<T>() + begin);
        return;
    }
    uint16_t* to = a.param.as<uint16_t>();
    for (int64_t i = begin; i < end; ++i) {
        const float value = float(master[i]);
        if (a.param.dtype == DType::f16)
            to[i] = float_to_f16(value);
        else if (a.stochastic)
            to[i] = float_to_bf16_stochastic(
                value, random_bits(a.seed, a.stream_id, a.offset + uint64_t(i)));
        else
            to[i] = float_to_bf16(value);
    }
}

}  // namespace

template <class T>
void CpuKernels<T>::grad_control(Stream&, Tensor control, Tensor sum_squares, double max_norm,
                                 double unscale) {
    expect("grad_control", "control", control, DType::f64, {4});
    expect("grad_control", "sum_squares", sum_squares, DType::f64, {1});
    double* c = control.as<double>();
    c[norm] = std::sqrt(*sum_squares.as<double>()) * unscale;
    if (!std::isfinite(c[norm])) {
        c[coefficient] = 0;
        c[skipped] += 1;
        return;
    }
    c[coefficient] = unscale * (max_norm > 0 ? std::min(1.0, max_norm / (c[norm] + 1e-6)) : 1.0);
    c[applied] += 1;
}

template <class T>
void CpuKernels<T>::adamw(Stream&, const AdamW& a) {
    expect_rank("adamw", "master", a.master, type, 1);
    const int64_t n = a.master.dim(0);
    expect("adamw", "m", a.m, type, {n});
    expect("adamw", "v", a.v, type, {n});
    expect("adamw", "grad", a.grad, type, {n});
    expect("adamw", "control", a.control, DType::f64, {4});
    // Half parameters define what a backend with fp32 masters publishes.
    const bool half =
        type == DType::f32 && (a.param.dtype == DType::bf16 || a.param.dtype == DType::f16);
    expect("adamw", "param", a.param, half ? a.param.dtype : type, {n});
    CHECK(!a.stochastic || a.param.dtype == DType::bf16,
          ": adamw: stochastic rounding is for bf16 parameters, not ", name_of(a.param.dtype));
    const double* control = a.control.as<double>();
    if (control[coefficient] == 0) return;  // a skipped step
    CHECK(control[applied] >= 1, ": adamw: ", control[applied],
          " steps applied, must be counted first");
    const Step<T> step(a, control);
    parallel_ranges(n, [&](int64_t begin, int64_t end) {
        update(step, a.master.as<T>() + begin, a.m.as<T>() + begin, a.v.as<T>() + begin,
               a.grad.as<T>() + begin, end - begin);
        publish<T>(a, begin, end);
    });
}

INSTANTIATE(grad_control, (Stream&, Tensor, Tensor, double, double));
INSTANTIATE(adamw, (Stream&, const AdamW&));

}  // namespace torus
