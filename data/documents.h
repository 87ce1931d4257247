// Documents of text files, one after the other, with memory for one of them only.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "data/data.h"

namespace torus::data {

// .txt: the file is one document, unless lines that are exactly <|endoftext|> separate several.
// .jsonl: one object a line, the document is its key "text"; blank lines are skipped, any other
// fault is an Error(bad_data) with file and line. A byte-order mark at the start is left out in
// both. Empty documents are not visited.
void for_each_document(const std::string& path, const std::function<void(std::string_view)>& visit);

bool is_text_file(const std::string& path);  // by its name: .txt or .jsonl

// Calls write(ids) for each document of `paths`: the end-of-text token, when there is one, opens
// the document, then its tokens follow.
void tokenize_files(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                    const std::function<void(const std::vector<int32_t>&)>& write);

}  // namespace torus::data
