// --model <folder or file>: finds the configuration and the weights, and checks that they belong
// together: every tensor the model needs is there, and no tensor is there that it would not use.
#include <filesystem>
#include <set>

#include "kernels/text.h"
#include "model/io.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

// Buffers that older versions of the library saved along with the weights.
bool is_derived(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
           name.ends_with(".rotary_emb.inv_freq");
}

void check_tensors(const ModelConfig& c, const TensorSource& source) {
    const ParamTable table = family(c.family).params(c);
    std::set<std::string> known;
    const auto add = [&](const std::vector<ParamSpec>& specs, int64_t l) {
        for (const ParamSpec& spec : specs)
            for (const HfTensor& t : hf_tensors(spec, l)) {
                known.insert(t.name);
                if (t.name.starts_with("transformer.") || t.name.starts_with("model."))
                    known.insert(t.name.substr(t.name.find('.') + 1));
            }
    };
    add(table.embed, 0);
    for (int64_t l = 0; l < c.L; ++l) add(table.layer, l);
    add(table.head, 0);
    if (c.tied) known.insert("lm_head.weight");  // a copy of the embedding
    for (const std::string& name : source.names())
        require(known.contains(name) || is_derived(name), Exit::bad_data, source.path(),
                ": tensor ", excerpt(name), " is not one of a ", c.hf_model_type, " model of ", c.L,
                " layers; weights and config.json do not belong together");
}

std::string weights_in(const fs::path& folder) {
    for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
        if (fs::exists(folder / name)) return (folder / name).string();
    fail(Exit::missing_input, folder.string(), ": has neither model.safetensors nor ",
         "model.safetensors.index.json");
}

}  // namespace

OpenedModel open_model(const std::string& path) {
    require(fs::exists(path), Exit::missing_input, path, ": no such file or folder");
    OpenedModel m;
    if (fs::is_directory(path)) {
        const fs::path folder(path);
        require(fs::exists(folder / "config.json"), Exit::missing_input, path,
                ": has no config.json");
        m.config = read_hf_config((folder / "config.json").string());
        m.weights = open_safetensors(weights_in(folder));
    } else {
        require(path.ends_with(".bin"), Exit::bad_data, path,
                ": expected a folder with config.json and model.safetensors, or an llm.c .bin");
        m.config = read_llmc_config(path);
        m.weights = open_llmc_model(path);
    }
    check_tensors(m.config, *m.weights);
    return m;
}

}  // namespace torus
