// JSON of untrusted files: see json.h.
#include "data/json.h"

#include "kernels/check.h"

namespace torus::data {
namespace {

constexpr int max_depth = 64;

int64_t count_keys(const nlohmann::json& value) {
    int64_t keys = value.is_object() ? int64_t(value.size()) : 0;
    if (value.is_structured()) {
        for (const nlohmann::json& part : value) keys += count_keys(part);
    }
    return keys;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
    using nlohmann::json;
    int64_t keys = 0;
    const auto watch = [&](int depth, json::parse_event_t event, json&) {
        require(depth < max_depth, Exit::bad_data, where, ": JSON nested deeper than ", max_depth,
                " levels; check that it is the file you meant");
        keys += event == json::parse_event_t::key;
        return true;
    };
    json value;
    try {
        value = json::parse(text, watch);
    } catch (const json::parse_error& e) {
        fail(Exit::bad_data, where, ":byte ", e.byte,
             ": not valid JSON (or not UTF-8, or cut); restore the file");
    } catch (const json::exception&) {
        fail(Exit::bad_data, where, ": a JSON number is out of range; restore the file");
    }
    // The last of two equal keys would win silently: then fewer are left than were read.
    require(keys == count_keys(value), Exit::bad_data, where,
            ": a JSON key appears twice in one object; restore the file");
    return value;
}

}  // namespace torus::data
