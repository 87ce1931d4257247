// What a terminal may be shown. Tokens come from files and from a model, and a token of several
// bytes can hold a whole escape sequence: so the finished text is filtered, not single tokens.
#include "kernels/text.h"

#include <algorithm>

#include "kernels/utf8.h"

namespace torus {
namespace {

bool is_safe(uint32_t c) {
    if (c == '\n' || c == '\t') return true;
    if (c == invalid_character || c < 0x20 || (c >= 0x7f && c < 0xa0)) return false;
    // Marks that reorder or hide the text around them.
    return !(c >= 0x202a && c <= 0x202e) && !(c >= 0x2066 && c <= 0x2069) && c != 0xfeff;
}

}  // namespace

std::string printable(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
    const uint8_t* const end = p + text.size();
    while (p < end) {
        const Character c = next_character(p, end);
        for (uint32_t i = 0; i < c.length; ++i) {
            if (is_safe(c.code)) {
                out.push_back(char(p[i]));
            } else {
                const char* digits = "0123456789abcdef";
                out += {'\\', 'x', digits[p[i] >> 4], digits[p[i] & 15]};
            }
        }
        p += c.length;
    }
    return out;
}

std::string clipped(std::string_view text) {
    std::string shown = printable(text.substr(0, 80));
    std::replace(shown.begin(), shown.end(), '\n', ' ');
    return shown + (text.size() > 80 ? "..." : "");
}

std::string excerpt(std::string_view text) { return "\"" + clipped(text) + "\""; }

}  // namespace torus
