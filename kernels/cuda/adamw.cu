// AdamW (Loshchilov & Hutter 2019, update order of PyTorch's AdamW) over flat ranges: one pass that
// reads gradient, master weight and moments and writes master, moments and the working weight. The
// clip coefficient and the step count come from device memory, so no host synchronisation is
// needed.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
struct AdamWArgs {
    float *master, *m, *v;
    const float* grad;
    const double* control;  // {norm, coefficient, applied, skipped}
    double lr, beta1, beta2, eps, weight_decay;
    bool stochastic;
    uint64_t seed, stream_id, offset;
};

struct AdamWFactors {  // of one step, computed once per block
    float coefficient, step_size, inverse_root, decay;
};

template <class T>
struct AdamWUpdate {
    AdamWArgs a;
    T* param;

    __device__ AdamWFactors factors() const {
        const double applied = a.control[2];
        const double correction1 = 1 - pow(a.beta1, applied);
        const double correction2 = 1 - pow(a.beta2, applied);
        return {float(a.control[1]), float(a.lr / correction1), float(1 / sqrt(correction2)),
                float(1 - a.lr * a.weight_decay)};
    }

    template <int W>
    __device__ void run(int64_t i, const AdamWFactors& f) const {
        const float beta1 = float(a.beta1), beta2 = float(a.beta2), eps = float(a.eps);
        const float rest1 = float(1 - a.beta1), rest2 = float(1 - a.beta2);
        const Vec<float, W> g = load<W>(a.grad + i);
        Vec<float, W> w = load<W>(a.master + i), m = load<W>(a.m + i), v = load<W>(a.v + i);
        for (int k = 0; k < W; ++k) {
            const float grad = f.coefficient * g.v[k];
            m.v[k] = beta1 * m.v[k] + rest1 * grad;
            v.v[k] = beta2 * v.v[k] + rest2 * grad * grad;
            w.v[k] =
                w.v[k] * f.decay - f.step_size * m.v[k] / (sqrtf(v.v[k]) * f.inverse_root + eps);
        }
        store(a.master + i, w);
        store(a.m + i, m);
        store(a.v + i, v);
        publish<W>(i, w);
    }

    // index: of the first random number. Four that share a counter take one call of the generator.
    template <int W>
    __device__ void round_stochastically(Vec<bf16, W>& p, const Vec<float, W>& w,
                                         uint64_t index) const {
        if (W == 4 && index % 4 == 0) {
            const Random4 random = philox(a.seed, a.stream_id, index / 4);
            for (int k = 0; k < W; ++k)
                p.v[k] = __ushort_as_bfloat16(float_to_bf16_stochastic(w.v[k], random.v[k]));
        } else {
            for (int k = 0; k < W; ++k)
                p.v[k] = __ushort_as_bfloat16(float_to_bf16_stochastic(
                    w.v[k], random_bits(a.seed, a.stream_id, index + uint64_t(k))));
        }
    }

    template <int W>
    __device__ void publish(int64_t i, const Vec<float, W>& w) const {
        if constexpr (std::is_same_v<T, float>) {
            if (param == a.master) return;
        }
        Vec<T, W> p;
        for (int k = 0; k < W; ++k) p.set(k, w.v[k]);
        if constexpr (std::is_same_v<T, bf16>) {
            if (a.stochastic) round_stochastically<W>(p, w, a.offset + uint64_t(i));
        }
        store(param + i, p);
    }
};

template <class T>
__global__ void __launch_bounds__(256)
    adamw_kernel(const AdamWUpdate<T> update, int64_t n, bool vectors) {
    constexpr int W = 4;
    __shared__ AdamWFactors factors;
    if (update.a.control[1] == 0) return;  // the step is skipped
    if (threadIdx.x == 0) factors = update.factors();
    __syncthreads();
    const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    const int64_t body = vectors ? n / W : 0;
    for (int64_t i = first; i < body; i += step) update.template run<W>(i * W, factors);
    for (int64_t i = body * W + first; i < n; i += step) update.template run<1>(i, factors);
}

// --- launchers -----------------------------------------------------------------------------------
void CudaKernels::adamw(Stream& stream, const AdamW& a) {
    const int64_t n = a.master.numel();
    expect(a.param, "adamw: param", precision_.act, n);
    expect(a.master, "adamw: master", DType::f32, n);
    expect(a.m, "adamw: m", DType::f32, n);
    expect(a.v, "adamw: v", DType::f32, n);
    expect(a.grad, "adamw: grad", DType::f32, n);
    expect(a.control, "adamw: control", DType::f64, 4);
    CHECK(!a.stochastic || precision_.act == DType::bf16, ": stochastic rounding is for bf16");
    if (n == 0) return;
    bool vectors = true;
    for (const Tensor& t : {a.param, a.master, a.m, a.v, a.grad})
        vectors = vectors && aligned16(t.data);
    const AdamWArgs args{a.master.as<float>(),
                         a.m.as<float>(),
                         a.v.as<float>(),
                         a.grad.as<float>(),
                         a.control.as<double>(),
                         a.lr,
                         a.beta1,
                         a.beta2,
                         a.eps,
                         a.weight_decay,
                         a.stochastic,
                         a.seed,
                         a.stream_id,
                         a.offset};
    const int64_t blocks = std::min<int64_t>(divide_up(n, 4 * 256), 8 * multiprocessors());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        launch("adamw", stream, {.blocks = blocks}, adamw_kernel<T>,
               AdamWUpdate<T>{args, static_cast<T*>(a.param.data)}, n, vectors);
    });
}

}  // namespace torus::cuda
