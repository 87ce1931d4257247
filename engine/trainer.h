// Trainer: from a configuration to a trained model. One optimizer step reads all its micro-batches
// first (their valid targets are the loss's denominator), queues forward, backward and update, and
// reports the step before it: results come back one step late, so the host never waits inside a
// step.
#pragma once
#include <memory>

#include "engine/checkpoint.h"
#include "engine/inputs.h"
#include "engine/log.h"
#include "engine/planner.h"
#include "engine/world.h"

namespace torus {

class Trainer {
public:
    Trainer(const Config&, World&);
    ~Trainer();
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    // Runs to --steps, or to a stop signal: then saves and returns preempted.
    Exit train();

private:
    void open_store();
    void resume_or_start();
    void check_resumable(const CheckpointState& old, const std::string& folder) const;
    int64_t read_batches();  // of one step; valid targets over all ranks
    void train_step(int64_t step);
    void report();                                // the pending step's record
    void between_steps(int64_t done, bool last);  // eval, sample, save
    void eval(int64_t done);
    void sample(int64_t done);
    void save(int64_t done, bool last);

    const Config& c_;
    World& world_;
    Setup setup_;
    std::unique_ptr<Loader> loader_, val_loader_;
    std::unique_ptr<CheckpointStore> store_;  // on rank 0, with --save-dir
    std::unique_ptr<Machine> machine_;
    std::unique_ptr<Log> log_;  // on rank 0
    std::string tokenizer_path_;
    CheckpointState state_;
    int64_t saved_step_ = -1;
    std::vector<Batch> batches_;  // of one step on this rank

    struct Pending {
        StepRecord record;
        int64_t valid = 0;
        int slot = 0;
    };
    std::unique_ptr<Pending> pending_;
    Event begin_[2], done_[2];  // of the step in each slot
    double timed_ms_ = 0;       // of steps after the first
    int64_t timed_steps_ = 0;
};

}  // namespace torus
