// Sums over ranks by exchanges and additions: in rank order, so the same bits on every rank, for
// any number of ranks and of elements, fewer than ranks too, and nothing written past the scratch.
#include "comm/exchange_sum.h"

#include "kernels/kernels.h"
#include "kernels/rng.h"
#include "test/comm/ranks.h"
#include "test/test.h"

using namespace torus;

namespace {

double value(int rank, int64_t i) { return random_uniform(7, uint64_t(rank), uint64_t(i)) - 0.5; }

template <class T>
void check_sum(DType type, int P, int64_t n, int64_t room) {
    CAPTURE(P);
    CAPTURE(room);
    CAPTURE(n);
    std::vector<std::vector<T>> sums(static_cast<size_t>(P));
    std::vector<int> kept(static_cast<size_t>(P));
    run_ranks(P, [&](Comm& all) {
        const auto k = make_cpu_kernels(type);
        const size_t scratch = size_t((P - 1) * room);
        std::vector<T> x(static_cast<size_t>(n)), others(scratch + 1, T(5));
        for (int64_t i = 0; i < n; ++i) x[size_t(i)] = T(value(all.rank(), i));
        Stream s;
        sum_by_exchange(*k, s, all, Tensor(x.data(), type, {n}),
                        Tensor(others.data(), type, {int64_t(scratch)}));
        sums[size_t(all.rank())] = x;
        kept[size_t(all.rank())] = others.back() == T(5);
    });
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
        T want = T(value(0, i));
        for (int r = 1; r < P; ++r) want += T(value(r, i));
        for (int r = 0; r < P; ++r) wrong += sums[size_t(r)][size_t(i)] != want;
    }
    EXPECT_EQ(wrong, 0);
    for (int r = 0; r < P; ++r) EXPECT(kept[size_t(r)]);
}

}  // namespace

TEST_CASE("comm: sums by exchanges, in rank order on every rank") {
    for (int P : {1, 2, 3, 4, 8})
        for (int64_t n : {1, 3, 4, 5, 8, 17, 31, 1000, 4099})
            for (int64_t room : {4, 8, 64, 1100}) {  // elements of another rank
                check_sum<double>(DType::f64, P, n, room);
                check_sum<float>(DType::f32, P, n, room);
            }
}
