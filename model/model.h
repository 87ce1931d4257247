// What a net is: its sizes, its named tensors, and the token-wise maths of one block on one device.
//
// A block is cut in three: `pre` (norm, QKV projection, RoPE), attention (comm/seq), `post`
// (projection, residual, norm, MLP, residual). A family writes pre and post and their backwards; it
// knows nothing of ranks, chunks, recompute schedules or offload. Tensor parallelism will enter as
// two verbs in Ctx: gather the token-wise input before pre's and post's first matmul, and reduce
// the partial sums after their last one.
//
// Dims: B batch, T local tokens, N = B*T, C channels, H heads, Hk kv heads, D head dim, F ffn,
// V vocabulary, Vp padded vocabulary, L layers, R rotated dims.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/layout.h"

namespace torus {

struct RopeConfig {
    enum class Scaling { none, linear, llama3 };
    double theta = 10000;
    Scaling scaling = Scaling::none;
    double factor = 1;                                 // linear, llama3
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3
    double original_max_positions = 8192;              // llama3
};

struct ModelConfig {
    std::string family;  // a registry name: "gpt2", "llama"
    int64_t L = 0, C = 0, H = 0, Hk = 0, D = 0, F = 0, V = 0;
    int64_t max_T = 0;  // positions: rows of wpe (gpt2), the trained context (llama)
    bool tied = true;   // the head shares the embedding's weights
    bool qkv_bias = false;
    double norm_eps = 1e-5;
    double init_std = 0.02;
    RopeConfig rope;            // llama
    std::string hf_model_type;  // config.json's model_type: "gpt2", "llama", "qwen2"

    int64_t Vp() const { return (V + 127) / 128 * 128; }
    int64_t qkv_width() const { return (H + 2 * Hk) * D; }
};

// Throws Error(usage) naming the field: C % H, H % Hk, odd D with RoPE, sizes <= 0, ...
void validate(const ModelConfig&);

// A tensor as checkpoints of the Hugging Face library name it. Rows [first, first + rows) of ours
// are rows [0, rows) of theirs, after transposition where they store (in, out).
struct HfPart {
    std::string name;  // "{l}" stands for the layer
    int64_t rows;      // of our tensor; padded vocabulary rows are in no part
    bool transposed = false;
};

enum class Init : uint8_t { normal, zeros, ones };

struct ParamSpec {
    std::string name;  // short: "qkv_w"; the same in kernel, model, plan, checkpoint
    Shape shape;       // (O,C) or (C)
    Init init = Init::normal;
    double std = 0.02;       // normal
    bool decay = false;      // weight decay: tensors of two or more dimensions
    std::vector<HfPart> hf;  // in order of our rows
};

// embed and head exist once, layer L times. With a tied head `head` holds the final norm only and
// the classifier reads embed's "wte"; an untied head is "head_w" (Vp,C).
struct ParamTable {
    std::vector<ParamSpec> embed, layer, head;
};

// Number of parameters without vocabulary padding.
int64_t parameter_count(const ModelConfig&);

enum class Keep : uint8_t {
    attention,  // attention's output and lse: kept by --recompute none and attention_out
    block,      // what pre and post compute: kept by none, computed again otherwise
    scratch,    // gradients, of use in backward only
};
// The backward functions may overwrite `block` tensors with gradients, "qkv" excepted.

struct ActSpec {
    std::string name;  // "qkv", "o", "lse", ...
    DType dtype;
    Shape shape;
    Keep keep;
};

struct Ctx {
    Kernels& k;
    Stream& stream;
    const ModelConfig& model;
    int64_t B = 0, T = 0;    // this call's rows: N = B*T
    Tensor pos;              // i32 (N) global positions
    Tensor rope;             // stat (P, R/2, 2); absent for learned positions
    bool recompute = false;  // post stops before its last matmul: only backward's inputs matter
    bool accumulate = true;  // matmul weights' gradients: added to what is there, or overwritten
};

// Views of a packed QKV matrix (N, (H+2Hk)D).
struct Qkv {
    Tensor q, k, v;  // (B,T,H,D), (B,T,Hk,D) twice
};
Qkv split_qkv(const ModelConfig&, int64_t B, int64_t T, Tensor packed);

struct Family {
    virtual ~Family() = default;
    virtual ParamTable params(const ModelConfig&) const = 0;
    // Activations of one block at B x T tokens. Always has "qkv" act (N,(H+2Hk)D) keep block,
    // "o" act (N,H*D) and "lse" stat (B,H,T) keep attention, and the gradients "dqkv", "do"
    // scratch.
    virtual std::vector<ActSpec> block(const ModelConfig&, const Precision&, int64_t B,
                                       int64_t T) const = 0;

    // ids i32 (N) -> x act (N,C)
    virtual void embed(Ctx&, const TensorMap& w, Tensor ids, Tensor x) const = 0;
    virtual void embed_backward(Ctx&, const TensorMap& dw, Tensor ids, Tensor dx) const = 0;
    // x act (N,C) -> a["qkv"], rotated where the family rotates
    virtual void pre(Ctx&, const TensorMap& w, const TensorMap& a, Tensor x) const = 0;
    // x (N,C), a["o"] -> y (N,C), the next block's x. With ctx.recompute y is not written.
    virtual void post(Ctx&, const TensorMap& w, const TensorMap& a, Tensor x, Tensor y) const = 0;
    // dx holds dy on entry and the gradient at x through the residual path on return; writes
    // a["do"].
    virtual void post_backward(Ctx&, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                               Tensor x, Tensor dx) const = 0;
    // a["dqkv"] -> dx += the gradient through the attention path. (a["dqkv"] may be overwritten.)
    virtual void pre_backward(Ctx&, const TensorMap& w, const TensorMap& dw, const TensorMap& a,
                              Tensor x, Tensor dx) const = 0;

    // The final norm: out act (N,C); stats "mean", "rstd" stat (N) (mean may be absent).
    virtual void final_norm(Ctx&, const TensorMap& w, Tensor out, Tensor mean, Tensor rstd,
                            Tensor x) const = 0;
    // dx act (N,C) += (the caller clears it)
    virtual void final_norm_backward(Ctx&, const TensorMap& w, const TensorMap& dw, Tensor dx,
                                     Tensor dout, Tensor x, Tensor mean, Tensor rstd) const = 0;
    virtual bool rotary() const = 0;
    // What only this family cannot do: Error(usage), called by validate().
    virtual void check(const ModelConfig&) const = 0;
};

// --- registry
// ---------------------------------------------------------------------------------------
const Family& family(const std::string& name);  // throws Error(usage) with the known names
std::vector<std::string> family_names();
// "gpt2:124M", "gpt2:d12", "llama3:8b", ...; throws Error(usage) with the nearest known name.
ModelConfig model_preset(const std::string& name);
std::vector<std::string> model_preset_names();

// --- head
// ---------------------------------------------------------------------------------------------
// Final norm, classifier in chunks of rows so that logits never exist whole, loss, and the
// gradient.
struct Head {
    struct Io {
        Tensor x;           // act (N,C): the last block's output
        Tensor dx;          // act (N,C), written; absent for loss only
        Tensor targets;     // i32 (N), negative = ignored
        Tensor loss;        // stat (N): loss of each token, 0 where ignored
        Tensor logits;      // act (N,V) optional: the logits, for comparison with references
        double dloss = 1;   // gradient of the objective with respect to each token's loss
        Tensor loss_scale;  // f64 (1) optional, on the device: multiplies dloss
    };
    // Rows of one chunk such that its logits take at most about 256 MiB; at least 1, at most N.
    static int64_t chunk_rows(const ModelConfig&, const Precision&, int64_t N);
    // Owner "head/": one chunk of the normed input (n,C), its stats and logits (n,Vp). Gradients
    // take their places, so `backward` needs no more.
    static void plan(Layout&, const ModelConfig&, const Precision&, int64_t N, Life);
    // w and dw: the head's tensors plus, when tied, "wte". dw may be empty when io.dx is absent.
    static void run(Ctx&, const Family&, const TensorMap& w, const TensorMap& dw, const Arena&,
                    const Io&);
};

// --- tables and cost
// -------------------------------------------------------------------------------- cos and sin of
// position * frequency for positions [0, P), computed in fp64 and rounded once to the host tensor's
// type: (P, R/2, 2). Frequencies follow the scaling rule of the config.
void fill_rope_table(const ModelConfig&, Tensor host_table);
std::vector<double> rope_frequencies(const ModelConfig&);  // R/2 angles per position

struct Cost {
    int64_t params;         // without padding
    int64_t matmul_params;  // with the head, without input embeddings
    // Training FLOP per token at sequence length S: 6 matmul_params + 6 L H D S (causal attention).
    double flops_per_token(const ModelConfig&, int64_t S) const;
};
Cost cost_of(const ModelConfig&);

}  // namespace torus
