// Every registered mode gives what one rank gives: o, lse, dq, dk, dv within 1e-10 in fp64, over
// ranks, heads, sequence lengths, batch and documents. A selection by default; the whole grid with
// --no-skip.
#include <cmath>
#include <mutex>
#include <random>
#include <set>

#include "test/comm/ranks.h"
#include "test/comm/seq_case.h"
#include "test/test.h"

namespace torus {
namespace {

constexpr double tolerance = 1e-10;

struct Heads {
    int64_t H, Hk;
};
constexpr Heads all_heads[] = {{4, 4}, {8, 2}, {6, 3}, {7, 1}, {12, 3}};
constexpr Documents all_documents[] = {Documents::none, Documents::at_edges, Documents::scattered,
                                       Documents::unannounced};

std::set<int64_t> lengths_for(int P) { return {1, std::max(1, P - 1), P, P + 1, 2 * P + 1, 97}; }

int run_modes(const AttnDims& d, Documents documents, int P) {
    const WholeAttention whole = make_whole(d, documents, P);
    int cases = 0;
    for (const SeqMode& mode : seq_modes())
        for (const MeshShape& shape : shapes_for(mode, P))
            for (const int slices : slices_for(shape, d.Hk)) {
                const bool announce = documents != Documents::unannounced;
                const double error = run_case({mode.name, shape, announce, nullptr, slices}, whole);
                ++cases;
                CAPTURE(mode.name);
                CAPTURE(shape.str());
                CAPTURE(slices);
                CAPTURE(d.B);
                CAPTURE(d.S);
                CAPTURE(d.H);
                CAPTURE(d.Hk);
                CAPTURE(int(documents));
                EXPECT(error <= tolerance);
            }
    return cases;
}

// The first key of each query, for sequences that are cut differently: into documents, some as
// short as one token, with a window in some, and with queries that see nothing in others.
std::vector<int32_t> random_first_key(std::mt19937& random, int64_t B, int64_t S) {
    const auto below = [&](int64_t n) { return int64_t(random() % uint32_t(n)); };
    std::vector<int32_t> first_key;
    for (int64_t b = 0; b < B; ++b) {
        const int64_t longest = 1 + below(S), window = below(3) ? S : 1 + below(S);
        const int64_t blind = below(4) ? 0 : 1 + below(5);  // one query in so many
        int64_t begin = 0, end = 0;
        for (int64_t i = 0; i < S; ++i) {
            if (i == end) begin = i, end = i + 1 + below(longest);
            const int64_t first = std::max(begin, i + 1 - window);
            first_key.push_back(int32_t(blind && below(blind) == 0 ? i + 1 + below(S) : first));
        }
    }
    return first_key;
}

// Shapes and documents that no table lists: every mode, degree and number of head slices on each.
int run_random(uint32_t seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return int64_t(random() % uint32_t(n)); };
    const int P = 1 + int(below(8));
    AttnDims d;
    d.Hk = 1 + below(6), d.H = d.Hk * (1 + below(4)), d.D = 1 + below(6), d.B = 1 + below(4);
    d.S = below(3) ? 1 + below(4 * P + 4) : 1 + below(150);
    const std::vector<int32_t> none, documents = random_first_key(random, d.B, d.S);
    const std::vector<int32_t> earlier = random_first_key(random, d.B, d.S);
    const WholeAttention whole = make_whole(d, below(3) ? documents : none);
    // Who was told of a batch's documents has to be told of the next one's.
    const bool others_before = below(2) > 0, announce = others_before || below(4) > 0;
    int cases = 0;
    for (const SeqMode& mode : seq_modes())
        for (const MeshShape& shape : shapes_for(mode, P))
            for (const int slices : slices_for(shape, d.Hk)) {
                const double error = run_case(
                    {mode.name, shape, announce, others_before ? earlier.data() : nullptr, slices},
                    whole);
                ++cases;
                CAPTURE(seed);
                CAPTURE(mode.name);
                CAPTURE(shape.str());
                CAPTURE(slices);
                EXPECT(error <= tolerance);
            }
    return cases;
}

}  // namespace

TEST_CASE("every mode equals one rank: random shapes and documents") {
    int cases = 0;
    for (uint32_t seed = 1; seed <= 60; ++seed) cases += run_random(seed);
    MESSAGE(cases, " cases");
}

TEST_CASE("every mode equals one rank: more random shapes and documents" * doctest::skip()) {
    int cases = 0;
    for (uint32_t seed = 61; seed <= 6000; ++seed) cases += run_random(seed);
    MESSAGE(cases, " cases");
}

TEST_CASE("every mode equals one rank: selection") {
    int cases = 0;
    for (const int P : {1, 2, 3, 4, 8})
        for (const int64_t S : lengths_for(P)) {
            // Batch sizes take turns; everything else is crossed.
            for (int i = 0; i < 5; ++i)
                for (const Documents documents : all_documents) {
                    const int64_t B = (S + i + int(documents)) % 3 ? 1 : 3;
                    cases += run_modes({B, S, all_heads[i].H, all_heads[i].Hk, 4}, documents, P);
                }
        }
    MESSAGE(cases, " cases");
}

TEST_CASE("every mode equals one rank: whole grid" * doctest::skip()) {
    int cases = 0;
    for (const int P : {1, 2, 3, 4, 5, 6, 8})
        for (const int64_t S : lengths_for(P))
            for (const Heads& h : all_heads)
                for (const int64_t B : {1, 3})
                    for (const Documents documents : all_documents)
                        cases += run_modes({B, S, h.H, h.Hk, 4}, documents, P);
    MESSAGE(cases, " cases");
}

TEST_CASE("every mode equals one rank: 2999 tokens" * doctest::skip()) {
    int cases = 0;
    for (const int P : {2, 3, 4, 8})
        for (const Documents documents : all_documents)
            cases += run_modes({1, 2999, 6, 3, 2}, documents, P);
    MESSAGE(cases, " cases");
}

TEST_CASE("scores beyond the range of exp") {
    // lse of blocks differ by far more than 709, where exp overflows in fp64.
    const WholeAttention whole = make_whole({2, 40, 4, 2, 4}, Documents::none, 1, 1500);
    double most = 0;
    for (const double l : whole.lse) most = std::max(most, l);
    EXPECT(most > 2000);
    for (const int P : {2, 3, 4, 5})
        for (const SeqMode& mode : seq_modes())
            for (const MeshShape& shape : shapes_for(mode, P)) {
                CAPTURE(mode.name);
                CAPTURE(P);
                EXPECT(run_case({mode.name, shape, true}, whole) <= tolerance);
            }
}

TEST_CASE("mpi: every mode equals one rank") {
    run_mpi([](Comm& world) {
        const int P = world.size();
        for (const int64_t S : {int64_t(1), int64_t(2 * P + 1), int64_t(97)})
            for (const Heads& h : all_heads)
                for (const SeqMode& mode : seq_modes())
                    for (const MeshShape& shape : shapes_for(mode, P)) {
                        const auto documents = all_documents[size_t(S + h.H + shape.ring) % 4];
                        const WholeAttention whole = make_whole({2, S, h.H, h.Hk, 4}, documents, P);
                        const bool announce = documents != Documents::unannounced;
                        const int slices = slices_for(shape, h.Hk).back();
                        const RankResult r =
                            run_rank(world, {mode.name, shape, announce, nullptr, slices}, whole);
                        require(largest_error(r, whole) <= tolerance, Exit::internal, mode.name,
                                " on ", shape.str(), ", ", S, " tokens, ", h.H, " heads");
                    }
    });
}

TEST_CASE("bytes sent are those of the algorithm") {
    // Elements per rank of q (and o, dq, do) and of k (and v, dk, dv), S divisible by 2P.
    const int64_t P = 4, S = 64, H = 8, Hk = 4, D = 4, e = 8;
    const WholeAttention whole = make_whole({1, S, H, Hk, D}, Documents::none, 1);
    const int64_t q = S / P * H * D * e, k = S / P * Hk * D * e, stats = S / P * H * e;
    const auto sent = [&](const std::string& mode, const MeshShape& shape,
                          const WholeAttention& w) {
        std::mutex mutex;
        int64_t sum = 0;
        run_ranks(int(P), [&](Comm& world) {
            const RankResult r = run_rank(world, {mode, shape, true}, w);
            const std::lock_guard lock(mutex);
            sum += r.bytes_sent;
        });
        return sum;
    };
    // Forward 2 (K, V), backward 2 + 2 (dK, dV), for each pair of ranks with something to see.
    EXPECT_EQ(sent("ring", {.ring = 4}, whole), 6 * k * (P * (P - 1) / 2));
    // Of an earlier rank only half of the keys are seen.
    EXPECT_EQ(sent("zigzag_ring", {.ring = 4}, whole), 6 * k * (P * (P - 1) / 2) * 3 / 2);
    // Distances 1 and 2 fetch keys (5 pairs). Distance 3 (1 pair) and half the queries of distance
    // 2 (2 pairs) go to helpers: q there, o and lse back; q, dout, lse and delta there, dq back.
    EXPECT_EQ(sent("dist_flash", {.ring = 4}, whole), 6 * k * 5 + 2 * (5 * q + 3 * stats));
    // q, k, v, then o and lse; q, dout, k, v, lse, delta, then dq, dk, dv.
    EXPECT_EQ(sent("ulysses", {.ulysses = 4}, whole),
              P * (P - 1) * (5 * q + 6 * k + 3 * stats) / P);
    // Documents within shards: a ring has nothing to send.
    WholeAttention shards = whole;
    for (int64_t i = 0; i < S; ++i) shards.first_key.push_back(int32_t(i / (S / P) * (S / P)));
    EXPECT_EQ(sent("ring", {.ring = 4}, shards), 0);
    EXPECT_EQ(sent("dist_flash", {.ring = 4}, shards), 0);
}

TEST_CASE("the error does not grow with the number of ranks") {
    // Activations in fp32 against fp64: relative L2 error of the gradients.
    const WholeAttention whole = make_whole({1, 512, 2, 2, 8}, Documents::none, 1);
    for (const SeqMode& mode : seq_modes()) {
        if (!mode.ring || mode.ulysses) continue;
        double error[2] = {};
        for (const int i : {0, 1}) {
            const int P = i ? 8 : 2;
            std::mutex mutex;
            SquareSums sums;
            run_ranks(P, [&](Comm& world) {
                const RankResult r =
                    run_rank(world, {mode.name, {.ring = P}, true}, whole, DType::f32);
                const SquareSums mine = gradient_error(r, whole);
                const std::lock_guard lock(mutex);
                sums.error += mine.error;
                sums.norm += mine.norm;
            });
            error[i] = std::sqrt(sums.error / sums.norm);
        }
        CAPTURE(mode.name);
        CAPTURE(error[0]);
        CAPTURE(error[1]);
        EXPECT(error[0] > 1e-9);
        EXPECT(error[1] <= 1.2 * error[0]);
        EXPECT(error[1] < 1e-6);
    }
}

}  // namespace torus
