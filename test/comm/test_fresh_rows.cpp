#include "comm/seq/fresh_rows.h"

#include <random>

#include "test/test.h"

using namespace torus;

// Against a table of flags: what is taken, what is cleared, and that nothing is cleared twice.
TEST_CASE("fresh rows: any boxes") {
    std::mt19937 random(7);
    const auto below = [&](int64_t n) { return int64_t(random() % uint32_t(n)); };
    for (int trial = 0; trial < 300; ++trial) {
        const int64_t B = 1 + below(4), T = 1 + below(12);
        FreshRows rows(B, T);
        std::vector<bool> fresh(size_t(B * T), true), cleared(size_t(B * T), false);
        const auto each = [&](const RowBox& box, auto f) {
            for (int64_t b = box.batch; b < box.batch_end; ++b)
                for (int64_t t = box.row; t < box.row_end; ++t) f(size_t(b * T + t));
        };
        const auto clear = [&](const RowBox& box) {
            each(box, [&](size_t i) {
                REQUIRE_TRUE(fresh[i]);
                REQUIRE_TRUE(!cleared[i]);
                cleared[i] = true;
            });
        };
        for (int step = 0; step < 6; ++step) {
            const int64_t batch = below(B), row = below(T);
            const RowBox box{batch, batch + 1 + below(B - batch), row, row + 1 + below(T - row)};
            const bool whole = below(4) > 0;
            bool all_fresh = true;
            each(box, [&](size_t i) { all_fresh = all_fresh && fresh[i]; });
            const bool overwrites = rows.take(box, whole, clear);
            const bool may_overwrite = whole && all_fresh;
            EXPECT(overwrites == may_overwrite);
            each(box, [&](size_t i) {
                const bool settled = cleared[i] || overwrites || !fresh[i];
                REQUIRE_TRUE(settled);
                fresh[i] = false;
            });
        }
        std::fill(cleared.begin(), cleared.end(), false);
        rows.take_rest(clear);
        EXPECT(cleared == fresh);
        rows.take_rest([](const RowBox&) { REQUIRE_TRUE(false); });
    }
}
