// See strict_json.h. The parser's callback sees every event before the value is stored.
#include "model/strict_json.h"

#include <unordered_set>
#include <vector>

#include "kernels/check.h"
#include "kernels/text.h"
#include "model/mapped_file.h"

namespace torus {
namespace {

class Watcher {
public:
    Watcher(const std::string& path, JsonLimits limits) : path_(path), limits_(limits) {}

    void operator()(nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
        using Event = nlohmann::json::parse_event_t;
        switch (event) {
            case Event::object_start:
            case Event::array_start:
                count_item();
                require(open_.size() < limits_.depth, Exit::bad_data, path_,
                        ": JSON is nested deeper than ", limits_.depth, " levels");
                open_.push_back({event == Event::object_start, 0, {}});
                break;
            case Event::key: count_key(parsed.get_ref<const std::string&>()); break;
            case Event::value: count_item(); break;
            case Event::object_end:
            case Event::array_end: open_.pop_back(); break;
        }
    }

private:
    struct Container {
        bool object;
        size_t items;
        std::unordered_set<std::string> keys;
    };

    void count_key(const std::string& key) {
        require(key.size() <= limits_.key_bytes, Exit::bad_data, path_, ": JSON key of ",
                key.size(), " bytes, allowed are ", limits_.key_bytes);
        require(open_.back().keys.insert(key).second, Exit::bad_data, path_, ": JSON key ",
                excerpt(key), " appears twice");
        check_count(open_.back());
    }
    void count_item() {  // objects are counted by their keys
        if (!open_.empty() && !open_.back().object) check_count(open_.back());
    }
    void check_count(Container& c) {
        const size_t most = c.object ? limits_.items : limits_.list;
        require(++c.items <= most, Exit::bad_data, path_, ": JSON ", c.object ? "object" : "list",
                " of more than ", most, " entries");
    }

    const std::string& path_;
    JsonLimits limits_;
    std::vector<Container> open_;
};

}  // namespace

nlohmann::json parse_strict(std::string_view text, const std::string& path, JsonLimits limits) {
    Watcher watch(path, limits);
    try {
        return nlohmann::json::parse(text.begin(), text.end(),
                                     [&](int, nlohmann::json::parse_event_t e, nlohmann::json& j) {
                                         watch(e, j);
                                         return true;
                                     });
    } catch (const nlohmann::json::exception& e) {
        fail(Exit::bad_data, path, ": not valid JSON: ", clipped(e.what()));
    }
}

nlohmann::json read_json_file(const std::string& path) {
    const MappedFile file(path);
    require(file.size() <= 100'000'000, Exit::bad_data, path, ": ", file.size(),
            " bytes of JSON, allowed are 100000000");
    return parse_strict({file.data(), size_t(file.size())}, path);
}

}  // namespace torus
