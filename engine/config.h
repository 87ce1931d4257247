// The command line and the TOML file of one run. The flags are a contract: add, do not rename. A
// value comes from the flag, else from --config's file, else from the default here.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "comm/comm.h"

namespace torus {

enum class Recompute : uint8_t { none, attention_out, full, automatic };
enum class Schedule : uint8_t { cosine, linear, constant, wsd };
enum class ResumeMode : uint8_t { automatic, must, never };
enum class AttentionKernels : uint8_t { flash, cudnn };
enum class CudaGraph : uint8_t { automatic, on, off };

struct Config {
    // model and data
    std::string model = "gpt2:124M";       // preset, folder in Hugging Face layout, or llm.c .bin
    std::string data, val_data;            // globs: .bin shards, .txt, .jsonl
    std::string tokenizer = "bytes";       // bytes, gpt2, or a folder or file with tokenizer.json
    std::string cache_dir = "data_cache";  // where .txt and .jsonl are kept once tokenized
    int64_t seq_length = 1024;
    bool document_mask = false;
    bool shuffle = true;

    // batch and optimizer
    int64_t micro_batch_size = 4;     // B: sequences of one forward and backward
    int64_t global_batch_tokens = 0;  // tokens of one optimizer step; 0 = one micro-batch
    int64_t steps = 1000;
    double lr = 3e-4, min_lr_fraction = 0.1;  // of cosine, linear and wsd at the last step
    Schedule lr_schedule = Schedule::cosine;
    int64_t warmup_steps = 0;
    double decay_fraction = 0.2;  // wsd: share of the steps that decays
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double grad_clip = 1.0;  // 0 = no clipping
    uint64_t seed = 42;

    // machine
    int64_t timeout = 600;               // seconds of a step, save or evaluation; 0 = no watchdog
    int ranks = 0;                       // processes; 0 = as many as the launcher started
    std::string parallel_mode = "auto";  // see comm/seq.h
    int sp = 0, ring = 0, ulysses = 0;   // ranks that share a sequence, and how; 0 = chosen
    Exchange exchange = Exchange::automatic;  // what moves their messages between GPUs
    std::string device = "auto";              // auto, cuda, cpu
    std::string dtype = "auto";        // auto (bf16 on cuda, fp32 on cpu), bf16, fp16, fp32, fp64
    std::string moments = "auto";      // AdamW's: auto (fp32; fp64 with fp64), fp32, bf16
    bool master_weights = true;        // off: bf16 weights are their own masters
    std::string loss_scale = "auto";   // auto (dynamic with fp16, else 1), dynamic, a power of two
    int64_t loss_scale_window = 2000;  // dynamic: updates without a skip until it doubles
    std::string tune_matmul;           // GPU: file of timed matmul choices; empty = none
    int threads = 0;                   // CPU backend; 0 = all cores
    Recompute recompute = Recompute::none;
    bool deterministic = true;                    // off: attention may add in any order
    CudaGraph cuda_graph = CudaGraph::automatic;  // forward and backward as one launch
    AttentionKernels attention = AttentionKernels::flash;
    bool plan = false;       // print the memory plan and stop
    bool verify_sp = false;  // compare the ranks with one alone before training

    // output
    std::string save_dir;    // empty = no checkpoints
    int64_t save_every = 0;  // steps; 0 = at the end only
    int64_t keep = 2;        // newest checkpoints kept
    ResumeMode resume = ResumeMode::automatic;
    int64_t eval_every = 0, eval_batches = 20;
    int64_t sample_every = 0, sample_tokens = 128;
    double temperature = 0.8;
    int64_t top_k = 0;          // 0 = all
    std::string generate;       // prompt: sample from the model and stop
    std::string verify;         // reference folder: compare and stop
    std::string log_dir;        // JSON lines; empty = none
    std::string profile_steps;  // "A:B", see profiled_steps(); empty = none
    bool plain_matmul = false;  // CPU: loops instead of BLAS, the same bits on every machine

    // The flags and file keys that were given explicitly, e.g. "lr".
    std::vector<std::string> given;
};

// Parses argv and --config's file, checks every value that can be checked without touching a file
// or a device, and returns the run's configuration. Throws Error(usage) with the flag (or file and
// line), what was found, what is allowed, and for an unknown flag the nearest known one. Returns
// false when there is nothing to run (--help was printed).
bool parse_config(int argc, const char* const* argv, Config& out);

// Steps first to last, counted from 1 as in the log, that a profiler records; 0 = none.
struct StepRange {
    int64_t first = 0, last = 0;
};
StepRange profiled_steps(const Config&);  // Error(usage) when --profile-steps is not within --steps

// The configuration as TOML, readable by --config; also written next to each log.
std::string to_toml(const Config&);

}  // namespace torus
