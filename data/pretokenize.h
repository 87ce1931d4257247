// Pre-tokenizers: they cut text into the pieces inside which byte-pair merges happen. The two
// patterns that nearly all models use are written by hand (about ten times PCRE2's speed, and
// tested equal to it); any other pattern runs in PCRE2, translated from the dialect of the
// reference (Oniguruma, Ruby syntax) so that it means the same.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace torus::data {

// Not safe to share between threads: each encoder owns its own.
struct Splitter {
    virtual ~Splitter() = default;
    struct Cut {
        int64_t gap, match;  // bytes that the pattern skips, then bytes that it takes
    };
    // The next cut of the text [begin, end), valid UTF-8, at p < end: gap + match >= 1.
    virtual Cut next(const char* begin, const char* p, const char* end) = 0;
};

// The patterns, as tokenizer.json files spell them.
inline constexpr const char* gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* qwen2_pattern =  // Llama-3's with digits one by one
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// The reference's pre-tokenizer Digits: its numbers are those of Unicode 17, while its regular
// expressions know Unicode 16.
inline constexpr const char* digit_pattern = "[\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6]";
inline constexpr const char* digit_run_pattern =
    "[\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6]+";

// By hand for the patterns above and for \p{N}, else through PCRE2.
// `source` names the pattern's file in errors: Error(bad_data) for what cannot be translated.
std::unique_ptr<Splitter> make_splitter(const std::string& pattern, const std::string& source);
// Always through PCRE2: the yardstick of the hand-written ones.
std::unique_ptr<Splitter> make_regex_splitter(const std::string& pattern,
                                              const std::string& source);

// The pattern in PCRE2's syntax, with every character class spelled out from our tables.
std::string translate_pattern(const std::string& pattern, const std::string& source);
// A pattern that matches `text` literally.
std::string literal_pattern(const std::string& text);

}  // namespace torus::data
