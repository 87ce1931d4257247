// Small helpers of the modes: kernels want tensors that are there; here shards may be empty.
#pragma once
#include "comm/seq/fresh_rows.h"
#include "kernels/kernels.h"

namespace torus {

// An optional tensor of a call is there, if perhaps without rows.
inline bool present(const Tensor& t) { return t.data != nullptr || t.rank() > 0; }

// (B,T,h,D) as (B,T,h*D) when whole heads follow each other: long rows copy faster.
inline Tensor join_heads(const Tensor& t) {
    Tensor joined = t;
    joined.shape = {t.dim(0), t.dim(1), t.dim(2) * t.dim(3)};
    joined.stride[2] = 1;
    return joined;
}

inline void copy_rows(Kernels& k, Stream& s, const Tensor& to, const Tensor& from) {
    if (to.numel() == 0) return;
    const auto dense = [](const Tensor& t) {
        return t.rank() == 4 && (t.dim(2) == 1 || t.pitch(2) == t.dim(3));
    };
    if (dense(to) && dense(from)) {
        k.cast(s, join_heads(to), join_heads(from));
    } else {
        k.cast(s, to, from);
    }
}

inline void fill_rows(Kernels& k, Stream& s, const Tensor& t, double value) {
    if (t.numel() > 0) k.fill(s, t, value);
}

// Of (B,T,h,D) with h / kv_heads heads for each kv head; with `pairs` those of K, then those of V.
inline FreshRows::Clear clear_rows(Kernels& k, Stream& s, const Tensor& t, int64_t kv_heads,
                                   bool pairs = false) {
    return [&k, &s, t, kv_heads, pairs](const RowBox& box) {
        const auto of = [&](const Tensor& x, int axis, int64_t n, int64_t first = 0) {
            const auto& range = box[axis];
            return x.slice(axis, first + n * range.begin, n * range.size());
        };
        const Tensor rows = of(of(t, RowBox::batch, 1), RowBox::row, 1);
        const bool whole = box[RowBox::head].size() == kv_heads;
        const int64_t n = t.dim(2) / (pairs ? 2 * kv_heads : kv_heads);
        for (int half = 0; half < (pairs && !whole ? 2 : 1); ++half)
            fill_rows(k, s, whole ? rows : of(rows, 2, n, half * n * kv_heads), 0);
    };
}

}  // namespace torus
