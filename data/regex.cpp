// Pre-tokenizer patterns through PCRE2. The reference runs them in Oniguruma (Ruby syntax) or in a
// Rust engine; where the dialects differ in meaning, the pattern is translated or refused, never
// run and hoped for. Classes such as \p{L} and \s are spelled out from our own Unicode tables.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "data/pretokenize.h"
#include "data/unicode.h"
#include "kernels/check.h"
#include "kernels/text.h"

namespace torus::data {
namespace {

class Translator {
public:
    Translator(const std::string& pattern, const std::string& source)
        : in_(pattern), source_(source) {}

    std::string run() {
        while (at_ < in_.size()) {
            const char c = in_[at_];
            if (c == '\\') {
                escape(false);
            } else if (c == '[') {
                bracket();
            } else if (c == '(') {
                open();
            } else if (c == ')') {
                if (!ignore_case_.empty()) ignore_case_.pop_back();
                copy(1);
            } else if (c == '{' && peek(1) == ',') {
                refuse("{,n}");
            } else if (c == '}' && peek(1) == '+') {
                refuse("{n,m}+");  // possessive in one dialect, repeated in the other
            } else {
                copy(1);
            }
        }
        return out_;
    }

private:
    char peek(size_t i) const { return at_ + i < in_.size() ? in_[at_ + i] : '\0'; }
    void copy(size_t n) {
        out_ += in_.substr(at_, n);
        at_ = std::min(at_ + n, in_.size());
    }
    [[noreturn]] void refuse(const std::string& what) const {
        fail(Exit::bad_data, source_, ": the pre-tokenizer pattern ", excerpt(in_), " uses ",
             excerpt(what), " at byte ", at_,
             ", which is not supported; use a tokenizer with another pattern");
    }

    // A group: only those kinds that all dialects read alike.
    void open() {
        bool ignore_case = !ignore_case_.empty() && ignore_case_.back();
        if (peek(1) != '?') {
            if (peek(1) == '*') refuse("(*");
            ignore_case_.push_back(ignore_case);
            return copy(1);
        }
        for (const char* kind : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:", "(?-i:"}) {
            const std::string k = kind;
            if (in_.compare(at_, k.size(), k) != 0) continue;
            if (k == "(?i:") ignore_case = true;
            if (k == "(?-i:") ignore_case = false;
            ignore_case_.push_back(ignore_case);
            return copy(k.size());
        }
        refuse(in_.substr(at_, 4));
    }

    // [...]: a plain set; nested sets, intersections and POSIX classes differ between dialects.
    void bracket() {
        copy(1);
        if (peek(0) == '^') copy(1);
        if (peek(0) == ']') refuse("[]");
        while (at_ < in_.size() && in_[at_] != ']') {
            if (in_[at_] == '[') refuse("[ inside a set");
            if (in_[at_] == '&' && peek(1) == '&') refuse("&&");
            if (in_[at_] == '\\') {
                escape(true);
            } else {
                copy(1);
            }
        }
        if (at_ >= in_.size()) refuse("[ without ]");
        copy(1);
    }

    void escape(bool in_set) {
        const char c = peek(1);
        if (c == 'p' || c == 'P') return property(in_set);
        if (c == 's' || c == 'S') {
            at_ += 2;
            return put(white_space_ranges(), c == 'S', in_set);
        }
        if (c == 'd' || c == 'D') {
            at_ += 2;
            return put(category_ranges("Nd"), c == 'D', in_set);
        }
        const bool punctuation = c > ' ' && c < 0x7f && !std::isalnum(uint8_t(c));
        if (!punctuation && c != 'r' && c != 'n' && c != 't') refuse(in_.substr(at_, 2));
        copy(2);
    }

    void property(bool in_set) {
        const size_t close = in_.find('}', at_);
        if (peek(2) != '{' || close == std::string::npos) refuse(in_.substr(at_, 3));
        std::string name = in_.substr(at_ + 3, close - at_ - 3);
        bool negative = peek(1) == 'P';
        if (!name.empty() && name[0] == '^') {
            negative = !negative;
            name.erase(0, 1);
        }
        const std::vector<CodeRange> ranges = category_ranges(name);
        const bool cased = name == "Lu" || name == "Ll" || name == "Lt";
        const bool ignore_case = !ignore_case_.empty() && ignore_case_.back();
        if (ranges.empty() || (cased && ignore_case)) refuse(in_.substr(at_, close - at_ + 1));
        at_ = close + 1;
        put(ranges, negative, in_set);
    }

    void put(const std::vector<CodeRange>& ranges, bool negative, bool in_set) {
        if (!in_set) out_ += negative ? "[^" : "[";
        for (const CodeRange& r : in_set&& negative ? complement(ranges) : ranges) {
            char text[32];
            std::snprintf(text, sizeof text, "\\x{%x}-\\x{%x}", r.first, r.last);
            out_ += text;
        }
        if (!in_set) out_ += "]";
    }

    const std::string& in_;
    const std::string& source_;
    size_t at_ = 0;
    std::string out_;
    std::vector<bool> ignore_case_;  // of each open group
};

class RegexSplitter : public Splitter {
public:
    RegexSplitter(const std::string& pattern, const std::string& source)
        : pattern_(pattern), source_(source) {
        const std::string text = translate_pattern(pattern, source);
        int error = 0;
        size_t offset = 0;
        pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
        CHECK(context != nullptr);
        pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                              &error, &offset, context);
        pcre2_compile_context_free(context);
        if (code_ == nullptr) refuse(message(error));
        uint32_t matches_empty = 0;
        pcre2_pattern_info(code_, PCRE2_INFO_MATCHEMPTY, &matches_empty);
        if (matches_empty != 0) {
            pcre2_code_free(code_);
            refuse("it matches the empty text");
        }
        pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE);  // without a JIT it is only slower
        match_ = pcre2_match_data_create_from_pattern(code_, nullptr);
        context_ = pcre2_match_context_create(nullptr);
        stack_ = pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr);
        CHECK(match_ != nullptr && context_ != nullptr);
        if (stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, stack_);
    }
    ~RegexSplitter() override {
        pcre2_jit_stack_free(stack_);
        pcre2_match_context_free(context_);
        pcre2_match_data_free(match_);
        pcre2_code_free(code_);
    }
    RegexSplitter(const RegexSplitter&) = delete;
    RegexSplitter& operator=(const RegexSplitter&) = delete;

    Cut next(const char* begin, const char* p, const char* end) override {
        const int found =
            pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(begin), size_t(end - begin),
                        size_t(p - begin), PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match_, context_);
        if (found == PCRE2_ERROR_NOMATCH) return {end - p, 0};
        if (found < 0) refuse("a match failed: " + message(found));
        const size_t* at = pcre2_get_ovector_pointer(match_);
        return {begin + at[0] - p, int64_t(at[1] - at[0])};
    }

private:
    static std::string message(int error) {
        char text[128] = "";
        pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
        return text;
    }
    [[noreturn]] void refuse(const std::string& why) const {
        fail(Exit::bad_data, source_, ": cannot use the pre-tokenizer pattern ", excerpt(pattern_),
             ": ", why, "; use a tokenizer with another pattern");
    }

    std::string pattern_, source_;
    pcre2_code* code_ = nullptr;
    pcre2_match_data* match_ = nullptr;
    pcre2_match_context* context_ = nullptr;
    pcre2_jit_stack* stack_ = nullptr;
};

}  // namespace

std::string translate_pattern(const std::string& pattern, const std::string& source) {
    return Translator(pattern, source).run();
}

std::string literal_pattern(const std::string& text) {
    std::string out;
    for (const char c : text) {
        if (c > 0 && c < 0x7f && std::ispunct(uint8_t(c))) out += '\\';
        out += c;
    }
    return out;
}

std::unique_ptr<Splitter> make_regex_splitter(const std::string& pattern,
                                              const std::string& source) {
    return std::make_unique<RegexSplitter>(pattern, source);
}

}  // namespace torus::data
