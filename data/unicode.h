// The character classes that pre-tokenizer patterns speak of, from the project's own tables
// (Unicode 16.0): the same ids on every machine, whatever Unicode its PCRE2 knows.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torus::data {

// What GPT-2's and Llama-3's patterns tell apart: \p{L}, \p{N}, \s and the rest.
enum class CharClass : uint8_t { other, letter, number, space };

// CharClass of any code point in two look-ups.
class CharClassTable {
public:
    static const CharClassTable& get();  // built at the first call, in about a millisecond
    CharClass operator[](uint32_t code) const {
        return CharClass(blocks_[size_t(block_[code >> 8]) << 8 | (code & 255)]);
    }
    const uint8_t* ascii() const { return blocks_.data(); }  // of the first 256 code points

private:
    CharClassTable();
    std::array<uint16_t, 0x1100> block_{};
    std::vector<uint8_t> blocks_;
};

struct CodeRange {
    uint32_t first, last;
};

// Of a category ("Lu") or a group of categories ("L"); empty when there is none of that name.
std::vector<CodeRange> category_ranges(std::string_view name);
std::vector<CodeRange> white_space_ranges();  // the property White_Space, which is \s
std::vector<CodeRange> complement(const std::vector<CodeRange>& sorted);

}  // namespace torus::data
