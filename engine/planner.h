// The memory of a run: exact bytes before anything is allocated, one arena after. --plan prints the
// table and stops; after the first step the high-water mark must equal the plan, or the run stops.
#pragma once
#include <memory>
#include <string>

#include "comm/mesh.h"
#include "engine/config.h"
#include "engine/optimizer.h"
#include "engine/sample.h"
#include "engine/step.h"

namespace torus {

// Everything of one rank that owns or uses planned memory, in the order it is built.
class Machine {
public:
    struct Options {
        int64_t B = 1, S = 1;
        Recomputation recompute;
        bool train = true;  // gradients and moments
        bool step = true;   // forward (and backward) of batches
        bool document_mask = false;
        int64_t sample_context = 0;  // 0 = no sampler
        int64_t positions = 0;       // most positions a batch uses, when more than S
        Mesh* mesh = nullptr;        // null: one rank
        std::string mode = "data_parallel";
        Comm* all = nullptr;           // the ranks whose gradients add up
        bool sum_by_exchange = false;  // see GradientSum
        bool logits = false;           // room for the logits of one batch (--verify)
        bool record = false;           // see Step::Options; sequences must be whole
    };
    Machine(Kernels&, const ModelConfig&, const Family&, const Config&, const Options&);

    // The least Recomputation::step with which the plan leaves enough of what the device has free
    // to the libraries; the last one when none does. sharers: ranks whose memory that is.
    static int64_t least_recompute(Kernels&, const ModelConfig&, const Family&, const Config&,
                                   Options, int sharers);

    // Bytes of the plan.
    int64_t device_bytes() const { return device_.bytes() + workspace_bytes_; }
    int64_t pinned_bytes() const { return pinned_.bytes(); }
    std::string table() const;  // by owner, with the sums

    // Lays the plan: allocates, binds, freezes the device. Error(out_of_memory) with what is free,
    // the largest micro-batch that fits it, and the table.
    void allocate();
    // The high-water mark is the plan: throws otherwise.
    void check_high_water() const;

    Tensor logits() const { return device_arena_["verify/logits"]; }  // act (B*S, V)
    // pinned f64 (2, 1 + Control::size): loss and control of two steps
    Tensor readback() const { return pinned_arena_["trainer/readback"]; }
    Kernels& kernels() { return k_; }
    Stream& stream() { return stream_; }
    Parameters params;
    std::unique_ptr<Step> step;            // when options.step
    std::unique_ptr<Optimizer> optimizer;  // when options.train
    std::unique_ptr<Sampler> sampler;      // when options.sample_context > 0

    ~Machine();
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

private:
    void allocate_device();
    int64_t largest_batch(int64_t budget) const;

    Kernels& k_;
    const ModelConfig& model_;
    const Family& family_;
    const Config& config_;
    Options o_;
    std::unique_ptr<SeqParallel> seq_;
    Layout device_, pinned_;
    int64_t workspace_bytes_ = 0;
    Arena device_arena_, pinned_arena_;
    Buffer workspace_;
    Stream stream_;
};

}  // namespace torus
