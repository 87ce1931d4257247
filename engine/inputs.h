// What a run reads and writes as text or tokens: loaders for its data, prompts and texts of its
// samples.
#pragma once
#include <memory>

#include "engine/sample.h"
#include "engine/setup.h"

namespace torus {

// Training or validation sequences of a glob, tokenized where needed.
std::unique_ptr<Loader> open_loader(const Config&, const std::string& glob, const Setup&,
                                    bool shuffle);

// Most tokens of prompt and sample together that the model can take.
int64_t sample_context(const Config&, const ModelConfig&, int64_t prompt_tokens);
SampleOptions sample_options(const Config&, const Setup&, uint64_t stream_id);
std::vector<int32_t> start_of_text(const Setup&);  // the end-of-text token, or token 0
std::string text_of(const Setup&, const std::vector<int32_t>& ids);  // numbers without a tokenizer

}  // namespace torus
