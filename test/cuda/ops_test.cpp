// Every op of the table (test/kernels/cases.cpp) on the GPU, in every type, against the CPU backend
// in fp64 on the same rounded inputs. A result in 16 bits may be at most 2 (outputs) or 3 times
// (gradients) as far off as the exact result rounded to that type; fp32 within 1e-5. Outputs start
// as NaN, gaps between rows must survive, and a second run must give the same bits.
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/cuda/cuda_kernels.h"
#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

using Results = std::map<std::string, std::vector<double>>;

bool starts_with(const std::string& s, const char* start) { return s.rfind(start, 0) == 0; }

// The type that kernels.h gives a tensor, by the marks "act", "stat" and "grad" there.
DType type_of(const OpCase& c, const std::string& name, const Precision& p) {
    if (starts_with(c.name, "attention_merge")) return p.stat;
    for (const Indices& i : c.indices)
        if (i.name == name) return DType::i32;
    for (const Spec& s : c.tensors) {
        if (s.name == name && s.f64) return DType::f64;
        if (s.name == name)
            return s.kind == Kind::stat || name == "table" || name == "loss" ? p.stat : p.act;
        if ("d" + s.name != name) continue;
        for (const char* weight : {"wte", "wpe", "w", "b", "bias"})
            if (s.name == weight) return p.grad;
        if (starts_with(c.name, "attention") && s.grad == Grad::adds) return p.grad;
        return s.name == "loss" ? p.stat : p.act;
    }
    fail(Exit::internal, "no tensor ", name, " in ", c.name);
}

// Swaps sizes in all shapes of a case, to reach the vector paths of the kernels. Each must be
// there.
OpCase resized(OpCase c, const std::map<int64_t, int64_t>& sizes) {
    for (const auto& [from, to] : sizes) {
        bool found = false;
        for (Spec& s : c.tensors)
            for (int i = 0; i < s.shape.rank; ++i)
                if (int64_t& size = s.shape.dim[size_t(i)]; size == from) {
                    size = to;
                    found = true;
                }
        CHECK(found, ": ", c.name, " has no size ", from);
        c.name += concat(", ", from, " -> ", to);
    }
    return c;
}

// Small shapes of every op, odd ones and whole vectors: what compute-sanitizer has time for.
std::vector<OpCase> small_cases() {
    std::vector<OpCase> all = all_cases(false);
    for (const OpCase& c : all_cases(false)) {
        if (starts_with(c.name, "attention")) {
            for (int64_t D : {64, 128}) all.push_back(resized(c, {{6, D}}));
        } else if (c.name.find("norm") != std::string::npos) {
            all.push_back(resized(c, {{19, 64}}));
        } else if (starts_with(c.name, "swiglu")) {
            all.push_back(resized(c, {{7, 16}, {14, 32}}));
        } else if (c.name == "matmul 5 x 7 x 9" || starts_with(c.name, "add") ||
                   starts_with(c.name, "embedding") || starts_with(c.name, "gelu")) {
            all.push_back(resized(c, {{7, 16}}));
        }
    }
    return all;
}

std::vector<OpCase> large_cases() {
    std::vector<OpCase> all;
    for (const OpCase& c : all_cases(true)) {
        all.push_back(c);
        if (starts_with(c.name, "attention")) {
            for (int64_t D : {32, 64, 80, 96, 128, 192, 256}) all.push_back(resized(c, {{40, D}}));
        } else if (c.name == "rope, 8 of 8") {
            all.push_back(resized(c, {{8, 64}, {4, 32}}));
        } else if (c.name == "rope, 6 of 10") {
            all.push_back(resized(c, {{10, 128}, {3, 16}}));
        } else if (c.name.find("norm") != std::string::npos) {
            all.push_back(resized(c, {{131, 768}}));  // rows of one warp, of several, of a block
            for (int64_t C : {1, 1600, 4999, 5120, 8192, 8200})
                all.push_back(resized(c, {{203, 5}, {131, C}}));
        } else if (starts_with(c.name, "matmul 260 x 140 x 135")) {
            all.push_back(resized(c, {{260, 384}, {140, 256}, {135, 128}}));
        } else if (starts_with(c.name, "classifier")) {  // odd rows, held whole, held in part
            for (int64_t Vp : {643, 50304, 60032}) all.push_back(resized(c, {{640, Vp}}));
        } else if (starts_with(c.name, "embedding")) {
            all.push_back(resized(c, {{131, 768}}));
        } else if (starts_with(c.name, "swiglu")) {
            all.push_back(resized(c, {{177, 256}, {354, 512}}));
        } else if (starts_with(c.name, "add") || starts_with(c.name, "gelu")) {
            all.push_back(resized(c, {{257, 256}}));
        }
    }
    return all;
}

// The case's tensors on the device, for one forward and backward.
class GpuRun {
public:
    GpuRun(const OpCase& c, Gpu& gpu, int64_t gap) : case_(c), gpu_(gpu), run_(c, *gpu.k) {
        gpu.k->device().destroy(run_.stream);
        run_.stream = gpu.stream;
        for (const std::string& name : run_.names()) {
            bool pitched = false;
            for (const Spec& s : c.tensors)
                pitched = pitched || (s.pitched && (s.name == name || "d" + s.name == name));
            for (const Indices& i : c.indices) pitched = pitched || (i.pitched && i.name == name);
            const Value& host = run_.value(name);
            const DType type = type_of(c, name, gpu.k->precision());
            values_.emplace(
                name, DeviceValue(gpu, type, host.tensor().shape, host.all(), pitched ? gap : 0));
            run_.replace(name, values_.at(name).tensor());
        }
    }
    std::vector<double> given(const std::string& name) const { return values_.at(name).all(); }
    DType type(const std::string& name) const { return values_.at(name).tensor().dtype; }
    void forward() { run_.forward(); }
    void backward() { run_.backward(); }
    bool gaps_intact() const {
        for (const auto& [_, v] : values_)
            if (!v.gaps_intact()) return false;
        return true;
    }
    Results results() const {
        Results r;
        for (const Spec& s : case_.tensors) {
            if (s.kind == Kind::output || s.kind == Kind::stat) r[s.name] = given(s.name);
            if (s.grad != Grad::none && case_.backward) r["d" + s.name] = given("d" + s.name);
        }
        return r;
    }

private:
    const OpCase& case_;
    Gpu& gpu_;
    Run run_;
    std::map<std::string, DeviceValue> values_;
};

struct Outcome {
    Results gpu, exact;
    std::map<std::string, DType> types;
    bool gaps_intact = true;
};

Outcome run_both(const OpCase& c, Gpu& gpu, int64_t gap) {
    const auto cpu = make_cpu_kernels(DType::f64);
    GpuRun g(c, gpu, gap);
    Run r(c, *cpu);
    for (const std::string& name : r.names()) {  // the same inputs, as rounded for the GPU
        const std::vector<double> v = g.given(name);
        r.value(name).set_all([&](int64_t i) { return v[size_t(i)]; });
    }
    Outcome out;
    g.forward();
    r.forward();
    const Results forward = g.results();
    out.exact = r.results();
    if (c.backward) {
        // The backward pass of both starts from the GPU's forward results.
        for (const Spec& s : c.tensors)
            if (s.kind == Kind::output || s.kind == Kind::stat)
                r.value(s.name).set_all([&](int64_t i) { return forward.at(s.name)[size_t(i)]; });
        g.backward();
        r.backward();
        const Results after = r.results();
        for (const auto& [name, values] : after)
            if (name[0] == 'd') out.exact[name] = values;
    }
    out.gpu = g.results();
    for (const auto& [name, _] : out.gpu) out.types[name] = g.type(name);
    out.gaps_intact = g.gaps_intact();
    return out;
}

// Upper bound of the relative error that the rule allows.
double allowed(const OpCase& c, const std::string& name, DType type, const Precision& p,
               const std::vector<double>& exact) {
    // Attention rounds its probabilities to the working type, so its fp32 sums are no better.
    const bool of_halves =
        p.act != DType::f32 &&
        (type == p.act || (starts_with(c.name, "attention,") && name[0] == 'd' && name != "delta"));
    if (!of_halves) return 1e-5;
    const double factor = name[0] == 'd' && name != "delta" ? 3 : 2;
    return factor * relative_error(rounded(exact, p.act), exact) + 1e-6;
}

void check_case(const OpCase& c, Gpu& gpu, int64_t gap) {
    CAPTURE(c.name);
    CAPTURE(gap);
    const Outcome first = run_both(c, gpu, gap);
    EXPECT(first.gaps_intact);
    GpuRun again(c, gpu, gap);
    again.forward();
    if (c.backward) again.backward();
    const Results second = again.results();
    for (const auto& [name, values] : first.gpu) {
        CAPTURE(name);
        const std::vector<double>& exact = first.exact.at(name);
        const double error = relative_error(values, exact);
        const double bound = allowed(c, name, first.types.at(name), gpu.k->precision(), exact);
        INFO("relative error " << error << ", allowed " << bound);
        EXPECT(error <= bound);
        EXPECT(same_bits(values, second.at(name)));
    }
}

void check_all(const std::vector<OpCase>& cases, DType dtype, bool hopper_attention = true) {
    Gpu gpu(dtype);
    dynamic_cast<cuda::CudaKernels&>(*gpu.k).use_hopper_attention(hopper_attention);
    for (const OpCase& c : cases) {
        if (!hopper_attention && !starts_with(c.name, "attention,")) continue;
        for (int64_t gap : {0, 3, 8}) {
            bool pitched = gap == 0;
            for (const Spec& s : c.tensors) pitched = pitched || s.pitched;
            if (pitched) check_case(c, gpu, gap);
        }
    }
}

}  // namespace

TEST_CASE("small ops in bf16") { check_all(small_cases(), DType::bf16); }
TEST_CASE("small ops in fp16") { check_all(small_cases(), DType::f16); }
TEST_CASE("small ops in fp32") { check_all(small_cases(), DType::f32); }
TEST_CASE("small portable attention in bf16") { check_all(small_cases(), DType::bf16, false); }
TEST_CASE("large ops in bf16") { check_all(large_cases(), DType::bf16); }
TEST_CASE("large ops in fp16") { check_all(large_cases(), DType::f16); }
TEST_CASE("large ops in fp32") { check_all(large_cases(), DType::f32); }
TEST_CASE("large portable attention in bf16 and fp16") {
    check_all(large_cases(), DType::bf16, false);
    check_all(large_cases(), DType::f16, false);
}
