// Byte-pair merges: see bpe.h. Words are short, so the usual case is a plain scan over a few ranks
// for the lowest one; a long piece (a run of spaces, a line without breaks) goes through a heap, so
// that no input makes it quadratic.
#include "data/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "kernels/check.h"

namespace torus::data {
namespace {

constexpr size_t longest_scan = 64;  // symbols; the heap wins above about this length

}  // namespace

MergeTable::MergeTable(int64_t merges) {
    const size_t size = std::bit_ceil(size_t(std::max<int64_t>(8, merges * 2)));
    slots_.resize(size);
    mask_ = size - 1;
    shift_ = 64 - std::countr_zero(size);
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
    const uint64_t key = key_of(left, right);
    size_t i = slot_of(key);
    while (slots_[i].key != empty && slots_[i].key != key) i = (i + 1) & mask_;
    slots_[i] = {key, merge};
}

void BpeMerger::encode(std::string_view piece, std::vector<int32_t>& ids) {
    if (!model_.whole.empty()) {
        const auto at = model_.whole.find(std::string(piece));
        if (at != model_.whole.end()) return ids.push_back(at->second);
    }
    symbols_.clear();
    for (const char c : piece) symbols_.push_back(model_.byte_ids[uint8_t(c)]);
    if (symbols_.size() <= longest_scan) {
        merge_short(ids);
    } else {
        merge_long(ids);
    }
}

void BpeMerger::merge_short(std::vector<int32_t>& ids) {
    size_t n = symbols_.size();
    ranks_.resize(n);  // [i]: rank of joining i and i+1
    joined_.resize(n);
    const auto look_up = [&](size_t i) {
        if (i + 1 >= n) {
            ranks_[i] = MergeTable::no_rank;
            return;
        }
        const MergeTable::Merge m = model_.merges.find(symbols_[i], symbols_[i + 1]);
        ranks_[i] = m.rank;
        joined_[i] = m.id;
    };
    for (size_t i = 0; i < n; ++i) look_up(i);
    while (n > 1) {
        const size_t best =
            size_t(std::min_element(ranks_.begin(), ranks_.begin() + n) - ranks_.begin());
        if (ranks_[best] == MergeTable::no_rank) break;
        symbols_[best] = joined_[best];
        for (size_t i = best + 1; i + 1 < n; ++i) {
            symbols_[i] = symbols_[i + 1];
            ranks_[i] = ranks_[i + 1];
            joined_[i] = joined_[i + 1];
        }
        --n;
        if (best > 0) look_up(best - 1);
        look_up(best);
    }
    ids.insert(ids.end(), symbols_.begin(), symbols_.begin() + n);
}

void BpeMerger::merge_long(std::vector<int32_t>& ids) {
    struct Candidate {
        uint32_t rank;
        int32_t at, left, right, id;
        bool operator>(const Candidate& other) const {
            return rank != other.rank ? rank > other.rank : at > other.at;
        }
    };
    CHECK(symbols_.size() < 0x7fffffffu, " (a piece of 2 GiB)");
    const int32_t n = int32_t(symbols_.size());
    next_.resize(symbols_.size());
    previous_.resize(symbols_.size());
    for (int32_t i = 0; i < n; ++i) {
        next_[size_t(i)] = i + 1 < n ? i + 1 : -1;
        previous_[size_t(i)] = i - 1;
    }
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto offer = [&](int32_t i) {
        if (i < 0 || next_[size_t(i)] < 0) return;
        const int32_t left = symbols_[size_t(i)], right = symbols_[size_t(next_[size_t(i)])];
        const MergeTable::Merge m = model_.merges.find(left, right);
        if (m.rank != MergeTable::no_rank) queue.push({m.rank, i, left, right, m.id});
    };
    for (int32_t i = 0; i + 1 < n; ++i) offer(i);
    while (!queue.empty()) {
        const Candidate c = queue.top();
        queue.pop();
        const size_t at = size_t(c.at);
        const int32_t after = next_[at];
        // Outdated when either symbol has been joined since (a joined one holds -1).
        if (after < 0 || symbols_[at] != c.left || symbols_[size_t(after)] != c.right) continue;
        symbols_[at] = c.id;
        symbols_[size_t(after)] = -1;
        next_[at] = next_[size_t(after)];
        next_[size_t(after)] = -1;
        if (next_[at] >= 0) previous_[size_t(next_[at])] = c.at;
        offer(previous_[at]);
        offer(c.at);
    }
    for (int32_t i = 0; i >= 0; i = next_[size_t(i)]) ids.push_back(symbols_[size_t(i)]);
}

}  // namespace torus::data
