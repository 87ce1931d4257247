// The optimizer's ops: control with its loss scale, and AdamW in every combination of types.
#include <cmath>
#include <limits>

#include "test/kernels/adamw_cases.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

const Covers covers{"grad_control", "adamw"};

constexpr double inf = std::numeric_limits<double>::infinity();

Value host(DType type, const std::vector<double>& values) {
    Value v(type, {int64_t(values.size())});
    v.set_all([&](int64_t i) { return values[size_t(i)]; });
    return v;
}

std::vector<double> noises(const std::string& name, int64_t n) {
    std::vector<double> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(noise(name, i));
    return v;
}

AdamState run(Kernels& k, const AdamTypes& t, const AdamState& s, const AdamCall& c) {
    Stream stream;
    return run_adamw(k, stream, host, t, s, c);
}

void expect_same(const AdamState& a, const AdamState& b) {
    EXPECT(same_bits(a.param, b.param));
    EXPECT(same_bits(a.master, b.master));
    EXPECT(same_bits(a.m, b.m));
    EXPECT(same_bits(a.v, b.v));
}

}  // namespace

TEST_CASE("grad_control clips, counts and skips") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    Value control(DType::f64, {Control::size}), squares(DType::f64, {1});
    control.set_all([](int64_t) { return 0.0; });
    control.set(Control::loss_scale, 2);
    squares.set(0, 16);
    k->grad_control(s, control.tensor(), squares.tensor(), 1.0, {});
    EXPECT_EQ(control.get(Control::norm), 2);
    EXPECT_EQ(control.get(Control::coefficient), 0.5 * (1 / (2 + 1e-6)));
    k->grad_control(s, control.tensor(), squares.tensor(), 3.0, {});  // below the limit
    EXPECT_EQ(control.get(Control::coefficient), 0.5);
    control.set(Control::loss_scale, 1);
    k->grad_control(s, control.tensor(), squares.tensor(), 0, {});  // never clips
    EXPECT_EQ(control.get(Control::norm), 4);
    EXPECT_EQ(control.get(Control::coefficient), 1);
    EXPECT_EQ(control.get(Control::applied), 3);
    EXPECT_EQ(control.get(Control::skipped), 0);
    for (double bad : {inf, std::nan("")}) {
        squares.set(0, bad);
        k->grad_control(s, control.tensor(), squares.tensor(), 1, {});
        EXPECT_EQ(control.get(Control::coefficient), 0);
    }
    EXPECT_EQ(control.get(Control::applied), 3);
    EXPECT_EQ(control.get(Control::skipped), 2);
    EXPECT_EQ(control.get(Control::skipped_now), 2);
    EXPECT_EQ(control.get(Control::loss_scale), 1);  // it stays without a window
    squares.set(0, 1);
    k->grad_control(s, control.tensor(), squares.tensor(), 1, {});
    EXPECT_EQ(control.get(Control::skipped), 2);
    EXPECT_EQ(control.get(Control::skipped_now), 0);
    Value old(DType::f64, {4});
    EXPECT_THROWS_AS(k->grad_control(s, old.tensor(), squares.tensor(), 1, {}), Error);
}

TEST_CASE("the loss scale is halved by a skip and doubles after its window, within its bounds") {
    const auto k = make_cpu_kernels(DType::f64);
    Stream s;
    const LossScale rule{.initial = 8, .window = 3};
    Value control(DType::f64, {Control::size}), squares(DType::f64, {1});
    control.set_all([](int64_t) { return 0.0; });
    control.set(Control::loss_scale, rule.initial);
    // The scale after each step, given whether its gradients are finite.
    const auto after = [&](bool finite) {
        squares.set(0, finite ? 1 : inf);
        k->grad_control(s, control.tensor(), squares.tensor(), 1, rule);
        return control.get(Control::loss_scale);
    };
    for (const double expected : {8.0, 8.0, 16.0, 16.0, 16.0, 32.0})
        EXPECT_EQ(after(true), expected);
    EXPECT_EQ(after(true), 32);
    EXPECT_EQ(after(true), 32);
    EXPECT_EQ(after(false), 16);  // one short of doubling: the count starts again
    for (const double expected : {16.0, 16.0, 32.0}) EXPECT_EQ(after(true), expected);
    for (const double expected : {16.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0})
        EXPECT_EQ(after(false), expected);
    for (int i = 0; i < 3 * 24; ++i) after(true);
    EXPECT_EQ(control.get(Control::loss_scale), 0x1p24);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(after(true), 0x1p24);
}

TEST_CASE("adamw follows its definition, step by step") {
    for (DType type : {DType::f64, DType::f32}) {
        const auto k = make_cpu_kernels(type);
        constexpr int64_t n = 20001;
        Stream s;
        Value w = random_value("p", type, {n}), mt(type, {n}), vt(type, {n}), param(type, {n});
        Value control(DType::f64, {Control::size});
        mt.set_all([](int64_t) { return 0.0; });
        vt.set_all([](int64_t) { return 0.0; });
        const auto step = [&](double coefficient, double count, Tensor grad) {
            control.set(Control::coefficient, coefficient);
            control.set(Control::applied, count);
            k->adamw(s, {.param = param.tensor(),
                         .master = w.tensor(),
                         .m = mt.tensor(),
                         .v = vt.tensor(),
                         .grad = grad,
                         .control = control.tensor(),
                         .lr = 1e-2,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .weight_decay = 0.1});
        };
        std::vector<double> p = w.all(), m(n), v(n);
        const Value grad = random_value("g", type, {n});
        for (int t = 1; t <= 4; ++t) {
            const Value gradient = random_value(concat("g", t), type, {n});
            step(0.5, t, gradient.tensor());
            for (size_t i = 0; i < size_t(n); ++i) {
                const double g = 0.5 * gradient.get(int64_t(i));
                p[i] *= 1 - 1e-2 * 0.1;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                const double denominator =
                    std::sqrt(v[i]) / std::sqrt(1 - std::pow(0.95, t)) + 1e-8;
                p[i] -= 1e-2 / (1 - std::pow(0.9, t)) * m[i] / denominator;
            }
        }
        const double bound = type == DType::f64 ? 1e-14 : 1e-6;
        EXPECT(relative_error(w.all(), p) < bound);
        EXPECT(relative_error(mt.all(), m) < bound);
        EXPECT(relative_error(vt.all(), v) < bound);
        EXPECT(same_bits(param.all(), w.all()));

        const std::vector<double> before = w.all(), m_before = mt.all();
        step(0, 5, grad.tensor());  // skipped
        EXPECT(same_bits(w.all(), before));
        EXPECT(same_bits(mt.all(), m_before));
        EXPECT_THROWS_AS(step(1, 0, grad.tensor()), Error);
        const Value other(type == DType::f64 ? DType::f32 : DType::f64, {n});
        EXPECT_THROWS_AS(step(1, 1, other.tensor()), Error);
    }
}

TEST_CASE("adamw in every combination of types is fp32's, rounded as documented") {
    const auto k = make_cpu_kernels(DType::f32);
    constexpr int64_t n = 2500;
    const AdamState before = adam_state(n);
    AdamCall call{.grad = noises("g", n), .offset = 77};
    const AdamState exact = run(*k, adam_types[0], before, call);
    for (const AdamTypes& t : adam_types) {
        CAPTURE(concat(name_of(t.param), " ", name_of(t.master), " ", name_of(t.moments)));
        expect_same(run(*k, t, before, call), expected_adamw(exact, t, call));
        call.coefficient = 0;  // skipped
        expect_same(run(*k, t, before, call), before);
        call.coefficient = 0.5;
    }
    // The bits of moments and weights at any two updates differ.
    const AdamTypes least{DType::bf16, DType::bf16, DType::bf16};
    AdamCall later = call;
    later.count = 4;
    EXPECT(!same_bits(run(*k, least, before, call).m, run(*k, least, before, later).m));
    later = call;
    later.seed = 4;
    EXPECT(!same_bits(run(*k, least, before, call).master, run(*k, least, before, later).master));
}

TEST_CASE("stochastic rounding does not depend on how the range is cut") {
    const auto k = make_cpu_kernels(DType::f32);
    constexpr int64_t n = 1001, cut = 389;
    const AdamTypes least{DType::bf16, DType::bf16, DType::bf16};
    const AdamState whole = adam_state(n);
    const AdamCall call{.grad = noises("g", n), .offset = 128};
    const auto part = [&](const std::vector<double>& v, int64_t begin, int64_t end) {
        return std::vector<double>(v.begin() + begin, v.begin() + end);
    };
    const AdamState all = run(*k, least, whole, call);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, cut}, {cut, n}}) {
        const AdamState piece{part(whole.param, begin, end), part(whole.master, begin, end),
                              part(whole.m, begin, end), part(whole.v, begin, end)};
        const AdamCall its{.grad = part(call.grad, begin, end), .offset = 128 + uint64_t(begin)};
        const AdamState got = run(*k, least, piece, its);
        EXPECT(same_bits(got.master, part(all.master, begin, end)));
        EXPECT(same_bits(got.m, part(all.m, begin, end)));
        EXPECT(same_bits(got.v, part(all.v, begin, end)));
    }
}

TEST_CASE("stochastic rounding is right on average") {
    const auto k = make_cpu_kernels(DType::f32);
    constexpr int64_t n = 200000;
    const AdamTypes least{DType::bf16, DType::bf16, DType::bf16};
    const std::vector<double> ones(n, 1.0);
    const AdamState before{std::vector<double>(n, -0.7109375), std::vector<double>(n, -0.7109375),
                           std::vector<double>(n, 0.30078125), std::vector<double>(n, 0.5078125)};
    const AdamCall call{.grad = std::vector<double>(n, 0.3)};
    const AdamState exact = run(*k, adam_types[0], before, call);
    const AdamState got = run(*k, least, before, call);
    const auto check = [&](const std::vector<double>& x, double target) {
        double mean = 0, low = x[0], high = x[0];
        for (double value : x) {
            mean += value / double(n);
            low = std::min(low, value);
            high = std::max(high, value);
        }
        REQUIRE_TRUE(low < target);  // two neighbours in bf16, one on either side
        REQUIRE_TRUE(high > target);
        const double up = (target - low) / (high - low);
        const double deviation = (high - low) * std::sqrt(up * (1 - up) / double(n));
        INFO("mean " << mean << " of " << target << ", standard deviation " << deviation);
        EXPECT(std::fabs(mean - target) < 5 * deviation);
    };
    check(got.master, exact.master[0]);
    check(got.m, exact.m[0]);
    check(got.v, exact.v[0]);
}

TEST_CASE("small increments of a bf16 moment are not lost") {
    // v moves by at most a thousandth of itself a step, less than half a digit of bf16: to nearest
    // it would come to a stand at a third of its limit, 0.25.
    const auto k = make_cpu_kernels(DType::f32);
    constexpr int64_t n = 500;
    const AdamTypes t{DType::f32, DType::f32, DType::bf16};
    AdamState s{std::vector<double>(n), {}, std::vector<double>(n), std::vector<double>(n)};
    s.master = s.param;
    AdamCall call{.grad = std::vector<double>(n, 1.0), .beta2 = 0.999};
    double exact = 0;
    for (int step = 1; step <= 1500; ++step) {
        call.count = step;
        s = run(*k, t, s, call);
        exact = 0.999 * exact + 0.001 * 0.25;
    }
    double mean = 0;
    for (double v : s.v) mean += v / n;
    INFO("mean " << mean << ", exact " << exact);
    EXPECT(std::fabs(mean - exact) < 0.005 * exact);
}

TEST_CASE("adamw refuses types that do not fit together") {
    const auto k32 = make_cpu_kernels(DType::f32), k64 = make_cpu_kernels(DType::f64);
    Stream s;
    Value f32(DType::f32, {8}), m(DType::f32, {8}), v(DType::f32, {8}), f64(DType::f64, {8});
    Value b(DType::bf16, {8}), bm(DType::bf16, {8}), bv(DType::bf16, {8}), h(DType::f16, {8});
    Value control(DType::f64, {Control::size});
    control.set_all([](int64_t) { return 0.0; });  // nothing to do, but everything to check
    const auto call = [&](Kernels& k, const Value& param, const Value& master, const Value& m1,
                          const Value& m2) {
        const Tensor grad = k.precision().grad == DType::f64 ? f64.tensor() : f32.tensor();
        k.adamw(s, {.param = param.tensor(),
                    .master = master.tensor(),
                    .m = m1.tensor(),
                    .v = m2.tensor(),
                    .grad = grad,
                    .control = control.tensor(),
                    .lr = 1,
                    .beta1 = 0.9,
                    .beta2 = 0.9,
                    .eps = 1,
                    .weight_decay = 0});
    };
    call(*k32, b, f32, bm, bv);
    call(*k32, b, b, m, v);
    call(*k64, f64, f64, f64, f64);
    EXPECT_THROWS_AS(call(*k32, b, bm, m, v), Error);    // another master in bf16
    EXPECT_THROWS_AS(call(*k32, f32, b, m, v), Error);   // parameters finer than the master
    EXPECT_THROWS_AS(call(*k32, b, f32, bm, v), Error);  // moments of two types
    EXPECT_THROWS_AS(call(*k32, b, f32, m, bv), Error);
    EXPECT_THROWS_AS(call(*k32, b, f32, h, h), Error);
    EXPECT_THROWS_AS(call(*k32, h, h, m, v), Error);
    EXPECT_THROWS_AS(call(*k32, f32, f32, f64, f64), Error);
    EXPECT_THROWS_AS(call(*k64, f64, f64, bm, bv), Error);
    EXPECT_THROWS_AS(call(*k64, b, f64, f64, f64), Error);
}
