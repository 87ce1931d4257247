// --verify: runs a reference's batch and compares logits, loss, every gradient, and the losses,
// norms and weights of its AdamW steps with what the reference recorded in fp64.
//
// A reference folder has config.json and model.safetensors in the Hugging Face layout, and
// reference.safetensors with input_ids, targets (already shifted, negative = ignored), optional
// position_ids and document_ids (B,T) int64; logits, loss, grad.<name>, losses, grad_norms,
// after.<name> in fp64; reference.json holds the optimizer's settings and the errors of a plain
// implementation in bf16 and fp16, which is what those types are judged by.
#pragma once
#include <string>

#include "engine/config.h"

namespace torus {

// Prints one line per quantity; true when every difference is within its bound.
bool verify(const Config&);

}  // namespace torus
