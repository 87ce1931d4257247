// AdamW (Loshchilov & Hutter 2019), the order of operations of PyTorch's, and the control block
// that scales, clips or skips a step: it lives in device memory so that no step waits for the host.
// State in bf16 is widened, updated as any other, and rounded back stochastically.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus {
namespace {

constexpr int64_t piece = 1024;  // elements of bf16 state that are widened at a time

// The constants of one step, in the type of the masters.
template <class T>
struct Step {
    Step(const AdamW& a, const double* control)
        : gradient(T(control[Control::coefficient])),
          decay(T(1 - a.lr * a.weight_decay)),
          one_minus_beta1(T(1 - a.beta1)),
          beta2(T(a.beta2)),
          one_minus_beta2(T(1 - a.beta2)),
          root_correction2(T(std::sqrt(1 - std::pow(a.beta2, control[Control::applied])))),
          size(T(a.lr / (1 - std::pow(a.beta1, control[Control::applied])))),
          eps(T(a.eps)),
          count(uint64_t(control[Control::applied])) {}
    T gradient, decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, size, eps;
    uint64_t count;  // updates, with this one
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

// Elements [begin, begin + n) of a state tensor as T: where they lie, or widened from bf16 into
// `buffer`.
template <class T>
T* load(const Tensor& state, int64_t begin, int64_t n, T* buffer) {
    if (state.dtype == dtype_of<T>) return state.as<T>() + begin;
    const uint16_t* from = state.as<uint16_t>() + begin;
    for (int64_t i = 0; i < n; ++i) buffer[i] = T(bf16_to_float(from[i]));
    return buffer;
}

// The reverse, rounding with the random words of `stream` from bit `low` on.
template <class T>
void store(const AdamW& a, const Tensor& state, int64_t begin, int64_t n, const T* values,
           uint64_t stream, int low) {
    if (state.dtype == dtype_of<T>) return;
    uint16_t* to = state.as<uint16_t>() + begin;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = random_bits(a.seed, stream, a.offset + uint64_t(begin + i));
        to[i] = float_to_bf16_stochastic(float(values[i]), word >> low);
    }
}

template <class T>
void update_range(const AdamW& a, const Step<T>& s, int64_t begin, int64_t end) {
    T buffers[3][piece];
    for (int64_t i = begin; i < end; i += piece) {
        const int64_t n = std::min(piece, end - i);
        T* const w = load(a.master, i, n, buffers[0]);
        T* const m = load(a.m, i, n, buffers[1]);
        T* const v = load(a.v, i, n, buffers[2]);
        update(s, w, m, v, a.grad.as<T>() + i, n);
        store(a, a.master, i, n, w, weights_stream(s.count), 0);
        store(a, a.m, i, n, m, moments_stream(s.count), 0);
        store(a, a.v, i, n, v, moments_stream(s.count), 16);
    }
}

// param[begin, end) from master.
template <class T>
void publish(const AdamW& a, int64_t begin, int64_t end) {
    if (a.param.data == a.master.data) return;
    const T* master = a.master.as<T>();
    if (a.param.dtype == dtype_of<T>) {
        std::copy(master + begin, master + end, a.param.as<T>() + begin);
        return;
    }
    uint16_t* to = a.param.as<uint16_t>();
    for (int64_t i = begin; i < end; ++i)
        to[i] = a.param.dtype == DType::f16 ? float_to_f16(float(master[i]))
                                            : float_to_bf16(float(master[i]));
}

}  // namespace

template <class T>
void CpuKernels<T>::grad_control(Stream&, Tensor control, Tensor sum_squares, double max_norm,
                                 const LossScale& rule) {
    expect("grad_control", "control", control, DType::f64, {Control::size});
    expect("grad_control", "sum_squares", sum_squares, DType::f64, {1});
    double* c = control.as<double>();
    double& scale = c[Control::loss_scale];
    c[Control::norm] = std::sqrt(*sum_squares.as<double>()) / scale;
    if (!std::isfinite(c[Control::norm])) {
        c[Control::coefficient] = 0;
        c[Control::skipped] += 1;
        c[Control::skipped_now] += 1;
        c[Control::good] = 0;
        if (rule.window > 0) scale = std::max(rule.lowest, scale / 2);
        return;
    }
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (c[Control::norm] + 1e-6)) : 1.0;
    c[Control::coefficient] = clip / scale;
    c[Control::applied] += 1;
    c[Control::skipped_now] = 0;
    c[Control::good] += 1;
    if (rule.window > 0 && c[Control::good] >= double(rule.window)) {
        scale = std::min(rule.highest, 2 * scale);
        c[Control::good] = 0;
    }
}

template <class T>
void CpuKernels<T>::adamw(Stream&, const AdamW& a) {
    expect_rank("adamw", "master", a.master, a.master.dtype, 1);
    const int64_t n = a.master.dim(0);
    // Half types define what a backend with fp32 masters does.
    const bool halves = type == DType::f32;
    const auto state_type = [&](const Tensor& t) {
        return halves && t.dtype == DType::bf16 ? t.dtype : type;
    };
    expect("adamw", "master", a.master, state_type(a.master), {n});
    expect("adamw", "m", a.m, state_type(a.m), {n});
    expect("adamw", "v", a.v, a.m.dtype, {n});
    expect("adamw", "grad", a.grad, type, {n});
    expect("adamw", "control", a.control, DType::f64, {Control::size});
    const bool half_param = halves && a.param.dtype == DType::f16;
    expect("adamw", "param", a.param, half_param ? a.param.dtype : state_type(a.param), {n});
    CHECK(a.master.dtype == type || a.master.data == a.param.data,
          ": adamw: a master in bf16 must be the parameters themselves");
    const double* control = a.control.as<double>();
    if (control[Control::coefficient] == 0) return;  // a skipped step
    CHECK(control[Control::applied] >= 1, ": adamw: ", control[Control::applied],
          " steps applied, must be counted first");
    const Step<T> step(a, control);
    parallel_ranges(n, [&](int64_t begin, int64_t end) {
        update_range(a, step, begin, end);
        publish<T>(a, begin, end);
    });
}

INSTANTIATE(grad_control, (Stream&, Tensor, Tensor, double, const LossScale&));
INSTANTIATE(adamw, (Stream&, const AdamW&));

}  // namespace torus
