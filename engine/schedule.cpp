// The learning rate of each step, a pure function of the configuration and the step: nothing to
// save, and a resumed run takes the same values.
#include "engine/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace torus {
namespace {

// Share of the way from step `from` (0) to the last step (1).
double progress(const Config& c, int64_t step, int64_t from) {
    const int64_t last = c.steps - 1;
    if (step <= from || last <= from) return 0;
    return std::min(1.0, double(step - from) / double(last - from));
}

// Share of the peak's height above the floor that is left.
double remaining(const Config& c, int64_t step) {
    const int64_t peak = std::max<int64_t>(c.warmup_steps - 1, 0);  // the first step at full lr
    switch (c.lr_schedule) {
        case Schedule::cosine:
            return 0.5 * (1 + std::cos(std::numbers::pi * progress(c, step, peak)));
        case Schedule::linear: return 1 - progress(c, step, peak);
        case Schedule::constant: return 1;
        case Schedule::wsd: {
            const int64_t decay = std::llround(c.decay_fraction * double(c.steps));
            if (decay == 0) return 1;
            return 1 - std::sqrt(progress(c, step, std::max(peak, c.steps - 1 - decay)));
        }
    }
    CHECK(false);
}

}  // namespace

double learning_rate(const Config& c, int64_t step) {
    CHECK(step >= 0);
    if (step < c.warmup_steps) return c.lr * double(step + 1) / double(c.warmup_steps);
    const double floor = c.min_lr_fraction;
    return c.lr * (floor + (1 - floor) * remaining(c, step));
}

}  // namespace torus
