// What a run tells: one console line a step with an ETA, and the same fields as JSON lines. A
// failing log never stops a run: one warning, then silence.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>

namespace torus {

struct StepRecord {
    int64_t step = 0, steps = 0;  // 1-based
    double loss = 0, grad_norm = 0, lr = 0;
    double step_ms = 0, tokens_per_s = 0;
    double mfu = -1;      // share of the device's peak, causal; < 0 = unknown
    double peak_gib = 0;  // device memory
    // Most attention work of one rank over the mean of those that share a sequence, with packed
    // documents; < 0 = nothing to balance.
    double imbalance = -1;
    double eta_s = -1;
    int64_t tokens = 0;           // seen so far in the run
    double loss_scale = 1;        // of the next step
    int64_t skipped = 0;          // optimizer steps skipped for non-finite gradients
    bool update_skipped = false;  // in this step
};

class Log {
public:
    // Appends to <log_dir>/log.jsonl when log_dir is not empty. Records of steps after
    // `steps_done`, which an interrupted run left, are cut off, so that a resumed run's log has
    // each step once. With steps_done = 0 an older log is kept as log.N.jsonl.
    Log(const std::string& log_dir, int64_t steps_done);
    ~Log();
    Log(const Log&) = delete;
    Log& operator=(const Log&) = delete;

    void step(const StepRecord&);                              // console and file
    void eval(int64_t step, double val_loss, int64_t tokens);  // console and file
    void sample(int64_t step, const std::string& text);        // escaped on the console
    void message(const std::string& text);                     // a line on the console

private:
    void write(const std::string& line);  // to the file
    std::FILE* file_ = nullptr;
    bool silent_ = false;  // the console failed
};

std::string human_bytes(int64_t bytes);      // "1.50 GiB"
std::string human_duration(double seconds);  // "1h02m", "3m20s", "12s"

}  // namespace torus
