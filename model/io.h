// Weights on disk: safetensors (https://github.com/huggingface/safetensors, format section of its
// README), config.json of the Hugging Face library, and llm.c's model files. Readers take untrusted
// files: every size is checked against the file before memory is touched, errors are
// Error(bad_data | missing_input) that name file, position, what was found and what is allowed.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/model.h"

namespace torus {

// A set of host tensors by name, read-only, memory-mapped where the format allows.
struct TensorSource {
    virtual ~TensorSource() = default;
    virtual std::vector<std::string> names() const = 0;
    virtual bool has(const std::string& name) const = 0;
    virtual Tensor find(const std::string& name) const = 0;  // throws Error(bad_data) when absent
    virtual bool transposed_linears() const {
        return true;
    }  // GPT-2 linears as (in, out), as HF stores
    virtual std::string path() const = 0;
};

// One .safetensors file, or a model.safetensors.index.json with its shards.
std::unique_ptr<TensorSource> open_safetensors(const std::string& path);

// Writes one safetensors file in the order of `add`, header first. Data is streamed: `add` all
// specs, then `write` each tensor's bytes in the same order (in as many pieces as you like), then
// `finish` (flush, fsync, close, every return value checked). Throws Error(io). The same state
// gives the same bytes.
class SafetensorsWriter {
public:
    explicit SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata = {});
    ~SafetensorsWriter();  // an unfinished file is closed, not removed
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
    void add(const std::string& name, DType dtype, const Shape& shape);
    void write(const void* data, int64_t bytes);
    void finish();

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// config.json -> ModelConfig. Unknown keys that change the maths are errors, not ignored.
ModelConfig read_hf_config(const std::string& path);
void write_hf_config(const std::string& path, const ModelConfig&);

// llm.c model files (magic 20240326, version 3 fp32, version 5 bf16).
ModelConfig read_llmc_config(const std::string& path);
std::unique_ptr<TensorSource> open_llmc_model(const std::string& path);
// dtype f32 or bf16; `read` fills dst (spec.shape, dtype) with our tensor of layer l.
void write_llmc_model(
    const std::string& path, const ModelConfig&, DType dtype,
    const std::function<void(const ParamSpec& spec, int64_t l, Tensor dst)>& read);

// --model <dir or file>: a folder with config.json and model.safetensors (or its index), or a .bin.
struct OpenedModel {
    ModelConfig config;
    std::unique_ptr<TensorSource> weights;
};
OpenedModel open_model(const std::string& path);

// Our tensor `spec` of layer `l` from the source's parts into host memory `dst` (f64, f32, bf16 or
// f16, contiguous, spec.shape); padded rows become 0. `prefix` goes before each part's name
// ("grad.", "after.", "m.").
void read_param(const TensorSource&, const ParamSpec& spec, int64_t l, Tensor dst,
                const std::string& prefix = "");

// The reverse: visits each part of `spec` as the file stores it.
struct HfTensor {
    std::string name;
    Shape shape;
};
std::vector<HfTensor> hf_tensors(const ParamSpec& spec, int64_t l);  // names and shapes, in order
// Bytes of part `i` in file layout, from our contiguous host tensor.
void pack_hf_part(const ParamSpec& spec, size_t i, Tensor src, void* dst);

}  // namespace torus
