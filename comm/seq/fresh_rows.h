// Which parts of a sum hold nothing yet, so that the first block of results writes over them
// instead of adding: nothing has to be filled with zeros before, and read back.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace torus {

// Sequences, rows and kv heads, each from one to before the other.
struct RowBox {
    enum : int { batch, row, head };
    struct Range {
        int64_t begin, end;
        int64_t size() const { return end - begin; }
    };
    std::array<Range, 3> range;
    const Range& operator[](int axis) const { return range[size_t(axis)]; }
    Range& operator[](int axis) { return range[size_t(axis)]; }
    int64_t count() const { return range[0].size() * range[1].size() * range[2].size(); }
};

class FreshRows {
public:
    using Clear = std::function<void(const RowBox&)>;

    FreshRows() = default;
    FreshRows(int64_t batches, int64_t rows, int64_t heads)
        : left_{{{{{0, batches}, {0, rows}, {0, heads}}}}} {}

    // Results for this box follow. True when they may write over all of it. Else they are to be
    // added, and `clear` is called for what still was fresh.
    bool take(const RowBox& box, const Clear& clear);
    // Nothing follows: `clear` is called for what is left.
    void take_rest(const Clear& clear);

private:
    std::vector<RowBox> left_;  // without overlap, none empty
};

}  // namespace torus
