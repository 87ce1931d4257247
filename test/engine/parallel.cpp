// The whole step on several ranks equals one rank in fp64: loss, every gradient, and AdamW steps,
// in every registered sequence mode, over ranks, heads, lengths, batch and masks, with data
// parallelism and accumulation. Ranks are threads of this process. A selection by default; the
// whole grid with
// --no-skip.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "test/comm/ranks.h"
#include "test/comm/seq_case.h"
#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

enum class Mask : uint8_t {
    full,         // every target counts
    one_target,   // of the whole step
    empty_shard,  // none that the last rank holds in any mode
    documents,    // they end at 0, at S-1 and at the edges of shards
    scattered,    // documents anywhere; a sequence and the later half of the others do not count
};
constexpr Mask grid_masks[] = {Mask::full, Mask::one_target, Mask::empty_shard, Mask::documents};
constexpr std::pair<int64_t, int64_t> grid_heads[] = {{4, 4}, {8, 2}, {6, 3}, {7, 1}, {12, 3}};
constexpr int grid_ranks[] = {1, 2, 3, 4, 8};

std::set<int64_t> lengths_for(int P) { return {1, std::max(1, P - 1), P, P + 1, 2 * P + 1, 97}; }

ModelConfig model_with(int64_t H, int64_t Hk) {
    ModelConfig m = tiny_config(H == Hk ? "gpt2" : "llama");
    m.H = H, m.Hk = Hk, m.D = 2, m.C = H * m.D, m.F = H == Hk ? 4 * m.C : 20;
    m.max_T = 2999;
    return m;
}

struct Case {
    std::string mode;
    MeshShape shape;
    int64_t B = 1;  // sequences of a micro-batch
    int accumulate = 1;
    int steps = 10;
    bool sum_by_exchange = false;

    int64_t sequences() const { return B * shape.dp * accumulate; }
};

struct Outcome {
    std::vector<double> losses;     // mean loss before each step
    std::vector<double> gradients;  // of the first step, summed over ranks
    std::vector<double> weights;    // after the steps
};

Batch rows_of(const Batch& whole, int64_t first, int64_t count) {
    Batch part;
    part.B = count, part.T = whole.T;
    auto cut = [&](const std::vector<int32_t>& v) {
        return std::vector<int32_t>(v.begin() + first * whole.T,
                                    v.begin() + (first + count) * whole.T);
    };
    part.ids = cut(whole.ids), part.targets = cut(whole.targets);
    part.pos = cut(whole.pos), part.first_key = cut(whole.first_key);
    part.valid =
        std::count_if(part.targets.begin(), part.targets.end(), [](int32_t t) { return t >= 0; });
    return part;
}

Outcome train(World& world, const ModelConfig& model, const Case& l, bool documents,
              const Batch& whole) {
    world.arrange({l.mode, l.shape, ""});
    Config settings;
    settings.grad_clip = 0.5;
    TinyMachine t(model,
                  {.B = l.B,
                   .S = whole.T,
                   .document_mask = documents,
                   .mesh = &world.mesh(),
                   .mode = l.mode,
                   .all = &world.data(),
                   .sum_by_exchange = l.sum_by_exchange},
                  DType::f64, settings);
    Machine& m = *t.machine;
    Outcome out;
    for (int step = 0; step < l.steps; ++step) {
        m.step->begin(m.stream(), l.accumulate);
        for (int64_t a = 0; a < l.accumulate; ++a)
            m.step->forward_backward(m.stream(),
                                     rows_of(whole, (a * world.dp() + world.dp_rank()) * l.B, l.B),
                                     1 / double(whole.valid));
        world.data().all_reduce(m.stream(), m.step->loss_sum());
        out.losses.push_back(read_f64(m, m.step->loss_sum()) / double(whole.valid));
        if (step == 0) {
            out.gradients.assign(t.params().gradients.as<double>(),
                                 t.params().gradients.as<double>() + t.params().elements());
        }
        m.optimizer->step(m.stream(), 1e-2);
    }
    out.weights.assign(t.params().weights.as<double>(),
                       t.params().weights.as<double>() + t.params().elements());
    return out;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE_TRUE(a.size() == b.size());
    double worst = 0, scale = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double d = std::fabs(a[i] - b[i]);
        if (!(d <= worst)) worst = d;
        scale = std::max(scale, std::fabs(a[i]));
    }
    return worst / scale;
}

// What the last of P ranks holds in some mode.
std::vector<TokenRun> held_by_last(const ModelConfig& model, int64_t S, int P) {
    std::vector<TokenRun> all;
    const auto kernels = make_cpu_kernels(DType::f64);
    for (const SeqMode& mode : seq_modes()) {
        if (!mode.ring && !mode.ulysses) continue;
        for (const MeshShape& shape : shapes_for(mode, P)) {
            Mesh mesh = make_plan_mesh(shape, P - 1);
            const auto runs =
                make_seq_parallel(mode.name, *kernels, mesh, {1, S, model.H, model.Hk, model.D})
                    ->placement();
            all.insert(all.end(), runs.begin(), runs.end());
        }
    }
    return all;
}

// One model, length and mask: batches, and what one rank makes of them, kept for all modes.
class Problem {
public:
    Problem(ModelConfig model, int64_t S, Mask mask, int P)
        : model_(std::move(model)), S_(S), P_(P), mask_(mask) {
        if (mask == Mask::empty_shard) last_ = held_by_last(model_, S, P);
    }

    void check(const Case& l) {
        INFO(model_.family, " ", model_.H, "/", model_.Hk, " ", l.mode, " on ", l.shape.str(), ", ",
             l.B, " x ", S_, " tokens, accumulates ", l.accumulate, ", ", l.steps, " steps, mask ",
             int(mask_));
        const Batch whole = batch(l.sequences());
        const Outcome& one = alone(whole, l.steps);
        std::vector<Outcome> many(size_t(l.shape.size()));
        run_ranks(l.shape.size(), [&](Comm& comm) {
            World world(comm);
            const int rank = world.rank();
            many[size_t(rank)] = train(world, model_, l, documents(), whole);
        });
        EXPECT(largest_difference(one.losses, many[0].losses) <= 1e-10);
        EXPECT(largest_difference(one.gradients, many[0].gradients) <= 1e-10);
        EXPECT(largest_difference(one.weights, many[0].weights) <= 1e-9);
        for (const Outcome& o : many)  // replicas are the same bits
            EXPECT((o.losses == many[0].losses && o.gradients == many[0].gradients &&
                    o.weights == many[0].weights));
    }

private:
    bool documents() const { return mask_ == Mask::documents || mask_ == Mask::scattered; }

    Batch batch(int64_t sequences) const {
        Batch b = random_batch(model_, sequences, S_, 17,
                               {.masked = mask_ == Mask::scattered, .documents = documents()});
        for (int64_t i = 0; i < sequences * S_; ++i) {
            int32_t& target = b.targets[size_t(i)];
            const int64_t s = i / S_, t = i % S_;
            if (mask_ == Mask::one_target && (s != sequences - 1 || t != S_ / 2)) target = -100;
            if (mask_ == Mask::scattered && (s == 0 || t >= (S_ + 1) / 2)) target = -100;
            for (const TokenRun& r : last_)
                if (t >= r.begin && t < r.end()) target = -100;
            if (mask_ == Mask::documents) {
                bool starts = t <= 1 || t == S_ - 1;
                for (int p = 0; p < 2 * P_; ++p) starts = starts || t == S_ * p / (2 * P_);
                if (s % 2) starts = t == 0 || t == S_ / 2;
                b.first_key[size_t(i)] = starts ? int32_t(t) : b.first_key[size_t(i - 1)];
            }
        }
        b.valid = rows_of(b, 0, sequences).valid;
        if (b.valid == 0) b.targets[0] = 1, b.valid = 1;
        return b;
    }

    const Outcome& alone(const Batch& whole, int steps) {
        Outcome& one = alone_[{whole.B, steps}];
        if (!one.losses.empty()) return one;
        run_ranks(1, [&](Comm& comm) {
            World world(comm);
            one =
                train(world, model_, {"data_parallel", {}, whole.B, 1, steps}, documents(), whole);
        });
        return one;
    }

    ModelConfig model_;
    int64_t S_;
    int P_;
    Mask mask_;
    std::vector<TokenRun> last_;
    std::map<std::pair<int64_t, int>, Outcome> alone_;  // by sequences and steps
};

// `l` in every mode on every mesh of P ranks, or of P for each of `dp` groups. The number of cases.
int check_modes(Problem& problem, Case l, int P, int dp = 1) {
    int cases = 0;
    for (const SeqMode& mode : seq_modes())
        for (const MeshShape& shape : shapes_for(mode, P)) {
            l.mode = mode.name, l.shape = shape;
            l.sum_by_exchange = cases % 2 == 1;
            l.shape.dp *= dp;
            problem.check(l);
            ++cases;
        }
    return cases;
}

}  // namespace

TEST_CASE("every mode equals one rank: loss, gradients, ten steps") {
    for (const std::string& name : family_names())
        for (int P : {2, 3}) {
            Problem full(tiny_config(name), 9, Mask::full, P);
            Problem scattered(tiny_config(name), 7, Mask::scattered, P);
            check_modes(full, {.B = 2}, P);
            check_modes(scattered, {.B = 3}, P);
        }
}

TEST_CASE("data parallelism, sequence parallelism and accumulation together") {
    Problem problem(tiny_config("llama"), 8, Mask::scattered, 2);
    check_modes(problem, {.accumulate = 3}, 2, 2);
}

TEST_CASE("gradients are summed by exchanges when asked for, on one machine") {
    Config c;
    EXPECT(!sums_by_exchange(c, 8, 8));
    c.exchange = Exchange::copy;
    EXPECT(sums_by_exchange(c, 8, 8));
    EXPECT(!sums_by_exchange(c, 8, 4));
}

TEST_CASE("fewer tokens than ranks") {
    Problem problem(tiny_config("gpt2"), 3, Mask::full, 4);
    check_modes(problem, {}, 4);
}

TEST_CASE("every mode equals one rank: selection of heads, lengths, batch and masks") {
    std::set<std::string> seen;  // pairs of values that met
    int cases = 0;
    uint64_t n = 0;
    for (const int P : grid_ranks)
        for (const Mask mask : grid_masks)
            for (const int64_t S : lengths_for(P)) {
                const auto pick = [&](uint64_t axis, uint32_t of) {
                    return random_bits(5, axis, n) % of;
                };
                const auto [H, Hk] = grid_heads[pick(0, 5)];
                const int64_t B = pick(1, 2) ? 1 : 3;
                ++n;
                for (const auto& pair :
                     {concat("batch ", B, " mask ", int(mask)),
                      concat("heads ", H, " mask ", int(mask)), concat("heads ", H, " ranks ", P)})
                    seen.insert(pair);
                Problem problem(model_with(H, Hk), S, mask, P);
                cases += check_modes(problem, {.B = B, .steps = S < 97 ? 3 : 1}, P);
            }
    MESSAGE(cases, " cases");
    EXPECT_EQ(seen.size(), 2 * 4 + 5 * 4 + 5 * 5);
}

TEST_CASE("the whole grid: one step" * doctest::skip()) {
    int cases = 0;
    for (const int P : grid_ranks)
        for (const auto& [H, Hk] : grid_heads)
            for (const Mask mask : grid_masks)
                for (const int64_t S : lengths_for(P)) {
                    Problem problem(model_with(H, Hk), S, mask, P);
                    for (const int64_t B : {1, 3})
                        cases += check_modes(problem, {.B = B, .steps = 1}, P);
                }
    MESSAGE(cases, " cases");
}

TEST_CASE("the whole grid: ten steps with data parallelism and accumulation" * doctest::skip()) {
    int cases = 0;
    for (const int P : {1, 2, 3, 4})
        for (const auto& [H, Hk] : grid_heads)
            for (const Mask mask : grid_masks)
                for (const int64_t S : lengths_for(P)) {
                    if (S == 97 && H != 6) continue;
                    Problem problem(model_with(H, Hk), S, mask, P);
                    cases += check_modes(problem, {.accumulate = 3}, P, 2);
                }
    MESSAGE(cases, " cases");
}

TEST_CASE("the whole grid: 2999 tokens" * doctest::skip()) {
    int cases = 0;
    for (const int P : grid_ranks)
        for (const Mask mask : grid_masks) {
            Problem problem(model_with(6, 3), 2999, mask, P);
            cases += check_modes(problem, {.steps = 1}, P);
        }
    MESSAGE(cases, " cases");
}
