#include "comm/seq/running_sum.h"

#include "comm/seq/tensors.h"

namespace torus {
namespace {

// The sequences and rows of a box in (B,T,...).
Tensor rows_of(const Tensor& t, const RowBox& box) {
    const auto &batch = box[RowBox::batch], &row = box[RowBox::row];
    return t.rows(batch.begin, batch.size()).slice(1, row.begin, row.size());
}

}  // namespace

FreshRows::Clear RunningSum::clear(Stream& s) const {
    return [this, &s](const RowBox& box) {
        const auto& head = box[RowBox::head];
        const Tensor rows = rows_of(sum_, box);
        if (head.size() == kv_heads_) return fill_rows(*k_, s, rows, 0);
        const int64_t n = sum_.dim(2) / (halves_ * kv_heads_);  // heads for each kv head
        for (int64_t half = 0; half < halves_; ++half) {
            const int64_t first = n * (half * kv_heads_ + head.begin);
            fill_rows(*k_, s, rows.slice(2, first, n * head.size()), 0);
        }
    };
}

bool RunningSum::must_add(Stream& s, const RowBox& box) { return !fresh_.take(box, clear(s)); }

void RunningSum::add(Stream& s, int64_t b, int64_t row, const Tensor& from,
                     std::span<const Tensor> out) {
    const RowBox box{{{{b, b + 1}, {row, row + from.dim(1)}, {0, kv_heads_}}}};
    const bool adds = must_add(s, box);
    if (!out.empty()) owed_.take(box, [](const RowBox&) {});
    int64_t head = 0;
    for (const Tensor& t : out.empty() ? std::span(&sum_, 1) : out) {
        const int64_t heads = t.dim(2);
        const Tensor to = rows_of(t, box), x = from.slice(2, head, heads);
        if (adds)
            add_rows(*k_, s, to, rows_of(sum_, box).slice(2, head, heads), x);
        else
            copy_rows(*k_, s, to, x);
        head += heads;
    }
}

void RunningSum::clear_rest(Stream& s) { fresh_.take_rest(clear(s)); }

void RunningSum::hand_over(Stream& s, std::span<const Tensor> out) {
    clear_rest(s);
    owed_.take_rest([&](const RowBox& box) {
        int64_t head = 0;
        for (const Tensor& t : out) {
            copy_rows(*k_, s, rows_of(t, box), rows_of(sum_, box).slice(2, head, t.dim(2)));
            head += t.dim(2);
        }
    });
}

}  // namespace torus
