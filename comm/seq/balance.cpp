// See balance.h. Integers throughout: the same plan on every machine.
#include "comm/seq/balance.h"

#include <algorithm>
#include <numeric>

namespace torus {
namespace {

using Counts = std::vector<int64_t>;

Counts work_of(const std::vector<Runs>& ranks, const Counts& sums) {
    Counts work;
    for (const Runs& runs : ranks) {
        int64_t mine = 0;
        for (const TokenRun& r : runs) mine += sums[size_t(r.end())] - sums[size_t(r.begin)];
        work.push_back(mine);
    }
    return work;
}

int64_t most(const Counts& work) { return *std::max_element(work.begin(), work.end()); }

// Exchanges a piece of the busiest rank for a lighter one of another rank, the pair that leaves the
// least, until no pair helps.
void exchange(const Counts& pieces, Counts& load, std::vector<int>& owner) {
    for (size_t round = 0; round < pieces.size(); ++round) {
        const auto busiest = int(std::max_element(load.begin(), load.end()) - load.begin());
        int64_t least = load[size_t(busiest)];
        size_t give = 0, take = 0;
        for (size_t i = 0; i < pieces.size(); ++i) {
            if (owner[i] != busiest) continue;
            for (size_t j = 0; j < pieces.size(); ++j) {
                const int64_t moved = pieces[i] - pieces[j];
                if (owner[j] == busiest || moved <= 0) continue;
                const int64_t then =
                    std::max(load[size_t(busiest)] - moved, load[size_t(owner[j])] + moved);
                if (then < least) least = then, give = i, take = j;
            }
        }
        if (give == take) return;
        const int64_t moved = pieces[give] - pieces[take];
        load[size_t(busiest)] -= moved;
        load[size_t(owner[take])] += moved;
        std::swap(owner[give], owner[take]);
    }
}

// The owner of each piece; every one of the P ranks gets as many.
std::vector<int> deal(const Counts& pieces, int P) {
    std::vector<size_t> order(pieces.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return pieces[a] > pieces[b]; });
    std::vector<size_t> room(size_t(P), pieces.size() / size_t(P));
    Counts load(size_t(P), 0);
    std::vector<int> owner(pieces.size());
    for (const size_t piece : order) {
        int best = -1;
        for (int r = 0; r < P; ++r)
            if (room[size_t(r)] && (best < 0 || load[size_t(r)] < load[size_t(best)])) best = r;
        owner[piece] = best;
        load[size_t(best)] += pieces[piece];
        --room[size_t(best)];
    }
    exchange(pieces, load, owner);
    return owner;
}

// What is left of S when it is cut in equal pieces makes the last piece of some ranks longer.
std::vector<Runs> place(const std::vector<int>& owner, int64_t length,
                        const std::vector<Runs>& standing) {
    const int64_t each = int64_t(owner.size() / standing.size());
    std::vector<Runs> ranks(standing.size());
    std::vector<int64_t> dealt(standing.size(), 0);
    int64_t begin = 0;
    for (const int r : owner) {
        const bool last = ++dealt[size_t(r)] == each;
        const int64_t count =
            last ? count_tokens(standing[size_t(r)]) - (each - 1) * length : length;
        append(ranks[size_t(r)], {begin, count});
        begin += count;
    }
    return ranks;
}

}  // namespace

std::vector<int64_t> visible_sums(const int32_t* first_key, int64_t B, int64_t S) {
    std::vector<int64_t> sums(size_t(S + 1), 0);
    for (int64_t i = 0; i < S; ++i) {
        int64_t keys = 0;
        for (int64_t b = 0; b < B; ++b) keys += std::max<int64_t>(i + 1 - first_key[b * S + i], 0);
        sums[size_t(i + 1)] = sums[size_t(i)] + keys;
    }
    return sums;
}

std::vector<Runs> balanced_placement(const std::vector<Runs>& standing, const int32_t* first_key,
                                     int64_t B, int64_t S) {
    if (!first_key) return standing;
    const Counts sums = visible_sums(first_key, B, S);
    const auto P = int64_t(standing.size());
    std::vector<Runs> best = standing;
    int64_t best_most = most(work_of(best, sums));
    for (const int64_t each : {2, 4, 8, 16}) {
        if (20 * P * best_most <= 21 * sums.back()) break;
        const int64_t length = S / (each * P);
        if (length == 0) break;
        Counts pieces;
        for (int64_t i = 0; i < each * P; ++i)
            pieces.push_back(sums[size_t((i + 1) * length)] - sums[size_t(i * length)]);
        std::vector<Runs> ranks = place(deal(pieces, int(P)), length, standing);
        const int64_t now = most(work_of(ranks, sums));
        if (now >= best_most) continue;
        best_most = now;
        best = std::move(ranks);
    }
    return best;
}

}  // namespace torus
