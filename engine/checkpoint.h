// Checkpoints: a folder step_NNNNNNNN that appears whole or not at all. Written as step_N.tmp,
// every file checksummed and fsynced, the manifest last, then renamed; only then are older ones
// pruned.
//
//   step_00001000/
//     manifest.json          format, step, position, run id, files with bytes and checksums, config
//     config.json            the model in the Hugging Face layout, so that
//     model.safetensors      ... this pair (and tokenizer.json) loads in other programs
//     optimizer.safetensors  "m.<name>" and "v.<name>" for each tensor of the model, and "control"
//     tokenizer.json         when the run has a BPE tokenizer
#pragma once
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "model/io.h"

namespace torus {

struct CheckpointState {
    int64_t step = 0;              // optimizer steps done
    int64_t next_sequence = 0;     // the loader's position, in sequences
    std::string run_id;            // of the run that began this training
    std::string data_fingerprint;  // of the loader
    std::string config_toml;       // of the run, for people
    std::string model_json;        // what must agree for a resume: sizes of the model
    std::string precision;  // "fp32", ...: the type of master weights and moments in the files
};

// One tensor to save: its bytes come from `fill`, called once, in the order of the list.
struct SavedTensor {
    std::string name;
    DType dtype;
    Shape shape;
    std::function<void(void* dst)> fill;  // writes shape.numel() * size_of(dtype) bytes
};

struct CheckpointFiles {
    std::vector<SavedTensor> model, optimizer;
    ModelConfig config;
    std::string tokenizer_path;  // copied when not empty
};

class CheckpointStore {
public:
    // Creates `dir` when missing and proves that it can be written: Error(permission). Takes a lock
    // that a second run in the same folder meets as Error(mismatch); a dead owner's lock is taken
    // over.
    explicit CheckpointStore(std::string dir);
    ~CheckpointStore();
    CheckpointStore(const CheckpointStore&) = delete;
    CheckpointStore& operator=(const CheckpointStore&) = delete;

    // Error(io), with the bytes needed and free when the disk is full; nothing published then.
    // Afterwards this is the newest checkpoint: those of other runs or of later steps are renamed.
    void save(const CheckpointState&, const CheckpointFiles&, int64_t keep);

    // Newest checkpoint whose manifest and files verify; empty when the folder holds none. Broken
    // ones are skipped with a line on stderr that says what is wrong; when every one is broken,
    // Error(bad_data): training must not quietly start over.
    std::string newest() const;

    static std::string folder_of(int64_t step);  // "step_00001000"

private:
    void prune(int64_t keep);
    std::string dir_;
    int lock_ = -1;
    mutable std::set<int64_t> verified_;  // steps whose every byte was read by this store
};

// Reads and verifies every byte: Error(bad_data) with file, what was found and what was expected.
CheckpointState verify_checkpoint(const std::string& dir);

}  // namespace torus
