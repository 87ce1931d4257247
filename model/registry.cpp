// The families and the model sizes that --model knows by name. Sizes are the published ones; where
// a name is a rule ("gpt2:d20", "llama:d4x128"), the rule stands next to the code that applies it.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "model/families.h"

namespace torus {
namespace {

struct FamilyEntry {
    const char* name;
    const Family& (*get)();
};

constexpr FamilyEntry families[] = {
    {"gpt2", gpt2_family},
    {"llama", llama_family},
};

constexpr RopeConfig llama3_rope(double factor) {
    return {.theta = 500000,
            .scaling = RopeConfig::Scaling::llama3,
            .factor = factor,
            .low_freq_factor = 1,
            .high_freq_factor = 4,
            .original_max_positions = 8192};
}

// --- presets: one line per model
// ------------------------------------------------------------------
struct GptPreset {
    const char* name;
    int64_t L, C, H, V, max_T;
};

constexpr GptPreset gpt_presets[] = {
    {"gpt2:tiny", 4, 128, 4, 256, 256},        {"gpt2:124M", 12, 768, 12, 50257, 1024},
    {"gpt2:350M", 24, 1024, 16, 50257, 1024},  {"gpt2:774M", 36, 1280, 20, 50257, 1024},
    {"gpt2:1558M", 48, 1600, 25, 50257, 1024}, {"gpt3:125M", 12, 768, 12, 50257, 2048},
    {"gpt3:1.3B", 24, 2048, 16, 50257, 2048},  {"gpt3:2.7B", 32, 2560, 32, 50257, 2048},
    {"gpt3:6.7B", 32, 4096, 32, 50257, 2048},  {"gpt3:30B", 64, 6144, 64, 50257, 2048},
};

struct LlamaPreset {
    const char* name;
    int64_t L, C, H, Hk, F, V, max_T;
    bool tied;
    double eps;
    RopeConfig rope;
    bool qwen2 = false;  // bias on q, k, v
    double init_std = 0.02;
};

constexpr LlamaPreset llama_presets[] = {
    {"llama:tiny", 4, 128, 4, 2, 384, 256, 256, true, 1e-5, {}},
    {"llama2:7b", 32, 4096, 32, 32, 11008, 32000, 4096, false, 1e-5, {}},
    {"llama2:13b", 40, 5120, 40, 40, 13824, 32000, 4096, false, 1e-5, {}},
    {"llama3:8b", 32, 4096, 32, 8, 14336, 128256, 8192, false, 1e-5, {.theta = 500000}},
    {"llama3.1:8b", 32, 4096, 32, 8, 14336, 128256, 131072, false, 1e-5, llama3_rope(8)},
    {"llama3.2:1b", 16, 2048, 32, 8, 8192, 128256, 131072, true, 1e-5, llama3_rope(32)},
    {"llama3.2:3b", 28, 3072, 24, 8, 8192, 128256, 131072, true, 1e-5, llama3_rope(32)},
    {"smollm2:135m",
     30,
     576,
     9,
     3,
     1536,
     49152,
     8192,
     true,
     1e-5,
     {.theta = 100000},
     false,
     1.0 / 24},
    {"qwen2.5:0.5b", 24, 896, 14, 2, 4864, 151936, 32768, true, 1e-6, {.theta = 1e6}, true},
    {"qwen2.5:1.5b", 28, 1536, 12, 2, 8960, 151936, 131072, true, 1e-6, {.theta = 1e6}, true},
    {"qwen2.5:7b", 28, 3584, 28, 4, 18944, 152064, 131072, false, 1e-6, {.theta = 1e6}, true},
};

ModelConfig make_gpt(int64_t L, int64_t C, int64_t H, int64_t V, int64_t max_T) {
    ModelConfig c;
    c.family = c.hf_model_type = "gpt2";
    c.L = L;
    c.C = C;
    c.H = c.Hk = H;
    c.D = C / H;
    c.F = 4 * C;
    c.V = V;
    c.max_T = max_T;
    c.qkv_bias = true;
    return c;
}

ModelConfig make_llama(const LlamaPreset& p) {
    ModelConfig c;
    c.family = "llama";
    c.hf_model_type = p.qwen2 ? "qwen2" : "llama";
    c.L = p.L;
    c.C = p.C;
    c.H = p.H;
    c.Hk = p.Hk;
    c.D = p.C / p.H;
    c.F = p.F;
    c.V = p.V;
    c.max_T = p.max_T;
    c.tied = p.tied;
    c.qkv_bias = p.qwen2;
    c.norm_eps = p.eps;
    c.init_std = p.init_std;
    c.rope = p.rope;
    return c;
}

// --- names that are rules
// ------------------------------------------------------------------------- Depths of llm.c's "dN",
// with their channels and heads.
struct Depth {
    int64_t L, C, H;
};
constexpr Depth depths[] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {36, 1280, 20},
                            {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};

// "dN" for any other N from 1 to 84: C is linear between the neighbours above (64 N below 6),
// rounded to a multiple of 64, with heads of 64.
Depth depth_sizes(int64_t N) {
    Depth low{0, 0, 0};
    for (const Depth& d : depths) {
        if (d.L == N) return d;
        if (d.L > N) {
            const double C =
                double(low.C) + double(d.C - low.C) * double(N - low.L) / double(d.L - low.L);
            const int64_t H = std::max<int64_t>(1, std::llround(C / 64));
            return {N, 64 * H, H};
        }
        low = d;
    }
    fail(Exit::usage, "--model: depth d", N, " is out of range, allowed is d1 to d84; for other ",
         "sizes name depth and channels, such as gpt2:d", N, "x4096");
}

bool parse_number(std::string_view text, int64_t& out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    return error == std::errc() && end == text.data() + text.size() && out > 0;
}

// "gpt2:dN", "llama:dN" by the rule above; "gpt2:dNxC", "llama:dNxC" by N layers of C channels with
// heads of 64, or of 32 where 64 does not divide C. Llama: F = 8C/3 rounded up to a multiple of 64,
// a quarter of the heads as kv heads where 4 divides them, tied head.
bool custom_preset(const std::string& name, ModelConfig& out) {
    const size_t colon = name.find(":d");
    if (colon == std::string::npos) return false;
    const std::string base = name.substr(0, colon);
    if (base != "gpt2" && base != "llama") return false;
    const std::string sizes = name.substr(colon + 2);
    const size_t x = sizes.find('x');
    Depth d;
    if (!parse_number(std::string_view(sizes).substr(0, x), d.L)) return false;
    if (x == std::string::npos) {
        d = depth_sizes(d.L);
    } else {
        if (!parse_number(std::string_view(sizes).substr(x + 1), d.C)) return false;
        require(d.C % 32 == 0, Exit::usage, "--model ", name, ": ", d.C, " channels cannot be cut ",
                "into heads of 64 or 32; the nearest width that works is ",
                std::max<int64_t>(32, (d.C + 16) / 32 * 32));
        d.H = d.C % 64 == 0 ? d.C / 64 : d.C / 32;
    }
    if (base == "gpt2") {
        out = make_gpt(d.L, d.C, d.H, 50257, 1024);
    } else {
        const int64_t Hk = d.H % 4 == 0 ? d.H / 4 : d.H, F = (8 * d.C / 3 + 63) / 64 * 64;
        out = make_llama({name.c_str(), d.L, d.C, d.H, Hk, F, 50257, 1024, true, 1e-5, {}});
    }
    validate(out);
    return true;
}

// "llama2:7b:dN": N layers of another preset, to measure its layers where the whole does not fit.
bool shallow_preset(const std::string& name, ModelConfig& out) {
    const size_t colon = name.rfind(":d");
    int64_t L;
    if (std::count(name.begin(), name.end(), ':') != 2 || colon == std::string::npos ||
        !parse_number(std::string_view(name).substr(colon + 2), L))
        return false;
    out = model_preset(name.substr(0, colon));
    require(L <= out.L, Exit::usage, "--model ", name, ": ", name.substr(0, colon), " has ", out.L,
            " layers; use at most that many");
    out.L = L;
    return true;
}

size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
        }
    }
    return row[b.size()];
}

}  // namespace

const Family& family(const std::string& name) {
    std::string known;
    for (const FamilyEntry& f : families) {
        if (name == f.name) return f.get();
        known += (known.empty() ? "" : ", ") + std::string(f.name);
    }
    fail(Exit::usage, "model: unknown family \"", name, "\", known are ", known);
}

std::vector<std::string> family_names() {
    std::vector<std::string> names;
    for (const FamilyEntry& f : families) names.push_back(f.name);
    return names;
}

std::vector<std::string> model_preset_names() {
    std::vector<std::string> names;
    for (const GptPreset& p : gpt_presets) names.push_back(p.name);
    for (const LlamaPreset& p : llama_presets) names.push_back(p.name);
    return names;
}

ModelConfig model_preset(const std::string& name) {
    for (const GptPreset& p : gpt_presets)
        if (name == p.name) return make_gpt(p.L, p.C, p.H, p.V, p.max_T);
    for (const LlamaPreset& p : llama_presets)
        if (name == p.name) return make_llama(p);
    ModelConfig custom;
    if (custom_preset(name, custom) || shallow_preset(name, custom)) return custom;

    const std::vector<std::string> known = model_preset_names();
    const std::string asked = name.substr(0, 80);  // the distance is quadratic
    const std::string& nearest = *std::min_element(
        known.begin(), known.end(), [&](const std::string& a, const std::string& b) {
            return edit_distance(asked, a) < edit_distance(asked, b);
        });
    std::string list;
    for (const std::string& n : known) list += n + ", ";
    fail(Exit::usage, "--model ", asked, ": neither a file or folder nor a known model; did you ",
         "mean ", nearest, "? Known are ", list, "gpt2:dN and llama:dN (N layers), gpt2:dNxC and ",
         "llama:dNxC (N layers of C channels), ", nearest, ":dN (N of its layers)");
}

}  // namespace torus
