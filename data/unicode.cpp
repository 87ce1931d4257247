// Character classes: see unicode.h. The run-length coded table is unpacked once.
#include "data/unicode.h"

#include <algorithm>
#include <map>

#include "data/unicode_tables.h"
#include "kernels/check.h"

namespace torus::data {
namespace {

constexpr uint32_t code_points = 0x110000;

// Calls visit(category name, first, last) for each run of equal category.
template <class Visit>
void for_each_run(const Visit& visit) {
    uint32_t first = 0;
    for (const char* p = category_runs; *p != '\0';) {
        const std::string_view name(category_names + 3 * (*p++ - 'A'), 2);
        uint32_t length = 0;
        for (; *p >= '0' && *p <= '9'; ++p) length = length * 10 + uint32_t(*p - '0');
        length = std::max(length, 1u);
        visit(name, first, first + length - 1);
        first += length;
    }
    CHECK(first == code_points);
}

}  // namespace

CharClassTable::CharClassTable() {
    std::vector<uint8_t> flat(code_points, uint8_t(CharClass::other));
    for_each_run([&](std::string_view name, uint32_t first, uint32_t last) {
        if (name[0] != 'L' && name[0] != 'N') return;
        const CharClass c = name[0] == 'L' ? CharClass::letter : CharClass::number;
        std::fill(flat.begin() + first, flat.begin() + last + 1, uint8_t(c));
    });
    for (const CodeRange& r : white_space_ranges()) {
        std::fill(flat.begin() + r.first, flat.begin() + r.last + 1, uint8_t(CharClass::space));
    }
    std::map<std::string, uint16_t> known;
    for (uint32_t i = 0; i < block_.size(); ++i) {
        const std::string block(flat.begin() + i * 256, flat.begin() + (i + 1) * 256);
        const auto [at, fresh] = known.emplace(block, uint16_t(known.size()));
        if (fresh) blocks_.insert(blocks_.end(), block.begin(), block.end());
        block_[i] = at->second;
    }
}

const CharClassTable& CharClassTable::get() {
    static const CharClassTable table;
    return table;
}

std::vector<CodeRange> category_ranges(std::string_view name) {
    std::vector<CodeRange> ranges;
    if (name.empty() || name.size() > 2) return ranges;
    for_each_run([&](std::string_view run, uint32_t first, uint32_t last) {
        if (run.substr(0, name.size()) != name) return;
        if (!ranges.empty() && ranges.back().last + 1 == first) {
            ranges.back().last = last;
        } else {
            ranges.push_back({first, last});
        }
    });
    return ranges;
}

std::vector<CodeRange> white_space_ranges() {
    return {{0x09, 0x0d},     {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
            {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
            {0x205f, 0x205f}, {0x3000, 0x3000}};
}

std::vector<CodeRange> complement(const std::vector<CodeRange>& sorted) {
    std::vector<CodeRange> out;
    uint32_t next = 0;
    for (const CodeRange& r : sorted) {
        if (r.first > next) out.push_back({next, r.first - 1});
        next = r.last + 1;
    }
    if (next < code_points) out.push_back({next, code_points - 1});
    return out;
}

}  // namespace torus::data
