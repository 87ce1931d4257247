// Text of files, models and command lines, made fit for a terminal: what it shows cannot move the
// cursor, change the title or hide what stands next to it.
#pragma once
#include <string>
#include <string_view>

namespace torus {

// Control characters, marks that reorder text and invalid UTF-8 as \xNN.
std::string printable(std::string_view text);
// For a message: printable, on one line, cut to 80 bytes; `excerpt` in quotes.
std::string clipped(std::string_view text);
std::string excerpt(std::string_view text);

}  // namespace torus
