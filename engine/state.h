// A run's state as checkpoint files and back: weights under their Hugging Face names, moments as
// "m.<name>" and "v.<name>", the optimizer's control.
#pragma once
#include <string>

#include "engine/checkpoint.h"
#include "engine/planner.h"
#include "engine/setup.h"

namespace torus {

// Tensors to save, read from the device as the store asks for them.
CheckpointFiles checkpoint_files(Machine&, const ModelConfig&, const std::string& tokenizer_path);

// The weights a new run starts from: those of --model, or random ones.
void start_weights(Machine&, const Setup&, uint64_t seed);

// Weights, moments and control from a checkpoint folder.
void load_checkpoint(Machine&, const std::string& dir);

// What must be equal for a resume, as one line: family, sizes, maths.
std::string model_signature(const ModelConfig&);

}  // namespace torus
