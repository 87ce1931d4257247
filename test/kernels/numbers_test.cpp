// Random numbers, half types, and the exponential of the CPU backend.
#include <cmath>
#include <limits>
#include <set>

#include "kernels/cpu/loops.h"
#include "kernels/float16.h"
#include "kernels/rng.h"
#include "test/test.h"

using namespace torus;

TEST_CASE("philox4x32-10 gives the known answers of Random123") {
    // kat_vectors of the Random123 distribution: counter words 0..3, key words, output.
    struct Answer {
        uint64_t seed, stream, index;
        uint32_t out[4];
    };
    const Answer answers[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822,
         0x0370734413198a2e,
         0x85a308d3243f6a88,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (const Answer& a : answers) {
        const Random4 r = philox(a.seed, a.stream, a.index);
        for (int i = 0; i < 4; ++i) EXPECT_EQ(r.v[i], a.out[i]);
    }
    for (uint64_t i = 0; i < 8; ++i) EXPECT_EQ(random_bits(5, 6, i), philox(5, 6, i / 4).v[i % 4]);
}

TEST_CASE("uniform and normal numbers have the right moments") {
    constexpr int n = 200000;
    double mean = 0, square = 0, fourth = 0, uniform = 0;
    std::set<double> distinct;
    for (int i = 0; i < n; ++i) {
        const double u = random_uniform(1, 2, uint64_t(i)), z = random_normal(1, 2, uint64_t(i));
        REQUIRE_TRUE((u > 0 && u < 1 && std::isfinite(z)));
        uniform += u / n;
        mean += z / n;
        square += z * z / n;
        fourth += z * z * z * z / n;
        distinct.insert(z);
    }
    EXPECT(std::fabs(uniform - 0.5) < 0.005);
    EXPECT(std::fabs(mean) < 0.01);
    EXPECT(std::fabs(square - 1) < 0.02);
    EXPECT(std::fabs(fourth - 3) < 0.1);
    EXPECT_EQ(distinct.size(), size_t(n));
    EXPECT(random_uniform(1, 2, 3) != random_uniform(1, 3, 3));
    EXPECT(random_uniform(1, 2, 3) != random_uniform(2, 2, 3));
}

TEST_CASE("every half value survives widening and rounding") {
    for (uint32_t h = 0; h < 65536; ++h) {
        const float b = bf16_to_float(uint16_t(h)), f = f16_to_float(uint16_t(h));
        if (std::isnan(b))
            REQUIRE_TRUE(std::isnan(bf16_to_float(float_to_bf16(b))));
        else
            REQUIRE_TRUE(float_to_bf16(b) == h);
        if (std::isnan(f))
            REQUIRE_TRUE(std::isnan(f16_to_float(float_to_f16(f))));
        else
            REQUIRE_TRUE(float_to_f16(f) == h);
    }
    EXPECT_EQ(f16_to_float(0x3c00), 1.0f);
    EXPECT_EQ(f16_to_float(0x7bff), 65504.0f);
    EXPECT_EQ(f16_to_float(0x0001), 0x1p-24f);
    EXPECT_EQ(bf16_to_float(0x3f80), 1.0f);
}

TEST_CASE("rounding to half types takes the nearest, ties to even") {
    // Between each pair of finite neighbours: just below, at and just above the midpoint.
    const auto check = [](auto widen, auto round, uint32_t last) {
        for (uint32_t h = 0; h < last; ++h) {
            const float low = widen(uint16_t(h)), high = widen(uint16_t(h + 1));
            const float middle = low + (high - low) / 2;
            const uint32_t even = h % 2 ? h + 1 : h;
            for (float sign : {1.0f, -1.0f}) {
                const uint32_t s = sign < 0 ? 0x8000 : 0;
                REQUIRE_TRUE(round(sign * middle) == (even | s));
                REQUIRE_TRUE(round(sign * std::nextafter(middle, 0.0f)) == (h | s));
                REQUIRE_TRUE(round(sign * std::nextafter(middle, high)) == ((h + 1) | s));
            }
        }
    };
    check(f16_to_float, float_to_f16, 0x7bff);
    // bf16 shares fp32's exponents, so midpoints are exact down to its subnormals.
    check(bf16_to_float, float_to_bf16, 0x7f7f);
    EXPECT_EQ(float_to_f16(65519.99f), 0x7bff);
    EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
    EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST_CASE("stochastic rounding goes up exactly for the bits it should") {
    const float x = std::bit_cast<float>(0x3f804000u);  // a quarter of the way up from 1
    int ups = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits)
        ups += float_to_bf16_stochastic(x, bits) == 0x3f81;
    EXPECT_EQ(ups, 16384);
    EXPECT_EQ(float_to_bf16_stochastic(1.0f, 0xffff), 0x3f80);
    EXPECT_EQ(float_to_bf16_stochastic(-std::numeric_limits<float>::infinity(), 0xffff), 0xff80);
}

TEST_CASE("fast_exp is within 2 units in the last place") {
    const float inf = std::numeric_limits<float>::infinity();
    double worst = 0;
    for (double at = -86; at < 88.7; at += 1.37e-4) {
        const float x = float(at);
        const double exact = std::exp(double(x));
        worst = std::max(worst, std::fabs(double(fast_exp(x)) - exact) / exact);
    }
    EXPECT(worst < 0x1p-22);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-inf), 0.0f);
    EXPECT_EQ(fast_exp(-1e30f), 0.0f);
    EXPECT_EQ(fast_exp(inf), inf);
    EXPECT_EQ(fast_exp(89.0f), inf);
    EXPECT(std::isnan(fast_exp(std::nanf(""))));
}
