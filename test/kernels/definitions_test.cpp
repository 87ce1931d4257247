// Forward ops against their definitions, written here a second time in the most direct way, and at
// values where a careless implementation overflows or loses its digits.
#include <cmath>
#include <limits>

#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
const DType types[] = {DType::f64, DType::f32};

double bound_of(DType type) { return type == DType::f64 ? 1e-14 : 1e-6; }

}  // namespace

TEST_CASE("embedding: rows of the tables, added") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    const Value wte = random_value("wte", DType::f32, {5, 3}),
                wpe = random_value("wpe", DType::f32, {4, 3});
    Value ids(DType::i32, {3}), pos(DType::i32, {3}), out(DType::f32, {3, 3});
    ids.set_all([](int64_t i) { return double(4 - i); });
    pos.set_all([](int64_t i) { return double(i + 1); });
    k->embedding_forward(s, out.tensor(), ids.tensor(), wte.tensor(), pos.tensor(), wpe.tensor());
    for (int64_t i = 0; i < 9; ++i)
        EXPECT_EQ(float(out.get(i)), float(wte.get((4 - i / 3) * 3 + i % 3)) +
                                         float(wpe.get((i / 3 + 1) * 3 + i % 3)));
    for (double bad : {-1.0, 5.0}) {
        ids.set(1, bad);
        EXPECT_THROWS_AS(k->embedding_forward(s, out.tensor(), ids.tensor(), wte.tensor(), {}, {}),
                         Error);
        Value dwte(DType::f32, {5, 3});
        EXPECT_THROWS_AS(
            k->embedding_backward(s, dwte.tensor(), {}, out.tensor(), ids.tensor(), {}), Error);
    }
}

TEST_CASE("norms: mean 0 and variance 1 before the weights, also far from zero") {
    constexpr int64_t N = 7, C = 50;
    for (DType type : types)
        for (double shift : {0.0, 1000.0}) {
            const auto k = make_cpu_kernels(type);
            Stream s;
            Value x = random_value("x", type, {N, C}), out(type, {N, C}), mean(type, {N});
            const Value w = random_value("w", type, {C}), b = random_value("b", type, {C});
            Value rstd(type, {N}), rms(type, {N, C});
            for (int64_t i = 0; i < x.size(); ++i) x.set(i, x.get(i) + shift);
            k->layernorm_forward(s, out.tensor(), mean.tensor(), rstd.tensor(), x.tensor(),
                                 w.tensor(), b.tensor(), 1e-5);
            std::vector<double> expected, expected_rms;
            for (int64_t n = 0; n < N; ++n) {
                double m = 0, variance = 0, square = 0;
                for (int64_t c = 0; c < C; ++c) m += x.get(n * C + c) / C;
                for (int64_t c = 0; c < C; ++c) {
                    variance += std::pow(x.get(n * C + c) - m, 2) / C;
                    square += std::pow(x.get(n * C + c), 2) / C;
                }
                EXPECT(std::fabs(mean.get(n) - m) <= bound_of(type) * (1 + shift));
                EXPECT(std::fabs(rstd.get(n) * std::sqrt(variance + 1e-5) - 1) < 1e-6);
                for (int64_t c = 0; c < C; ++c) {
                    expected.push_back(
                        (x.get(n * C + c) - m) / std::sqrt(variance + 1e-5) * w.get(c) + b.get(c));
                    expected_rms.push_back(x.get(n * C + c) / std::sqrt(square + 1e-5) * w.get(c));
                }
            }
            EXPECT(relative_error(out.all(), expected) < (type == DType::f64 ? 1e-12 : 1e-6));
            k->rmsnorm_forward(s, rms.tensor(), rstd.tensor(), x.tensor(), w.tensor(), 1e-5);
            EXPECT(relative_error(rms.all(), expected_rms) < bound_of(type));
        }
}

TEST_CASE("matmul: out = x w^T + bias + residual, in place too") {
    constexpr int64_t N = 13, C = 300, O = 21;
    for (DType type : types)
        for (bool plain : {false, true}) {
            const auto k = make_cpu_kernels(type, {.plain_matmul = plain});
            Stream s;
            const Value x = random_value("x", type, {N, C}), w = random_value("w", type, {O, C});
            const Value bias = random_value("bias", type, {O});
            Value residual = random_value("residual", type, {N, O}), out(type, {N, O});
            std::vector<double> expected;
            for (int64_t n = 0; n < N; ++n)
                for (int64_t o = 0; o < O; ++o) {
                    double sum = bias.get(o) + residual.get(n * O + o);
                    for (int64_t c = 0; c < C; ++c) sum += x.get(n * C + c) * w.get(o * C + c);
                    expected.push_back(sum);
                }
            k->matmul_forward(s, out.tensor(), x.tensor(), w.tensor(), bias.tensor(),
                              residual.tensor());
            EXPECT(relative_error(out.all(), expected) < bound_of(type));
            k->matmul_forward(s, residual.tensor(), x.tensor(), w.tensor(), bias.tensor(),
                              residual.tensor());
            EXPECT(same_bits(residual.all(), out.all()));
        }
}

TEST_CASE("matmul with no rows, and with nothing to sum") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    const Value none(DType::f32, {0, 4}), w = random_value("w", DType::f32, {3, 4});
    Value out(DType::f32, {0, 3}), dw = random_value("dw", DType::f32, {3, 4});
    Value db = random_value("db", DType::f32, {3});
    const std::vector<double> dw_before = dw.all(), db_before = db.all();
    k->matmul_forward(s, out.tensor(), none.tensor(), w.tensor(), {}, {});
    k->matmul_backward_weight(s, dw.tensor(), db.tensor(), out.tensor(), none.tensor(), true);
    EXPECT(same_bits(dw.all(), dw_before));
    EXPECT(same_bits(db.all(), db_before));
    const Value thin(DType::f32, {2, 0}), wide(DType::f32, {3, 0});
    Value zero(DType::f32, {2, 3});
    k->matmul_forward(s, zero.tensor(), thin.tensor(), wide.tensor(), {}, {});
    for (double v : zero.all()) EXPECT_EQ(v, 0);
}

TEST_CASE("gelu and swiglu: their formulas, in place gradients, and large values") {
    constexpr int64_t n = 400;
    for (DType type : types) {
        const auto k = make_cpu_kernels(type);
        Stream s;
        Value x(type, {n}), out(type, {n}), dx(type, {n});
        x.set_all([](int64_t i) { return double(float(-10 + 0.05 * double(i))); });
        k->gelu_forward(s, out.tensor(), x.tensor());
        std::vector<double> expected;
        for (double v : x.all())
            expected.push_back(v / 2 *
                               (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))));
        EXPECT(relative_error(out.all(), expected) < bound_of(type));
        Value dout = random_value("dout", type, {n});
        k->gelu_backward(s, dx.tensor(), dout.tensor(), x.tensor());
        k->gelu_backward(s, dout.tensor(), dout.tensor(), x.tensor());
        EXPECT(same_bits(dout.all(), dx.all()));

        Value gate_up(type, {1, 2 * n}), h(type, {1, n});
        gate_up.set_all([](int64_t i) { return i < n ? -10 + 0.05 * double(i) : 0.5; });
        k->swiglu_forward(s, h.tensor(), gate_up.tensor());
        expected.clear();
        for (int64_t i = 0; i < n; ++i) {
            const double g = gate_up.get(i);
            expected.push_back(g / (1 + std::exp(-g)) * 0.5);
        }
        EXPECT(relative_error(h.all(), expected) < bound_of(type));

        Value far(type, {4}), at(type, {4});
        const double ends[] = {-1e4, 1e4, -60, 0};
        far.set_all([&](int64_t i) { return ends[i]; });
        k->gelu_forward(s, at.tensor(), far.tensor());
        EXPECT_EQ(at.get(0), 0);
        EXPECT_EQ(at.get(1), 1e4);
        EXPECT_EQ(at.get(3), 0);
        Value one(type, {4});
        one.set_all([](int64_t) { return 1.0; });
        k->gelu_backward(s, at.tensor(), one.tensor(), far.tensor());
        EXPECT_EQ(at.get(0), 0);
        EXPECT_EQ(at.get(1), 1);
        EXPECT_EQ(at.get(3), 0.5);
    }
}

TEST_CASE("rope: a turn by the angle of the position, and back") {
    constexpr int64_t N = 6, H = 2, D = 10, R = 6, P = 9;
    for (DType type : types) {
        const auto k = make_cpu_kernels(type);
        Stream s;
        Value x = random_value("x", type, {N, H, D}), table(type, {P, R / 2, 2});
        Value pos(DType::i32, {N});
        const auto angle = [](int64_t p, int64_t i) {
            return double(p) * std::pow(10, -double(i));
        };
        table.set_all([&](int64_t i) {
            const double a = angle(i / R, i % R / 2);
            return i % 2 ? std::sin(a) : std::cos(a);
        });
        pos.set_all([](int64_t n) { return double((n * 5) % P); });
        const std::vector<double> before = x.all();
        k->rope_forward(s, x.tensor(), pos.tensor(), table.tensor());
        std::vector<double> expected = before;
        for (int64_t n = 0; n < N; ++n)
            for (int64_t h = 0; h < H; ++h)
                for (int64_t i = 0; i < R / 2; ++i) {
                    const double a = angle(n * 5 % P, i);
                    const size_t lo = size_t((n * H + h) * D + i), hi = lo + size_t(R / 2);
                    expected[lo] = before[lo] * std::cos(a) - before[hi] * std::sin(a);
                    expected[hi] = before[lo] * std::sin(a) + before[hi] * std::cos(a);
                }
        EXPECT(relative_error(x.all(), expected) < bound_of(type));
        k->rope_backward(s, x.tensor(), pos.tensor(), table.tensor());
        EXPECT(relative_error(x.all(), before) < bound_of(type));
        pos.set(0, P);
        EXPECT_THROWS_AS(k->rope_forward(s, x.tensor(), pos.tensor(), table.tensor()), Error);
    }
}

TEST_CASE("classifier: -log softmax at the target, over the vocabulary without its padding") {
    constexpr int64_t n = 5, V = 300, Vp = 384;
    for (DType type : types)
        for (double shift : {0.0, 5000.0, -5000.0}) {
            const auto k = make_cpu_kernels(type);
            Stream s;
            Value logits = random_value("logits", type, {n, Vp}, 8), loss(type, {n});
            Value dlogits(type, {n, Vp}), targets(DType::i32, {n});
            targets.set_all([](int64_t i) { return i == 3 ? -1.0 : double(i * 71); });
            for (int64_t i = 0; i < logits.size(); ++i)  // padding must not matter, whatever it is
                logits.set(i, i % Vp < V ? logits.get(i) + shift : std::nan(""));
            std::vector<double> losses, gradient;
            for (int64_t i = 0; i < n; ++i) {
                double sum = 0;
                const double target = logits.get(i * Vp + std::max<int64_t>(i * 71, 0));
                for (int64_t j = 0; j < V; ++j) sum += std::exp(logits.get(i * Vp + j) - shift);
                losses.push_back(i == 3 ? 0 : std::log(sum) + shift - target);
                for (int64_t j = 0; j < Vp; ++j) {
                    const double p = j < V ? std::exp(logits.get(i * Vp + j) - shift) / sum : 0;
                    gradient.push_back(i == 3 ? 0 : 0.25 * (p - (j == i * 71 ? 1.0 : 0.0)));
                }
            }
            k->classifier(s, loss.tensor(), logits.tensor(), dlogits.tensor(), targets.tensor(), V,
                          0.25, {});
            EXPECT(relative_error(loss.all(), losses) < (type == DType::f64 ? 1e-12 : 1e-6));
            EXPECT(relative_error(dlogits.all(), gradient) < (type == DType::f64 ? 1e-11 : 1e-6));
            k->classifier(s, loss.tensor(), logits.tensor(), logits.tensor(), targets.tensor(), V,
                          0.25, {});  // in place
            EXPECT(same_bits(logits.all(), dlogits.all()));
        }
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    Value logits = random_value("logits", DType::f32, {1, 4}), loss(DType::f32, {1});
    Value target(DType::i32, {1});
    target.set(0, 3);
    EXPECT_THROWS_AS(
        k->classifier(s, loss.tensor(), logits.tensor(), {}, target.tensor(), 3, 1, {}), Error);
    EXPECT_THROWS_AS(
        k->classifier(s, loss.tensor(), logits.tensor(), {}, target.tensor(), 5, 1, {}), Error);
    logits.set(0, -inf);  // a token that is ruled out
    k->classifier(s, loss.tensor(), logits.tensor(), {}, target.tensor(), 4, 1, {});
    EXPECT(std::isfinite(loss.get(0)));
    logits.set(1, std::nan(""));  // what is broken must show
    k->classifier(s, loss.tensor(), logits.tensor(), {}, target.tensor(), 4, 1, {});
    EXPECT(std::isnan(loss.get(0)));
}
