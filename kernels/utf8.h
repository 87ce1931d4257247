// UTF-8, one character at a time. A byte that starts no valid character (RFC 3629: no overlong
// forms, no surrogates, at most U+10FFFF) is reported as invalid and is one byte long, so that a
// walk over any bytes loses nothing and always moves on.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

namespace torus {

constexpr uint32_t invalid_character = 0xffffffffu;

struct Character {
    uint32_t code;    // code point, or invalid_character
    uint32_t length;  // bytes, at least 1
};

// The character at p < end.
inline Character next_character(const uint8_t* p, const uint8_t* end) {
    const uint32_t a = p[0];
    if (a < 0x80) return {a, 1};
    const auto follows = [&](int64_t i) { return p + i < end && (p[i] & 0xc0) == 0x80; };
    const Character invalid{invalid_character, 1};
    if (a < 0xc2) return invalid;
    if (a < 0xe0) {
        if (!follows(1)) return invalid;
        return {(a & 0x1f) << 6 | (p[1] & 0x3fu), 2};
    }
    if (a < 0xf0) {
        if (!follows(1) || !follows(2)) return invalid;
        const uint32_t code = (a & 0x0f) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        if (code < 0x800 || (code >= 0xd800 && code < 0xe000)) return invalid;
        return {code, 3};
    }
    if (a > 0xf4 || !follows(1) || !follows(2) || !follows(3)) return invalid;
    const uint32_t code =
        (a & 0x07) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
    if (code < 0x10000 || code > 0x10ffff) return invalid;
    return {code, 4};
}

// Where the valid UTF-8 that starts at p stops: at an invalid byte or at the end.
inline const char* valid_until(const char* p, const char* end) {
    while (p < end) {
        uint64_t eight = 0;
        if (end - p >= 8) {
            std::memcpy(&eight, p, 8);
            if ((eight & 0x8080808080808080u) == 0) {
                p += 8;
                continue;
            }
        }
        const Character c = next_character(reinterpret_cast<const uint8_t*>(p),
                                           reinterpret_cast<const uint8_t*>(end));
        if (c.code == invalid_character) return p;
        p += c.length;
    }
    return p;
}

inline void append_utf8(std::string& out, uint32_t code) {
    const auto put = [&](uint32_t byte) { out.push_back(char(byte)); };
    if (code < 0x80) {
        put(code);
    } else if (code < 0x800) {
        put(0xc0 | code >> 6);
        put(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        put(0xe0 | code >> 12);
        put(0x80 | (code >> 6 & 0x3f));
        put(0x80 | (code & 0x3f));
    } else {
        put(0xf0 | code >> 18);
        put(0x80 | (code >> 12 & 0x3f));
        put(0x80 | (code >> 6 & 0x3f));
        put(0x80 | (code & 0x3f));
    }
}

}  // namespace torus
