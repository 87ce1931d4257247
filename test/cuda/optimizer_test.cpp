// The optimizer's ops on the GPU against the CPU backend: control with its loss scale, and AdamW in
// every combination of types, at any length and alignment.
#include <cmath>
#include <limits>

#include "test/cuda/gpu.h"
#include "test/kernels/adamw_cases.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

Value host(DType type, const std::vector<double>& values) {
    Value v(type, {int64_t(values.size())});
    v.set_all([&](int64_t i) { return values[size_t(i)]; });
    return v;
}

// n elements on the device, `skip` elements away from where vectors begin.
struct Shifted {
    Shifted(Gpu& gpu, DType type, const std::vector<double>& values, int64_t skip)
        : n(int64_t(values.size())), skip(skip), value(gpu, type, {n + skip}) {
        std::vector<double> padded(size_t(skip), -1.0);
        padded.insert(padded.end(), values.begin(), values.end());
        value.set(padded);
    }
    Tensor tensor() const { return value.tensor().slice(0, skip, n); }
    std::vector<double> all() const {
        const std::vector<double> v = value.all();
        return {v.begin() + skip, v.end()};
    }
    int64_t n, skip;
    DeviceValue value;
};

void expect_same(const AdamState& a, const AdamState& b) {
    EXPECT(same_bits(a.param, b.param));
    EXPECT(same_bits(a.master, b.master));
    EXPECT(same_bits(a.m, b.m));
    EXPECT(same_bits(a.v, b.v));
}

}  // namespace

TEST_CASE("grad_control gives the CPU's numbers over skips, clipping and growth of the scale") {
    Gpu gpu(DType::bf16);
    const auto cpu = make_cpu_kernels(DType::f32);
    Stream none;
    for (const LossScale rule : {LossScale{}, LossScale{.initial = 65536, .window = 2}}) {
        std::vector<double> start(Control::size, 0.0);
        start[Control::loss_scale] = rule.initial;
        Value expected = host(DType::f64, start);
        DeviceValue control(gpu, DType::f64, {Control::size}, start);
        std::vector<double> squares = {16, 1e12, 1e-6, 4, inf, std::nan(""), 9, 9, 9, 0, 1, 1};
        for (int i = 0; i < 60; ++i) squares.push_back(i < 20 ? inf : 25);
        for (double x : squares)
            for (double max_norm : {1.0, 0.0}) {
                const std::vector<double> one{x};
                const Value sum = host(DType::f64, one);
                const DeviceValue device_sum(gpu, DType::f64, {1}, one);
                cpu->grad_control(none, expected.tensor(), sum.tensor(), max_norm, rule);
                gpu.k->grad_control(gpu.stream, control.tensor(), device_sum.tensor(), max_norm,
                                    rule);
                EXPECT(same_bits(control.all(), expected.all()));
            }
    }
}

TEST_CASE("adamw equals the CPU's in every combination of types") {
    const auto cpu = make_cpu_kernels(DType::f32);
    Stream none;
    for (const AdamTypes& t : adam_types) {
        Gpu gpu(t.param);
        const AdamTypes fp32_state{t.param, DType::f32, DType::f32};
        for (int64_t n : {1, 7, 1000, 70003})
            for (int64_t skip : {0, 1}) {
                CAPTURE(concat(name_of(t.param), " ", name_of(t.master), " ", name_of(t.moments)));
                CAPTURE(n);
                CAPTURE(skip);
                AdamState before = adam_state(n);
                before.param = rounded_to(t.param, before.param);
                // Also random numbers that do not begin at a whole counter.
                AdamCall call{.grad = random_values("g", n), .offset = uint64_t(n == 7 ? 5 : 8)};
                const auto on_gpu = [&](const AdamTypes& types) {
                    const auto make = [&](DType type, const std::vector<double>& values) {
                        return Shifted(gpu, type, values, type == DType::f64 ? 0 : skip);
                    };
                    return run_adamw(*gpu.k, gpu.stream, make, types, before, call);
                };
                const AdamState exact = on_gpu(fp32_state);
                const AdamState reference = run_adamw(*cpu, none, host, fp32_state, before, call);
                EXPECT(relative_error(exact.master, reference.master) < 1e-6);
                EXPECT(relative_error(exact.m, reference.m) < 1e-6);
                EXPECT(relative_error(exact.v, reference.v) < 1e-6);
                expect_same(on_gpu(t), expected_adamw(exact, t, call));
                call.coefficient = 0;
                expect_same(on_gpu(t), before);
            }
    }
}
