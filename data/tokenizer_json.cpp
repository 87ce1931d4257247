// tokenizer.json: see tokenizer_json.h. The file is untrusted: its size, depth, ids and names are
// checked before they are used, and everything allocated is in proportion to the file.
#include "data/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "data/data.h"
#include "data/json.h"
#include "data/pretokenize.h"
#include "kernels/check.h"
#include "kernels/text.h"
#include "kernels/utf8.h"

namespace torus::data {
namespace {

using nlohmann::json;

// Names of the token that ends a document, most telling first.
constexpr std::array<const char*, 5> end_of_text_names{end_of_text_name, "<|end_of_text|>", "</s>",
                                                       "<eos>", "<｜end▁of▁sentence｜>"};

class Parser {
public:
    Parser(std::string text, const std::string& path) : path_(path) {
        root_ = parse_json(text, path);
        spec_.json = std::move(text);
    }

    TokenizerSpec run() {
        if (!root_.is_object()) refuse("is not a JSON object");
        for (const char* key : {"truncation", "padding"}) {
            if (!is_null(root_, key)) refuse(concat(key, " is set, which would change the ids"));
        }
        normalizer(at(root_, "normalizer"));
        pre_tokenizer(at(root_, "pre_tokenizer"));
        if (!byte_level_) refuse("no ByteLevel pre-tokenizer, so it is not byte-level BPE");
        const json& model = at(root_, "model");
        if (!model.is_object()) refuse("has no model");
        options(model);
        vocabulary(model);
        merges(model);
        // Neither a post_processor (it adds special tokens) nor a decoder changes these ids.
        return std::move(spec_);
    }

private:
    [[noreturn]] void refuse(const std::string& what) const {
        fail(Exit::bad_data, path_, ": ", what,
             "; only byte-level BPE in the layout of tokenizer.json is supported");
    }
    static const json& at(const json& object, const char* key) {
        static const json nothing;
        const auto found = object.find(key);
        return found == object.end() ? nothing : *found;
    }
    static bool is_null(const json& object, const char* key) { return at(object, key).is_null(); }
    std::string text(const json& object, const char* key) const {
        const json& value = at(object, key);
        if (!value.is_string()) refuse(concat("key ", key, " is not a text"));
        return value.get<std::string>();
    }
    bool flag(const json& object, const char* key, bool otherwise) const {
        const json& value = at(object, key);
        if (value.is_null()) return otherwise;
        if (!value.is_boolean()) refuse(concat("key ", key, " is neither true nor false"));
        return value.get<bool>();
    }
    const json& list(const json& object, const char* key) const {
        const json& value = at(object, key);
        if (!value.is_array()) refuse(concat("key ", key, " is not a list"));
        return value;
    }

    void normalizer(const json& value) {
        if (value.is_null()) return;
        const std::string type = text(value, "type");
        if (type == "NFC") {
            spec_.nfc = true;
        } else if (type == "Sequence") {
            for (const json& part : list(value, "normalizers")) normalizer(part);
        } else {
            refuse("normalizer " + excerpt(type) + " is not known");
        }
    }

    void pre_tokenizer(const json& value) {
        if (value.is_null()) return;
        const std::string type = text(value, "type");
        if (byte_level_) refuse("pre-tokenizer " + excerpt(type) + " after ByteLevel");
        if (type == "Sequence") {
            for (const json& part : list(value, "pretokenizers")) pre_tokenizer(part);
        } else if (type == "ByteLevel") {
            byte_level_ = true;
            spec_.stages.push_back({flag(value, "use_regex", true) ? gpt2_pattern : "", false,
                                    flag(value, "add_prefix_space", true)});
        } else if (type == "Digits") {
            const bool single = flag(value, "individual_digits", false);
            spec_.stages.push_back({single ? digit_pattern : digit_run_pattern});
        } else if (type == "Split") {
            split(value);
        } else {
            refuse("pre-tokenizer " + excerpt(type) + " is not known");
        }
    }

    void split(const json& value) {
        const json& pattern = at(value, "pattern");
        if (!pattern.is_object()) refuse("Split has no pattern");
        SplitStage stage;
        if (pattern.contains("Regex")) {
            stage.pattern = text(pattern, "Regex");
        } else {
            stage.pattern = literal_pattern(text(pattern, "String"));
        }
        if (stage.pattern.empty()) refuse("Split has an empty pattern");
        const std::string behavior = text(value, "behavior");
        const bool invert = flag(value, "invert", false);
        if (behavior == "Removed" && invert) {
            stage.drop_gaps = true;
        } else if (behavior != "Isolated") {
            refuse("Split behavior " + excerpt(behavior) + " is not known");
        }
        spec_.stages.push_back(stage);
    }

    void options(const json& model) {
        const json& type = at(model, "type");
        if (!type.is_null() && type != "BPE") refuse("model type " + excerpt(type.dump()));
        const json& dropout = at(model, "dropout");
        if (!dropout.is_null() && dropout != 0) refuse("model.dropout is set");
        for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
            if (!is_null(model, key) && at(model, key) != "") refuse(concat("model.", key));
        }
        // unk_token and byte_fallback have no effect once each of the 256 bytes is a token.
        ignore_merges_ = flag(model, "ignore_merges", false);
    }

    void vocabulary(const json& model) {
        const json& vocab = at(model, "vocab");
        if (!vocab.is_object()) refuse("model.vocab is not an object");
        const json& added = at(root_, "added_tokens");
        if (!added.is_null() && !added.is_array()) refuse("added_tokens is not a list");
        std::vector<std::string> tokens(vocab.size() + added.size());
        std::vector<bool> taken(tokens.size());
        size_t ids = 0;
        const auto place = [&](const std::string& name, const json& id, std::string bytes) {
            if (name.empty()) refuse("an empty token");
            const bool ok = id.is_number_unsigned() && id.get<uint64_t>() < tokens.size();
            if (!ok)
                refuse("token " + excerpt(name) + " has id " + excerpt(id.dump()) +
                       ", ids must be 0 to " + std::to_string(tokens.size() - 1));
            const size_t i = id.get<size_t>();
            if (taken[i]) refuse("id " + std::to_string(i) + " is given to two tokens");
            taken[i] = true;
            tokens[i] = std::move(bytes);
            ids = std::max(ids, i + 1);
        };
        for (const auto& [name, id] : vocab.items()) {
            std::string bytes;
            const bool in_alphabet = from_byte_alphabet(name, bytes);
            place(name, id, in_alphabet ? bytes : name);
            id_of_.emplace(name, id.get<int32_t>());
            if (in_alphabet && ignore_merges_) spec_.model.whole.emplace(bytes, id_of_[name]);
        }
        for (const json& token : added) {
            const std::string name = text(token, "content");
            const auto known = id_of_.find(name);
            if (known == id_of_.end()) {
                place(name, at(token, "id"), name);
                id_of_.emplace(name, at(token, "id").get<int32_t>());
            } else if (at(token, "id") != known->second) {
                refuse("added token " + excerpt(name) + " has two ids");
            } else {
                tokens[size_t(known->second)] = name;
            }
        }
        for (size_t i = 0; i < ids; ++i) {
            if (!taken[i]) refuse("no token has id " + std::to_string(i));
        }
        tokens.resize(ids);
        spec_.model.tokens = std::move(tokens);
        for (int b = 0; b < 256; ++b) {
            const char byte = char(b);
            const auto found = id_of_.find(byte_alphabet({&byte, 1}));
            if (found == id_of_.end()) refuse("no token for byte " + std::to_string(b));
            spec_.model.byte_ids[size_t(b)] = found->second;
        }
        // A token that was declared apart is the mark, before one that merges happen to spell.
        std::unordered_map<std::string, int32_t> declared;
        for (const json& token : added) {
            declared.emplace(token["content"], id_of_[token["content"]]);
        }
        for (const auto* table : {&declared, &id_of_}) {
            for (const char* name : end_of_text_names) {
                const auto found = table->find(name);
                if (spec_.end_of_text < 0 && found != table->end()) {
                    spec_.end_of_text = found->second;
                }
            }
        }
    }

    void merges(const json& model) {
        const json& merges = list(model, "merges");
        spec_.model.merges = MergeTable(int64_t(merges.size()));
        uint32_t rank = 0;
        for (const json& merge : merges) {
            std::string left, right;
            if (merge.is_string()) {
                const std::string& both = merge.get_ref<const std::string&>();
                const size_t space = both.find(' ');
                if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos) {
                    refuse(concat("merge ", rank, " ", excerpt(both), " is not two tokens"));
                }
                left = both.substr(0, space);
                right = both.substr(space + 1);
            } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                       merge[1].is_string()) {
                left = merge[0].get<std::string>();
                right = merge[1].get<std::string>();
            } else {
                refuse(concat("merge ", rank, " is not two tokens"));
            }
            const int32_t first = token(left, rank), second = token(right, rank);
            spec_.model.merges.insert(first, second, {rank, token(left + right, rank)});
            ++rank;
        }
    }
    int32_t token(const std::string& name, uint32_t rank) const {
        const auto found = id_of_.find(name);
        if (found == id_of_.end()) {
            refuse(concat("merge ", rank, " names ", excerpt(name), ", which is not a token"));
        }
        return found->second;
    }

    const std::string& path_;
    json root_;
    TokenizerSpec spec_;
    std::unordered_map<std::string, int32_t> id_of_;  // by the file's spelling
    bool byte_level_ = false, ignore_merges_ = false;
};

// Byte b is written as code point alphabet()[b]: itself when it is printable in Latin-1, else the
// next free one from U+0100 on.
const std::array<uint32_t, 256>& alphabet() {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> codes{};
        uint32_t next = 256;
        for (uint32_t b = 0; b < 256; ++b) {
            const bool shown = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
            codes[b] = shown ? b : next++;
        }
        return codes;
    }();
    return table;
}

}  // namespace

std::string byte_alphabet(std::string_view bytes) {
    std::string text;
    for (const char c : bytes) append_utf8(text, alphabet()[uint8_t(c)]);
    return text;
}

bool from_byte_alphabet(std::string_view text, std::string& bytes) {
    static const std::array<int16_t, 324> byte_of = [] {
        std::array<int16_t, 324> table{};
        table.fill(-1);
        for (size_t b = 0; b < 256; ++b) table[alphabet()[b]] = int16_t(b);
        return table;
    }();
    bytes.clear();
    const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
    const uint8_t* const end = p + text.size();
    while (p < end) {
        const Character c = next_character(p, end);
        if (c.code >= byte_of.size() || byte_of[c.code] < 0) return false;
        bytes.push_back(char(byte_of[c.code]));
        p += c.length;
    }
    return true;
}

TokenizerSpec parse_tokenizer_json(std::string text, const std::string& path) {
    return Parser(std::move(text), path).run();
}

std::string to_tokenizer_json(const BpeFile& file) {
    nlohmann::ordered_json root, vocab = nlohmann::ordered_json::object();
    const auto name = [&](int32_t id) {
        const std::string& bytes = file.tokens[size_t(id)];
        return id == file.end_of_text ? bytes : byte_alphabet(bytes);
    };
    nlohmann::ordered_json merges = nlohmann::ordered_json::array();
    for (const auto& [left, right] : file.merges) {
        merges.push_back(name(left) + " " + name(right));
    }
    root["version"] = "1.0";
    root["truncation"] = nullptr;
    root["padding"] = nullptr;
    root["added_tokens"] = nlohmann::ordered_json::array();
    if (file.end_of_text >= 0) {
        root["added_tokens"].push_back({{"id", file.end_of_text},
                                        {"content", name(file.end_of_text)},
                                        {"single_word", false},
                                        {"lstrip", false},
                                        {"rstrip", false},
                                        {"normalized", false},
                                        {"special", true}});
    }
    const bool by_hand = file.pattern.empty() || file.pattern == gpt2_pattern;
    nlohmann::ordered_json bytes{{"type", "ByteLevel"},
                                 {"add_prefix_space", false},
                                 {"trim_offsets", true},
                                 {"use_regex", by_hand && !file.pattern.empty()}};
    root["normalizer"] = nullptr;
    if (by_hand) {
        root["pre_tokenizer"] = bytes;
    } else {
        const nlohmann::ordered_json split{{"type", "Split"},
                                           {"pattern", {{"Regex", file.pattern}}},
                                           {"behavior", "Isolated"},
                                           {"invert", false}};
        root["pre_tokenizer"] = {{"type", "Sequence"},
                                 {"pretokenizers", nlohmann::ordered_json::array({split, bytes})}};
    }
    bytes["use_regex"] = true;
    root["post_processor"] = nullptr;
    root["decoder"] = bytes;
    // Built by hand: an ordered_json object looks for each key from the start, which is quadratic.
    std::string vocabulary;
    for (int32_t id = 0; id < int32_t(file.tokens.size()); ++id) {
        vocabulary += concat(id > 0 ? "," : "", json(name(id)).dump(), ":", id);
    }
    root["model"] = {{"type", "BPE"},
                     {"dropout", nullptr},
                     {"unk_token", nullptr},
                     {"continuing_subword_prefix", nullptr},
                     {"end_of_word_suffix", nullptr},
                     {"fuse_unk", false},
                     {"byte_fallback", false},
                     {"ignore_merges", false},
                     {"vocab", vocab},
                     {"merges", merges}};
    std::string text = root.dump();
    const std::string hole = "\"vocab\":{}";
    text.replace(text.rfind(hole, text.rfind("\"merges\":[")), hole.size(),
                 "\"vocab\":{" + vocabulary + "}");
    return text + "\n";
}

std::string read_gpt2_folder(const std::string& folder) {
    const std::string vocab_path = folder + "/vocab.json", merges_path = folder + "/merges.txt";
    const json vocab = parse_json(read_file(vocab_path, max_tokenizer_bytes), vocab_path);
    require(vocab.is_object(), Exit::bad_data, vocab_path,
            ": is not a JSON object; give GPT-2's vocab.json");
    json merges = json::array();
    const std::string text = read_file(merges_path, max_tokenizer_bytes);
    for (size_t at = 0; at < text.size();) {
        const size_t stop = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, stop - at);
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (!line.empty() && line.rfind("#version", 0) != 0) merges.push_back(line);
        at = stop + 1;
    }
    json added = json::array();
    if (vocab.contains(end_of_text_name)) {
        added.push_back({{"id", vocab[end_of_text_name]},
                         {"content", end_of_text_name},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", true}});
    }
    const json bytes{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
    const json root{{"version", "1.0"},
                    {"added_tokens", added},
                    {"pre_tokenizer", bytes},
                    {"decoder", bytes},
                    {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
    // Bytes that are not UTF-8 become U+FFFD here, and then a merge that names no token.
    return root.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace torus::data
