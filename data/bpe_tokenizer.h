// A byte-level BPE tokenizer made from the text of a tokenizer.json.
#pragma once
#include <memory>
#include <string>

#include "data/data.h"

namespace torus::data {

// `path` is where the text came from: its name in errors.
std::unique_ptr<Tokenizer> make_bpe_tokenizer(std::string json, const std::string& path);

}  // namespace torus::data
