// The whole step on tiny models of every family: gradients against central differences, recompute
// and accumulation against the plain run, the memory plan against the allocations.
#include <cmath>
#include <cstring>

#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr int64_t B = 2, S = 7;

std::vector<double> copy_of(const Tensor& t) {
    return {t.as<double>(), t.as<double>() + t.numel()};
}

// Elements of a parameter to probe: the one of largest gradient and a few at random.
std::vector<int64_t> probes(const Tensor& gradient, uint64_t seed) {
    int64_t largest = 0;
    for (int64_t i = 0; i < gradient.numel(); ++i)
        if (std::fabs(gradient.as<double>()[i]) > std::fabs(gradient.as<double>()[largest]))
            largest = i;
    std::vector<int64_t> out = {largest};
    for (uint64_t i = 0; i < 5; ++i)
        out.push_back(int64_t(random_bits(seed, 5, i) % uint64_t(gradient.numel())));
    return out;
}

void check_gradients(const ModelConfig& model, const Batch& batch, bool documents) {
    TinyMachine t(model, {.B = B, .S = S, .document_mask = documents});
    t.gradients(batch, 1 / double(batch.valid));
    for (const Component& c : t.params().components()) {
        for (const Param& p : c.params) {
            const Tensor w = t.params().part(t.params().weights, p);
            const Tensor dw = t.params().part(t.params().gradients, p);
            double scale = 0, worst = 0;
            for (int64_t i : probes(dw, uint64_t(p.offset))) {
                double& x = w.as<double>()[i];
                const double h = 1e-5, old = x;
                x = old + h;
                const double up = t.loss(batch);
                x = old - h;
                const double down = t.loss(batch);
                x = old;
                scale = std::max(scale, std::fabs(dw.as<double>()[i]));
                worst = std::max(worst, std::fabs((up - down) / (2 * h) - dw.as<double>()[i]));
            }
            INFO(c.name, " ", p.spec.name);
            EXPECT(scale > 0);
            EXPECT(worst <= 1e-6 * scale + 1e-10);  // 1e-10: rounding of the loss over 2h
        }
    }
}

}  // namespace

TEST_CASE("whole-model gradients equal central differences") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        check_gradients(m.config, random_batch(m.config, B, S, 1), false);
    }
}

TEST_CASE("gradients with ignored targets and packed documents") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        const Batch b = random_batch(m.config, B, S, 2, {.masked = true, .documents = true});
        REQUIRE_TRUE(b.valid > 0);
        REQUIRE_TRUE(b.valid < B * S);
        check_gradients(m.config, b, true);
    }
}

TEST_CASE("every recompute level gives the same bits") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        const Batch b = random_batch(m.config, B, S, 3);
        std::vector<double> reference;
        for (int64_t step = 0; step <= 2 * m.config.L; ++step) {
            TinyMachine t(m.config,
                          {.B = B, .S = S, .recompute = Recomputation::step(step, m.config.L)});
            t.gradients(b, 0.25);
            const std::vector<double> g = copy_of(t.params().gradients);
            if (reference.empty()) reference = g;
            EXPECT(std::memcmp(g.data(), reference.data(), g.size() * sizeof(double)) == 0);
        }
    }
}

TEST_CASE("less is kept at each recompute level") {
    const ModelConfig m = tiny_config("gpt2");
    int64_t before = INT64_MAX;
    auto k = make_cpu_kernels(DType::f64);
    const Config c;
    ModelConfig deep = m;
    deep.L = 6;
    std::vector<int64_t> sizes;
    for (int64_t step = 0; step <= 2 * deep.L; ++step) {
        const Machine plan(*k, deep, family("gpt2"), c,
                           {.B = 4, .S = 32, .recompute = Recomputation::step(step, deep.L)});
        if (step % deep.L == 1)  // the first layer with a shared set of its kind saves nothing
            EXPECT_EQ(plan.device_bytes(), before);
        else
            EXPECT(plan.device_bytes() < before);
        before = plan.device_bytes();
        sizes.push_back(before);
    }
    // The named levels are the corners.
    size_t corner = 0;
    for (Recompute r : {Recompute::none, Recompute::attention_out, Recompute::full}) {
        const Machine plan(*k, deep, family("gpt2"), c, {.B = 4, .S = 32, .recompute = r});
        EXPECT_EQ(plan.device_bytes(), sizes[corner]);
        corner += size_t(deep.L);
    }
}

TEST_CASE("what is recomputed, in words") {
    EXPECT_EQ(Recomputation::step(0, 4).str(4), "nothing");
    EXPECT_EQ(Recomputation::step(3, 4).str(4), "attention_out in 3 of 4 layers");
    EXPECT_EQ(Recomputation::step(4, 4).str(4), "attention_out in all layers");
    EXPECT_EQ(Recomputation::step(5, 4).str(4),
              "full in 1 of 4 layers, attention_out in the others");
    EXPECT_EQ(Recomputation::step(8, 4).str(4), "full in all layers");
    EXPECT_EQ(Recomputation(Recompute::full).str(4), "full in all layers");
}

TEST_CASE("micro-batches add up to one batch") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        const Batch whole = random_batch(m.config, B, S, 4, {.masked = true});
        TinyMachine one(m.config, {.B = B, .S = S});
        const double sum = one.gradients(whole, 1 / double(whole.valid));
        TinyMachine parts(m.config, {.B = 1, .S = S});
        double sum_parts = 0;
        for (int64_t b = 0; b < B; ++b) {
            Batch part = whole;
            part.B = 1;
            auto row = [&](std::vector<int32_t>& v) {
                v = std::vector<int32_t>(v.begin() + b * S, v.begin() + (b + 1) * S);
            };
            row(part.ids), row(part.targets), row(part.pos), row(part.first_key);
            sum_parts = parts.gradients(part, 1 / double(whole.valid), b == 0);
        }
        EXPECT(std::fabs(sum - sum_parts) <= 1e-12 * std::fabs(sum));
        const std::vector<double> a = copy_of(one.params().gradients);
        const std::vector<double> b = copy_of(parts.params().gradients);
        double scale = 0, worst = 0;
        for (size_t i = 0; i < a.size(); ++i) {
            scale = std::max(scale, std::fabs(a[i]));
            worst = std::max(worst, std::fabs(a[i] - b[i]));
        }
        EXPECT(worst <= 1e-12 * scale);
    }
}

TEST_CASE("a step starts its gradients anew, whatever is there") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        const Batch b = random_batch(m.config, B, S, 9);
        TinyMachine t(m.config, {.B = B, .S = S});
        t.gradients(b, 1);
        const std::vector<double> want = copy_of(t.params().gradients);
        for (const Component& c : t.params().components())
            for (const Param& p : c.params)
                t.kernels->fill(t.machine->stream(), t.params().part(t.params().gradients, p), NAN);
        t.gradients(b, 1);
        EXPECT(copy_of(t.params().gradients) == want);
        t.gradients(b, 1, false);  // and adds to them from then on
        const std::vector<double> twice = copy_of(t.params().gradients);
        for (size_t i = 0; i < want.size(); ++i)
            EXPECT(std::fabs(twice[i] - 2 * want[i]) <= 1e-12 * (1 + std::fabs(want[i])));
    }
}

TEST_CASE("padded vocabulary rows change nothing and get no gradient") {
    for (const std::string& name : family_names()) {
        const ModelConfig m = tiny_config(name);
        TinyMachine t(m, {.B = B, .S = S});
        const Batch b = random_batch(m, B, S, 5);
        const double before = t.loss(b);
        for (const Param& p : t.params().embed().params) {
            if (p.spec.name != "wte") continue;
            const Tensor w = t.params().part(t.params().weights, p);
            const int64_t first = m.V * m.C;
            REQUIRE_TRUE(w.numel() > first);
            std::fill(w.as<double>() + first, w.as<double>() + w.numel(), 1e3);
            EXPECT_EQ(t.loss(b), before);
            t.gradients(b, 1);
            const Tensor dw = t.params().part(t.params().gradients, p);
            for (int64_t i = first; i < dw.numel(); ++i) EXPECT_EQ(dw.as<double>()[i], 0.0);
        }
    }
}

TEST_CASE("the high-water mark is the plan and nothing is allocated after it") {
    TinyMachine t(tiny_config("llama"), {.B = B, .S = S, .sample_context = 12});
    t.gradients(random_batch(t.model, B, S, 6), 1);
    t.machine->check_high_water();
    EXPECT_THROWS_AS(t.kernels->device().allocate(Memory::device, 1), Error);
}

TEST_CASE("a non-finite gradient changes nothing but the count of skipped steps") {
    const Config c;
    TinyMachine t(tiny_config("gpt2"), {.B = B, .S = S}, DType::f64, c);
    const Batch b = random_batch(t.model, B, S, 8);
    t.gradients(b, 1 / double(b.valid));
    t.machine->optimizer->step(t.machine->stream(), 1e-3);
    const std::vector<double> w = copy_of(t.params().weights), m = copy_of(t.params().m);
    const std::vector<double> v = copy_of(t.params().v);
    t.gradients(b, 1 / double(b.valid));
    t.params().gradients.as<double>()[5] = NAN;
    t.machine->optimizer->step(t.machine->stream(), 1e-3);
    EXPECT(copy_of(t.params().weights) == w);
    EXPECT(copy_of(t.params().m) == m);
    EXPECT(copy_of(t.params().v) == v);
    EXPECT_EQ(t.params().control.as<double>()[2], 1.0);
    EXPECT_EQ(t.params().control.as<double>()[3], 1.0);
    t.gradients(b, 1 / double(b.valid));  // the NaN is gone: gradients were cleared
    t.machine->optimizer->step(t.machine->stream(), 1e-3);
    EXPECT(copy_of(t.params().weights) != w);
    EXPECT_EQ(t.params().control.as<double>()[2], 2.0);
}
