#!/usr/bin/env python3
"""Writes data/unicode_tables.h and data/normalize_tables.h from the Unicode character database.

The tokenizers' regular expressions mean Unicode 16 when they say \\p{L}; a system's PCRE2 may know
an older Unicode, and ids must not depend on the machine. So the tables are part of the project.
Their normalizer NFC still knows Unicode 9 only (found by comparing every character), so do ours.
Needs perl and the package unicodedata2 in version 16 (pip install "unicodedata2==16.0.0").
"""
import pathlib
import subprocess
import textwrap

import unicodedata2

CATEGORIES = "Cc Cf Cn Co Cs Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps Sc Sk Sm So Zl Zp Zs"


def runs():
    names = CATEGORIES.split()
    letters = {name: chr(ord("A") + i) for i, name in enumerate(names)}
    out, last, count = [], None, 0
    for code in range(0x110000):
        name = unicodedata2.category(chr(code))
        if name != last:
            if last is not None:
                out.append(letters[last] + (str(count) if count > 1 else ""))
            last, count = name, 0
        count += 1
    out.append(letters[last] + (str(count) if count > 1 else ""))
    return "".join(out)


def in_unicode_9():
    program = r'for (0..0xd7ff, 0xe000..0x10ffff) { print "$_\n" if chr =~ /\p{Present_In: 9.0}/ }'
    out = subprocess.run(["perl", "-e", "no warnings; " + program], check=True,
                         capture_output=True, text=True).stdout
    return [int(line) for line in out.split()]


def decompositions(codes):
    """DISTANCE:FIRST, :FIRST+SECOND, or :FIRST-SECOND when NFC does not join the two again."""
    out, last = [], 0
    for code in codes:
        mapping = unicodedata2.decomposition(chr(code))
        if not mapping or mapping.startswith("<"):
            continue
        parts = [f"{int(part, 16):x}" for part in mapping.split()]
        joined = unicodedata2.normalize("NFC", chr(code)) == chr(code)
        out.append(f"{code - last:x}:" + ("+" if joined else "-").join(parts))
        last = code
    return " ".join(out)


def combining_classes(codes):
    """DISTANCE:CLASS of each character whose class is not 0."""
    out, last = [], 0
    for code in codes:
        if unicodedata2.combining(chr(code)):
            out.append(f"{code - last:x}:{unicodedata2.combining(chr(code)):x}")
            last = code
    return " ".join(out)


def literal(text, width=90):
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return "\n".join('    "' + line.replace("\\", "\\\\") + (' "' if " " in text else '"')
                     for line in lines)


def main():
    assert unicodedata2.unidata_version == "16.0.0", unicodedata2.unidata_version
    # 'A' + category goes up to '^', which holds a backslash at index 27: escape it.
    text = literal(runs())
    folder = pathlib.Path(__file__).resolve().parent.parent / "data"
    (folder / "unicode_tables.h").write_text(f"""\
// General category of every code point of Unicode 16.0, made by scripts/make_unicode_tables.py.
// Runs from U+0000 on: one character for the category (its place in category_names, from 'A'), then
// the length of the run in decimal (left out when it is 1).
#pragma once

namespace torus::data {{

inline constexpr const char* category_names =
    "{CATEGORIES}";

// clang-format off
inline constexpr const char* category_runs =
{text};
// clang-format on

}}  // namespace torus::data
""")
    codes = in_unicode_9()
    (folder / "normalize_tables.h").write_text(f"""\
// Canonical decompositions and combining classes of Unicode 9.0, which is what the reference's NFC
// knows; made by scripts/make_unicode_tables.py. All numbers in hexadecimal.
#pragma once

namespace torus::data {{

// clang-format off

// CODE:FIRST+SECOND, CODE:FIRST, or CODE:FIRST-SECOND (which NFC does not join again); CODE is the
// distance from the entry before.
inline constexpr const char* decompositions =
{literal(decompositions(codes))};

// CODE:CLASS, for the classes that are not 0.
inline constexpr const char* combining_classes =
{literal(combining_classes(codes))};

// clang-format on

}}  // namespace torus::data
""")


if __name__ == "__main__":
    main()
