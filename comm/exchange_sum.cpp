#include "comm/exchange_sum.h"

#include <algorithm>
#include <vector>

namespace torus {

constexpr int64_t step = 4;  // elements that parts begin at multiples of: 16 bytes in fp32

// x has at most P parts of `most` elements; parts behind its end are shorter, or empty.
static void sum_piece(Kernels& k, Stream& s, Comm& all, Tensor x, Tensor others, int64_t most) {
    const int P = all.size(), mine = all.rank();
    const int64_t n = x.numel();
    const int64_t length = std::min(most, ((n + P - 1) / P + step - 1) / step * step);
    const auto part = [&](int p) {
        const int64_t begin = std::min(n, p * length);
        return x.rows(begin, std::min(n - begin, length));
    };
    const Tensor sum = part(mine);
    std::vector<Message> to_owners, to_me, sums, from_owners;
    for (int p = 0; p < P; ++p) {
        if (p == mine) continue;
        const int64_t slot = p - (p > mine);
        to_owners.push_back({p, part(p)});
        to_me.push_back({p, others.rows(slot * length, sum.numel())});
        sums.push_back({p, sum});
        from_owners.push_back({p, part(p)});
    }
    all.exchange(s, to_owners, to_me);
    // In rank order: the ranks before this one, this one, the ranks behind.
    if (sum.numel() > 0) {
        const auto add = [&](const Tensor& to, int i) { k.add(s, to, to, to_me[size_t(i)].data); };
        for (int i = 1; i < mine; ++i) add(to_me[0].data, i);
        if (mine > 0) add(sum, 0);
        for (int i = mine; i < P - 1; ++i) add(sum, i);
    }
    all.exchange(s, sums, from_owners);
}

void sum_by_exchange(Kernels& k, Stream& s, Comm& all, Tensor x, Tensor others) {
    const int P = all.size();
    if (P == 1) return;
    const int64_t most = others.numel() / (P - 1) / step * step;
    CHECK(most > 0, ": room for ", others.numel(), " elements of ", P - 1, " ranks");
    for (int64_t at = 0; at < x.numel(); at += P * most)
        sum_piece(k, s, all, x.rows(at, std::min(x.numel() - at, P * most)), others, most);
}

}  // namespace torus
