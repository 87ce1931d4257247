// Small helpers of the modes: kernels want tensors that are there; here shards may be empty.
#pragma once
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

inline bool heads_joined(const Tensor& t) {
    return t.rank() == 4 && (t.dim(2) == 1 || t.pitch(2) == t.dim(3));
}

inline void copy_rows(Kernels& k, Stream& s, const Tensor& to, const Tensor& from) {
    if (to.numel() == 0) return;
    if (heads_joined(to) && heads_joined(from)) {
        k.cast(s, join_heads(to), join_heads(from));
    } else {
        k.cast(s, to, from);
    }
}

// to = a + b
inline void add_rows(Kernels& k, Stream& s, const Tensor& to, const Tensor& a, const Tensor& b) {
    if (to.numel() == 0) return;
    if (heads_joined(to) && heads_joined(a) && heads_joined(b)) {
        k.add(s, join_heads(to), join_heads(a), join_heads(b));
    } else {
        k.add(s, to, a, b);
    }
}

inline void fill_rows(Kernels& k, Stream& s, const Tensor& t, double value) {
    if (t.numel() > 0) k.fill(s, t, value);
}

}  // namespace torus
