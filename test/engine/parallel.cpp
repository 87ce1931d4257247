// The whole step on several ranks equals one rank in fp64: loss, every gradient, and ten AdamW
// steps, in every registered sequence mode, with data parallelism, accumulation, ignored targets
// and packed documents. Ranks are threads of this process.
#include <algorithm>
#include <cmath>

#include "test/comm/ranks.h"
#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

struct Case {
    std::string mode;
    int world;  // ranks
    int sp;     // of them, ranks that share a sequence
    int64_t S;
    BatchOptions batch;
    int accumulate = 1;
};

struct Outcome {
    std::vector<double> losses;     // mean loss before each step
    std::vector<double> gradients;  // of the first step, summed over ranks
    std::vector<double> weights;    // after the steps
};

constexpr int64_t sequences = 6;  // of one optimizer step, over all ranks and micro-batches
constexpr int steps = 10;

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

Outcome train(World& world, const ModelConfig& model, const Case& l, const Batch& whole) {
    world.arrange(choose_parallel({.mode = l.mode, .world = l.world, .sp = l.sp},
                                  {.B = 1, .S = l.S, .H = model.H, .Hk = model.Hk, .D = model.D}));
    const int64_t B = sequences / world.dp() / l.accumulate;
    Config settings;
    settings.grad_clip = 0.5;
    TinyMachine t(model,
                  {.B = B,
                   .S = l.S,
                   .document_mask = l.batch.documents,
                   .mesh = &world.mesh(),
                   .mode = world.choice().mode,
                   .all = &world.data()},
                  DType::f64, settings);
    Machine& m = *t.machine;
    Outcome out;
    for (int step = 0; step < steps; ++step) {
        m.step->begin(m.stream(), l.accumulate);
        for (int64_t a = 0; a < l.accumulate; ++a)
            m.step->forward_backward(m.stream(),
                                     rows_of(whole, (a * world.dp() + world.dp_rank()) * B, B),
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

void check(const ModelConfig& model, const Case& l) {
    INFO(model.family, " ", l.mode, " world ", l.world, " sp ", l.sp, " S ", l.S);
    Batch whole = random_batch(model, sequences, l.S, 17, l.batch);
    if (l.batch.masked)  // one sequence and the second half of all others have no valid target
        for (int64_t i = 0; i < sequences * l.S; ++i)
            if (i < l.S || i % l.S >= (l.S + 1) / 2) whole.targets[size_t(i)] = -100;
    whole.valid = rows_of(whole, 0, sequences).valid;
    if (whole.valid == 0) whole.targets[0] = 1, whole.valid = 1;

    const Case alone{.mode = "data_parallel", .world = 1, .sp = 1, .S = l.S, .batch = l.batch};
    Outcome one;
    run_ranks(1, [&](Comm& comm) {
        World world(comm);
        one = train(world, model, alone, whole);
    });
    std::vector<Outcome> many(size_t(l.world));
    run_ranks(l.world, [&](Comm& comm) {
        World world(comm);
        const int rank = world.rank();
        many[size_t(rank)] = train(world, model, l, whole);
    });
    for (const Outcome& o : many) {
        EXPECT(largest_difference(one.losses, o.losses) <= 1e-10);
        EXPECT(largest_difference(one.gradients, o.gradients) <= 1e-10);
        EXPECT(largest_difference(one.weights, o.weights) <= 1e-9);
        EXPECT(o.weights == many[0].weights);  // replicas stay the same bits
    }
}

}  // namespace

TEST_CASE("every mode equals one rank: loss, gradients, ten steps") {
    for (const SeqMode& mode : seq_modes()) {
        for (const std::string& name : family_names()) {
            const ModelConfig model = tiny_config(name);
            for (int P : {2, 3}) {
                const int sp = mode.ring || mode.ulysses ? P : 1;
                check(model, {.mode = mode.name, .world = P, .sp = sp, .S = 9});
                check(model, {.mode = mode.name,
                              .world = P,
                              .sp = sp,
                              .S = 7,
                              .batch = {.masked = true, .documents = true}});
            }
        }
    }
}

TEST_CASE("data parallelism, sequence parallelism and accumulation together") {
    const ModelConfig model = tiny_config("llama");
    for (const SeqMode& mode : seq_modes()) {
        const int sp = mode.ring || mode.ulysses ? 2 : 1;
        check(model, {.mode = mode.name,
                      .world = 2 * sp,
                      .sp = sp,
                      .S = 8,
                      .batch = {.masked = true},
                      .accumulate = 3});
    }
}

TEST_CASE("fewer tokens than ranks") {
    for (const SeqMode& mode : seq_modes()) {
        if (!mode.ring && !mode.ulysses) continue;
        check(tiny_config("gpt2"), {.mode = mode.name, .world = 4, .sp = 4, .S = 3});
    }
}
