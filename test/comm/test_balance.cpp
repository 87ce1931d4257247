// Placement by work: equal work, the same tokens per rank, every token once, short lists of runs.
#include <algorithm>
#include <cmath>

#include "comm/seq/balance.h"
#include "comm/seq/schedule.h"
#include "kernels/rng.h"
#include "test/comm/ranks.h"
#include "test/comm/seq_case.h"
#include "test/test.h"

namespace torus {
namespace {

// Packed documents of log-normal length (spread 1), B sequences of S.
std::vector<int32_t> packed_documents(int64_t B, int64_t S, double median, uint64_t seed) {
    std::vector<int32_t> first;
    uint64_t drawn = 0;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t begin = 0; begin < S;) {
            const double length = median * std::exp(random_normal(seed, 0, drawn++));
            const int64_t end = std::min(S, begin + std::max<int64_t>(1, int64_t(length)));
            for (; int64_t(first.size()) < b * S + end;) first.push_back(int32_t(begin));
            begin = end;
        }
    return first;
}

double imbalance(const std::vector<Runs>& runs, const std::vector<int32_t>& first, int64_t B,
                 int64_t S) {
    const RingPlan plan{runs, ring_schedule(int(runs.size()))};
    return imbalance_of(make_table(plan, true, first.data(), B, S), first.data(), B, S);
}

// The standing placement's token counts, every token once, no more than 16 runs.
void expect_fair(const std::vector<Runs>& ranks, const std::vector<Runs>& standing, int64_t S) {
    std::vector<int> held(size_t(S), 0);
    REQUIRE_TRUE(ranks.size() == standing.size());
    for (size_t r = 0; r < ranks.size(); ++r) {
        EXPECT_EQ(count_tokens(ranks[r]), count_tokens(standing[r]));
        EXPECT(ranks[r].size() <= 16);
        for (const TokenRun& run : ranks[r]) {
            EXPECT(run.count > 0);
            for (int64_t i = run.begin; i < run.end(); ++i) ++held[size_t(i)];
        }
    }
    EXPECT(held == std::vector<int>(size_t(S), 1));
}

}  // namespace

TEST_CASE("balance: within 10% with documents shorter than a rank's tokens") {
    for (const int P : {2, 3, 4, 8, 16})
        for (const int64_t B : {1, 4})
            for (const double median : {0.05, 0.25, 0.5})
                for (uint64_t seed = 0; seed < 4; ++seed) {
                    const int64_t S = 1024 * P + 5;
                    const auto first = packed_documents(B, S, 1024 * median, seed);
                    const std::vector<Runs> zigzag = zigzag_placement(S, P);
                    const auto ranks = balanced_placement(zigzag, first.data(), B, S);
                    const double before = imbalance(zigzag, first, B, S);
                    const double after = imbalance(ranks, first, B, S);
                    CAPTURE(P);
                    CAPTURE(B);
                    CAPTURE(median);
                    CAPTURE(before);
                    CAPTURE(after);
                    EXPECT(after <= 1.1);
                    EXPECT(after <= before);
                    expect_fair(ranks, zigzag, S);
                }
}

TEST_CASE("balance: any length, any mask; never worse than zigzag") {
    for (int P = 1; P <= 9; ++P)
        for (const int64_t S : {1, 2, 7, 16, 17, 64, 97, 251})
            for (uint64_t seed = 0; seed < 6; ++seed) {
                std::vector<int32_t> first = packed_documents(2, S, 1 + 3 * double(seed), seed);
                for (size_t i = 0; i < first.size(); ++i)  // some queries see nothing
                    if (random_bits(seed, 1, i) % 5 == 0) first[i] = int32_t(int64_t(i) % S + 1);
                if (seed == 5)
                    std::fill(first.begin(), first.end(), int32_t(S));  // nobody sees any
                const std::vector<Runs> zigzag = zigzag_placement(S, P);
                const auto ranks = balanced_placement(zigzag, first.data(), 2, S);
                expect_fair(ranks, zigzag, S);
                EXPECT(imbalance(ranks, first, 2, S) <= imbalance(zigzag, first, 2, S));
            }
}

TEST_CASE("balance: zigzag stays where it is good") {
    const int64_t S = 4096;
    const std::vector<Runs> zigzag = zigzag_placement(S, 4);
    EXPECT(balanced_placement(zigzag, nullptr, 1, S) == zigzag);
    const std::vector<int32_t> one(size_t(S), 0);
    EXPECT(balanced_placement(zigzag, one.data(), 1, S) == zigzag);
    std::vector<int32_t> window, even;
    for (int64_t i = 0; i < S; ++i) {
        window.push_back(int32_t(std::max<int64_t>(0, i - 63)));
        even.push_back(int32_t(i / 32 * 32));
    }
    EXPECT(balanced_placement(zigzag, window.data(), 1, S) == zigzag);
    EXPECT(balanced_placement(zigzag, even.data(), 1, S) == zigzag);
}

TEST_CASE("balance: one long document among short ones is dealt to all ranks") {
    const int64_t S = 8192, P = 4;
    std::vector<int32_t> first;
    for (int64_t i = 0; i < S; ++i) first.push_back(int32_t(i < S / 2 ? 0 : i / 16 * 16));
    const std::vector<Runs> zigzag = zigzag_placement(S, int(P));
    const auto ranks = balanced_placement(zigzag, first.data(), 1, S);
    EXPECT(imbalance(zigzag, first, 1, S) > 1.7);
    EXPECT(imbalance(ranks, first, 1, S) < 1.05);
    for (const Runs& runs : ranks) EXPECT(runs.size() <= 4);
}

TEST_CASE("balance: every mode, one batch after another") {
    // A long document among short ones, which moves with the batch; then no documents at all. What
    // the batch before was leaves nothing behind.
    const int64_t S = 97, B = 2;
    const auto documents = [&](int64_t begin) {
        std::vector<int32_t> first;
        for (int64_t i = 0; i < B * S; ++i) {
            const int64_t t = i % S;
            first.push_back(int32_t(t >= begin && t < begin + S / 2 ? begin : t / 4 * 4));
        }
        return first;
    };
    const std::vector<int32_t> early = documents(0), late = documents(S / 2);
    for (const int P : {2, 3, 4, 8})
        for (const SeqMode& mode : seq_modes())
            for (const MeshShape& shape : shapes_for(mode, P))
                for (const bool masked : {true, false}) {
                    WholeAttention whole =
                        make_whole({B, S, 3, 1, 4}, masked ? late : std::vector<int32_t>());
                    CAPTURE(mode.name);
                    CAPTURE(shape.str());
                    CAPTURE(masked);
                    EXPECT(run_case({mode.name, shape, true, early.data()}, whole) <= 1e-10);
                }
}

TEST_CASE("balance: a mode reports the imbalance that is left") {
    const int64_t S = 512;
    const int P = 4;
    std::vector<int32_t> first;
    for (int64_t i = 0; i < S; ++i) first.push_back(int32_t(i < S / 2 ? 0 : i / 4 * 4));
    const WholeAttention whole = make_whole({1, S, 2, 2, 4}, first);
    const auto reported = [&](const std::string& mode, const MeshShape& shape) {
        double found = 0;
        run_ranks(P, [&](Comm& world) {
            const RankResult r = run_rank(world, {mode, shape, true}, whole);
            if (world.rank() == 0) found = r.imbalance;
        });
        return found;
    };
    EXPECT(reported("ring", {.ring = P}) > 2);
    EXPECT(reported("zigzag_ring", {.ring = P}) < 1.05);
    EXPECT(reported("usp", {.ring = 2, .ulysses = 2}) < 1.05);
    EXPECT(reported("usp_ring", {.ring = 2, .ulysses = 2}) > 1.5);
}

}  // namespace torus
