// GPT-2 (Radford et al. 2019) and, dense, GPT-3 (Brown et al. 2020): learned positions, pre-norm
// LayerNorm, multi-head attention, GELU MLP of width F = 4C, a bias on every linear, tied head.
// Initialisation as published: normal with std 0.02, the two projections that feed the residual
// stream with 0.02 / sqrt(2L), biases zero.
//
// Dims: B batch, T tokens, N = B*T, C channels, H heads, D head dim (H*D = C), F ffn, L layers,
// P positions. The backward pass writes each gradient over the activation it has just used up: the
// layer's "fc_gelu", "ln2" and "ln1" hold dfc_gelu, dln2 and dln1, so a layer needs no gradient
// buffers but "dqkv" and "do".
#include <cmath>

#include "model/families.h"

namespace torus {
namespace {

class Gpt2 final : public Family {
public:
    bool rotary() const override { return false; }

    void check(const ModelConfig& c) const override {
        require(c.H * c.D == c.C, Exit::usage, "model: gpt2 needs channels C = heads x head dim, ",
                c.C, " is not ", c.H, " x ", c.D);
        require(c.Hk == c.H, Exit::usage,
                "model: gpt2 has as many kv heads as heads, found Hk = ", c.Hk, " and H = ", c.H);
        require(c.qkv_bias, Exit::usage, "model: gpt2 always has a QKV bias");
    }

    ParamTable params(const ModelConfig& c) const override {
        const double std = c.init_std, residual_std = std / std::sqrt(2.0 * double(c.L));
        const std::string h = "transformer.h.{l}.";
        const auto linear = [&](const std::string& name, const std::string& hf, int64_t O,
                                int64_t I, double s) {  // (O,I); the file holds (I,O)
            return matrix_spec(name, O, I, s, {{h + hf + ".weight", O, true}});
        };
        const auto vec = [&](const std::string& name, const std::string& hf, int64_t n, Init init) {
            return vector_spec(name, n, init, {{hf, n}});
        };
        ParamTable t;
        t.embed = {vocab_spec(c, "wte", "transformer.wte.weight"),
                   matrix_spec("wpe", c.max_T, c.C, std, {{"transformer.wpe.weight", c.max_T}})};
        t.layer = {
            linear("qkv_w", "attn.c_attn", 3 * c.C, c.C, std),
            linear("proj_w", "attn.c_proj", c.C, c.C, residual_std),
            linear("fc_w", "mlp.c_fc", c.F, c.C, std),
            linear("fcproj_w", "mlp.c_proj", c.C, c.F, residual_std),
            vec("ln1_w", h + "ln_1.weight", c.C, Init::ones),
            vec("ln1_b", h + "ln_1.bias", c.C, Init::zeros),
            vec("qkv_b", h + "attn.c_attn.bias", 3 * c.C, Init::zeros),
            vec("proj_b", h + "attn.c_proj.bias", c.C, Init::zeros),
            vec("ln2_w", h + "ln_2.weight", c.C, Init::ones),
            vec("ln2_b", h + "ln_2.bias", c.C, Init::zeros),
            vec("fc_b", h + "mlp.c_fc.bias", c.F, Init::zeros),
            vec("fcproj_b", h + "mlp.c_proj.bias", c.C, Init::zeros),
        };
        if (!c.tied) t.head.push_back(vocab_spec(c, "head_w", "lm_head.weight"));
        t.head.push_back(vec("lnf_w", "transformer.ln_f.weight", c.C, Init::ones));
        t.head.push_back(vec("lnf_b", "transformer.ln_f.bias", c.C, Init::zeros));
        return t;
    }

    std::vector<ActSpec> block(const ModelConfig& c, const Precision& p, int64_t B,
                               int64_t T) const override {
        const int64_t N = B * T;
        return {
            {"ln1", p.act, {N, c.C}, Keep::block},
            {"ln1_mean", p.stat, {N}, Keep::block},
            {"ln1_rstd", p.stat, {N}, Keep::block},
            {"qkv", p.act, {N, c.qkv_width()}, Keep::block},
            {"o", p.act, {N, c.C}, Keep::attention},
            {"lse", p.stat, {B, c.H, T}, Keep::attention},
            {"x_mid", p.act, {N, c.C}, Keep::block},  // the residual stream after attention
            {"ln2", p.act, {N, c.C}, Keep::block},
            {"ln2_mean", p.stat, {N}, Keep::block},
            {"ln2_rstd", p.stat, {N}, Keep::block},
            {"fc", p.act, {N, c.F}, Keep::block},
            {"fc_gelu", p.act, {N, c.F}, Keep::block},
            {"dqkv", p.act, {N, c.qkv_width()}, Keep::scratch},
            {"do", p.act, {N, c.C}, Keep::scratch},
        };
    }

    void embed(Ctx& x, const TensorMap& w, Tensor ids, Tensor out) const override {
        x.k.embedding_forward(x.stream, out, ids, w["wte"], x.pos, w["wpe"]);  // (N,C)
    }

    void embed_backward(Ctx& x, const TensorMap& dw, Tensor ids, Tensor dx) const override {
        x.k.embedding_backward(x.stream, dw["wte"], dw["wpe"], dx, ids, x.pos);
    }

    void pre(Ctx& ctx, const TensorMap& w, const TensorMap& a, Tensor x) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        k.layernorm_forward(s, a["ln1"], a["ln1_mean"], a["ln1_rstd"], x, w["ln1_w"], w["ln1_b"],
                            ctx.model.norm_eps);                                    // (N,C)
        k.matmul_forward(s, a["qkv"], a["ln1"], w["qkv_w"], w["qkv_b"], Tensor());  // (N,3C)
    }

    void post(Ctx& ctx, const TensorMap& w, const TensorMap& a, Tensor x, Tensor y) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        k.matmul_forward(s, a["x_mid"], a["o"], w["proj_w"], w["proj_b"], x);  // (N,C), + x
        k.layernorm_forward(s, a["ln2"], a["ln2_mean"], a["ln2_rstd"], a["x_mid"], w["ln2_w"],
                            w["ln2_b"], ctx.model.norm_eps);                              // (N,C)
        k.matmul_gelu_forward(s, a["fc_gelu"], a["fc"], a["ln2"], w["fc_w"], w["fc_b"]);  // (N,F)
        if (ctx.recompute) return;
        k.matmul_forward(s, y, a["fc_gelu"], w["fcproj_w"], w["fcproj_b"], a["x_mid"]);  // (N,C)
    }

    void post_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                       Tensor, Tensor dx) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        // MLP; dx is dy (N,C)
        k.matmul_backward_weight(s, dw["fcproj_w"], dw["fcproj_b"], dx, a["fc_gelu"],
                                 ctx.accumulate);
        const Tensor dfc = a["fc_gelu"];  // (N,F)
        k.matmul_gelu_backward_input(s, dfc, dx, w["fcproj_w"], a["fc"]);
        k.matmul_backward_weight(s, dw["fc_w"], dw["fc_b"], dfc, a["ln2"], ctx.accumulate);
        const Tensor dln2 = a["ln2"];  // (N,C)
        k.matmul_backward_input(s, dln2, dfc, w["fc_w"], false);
        k.layernorm_backward(s, dx, dw["ln2_w"], dw["ln2_b"], dln2, a["x_mid"], w["ln2_w"],
                             a["ln2_mean"], a["ln2_rstd"]);
        // attention's projection; dx is now the gradient at x_mid, and at x by the residual path
        k.matmul_backward_weight(s, dw["proj_w"], dw["proj_b"], dx, a["o"], ctx.accumulate);
        k.matmul_backward_input(s, a["do"], dx, w["proj_w"], false);  // (N,C)
    }

    void pre_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                      Tensor x, Tensor dx) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        k.matmul_backward_weight(s, dw["qkv_w"], dw["qkv_b"], a["dqkv"], a["ln1"], ctx.accumulate);
        const Tensor dln1 = a["ln1"];  // (N,C)
        k.matmul_backward_input(s, dln1, a["dqkv"], w["qkv_w"], false);
        k.layernorm_backward(s, dx, dw["ln1_w"], dw["ln1_b"], dln1, x, w["ln1_w"], a["ln1_mean"],
                             a["ln1_rstd"]);
    }

    void final_norm(Ctx& ctx, const TensorMap& w, Tensor out, Tensor mean, Tensor rstd,
                    Tensor x) const override {
        ctx.k.layernorm_forward(ctx.stream, out, mean, rstd, x, w["lnf_w"], w["lnf_b"],
                                ctx.model.norm_eps);
    }

    void final_norm_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, Tensor dx,
                             Tensor dout, Tensor x, Tensor mean, Tensor rstd) const override {
        ctx.k.layernorm_backward(ctx.stream, dx, dw["lnf_w"], dw["lnf_b"], dout, x, w["lnf_w"],
                                 mean, rstd);
    }
};

}  // namespace

const Family& gpt2_family() {
    static const Gpt2 family;
    return family;
}

}  // namespace torus
