// The pure functions of sequence parallelism: placement, head groups, step tables, choice of mode.
#include <set>

#include "comm/seq/schedule.h"
#include "test/test.h"

namespace torus {
namespace {

constexpr int64_t lengths[] = {0, 1, 2, 3, 7, 8, 9, 17, 64, 97};

std::vector<int> coverage(const std::vector<Runs>& ranks, int64_t S) {
    std::vector<int> held(static_cast<size_t>(S), 0);
    for (const Runs& runs : ranks)
        for (const TokenRun& r : runs) {
            EXPECT(r.count > 0);
            for (int64_t i = r.begin; i < r.end(); ++i) ++held[size_t(i)];
        }
    return held;
}

// How often each (query, key) is worked on, over all steps and ranks.
std::vector<int> pair_coverage(const Table& table, const RingPlan& plan, int64_t S,
                               const int32_t* first_key) {
    std::vector<int> seen(size_t(S * S), 0);
    for (const auto& step : table)
        for (const Work& w : step)
            for (const Piece& p : w.pieces) {
                EXPECT(w.q_lo <= p.q_row);
                EXPECT(p.q_row + p.q_rows <= w.q_hi);
                // Row numbers, positions and the range that travels agree.
                EXPECT(w.in_block(p.k_row) + p.k_rows <= w.k_rows());
                EXPECT(w.in_block(p.k_row + p.k_rows - 1) == w.in_block(p.k_row) + p.k_rows - 1);
                const auto tokens = [&](int rank, int64_t row, int64_t rows) {
                    std::vector<int64_t> all;
                    for (const TokenRun& r : sub_runs(plan.runs[size_t(rank)], row, rows))
                        for (int64_t i = r.begin; i < r.end(); ++i) all.push_back(i);
                    return all;
                };
                const auto queries = tokens(w.pair.q, p.q_row, p.q_rows);
                const auto keys = tokens(w.pair.k, p.k_row, p.k_rows);
                EXPECT(int64_t(queries.size()) == p.q_rows);
                EXPECT(int64_t(keys.size()) == p.k_rows);
                for (size_t j = 0; j < keys.size(); ++j) {
                    const int64_t key = p.k0 + int64_t(j);  // what the kernel takes it for
                    const bool is_position = key == keys[j];
                    if (first_key) EXPECT(is_position);
                    for (size_t i = 0; i < queries.size(); ++i) {
                        if (p.causal && key > p.q0 + int64_t(i)) continue;
                        if (first_key && key < first_key[queries[i]]) continue;
                        ++seen[size_t(queries[i] * S + keys[j])];
                    }
                }
            }
    return seen;
}

}  // namespace

TEST_CASE("placement: every token once, sizes within one") {
    for (int P = 1; P <= 9; ++P)
        for (const int64_t S : lengths) {
            for (const auto& ranks :
                 {contiguous_placement(S, P), halved_placement(S, P), zigzag_placement(S, P)}) {
                for (const int n : coverage(ranks, S)) EXPECT_EQ(n, 1);
                int64_t least = S, most = 0;
                for (const Runs& r : ranks) {
                    least = std::min(least, count_tokens(r));
                    most = std::max(most, count_tokens(r));
                }
                EXPECT(most - least <= 2);
            }
            int64_t end = 0;
            for (int i = 0; i < P; ++i) {
                const TokenRun part = part_of(S, P, i);
                EXPECT_EQ(part.begin, end);
                end = part.end();
            }
            EXPECT_EQ(end, S);
        }
    // No overflow, and no drift, at a size that only fits 64 bits.
    const TokenRun last = part_of(int64_t(1) << 60, 7, 6);
    EXPECT_EQ(last.end(), int64_t(1) << 60);
}

TEST_CASE("placement: rows of a part") {
    const Runs runs{{0, 3}, {10, 4}};
    EXPECT(sub_runs(runs, 1, 4) == Runs{{1, 2}, {10, 2}});
    EXPECT(sub_runs(runs, 3, 4) == Runs{{10, 4}});
    EXPECT(sub_runs(runs, 0, 0).empty());
    EXPECT(halved_placement(9, 3) ==
           std::vector<Runs>{{{0, 1}, {1, 2}}, {{3, 1}, {4, 2}}, {{6, 1}, {7, 2}}});
    EXPECT(joined(Runs{{0, 1}, {1, 2}, {5, 1}}) == Runs{{0, 3}, {5, 1}});
    EXPECT(zigzag_placement(8, 2) == std::vector<Runs>{{{0, 2}, {6, 2}}, {{2, 4}}});
}

TEST_CASE("head groups: every query head once, with its own kv head") {
    for (const auto& [H, Hk] : std::vector<std::pair<int64_t, int64_t>>{
             {4, 4}, {8, 2}, {6, 3}, {7, 1}, {12, 3}, {1, 1}, {28, 4}, {16, 16}})
        for (int n = 1; n <= 9; ++n) {
            std::vector<int> seen(static_cast<size_t>(H), 0);
            for (int i = 0; i < n; ++i) {
                const auto groups = head_groups(H, Hk, n, i);
                EXPECT(groups.size() <= 3);
                int64_t queries = 0;
                for (const HeadGroup& g : groups) {
                    EXPECT_EQ(g.queries % g.keys, 0);
                    queries += g.queries;
                    for (int64_t q = 0; q < g.queries; ++q) {
                        ++seen[size_t(g.q + q)];
                        // The kernel pairs query head q with kv head q / (queries / keys).
                        EXPECT_EQ(g.k + q / (g.queries / g.keys), (g.q + q) / (H / Hk));
                    }
                }
                EXPECT(queries <= (H + n - 1) / n);
            }
            for (const int s : seen) EXPECT_EQ(s, 1);
        }
}

TEST_CASE("schedule: a step's work is cut in two, with something for the end where it can be") {
    struct Want {
        Share all;
        Share early, late;
    };
    for (const Want& w : {
             Want{{0, 3, 0, 2, 0, 4}, {0, 2, 0, 2, 0, 4}, {2, 3, 0, 2, 0, 4}},      // pieces
             Want{{0, 1, 0, 3, 0, 4}, {0, 1, 0, 2, 0, 4}, {0, 1, 2, 3, 0, 4}},      // sequences
             Want{{0, 1, 0, 1, 0, 16}, {0, 1, 0, 1, 0, 12}, {0, 1, 0, 1, 12, 16}},  // heads
             Want{{0, 1, 0, 1, 0, 2}, {0, 1, 0, 1, 0, 1}, {0, 1, 0, 1, 1, 2}},
         }) {
        CHECK(share_of(w.all, false) == w.early);
        CHECK(share_of(w.all, true) == w.late);
    }
    for (const Share nothing_to_cut : {Share{0, 1, 0, 1, 0, 1}, Share{0, 0, 0, 1, 0, 1}}) {
        CHECK(share_of(nothing_to_cut, false) == nothing_to_cut);
        CHECK(share_of(nothing_to_cut, true).empty());
    }
}

// Runs of 1 to 3 tokens, dealt out so that each rank has many between those of the others.
static std::vector<Runs> scattered_placement(int64_t S, int P) {
    std::vector<Runs> ranks{size_t(P)};
    for (int64_t at = 0, i = 0; at < S; ++i) {
        const int64_t count = std::min(S - at, 1 + i * i % 3);
        append(ranks[size_t((i * i + i / 2) % P)], {at, count});
        at += count;
    }
    return ranks;
}

TEST_CASE("schedule: every visible pair exactly once") {
    using Make = Schedule (*)(int);
    using Place = std::vector<Runs> (*)(int64_t, int);
    struct Mode {
        Place place;
        Make schedule;
    };
    const Mode modes[] = {{contiguous_placement, ring_schedule},
                          {zigzag_placement, ring_schedule},
                          {halved_placement, dist_flash_schedule},
                          {scattered_placement, ring_schedule}};
    for (const Mode& mode : modes)
        for (int P = 1; P <= 9; ++P)
            for (const int64_t S : lengths) {
                const RingPlan plan{mode.place(S, P), mode.schedule(P)};
                std::vector<int32_t> windows, documents;
                for (int64_t i = 0; i < S; ++i) {
                    windows.push_back(int32_t(std::max<int64_t>(0, i - 6)));
                    documents.push_back(int32_t(i < S / 3 ? 0 : i < S / 2 ? S / 3 : S / 2));
                }
                for (const int32_t* first : {static_cast<const int32_t*>(nullptr),
                                             static_cast<const int32_t*>(windows.data()),
                                             static_cast<const int32_t*>(documents.data())}) {
                    const Table table = make_table(plan, first != nullptr, first, 1, S);
                    const auto seen = pair_coverage(table, plan, S, first);
                    bool right = true;
                    for (int64_t i = 0; i < S; ++i)
                        for (int64_t j = 0; j < S; ++j)
                            right = right && seen[size_t(i * S + j)] ==
                                                 (j <= i && (!first || j >= first[i]));
                    CAPTURE(P);
                    CAPTURE(S);
                    EXPECT(right);
                }
            }
}

TEST_CASE("schedule: balance of causal work") {
    const int64_t S = 9 * 8 * 7 * 5 * 2;
    for (int P = 2; P <= 9; ++P) {
        const auto of = [&](const std::vector<Runs>& runs, const Schedule& schedule) {
            return imbalance_of(make_table({runs, schedule}, false, nullptr, 1, S), nullptr, 1, S);
        };
        const double ring = of(contiguous_placement(S, P), ring_schedule(P));
        const double zigzag = of(zigzag_placement(S, P), ring_schedule(P));
        const double flash = of(halved_placement(S, P), dist_flash_schedule(P));
        CAPTURE(P);
        EXPECT(ring == doctest::Approx(2 - 1.0 / P).epsilon(0.001));
        EXPECT(zigzag < 1.001);
        EXPECT(flash < 1.001);
        EXPECT_EQ(dist_flash_schedule(P).size(), size_t(P / 2 + 1));
    }
}

TEST_CASE("schedule: only the keys that are seen travel") {
    // Zigzag: of an earlier rank only the first half is seen. Documents: nothing of the others'.
    const int64_t S = 64;
    const RingPlan plan{zigzag_placement(S, 4), ring_schedule(4)};
    const Table table = make_table(plan, false, nullptr, 1, S);
    for (int r = 0; r < 4; ++r)
        for (int t = 1; t < 4; ++t) {
            const Work& w = table[size_t(t)][size_t(r)];
            EXPECT_EQ(w.k_rows(), w.pair.k < r ? 8 : 16);
            EXPECT_EQ(w.pieces.size(), 1u);  // of all queries, or of those behind the keys
        }
    const RingPlan rows{halved_placement(S, 4), dist_flash_schedule(4)};
    std::vector<int32_t> own_shard(static_cast<size_t>(S));
    for (int64_t i = 0; i < S; ++i) own_shard[size_t(i)] = int32_t(i / 16 * 16);
    const Table alone = make_table(rows, true, own_shard.data(), 1, S);
    for (size_t t = 1; t < alone.size(); ++t)
        for (const Work& w : alone[t]) EXPECT(!w);
    // Two runs of keys, of each only the end: what is between them stays.
    std::vector<int32_t> ends(size_t(S), 0);
    for (int64_t i = 0; i < S; ++i) ends[size_t(i)] = int32_t(std::max<int64_t>(i - 3, 0));
    const RingPlan apart{{{{0, 16}, {32, 16}}, {{16, 16}, {48, 16}}}, ring_schedule(2)};
    const Table two = make_table(apart, true, ends.data(), 1, S);
    EXPECT(two[1][1].keys == std::vector<Span>{{13, 3, 0}, {29, 3, 3}});
    EXPECT_EQ(two[1][1].k_rows(), 6);
    EXPECT(two[1][0].keys == std::vector<Span>{{13, 3, 0}});
}

TEST_CASE("choice of mode and degrees") {
    const AttnDims d{1, 65536, 16, 4, 64};
    const auto choose = [&](const std::string& mode, int world, int sp, int ring, int ulysses,
                            int per_machine = 1 << 30) {
        return choose_parallel({.mode = mode,
                                .world = world,
                                .sp = sp,
                                .ring = ring,
                                .ulysses = ulysses,
                                .ranks_per_machine = per_machine},
                               d);
    };
    EXPECT_EQ(choose("zigzag_ring_attn", 8, 4, 0, 0).shape.str(), "dp 2 x ring 4 x ulysses 1");
    EXPECT_EQ(choose("ulysses", 8, 0, 0, 0).shape.str(), "dp 1 x ring 1 x ulysses 8");
    EXPECT_EQ(choose("usp", 8, 0, 0, 0).shape.str(), "dp 1 x ring 2 x ulysses 4");
    EXPECT_EQ(choose("usp", 8, 0, 4, 0).shape.str(), "dp 1 x ring 4 x ulysses 2");
    EXPECT_EQ(choose("usp", 8, 4, 2, 2).shape.str(), "dp 2 x ring 2 x ulysses 2");
    EXPECT_EQ(choose("usp", 6, 0, 0, 0).shape.str(), "dp 1 x ring 3 x ulysses 2");
    EXPECT_EQ(choose("data_parallel", 8, 0, 0, 0).shape.str(), "dp 8 x ring 1 x ulysses 1");
    EXPECT_EQ(choose("auto", 1, 0, 0, 0).mode, "data_parallel");
    EXPECT_EQ(choose("auto", 8, 0, 2, 4).mode, "usp");

    // auto: ulysses within a machine when no kv head is cut, else zigzag_ring; usp across machines.
    const auto automatic = [&](int sp, int per_machine, int64_t Hk) {
        const AttnDims dims{1, 65536, 24, Hk, 64};
        return choose_parallel(
                   {.mode = "auto", .world = 24, .sp = sp, .ranks_per_machine = per_machine}, dims)
            .reason;
    };
    const auto starts = [](const std::string& reason, const std::string& with) {
        CAPTURE(reason);
        EXPECT(reason.rfind(with, 0) == 0);
    };
    starts(choose("auto", 8, 0, 0, 0).reason, "ulysses on dp 4 x ring 1 x ulysses 2: measured");
    starts(automatic(4, 8, 4), "ulysses on dp 6 x ring 1 x ulysses 4: measured");
    starts(automatic(3, 1 << 30, 6), "ulysses on dp 8 x ring 1 x ulysses 3: measured");
    starts(automatic(8, 8, 4), "zigzag_ring on dp 3 x ring 8 x ulysses 1: 8 ranks do not divide 4");
    starts(automatic(8, 8, 1), "zigzag_ring on dp 3 x ring 8 x ulysses 1: 8 ranks do not divide 1");
    starts(automatic(24, 8, 4), "usp on dp 1 x ring 6 x ulysses 4: all-to-all within");
    starts(automatic(24, 8, 24), "usp on dp 1 x ring 3 x ulysses 8: all-to-all within");
    // Six ranks a machine: every other group of four lies on two machines.
    starts(automatic(4, 6, 4), "usp on dp 6 x ring 2 x ulysses 2: all-to-all within");
    starts(automatic(24, 8, 1), "zigzag_ring on dp 1 x ring 24 x ulysses 1: no group of ranks");
    starts(automatic(24, 1, 24), "zigzag_ring on dp 1 x ring 24 x ulysses 1: no group of ranks");

    const auto message = [&](const ParallelRequest& ask, const AttnDims& dims) {
        try {
            choose_parallel(ask, dims);
        } catch (const Error& e) {
            EXPECT(e.code == Exit::usage);
            return std::string(e.what());
        }
        return std::string("no error");
    };
    const auto says = [](const std::string& text, const char* part) {
        CAPTURE(text);
        EXPECT(text.find(part) != std::string::npos);
    };
    says(message({.mode = "zigzag", .world = 4}, d), "the modes are data_parallel, ulysses");
    says(message({.mode = "ring", .world = 8, .sp = 3}, d),
         "--sp 3: does not divide the 8 ranks; nearest: 2 or 4");
    says(message({.mode = "data_parallel", .world = 8, .sp = 2}, d), "--sp 2: data_parallel");
    says(message({.mode = "ring", .world = 8, .ulysses = 2}, d), "--ulysses 2: ring has no");
    says(message({.mode = "ulysses", .world = 8, .ring = 2}, d), "--ring 2: ulysses has no ring");
    says(message({.mode = "ulysses", .world = 8, .ulysses = 2}, d), "use --ulysses 8");
    says(message({.mode = "usp", .world = 8, .ulysses = 3}, d), "nearest: 2 or 4");
    says(message({.mode = "usp", .world = 8, .ring = 2, .ulysses = 2}, d), "");
    says(message({.mode = "usp", .world = 8, .sp = 8, .ring = 2, .ulysses = 2}, d), "use --ring 4");
    says(message({.mode = "ring", .world = 2, .tp = 2}, d), "use --sp 2");
    says(message({.mode = "ring", .world = 2, .sp = -1}, d), "--sp -1");
    says(message({.mode = "ring", .world = 2}, {1, 0, 4, 4, 8}), "--seq-length 0");
    says(message({.mode = "ring", .world = 2}, {1, 8, 6, 4, 8}), "nearest: 3 or 6");
}

TEST_CASE("ulysses takes two slices of heads where messages are large and no rank cuts a kv head") {
    const auto kernels = make_cpu_kernels(DType::f32);
    const auto slices = [&](int ranks, const AttnDims& d) {
        Mesh mesh = make_plan_mesh({.ulysses = ranks}, 0);
        Layout device, pinned;
        make_seq_parallel("ulysses", *kernels, mesh, d)->plan(device, pinned);
        int count = 0;
        while (device.has(concat("seq/ulysses", count))) ++count;
        return count;
    };
    EXPECT(slices(2, {1, 65536, 16, 16, 128}) == 2);
    EXPECT(slices(4, {1, 65536, 32, 8, 128}) == 2);
    EXPECT(slices(2, {1, 65536, 16, 1, 128}) == 1);  // one kv head for two ranks
    EXPECT(slices(2, {1, 65536, 6, 6, 128}) == 1);   // three a rank
    EXPECT(slices(2, {1, 1024, 16, 16, 128}) == 1);  // two messages of 3 MiB
    EXPECT(slices(2, {1, 2048, 16, 16, 128}) == 2);  // of 6
}

TEST_CASE("names and aliases of modes are unique") {
    std::set<std::string> names;
    for (const SeqMode& m : seq_modes()) {
        EXPECT(names.insert(m.name).second);
        EXPECT(names.insert(m.alias).second);
        EXPECT_EQ(find_seq_mode(m.alias).name, m.name);
    }
}

}  // namespace torus
