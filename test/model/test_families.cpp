// Every family of the registry: its table of tensors, and its gradients against central differences
// of the whole model in fp64 (embed, blocks with local attention, head).
#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/rng.h"
#include "test/model/net.h"
#include "test/test.h"

using namespace torus;

namespace {

struct Variant {
    const char* what;
    ModelConfig config;
};

// Every family's smallest sizes, and what its configuration can switch.
std::vector<Variant> variants() {
    std::vector<Variant> out;
    for (const std::string& name : family_names()) {
        ModelConfig c = model_preset(name + ":tiny");
        c.L = 2;
        c.C = 32;
        c.H = 4;
        c.D = 8;
        c.Hk = name == "gpt2" ? 4 : 2;
        c.F = 48;
        c.V = 61;
        c.max_T = 16;
        out.push_back({"tied", c});
        c.tied = !c.tied;
        out.push_back({"untied", c});
        if (!family(name).rotary()) continue;
        c.qkv_bias = true;
        c.H = 3;
        c.Hk = 1;
        c.D = 10;  // H*D is not C
        c.rope = {.theta = 100, .scaling = RopeConfig::Scaling::linear, .factor = 3};
        out.push_back({"one kv head, qkv bias, linear scaling", c});
        c.Hk = 3;
        c.qkv_bias = false;
        c.rope.scaling = RopeConfig::Scaling::llama3;
        c.rope.original_max_positions = 8;
        out.push_back({"llama3 scaling", c});
    }
    return out;
}

void check_central_differences(Net& net) {
    const double h = 1e-5;
    net.loss_and_gradients();
    for (const std::string& name : net.names()) {
        const Tensor w = net.weight(name), g = net.gradient(name);
        double largest = 0;
        for (int64_t i = 0; i < g.numel(); ++i)
            largest = std::max(largest, std::abs(g.as<double>()[i]));
        CAPTURE(name);
        EXPECT(largest > 0);
        for (int trial = 0; trial < 6; ++trial) {
            // half single elements, half directions that touch every element
            const uint64_t at = random_bits(99, uint64_t(trial), 0) % uint64_t(w.numel());
            const bool single = trial % 2 == 0;
            std::vector<double> kept(w.as<double>(), w.as<double>() + w.numel()), d(kept.size());
            double analytic = 0;
            for (size_t i = 0; i < d.size(); ++i) {
                d[i] = single ? double(i == at) : random_normal(7, uint64_t(trial), i);
                if (!single) d[i] /= std::sqrt(double(d.size()));
                analytic += d[i] * g.as<double>()[i];
            }
            double loss[2];
            for (int side = 0; side < 2; ++side) {
                for (size_t i = 0; i < d.size(); ++i)
                    w.as<double>()[i] = kept[i] + (side == 0 ? h : -h) * d[i];
                loss[side] = net.loss();
            }
            std::copy(kept.begin(), kept.end(), w.as<double>());
            const double numeric = (loss[0] - loss[1]) / (2 * h);
            CAPTURE(trial);
            CAPTURE(numeric);
            CAPTURE(analytic);
            EXPECT(std::abs(numeric - analytic) <= 1e-6 * std::max(largest, std::abs(numeric)));
        }
    }
}

}  // namespace

TEST_CASE("every family: the table names every tensor once, decayed ones first") {
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        CAPTURE(what);
        validate(c);
        const ParamTable t = family(c.family).params(c);
        std::set<std::string> files;
        int64_t elements = 0;
        for (const auto* specs : {&t.embed, &t.layer, &t.head}) {
            std::set<std::string> names;
            bool decay = true;
            for (const ParamSpec& s : *specs) {
                CAPTURE(s.name);
                EXPECT(names.insert(s.name).second);
                EXPECT_EQ(s.decay, s.shape.rank == 2);
                EXPECT((decay || !s.decay));
                decay = s.decay;
                int64_t rows = 0;
                for (const HfPart& part : s.hf) {
                    rows += part.rows;
                    EXPECT(files.insert(part.name).second);
                    EXPECT_EQ(part.name.find("{l}") != std::string::npos, specs == &t.layer);
                }
                const bool vocabulary = s.shape[0] == c.Vp();
                EXPECT_EQ(rows, vocabulary ? c.V : s.shape[0]);
                elements += rows * (s.shape.numel() / s.shape[0]) * (specs == &t.layer ? c.L : 1);
            }
        }
        EXPECT_EQ(parameter_count(c), elements);
        EXPECT_EQ(cost_of(c).params, elements);
    }
}

TEST_CASE("every family: a block has what attention needs") {
    const int64_t B = 3, T = 5, N = B * T;
    const Precision p = precision_of(DType::bf16);
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        std::map<std::string, ActSpec> specs;
        for (const ActSpec& s : family(c.family).block(c, p, B, T))
            EXPECT(specs.emplace(s.name, s).second);
        const auto has = [&](const char* name, DType dtype, Shape shape, Keep keep) {
            CAPTURE(name);
            REQUIRE_TRUE(specs.contains(name));
            const ActSpec& s = specs.at(name);
            EXPECT((s.dtype == dtype && s.shape == shape && s.keep == keep));
        };
        has("qkv", p.act, {N, c.qkv_width()}, Keep::block);
        has("dqkv", p.act, {N, c.qkv_width()}, Keep::scratch);
        has("o", p.act, {N, c.H * c.D}, Keep::attention);
        has("do", p.act, {N, c.H * c.D}, Keep::scratch);
        has("lse", p.stat, {B, c.H, T}, Keep::attention);
    }
}

TEST_CASE("every family: gradients equal central differences in fp64") {
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        CAPTURE(what);
        const int64_t B = 2, T = 7;
        Net net(c, B, T, {.first_key = true});
        net.randomize(5);
        net.dloss = 1.0 / 9;
        for (const int64_t ignored : {0, 3, 8, 13}) net.targets().as<int32_t>()[ignored] = -100;
        for (int64_t t = 4; t < T; ++t)  // the first sequence holds two documents
            net.first_key().as<int32_t>()[t] = 4;
        for (int64_t t = 0; t < T; ++t)  // the second a window of 3
            net.first_key().as<int32_t>()[T + t] = int32_t(std::max<int64_t>(0, t - 2));
        check_central_differences(net);
    }
}

TEST_CASE("every family: padded vocabulary rows change nothing") {
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        CAPTURE(what);
        Net net(c, 2, 6);
        net.randomize(6);
        const std::string name = c.tied ? "embed/wte" : "head/head_w";
        const Tensor padded = net.weight(name).rows(c.V, c.Vp() - c.V);
        std::fill_n(padded.as<double>(), padded.numel(), 0.0);
        const double loss = net.loss_and_gradients();
        std::map<std::string, std::vector<double>> gradients;
        for (const std::string& n : net.names())
            gradients[n].assign(net.gradient(n).as<double>(),
                                net.gradient(n).as<double>() + net.gradient(n).numel());

        std::fill_n(padded.as<double>(), padded.numel(), 1e3);
        EXPECT_EQ(net.loss_and_gradients(), loss);
        EXPECT_EQ(net.loss(), loss);
        for (const std::string& n : net.names()) {
            CAPTURE(n);
            const Tensor g = net.gradient(n);
            EXPECT(std::equal(gradients[n].begin(), gradients[n].end(), g.as<double>()));
        }
        const Tensor g = net.gradient(name).rows(c.V, c.Vp() - c.V);
        EXPECT(std::all_of(g.as<double>(), g.as<double>() + g.numel(),
                           [](double x) { return x == 0; }));
    }
}

TEST_CASE("every family: recompute gives the same bits") {
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        CAPTURE(what);
        Net kept(c, 2, 7), again(c, 2, 7, {.recompute = true});
        kept.randomize(7);
        again.randomize(7);
        EXPECT_EQ(kept.loss_and_gradients(), again.loss_and_gradients());
        EXPECT(same_bits(kept.dx(), again.dx()));
        for (const std::string& name : kept.names()) {
            CAPTURE(name);
            EXPECT(same_bits(kept.gradient(name), again.gradient(name)));
        }
    }
}

TEST_CASE("head: the chunk size changes nothing but rounding") {
    for (const auto& [what, c] : variants()) {
        CAPTURE(c.family);
        CAPTURE(what);
        Net whole(c, 2, 7);
        whole.randomize(8);
        whole.targets().as<int32_t>()[5] = -1;
        const double loss = whole.loss_and_gradients();
        whole.loss();
        EXPECT_EQ(whole.losses().as<double>()[5], 0);
        for (const int64_t chunk : {1, 3, 13}) {
            CAPTURE(chunk);
            Net cut(c, 2, 7, {.head_chunk = chunk});
            cut.randomize(8);
            cut.targets().as<int32_t>()[5] = -1;
            EXPECT(std::abs(cut.loss_and_gradients() / loss - 1) < 1e-13);
            EXPECT(std::abs(cut.loss() / loss - 1) < 1e-13);
            EXPECT(relative_difference(cut.losses(), whole.losses()) < 1e-13);
            EXPECT(relative_difference(cut.logits(), whole.logits()) < 1e-13);
            for (const std::string& name : whole.names()) {
                CAPTURE(name);
                EXPECT(relative_difference(cut.gradient(name), whole.gradient(name)) < 1e-12);
            }
        }
    }
}

TEST_CASE("head: a chunk is whole tiles of rows, its logits stay near 512 MiB") {
    ModelConfig c = model_preset("llama3:8b");
    const Precision p = precision_of(DType::bf16);
    const int64_t N = int64_t(1) << 20, n = Head::chunk_rows(c, p, N), most = int64_t(512) << 20;
    EXPECT_EQ(n % 256, 0);
    EXPECT((n - 256) * c.Vp() * 2 <= most);
    EXPECT((n + 256) * c.Vp() * 2 > most);
    EXPECT_EQ(Head::chunk_rows(c, p, 5), 5);
    c.V = int64_t(1) << 21;  // fewer rows than a tile
    EXPECT_EQ(Head::chunk_rows(c, p, N), 128);
    c.V = int64_t(1) << 29;  // one row alone is larger
    EXPECT_EQ(Head::chunk_rows(c, p, 5), 1);
}
