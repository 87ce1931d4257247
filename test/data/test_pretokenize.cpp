// Pre-tokenizers: the hand-written ones equal PCRE2 on random Unicode, the translation of patterns
// keeps their meaning, and our character classes agree with PCRE2's where it knows the characters.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdlib>

#include "data/normalize.h"
#include "data/pretokenize.h"
#include "data/unicode.h"
#include "helpers.h"
#include "kernels/text.h"
#include "kernels/utf8.h"

namespace torus {
namespace {

using data::Splitter;

// The pieces, joined by bars; text that no alternative matches is in brackets.
std::string cut(Splitter& splitter, const std::string& text) {
    std::string out;
    const char* const begin = text.data();
    const char* const end = begin + text.size();
    for (const char* p = begin; p < end;) {
        const Splitter::Cut c = splitter.next(begin, p, end);
        if (c.gap + c.match < 1) return "no progress";
        if (c.gap > 0) out.append("[").append(p, size_t(c.gap)).append("]|");
        p += c.gap;
        if (c.match > 0) out.append(p, size_t(c.match)).append("|");
        p += c.match;
    }
    return out;
}

std::string cut(const std::string& pattern, const std::string& text) {
    return cut(*data::make_splitter(pattern, "test"), text);
}

std::string random_text(std::mt19937& random) {
    static const std::vector<uint32_t> starts{
        0x20,    0x41,    0x61,    0x30,    0x80,    0xc0,    0x17f,  0x250,  0x300,
        0x370,   0x400,   0x590,   0x660,   0x900,   0x1680,  0x1800, 0x1e00, 0x2000,
        0x2028,  0x2150,  0x3000,  0x4e00,  0xac00,  0xfb00,  0xfe00, 0xff10, 0xffff,
        0x1d400, 0x1f300, 0x105c0, 0x31350, 0xe0100, 0x11dd0, 0x16ff0};
    static const std::string common = "  \n\r\t''sStTrReEvVmMlLdDaz09.,!-\x0b\x1c";
    std::string text;
    const size_t n = random() % 40;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t kind = random() % 8;
        if (kind < 5 && random() % 64 == 0) {
            text += "'\u017f";
        } else if (kind < 5) {
            text += common[random() % common.size()];
        } else {
            uint32_t code =
                kind < 7 ? starts[random() % starts.size()] + random() % 0x30 : random() % 0x110000;
            if (code >= 0xd800 && code < 0xe000) code = 0xa0;
            append_utf8(text, code);
        }
    }
    return text;
}

TEST_CASE("pre-tokenizers: by hand equals PCRE2 on random Unicode") {
    std::mt19937 random(42);
    for (const std::string pattern :
         {data::gpt2_pattern, data::llama3_pattern, data::qwen2_pattern, R"(\p{N})", R"(\p{N}+)",
          data::digit_pattern, data::digit_run_pattern}) {
        CAPTURE(pattern);
        const auto fast = data::make_splitter(pattern, "test");
        const auto slow = data::make_regex_splitter(pattern, "test");
        for (int i = 0; i < 20000; ++i) {
            const std::string text = random_text(random);
            const std::string expected = cut(*slow, text);
            if (cut(*fast, text) != expected) {
                const std::string shown = printable(text);
                CAPTURE(shown);
                EXPECT_EQ(printable(cut(*fast, text)), printable(expected));
                break;
            }
        }
    }
}

TEST_CASE("pre-tokenizers: what GPT-2's and Llama-3's patterns mean") {
    EXPECT_EQ(cut(data::gpt2_pattern, "I'll  say: it's 1234 o'clock!!\n\n ok"),
              "I|'ll| | say|:| it|'s| 1234| o|'|clock|!!|\n\n| ok|");
    EXPECT_EQ(cut(data::gpt2_pattern, "I'LL \t"), "I|'|LL| \t|");
    EXPECT_EQ(cut(data::llama3_pattern, "I'LL  say: 12345 it\u017f '\u017f!\n\n  ok\tx"),
              "I|'LL| | say|:| |123|45| it\u017f| '|\u017f|!\n\n| | ok|\tx|");
    EXPECT_EQ(cut(data::llama3_pattern, "it'\u017f'\u017fx"), "it|'\u017f|'\u017f|x|");
    EXPECT_EQ(cut(data::qwen2_pattern, "12 3\r\n"), "1|2| |3|\r\n|");
    // U+180E is no white space (PCRE2's own \s would say so), U+0085 is.
    EXPECT_EQ(cut(data::gpt2_pattern, "a\u180e\u0085\u0085b"), "a|\u180e|\u0085|\u0085|b|");
}

TEST_CASE("pre-tokenizers: other patterns") {
    EXPECT_EQ(cut("a+", "xaayaz"), "[x]|aa|[y]|a|[z]|");
    EXPECT_EQ(cut(data::literal_pattern("a.+"), "a.+axa.+"), "a.+|[ax]|a.+|");
    EXPECT_EQ(cut(R"([^\s\d]+|\D)", "ab 12c"), "ab| |[12]|c|");
    EXPECT_EQ(cut(R"((?i:ab)c|[\P{L}]+)", "ABcabC12"), "ABc|[abC]|12|");
    EXPECT_EQ(cut("^a|b$", "a\nab\nb"), "a|[\n]|a|b|[\n]|b|");     // ^ and $ at every line
    EXPECT_EQ(cut(R"((?<=x)y|\Sx)", "xyax y"), "[x]|y|ax|[ y]|");  // sees the text before
    const std::string refused[] = {"\\w+",    "\\b",     "(?m:a.b)", "\\p{Han}",     "\\p{L",
                                   "[a&&b]",  "[[:a:]]", "a{2}+",    "a{,3}",        "a*",
                                   "(",       "[a",      "a)",       "(?i:\\p{Lu})", "\\1",
                                   "(*UTF)a", "\\x41",   "\\",       "[a[b]]",       "\\C"};
    for (const std::string& pattern : refused) {
        expect_error(Exit::bad_data, "file.json",
                     [&] { data::make_splitter(pattern, "file.json"); });
    }
}

TEST_CASE("pre-tokenizers: long runs neither overflow nor take for ever") {
    for (const char* pattern : {data::gpt2_pattern, data::llama3_pattern}) {
        const std::string spaces = std::string(3 << 20, ' ') + "a";
        const auto fast = data::make_splitter(pattern, "test");
        const auto slow = data::make_regex_splitter(pattern, "test");
        EXPECT_EQ(cut(*fast, spaces).size(), spaces.size() + 2);
        EXPECT_EQ(cut(*slow, spaces), cut(*fast, spaces));
        const std::string letters(3 << 20, 'x');
        EXPECT_EQ(cut(*slow, letters), cut(*fast, letters));
    }
}

// Every character that PCRE2 (an older or equal Unicode) knows as letter or number is one here.
TEST_CASE("unicode: classes agree with PCRE2") {
    char version[64] = "";
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    const bool newer = std::atoi(version) > 16;
    const data::CharClassTable& table = data::CharClassTable::get();
    int error = 0;
    size_t offset = 0;
    const std::string source = R"((\p{L})|(\p{N})|(?!\x{180e})(\s)|(\p{Cn}))";
    pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                                     PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
    REQUIRE_TRUE(code != nullptr);
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code, nullptr);
    int64_t letters = 0, numbers = 0, different = 0;
    for (uint32_t c = 0; c < 0x110000; ++c) {
        if (c >= 0xd800 && c < 0xe000) continue;
        letters += table[c] == data::CharClass::letter;
        numbers += table[c] == data::CharClass::number;
        std::string text;
        append_utf8(text, c);
        const int group = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                      0, 0, match, nullptr);
        if (group == 5) continue;  // not assigned there
        const int expected = group < 0 ? 0 : group - 1;
        different += int(table[c]) != expected;
    }
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    if (!newer) EXPECT_EQ(different, 0);
    EXPECT_EQ(letters, 141028);  // of Unicode 16.0
    EXPECT_EQ(numbers, 1911);
}

TEST_CASE("unicode: ranges") {
    EXPECT(data::category_ranges("Xx").empty());
    EXPECT(data::category_ranges("").empty());
    EXPECT(data::category_ranges("Lu ").empty());
    const auto digits = data::category_ranges("Nd");
    EXPECT_EQ(digits.front().first, uint32_t('0'));
    EXPECT_EQ(digits.front().last, uint32_t('9'));
    int64_t total = 0;
    for (const auto& r : digits) total += r.last - r.first + 1;
    for (const auto& r : data::complement(digits)) total += r.last - r.first + 1;
    EXPECT_EQ(total, 0x110000);
}

TEST_CASE("utf-8: every code point there and back, and no invalid form accepted") {
    for (uint32_t c = 0; c < 0x110000; ++c) {
        if (c >= 0xd800 && c < 0xe000) continue;
        std::string text;
        append_utf8(text, c);
        const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
        const Character read = next_character(p, p + text.size());
        REQUIRE_TRUE(read.code == c);
        REQUIRE_TRUE(read.length == text.size());
        for (size_t n = 1; n < text.size(); ++n) {  // cut short: one invalid byte
            REQUIRE_TRUE(next_character(p, p + n).code == invalid_character);
        }
    }
    for (const std::string text :
         {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x28\xa1", "\xf0\x28\x8c\xbc"}) {
        const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
        const Character read = next_character(p, p + text.size());
        EXPECT_EQ(read.code, invalid_character);
        EXPECT_EQ(read.length, 1u);
    }
}

std::string nfc(const std::string& text) {
    std::string buffer;
    return std::string(data::to_nfc(text, buffer));
}

TEST_CASE("normalize: NFC") {
    EXPECT_EQ(nfc("plain \u00e9 \u4e16"), "plain \u00e9 \u4e16");
    EXPECT_EQ(nfc("e\u0301"), "\u00e9");
    EXPECT_EQ(nfc("xe\u0301\u0323y"), "x\u1eb9\u0301y");         // the lower mark joins first
    EXPECT_EQ(nfc("a\u0302\u0301"), "\u1ea5");                   // twice
    EXPECT_EQ(nfc("a\u0305\u0301"), "a\u0305\u0301");            // blocked
    EXPECT_EQ(nfc("\u212b\u2126\u00c5"), "\u00c5\u03a9\u00c5");  // singletons
    EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");                    // not joined again
    EXPECT_EQ(nfc("\u1112\u1161\u11ab"), "\ud55c");              // jamo
    EXPECT_EQ(nfc("\ud558\u11ab"), "\ud55c");
    EXPECT_EQ(nfc("\ud55c\u11ab"), "\ud55c\u11ab");
    EXPECT_EQ(nfc("\u0301e\u0301\u0301"), "\u0301\u00e9\u0301");
    EXPECT_EQ(nfc("\U0002f800"), "\u4e3d");
    std::mt19937 random(13);
    for (int i = 0; i < 20000; ++i) {
        const std::string once = nfc(random_text(random));
        REQUIRE_TRUE(nfc(once) == once);
    }
}

}  // namespace
}  // namespace torus
