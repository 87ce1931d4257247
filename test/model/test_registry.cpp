// Presets against the sizes their authors published, names that are rules, and the errors of both.
#include <algorithm>
#include <cmath>

#include "model/model.h"
#include "test/model/files.h"
#include "test/test.h"

using namespace torus;

TEST_CASE("presets: parameter counts as published") {
    struct {
        const char* name;
        int64_t parameters;
    } const published[] = {
        {"gpt2:124M", 124439808},     {"gpt2:350M", 354823168},    {"gpt2:774M", 774030080},
        {"gpt2:1558M", 1557611200},   {"llama2:7b", 6738415616},   {"llama2:13b", 13015864320},
        {"llama3:8b", 8030261248},    {"llama3.1:8b", 8030261248}, {"llama3.2:1b", 1235814400},
        {"llama3.2:3b", 3212749824},  {"smollm2:135m", 134515008}, {"qwen2.5:0.5b", 494032768},
        {"qwen2.5:1.5b", 1543714304}, {"qwen2.5:7b", 7615616512},
    };
    for (const auto& [name, parameters] : published) {
        CAPTURE(name);
        EXPECT_EQ(parameter_count(model_preset(name)), parameters);
    }
}

TEST_CASE("presets: all are valid and distinct") {
    const std::vector<std::string> names = model_preset_names();
    EXPECT(names.size() >= 20);
    for (const std::string& name : names) {
        CAPTURE(name);
        const ModelConfig c = model_preset(name);
        validate(c);
        EXPECT(c.D % 8 == 0);
        EXPECT(std::count(names.begin(), names.end(), name) == 1);
        const std::string type = c.hf_model_type;
        EXPECT((type == "gpt2" || type == "llama" || type == "qwen2"));
    }
    for (const std::string& f : family_names()) EXPECT_EQ(model_preset(f + ":tiny").family, f);
    const ModelConfig gpt3 = model_preset("gpt3:30B");
    EXPECT((gpt3.L == 64 && gpt3.C == 6144 && gpt3.H == 64 && gpt3.D == 96));
    EXPECT_EQ(model_preset("gpt3:1.3B").max_T, 2048);
}

TEST_CASE("presets: depth and width as rules") {
    struct {
        const char* name;
        int64_t L, C, H, D;
    } const rules[] = {
        {"gpt2:d6", 6, 384, 6, 64},        {"gpt2:d12", 12, 768, 12, 64},
        {"gpt2:d24", 24, 1024, 16, 64},    {"gpt2:d36", 36, 1280, 20, 64},
        {"gpt2:d48", 48, 1600, 25, 64},    {"gpt2:d60", 60, 1920, 30, 64},
        {"gpt2:d72", 72, 2880, 30, 96},    {"gpt2:d84", 84, 3456, 36, 96},
        {"gpt2:d1", 1, 64, 1, 64},         {"gpt2:d3", 3, 192, 3, 64},
        {"gpt2:d18", 18, 896, 14, 64},     {"gpt2:d4x128", 4, 128, 2, 64},
        {"gpt2:d2x96", 2, 96, 3, 32},      {"llama:d12", 12, 768, 12, 64},
        {"llama:d30x576", 30, 576, 9, 64},
    };
    for (const auto& [name, L, C, H, D] : rules) {
        CAPTURE(name);
        const ModelConfig c = model_preset(name);
        EXPECT((c.L == L && c.C == C && c.H == H && c.D == D));
    }
    EXPECT_EQ(parameter_count(model_preset("gpt2:d12")),
              parameter_count(model_preset("gpt2:124M")));
    EXPECT_EQ(model_preset("llama:d12").Hk, 3);
    EXPECT_EQ(model_preset("llama:d12").F, 2048);
    for (int depth = 2; depth <= 84; ++depth)  // wider with depth, never narrower
        EXPECT(model_preset("gpt2:d" + std::to_string(depth)).C >=
               model_preset("gpt2:d" + std::to_string(depth - 1)).C);
    ModelConfig shallow = model_preset("llama2:7b:d4");
    EXPECT_EQ(shallow.L, 4);
    shallow.L = 32;
    EXPECT_EQ(parameter_count(shallow), parameter_count(model_preset("llama2:7b")));
}

TEST_CASE("presets: an unknown name names the nearest") {
    const auto error = [](const char* name) { return error_of([&] { model_preset(name); }); };
    EXPECT(error("gpt2:124m").find("did you mean gpt2:124M?") != std::string::npos);
    EXPECT(error("llama3-8b").find("did you mean llama3:8b?") != std::string::npos);
    EXPECT(error("qwen2:1.5b").find("did you mean qwen2.5:1.5b?") != std::string::npos);
    for (const char* name : {"", "gpt2", "gpt2:d", "gpt2:d0", "gpt2:d-3", "gpt2:d85", "gpt2:d1e3",
                             "gpt2:d12x", "gpt2:d12x0", "gpt2:d12x100", "gpt2:dx64", "bert:d12",
                             "gpt2:d99999999999999999999", "gpt2:d4x99999999999999", "llama2:7b:d0",
                             "llama2:7b:d33", "llama2:8b:d4", "llama2:7b:d4:d2"}) {
        CAPTURE(name);
        EXPECT(error(name).starts_with("64 "));
    }
    EXPECT(error("gpt2:d12x100").find("works is 96") != std::string::npos);
    EXPECT(error(std::string(100000, 'x').c_str()).size() < 2000);
    EXPECT(error_of([] { family("bert"); }).find("gpt2, llama") != std::string::npos);
}

TEST_CASE("validate names the field") {
    const auto error = [](const char* preset, auto change) {
        ModelConfig c = model_preset(preset);
        change(c);
        return error_of([&] { validate(c); });
    };
    using C = ModelConfig;
    EXPECT_EQ(error("llama:tiny", [](C&) {}), "none");
    struct {
        const char* word;
        void (*change)(C&);
    } const cases[] = {
        {"layers L", [](C& c) { c.L = 0; }},
        {"channels C", [](C& c) { c.C = -1; }},
        {"heads H", [](C& c) { c.H = 0; }},
        {"kv heads Hk", [](C& c) { c.Hk = 0; }},
        {"multiple of kv heads", [](C& c) { c.Hk = 3; }},
        {"head dim D", [](C& c) { c.D = 33; }},
        {"ffn width F", [](C& c) { c.F = int64_t(1) << 60; }},
        {"vocabulary V", [](C& c) { c.V = 0; }},
        {"positions max_T", [](C& c) { c.max_T = int64_t(1) << 31; }},
        {"norm_eps", [](C& c) { c.norm_eps = 0; }},
        {"init_std", [](C& c) { c.init_std = NAN; }},
        {"rope theta", [](C& c) { c.rope.theta = -1; }},
        {"rope factor",
         [](C& c) { c.rope.scaling = RopeConfig::Scaling::linear, c.rope.factor = 0; }},
        {"high_freq_factor",
         [](C& c) { c.rope.scaling = RopeConfig::Scaling::llama3, c.rope.high_freq_factor = 1; }},
    };
    for (const auto& [word, change] : cases) {
        CAPTURE(word);
        const std::string message = error("llama:tiny", change);
        EXPECT(message.starts_with("64 model: "));
        EXPECT(message.find(word) != std::string::npos);
    }
    EXPECT(error("gpt2:tiny", [](C& c) { c.D = 16; }).find("heads x head dim") !=
           std::string::npos);
    EXPECT(error("gpt2:tiny", [](C& c) { c.Hk = 2; }).find("Hk = 2") != std::string::npos);
}

TEST_CASE("cost: matmul parameters and FLOP per token") {
    // 124M: 85.0M in the blocks' matrices + 38.6M in the head
    const ModelConfig c = model_preset("gpt2:124M");
    const Cost cost = cost_of(c);
    EXPECT_EQ(cost.matmul_params, int64_t(12) * 12 * 768 * 768 + int64_t(50257) * 768);
    EXPECT_EQ(cost.flops_per_token(c, 1024),
              6.0 * double(cost.matmul_params) + 6.0 * 12 * 768 * 1024);
    const ModelConfig l = model_preset("llama3:8b");  // untied: the embedding is no matmul
    EXPECT_EQ(cost_of(l).matmul_params + int64_t(128256) * 4096 + 65 * 4096, cost_of(l).params);
}
