// What the engine asks of a device besides work: the ranges that profilers show, memory that is
// not there, and the plan of a GPU on a machine without one.
#include <functional>

#include "engine/log.h"
#include "engine/run.h"
#include "kernels/cpu/cpu.h"
#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

// The CPU, which notes ranges and says of its memory what it is told to.
struct WatchedDevice : CpuDevice {
    void push_range(const char* name, int64_t number) override {
        ranges += concat(name, number < 0 ? "" : concat(" ", number), "(");
    }
    void pop_range() override { ranges += ")"; }
    bool records() const override { return true; }
    void begin_recording(Stream&) override { ranges += "["; }
    Recording end_recording(Stream&) override {
        ranges += "]";
        return {&ranges};
    }
    void replay(Stream&, const Recording& r) override { ranges += r.handle ? "replay" : "?"; }
    void destroy(Recording& r) noexcept override { r = {}; }
    int64_t total_bytes() const override { return total; }
    int64_t free_bytes() const override { return free; }
    void* allocate(Memory memory, int64_t bytes) override {
        if (memory == Memory::device && bytes > granted) fail(Exit::out_of_memory, "taken");
        return CpuDevice::allocate(memory, bytes);
    }

    std::string ranges;
    int64_t total = int64_t(1) << 40, free = total, granted = total;
};

struct WatchedKernels : CpuKernels<double> {
    WatchedKernels() : CpuKernels<double>(CpuOptions{}) {}
    Device& device() override { return watched; }
    WatchedDevice watched;
};

struct Watched {
    explicit Watched(int64_t B, bool record = false) {
        machine = std::make_unique<Machine>(kernels, model, family(model.family), settings,
                                            Machine::Options{.B = B, .S = 16, .record = record});
    }
    WatchedKernels kernels;
    ModelConfig model = tiny_config("llama");
    Config settings;
    std::unique_ptr<Machine> machine;
};

Error error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e;
    }
    return Error(Exit::ok, "");
}

bool holds(const Error& e, const std::string& part) {
    return std::string(e.what()).find(part) != std::string::npos;
}

std::string first_line(const Error& e) {
    const std::string text = e.what();
    return text.substr(0, text.find('\n'));
}

}  // namespace

TEST_CASE("the parts of a step are ranges that nest") {
    Watched t(2);
    Machine& m = *t.machine;
    m.allocate();
    initialize(m.params, t.kernels, m.stream(), 7);
    std::string& ranges = t.kernels.watched.ranges;
    ranges.clear();
    const Batch b = random_batch(t.model, 2, 16, 1);
    m.step->forward_backward(m.stream(), b, 1);
    EXPECT_EQ(ranges, "data()forward(layer 0()layer 1())head()backward(layer 1()layer 0())");
    ranges.clear();
    m.step->forward(m.stream(), b);
    EXPECT_EQ(ranges, "data()forward(layer 0()layer 1())head()");
}

TEST_CASE("a micro-batch is recorded the second time it is as before, then replayed") {
    Watched t(2, true);
    Machine& m = *t.machine;
    m.allocate();
    initialize(m.params, t.kernels, m.stream(), 7);
    std::string& ranges = t.kernels.watched.ranges;
    const Batch b = random_batch(t.model, 2, 16, 1);
    const auto run = [&](double dloss) {
        ranges.clear();
        m.step->forward_backward(m.stream(), b, dloss);
        return ranges;
    };
    const std::string queued = "forward(layer 0()layer 1())head()backward(layer 1()layer 0())";
    for (const char* kind : {"first", "further"}) {  // of one step
        CAPTURE(kind);
        const auto again = [&](double dloss) {
            if (kind[1] == 'i') m.step->begin(m.stream());
            return run(dloss);
        };
        EXPECT_EQ(again(0.5), "data()" + queued);
        EXPECT_EQ(again(0.5), "data()[" + queued + "]replay");
        EXPECT_EQ(again(0.5), "data()replay");
        EXPECT_EQ(again(0.25), "data()" + queued);  // another number of targets
        EXPECT_EQ(again(0.25), "data()[" + queued + "]replay");
    }
    const auto cpu = make_cpu_kernels(DType::f64);
    EXPECT_THROWS_AS(
        Machine(*cpu, t.model, family("llama"), t.settings, {.B = 2, .S = 16, .record = true}),
        Error);
    ranges.clear();
    m.step->forward(m.stream(), b);  // evaluation is not recorded
    EXPECT_EQ(ranges, "data()forward(layer 0()layer 1())head()");
}

TEST_CASE("a plan that does not fit says what is free and the largest batch that fits") {
    constexpr int64_t wanted = 64;
    Watched t(wanted);
    const int64_t needed = t.machine->device_bytes();
    for (const int64_t fits : {1, 2, 17, 62, 63}) {
        const int64_t room = Watched(fits).machine->device_bytes();
        REQUIRE_TRUE(room < Watched(fits + 1).machine->device_bytes());
        for (const bool crowded : {false, true}) {
            t.kernels.watched.free = room;
            t.kernels.watched.total = crowded ? needed : needed - 1;
            const Error e = error_of([&] { t.machine->allocate(); });
            INFO(e.what());
            EXPECT(e.code == Exit::out_of_memory);
            EXPECT(first_line(e).ends_with(
                concat("the largest --micro-batch-size that fits is ", fits)));
            EXPECT(holds(e, human_bytes(needed) + ", CPU"));
            EXPECT(holds(e, concat(human_bytes(room), " free of ")));
            EXPECT(holds(e, "the programs that use the rest") == crowded);
            EXPECT(holds(e, "\n  activations "));
            EXPECT(holds(e, concat(needed, " B")));
        }
    }
    EXPECT_EQ(t.kernels.watched.allocated(Memory::device), 0);
    t.kernels.watched.free = Watched(1).machine->device_bytes() - 1;
    const Error none = error_of([&] { t.machine->allocate(); });
    EXPECT(first_line(none).ends_with("or --recompute auto"));
    t.kernels.watched.free = t.kernels.watched.total = needed;
    t.kernels.watched.granted = needed - 1;  // another program took some since `free` was read
    const Error late = error_of([&] { t.machine->allocate(); });
    EXPECT(late.code == Exit::out_of_memory);
    EXPECT_EQ(first_line(late), "taken");
    EXPECT(holds(late, concat(needed, " B")));
    t.kernels.watched.granted = needed;
    t.machine->allocate();
    t.machine->check_high_water();
}

TEST_CASE("--recompute auto takes the least that fits, and leaves a 32nd of the device") {
    WatchedKernels k;
    ModelConfig model = tiny_config("llama");
    model.L = 5;
    const Family& llama = family(model.family);
    const Config c;
    const Machine::Options o{.B = 4, .S = 16};
    const auto bytes = [&](int64_t step) {
        Machine::Options at = o;
        at.recompute = Recomputation::step(step, model.L);
        return Machine(k, model, llama, c, at).device_bytes();
    };
    const auto chosen = [&](int64_t room, int sharers) {
        k.watched.total = 32 * 1000;
        k.watched.free = room + 1000;
        return Machine::least_recompute(k, model, llama, c, o, sharers);
    };
    const int64_t last = 2 * model.L;
    for (const int sharers : {1, 3}) {
        for (int64_t step = 0; step <= last; ++step) {
            if (step % model.L == 1) continue;  // as large as the one before
            const int64_t next = step + (step % model.L == 0 ? 2 : 1);
            EXPECT_EQ(chosen(bytes(step) * sharers, sharers), step);
            EXPECT_EQ(chosen(bytes(step) * sharers - 1, sharers), std::min(next, last));
        }
    }
    EXPECT_EQ(chosen(0, 1), last);
}

#ifdef TORUS_HAVE_CUDA
TEST_CASE("a GPU's plan needs no GPU: the same tensors, in the types of a GPU") {
    const ModelConfig model = model_preset("gpt2:124M");
    const Config c;
    const auto gpu = make_cuda_planner(DType::bf16), single = make_cuda_planner(DType::f32);
    const auto cpu = make_cpu_kernels(DType::f32);
    auto plan = [&](Kernels& k, int64_t B) {
        return std::make_unique<Machine>(k, model, family(model.family), c,
                                         Machine::Options{.B = B, .S = 1024, .sample_context = 64});
    };
    const auto half = plan(*gpu, 8), full = plan(*single, 8), host = plan(*cpu, 8);
    const int64_t n = half->params.elements();
    EXPECT(n >= parameter_count(model));
    auto line = [](int64_t bytes) { return concat(" ", bytes, " B"); };
    // bf16: 2 bytes of weights, 4 of master, m, v and gradient each.
    EXPECT(half->table().find(line(2 * n)) != std::string::npos);
    EXPECT(half->table().find(line(4 * n)) != std::string::npos);
    EXPECT(half->device_bytes() < full->device_bytes());
    EXPECT(full->device_bytes() > host->device_bytes());  // by the workspace
    EXPECT(plan(*gpu, 9)->device_bytes() > half->device_bytes());
    const Error e = error_of([&] { gpu->device().allocate(Memory::device, 1); });
    EXPECT(e.code == Exit::internal);
    EXPECT(error_of([] { make_cuda_planner(DType::f64); }).code == Exit::usage);

    Config flags;
    flags.model = "gpt2:d1x32", flags.device = "cuda", flags.plan = true;
    flags.recompute = Recompute::automatic;  // of a GPU that is not there
    const Error unknown = error_of([&] { run(flags); });
    EXPECT(unknown.code == Exit::usage);
    EXPECT(holds(unknown, "--recompute auto: --plan uses no GPU"));
}
#else
TEST_CASE("a build without CUDA says so, also for a plan") {
    for (const Error& e : {error_of([] { make_cuda_planner(DType::bf16); }),
                           error_of([] { make_cuda_kernels(DType::bf16, 0); })}) {
        INFO(e.what());
        EXPECT(e.code == Exit::no_device);
        EXPECT(holds(e, "built without CUDA"));
        EXPECT(holds(e, "cmake --preset cuda"));
    }
}
#endif
