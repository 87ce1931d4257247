// GELU in its tanh form and SwiGLU, both through the sigmoid s(u) = 1 / (1 + exp(-u)):
//   (1 + tanh(t)) / 2 = s(2t), so gelu(x) = x s(2t) with t = sqrt(2/pi) (x + 0.044715 x^3)
// which needs one exponential and loses no digits where tanh is close to -1.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {
namespace {

template <class T>
INLINE T sigmoid(T u) {
    return 1 / (1 + fast_exp(-u));
}

constexpr double k = 1.5957691216057308;  // 2 sqrt(2/pi)
constexpr double cubic = 0.044715;

template <class T>
CLONES void gelu(T* out, const T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const T v = x[i];
        out[i] = v * sigmoid(T(k) * v * (1 + T(cubic) * v * v));
    }
}

template <class T>
CLONES void gelu_gradient(T* dx, const T* dout, const T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const T v = x[i], s = sigmoid(T(k) * v * (1 + T(cubic) * v * v));
        const T du = T(k) * (1 + 3 * T(cubic) * v * v);
        dx[i] = dout[i] * (s + v * s * (1 - s) * du);
    }
}

template <class T>
CLONES void swiglu(T* out, const T* gate, const T* up, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

template <class T>
CLONES void swiglu_gradient(T* dgate, T* dup, const T* dout, const T* gate, const T* up,
                            int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const T g = gate[i], u = up[i], d = dout[i], s = sigmoid(g);
        dgate[i] = d * u * s * (1 + g * (1 - s));
        dup[i] = d * g * s;
    }
}

}  // namespace

template <class T>
void CpuKernels<T>::gelu_forward(Stream&, Tensor out, Tensor x) {
    expect("gelu_forward", "x", x, type, x.shape);
    expect("gelu_forward", "out", out, type, x.shape);
    parallel_ranges(x.numel(), [&](int64_t begin, int64_t end) {
        gelu(out.as<T>() + begin, x.as<T>() + begin, end - begin);
    });
}

template <class T>
void CpuKernels<T>::gelu_backward(Stream&, Tensor dx, Tensor dout, Tensor x) {
    expect("gelu_backward", "x", x, type, x.shape);
    expect("gelu_backward", "dout", dout, type, x.shape);
    expect("gelu_backward", "dx", dx, type, x.shape);
    parallel_ranges(x.numel(), [&](int64_t begin, int64_t end) {
        gelu_gradient(dx.as<T>() + begin, dout.as<T>() + begin, x.as<T>() + begin, end - begin);
    });
}

template <class T>
void CpuKernels<T>::swiglu_forward(Stream&, Tensor out, Tensor gate_up) {
    expect_rank("swiglu_forward", "out", out, type, 2);
    const int64_t N = out.dim(0), F = out.dim(1);
    expect("swiglu_forward", "gate_up", gate_up, type, {N, 2 * F});
    parallel_for(N, 8 * F, [&](int64_t n) {
        const T* gate = gate_up.as<T>() + n * 2 * F;
        swiglu(out.as<T>() + n * F, gate, gate + F, F);
    });
}

template <class T>
void CpuKernels<T>::swiglu_backward(Stream&, Tensor dgate_up, Tensor dout, Tensor gate_up) {
    expect_rank("swiglu_backward", "dout", dout, type, 2);
    const int64_t N = dout.dim(0), F = dout.dim(1);
    expect("swiglu_backward", "gate_up", gate_up, type, {N, 2 * F});
    expect("swiglu_backward", "dgate_up", dgate_up, type, {N, 2 * F});
    parallel_for(N, 8 * F, [&](int64_t n) {
        const T* gate = gate_up.as<T>() + n * 2 * F;
        T* dgate = dgate_up.as<T>() + n * 2 * F;
        swiglu_gradient(dgate, dgate + F, dout.as<T>() + n * F, gate, gate + F, F);
    });
}

INSTANTIATE(gelu_forward, (Stream&, Tensor, Tensor));
INSTANTIATE(gelu_backward, (Stream&, Tensor, Tensor, Tensor));
INSTANTIATE(swiglu_forward, (Stream&, Tensor, Tensor));
INSTANTIATE(swiglu_backward, (Stream&, Tensor, Tensor, Tensor));

}  // namespace torus
