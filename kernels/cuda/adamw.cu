// AdamW (Loshchilov & Hutter 2019, update order of PyTorch's AdamW) over flat ranges: one pass that
// reads gradient, master weight and moments and writes master, moments and the working weight. The
// clip coefficient and the step count come from device memory, so no host synchronisation is
// needed. State in bf16 is rounded stochastically; one call of the generator serves four elements.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
struct AdamWArgs {
    float* master;  // null: param is its own master
    const float* grad;
    const double* control;
    double lr, beta1, beta2, eps, weight_decay;
    uint64_t seed, offset;
};

struct AdamWFactors {  // of one step, computed once per block
    float coefficient, step_size, inverse_root, decay;
    uint64_t count;  // updates, with this one
};

// T: type of the working weights, M: of the moments.
template <class T, class M>
struct AdamWUpdate {
    AdamWArgs a;
    T* param;
    M *m, *v;

    __device__ AdamWFactors factors() const {
        const double applied = a.control[Control::applied];
        const double correction1 = 1 - pow(a.beta1, applied);
        const double correction2 = 1 - pow(a.beta2, applied);
        return {float(a.control[Control::coefficient]), float(a.lr / correction1),
                float(1 / sqrt(correction2)), float(1 - a.lr * a.weight_decay), uint64_t(applied)};
    }

    template <int W>
    __device__ void run(int64_t i, const AdamWFactors& f) const {
        const float beta1 = float(a.beta1), beta2 = float(a.beta2), eps = float(a.eps);
        const float rest1 = float(1 - a.beta1), rest2 = float(1 - a.beta2);
        const Vec<float, W> g = load<W>(a.grad + i);
        Vec<float, W> w, m = widened<W>(this->m + i), v = widened<W>(this->v + i);
        if (a.master)
            w = load<W>(a.master + i);
        else
            w = widened<W>(param + i);
        for (int k = 0; k < W; ++k) {
            // Which sums are fused is spelled out: left to the compiler, single elements and
            // vectors could differ in the last bit, and with them the parts of a range.
            const float grad = f.coefficient * g.v[k];
            m.v[k] = fmaf(beta1, m.v[k], rest1 * grad);
            v.v[k] = fmaf(beta2, v.v[k], rest2 * grad * grad);
            const float denominator = fmaf(sqrtf(v.v[k]), f.inverse_root, eps);
            w.v[k] = fmaf(w.v[k], f.decay, -(f.step_size * m.v[k] / denominator));
        }
        if constexpr (std::is_same_v<M, bf16>) {
            const Random4 words = random_words<W>(moments_stream(f.count), i);
            store(this->m + i, rounded<W>(m, words, 0));
            store(this->v + i, rounded<W>(v, words, 16));
        } else {
            store(this->m + i, m);
            store(this->v + i, v);
        }
        put_weights<W>(i, w, f.count);
    }

    template <int W, class X>
    __device__ static Vec<float, W> widened(const X* p) {
        const Vec<X, W> x = load<W>(p);
        Vec<float, W> out;
        for (int k = 0; k < W; ++k) out.v[k] = x.get(k);
        return out;
    }

    // The words of elements i to i + W - 1. Four that share a counter take one call.
    template <int W>
    __device__ Random4 random_words(uint64_t stream, int64_t i) const {
        const uint64_t index = a.offset + uint64_t(i);
        if (W == 4 && index % 4 == 0) return philox(a.seed, stream, index / 4);
        Random4 words{};
        for (int k = 0; k < W; ++k) words.v[k] = random_bits(a.seed, stream, index + uint64_t(k));
        return words;
    }

    template <int W>
    __device__ static Vec<bf16, W> rounded(const Vec<float, W>& x, const Random4& words, int low) {
        Vec<bf16, W> out;
        for (int k = 0; k < W; ++k)
            out.v[k] = __ushort_as_bfloat16(float_to_bf16_stochastic(x.v[k], words.v[k] >> low));
        return out;
    }

    template <int W>
    __device__ void put_weights(int64_t i, const Vec<float, W>& w, uint64_t count) const {
        if constexpr (std::is_same_v<T, bf16>) {
            if (!a.master) {
                store(param + i, rounded<W>(w, random_words<W>(weights_stream(count), i), 0));
                return;
            }
        }
        store(a.master + i, w);
        if constexpr (std::is_same_v<T, float>) {
            if (param == a.master) return;
        }
        Vec<T, W> p;
        for (int k = 0; k < W; ++k) p.set(k, w.v[k]);
        store(param + i, p);
    }
};

template <class T, class M>
__global__ void __launch_bounds__(256)
    adamw_kernel(const AdamWUpdate<T, M> update, int64_t n, bool vectors) {
    constexpr int W = 4;
    __shared__ AdamWFactors factors;
    if (update.a.control[Control::coefficient] == 0) return;  // the step is skipped
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
    const int64_t n = a.param.numel();
    const bool own_master = a.master.data == a.param.data;
    const bool bf16_moments = a.m.dtype == DType::bf16;
    const DType moments = bf16_moments ? DType::bf16 : DType::f32;
    CHECK(!own_master || precision_.act != DType::f16, ": adamw: fp16 needs a master in fp32");
    expect(a.param, "adamw: param", precision_.act, n);
    expect(a.master, "adamw: master", own_master ? precision_.act : DType::f32, n);
    expect(a.m, "adamw: m", moments, n);
    expect(a.v, "adamw: v", moments, n);
    expect(a.grad, "adamw: grad", DType::f32, n);
    expect(a.control, "adamw: control", DType::f64, Control::size);
    if (n == 0) return;
    bool vectors = true;
    for (const Tensor& t : {a.param, a.master, a.m, a.v, a.grad})
        vectors = vectors && aligned16(t.data);
    const bool bf16_master = own_master && precision_.act == DType::bf16;
    const AdamWArgs args{bf16_master ? nullptr : a.master.as<float>(),
                         a.grad.as<float>(),
                         a.control.as<double>(),
                         a.lr,
                         a.beta1,
                         a.beta2,
                         a.eps,
                         a.weight_decay,
                         a.seed,
                         a.offset};
    const int64_t blocks = std::min<int64_t>(divide_up(n, 4 * 256), 8 * multiprocessors());
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        const auto run = [&](auto moment_type) {
            using M = typename decltype(moment_type)::type;
            launch("adamw", stream, {.blocks = blocks}, adamw_kernel<T, M>,
                   AdamWUpdate<T, M>{args, static_cast<T*>(a.param.data), static_cast<M*>(a.m.data),
                                     static_cast<M*>(a.v.data)},
                   n, vectors);
        };
        bf16_moments ? run(Type<bf16>{}) : run(Type<float>{});
    });
}

}  // namespace torus::cuda
