// The embedded tokenizer `bytes` (ids 0-255 are the bytes, 256 is end of text: needs no file, loses
// nothing), and the one door to every tokenizer.
#include "data/bpe_tokenizer.h"
#include "data/data.h"
#include "data/files.h"
#include "data/json.h"
#include "data/tokenizer_json.h"
#include "kernels/check.h"

namespace torus {
namespace {

constexpr int32_t bytes_end_of_text = 256;

struct BytesTokenizer : Tokenizer {
    std::string name() const override { return "bytes"; }
    int64_t vocab_size() const override { return 257; }
    int32_t end_of_text() const override { return bytes_end_of_text; }

    void encode(std::string_view text, std::vector<int32_t>& ids) const override {
        ids.reserve(ids.size() + text.size());
        for (const char c : text) ids.push_back(uint8_t(c));
    }

    std::string decode(const std::vector<int32_t>& ids) const override {
        std::string text;
        text.reserve(ids.size());
        for (const int32_t id : ids) {
            require(id >= 0 && id <= bytes_end_of_text, Exit::bad_data, "token ", id,
                    ", the tokenizer bytes has ids 0 to 256; use the tokenizer of these tokens");
            if (id == bytes_end_of_text) {
                text += data::end_of_text_name;
            } else {
                text.push_back(char(id));
            }
        }
        return text;
    }

    // As a byte-level BPE without merges, which gives the same ids.
    void save(const std::string& path) const override {
        data::BpeFile file;
        for (int b = 0; b < 256; ++b) file.tokens.push_back(std::string(1, char(b)));
        file.tokens.push_back(data::end_of_text_name);
        file.end_of_text = bytes_end_of_text;
        data::write_file(path, data::to_tokenizer_json(file));
    }

    std::string fingerprint() const override { return "bytes"; }
};

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& spec) {
    if (spec == "bytes") return std::make_unique<BytesTokenizer>();
    std::string path = spec;
    if (data::is_folder(spec)) {
        path = spec + "/tokenizer.json";
        if (!data::is_file(path) && data::is_file(spec + "/vocab.json")) {
            return data::make_bpe_tokenizer(data::read_gpt2_folder(spec), spec);
        }
    }
    require(
        data::is_file(path), Exit::missing_input, path,
        ": no such tokenizer file; give bytes, a tokenizer.json, or a folder with tokenizer.json "
        "or with vocab.json and merges.txt (scripts/get_tokenizer.py fetches published ones)");
    return data::make_bpe_tokenizer(data::read_file(path, data::max_tokenizer_bytes), path);
}

}  // namespace torus
