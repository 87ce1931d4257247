// Sampling text from a model with a key-value cache: the prompt in chunks, then token by token.
// Uses the same pre, attention and post as training. Its memory lives in the sample phase, so
// inside a training run it shares the step's activations.
#pragma once
#include "engine/activations.h"
#include "engine/params.h"

namespace torus {

struct SampleOptions {
    int64_t tokens = 128;    // at most; the context's end also stops
    double temperature = 1;  // 0 = always the most likely token
    int64_t top_k = 0;       // 0 = all
    uint64_t seed = 0, stream_id = 0;
    int32_t stop_token = -1;  // ends the text; not part of it
};

class Sampler {
public:
    // `context`: most tokens of prompt and text together.
    Sampler(Kernels&, const ModelConfig&, const Family&, Parameters&, int64_t context);

    void plan(Layout&) const;  // owner "sample/"
    void bind(const Arena&);
    WorkspaceDims workspace_dims() const;

    // Continues `prompt` (at least one token, the last `context` - 1 are used). Synchronises.
    std::vector<int32_t> generate(Stream&, std::vector<int32_t> prompt, const SampleOptions&);

private:
    void prepare(Stream&);
    Tensor advance(Stream&, const int32_t* ids, int64_t T, int64_t first);
    int32_t choose(Stream&, Tensor logits, const SampleOptions&, int64_t position);

    Kernels& k_;
    const ModelConfig& model_;
    const Family& family_;
    Parameters& params_;
    int64_t context_, chunk_;
    Arena const* arena_ = nullptr;
};

}  // namespace torus
