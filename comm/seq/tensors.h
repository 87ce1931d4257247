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

// Of a dense (B,T,...).
inline FreshRows::Clear clear_rows(Kernels& k, Stream& s, const Tensor& t) {
    return [&k, &s, t](const RowBox& box) {
        for (int64_t b = box.batch; b < box.batch_end; ++b)
            fill_rows(k, s, t.rows(b, 1).slice(1, box.row, box.row_end - box.row), 0);
    };
}

}  // namespace torus
