// Reading and writing Hugging Face's tokenizer.json, the one file that says all about a tokenizer.
// Only byte-level BPE is accepted, and only parts whose meaning is reproduced exactly: a component
// that would change the ids and is not known here is an error that names it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/bpe.h"

namespace torus::data {

// One step of pre-tokenization.
struct SplitStage {
    std::string pattern;            // empty: no cut
    bool drop_gaps = false;         // text that the pattern does not match is removed
    bool add_prefix_space = false;  // before the cut, to a piece that does not start with a space
};

struct TokenizerSpec {
    BpeModel model;
    std::vector<SplitStage> stages;
    bool nfc = false;          // text is brought to Unicode's form NFC first
    int32_t end_of_text = -1;  // id
    std::string json;          // the file's text
};

// Error(bad_data) naming `path` and what is wrong.
TokenizerSpec parse_tokenizer_json(std::string json, const std::string& path);

// What the trainer and the folder layout of GPT-2 are turned into.
struct BpeFile {
    std::vector<std::string> tokens;                  // bytes of each id
    std::vector<std::pair<int32_t, int32_t>> merges;  // ids, in rank order
    std::string pattern;                              // empty: no cut at all
    int32_t end_of_text = -1;                         // id, also in `tokens`
};
std::string to_tokenizer_json(const BpeFile& file);

// GPT-2's layout: vocab.json and merges.txt in `folder`, as the text of a tokenizer.json.
std::string read_gpt2_folder(const std::string& folder);

// GPT-2's printable alphabet: one character for each byte.
std::string byte_alphabet(std::string_view bytes);
// And back; false when the text has a character outside it.
bool from_byte_alphabet(std::string_view text, std::string& bytes);

inline constexpr const char* end_of_text_name = "<|endoftext|>";

}  // namespace torus::data
