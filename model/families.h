// The families of the registry, one function each: a new family is a file, a line here and a line
// in registry.cpp. Also what their tables share.
#pragma once
#include <string>
#include <vector>

#include "model/model.h"

namespace torus {

const Family& gpt2_family();
const Family& llama_family();

// A weight matrix (rows, cols) that one tensor of the Hugging Face library holds.
ParamSpec matrix_spec(const std::string& name, int64_t rows, int64_t cols, double std,
                      std::vector<HfPart> hf);
// A gain (ones) or a bias (zeros) of `size` elements, without weight decay.
ParamSpec vector_spec(const std::string& name, int64_t size, Init init, std::vector<HfPart> hf);
// Embedding or head (Vp,C), of which V rows are in the file.
ParamSpec vocab_spec(const ModelConfig&, const std::string& name, const std::string& hf_name);

}  // namespace torus
