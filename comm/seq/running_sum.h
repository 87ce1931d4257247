// A sum of results over the blocks of a ring, from the first of them, which write over what lay
// there, to the last, which can bring it to the caller.
#pragma once
#include <span>

#include "comm/seq/fresh_rows.h"
#include "kernels/kernels.h"

namespace torus {

class RunningSum {
public:
    RunningSum() = default;
    // sum: stat (B,rows,h,D), uninitialised; h is a multiple of kv_heads, and of twice as many when
    // `pairs`: then heads of K come before those of V.
    RunningSum(Kernels& k, const Tensor& sum, int64_t kv_heads, bool pairs = false)
        : k_(&k),
          sum_(sum),
          kv_heads_(kv_heads),
          halves_(pairs ? 2 : 1),
          fresh_(sum.dim(0), sum.dim(1), kv_heads),
          owed_(fresh_) {}

    const Tensor& tensor() const { return sum_; }
    // A kernel's results for this box come next. Whether it must add them to the sum; else it
    // writes over all of the box.
    bool must_add(Stream&, const RowBox&);
    // Adds `from` (1,rows,h,D), for rows [row, row + rows) of sequence b. With `out` nothing more
    // follows for these rows: the sum goes there, in act (B,all rows,h,D) (pitched), or to two
    // tensors of half the heads.
    void add(Stream&, int64_t b, int64_t row, const Tensor& from, std::span<const Tensor> out = {});
    // Nothing follows: what got no results is 0.
    void clear_rest(Stream&);
    // And what has not gone to `out` yet goes there.
    void hand_over(Stream&, std::span<const Tensor> out);

private:
    FreshRows::Clear clear(Stream&) const;

    Kernels* k_ = nullptr;
    Tensor sum_;
    int64_t kv_heads_ = 0, halves_ = 1;
    FreshRows fresh_, owed_;
};

}  // namespace torus
