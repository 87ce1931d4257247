// `--help` of the programs here: their head comment, which the build puts into them.
#pragma once
#include <cstdio>
#include <string_view>

extern const char* const help_text;

inline bool printed_help(int argc, char** argv) {
    for (int i = 1; i < argc; ++i)
        if (const std::string_view word = argv[i]; word == "--help" || word == "-h") {
            std::fputs(help_text, stdout);
            return true;
        }
    return false;
}
