// Tiny models and batches for engine tests: every registered family, with the variations that
// change the maths, on the CPU backend in fp64 unless a test says otherwise.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/eval.h"
#include "kernels/rng.h"
#include "test/test.h"

namespace torus::test {

struct TinyModel {
    std::string name;
    ModelConfig config;
};

inline ModelConfig tiny_config(const std::string& family) {
    ModelConfig m;
    m.family = family;
    m.L = 2, m.C = 24, m.H = 4, m.D = 6, m.F = 40, m.V = 61, m.max_T = 32;
    m.Hk = family == "gpt2" ? 4 : 2;
    if (family == "gpt2") m.F = 4 * m.C;
    m.qkv_bias = family == "gpt2";
    return m;
}

// Every family as it is, and variations of it that its validation accepts.
inline std::vector<TinyModel> tiny_models() {
    std::vector<TinyModel> out;
    for (const std::string& name : family_names()) {
        const ModelConfig base = tiny_config(name);
        auto add = [&](const std::string& what, ModelConfig m) {
            try {
                validate(m);
            } catch (const Error&) {
                return;
            }
            out.push_back({name + " " + what, m});
        };
        add("plain", base);
        ModelConfig m = base;
        m.tied = false;
        add("untied", m);
        m = base;
        m.Hk = 1;
        add("one kv head", m);
        m = base;
        m.qkv_bias = !m.qkv_bias;
        add("qkv bias", m);
        m = base;
        m.rope.scaling = RopeConfig::Scaling::llama3;
        m.rope.factor = 8;
        m.rope.original_max_positions = 8;
        add("llama3 scaling", m);
    }
    return out;
}

struct BatchOptions {
    bool masked = false;     // some targets ignored
    bool documents = false;  // first_key starts anew in places
};

inline Batch random_batch(const ModelConfig& m, int64_t B, int64_t S, uint64_t seed,
                          BatchOptions o = {}) {
    Batch b;
    b.B = B, b.T = S;
    for (int64_t i = 0; i < B * S; ++i) {
        const auto u = uint64_t(i);
        const int64_t t = i % S;
        b.ids.push_back(int32_t(random_bits(seed, 0, u) % uint32_t(m.V)));
        const bool ignored = o.masked && random_bits(seed, 2, u) % 3 == 0;
        b.targets.push_back(ignored ? -100 : int32_t(random_bits(seed, 1, u) % uint32_t(m.V)));
        b.pos.push_back(int32_t(t));
        const bool starts = t == 0 || (o.documents && random_bits(seed, 3, u) % 4 == 0);
        b.first_key.push_back(starts ? int32_t(t) : b.first_key.back());
        b.valid += !ignored;
    }
    return b;
}

// A model on the CPU with random weights everywhere, norms and biases too.
struct TinyMachine {
    TinyMachine(const ModelConfig& config, const Machine::Options& o, DType dtype = DType::f64,
                const Config& run = {})
        : model(config),
          settings(run),
          kernels(make_cpu_kernels(dtype)),
          machine(std::make_unique<Machine>(*kernels, model, family(model.family), settings, o)) {
        machine->allocate();
        initialize(machine->params, *kernels, machine->stream(), 7);
        for (Component& c : machine->params.components())
            for (const Param& p : c.params) perturb(p);
    }

    Parameters& params() { return machine->params; }

    double loss(const Batch& b) {  // mean over valid targets
        machine->step->begin(machine->stream());
        machine->step->forward(machine->stream(), b);
        return read_f64(*machine, machine->step->loss_sum()) / double(b.valid);
    }
    // Sum of losses of this batch and, unless it is the `first`, of those before it.
    double gradients(const Batch& b, double dloss, bool first = true) {
        if (first) machine->step->begin(machine->stream());
        machine->step->forward_backward(machine->stream(), b, dloss);
        return read_f64(*machine, machine->step->loss_sum());
    }

    ModelConfig model;
    Config settings;
    std::unique_ptr<Kernels> kernels;
    std::unique_ptr<Machine> machine;

private:
    void perturb(const Param& p) {
        const Tensor t = params().part(params().master, p);
        int64_t rows = 0;
        for (const HfPart& part : p.spec.hf) rows += part.rows;
        const int64_t n = rows * (t.numel() / t.dim(0));  // padding stays zero
        for (int64_t i = 0; i < n; ++i) {
            const double x = 0.15 * random_normal(99, uint64_t(p.offset), uint64_t(i));
            if (t.dtype == DType::f64)
                t.as<double>()[i] += x;
            else
                t.as<float>()[i] += float(x);
        }
    }
};

}  // namespace torus::test
