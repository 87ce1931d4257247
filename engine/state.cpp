#include "engine/state.h"

#include <memory>

namespace torus {
namespace {

// Host copy of the parameter asked for last: its parts are saved one after the other.
struct HostParam {
    const Param* param = nullptr;
    std::vector<char> bytes;
};

void add_tensors(std::vector<SavedTensor>& out, Machine& m, const Tensor& flat,
                 const std::string& prefix) {
    auto cache = std::make_shared<HostParam>();
    for (const Component& c : m.params.components()) {
        for (const Param& param : c.params) {
            const std::vector<HfTensor> parts = hf_tensors(param.spec, param.layer);
            for (size_t i = 0; i < parts.size(); ++i) {
                auto fill = [&m, &param, flat, cache, i](void* dst) {
                    const Tensor device = m.params.part(flat, param);
                    if (cache->param != &param) {
                        cache->bytes.resize(size_t(device.bytes()));
                        m.kernels().device().copy(m.stream(), cache->bytes.data(), device.data,
                                                  device.bytes());
                        m.kernels().device().synchronize(m.stream());
                        cache->param = &param;
                    }
                    pack_hf_part(param.spec, i,
                                 Tensor(cache->bytes.data(), device.dtype, device.shape), dst);
                };
                out.push_back({prefix + parts[i].name, flat.dtype, parts[i].shape, fill});
            }
        }
    }
}

}  // namespace

CheckpointFiles checkpoint_files(Machine& m, const ModelConfig& model,
                                 const std::string& tokenizer_path) {
    CheckpointFiles files{.config = model, .tokenizer_path = tokenizer_path};
    add_tensors(files.model, m, m.params.master, "");
    add_tensors(files.optimizer, m, m.params.m, "m.");
    add_tensors(files.optimizer, m, m.params.v, "v.");
    files.optimizer.push_back({"control", DType::f64, m.params.control.shape, [&m](void* dst) {
                                   m.kernels().device().copy(m.stream(), dst, m.params.control.data,
                                                             m.params.control.bytes());
                                   m.kernels().device().synchronize(m.stream());
                               }});
    return files;
}

void start_weights(Machine& m, const Setup& setup, uint64_t seed) {
    if (setup.weights)
        load_weights(m.params, m.kernels(), m.stream(), *setup.weights);
    else
        initialize(m.params, m.kernels(), m.stream(), seed);
}

void load_checkpoint(Machine& m, const std::string& dir) {
    load_weights(m.params, m.kernels(), m.stream(), *open_safetensors(dir + "/model.safetensors"));
    load_optimizer(m.params, m.kernels(), m.stream(),
                   *open_safetensors(dir + "/optimizer.safetensors"));
}

std::string model_signature(const ModelConfig& m) {
    return concat(m.family, " L", m.L, " C", m.C, " H", m.H, "/", m.Hk, " D", m.D, " F", m.F, " V",
                  m.V, m.family == "gpt2" ? concat(" T", m.max_T) : std::string(),
                  m.tied ? " tied" : " untied", m.qkv_bias ? " qkv_bias" : "", " eps", m.norm_eps,
                  " theta", m.rope.theta, " scaling", int(m.rope.scaling), ":", m.rope.factor);
}

}  // namespace torus
