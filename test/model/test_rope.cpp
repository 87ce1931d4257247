// The table of rotary angles: against a formula in long double, at positions where fp32 angles or
// 8-bit position types would show, and the library's three scaling rules.
#include <cmath>
#include <vector>

#include "model/model.h"
#include "test/test.h"

using namespace torus;

namespace {

ModelConfig rotary(int64_t D, RopeConfig rope) {
    ModelConfig c = model_preset("llama:tiny");
    c.D = D;
    c.rope = rope;
    return c;
}

constexpr RopeConfig llama3{.theta = 500000,
                            .scaling = RopeConfig::Scaling::llama3,
                            .factor = 8,
                            .low_freq_factor = 1,
                            .high_freq_factor = 4,
                            .original_max_positions = 8192};

// Frequency i as the library computes it: every branch evaluated, then selected.
long double reference_frequency(const ModelConfig& c, int64_t i) {
    const RopeConfig& r = c.rope;
    const long double f = 1.0L / powl(r.theta, 2.0L * i / c.D);
    if (r.scaling == RopeConfig::Scaling::none) return f;
    if (r.scaling == RopeConfig::Scaling::linear) return f / r.factor;
    const long double wavelength = 2 * acosl(-1.0L) / f;
    const long double low = r.original_max_positions / r.low_freq_factor;
    const long double high = r.original_max_positions / r.high_freq_factor;
    const long double smooth = (r.original_max_positions / wavelength - r.low_freq_factor) /
                               (r.high_freq_factor - r.low_freq_factor);
    const long double medium = (1 - smooth) * f / r.factor + smooth * f;
    if (wavelength > low) return f / r.factor;
    return wavelength < high ? f : medium;
}

}  // namespace

TEST_CASE("rope: table equals the formula in long double") {
    const RopeConfig scalings[] = {
        {}, {.theta = 1e6, .scaling = RopeConfig::Scaling::linear, .factor = 4}, llama3};
    const int64_t positions[] = {0,   1,    255,   256,    257,    258,    259,
                                 260, 4095, 65535, 131071, 262144, 1048575};
    for (const RopeConfig& rope : scalings) {
        const ModelConfig c = rotary(6, rope);
        const int64_t P = 1 << 20;
        std::vector<double> table(size_t(P * 3 * 2));
        std::vector<float> rounded(table.size());
        fill_rope_table(c, Tensor(table.data(), DType::f64, {P, 3, 2}));
        fill_rope_table(c, Tensor(rounded.data(), DType::f32, {P, 3, 2}));
        for (const int64_t p : positions)
            for (int64_t i = 0; i < 3; ++i) {
                CAPTURE(p);
                CAPTURE(i);
                const long double angle = p * reference_frequency(c, i);
                const size_t at = size_t((p * 3 + i) * 2);
                // fp64 angles up to 2^20 carry an error of up to 2^-33
                EXPECT(std::abs(table[at] - double(cosl(angle))) < 4e-10);
                EXPECT(std::abs(table[at + 1] - double(sinl(angle))) < 4e-10);
                EXPECT_EQ(rounded[at], float(table[at]));
                EXPECT_EQ(rounded[at + 1], float(table[at + 1]));
            }
    }
}

TEST_CASE("rope: frequencies of the scaling rules") {
    for (const int64_t D : {2, 16, 64, 128}) {
        for (const RopeConfig& rope :
             {RopeConfig{.theta = 10000},
              RopeConfig{.theta = 10000, .scaling = RopeConfig::Scaling::linear, .factor = 2.5},
              llama3}) {
            const ModelConfig c = rotary(D, rope);
            const std::vector<double> f = rope_frequencies(c);
            REQUIRE_TRUE(int64_t(f.size()) == D / 2);
            for (size_t i = 0; i < f.size(); ++i) {
                const long double expected = reference_frequency(c, int64_t(i));
                EXPECT(std::abs(f[i] / double(expected) - 1) < 1e-14);
            }
        }
    }
    // all three branches of llama3's rule are met, with the factor of 8 at the slow end
    const std::vector<double> plain = rope_frequencies(rotary(128, {.theta = 500000}));
    const std::vector<double> scaled = rope_frequencies(rotary(128, llama3));
    EXPECT_EQ(scaled.front(), plain.front());
    EXPECT(std::abs(plain.back() / scaled.back() - 8) < 1e-12);
    int between = 0;
    for (size_t i = 0; i < plain.size(); ++i)
        between += scaled[i] < plain[i] && scaled[i] > plain[i] / 8 * 1.0001;
    EXPECT(between > 3);
}
