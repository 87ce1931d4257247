// Unicode's normal form NFC (UAX #15): decompose, order the marks, compose. Some tokenizers, Qwen's
// for one, apply it to the text before anything else.
#pragma once
#include <string>
#include <string_view>

namespace torus::data {

// `text` is valid UTF-8. `buffer` holds the result when it differs, else it is left alone.
std::string_view to_nfc(std::string_view text, std::string& buffer);

}  // namespace torus::data
