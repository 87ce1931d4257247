// NFC: see normalize.h. Nearly all text is normal already, so a character is first asked whether it
// is stable: it neither decomposes, nor orders itself among marks, nor joins what stands before it.
// Only runs that begin with a stable character and hold others are worked on.
#include "data/normalize.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "data/normalize_tables.h"
#include "kernels/utf8.h"

namespace torus::data {
namespace {

// Hangul syllables are computed: leading, vowel and trailing jamo (Unicode standard, 3.12).
constexpr uint32_t syllables = 0xac00, leads = 0x1100, vowels = 0x1161, trails = 0x11a7;
constexpr uint32_t lead_count = 19, vowel_count = 21, trail_count = 28;
constexpr uint32_t syllable_count = lead_count * vowel_count * trail_count;

class Normalizer {
public:
    static const Normalizer& get() {
        static const Normalizer normalizer;
        return normalizer;
    }

    bool is_stable(uint32_t code) const { return !unstable_[code]; }

    // Appends the normal form of the characters, a run from one stable character to the next.
    void append(const std::vector<uint32_t>& run, std::string& out) const {
        std::vector<uint32_t> codes;
        for (const uint32_t code : run) decompose(code, codes);
        for (size_t i = 0; i < codes.size();) {  // order each run of marks by its class
            size_t j = i;
            while (j < codes.size() && mark_class(codes[j]) != 0) ++j;
            std::stable_sort(codes.begin() + int64_t(i), codes.begin() + int64_t(j),
                             [&](uint32_t a, uint32_t b) { return mark_class(a) < mark_class(b); });
            i = j + 1;
        }
        compose(codes);
        for (const uint32_t code : codes) append_utf8(out, code);
    }

private:
    struct Decomposition {
        uint32_t first, second;  // second 0: none
    };

    Normalizer() : unstable_(0x110000) {
        uint32_t code = 0;
        for (const char* p = decompositions; *p != '\0';) {
            code += number(p);
            ++p;  // ':'
            const uint32_t first = number(p);
            const bool joins = *p == '+';
            const uint32_t second = *p == '+' || *p == '-' ? number(++p) : 0;
            if (*p == ' ') ++p;
            decompositions_[code] = {first, second};
            if (joins) {
                compositions_[pair(first, second)] = code;
                unstable_[second] = true;
            } else {
                unstable_[code] = true;
            }
        }
        code = 0;
        for (const char* p = combining_classes; *p != '\0';) {
            code += number(p);
            classes_[code] = number(++p);
            unstable_[code] = true;
            if (*p == ' ') ++p;
        }
        for (uint32_t i = 0; i < vowel_count; ++i) unstable_[vowels + i] = true;
        for (uint32_t i = 1; i < trail_count; ++i) unstable_[trails + i] = true;
    }

    static uint32_t number(const char*& p) {
        uint32_t value = 0;
        for (;; ++p) {
            if (*p >= '0' && *p <= '9') {
                value = value * 16 + uint32_t(*p - '0');
            } else if (*p >= 'a' && *p <= 'f') {
                value = value * 16 + uint32_t(*p - 'a' + 10);
            } else {
                return value;
            }
        }
    }
    static uint64_t pair(uint32_t first, uint32_t second) { return uint64_t(first) << 32 | second; }
    uint32_t mark_class(uint32_t code) const {
        const auto at = classes_.find(code);
        return at == classes_.end() ? 0 : at->second;
    }

    void decompose(uint32_t code, std::vector<uint32_t>& out) const {
        if (code >= syllables && code < syllables + syllable_count) {
            const uint32_t i = code - syllables;
            out.push_back(leads + i / (vowel_count * trail_count));
            out.push_back(vowels + i / trail_count % vowel_count);
            if (i % trail_count != 0) out.push_back(trails + i % trail_count);
            return;
        }
        const auto at = decompositions_.find(code);
        if (at == decompositions_.end()) return out.push_back(code);
        decompose(at->second.first, out);
        if (at->second.second != 0) decompose(at->second.second, out);
    }

    // The character that two join to, 0 when they do not.
    uint32_t joined(uint32_t a, uint32_t b) const {
        if (a >= leads && a < leads + lead_count && b >= vowels && b < vowels + vowel_count) {
            return syllables + ((a - leads) * vowel_count + (b - vowels)) * trail_count;
        }
        if (a >= syllables && a < syllables + syllable_count &&
            (a - syllables) % trail_count == 0 && b > trails && b < trails + trail_count) {
            return a + (b - trails);
        }
        const auto at = compositions_.find(pair(a, b));
        return at == compositions_.end() ? 0 : at->second;
    }

    // A mark joins the last starter when nothing of its class or above stands between them.
    void compose(std::vector<uint32_t>& codes) const {
        size_t starter = codes.size(), kept = 0;
        uint32_t last_class = 0;
        for (size_t i = 0; i < codes.size(); ++i) {
            const uint32_t code = codes[i], its_class = mark_class(code);
            const bool adjacent = starter + 1 == kept;
            if (starter < kept && (adjacent || last_class < its_class)) {
                if (const uint32_t both = joined(codes[starter], code)) {
                    codes[starter] = both;
                    continue;
                }
            }
            if (its_class == 0) starter = kept;
            last_class = its_class;
            codes[kept++] = code;
        }
        codes.resize(kept);
    }

    std::unordered_map<uint32_t, Decomposition> decompositions_;
    std::unordered_map<uint64_t, uint32_t> compositions_;
    std::unordered_map<uint32_t, uint32_t> classes_;
    std::vector<bool> unstable_;
};

}  // namespace

std::string_view to_nfc(std::string_view text, std::string& buffer) {
    const Normalizer& normalizer = Normalizer::get();
    const uint8_t* const begin = reinterpret_cast<const uint8_t*>(text.data());
    const uint8_t* const end = begin + text.size();
    const uint8_t* copied = begin;  // up to here the result is in the buffer
    const uint8_t* stable = begin;  // the last stable character before p
    bool changed = false;
    std::vector<uint32_t> run;
    for (const uint8_t* p = begin; p < end;) {
        const Character c = next_character(p, end);
        if (normalizer.is_stable(c.code)) {
            stable = p;
            p += c.length;
            continue;
        }
        if (!changed) buffer.clear();
        changed = true;
        buffer.append(reinterpret_cast<const char*>(copied), size_t(stable - copied));
        run.clear();
        for (p = stable; p < end; p += next_character(p, end).length) {
            const uint32_t code = next_character(p, end).code;
            if (p > stable && normalizer.is_stable(code)) break;
            run.push_back(code);
        }
        normalizer.append(run, buffer);
        copied = stable = p;
    }
    if (!changed) return text;
    buffer.append(reinterpret_cast<const char*>(copied), size_t(end - copied));
    return buffer;
}

}  // namespace torus::data
