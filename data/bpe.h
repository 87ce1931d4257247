// Byte-pair encoding of one piece of text: start from the bytes, join the neighbours whose merge
// has the lowest rank (leftmost first) until no merge applies (Sennrich et al. 2016, over bytes as
// in GPT-2).
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torus::data {

// (left id, right id) -> rank and id of the joined token. Open addressing, at most half full.
class MergeTable {
public:
    static constexpr uint32_t no_rank = 0xffffffffu;
    struct Merge {
        uint32_t rank = no_rank;
        int32_t id = -1;
    };
    explicit MergeTable(int64_t merges);
    void insert(int32_t left, int32_t right, Merge merge);  // a pair given again replaces the first
    Merge find(int32_t left, int32_t right) const {
        const uint64_t key = key_of(left, right);
        for (size_t i = slot_of(key);; i = (i + 1) & mask_) {
            if (slots_[i].key == key) return slots_[i].merge;
            if (slots_[i].key == empty) return {};
        }
    }

private:
    static constexpr uint64_t empty = ~uint64_t(0);
    struct Slot {
        uint64_t key = empty;
        Merge merge;
    };
    static uint64_t key_of(int32_t left, int32_t right) {
        return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
    }
    size_t slot_of(uint64_t key) const { return size_t(key * 0x9E3779B97F4A7C15u >> shift_); }

    std::vector<Slot> slots_;
    size_t mask_ = 0;
    int shift_ = 0;
};

// What a byte-level BPE tokenizer knows; immutable once made.
struct BpeModel {
    std::vector<std::string> tokens;  // bytes of each id
    std::array<int32_t, 256> byte_ids{};
    MergeTable merges{0};
    // Pieces that are tokens as they stand, whatever the merges say (`ignore_merges`).
    std::unordered_map<std::string, int32_t> whole;
};

// Appends the ids of a piece. Owns the scratch memory, so one per thread.
class BpeMerger {
public:
    explicit BpeMerger(const BpeModel& model) : model_(model) {}
    void encode(std::string_view piece, std::vector<int32_t>& ids);

private:
    void merge_short(std::vector<int32_t>& ids);
    void merge_long(std::vector<int32_t>& ids);

    const BpeModel& model_;
    std::vector<int32_t> symbols_;
    std::vector<uint32_t> ranks_;
    std::vector<int32_t> joined_, next_, previous_;
};

}  // namespace torus::data
