// JSON of files that we did not write. The library alone takes any depth and lets the last of two
// equal keys win; here both are errors, as are huge containers. Everything throws Error(bad_data)
// with the file's name.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace torus {

struct JsonLimits {
    size_t depth = 64;         // nesting
    size_t items = 1'000'000;  // entries of one object
    size_t list = 1'000'000;   // entries of one array
    size_t key_bytes = 512;
};

nlohmann::json parse_strict(std::string_view text, const std::string& path, JsonLimits limits = {});

// Reads a whole file of at most 100 MB.
nlohmann::json read_json_file(const std::string& path);

}  // namespace torus
