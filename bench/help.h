// `--help` of the programs here: their head comment, which the build puts into them. And what those
// say that take only words, no flags.
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

// False, after one line on stderr, when a word begins like a flag.
inline bool only_words(int argc, char** argv) {
    for (int i = 1; i < argc; ++i)
        if (argv[i][0] == '-') {
            std::fprintf(stderr, "error: %s: no such flag; --help says what there is\n", argv[i]);
            return false;
        }
    return true;
}
