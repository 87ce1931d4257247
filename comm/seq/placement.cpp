// Placement of tokens and heads.
#include "comm/seq/placement.h"

#include <algorithm>

namespace torus {

void append(Runs& runs, const TokenRun& run) {
    if (run.count == 0) return;
    if (!runs.empty() && runs.back().end() == run.begin) {
        runs.back().count += run.count;
    } else {
        runs.push_back(run);
    }
}

TokenRun part_of(int64_t total, int64_t n, int64_t i) {
    const int64_t begin = total / n * i + total % n * i / n;
    const int64_t end = total / n * (i + 1) + total % n * (i + 1) / n;
    return {begin, end - begin};
}

std::vector<Runs> contiguous_placement(int64_t S, int P) {
    std::vector<Runs> ranks(static_cast<size_t>(P));
    for (int r = 0; r < P; ++r) append(ranks[size_t(r)], part_of(S, P, r));
    return ranks;
}

std::vector<Runs> halved_placement(int64_t S, int P) {
    std::vector<Runs> ranks = contiguous_placement(S, P);
    for (Runs& runs : ranks) {
        if (runs.empty() || runs[0].count == 1) continue;
        const TokenRun whole = runs[0];
        const int64_t half = whole.count / 2;
        runs = {{whole.begin, half}, {whole.begin + half, whole.count - half}};
    }
    return ranks;
}

std::vector<Runs> zigzag_placement(int64_t S, int P) {
    std::vector<Runs> ranks(static_cast<size_t>(P));
    for (int r = 0; r < P; ++r) {
        append(ranks[size_t(r)], part_of(S, 2 * P, r));
        append(ranks[size_t(r)], part_of(S, 2 * P, 2 * P - 1 - r));
    }
    return ranks;
}

Runs joined(const Runs& runs) {
    Runs all;
    for (const TokenRun& r : runs) append(all, r);
    return all;
}

int64_t count_tokens(const Runs& runs) {
    int64_t n = 0;
    for (const TokenRun& r : runs) n += r.count;
    return n;
}

Runs sub_runs(const Runs& runs, int64_t begin, int64_t count) {
    Runs part;
    int64_t row = 0;
    for (const TokenRun& r : runs) {
        const int64_t a = std::max(begin, row), b = std::min(begin + count, row + r.count);
        if (a < b) append(part, {r.begin + a - row, b - a});
        row += r.count;
    }
    return part;
}

std::vector<HeadGroup> head_groups(int64_t H, int64_t Hk, int n, int i) {
    const int64_t per_key = H / Hk;
    const TokenRun mine = part_of(H, n, i);
    std::vector<HeadGroup> groups;
    for (int64_t q = mine.begin; q < mine.end();) {
        const int64_t k = q / per_key, end = std::min(mine.end(), (k + 1) * per_key);
        const bool whole = end - q == per_key;
        // Whole groups that follow each other make one problem.
        if (whole && !groups.empty() && groups.back().queries == per_key * groups.back().keys) {
            groups.back().queries += per_key;
            groups.back().keys += 1;
        } else {
            groups.push_back({q, end - q, k, 1});
        }
        q = end;
    }
    return groups;
}

}  // namespace torus
