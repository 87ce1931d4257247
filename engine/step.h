// Step: one micro-batch through the model, forward and backward. The one place where the layer
// loop, recompute and the sequence mode meet (sharded weights and offload will meet here too).
//
// Loss contract: the caller counts the valid targets of the whole optimizer step beforehand and
// passes dloss = 1 / that count; gradients and loss sums then simply add up over micro-batches and
// ranks.
#pragma once
#include "comm/seq.h"
#include "data/data.h"
#include "engine/activations.h"
#include "engine/gradient_sum.h"
#include "engine/params.h"

namespace torus {

class Step {
public:
    struct Options {
        int64_t B = 0;          // sequences of one micro-batch
        int64_t S = 0;          // global tokens of one sequence
        int64_t positions = 0;  // most positions a batch uses, when more than S
        Recomputation recompute;
        bool train = true;
        bool document_mask = false;    // batches carry first_key
        Comm* all = nullptr;           // the ranks whose gradients add up; null: this one alone
        bool sum_by_exchange = false;  // see GradientSum
        // Forward and backward are recorded and replayed; the device must record, and this rank
        // hold whole sequences.
        bool record = false;
    };
    Step(Kernels&, const ModelConfig&, const Family&, Parameters&, SeqParallel&, const Options&);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    void plan(Layout& device, Layout& pinned) const;  // owners activations, head, seq, step
    WorkspaceDims workspace_dims() const;
    void bind(const Arena& device, const Arena& pinned);
    void prepare(Stream&);  // after bind: builds the RoPE table

    // Starts an optimizer step of so many micro-batches, or an evaluation: loss_sum() is 0, and the
    // next forward_backward starts the gradients anew.
    void begin(Stream&, int64_t micro_batches = 1);
    // Adds d(dloss * sum of token losses)/d(weights), times the parameters' loss scale, to the
    // gradients, and the sum of token losses to loss_sum(); the last micro-batch leaves the
    // gradients as their sum over all ranks. `logits`, (N,V) act, is written when given.
    void forward_backward(Stream&, const Batch&, double dloss, Tensor logits = {});
    // Adds the sum of token losses to loss_sum().
    void forward(Stream&, const Batch&);

    Tensor loss_sum() const { return loss_sum_; }  // f64 (1), on the device
    // Most attention work of one rank over the mean, for the batch uploaded last.
    double imbalance() const { return seq_.imbalance(); }

private:
    Ctx context(Stream& s, bool recompute) const;
    void upload(Stream&, const Batch&);
    void compute(Stream&, double dloss, Tensor logits);
    void add_up(Stream&, const Component&);
    void compute_recorded(Stream&, double dloss);
    void run_forward(Stream&);
    void attention_forward(Stream&, int64_t l);
    void run_head(Stream&, double dloss, bool backward, Tensor logits);
    void run_backward(Stream&);
    void restore(Stream&, int64_t l);
    int64_t rows() const { return o_.B * T_; }

    Kernels& k_;
    const ModelConfig& model_;
    const Family& family_;
    Parameters& params_;
    SeqParallel& seq_;
    Options o_;
    int64_t T_ = 0;  // tokens of each sequence on this rank
    Activations acts_;
    Arena const* device_ = nullptr;
    Tensor ids_, targets_, pos_, first_key_;  // i32 (B,T)
    Tensor staged_;                           // pinned i32 (4,B,T)
    Tensor rope_, losses_, loss_sum_;
    Event uploaded_;
    bool in_flight_ = false;
    bool accumulate_ = false;    // gradients of earlier micro-batches are there
    int64_t micro_batches_ = 1;  // of this step, not done yet
    GradientSum sum_;
    struct Recorded {
        double dloss = -1;
        Recording recording;
    };
    Recorded recorded_[2];  // of a step's first micro-batch, and of the others
};

}  // namespace torus
