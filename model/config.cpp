// Checks of a model's sizes, and what is derived from them alone. The bounds keep every product of
// sizes far inside 64 bits, so that a hostile config.json cannot overflow a byte count.
#include <cmath>

#include "model/families.h"

namespace torus {
namespace {

void check_size(const char* field, int64_t value, int64_t most) {
    require(value >= 1 && value <= most, Exit::usage, "model: ", field, " is ", value,
            ", allowed is 1 to ", most);
}

void check_positive(const char* field, double value) {
    require(std::isfinite(value) && value > 0, Exit::usage, "model: ", field, " is ", value,
            ", it must be a positive number");
}

void check_rope(const RopeConfig& r, int64_t D) {
    require(D % 2 == 0, Exit::usage, "model: head dim D is ", D,
            ", rotary positions need an even number");
    check_positive("rope theta", r.theta);
    if (r.scaling == RopeConfig::Scaling::none) return;
    check_positive("rope factor", r.factor);
    if (r.scaling == RopeConfig::Scaling::linear) return;
    check_positive("rope low_freq_factor", r.low_freq_factor);
    check_positive("rope original_max_positions", r.original_max_positions);
    require(std::isfinite(r.high_freq_factor) && r.high_freq_factor > r.low_freq_factor,
            Exit::usage, "model: rope high_freq_factor is ", r.high_freq_factor,
            ", it must be above low_freq_factor = ", r.low_freq_factor);
}

int64_t real_elements(const ParamSpec& spec) {  // without padded rows
    int64_t rows = 0;
    for (const HfPart& part : spec.hf) rows += part.rows;
    return rows * (spec.shape.numel() / spec.shape[0]);
}

}  // namespace

void validate(const ModelConfig& c) {
    const Family& f = family(c.family);
    check_size("layers L", c.L, 1 << 16);
    check_size("channels C", c.C, 1 << 20);
    check_size("heads H", c.H, 1 << 16);
    check_size("kv heads Hk", c.Hk, 1 << 16);
    check_size("head dim D", c.D, 1 << 12);
    check_size("ffn width F", c.F, 1 << 22);
    check_size("vocabulary V", c.V, 1 << 28);
    check_size("positions max_T", c.max_T, (int64_t(1) << 31) - 1);
    require(c.H % c.Hk == 0, Exit::usage, "model: heads H = ", c.H,
            " is not a multiple of kv heads Hk = ", c.Hk);
    check_positive("norm_eps", c.norm_eps);
    check_positive("init_std", c.init_std);
    if (f.rotary()) check_rope(c.rope, c.D);
    f.check(c);
}

int64_t parameter_count(const ModelConfig& c) {
    const ParamTable t = family(c.family).params(c);
    int64_t once = 0, layer = 0;
    for (const ParamSpec& s : t.embed) once += real_elements(s);
    for (const ParamSpec& s : t.head) once += real_elements(s);
    for (const ParamSpec& s : t.layer) layer += real_elements(s);
    return once + c.L * layer;
}

Qkv split_qkv(const ModelConfig& c, int64_t B, int64_t T, Tensor packed) {
    CHECK(packed.contiguous() && packed.shape == (Shape{B * T, c.qkv_width()}), ": qkv is ",
          packed.shape.str());
    const Tensor all = packed.view({B, T, c.H + 2 * c.Hk, c.D});  // heads: [q | k | v]
    return {all.slice(2, 0, c.H), all.slice(2, c.H, c.Hk), all.slice(2, c.H + c.Hk, c.Hk)};
}

ParamSpec matrix_spec(const std::string& name, int64_t rows, int64_t cols, double std,
                      std::vector<HfPart> hf) {
    return {.name = name,
            .shape = {rows, cols},
            .init = Init::normal,
            .std = std,
            .decay = true,
            .hf = std::move(hf)};
}

ParamSpec vector_spec(const std::string& name, int64_t size, Init init, std::vector<HfPart> hf) {
    return {
        .name = name, .shape = {size}, .init = init, .std = 0, .decay = false, .hf = std::move(hf)};
}

ParamSpec vocab_spec(const ModelConfig& c, const std::string& name, const std::string& hf_name) {
    return matrix_spec(name, c.Vp(), c.C, c.init_std, {{hf_name, c.V}});
}

}  // namespace torus
