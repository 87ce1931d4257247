// Kernels: every operation of the engine, once. The CPU backend (kernels/cpu, fp32 and fp64, plain
// loops, fixed order of sums) defines what each op computes; the CUDA backend (kernels/cuda) is
// checked against it.
//
// Dims: B batch, T tokens of one sequence on this rank, N = B*T rows, C channels, H heads, Hk
// key-value heads, D head dim, F feed-forward width, V vocabulary, Vp V padded, O output features.
// Types: "act" activations and working weights, "stat" statistics and losses, "grad" gradient
// accumulators, "master" master weights, "moments" AdamW's averages; see Precision. A Tensor marked
// (pitched) may have a row pitch, every other one is contiguous. "+=" adds to what is there;
// everything else is overwritten. Outputs never alias inputs unless the comment says so. Every op
// is asynchronous on its stream, deterministic, and throws Error on shapes or types that do not
// fit.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "kernels/tensor.h"

namespace torus {

struct Precision {
    DType act, stat, grad, master, moments;
};

// fp64 -> all fp64; fp32 -> all fp32; bf16, fp16 -> act in that type, the rest fp32. A run may keep
// less: master in bf16 like act, moments in bf16.
Precision precision_of(DType dtype);

// Upper bounds over all ops that will be queued on one stream; decides its workspace.
struct WorkspaceDims {
    int64_t rows = 0;      // most rows N of any op
    int64_t channels = 0;  // widest normalised row C
    int64_t vocab = 0;     // rows of the embedding table
    int64_t features = 0;  // widest matmul output
    int64_t heads = 0, kv_heads = 0, head_dim = 0, batch = 0;
    int64_t keys = 0;  // most keys Tk of an attention call
};

// One attention call between a block of queries and a block of keys. Key j is visible to query i
// iff first_key[i] <= j, and j <= i when causal; i and j are global positions (q0 + row, k0 + row).
struct Attn {
    Tensor q, k, v;  // act (B,Tq,H,D), (B,Tk,Hk,D) twice; (pitched); H a multiple of Hk
    Tensor o;        // act (B,Tq,H,D) (pitched); with `carry`: stat, holds the running output
    Tensor lse;  // stat (B,H,Tq) (pitched): log of the sum of exp(scale * q.k) over visible keys
    Tensor first_key;  // optional i32 (B,Tq), contiguous along T (pitched in B)
    int64_t q0 = 0, k0 = 0;
    double scale = 0;  // usually 1/sqrt(D)
    bool causal = true;
    // Merge into (o, lse) of earlier key blocks. Those start at lse = -inf; o is not read there.
    bool carry = false;
};
// A query that sees no key gets o = 0 and lse = -inf; with `carry` they stay as they are, but o may
// be anything where lse is still -inf.

// Gradients of one such call, given the lse of the *whole* softmax and delta = rowsum(dout * o).
struct AttnGrad {
    Tensor q, k, v;     // as in Attn
    Tensor dout;        // act (B,Tq,H,D) (pitched)
    Tensor lse, delta;  // stat (B,H,Tq) (pitched)
    Tensor dq, dk, dv;  // all act or, for sums over blocks, all stat; (pitched)
    Tensor first_key;   // as in Attn
    int64_t q0 = 0, k0 = 0;
    double scale = 0;
    bool causal = true;
    bool add_q = false, add_kv = false;  // dq +=, dk and dv += (stat only); else overwritten
    Tensor o = {};  // optional, act (B,Tq,H,D) (pitched): for cuDNN, which makes its own delta
};

// The numbers of a control tensor, f64 (Control::size): what the optimizer decides and counts. They
// live on the device, so that no step waits for the host.
struct Control {
    enum : int {
        norm,         // of the unscaled gradients
        coefficient,  // of the gradients in this update: unscales and clips; 0 = skip the update
        applied,      // updates made
        skipped,      // updates skipped, since the norm was not finite
        skipped_now,  // of these, without a made one since
        loss_scale,   // of the next backward pass
        good,         // updates made since the scale changed or one was skipped
        size
    };
};

// How the loss scale moves (Micikevicius et al. 2018; the rule of PyTorch's GradScaler): halved
// when an update is skipped, doubled after `window` updates without a skip, within the bounds. It
// is always a power of two, so that scaling and unscaling change no digit of a gradient.
struct LossScale {
    double initial = 1;
    int64_t window = 0;                                    // 0: the scale stays as it is
    static constexpr double lowest = 1, highest = 0x1p24;  // the highest of NVIDIA's Apex
};

// AdamW over flat ranges of equal length n (Loshchilov & Hutter; the update order of PyTorch's
// AdamW). Nothing changes when control says the update is skipped.
//
// Types: m and v are both of the master's type or both bf16. A bf16 param may be its own master.
// State in bf16 is rounded stochastically: to nearest, an increment below half of its last digit
// (1/512) would be lost every time. The random numbers of element i at update t are words
// offset + i of the streams in kernels/rng.h: with `offset` the place of the range in the whole,
// they depend on no partition of it.
struct AdamW {
    Tensor param;    // act (n): master rounded to nearest; the same memory when types agree
    Tensor master;   // master (n)
    Tensor m, v;     // moments (n)
    Tensor grad;     // grad (n)
    Tensor control;  // f64 (Control::size)
    double lr, beta1, beta2, eps, weight_decay;
    uint64_t seed = 0, offset = 0;
};

struct Kernels {
    virtual ~Kernels() = default;
    virtual Device& device() = 0;
    virtual const Precision& precision() const = 0;
    virtual int64_t workspace_bytes(const WorkspaceDims&) const = 0;
    // Of a backend that can choose among algorithms for its matrix products: from now on the first
    // product of each shape times the candidates on its own operands and keeps the fastest. Choices
    // are read from and added to `file`, so that a later run with the same library on the same
    // device type makes the same choices (and so the same bits) without timing. Throws Error(usage)
    // where there is nothing to choose, Error(bad_data) for a broken file, Error(io) when it cannot
    // be written.
    virtual void tune_matmul(const std::string& file);
    // Lets ops add in an order that changes from run to run where that is faster: the last bits of
    // attention's dq then change too. Nothing on the CPU.
    virtual void allow_any_order() {}

    // --- moving and filling ---------------------------------------------------------------------
    virtual void fill(Stream&, Tensor x, double value) = 0;  // any float type or i32; (pitched)
    // dst = src with conversion (round to nearest even); same shape; both (pitched); f64 f32 bf16
    // f16, and i32 -> i32.
    virtual void cast(Stream&, Tensor dst, Tensor src) = 0;
    // bf16 dst (n) from f32 src (n) by stochastic rounding with random_bits(seed, stream_id,
    // offset+i).
    virtual void cast_stochastic(Stream&, Tensor dst, Tensor src, uint64_t seed, uint64_t stream_id,
                                 uint64_t offset) = 0;
    // out = a + b, which may be a; same shape; all (pitched). One type, but out may also be act
    // where a and b are stat: rounded once.
    virtual void add(Stream&, Tensor out, Tensor a, Tensor b) = 0;
    virtual void scale(Stream&, Tensor x, double factor) = 0;  // x *= factor

    // --- embedding ------------------------------------------------------------------------------
    // out act (N,C) = wte act (Vp,C)[ids i32 (N)] (+ wpe act (P,C)[pos i32 (N)] when wpe is there)
    virtual void embedding_forward(Stream&, Tensor out, Tensor ids, Tensor wte, Tensor pos,
                                   Tensor wpe) = 0;
    // dwte grad (Vp,C) += ; dwpe grad (P,C) += (optional); dout act (N,C)
    virtual void embedding_backward(Stream&, Tensor dwte, Tensor dwpe, Tensor dout, Tensor ids,
                                    Tensor pos) = 0;

    // --- norms (Ba et al. 2016; Zhang & Sennrich 2019) ------------------------------------------
    // out act (N,C); mean, rstd stat (N); x act (N,C); w, b act (C)
    virtual void layernorm_forward(Stream&, Tensor out, Tensor mean, Tensor rstd, Tensor x,
                                   Tensor w, Tensor b, double eps) = 0;
    // dx act (N,C) += ; dw, db grad (C) += ; dout act (N,C)
    virtual void layernorm_backward(Stream&, Tensor dx, Tensor dw, Tensor db, Tensor dout, Tensor x,
                                    Tensor w, Tensor mean, Tensor rstd) = 0;
    virtual void rmsnorm_forward(Stream&, Tensor out, Tensor rstd, Tensor x, Tensor w,
                                 double eps) = 0;
    virtual void rmsnorm_backward(Stream&, Tensor dx, Tensor dw, Tensor dout, Tensor x, Tensor w,
                                  Tensor rstd) = 0;

    // --- matmul; weights are (out, in) ----------------------------------------------------------
    // out act (N,O) = x act (N,C) w act (O,C)^T (+ bias act (O)) (+ residual act (N,O)); bias and
    // residual optional, residual may be out. (pitched): out, x, residual
    virtual void matmul_forward(Stream&, Tensor out, Tensor x, Tensor w, Tensor bias,
                                Tensor residual) = 0;
    // dx act (N,C) = dout act (N,O) w; with `accumulate` +=. (pitched): dx, dout
    virtual void matmul_backward_input(Stream&, Tensor dx, Tensor dout, Tensor w,
                                       bool accumulate) = 0;
    // A linear with its GELU, pre = x w^T (+ bias) and out = gelu(pre), and the way back through
    // the linear after it: dpre = (dout w) * gelu'(pre). out, pre act (N,O), dpre, pre act (N,C);
    // here they are matmul and GELU one after the other, a backend may fuse them. (pitched): x,
    // dout
    virtual void matmul_gelu_forward(Stream&, Tensor out, Tensor pre, Tensor x, Tensor w,
                                     Tensor bias);
    virtual void matmul_gelu_backward_input(Stream&, Tensor dpre, Tensor dout, Tensor w,
                                            Tensor pre);
    // dw grad (O,C) = dout^T x, with `accumulate` +=; db grad (O) += column sums of dout
    // (optional). (pitched): dout, x
    virtual void matmul_backward_weight(Stream&, Tensor dw, Tensor db, Tensor dout, Tensor x,
                                        bool accumulate) = 0;

    // --- activations ----------------------------------------------------------------------------
    // GELU, tanh form (Hendrycks & Gimpel 2016). out, x act, any shape
    virtual void gelu_forward(Stream&, Tensor out, Tensor x) = 0;
    virtual void gelu_backward(Stream&, Tensor dx, Tensor dout, Tensor x) = 0;  // dx may be dout
    // SwiGLU (Shazeer 2020): gate_up act (N,2F) = [gate | up]; out act (N,F) = silu(gate) * up
    virtual void swiglu_forward(Stream&, Tensor out, Tensor gate_up) = 0;
    // dgate_up may be gate_up: each pair is read before it is written.
    virtual void swiglu_backward(Stream&, Tensor dgate_up, Tensor dout, Tensor gate_up) = 0;

    // --- rotary position embedding (Su et al. 2021), pairs (i, i + R/2) of the first R dims
    // ------- x act (N,H,D) in place (pitched); pos i32 (N); table stat (P,R/2,2): cos and sin of
    // each angle
    virtual void rope_forward(Stream&, Tensor x, Tensor pos, Tensor table) = 0;
    virtual void rope_backward(Stream&, Tensor dx, Tensor pos,
                               Tensor table) = 0;  // the inverse turn

    // --- attention ------------------------------------------------------------------------------
    virtual void attention_forward(Stream&, const Attn&) = 0;
    // delta stat (B,H,T) (pitched) = sum over D of dout * o; o, dout (B,T,H,D) (pitched), o act or
    // stat
    virtual void attention_delta(Stream&, Tensor delta, Tensor dout, Tensor o) = 0;
    virtual void attention_backward(Stream&, const AttnGrad&) = 0;
    // (o, lse) = merge of two softmax parts, overflow-safe; all stat; o (B,T,H,D), lse (B,H,T)
    // (pitched). Parts with lse = -inf weigh nothing; their o is not read.
    virtual void attention_merge(Stream&, Tensor o, Tensor lse, Tensor o2, Tensor lse2) = 0;

    // --- loss -----------------------------------------------------------------------------------
    // loss stat (n) = -log softmax(logits act (n,Vp)[:V])[target]; targets i32 (n), negative =
    // ignored (loss 0). dlogits act (n,Vp), optional, may be logits: dloss * loss_scale *
    // d(loss)/d(logits), 0 in columns from V on. loss_scale f64 (1), optional: on the device.
    virtual void classifier(Stream&, Tensor loss, Tensor logits, Tensor dlogits, Tensor targets,
                            int64_t V, double dloss, Tensor loss_scale) = 0;

    // --- reductions and optimizer ---------------------------------------------------------------
    // out f64 (1) = or += sum of x (float type, any shape)
    virtual void sum(Stream&, Tensor out, Tensor x, bool accumulate) = 0;
    virtual void sum_squares(Stream&, Tensor out, Tensor x, bool accumulate) = 0;
    // Control f64 (Control::size) of one update: norm = sqrt(sum_squares) / loss_scale. Finite:
    // coefficient = min(1, max_norm / (norm + 1e-6)) / loss_scale, it counts as applied, and the
    // scale may double. Otherwise coefficient = 0, it counts as skipped, and the scale is halved.
    // max_norm <= 0 never clips.
    virtual void grad_control(Stream&, Tensor control, Tensor sum_squares, double max_norm,
                              const LossScale&) = 0;
    // Gradient = coefficient * grad; the bias correction uses the count of applied updates.
    virtual void adamw(Stream&, const AdamW&) = 0;
};

struct CpuOptions {
    bool plain_matmul = false;  // loops instead of BLAS: the same bits on every machine
};
// dtype f32 or f64.
std::unique_ptr<Kernels> make_cpu_kernels(DType dtype, CpuOptions options = {});

// What keeps this binary from using a GPU here; empty when one can be used.
std::string cuda_unavailable_reason();
// dtype bf16, f16 or f32, on GPU `index`. Throws Error(no_device) with the reason when there is
// none.
std::unique_ptr<Kernels> make_cuda_kernels(DType dtype, int index);
// The same backend without a GPU, to plan bytes: they hold for every GPU. Its device has no memory
// and runs nothing. Throws Error(no_device) in a build without CUDA.
std::unique_ptr<Kernels> make_cuda_planner(DType dtype);

}  // namespace torus
