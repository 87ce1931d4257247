// Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023): an all-to-all turns "some tokens, all heads"
// into "all tokens, some heads", any attention does the work, and a second all-to-all turns it
// back. Heads are dealt out evenly whatever their number (head_groups): a kv head that serves
// queries on several ranks goes to each of them, and its gradients are summed. "All tokens" are
// those of the inner attention's placement: the whole sequence, or one rank's part of a ring (USP;
// Fang & Zhao, 2024).
#pragma once
#include <functional>

#include "comm/seq/placement.h"

namespace torus {

// Makes the attention for some of the heads; `name` is the owner and prefix of its tensors.
using MakeInner =
    std::function<std::unique_ptr<SeqParallel>(const AttnDims&, const std::string& name)>;

// What the ranks of the group hold together, in order: their inner attention's placement for a
// batch with this first_key, or null. A function, because a rank without heads has no inner
// attention to ask.
using GroupTokens = std::function<Runs(const int32_t* first_key)>;

// slices: see make_seq_parallel.
std::unique_ptr<SeqParallel> make_ulysses_attention(Kernels&, Comm& ulysses, const AttnDims&,
                                                    GroupTokens, const MakeInner&, int slices);

}  // namespace torus
