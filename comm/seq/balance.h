// Placement by work. Without documents zigzag gives every rank of a ring the same number of visible
// (query, key); packed documents break that, because the work of a token is its place within its
// document. Here the ranks are dealt other tokens, as many as before, for one batch: a pure
// function of its first_key, so all ranks find the same placement without a message.
#pragma once
#include "comm/seq/placement.h"

namespace torus {

// sums[i]: visible (query, key) of all queries before position i, over the B sequences; S + 1.
std::vector<int64_t> visible_sums(const int32_t* first_key, int64_t B, int64_t S);

// The sequence is cut into 2, 4, 8 or 16 equal pieces per rank; they are dealt out longest
// processing time first (Graham, 1969), each rank the same number, and then exchanged while that
// helps. More pieces mean more equal work, but smaller attention calls: the fewest are taken that
// come within 5% of the mean; `standing`, which has two, when it does or when nothing is better.
// Token counts of ranks are those of `standing`, which cuts S in 2P (zigzag_placement). With null
// in place of first_key: `standing`.
std::vector<Runs> balanced_placement(const std::vector<Runs>& standing, const int32_t* first_key,
                                     int64_t B, int64_t S);

}  // namespace torus
