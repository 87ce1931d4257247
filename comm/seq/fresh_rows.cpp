#include "comm/seq/fresh_rows.h"

#include <algorithm>

namespace torus {

bool FreshRows::take(const RowBox& box, bool whole, const Clear& clear) {
    std::vector<RowBox> taken, left;
    const auto keep = [&](const RowBox& b) {
        if (b.batch < b.batch_end && b.row < b.row_end) left.push_back(b);
    };
    int64_t fresh = 0;
    for (const RowBox& l : left_) {
        const RowBox hit{std::max(l.batch, box.batch), std::min(l.batch_end, box.batch_end),
                         std::max(l.row, box.row), std::min(l.row_end, box.row_end)};
        if (hit.batch >= hit.batch_end || hit.row >= hit.row_end) {
            keep(l);
            continue;
        }
        taken.push_back(hit);
        fresh += hit.count();
        keep({l.batch, hit.batch, l.row, l.row_end});
        keep({hit.batch_end, l.batch_end, l.row, l.row_end});
        keep({hit.batch, hit.batch_end, l.row, hit.row});
        keep({hit.batch, hit.batch_end, hit.row_end, l.row_end});
    }
    left_ = std::move(left);
    if (whole && fresh == box.count()) return true;
    for (const RowBox& b : taken) clear(b);
    return false;
}

void FreshRows::take_rest(const Clear& clear) {
    for (const RowBox& b : left_)
        if (b.count() > 0) clear(b);
    left_.clear();
}

}  // namespace torus
