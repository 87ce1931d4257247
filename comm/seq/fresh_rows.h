// Which rows of a sum hold nothing yet, so that the first block of results writes over them instead
// of adding: nothing has to be filled with zeros before, and read back.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace torus {

// Rows [row, row_end) of sequences [batch, batch_end).
struct RowBox {
    int64_t batch, batch_end, row, row_end;
    int64_t count() const { return (batch_end - batch) * (row_end - row); }
};

class FreshRows {
public:
    using Clear = std::function<void(const RowBox&)>;

    FreshRows() = default;
    FreshRows(int64_t batches, int64_t rows) : left_{{0, batches, 0, rows}} {}

    // Results for these rows follow. True when they may write over all of them. Else they are to be
    // added, and `clear` is called for what still was fresh; always so unless `whole`, which says
    // that they fill all heads.
    bool take(const RowBox& box, bool whole, const Clear& clear);
    // Nothing follows: `clear` is called for what is left.
    void take_rest(const Clear& clear);

private:
    std::vector<RowBox> left_;  // without overlap
};

}  // namespace torus
