// Ops without a gradient of their own: fill, casts, scale and sums.
#include <cmath>
#include <limits>

#include "kernels/float16.h"
#include "kernels/rng.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

const Covers covers{"fill", "cast", "cast_stochastic", "scale", "sum", "sum_squares"};

constexpr double inf = std::numeric_limits<double>::infinity();
const DType float_types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("fill writes every element of every type") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    for (DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32}) {
        for (bool pitched : {false, true}) {
            Value x(type, {3, 10007}, pitched);
            k->fill(s, x.tensor(), -2.5);
            for (double v : x.all()) REQUIRE_TRUE(v == (type == DType::i32 ? -2 : -2.5));
            EXPECT(x.gaps_intact());
        }
    }
    Value x(DType::i64, {4});
    EXPECT_THROWS_AS(k->fill(s, x.tensor(), 1), Error);
    Value rows(DType::f32, {4, 4});
    Tensor columns = rows.tensor();
    std::swap(columns.stride[0], columns.stride[1]);
    EXPECT_THROWS_AS(k->fill(s, columns, 1), Error);
}

TEST_CASE("cast converts between all float types, pitched or not, to nearest even") {
    const auto k = make_cpu_kernels(DType::f64);
    Stream s;
    for (DType from : float_types)
        for (DType to : float_types)
            for (bool pitched : {false, true}) {
                Value src = random_value("x", from, {7, 3, 11}, 100, pitched);
                Value dst(to, {7, 3, 11}, pitched), expected(to, {7, 3, 11});
                k->cast(s, dst.tensor(), src.tensor());
                for (int64_t i = 0; i < src.size(); ++i) {
                    expected.set(i, src.get(i));  // all sources here are exact in fp32
                    REQUIRE_TRUE(dst.get(i) == expected.get(i));
                }
                EXPECT(dst.gaps_intact());
            }
    Value a(DType::f32, {2, 3}), b(DType::f32, {3, 2}), c(DType::i32, {2, 3});
    EXPECT_THROWS_AS(k->cast(s, a.tensor(), b.tensor()), Error);
    EXPECT_THROWS_AS(k->cast(s, a.tensor(), c.tensor()), Error);
    EXPECT_THROWS_AS(k->cast(s, c.tensor(), a.tensor()), Error);
    Value d(DType::i32, {2, 3});
    c.set_all([](int64_t i) { return double(i * 1000003); });
    k->cast(s, d.tensor(), c.tensor());
    EXPECT(d.all() == c.all());
}

TEST_CASE("fp64 to half types rounds once") {
    const auto k = make_cpu_kernels(DType::f64);
    Stream s;
    // Just above the midpoint of two neighbours, by less than fp32 can tell: rounding to fp32 first
    // lands on the midpoint and then goes to the even neighbour below.
    Value src(DType::f64, {4}), bf16(DType::bf16, {4}), f16(DType::f16, {4});
    src.set(0, 1 + 0x1p-8 + 0x1p-40);
    src.set(1, -(1 + 0x1p-8 + 0x1p-40));
    src.set(2, 1 + 0x1p-11 + 0x1p-40);
    src.set(3, 1 + 3 * 0x1p-11 - 0x1p-40);
    k->cast(s, bf16.tensor(), src.tensor());
    k->cast(s, f16.tensor(), src.tensor());
    EXPECT_EQ(bf16.get(0), 1 + 0x1p-7);
    EXPECT_EQ(bf16.get(1), -(1 + 0x1p-7));
    EXPECT_EQ(f16.get(2), 1 + 0x1p-10);
    EXPECT_EQ(f16.get(3), 1 + 0x1p-10);
    src.set(0, 1e300);
    src.set(1, -inf);
    src.set(2, 1e-300);
    src.set(3, std::nan(""));
    k->cast(s, f16.tensor(), src.tensor());
    EXPECT_EQ(f16.get(0), inf);
    EXPECT_EQ(f16.get(1), -inf);
    EXPECT_EQ(f16.get(2), 0);
    EXPECT(std::isnan(f16.get(3)));
}

TEST_CASE("stochastic rounding is unbiased, exact where it can be, and a function of the index") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    constexpr int64_t n = 40000;
    Value src(DType::f32, {n}), dst(DType::bf16, {n}), again(DType::bf16, {n - 100});
    const double x = 1 + 0.3 * 0x1p-7;  // 0.3 of the way between neighbours
    src.set_all([&](int64_t) { return x; });
    k->cast_stochastic(s, dst.tensor(), src.tensor(), 7, 3, 1000);
    double ups = 0;
    for (double v : dst.all()) {
        REQUIRE_TRUE((v == 1 || v == 1 + 0x1p-7));
        ups += v > 1;
    }
    EXPECT(std::fabs(ups / n - 0.3) < 5 * std::sqrt(0.21 / n));
    k->cast_stochastic(s, again.tensor(), src.tensor().rows(100, n - 100), 7, 3, 1100);
    for (int64_t i = 0; i < n - 100; ++i) REQUIRE_TRUE(again.get(i) == dst.get(i + 100));
    src.set_all([](int64_t i) { return i == 0 ? inf : i == 1 ? std::nan("") : 0.375; });
    k->cast_stochastic(s, dst.tensor(), src.tensor(), 7, 3, 0);
    EXPECT_EQ(dst.get(0), inf);
    EXPECT(std::isnan(dst.get(1)));
    for (int64_t i = 2; i < n; ++i) REQUIRE_TRUE(dst.get(i) == 0.375);
    EXPECT_THROWS_AS(k->cast_stochastic(s, src.tensor(), dst.tensor(), 0, 0, 0), Error);
}

TEST_CASE("scale, sum and sum_squares") {
    for (DType type : {DType::f32, DType::f64}) {
        const auto k = make_cpu_kernels(type);
        Stream s;
        for (int64_t n : {1, 15, 4097, 5000000}) {
            Value x(type, {n}), out(DType::f64, {1});
            // Small integers: every sum is exact whatever its order.
            x.set_all([](int64_t i) { return double(i % 7 - 2); });
            double sum = 0, squares = 0;
            for (int64_t i = 0; i < n; ++i) {
                sum += 3 * double(i % 7 - 2);
                squares += 9 * double(i % 7 - 2) * double(i % 7 - 2);
            }
            k->scale(s, x.tensor(), 3);
            k->sum(s, out.tensor(), x.tensor(), false);
            EXPECT_EQ(out.get(0), sum);
            k->sum(s, out.tensor(), x.tensor(), true);
            EXPECT_EQ(out.get(0), 2 * sum);
            k->sum_squares(s, out.tensor(), x.tensor(), false);
            EXPECT_EQ(out.get(0), squares);
            k->sum_squares(s, out.tensor(), x.tensor(), true);
            EXPECT_EQ(out.get(0), 2 * squares);
        }
        Value x(type, {3}), wrong(DType::f32, {1});
        EXPECT_THROWS_AS(k->sum(s, wrong.tensor(), x.tensor(), false), Error);
        EXPECT_THROWS_AS(k->scale(s, Value(DType::bf16, {3}).tensor(), 2), Error);
    }
}

TEST_CASE("sums of fp32 are in fp64, of half types too, and the same for any number of threads") {
    const auto k = make_cpu_kernels(DType::f32);
    Stream s;
    Value x(DType::f32, {100000}), out(DType::f64, {1});
    x.set_all([](int64_t i) { return i == 0 ? 1e8 : 1e-3; });
    k->sum(s, out.tensor(), x.tensor(), false);
    EXPECT(std::fabs(out.get(0) - (1e8 + 99999 * double(1e-3f))) < 1e-4);
    // 1e20 squared overflows fp32.
    x.set_all([](int64_t) { return 1e20; });
    k->sum_squares(s, out.tensor(), x.tensor(), false);
    EXPECT(std::fabs(out.get(0) / 1e45 - 1) < 1e-6);
    for (DType half : {DType::bf16, DType::f16}) {
        Value h(half, {1001});
        h.set_all([](int64_t i) { return double(i % 5); });
        k->sum(s, out.tensor(), h.tensor(), false);
        EXPECT_EQ(out.get(0), 2000);
    }
    x = random_value("x", DType::f32, {100000});
    double one = 0;
    with_threads(1, [&] {
        k->sum_squares(s, out.tensor(), x.tensor(), false);
        one = out.get(0);
    });
    with_threads(3, [&] { k->sum_squares(s, out.tensor(), x.tensor(), false); });
    EXPECT_EQ(out.get(0), one);
}
