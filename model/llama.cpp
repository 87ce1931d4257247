// Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024) and their kin: RMSNorm, rotary
// positions, grouped-query attention, SwiGLU, no biases; Qwen2.5 (Yang et al. 2024) adds a bias on
// q, k and v. q, k, v are one matrix here, so are gate and up: one large product instead of two or
// three. Initialisation as in the Hugging Face library: normal with init_std for every matrix.
//
// Dims: B batch, T tokens, N = B*T, C channels, H heads, Hk kv heads, D head dim, F ffn. The
// backward pass writes each gradient over the activation it has just used up: "act", "gate_up",
// "norm2" and "norm1" hold their own gradients, so a layer needs no gradient buffers but "dqkv" and
// "do".
#include "model/families.h"

namespace torus {
namespace {

// The first `heads` heads of a packed matrix (N, width) as (N,heads,D): q and k lie side by side,
// so one rotation serves both.
Tensor rotated_heads(const ModelConfig& c, Tensor packed) {
    return packed.view({packed.dim(0), c.H + 2 * c.Hk, c.D}).slice(1, 0, c.H + c.Hk);
}

class Llama final : public Family {
public:
    bool rotary() const override { return true; }
    void check(const ModelConfig&) const override {}  // the checks of validate() are all it needs

    ParamTable params(const ModelConfig& c) const override {
        const double std = c.init_std;
        const int64_t q = c.H * c.D, kv = c.Hk * c.D;
        const std::string l = "model.layers.{l}.", attn = l + "self_attn.", mlp = l + "mlp.";
        ParamTable t;
        t.embed = {vocab_spec(c, "wte", "model.embed_tokens.weight")};
        t.layer = {
            matrix_spec("qkv_w", c.qkv_width(), c.C, std,
                        {{attn + "q_proj.weight", q},
                         {attn + "k_proj.weight", kv},
                         {attn + "v_proj.weight", kv}}),
            matrix_spec("proj_w", c.C, q, std, {{attn + "o_proj.weight", c.C}}),
            matrix_spec("gate_up_w", 2 * c.F, c.C, std,
                        {{mlp + "gate_proj.weight", c.F}, {mlp + "up_proj.weight", c.F}}),
            matrix_spec("down_w", c.C, c.F, std, {{mlp + "down_proj.weight", c.C}}),
            vector_spec("norm1_w", c.C, Init::ones, {{l + "input_layernorm.weight", c.C}}),
            vector_spec("norm2_w", c.C, Init::ones, {{l + "post_attention_layernorm.weight", c.C}}),
        };
        if (c.qkv_bias)
            t.layer.push_back(vector_spec("qkv_b", c.qkv_width(), Init::zeros,
                                          {{attn + "q_proj.bias", q},
                                           {attn + "k_proj.bias", kv},
                                           {attn + "v_proj.bias", kv}}));
        if (!c.tied) t.head.push_back(vocab_spec(c, "head_w", "lm_head.weight"));
        t.head.push_back(vector_spec("normf_w", c.C, Init::ones, {{"model.norm.weight", c.C}}));
        return t;
    }

    std::vector<ActSpec> block(const ModelConfig& c, const Precision& p, int64_t B,
                               int64_t T) const override {
        const int64_t N = B * T;
        return {
            {"norm1", p.act, {N, c.C}, Keep::block},
            {"norm1_rstd", p.stat, {N}, Keep::block},
            {"qkv", p.act, {N, c.qkv_width()}, Keep::block},
            {"o", p.act, {N, c.H * c.D}, Keep::attention},
            {"lse", p.stat, {B, c.H, T}, Keep::attention},
            {"x_mid", p.act, {N, c.C}, Keep::block},  // the residual stream after attention
            {"norm2", p.act, {N, c.C}, Keep::block},
            {"norm2_rstd", p.stat, {N}, Keep::block},
            {"gate_up", p.act, {N, 2 * c.F}, Keep::block},
            {"act", p.act, {N, c.F}, Keep::block},
            {"dqkv", p.act, {N, c.qkv_width()}, Keep::scratch},
            {"do", p.act, {N, c.H * c.D}, Keep::scratch},
        };
    }

    void embed(Ctx& ctx, const TensorMap& w, Tensor ids, Tensor x) const override {
        ctx.k.embedding_forward(ctx.stream, x, ids, w["wte"], Tensor(), Tensor());  // (N,C)
    }

    void embed_backward(Ctx& ctx, const TensorMap& dw, Tensor ids, Tensor dx) const override {
        ctx.k.embedding_backward(ctx.stream, dw["wte"], Tensor(), dx, ids, Tensor());
    }

    void pre(Ctx& ctx, const TensorMap& w, const TensorMap& a, Tensor x) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        const Tensor qkv = a["qkv"];  // (N,(H+2Hk)D)
        k.rmsnorm_forward(s, a["norm1"], a["norm1_rstd"], x, w["norm1_w"], ctx.model.norm_eps);
        k.matmul_forward(s, qkv, a["norm1"], w["qkv_w"], w.find("qkv_b"), Tensor());
        k.rope_forward(s, rotated_heads(ctx.model, qkv), ctx.pos, ctx.rope);  // (N,H+Hk,D)
    }

    void post(Ctx& ctx, const TensorMap& w, const TensorMap& a, Tensor x, Tensor y) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        k.matmul_forward(s, a["x_mid"], a["o"], w["proj_w"], Tensor(), x);  // (N,C), + x
        k.rmsnorm_forward(s, a["norm2"], a["norm2_rstd"], a["x_mid"], w["norm2_w"],
                          ctx.model.norm_eps);  // (N,C)
        k.matmul_forward(s, a["gate_up"], a["norm2"], w["gate_up_w"], Tensor(),
                         Tensor());                   // (N,2F)
        k.swiglu_forward(s, a["act"], a["gate_up"]);  // (N,F)
        if (ctx.recompute) return;
        k.matmul_forward(s, y, a["act"], w["down_w"], Tensor(), a["x_mid"]);  // (N,C), + x_mid
    }

    void post_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                       Tensor, Tensor dx) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        // MLP; dx is dy (N,C)
        k.matmul_backward_weight(s, dw["down_w"], Tensor(), dx, a["act"], ctx.accumulate);
        const Tensor dact = a["act"];  // (N,F)
        k.matmul_backward_input(s, dact, dx, w["down_w"], false);
        const Tensor dgate_up = a["gate_up"];  // (N,2F)
        k.swiglu_backward(s, dgate_up, dact, a["gate_up"]);
        k.matmul_backward_weight(s, dw["gate_up_w"], Tensor(), dgate_up, a["norm2"],
                                 ctx.accumulate);
        const Tensor dnorm2 = a["norm2"];  // (N,C)
        k.matmul_backward_input(s, dnorm2, dgate_up, w["gate_up_w"], false);
        k.rmsnorm_backward(s, dx, dw["norm2_w"], dnorm2, a["x_mid"], w["norm2_w"], a["norm2_rstd"]);
        // attention's projection; dx is now the gradient at x_mid, and at x by the residual path
        k.matmul_backward_weight(s, dw["proj_w"], Tensor(), dx, a["o"], ctx.accumulate);
        k.matmul_backward_input(s, a["do"], dx, w["proj_w"], false);  // (N,H*D)
    }

    void pre_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                      Tensor x, Tensor dx) const override {
        Kernels& k = ctx.k;
        Stream& s = ctx.stream;
        const Tensor dqkv = a["dqkv"];  // (N,(H+2Hk)D)
        k.rope_backward(s, rotated_heads(ctx.model, dqkv), ctx.pos, ctx.rope);
        k.matmul_backward_weight(s, dw["qkv_w"], dw.find("qkv_b"), dqkv, a["norm1"],
                                 ctx.accumulate);
        const Tensor dnorm1 = a["norm1"];  // (N,C)
        k.matmul_backward_input(s, dnorm1, dqkv, w["qkv_w"], false);
        k.rmsnorm_backward(s, dx, dw["norm1_w"], dnorm1, x, w["norm1_w"], a["norm1_rstd"]);
    }

    void final_norm(Ctx& ctx, const TensorMap& w, Tensor out, Tensor, Tensor rstd,
                    Tensor x) const override {
        ctx.k.rmsnorm_forward(ctx.stream, out, rstd, x, w["normf_w"], ctx.model.norm_eps);
    }

    void final_norm_backward(Ctx& ctx, const TensorMap& w, const TensorMap& dw, Tensor dx,
                             Tensor dout, Tensor x, Tensor, Tensor rstd) const override {
        ctx.k.rmsnorm_backward(ctx.stream, dx, dw["normf_w"], dout, x, w["normf_w"], rstd);
    }
};

}  // namespace

const Family& llama_family() {
    static const Llama family;
    return family;
}

}  // namespace torus
