// Learning rates: end points, continuity, and the shapes' defining values.
#include "engine/schedule.h"

#include <cmath>

#include "test/test.h"

using namespace torus;

namespace {

Config config(Schedule s, int64_t steps, int64_t warmup) {
    Config c;
    c.lr_schedule = s;
    c.steps = steps;
    c.warmup_steps = warmup;
    c.lr = 0.5;
    c.min_lr_fraction = 0.1;
    return c;
}

const Schedule all[] = {Schedule::cosine, Schedule::linear, Schedule::constant, Schedule::wsd};

}  // namespace

TEST_CASE("schedule: warm-up is linear from lr/warmup to lr") {
    for (const Schedule s : all) {
        const Config c = config(s, 100, 10);
        for (int64_t step = 0; step < 10; ++step)
            EXPECT(std::fabs(learning_rate(c, step) - 0.5 * double(step + 1) / 10) < 1e-15);
        EXPECT_EQ(learning_rate(config(s, 100, 0), 0), 0.5);
        EXPECT_EQ(learning_rate(config(s, 100, 1), 0), 0.5);
    }
}

TEST_CASE("schedule: the last step has min_lr_fraction of lr, and so have steps beyond") {
    for (const int64_t warmup : {0, 1, 10, 99}) {
        for (const Schedule s : {Schedule::cosine, Schedule::linear, Schedule::wsd}) {
            const Config c = config(s, 101, warmup);
            if (warmup < 99 || s != Schedule::wsd) {
                EXPECT(std::fabs(learning_rate(c, 100) - 0.05) < 1e-15);
                EXPECT(std::fabs(learning_rate(c, 1000) - 0.05) < 1e-15);
            }
        }
        EXPECT_EQ(learning_rate(config(Schedule::constant, 101, warmup), 100), 0.5);
    }
}

TEST_CASE("schedule: after warm-up it never rises and never jumps") {
    for (const Schedule s : all) {
        for (const int64_t warmup : {0, 1, 7, 50}) {
            const Config c = config(s, 2000, warmup);
            for (int64_t step = warmup ? warmup : 1; step < 2000; ++step) {
                const double drop = learning_rate(c, step - 1) - learning_rate(c, step);
                EXPECT(drop >= 0);
                // 1-sqrt is steepest at its start: sqrt(1/400) of the height.
                EXPECT(drop <= 0.45 * std::sqrt(1.0 / 400) + 1e-12);
            }
        }
    }
}

TEST_CASE("schedule: shapes") {
    // Half way: cosine and linear are both in the middle between lr and the floor.
    EXPECT(std::fabs(learning_rate(config(Schedule::cosine, 101, 0), 50) - 0.275) < 1e-15);
    EXPECT(std::fabs(learning_rate(config(Schedule::linear, 101, 0), 50) - 0.275) < 1e-15);
    // A quarter: cos(pi/4) against 3/4.
    const double quarter = 0.5 * (0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5)));
    EXPECT(std::fabs(learning_rate(config(Schedule::cosine, 101, 0), 25) - quarter) < 1e-15);
    EXPECT(std::fabs(learning_rate(config(Schedule::linear, 101, 0), 25) - 0.3875) < 1e-15);

    Config wsd = config(Schedule::wsd, 1000, 10);
    wsd.decay_fraction = 0.2;
    for (const int64_t step : {10, 400, 799}) EXPECT_EQ(learning_rate(wsd, step), 0.5);
    for (const int64_t n : {1, 50, 100, 199, 200}) {
        const double expected = 0.5 * (0.1 + 0.9 * (1 - std::sqrt(double(n) / 200)));
        CAPTURE(n);
        EXPECT(std::fabs(learning_rate(wsd, 799 + n) - expected) < 1e-15);
    }
    wsd.decay_fraction = 0;
    EXPECT_EQ(learning_rate(wsd, 999), 0.5);
    wsd.decay_fraction = 1;
    wsd.warmup_steps = 0;
    EXPECT_EQ(learning_rate(wsd, 0), 0.5);
    EXPECT(std::fabs(learning_rate(wsd, 999) - 0.05) < 1e-15);
}

TEST_CASE("schedule: runs of one or two steps, and no floor") {
    for (const Schedule s : all) {
        EXPECT_EQ(learning_rate(config(s, 1, 0), 0), 0.5);
        EXPECT_EQ(learning_rate(config(s, 2, 1), 0), 0.5);
        Config c = config(s, 2, 0);
        c.min_lr_fraction = 0;
        EXPECT_EQ(learning_rate(c, 0), 0.5);
        c.min_lr_fraction = 1;
        EXPECT_EQ(learning_rate(c, 1), 0.5);
    }
}
