#include "engine/inputs.h"

#include <algorithm>

namespace torus {

std::unique_ptr<Loader> open_loader(const Config& c, const std::string& glob, const Setup& setup,
                                    bool shuffle) {
    const int32_t end_of_text = setup.tokenizer ? setup.tokenizer->end_of_text() : -1;
    require(!c.document_mask || end_of_text >= 0, Exit::usage,
            "--document-mask on: needs the end-of-text token; name the data's tokenizer with "
            "--tokenizer");
    const std::vector<std::string> shards =
        setup.tokenizer ? prepare_data(glob, *setup.tokenizer, c.cache_dir) : expand_glob(glob);
    return std::make_unique<Loader>(LoaderConfig{.shards = shards,
                                                 .S = c.seq_length,
                                                 .vocab = setup.model.V,
                                                 .end_of_text = end_of_text,
                                                 .document_mask = c.document_mask,
                                                 .shuffle = shuffle,
                                                 .seed = c.seed});
}

int64_t sample_context(const Config& c, const ModelConfig& model, int64_t prompt_tokens) {
    const int64_t wanted = std::max<int64_t>(2, prompt_tokens + c.sample_tokens);
    return family(model.family).rotary() ? wanted : std::min(wanted, model.max_T);
}

SampleOptions sample_options(const Config& c, const Setup& setup, uint64_t stream_id) {
    return {.tokens = c.sample_tokens,
            .temperature = c.temperature,
            .top_k = c.top_k,
            .seed = c.seed,
            .stream_id = stream_id,
            .stop_token = setup.tokenizer ? setup.tokenizer->end_of_text() : -1};
}

std::vector<int32_t> start_of_text(const Setup& setup) {
    return {std::max(0, setup.tokenizer ? setup.tokenizer->end_of_text() : -1)};
}

std::string text_of(const Setup& setup, const std::vector<int32_t>& ids) {
    if (setup.tokenizer) return setup.tokenizer->decode(ids);
    std::string numbers;
    for (int32_t id : ids) numbers += std::to_string(id) + " ";
    return numbers;
}

}  // namespace torus
