// Model files of llm.c (https://github.com/karpathy/llm.c): 256 int32 of header {magic 20240326,
// version 3 = fp32 or 5 = bf16, max_T, V, L, H, C, Vp}, then 16 tensors, each stacked over layers,
// linears as (out, in). The names given out are those of the Hugging Face library.
#include <array>
#include <cstring>

#include "kernels/text.h"
#include "model/checked_file.h"
#include "model/io.h"
#include "model/mapped_file.h"

namespace torus {
namespace {

constexpr int32_t magic = 20240326, version_f32 = 3, version_bf16 = 5;
constexpr size_t header_ints = 256;
constexpr int64_t header_bytes = int64_t(header_ints) * 4;

// The order of tensors in the file, by our names.
constexpr const char* file_order[] = {
    "wte",   "wpe",   "ln1_w", "ln1_b", "qkv_w",    "qkv_b",    "proj_w", "proj_b",
    "ln2_w", "ln2_b", "fc_w",  "fc_b",  "fcproj_w", "fcproj_b", "lnf_w",  "lnf_b",
};

struct Stacked {  // one of the file's tensors: `copies` times `spec`
    ParamSpec spec;
    int64_t copies;
};

std::vector<Stacked> stacked_tensors(const ModelConfig& c) {
    const ParamTable table = family("gpt2").params(c);
    std::vector<Stacked> out;
    for (const char* name : file_order) {
        for (const auto* specs : {&table.embed, &table.layer, &table.head})
            for (const ParamSpec& spec : *specs)
                if (spec.name == name) out.push_back({spec, specs == &table.layer ? c.L : 1});
    }
    CHECK(out.size() == std::size(file_order));
    return out;
}

struct Header {
    ModelConfig config;
    DType dtype;
    int64_t padded_vocab;  // the file's, not ours
};

Header read_header(const MappedFile& file) {
    const std::string& path = file.path();
    require(file.size() >= header_bytes, Exit::bad_data, path, ": ", file.size(),
            " bytes, an llm.c model has a header of ", header_bytes, "; it was cut or is another ",
            "format");
    std::array<int32_t, header_ints> h;
    std::memcpy(h.data(), file.data(), size_t(header_bytes));
    require(h[0] == magic, Exit::bad_data, path, ": magic number is ", h[0],
            ", an llm.c model has ", magic);
    require(h[1] == version_f32 || h[1] == version_bf16, Exit::bad_data, path, ": version is ",
            h[1], ", supported are ", version_f32, " (fp32) and ", version_bf16, " (bf16)");
    constexpr const char* fields[] = {"max_T", "V", "L", "H", "C", "Vp"};
    for (size_t i = 0; i < std::size(fields); ++i)
        require(h[2 + i] > 0, Exit::bad_data, path, ": header field ", fields[i], " is ", h[2 + i],
                ", it must be positive");

    Header out{{}, h[1] == version_f32 ? DType::f32 : DType::bf16, h[7]};
    ModelConfig& c = out.config;
    c.family = c.hf_model_type = "gpt2";
    c.max_T = h[2];
    c.V = h[3];
    c.L = h[4];
    c.H = c.Hk = h[5];
    c.C = h[6];
    require(c.C % c.H == 0, Exit::bad_data, path, ": channels ", c.C, " are not a multiple of ",
            c.H, " heads");
    require(out.padded_vocab >= c.V, Exit::bad_data, path, ": padded vocabulary ", out.padded_vocab,
            " is smaller than the vocabulary ", c.V);
    c.D = c.C / c.H;
    c.F = 4 * c.C;
    c.qkv_bias = true;
    try {
        validate(c);
    } catch (const Error& e) {
        fail(Exit::bad_data, path, ": ", e.what());
    }
    return out;
}

class LlmcModel final : public TensorSource {
public:
    explicit LlmcModel(const std::string& path) : file_(path), header_(read_header(file_)) {
        const ModelConfig& c = header_.config;
        int64_t at = header_bytes;  // validate() bounds every size: no overflow below 2^63
        for (const auto& [spec, copies] : stacked_tensors(c)) {
            Shape shape = spec.shape;
            if (spec.name == "wte") shape.dim[0] = header_.padded_vocab;
            const int64_t bytes = shape.numel() * size_of(header_.dtype);
            const HfPart& part = spec.hf.front();
            if (spec.name == "wte") shape.dim[0] = c.V;
            const size_t place = part.name.find("{l}");
            for (int64_t l = 0; l < copies && at <= file_.size(); ++l, at += bytes) {
                std::string name = part.name;
                if (place != std::string::npos) name.replace(place, 3, std::to_string(l));
                tensors_[name] = {at, shape};
            }
        }
        require(at == file_.size(), Exit::bad_data, path, ": ", file_.size(),
                " bytes, the header's sizes need ", at, at > file_.size() ? " or more" : "",
                "; the file was cut or has a wrong header");
    }
    std::vector<std::string> names() const override {
        std::vector<std::string> out;
        for (const auto& [name, place] : tensors_) out.push_back(name);
        return out;
    }
    bool has(const std::string& name) const override { return tensors_.contains(name); }
    bool transposed_linears() const override { return false; }
    std::string path() const override { return file_.path(); }
    Tensor find(const std::string& name) const override {
        const auto it = tensors_.find(name);
        require(it != tensors_.end(), Exit::bad_data, path(), ": has no tensor ", excerpt(name));
        const auto& [offset, shape] = it->second;
        return Tensor(const_cast<char*>(file_.data()) + offset, header_.dtype, shape);
    }

private:
    MappedFile file_;
    Header header_;
    std::map<std::string, std::pair<int64_t, Shape>> tensors_;
};

}  // namespace

ModelConfig read_llmc_config(const std::string& path) {
    return read_header(MappedFile(path)).config;
}

std::unique_ptr<TensorSource> open_llmc_model(const std::string& path) {
    return std::make_unique<LlmcModel>(path);
}

void write_llmc_model(
    const std::string& path, const ModelConfig& c, DType dtype,
    const std::function<void(const ParamSpec& spec, int64_t l, Tensor dst)>& read) {
    require(c.family == "gpt2" && c.tied && c.F == 4 * c.C && c.norm_eps == 1e-5, Exit::usage, path,
            ": llm.c's format holds GPT-2 only, with a tied head, F = 4C and an epsilon of 1e-5");
    CHECK(dtype == DType::f32 || dtype == DType::bf16);
    std::array<int32_t, header_ints> h{};
    h[0] = magic;
    h[1] = dtype == DType::f32 ? version_f32 : version_bf16;
    const int64_t sizes[] = {c.max_T, c.V, c.L, c.H, c.C, c.Vp()};
    for (size_t i = 0; i < std::size(sizes); ++i) h[2 + i] = int32_t(sizes[i]);
    CheckedFile file(path);
    file.write(h.data(), header_bytes);
    std::vector<char> host;
    for (const auto& [spec, copies] : stacked_tensors(c))
        for (int64_t l = 0; l < copies; ++l) {
            host.resize(size_t(spec.shape.numel() * size_of(dtype)));
            read(spec, l, Tensor(host.data(), dtype, spec.shape));
            file.write(host.data(), int64_t(host.size()));
        }
    file.finish();
}

}  // namespace torus
