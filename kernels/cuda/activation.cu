// GELU (tanh form) and SwiGLU. GELU is computed as x * sigmoid(2u) with u the argument of its tanh:
// the same function, exact in relative terms where 1 + tanh(u) would cancel, and cheaper.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
// The hardware's exponential (2 ulp and more for large arguments) is enough where results are
// rounded to 16 bits; fp32 is the exact mode.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (std::is_same_v<T, float>)
        return 1.0f / (1.0f + expf(-x));
    else
        return __fdividef(1.0f, 1.0f + __expf(-x));
}

constexpr float kGelu = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2 / pi)

template <class T>
struct GeluForwardOp {
    static constexpr int width = vector_width<T>;
    T* out;
    const T* x;
    template <int W>
    __device__ void run(int64_t i) const {
        const Vec<T, W> in = load<W>(x + i);
        store(out + i, Vec<T, W>::of([&](int k) {
                  const float v = in.get(k);
                  return v * sigmoid<T>(2 * kGelu * v * (1 + kCubic * v * v));
              }));
    }
};

template <class T>
struct GeluBackwardOp {
    static constexpr int width = vector_width<T>;
    T* dx;
    const T *dout, *x;
    template <int W>
    __device__ void run(int64_t i) const {
        const Vec<T, W> in = load<W>(x + i), g = load<W>(dout + i);
        store(dx + i, Vec<T, W>::of([&](int k) {
                  const float v = in.get(k);
                  const float s = sigmoid<T>(2 * kGelu * v * (1 + kCubic * v * v));
                  const float du = 2 * kGelu * (1 + 3 * kCubic * v * v);
                  return g.get(k) * (s + v * s * (1 - s) * du);
              }));
    }
};

template <class T>
struct SwigluForwardOp {
    static constexpr int width = vector_width<T>;
    T* out;
    const T* gate_up;
    int64_t F;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const Vec<T, W> gate = load<W>(gate_up + row * 2 * F + col);
        const Vec<T, W> up = load<W>(gate_up + row * 2 * F + F + col);
        store(out + row * F + col, Vec<T, W>::of([&](int k) {
                  const float g = gate.get(k);
                  return g * sigmoid<T>(g) * up.get(k);
              }));
    }
};

template <class T>
struct SwigluBackwardOp {
    static constexpr int width = vector_width<T>;
    T* dgate_up;
    const T *dout, *gate_up;
    int64_t F;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const int64_t at = row * 2 * F + col;
        const Vec<T, W> gate = load<W>(gate_up + at), up = load<W>(gate_up + at + F);
        const Vec<T, W> d = load<W>(dout + row * F + col);
        float sig[W];
        for (int k = 0; k < W; ++k) sig[k] = sigmoid<T>(gate.get(k));
        store(dgate_up + at, Vec<T, W>::of([&](int k) {
                  return d.get(k) * up.get(k) * sig[k] * (1 + gate.get(k) * (1 - sig[k]));
              }));
        store(dgate_up + at + F,
              Vec<T, W>::of([&](int k) { return d.get(k) * gate.get(k) * sig[k]; }));
    }
};

// --- launchers -----------------------------------------------------------------------------------
void CudaKernels::gelu_forward(Stream& stream, Tensor out, Tensor x) {
    expect(x, "gelu_forward: x", precision_.act, x.numel());
    expect(out, "gelu_forward: out", precision_.act, x.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        map("gelu_forward", stream,
            GeluForwardOp<T>{static_cast<T*>(out.data), static_cast<const T*>(x.data)}, x.numel(),
            aligned16(out.data) && aligned16(x.data));
    });
}

void CudaKernels::gelu_backward(Stream& stream, Tensor dx, Tensor dout, Tensor x) {
    expect(x, "gelu_backward: x", precision_.act, x.numel());
    expect(dx, "gelu_backward: dx", precision_.act, x.numel());
    expect(dout, "gelu_backward: dout", precision_.act, x.numel());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        map("gelu_backward", stream,
            GeluBackwardOp<T>{static_cast<T*>(dx.data), static_cast<const T*>(dout.data),
                              static_cast<const T*>(x.data)},
            x.numel(), aligned16(dx.data) && aligned16(dout.data) && aligned16(x.data));
    });
}

void CudaKernels::swiglu_forward(Stream& stream, Tensor out, Tensor gate_up) {
    const int64_t F = out.dim(-1), N = F ? out.numel() / F : 0;
    expect(out, "swiglu_forward: out", precision_.act, N * F);
    expect(gate_up, "swiglu_forward: gate_up", precision_.act, N * 2 * F);
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        map_rows(
            "swiglu_forward", stream,
            SwigluForwardOp<T>{static_cast<T*>(out.data), static_cast<const T*>(gate_up.data), F},
            N, F, F % vector_width<T> == 0 && aligned16(out.data) && aligned16(gate_up.data));
    });
}

void CudaKernels::swiglu_backward(Stream& stream, Tensor dgate_up, Tensor dout, Tensor gate_up) {
    const int64_t F = dout.dim(-1), N = F ? dout.numel() / F : 0;
    expect(dout, "swiglu_backward: dout", precision_.act, N * F);
    expect(gate_up, "swiglu_backward: gate_up", precision_.act, N * 2 * F);
    expect(dgate_up, "swiglu_backward: dgate_up", precision_.act, N * 2 * F);
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        map_rows(
            "swiglu_backward", stream,
            SwigluBackwardOp<T>{static_cast<T*>(dgate_up.data), static_cast<const T*>(dout.data),
                                static_cast<const T*>(gate_up.data), F},
            N, F,
            F % vector_width<T> == 0 && aligned16(dgate_up.data) && aligned16(dout.data) &&
                aligned16(gate_up.data));
    });
}

}  // namespace torus::cuda
