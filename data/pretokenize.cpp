// Hand-written splitters for GPT-2's and Llama-3's patterns. Each is one walk over the characters:
// the alternatives of both patterns begin with different classes, so the first character (and the
// one after a space) decides which of them matches, and all of them are greedy runs of one class.
#include "data/pretokenize.h"

#include "data/unicode.h"
#include "kernels/utf8.h"

namespace torus::data {
namespace {

// Walks over valid UTF-8; a helper of both splitters.
class Walker {
public:
    explicit Walker(const char* end) : end_(reinterpret_cast<const uint8_t*>(end)) {}

    const uint8_t* end() const { return end_; }

    // Class of the character at p < end; `length` is its size.
    CharClass look(const uint8_t* p, uint32_t& length) const {
        if (*p < 0x80) {
            length = 1;
            return CharClass(ascii_[*p]);
        }
        const Character c = next_character(p, end_);
        length = c.length;
        return table_[c.code];
    }

    const uint8_t* skip(const uint8_t* p, CharClass wanted) const {
        while (p < end_) {
            uint32_t length;
            if (look(p, length) != wanted) break;
            p += length;
        }
        return p;
    }

    // \s+(?!\S)|\s+ at a run of spaces [p, q): all but the last one when more text follows, so
    // that a single space stays with the word after it.
    const uint8_t* spaces(const uint8_t* p, const uint8_t* q) const {
        if (q == end_) return q;
        const uint8_t* last = q - 1;
        while ((*last & 0xc0) == 0x80) --last;
        return last > p ? last : q;
    }

private:
    const CharClassTable& table_ = CharClassTable::get();
    const uint8_t* ascii_ = table_.ascii();
    const uint8_t* end_;
};

// Length of 's 't 'm 'd 're 've 'll at the apostrophe p, 0 when there is none. Ignoring case also
// admits U+017F, the long s, which folds to s.
int64_t contraction(const uint8_t* p, const uint8_t* end, bool ignore_case) {
    if (end - p < 2) return 0;
    const auto letter = [&](int64_t i) -> uint8_t {
        const uint8_t c = p[i];
        return ignore_case && c >= 'A' && c <= 'Z' ? uint8_t(c + 32) : c;
    };
    const uint8_t a = letter(1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (end - p < 3) return 0;
    if (ignore_case && p[1] == 0xc5 && p[2] == 0xbf) return 3;
    const uint8_t b = letter(2);
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

struct Gpt2Splitter : Splitter {
    Cut next(const char*, const char* text, const char* text_end) override {
        const uint8_t* const p = reinterpret_cast<const uint8_t*>(text);
        const Walker walk(text_end);
        const uint8_t* const end = walk.end();
        if (*p == '\'') {
            if (const int64_t n = contraction(p, end, false)) return {0, n};
        }
        uint32_t length;
        const CharClass first = walk.look(p, length);
        const uint8_t* q = p + length;
        if (first != CharClass::space) return {0, walk.skip(q, first) - p};
        if (*p == ' ' && q < end) {
            const CharClass second = walk.look(q, length);
            if (second != CharClass::space) return {0, walk.skip(q + length, second) - p};
        }
        q = walk.skip(q, CharClass::space);
        return {0, walk.spaces(p, q) - p};
    }
};

struct Llama3Splitter : Splitter {
    explicit Llama3Splitter(int most_digits) : most_digits_(most_digits) {}

    Cut next(const char*, const char* text, const char* text_end) override {
        const uint8_t* const p = reinterpret_cast<const uint8_t*>(text);
        const Walker walk(text_end);
        if (*p == '\'') {
            if (const int64_t n = contraction(p, walk.end(), true)) return {0, n};
        }
        return {0, next_end(walk, p) - p};
    }

private:
    static bool is_newline(uint8_t c) { return c == '\r' || c == '\n'; }

    const uint8_t* next_end(const Walker& walk, const uint8_t* p) const {
        const uint8_t* const end = walk.end();
        uint32_t length;
        const CharClass first = walk.look(p, length);
        const uint8_t* q = p + length;
        if (first == CharClass::letter) return walk.skip(q, first);
        if (first == CharClass::number) {
            for (int n = 1; n < most_digits_ && q < end; ++n, q += length) {
                if (walk.look(q, length) != CharClass::number) break;
            }
            return q;
        }
        // [^\r\n\p{L}\p{N}]?\p{L}+ and ` ?[^\s\p{L}\p{N}]+[\r\n]*`: one character before a run.
        bool others = first == CharClass::other;
        if (q < end && !is_newline(*p)) {
            const CharClass second = walk.look(q, length);
            if (second == CharClass::letter) return walk.skip(q + length, second);
            others = others || (*p == ' ' && second == CharClass::other);
        }
        if (others) {
            q = walk.skip(q, CharClass::other);
            while (q < end && is_newline(*q)) ++q;
            return q;
        }
        // \s*[\r\n]+ takes a run of spaces up to its last line break.
        q = walk.skip(q, CharClass::space);
        for (const uint8_t* last = q; last > p; --last) {
            if (is_newline(last[-1])) return last;
        }
        return walk.spaces(p, q);
    }

    int most_digits_;
};

// Numbers, one by one or in runs, each match apart from the text around it.
struct NumberSplitter : Splitter {
    explicit NumberSplitter(bool single, bool unicode_17)
        : single_(single), unicode_17_(unicode_17) {}

    Cut next(const char*, const char* text, const char* text_end) override {
        const uint8_t* const p = reinterpret_cast<const uint8_t*>(text);
        const Walker walk(text_end);
        const uint8_t* q = p;
        while (q < walk.end()) {
            const int64_t length = number(walk, q);
            if (length > 0) break;
            q -= length;
        }
        const uint8_t* stop = q;
        while (stop < walk.end()) {
            const int64_t length = number(walk, stop);
            if (length < 0) break;
            stop += length;
            if (single_) break;
        }
        return {q - p, stop - q};
    }

private:
    // Size of the character at p, negative when it is no number.
    int64_t number(const Walker& walk, const uint8_t* p) const {
        uint32_t length = 0;
        if (walk.look(p, length) == CharClass::number) return length;
        if (unicode_17_ && length == 4) {
            const uint32_t code = next_character(p, walk.end()).code;
            if ((code >= 0x11de0 && code <= 0x11de9) || (code >= 0x16ff4 && code <= 0x16ff6)) {
                return length;
            }
        }
        return -int64_t(length);
    }

    bool single_, unicode_17_;
};

}  // namespace

std::unique_ptr<Splitter> make_splitter(const std::string& pattern, const std::string& source) {
    if (pattern == gpt2_pattern) return std::make_unique<Gpt2Splitter>();
    if (pattern == llama3_pattern) return std::make_unique<Llama3Splitter>(3);
    if (pattern == qwen2_pattern) return std::make_unique<Llama3Splitter>(1);
    if (pattern == R"(\p{N})") return std::make_unique<NumberSplitter>(true, false);
    if (pattern == R"(\p{N}+)") return std::make_unique<NumberSplitter>(false, false);
    if (pattern == digit_pattern) return std::make_unique<NumberSplitter>(true, true);
    if (pattern == digit_run_pattern) return std::make_unique<NumberSplitter>(false, true);
    return make_regex_splitter(pattern, source);
}

}  // namespace torus::data
