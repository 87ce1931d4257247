#include "comm/seq/fresh_rows.h"

#include <random>

#include "test/test.h"

using namespace torus;

// Against a table of flags: what is taken, what is cleared, and that nothing is cleared twice.
TEST_CASE("fresh rows: any boxes") {
    std::mt19937 random(7);
    const auto below = [&](int64_t n) { return int64_t(random() % uint32_t(n)); };
    for (int trial = 0; trial < 300; ++trial) {
        const int64_t B = 1 + below(3), T = 1 + below(9), H = 1 + below(4);
        FreshRows rows(B, T, H);
        std::vector<bool> fresh(size_t(B * T * H), true), cleared(size_t(B * T * H), false);
        const auto each = [&](const RowBox& box, auto f) {
            for (int64_t b = box[RowBox::batch].begin; b < box[RowBox::batch].end; ++b)
                for (int64_t t = box[RowBox::row].begin; t < box[RowBox::row].end; ++t)
                    for (int64_t h = box[RowBox::head].begin; h < box[RowBox::head].end; ++h)
                        f(size_t((b * T + t) * H + h));
        };
        const auto clear = [&](const RowBox& box) {
            each(box, [&](size_t i) {
                REQUIRE_TRUE(fresh[i]);
                REQUIRE_TRUE(!cleared[i]);
                cleared[i] = true;
            });
        };
        const auto part = [&](int64_t n) {
            const int64_t begin = below(n);
            return RowBox::Range{begin, begin + 1 + below(n - begin)};
        };
        for (int step = 0; step < 6; ++step) {
            const RowBox box{{part(B), part(T), part(H)}};
            bool all_fresh = true;
            each(box, [&](size_t i) { all_fresh = all_fresh && fresh[i]; });
            const bool overwrites = rows.take(box, clear);
            EXPECT(overwrites == all_fresh);
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
