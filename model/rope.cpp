// Rotary position embedding (Su et al. 2021): the angles, in fp64 from global positions, rounded
// once. At position 10^6 an fp32 angle would be off by 0.03 rad: the table must not be computed in
// the type it is stored in.
#include <cmath>
#include <numbers>

#include "model/model.h"

namespace torus {
namespace {

// Llama 3.1's rule: wavelengths above original/low_freq_factor are stretched by `factor`, those
// below original/high_freq_factor are left alone, a linear blend in between.
double llama3_scaled(const RopeConfig& r, double frequency) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    const double turns = r.original_max_positions / wavelength;  // within the original context
    if (turns > r.high_freq_factor) return frequency;
    if (turns < r.low_freq_factor) return frequency / r.factor;
    const double blend = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
    return (1 - blend) * frequency / r.factor + blend * frequency;
}

}  // namespace

std::vector<double> rope_frequencies(const ModelConfig& c) {
    std::vector<double> frequencies(size_t(c.D / 2));
    for (size_t i = 0; i < frequencies.size(); ++i) {
        const double f = 1.0 / std::pow(c.rope.theta, double(2 * i) / double(c.D));
        switch (c.rope.scaling) {
            case RopeConfig::Scaling::none: frequencies[i] = f; break;
            case RopeConfig::Scaling::linear: frequencies[i] = f / c.rope.factor; break;
            case RopeConfig::Scaling::llama3: frequencies[i] = llama3_scaled(c.rope, f); break;
        }
    }
    return frequencies;
}

void fill_rope_table(const ModelConfig& c, Tensor table) {
    const std::vector<double> frequencies = rope_frequencies(c);
    const int64_t half = int64_t(frequencies.size());
    CHECK(table.rank() == 3 && table.dim(1) == half && table.dim(2) == 2 && table.contiguous(),
          ": rope table ", table.shape.str());
    CHECK(table.dtype == DType::f32 || table.dtype == DType::f64);
    const auto fill = [&](auto* out) {
        using T = std::remove_reference_t<decltype(*out)>;
#pragma omp parallel for
        for (int64_t p = 0; p < table.dim(0); ++p)
            for (int64_t i = 0; i < half; ++i) {
                const double angle = double(p) * frequencies[size_t(i)];
                out[(p * half + i) * 2] = T(std::cos(angle));
                out[(p * half + i) * 2 + 1] = T(std::sin(angle));
            }
    };
    if (table.dtype == DType::f64)
        fill(table.as<double>());
    else
        fill(table.as<float>());
}

}  // namespace torus
