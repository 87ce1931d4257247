// JSON of untrusted files: at most 64 levels, no key twice in an object, and one-line errors with
// the file and the byte.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace torus::data {

inline constexpr int64_t max_tokenizer_bytes = 256 << 20;

// `where` starts the error message: a path, or "path:line N".
nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace torus::data
