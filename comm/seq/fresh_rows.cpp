#include "comm/seq/fresh_rows.h"

#include <algorithm>

namespace torus {

bool FreshRows::take(const RowBox& box, const Clear& clear) {
    std::vector<RowBox> taken, left;
    int64_t fresh = 0;
    for (RowBox rest : left_) {
        RowBox hit = rest;
        bool meets = true;
        for (int axis = 0; axis < 3; ++axis) {
            hit[axis].begin = std::max(hit[axis].begin, box[axis].begin);
            hit[axis].end = std::min(hit[axis].end, box[axis].end);
            meets = meets && hit[axis].size() > 0;
        }
        if (!meets) {
            left.push_back(rest);
            continue;
        }
        // Slabs before and behind the hit, axis by axis.
        for (int axis = 0; axis < 3; ++axis) {
            RowBox before = rest, behind = rest;
            before[axis].end = hit[axis].begin, behind[axis].begin = hit[axis].end;
            for (const RowBox& slab : {before, behind})
                if (slab.count() > 0) left.push_back(slab);
            rest[axis] = hit[axis];
        }
        taken.push_back(hit);
        fresh += hit.count();
    }
    left_ = std::move(left);
    if (fresh == box.count()) return true;
    for (const RowBox& b : taken) clear(b);
    return false;
}

void FreshRows::take_rest(const Clear& clear) {
    for (const RowBox& b : left_)
        if (b.count() > 0) clear(b);
    left_.clear();
}

}  // namespace torus
