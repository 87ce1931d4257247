// --config's TOML file, read by toml++ (CLI11's own reader does not know sections). Keys are flag
// names with - or _; tables only group them. Every error names file and line.

// toml++ asserts (or, with NDEBUG, assumes) that a key begins with a key's character, and on the
// next lines reports it as an error when it does not: only the report is for us.
#undef NDEBUG
#define TOML_ASSERT(condition) static_assert(true)
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>

#include "data/files.h"
#include "engine/options.h"
#include "kernels/text.h"

namespace torus {
namespace {

constexpr int64_t size_limit = 1 << 20;

struct Reader {
    const std::string& path;
    Config& config;
    std::vector<std::string>& given;
    std::vector<std::pair<const toml::key*, const toml::node*>> entries = {};

    std::string at(const toml::source_region& region) const {
        return concat(path, ":", region.begin.line, ": ");
    }

    // The value as text for set_option; a value of another kind is an error.
    std::string text_of(const toml::node& node, const Option& o, const std::string& where) const {
        const bool number =
            o.allowed.empty() && !std::holds_alternative<std::string Config::*>(o.member);
        if (number) {
            if (const auto* i = node.as_integer()) return std::to_string(i->get());
            const bool whole = !std::holds_alternative<double Config::*>(o.member);
            require(!whole || !node.is_floating_point(), Exit::usage, where,
                    ": a whole number is needed; write it without point and exponent");
            if (const auto* x = node.as_floating_point()) {
                char text[32];
                return {text, std::to_chars(text, text + sizeof text, x->get()).ptr};
            }
            fail(Exit::usage, where, ": a number is needed; write it without quotes");
        }
        if (std::holds_alternative<bool Config::*>(o.member))
            if (const auto* b = node.as_boolean()) return b->get() ? "on" : "off";
        if (const auto* s = node.as_string()) return s->get();
        fail(Exit::usage, where, ": a text is needed; write it in quotes");
    }

    void read(const toml::table& table) {
        for (auto&& [key, node] : table) {
            if (const toml::table* group = node.as_table())
                read(*group);
            else
                entries.push_back({&key, &node});
        }
    }

    void apply() {  // in the order of the file, so that the first wrong line is reported
        std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
            return a.first->source().begin < b.first->source().begin;
        });
        for (const auto& [key, node] : entries) set(*key, *node);
    }

    void set(const toml::key& key, const toml::node& node) {
        std::string name(key.str());
        std::replace(name.begin(), name.end(), '_', '-');
        const Option* o = find_option(name);
        if (!o) {
            const std::string hint = did_you_mean(name, "");
            fail(Exit::usage, at(key.source()), "unknown key ", excerpt(key.str()), "; ",
                 hint.empty() ? "the keys are the flags of train_gpt --help" : hint);
        }
        const std::string where = at(key.source()) + name;
        require(std::find(given.begin(), given.end(), name) == given.end(), Exit::usage, where,
                ": given twice; keep one of them");
        const std::string text = text_of(node, *o, where);
        const bool unset = text.empty() && show_option(*o, Config()).empty();
        if (!unset) set_option(*o, config, text, where);
        given.push_back(name);
    }
};

}  // namespace

void read_config_file(const std::string& path, Config& config, std::vector<std::string>& given) {
    const std::string text = data::read_file(path, size_limit);
    toml::table table;
    try {
        table = toml::parse(std::string_view(text), std::string_view(path));
    } catch (const toml::parse_error& e) {
        fail(Exit::usage, path, ":", e.source().begin.line, ": ", printable(e.description()),
             "; correct the TOML syntax");
    }
    Reader reader{path, config, given};
    reader.read(table);
    reader.apply();
}

}  // namespace torus
