// From a configuration to the things a run works with: the backend, the model's sizes and weights,
// the tokenizer. Decides what `auto` means and says so.
#pragma once
#include <memory>
#include <string>

#include "data/data.h"
#include "engine/config.h"
#include "model/io.h"

namespace torus {

struct Setup {
    std::unique_ptr<Kernels> kernels;
    ModelConfig model;
    bool cuda = false;
    const Family* family = nullptr;
    std::unique_ptr<TensorSource> weights;  // null: random initialisation
    std::unique_ptr<Tokenizer> tokenizer;   // null: the data is tokens and nobody said which
    std::string summary;  // "gpt2:124M, 124.4M parameters, fp32 on CPU (2 threads)"
};

// Throws Error for everything a user can get wrong about device, dtype, model and tokenizer.
// `gpu`: which GPU of this machine, for --device cuda.
Setup make_setup(const Config&, int gpu);

// Another backend as the run's own, with memory counted apart.
std::unique_ptr<Kernels> make_backend(const Config&, DType, bool cuda, int gpu);

// "cuda" or "cpu"
std::string resolve_device(const Config&);
DType resolve_dtype(const Config&, const std::string& device);

}  // namespace torus
