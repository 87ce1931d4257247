// What the tests of AdamW on both backends share: every combination of types that it takes, one
// call on tensors of either backend, and stochastic rounding as kernels/rng.h describes it.
#pragma once
#include <vector>

#include "kernels/float16.h"
#include "kernels/kernels.h"
#include "test/kernels/harness.h"

namespace torus::test {

struct AdamTypes {
    DType param, master, moments;
    // Parameters that are their own masters share the memory.
    bool own_master() const { return param == master; }
};

inline const AdamTypes adam_types[] = {
    {DType::f32, DType::f32, DType::f32},   {DType::f32, DType::f32, DType::bf16},
    {DType::bf16, DType::f32, DType::f32},  {DType::bf16, DType::f32, DType::bf16},
    {DType::bf16, DType::bf16, DType::f32}, {DType::bf16, DType::bf16, DType::bf16},
    {DType::f16, DType::f32, DType::f32},   {DType::f16, DType::f32, DType::bf16},
};

struct AdamState {
    std::vector<double> param, master, m, v;
};

struct AdamCall {
    std::vector<double> grad;
    double coefficient = 0.5, count = 3;
    uint64_t seed = 3, offset = 0;
    double beta2 = 0.95;
};

// Weights, moments and gradients that bf16 holds exactly.
inline AdamState adam_state(int64_t n) {
    AdamState s;
    const auto exact = [](double x) { return double(bf16_to_float(float_to_bf16(float(x)))); };
    for (int64_t i = 0; i < n; ++i) {
        s.param.push_back(exact(noise("w", i)));
        s.m.push_back(exact(0.1 * noise("m", i)));
        s.v.push_back(exact(0.1 * noise("v", i) * noise("v", i)));
    }
    s.master = s.param;
    return s;
}

// make(dtype, values) gives a tensor's owner: tensor() is the tensor, all() reads it.
template <class Make>
AdamState run_adamw(Kernels& k, Stream& stream, const Make& make, const AdamTypes& t,
                    const AdamState& s, const AdamCall& c) {
    auto param = make(t.param, s.param), master = make(t.master, s.master);
    auto m = make(t.moments, s.m), v = make(t.moments, s.v), grad = make(DType::f32, c.grad);
    std::vector<double> numbers(Control::size, 1.0);
    numbers[Control::coefficient] = c.coefficient;
    numbers[Control::applied] = c.count;
    auto control = make(DType::f64, numbers);
    k.adamw(stream, {.param = param.tensor(),
                     .master = t.own_master() ? param.tensor() : master.tensor(),
                     .m = m.tensor(),
                     .v = v.tensor(),
                     .grad = grad.tensor(),
                     .control = control.tensor(),
                     .lr = 1e-2,
                     .beta1 = 0.9,
                     .beta2 = c.beta2,
                     .eps = 1e-8,
                     .weight_decay = 0.1,
                     .seed = c.seed,
                     .offset = c.offset});
    const std::vector<double> w = param.all();
    return {w, t.own_master() ? w : master.all(), m.all(), v.all()};
}

inline std::vector<double> rounded_to(DType type, std::vector<double> x) {
    for (double& v : x) {
        const float f = float(v);
        if (type == DType::bf16) v = double(bf16_to_float(float_to_bf16(f)));
        if (type == DType::f16) v = double(f16_to_float(float_to_f16(f)));
    }
    return x;
}

inline std::vector<double> rounded_stochastically(std::vector<double> x, const AdamCall& c,
                                                  uint64_t stream, int low) {
    for (size_t i = 0; i < x.size(); ++i) {
        const uint32_t word = random_bits(c.seed, stream, c.offset + i);
        x[i] = double(bf16_to_float(float_to_bf16_stochastic(float(x[i]), word >> low)));
    }
    return x;
}

// What a call must give, when with fp32 state it gives `exact`.
inline AdamState expected_adamw(const AdamState& exact, const AdamTypes& t, const AdamCall& c) {
    const uint64_t count = uint64_t(c.count);
    AdamState e = exact;
    if (t.moments == DType::bf16) {
        e.m = rounded_stochastically(exact.m, c, moments_stream(count), 0);
        e.v = rounded_stochastically(exact.v, c, moments_stream(count), 16);
    }
    if (t.master == DType::bf16)
        e.master = rounded_stochastically(exact.master, c, weights_stream(count), 0);
    e.param = t.own_master() ? e.master : rounded_to(t.param, exact.master);
    return e;
}

}  // namespace torus::test
