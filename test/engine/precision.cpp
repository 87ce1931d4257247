// Loss scaling and the types of the optimizer's state, over whole steps: what they must not change,
// what they save, and that a resume goes on bit for bit. Cases for 16-bit weights run where there
// is a GPU.
#include "engine/precision.h"

#include <cmath>
#include <cstring>

#include "checkpoint.h"
#include "engine/state.h"
#include "kernels/float16.h"
#include "test/comm/ranks.h"
#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr int64_t B = 2, S = 7;

Config with_scale(const std::string& scale, int64_t window = 2000) {
    Config c;
    c.loss_scale = scale;
    c.loss_scale_window = window;
    return c;
}

// A tiny model in training: step i sees batch i, as a resumed run would.
struct Training {
    Training(Kernels& k, const ModelConfig& m, const Config& c, Comm* all = nullptr)
        : model(m),
          config(c),
          kernels(k),
          machine(k, model, family(model.family), config, {.B = B, .S = S, .all = all}) {
        k.device().thaw();  // another machine may be there to compare with
        machine.allocate();
        initialize(machine.params, k, machine.stream(), 7);
    }

    // The sum of losses; with `plant` one gradient is infinite.
    double step(int64_t i, bool plant = false, uint64_t seed = 0) {
        Stream& s = machine.stream();
        const Batch b = random_batch(model, B, S, uint64_t(i) + 100 * seed);
        machine.step->begin(s);
        machine.step->forward_backward(s, b, 1 / double(b.valid));
        const Tensor& g = machine.params.gradients;
        if (plant) kernels.fill(s, g.rows(g.numel() / 2, 1), INFINITY);
        machine.optimizer->step(s, 1e-2);
        return read_f64(machine, machine.step->loss_sum());
    }
    std::vector<char> bytes(const Tensor& t) {
        std::vector<char> out(size_t(t.bytes()));
        kernels.device().copy(machine.stream(), out.data(), t.data, t.bytes());
        kernels.device().synchronize(machine.stream());
        return out;
    }
    // Weights and moments.
    std::vector<std::vector<char>> state() {
        const Parameters& p = machine.params;
        return {bytes(p.master), bytes(p.weights), bytes(p.m), bytes(p.v)};
    }
    double control(int i) { return read_f64(machine, machine.params.control.rows(i, 1)); }

    void save(const std::string& dir, int64_t i) {
        CheckpointStore(dir).save({.step = i, .run_id = "a", .precision = "fp32"},
                                  checkpoint_files(machine, model, ""), 1);
    }
    void load(const std::string& dir) { load_checkpoint(machine, CheckpointStore(dir).newest()); }

    ModelConfig model;
    Config config;
    Kernels& kernels;
    Machine machine;
};

// Ten steps; step 4 has no finite gradients.
struct Trace {
    std::vector<double> losses, norms;
    std::vector<std::vector<char>> state;
};

Trace ten_steps(DType dtype, const ModelConfig& model, const Config& c) {
    const auto k = make_cpu_kernels(dtype);
    Training t(*k, model, c);
    Trace out;
    for (int64_t i = 0; i < 10; ++i) {
        out.losses.push_back(t.step(i, i == 4));
        out.norms.push_back(t.control(Control::norm));
    }
    out.state = t.state();
    return out;
}

// Every step of a run that saved and loaded before step `k` equals the run without a break.
void check_resume(Kernels& kernels, const ModelConfig& model, const Config& c, int64_t steps,
                  const std::function<bool(int64_t)>& plant) {
    std::vector<double> losses;
    Training straight(kernels, model, c);
    for (int64_t i = 0; i < steps; ++i) losses.push_back(straight.step(i, plant(i)));
    for (int64_t k = 1; k < steps; ++k) {
        CAPTURE(k);
        const TempDir dir;
        {
            Training first(kernels, model, c);
            for (int64_t i = 0; i < k; ++i) first.step(i, plant(i));
            first.save(dir / "s", k);
        }
        Training second(kernels, model, c);
        second.load(dir / "s");
        for (int64_t i = k; i < steps; ++i) EXPECT_EQ(second.step(i, plant(i)), losses[size_t(i)]);
        EXPECT(second.state() == straight.state());
        EXPECT(second.bytes(second.machine.params.control) ==
               straight.bytes(straight.machine.params.control));
    }
}

std::unique_ptr<Kernels> gpu(DType dtype) {
    if (!cuda_unavailable_reason().empty()) return nullptr;
    return make_cuda_kernels(dtype, 0);
}

}  // namespace

TEST_CASE("a loss scale changes no bit, fixed or in motion") {
    for (const DType dtype : {DType::f64, DType::f32})
        for (const std::string& name : family_names()) {
            const ModelConfig m = tiny_config(name);
            const Trace plain = ten_steps(dtype, m, Config());
            for (const Config& c :
                 {with_scale("1024"), with_scale("16777216"), with_scale("dynamic", 2)}) {
                CAPTURE(name);
                CAPTURE(c.loss_scale);
                const Trace scaled = ten_steps(dtype, m, c);
                EXPECT(scaled.losses == plain.losses);
                EXPECT(scaled.norms == plain.norms);
                EXPECT(scaled.state == plain.state);
            }
        }
}

TEST_CASE("gradients carry the loss scale") {
    const auto k = make_cpu_kernels(DType::f64);
    const ModelConfig m = tiny_config("llama");
    const Batch b = random_batch(m, B, S, 3);
    std::vector<double> plain;
    for (const char* scale : {"1", "64"}) {
        Training t(*k, m, with_scale(scale));
        t.machine.step->forward_backward(t.machine.stream(), b, 0.5);
        const double* g = t.machine.params.gradients.as<double>();
        if (plain.empty()) plain.assign(g, g + t.machine.params.elements());
        const double factor = t.control(Control::loss_scale);
        EXPECT_EQ(factor, scale[1] ? 64 : 1);
        for (size_t i = 0; i < plain.size(); ++i) REQUIRE_TRUE(g[i] == factor * plain[i]);
    }
}

TEST_CASE(
    "an infinite gradient is skipped and halves the scale, a window of good ones doubles it") {
    const auto k = make_cpu_kernels(DType::f32);
    Training t(*k, tiny_config("gpt2"), with_scale("dynamic", 3));
    EXPECT_EQ(t.control(Control::loss_scale), 65536);
    t.step(0);
    t.step(1);
    const auto before = t.state();
    t.step(2, true);
    EXPECT(t.state() == before);
    EXPECT_EQ(t.control(Control::loss_scale), 32768);
    EXPECT_EQ(t.control(Control::skipped), 1);
    EXPECT_EQ(t.control(Control::skipped_now), 1);
    EXPECT_EQ(t.control(Control::applied), 2);
    for (int64_t i = 3; i < 6; ++i) {
        EXPECT_EQ(t.control(Control::loss_scale), 32768);
        t.step(i);
    }
    EXPECT(t.state() != before);
    EXPECT_EQ(t.control(Control::loss_scale), 65536);
    EXPECT_EQ(t.control(Control::skipped_now), 0);
}

TEST_CASE("a resume goes on bit for bit over a skip and a doubling, with moments in bf16 too") {
    const auto k = make_cpu_kernels(DType::f32);
    for (const char* moments : {"auto", "bf16"}) {
        CAPTURE(moments);
        Config c = with_scale("dynamic", 3);
        c.moments = moments;
        // Doubles after steps 2 and 5, skips 7 and 8.
        check_resume(*k, tiny_config("llama"), c, 10, [](int64_t i) { return i == 7 || i == 8; });
    }
}

TEST_CASE("the control of older checkpoints loads, a damaged one does not") {
    struct Source : TensorSource {  // a checkpoint with another control
        std::unique_ptr<TensorSource> rest = nullptr;
        std::vector<double> numbers = {};
        std::vector<std::string> names() const override { return rest->names(); }
        bool has(const std::string& name) const override { return rest->has(name); }
        Tensor find(const std::string& name) const override {
            if (name != "control") return rest->find(name);
            return {const_cast<double*>(numbers.data()), DType::f64, {int64_t(numbers.size())}};
        }
        std::string path() const override { return rest->path(); }
    };
    const auto k = make_cpu_kernels(DType::f32);
    const TempDir dir;
    const ModelConfig m = tiny_config("gpt2");
    Training first(*k, m, with_scale("dynamic"));
    first.step(0);
    first.save(dir / "s", 1);
    Source source;
    source.rest = open_safetensors(CheckpointStore(dir / "s").newest() + "/optimizer.safetensors");

    // The scale after loading `numbers`.
    const auto load = [&](const std::vector<double>& numbers, const char* scale) {
        Training t(*k, m, with_scale(scale));
        source.numbers = numbers;
        load_optimizer(t.machine.params, *k, t.machine.stream(), source);
        EXPECT_EQ(t.control(Control::applied), 5);
        EXPECT_EQ(t.control(Control::skipped), 2);
        return t.control(Control::loss_scale);
    };
    EXPECT_EQ(load({1, 1, 5, 2}, "auto"), 1);
    EXPECT_EQ(load({1, 1, 5, 2}, "dynamic"), 65536);
    EXPECT_EQ(load({1, 1, 5, 2, 0, 512, 7}, "dynamic"), 512);
    EXPECT_EQ(load({1, 1, 5, 2, 0, 512, 7}, "64"), 64);  // a fixed scale is the flag's
    for (const double damaged : {0.0, -2.0, 3.0, 0.5, 0x1p25, double(INFINITY), double(NAN)}) {
        CAPTURE(damaged);
        const Failure f = failure_of([&] { load({1, 1, 5, 2, 0, damaged, 7}, "dynamic"); });
        EXPECT_EQ(int(f.code), int(Exit::bad_data));
        EXPECT(f.says("loss scale"));
    }
    for (const double damaged : {-1.0, 1e300, double(NAN)})
        for (size_t i : {2, 3, 4, 6}) {
            std::vector<double> numbers = {1, 1, 5, 2, 0, 512, 7};
            numbers[i] = damaged;
            const Failure f = failure_of([&] { load(numbers, "dynamic"); });
            EXPECT_EQ(int(f.code), int(Exit::bad_data));
            EXPECT(f.says("expected a count"));
        }
    const Failure f = failure_of([&] { load({1, 1, 5, 2, 0}, "dynamic"); });
    EXPECT_EQ(int(f.code), int(Exit::bad_data));
    EXPECT(f.says("control"));
}

TEST_CASE("moments in bf16 take half the bytes and train alike") {
    const auto k = make_cpu_kernels(DType::f32);
    const ModelConfig m = tiny_config("gpt2");
    Config half;
    half.moments = "bf16";
    Training full(*k, m, Config());
    Training less(*k, m, half);
    const int64_t n = full.machine.params.elements();
    EXPECT_EQ(full.machine.device_bytes() - less.machine.device_bytes(), 4 * n);
    EXPECT(less.machine.params.m.dtype == DType::bf16);
    double first = 0, a = 0, b = 0;
    for (int64_t i = 0; i < 40; ++i) {
        a = full.step(i % 2);
        b = less.step(i % 2);
        if (i == 0) first = a;
    }
    INFO("from " << first << " to " << a << " and " << b);
    EXPECT(a < 0.5 * first);
    EXPECT(std::fabs(a - b) < 0.05 * first);
    EXPECT(a != b);
}

TEST_CASE("random bits belong to the place of an element in the whole range, and to the seed") {
    const auto k = make_cpu_kernels(DType::f32);
    const ModelConfig m = tiny_config("gpt2");
    Config half;
    half.moments = "bf16";
    half.seed = 1234;
    Training full(*k, m, Config());
    Training less(*k, m, half);
    full.step(0);
    less.step(0);
    const auto rounded = [&](float x, int64_t i, int low) {
        const uint32_t word = random_bits(half.seed, moments_stream(1), uint64_t(i));
        return float_to_bf16_stochastic(x, word >> low);
    };
    const Parameters &a = full.machine.params, &b = less.machine.params;
    for (int64_t i = 0; i < a.elements(); ++i) {
        REQUIRE_TRUE(b.m.as<uint16_t>()[i] == rounded(a.m.as<float>()[i], i, 0));
        REQUIRE_TRUE(b.v.as<uint16_t>()[i] == rounded(a.v.as<float>()[i], i, 16));
    }
}

TEST_CASE("replicas stay the same bits with moments in bf16") {
    std::vector<std::vector<std::vector<char>>> states(2);
    run_ranks(2, [&](Comm& comm) {
        const auto k = make_cpu_kernels(DType::f32);
        Config c = with_scale("dynamic", 2);
        c.moments = "bf16";
        Training t(*k, tiny_config("llama"), c, &comm);
        const int rank = comm.rank();
        // A weight of one rank that has gone astray gives gradients that both skip.
        const Tensor weight = t.machine.params.weights.rows(7, 1);
        for (int64_t i = 0; i < 6; ++i) {
            const float before = *weight.as<float>();
            if (i == 3 && rank == 1) *weight.as<float>() = INFINITY;
            t.step(i, false, uint64_t(rank));
            if (i == 3) *weight.as<float>() = before;
        }
        EXPECT_EQ(t.control(Control::skipped), 1);
        states[size_t(rank)] = t.state();
    });
    EXPECT(states[0] == states[1]);
}

TEST_CASE("the types of a run, and the bytes that they save") {
    Config c;
    const Precision bf16 = precision_of(DType::bf16);
    EXPECT_EQ(state_types(run_precision(c, bf16)), "fp32");
    EXPECT_EQ(state_types(run_precision(c, precision_of(DType::f64))), "fp64");
    const ModelConfig m = tiny_config("llama");
    const auto bytes = [&](const Config& config) {
        Layout layout;
        const Parameters p(m, family(m.family), run_precision(config, bf16));
        p.plan(layout, true);
        return double(layout.bytes()) / double(p.elements());
    };
    EXPECT(std::fabs(bytes(c) - 18) < 0.02);  // 2 weights, 4 gradient, 4 master, 8 moments
    c.moments = "bf16";
    EXPECT_EQ(state_types(run_precision(c, bf16)), "fp32, moments bf16");
    EXPECT(std::fabs(bytes(c) - 14) < 0.02);
    c.master_weights = false;
    EXPECT_EQ(state_types(run_precision(c, bf16)), "bf16");
    EXPECT(std::fabs(bytes(c) - 10) < 0.02);
    c.moments = "fp32";
    EXPECT_EQ(state_types(run_precision(c, bf16)), "bf16, moments fp32");
    EXPECT(std::fabs(bytes(c) - 14) < 0.02);
    for (const DType other : {DType::f64, DType::f32, DType::f16}) {
        const Failure f = failure_of([&] { run_precision(c, precision_of(other)); });
        EXPECT_EQ(int(f.code), int(Exit::usage));
    }
    c = Config();
    for (const char* moments : {"fp32", "bf16"}) {
        c.moments = moments;
        EXPECT(failure_of([&] { run_precision(c, precision_of(DType::f64)); }).says("--moments"));
    }
}

TEST_CASE("the loss scale of a run") {
    EXPECT_EQ(run_loss_scale(Config(), DType::f16).initial, 65536);
    EXPECT_EQ(run_loss_scale(Config(), DType::f16).window, 2000);
    for (const DType other : {DType::f64, DType::f32, DType::bf16}) {
        EXPECT_EQ(run_loss_scale(Config(), other).initial, 1);
        EXPECT_EQ(run_loss_scale(Config(), other).window, 0);
        EXPECT_EQ(run_loss_scale(with_scale("dynamic", 7), other).window, 7);
        EXPECT_EQ(run_loss_scale(with_scale("512"), other).initial, 512);
    }
    EXPECT_EQ(run_loss_scale(with_scale("512"), DType::f16).window, 0);
    for (const char* wrong :
         {"0", "-2", "3", "0.5", "33554432", "1e400", "nan", "inf", "2x", "on"}) {
        const Failure f = failure_of([&] { run_loss_scale(with_scale(wrong), DType::f32); });
        CAPTURE(wrong);
        EXPECT_EQ(int(f.code), int(Exit::usage));
        EXPECT(f.says("power of two"));
    }
}

TEST_CASE("16-bit weights on a GPU: scaled losses, moments and weights in bf16, and resume") {
    const ModelConfig m = tiny_config("llama");
    for (const DType dtype : {DType::bf16, DType::f16}) {
        const auto k = gpu(dtype);
        if (!k) return;
        std::vector<Config> configs = {with_scale("dynamic", 3)};
        configs.push_back(configs[0]);
        configs[1].moments = "bf16";
        if (dtype == DType::bf16) configs.push_back(configs[1]);
        if (dtype == DType::bf16) configs[2].master_weights = false;
        for (const Config& c : configs) {
            CAPTURE(name_of(dtype));
            CAPTURE(c.moments);
            CAPTURE(c.master_weights);
            check_resume(*k, m, c, 6, [](int64_t i) { return i == 4; });
            Training t(*k, m, c);
            const double first = t.step(0);
            double last = first;
            for (int64_t i = 1; i < 60; ++i) last = t.step(i % 2);
            INFO("from " << first << " to " << last);
            EXPECT(last < 0.7 * first);
        }
    }
}
