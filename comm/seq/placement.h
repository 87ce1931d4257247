// Who holds which tokens, and how heads are dealt out: pure functions, for any S, H and P.
#pragma once
#include "comm/seq.h"

namespace torus {

using Runs = std::vector<TokenRun>;

// Part i of n in equal cuts of [0, total): sizes differ by at most one, and may be zero.
TokenRun part_of(int64_t total, int64_t n, int64_t i);

// Each rank's runs, in the order held; no run is empty, a rank may have none.
std::vector<Runs> contiguous_placement(int64_t S, int P);
// The same tokens, each rank's as two runs of half the size.
std::vector<Runs> halved_placement(int64_t S, int P);
// Of 2P chunks rank r holds chunks r and 2P-1-r: causal work is equal on all ranks.
std::vector<Runs> zigzag_placement(int64_t S, int P);

int64_t count_tokens(const Runs&);
// Adds a run; joined with the last one when it goes on where that ends.
void append(Runs&, const TokenRun&);
// The same rows with neighbouring runs joined.
Runs joined(const Runs&);
// Rows [begin, begin + count) of the runs' concatenation.
Runs sub_runs(const Runs&, int64_t begin, int64_t count);

// Query heads [q, q + queries) all served by kv heads [k, k + keys), queries / keys each: one
// attention problem of its own.
struct HeadGroup {
    int64_t q, queries, k, keys;
    bool operator==(const HeadGroup&) const = default;
};
// What rank i of n computes when H query heads are dealt out evenly (sizes differ by at most one,
// none for some when n > H): at most three groups, because a rank may start and end within the
// queries of one kv head. kv heads at such borders are on two ranks or more.
std::vector<HeadGroup> head_groups(int64_t H, int64_t Hk, int n, int i);

}  // namespace torus
