// Which device, which precision, which model, which tokenizer.
#include "engine/setup.h"

#include <algorithm>
#include <filesystem>

#include "kernels/cuda/cudnn_attention.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include "engine/precision.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

bool is_preset(const std::string& model) {
    return model.find(':') != std::string::npos && !fs::exists(model);
}

// The newest checkpoint when `path` is a --save-dir, else `path` itself.
std::string model_folder(const std::string& path) {
    if (!fs::is_directory(path) || fs::exists(fs::path(path) / "config.json")) return path;
    std::string newest;
    for (const auto& entry : fs::directory_iterator(path)) {
        const std::string name = entry.path().filename().string();
        const bool step = name.rfind("step_", 0) == 0 && name.find('.') == std::string::npos;
        if (step && entry.is_directory() && entry.path().string() > newest)
            newest = entry.path().string();
    }
    return newest.empty() ? path : newest;
}

// Text needs a tokenizer; shards do not, unless somebody wants to read what the model writes.
bool is_text(const std::string& glob) {
    for (const char* ending : {".txt", ".jsonl", ".md"}) {
        const std::string e = ending;
        if (glob.size() >= e.size() && glob.compare(glob.size() - e.size(), e.size(), e) == 0)
            return true;
    }
    return false;
}

std::unique_ptr<Tokenizer> choose_tokenizer(const Config& c) {
    const bool given = std::find(c.given.begin(), c.given.end(), "tokenizer") != c.given.end();
    if (given) return open_tokenizer(c.tokenizer);
    if (!is_preset(c.model) && fs::is_directory(c.model)) {
        const fs::path own = fs::path(model_folder(c.model)) / "tokenizer.json";
        if (fs::exists(own)) return open_tokenizer(own.string());
    }
    if (is_text(c.data) || is_text(c.val_data)) return open_tokenizer(c.tokenizer);
    return nullptr;
}

std::string millions(int64_t n) {
    std::ostringstream out;
    out.precision(n >= 100'000'000 ? 4 : 3);
    if (n >= 1'000'000'000)
        out << double(n) / 1e9 << "B";
    else if (n >= 1'000'000)
        out << double(n) / 1e6 << "M";
    else
        out << n;
    return out.str();
}

// What the optimizer's state has less than usual.
std::string state_text(const Precision& p) {
    std::string out;
    if (p.moments == DType::bf16) out += ", bf16 moments";
    if (p.master == DType::bf16) out += ", no master weights";
    return out;
}

}  // namespace

std::string resolve_device(const Config& c) {
    if (c.device != "auto") return c.device;
    return cuda_unavailable_reason().empty() ? "cuda" : "cpu";
}

DType resolve_dtype(const Config& c, const std::string& device) {
    const std::string name = c.dtype == "auto" ? (device == "cuda" ? "bf16" : "fp32") : c.dtype;
    const bool cuda = device == "cuda";
    if (name == "fp32") return DType::f32;
    if (name == "fp64" && !cuda) return DType::f64;
    if (name == "bf16" && cuda) return DType::bf16;
    if (name == "fp16" && cuda) return DType::f16;
    fail(Exit::usage, "--dtype ", name, ": not available with --device ", device, "; use ",
         cuda ? "bf16, fp16 or fp32" : "fp32 or fp64");
}

std::unique_ptr<Kernels> make_backend(const Config& c, DType dtype, bool cuda, int gpu) {
    if (!cuda) return make_cpu_kernels(dtype, {.plain_matmul = c.plain_matmul});
    auto kernels = c.plan ? make_cuda_planner(dtype) : make_cuda_kernels(dtype, gpu);
    if (c.attention == AttentionKernels::cudnn) use_cudnn_attention(*kernels);
    if (!c.deterministic) kernels->allow_any_order();
    return kernels;
}

Setup make_setup(const Config& c, int gpu) {
    Setup s;
    const std::string device = resolve_device(c);
    const DType dtype = resolve_dtype(c, device);
    require(
        c.profile_steps.empty() || device == "cuda", Exit::no_device,
        "--profile-steps: needs a GPU, and --device auto found none: ", cuda_unavailable_reason());
    const Precision precision = run_precision(c, precision_of(dtype));

    if (is_preset(c.model)) {
        s.model = model_preset(c.model);
    } else {
        OpenedModel opened = open_model(model_folder(c.model));
        s.model = opened.config;
        s.weights = std::move(opened.weights);
    }
    s.tokenizer = choose_tokenizer(c);
    if (s.weights) {
        require(!s.tokenizer || s.tokenizer->vocab_size() <= s.model.V, Exit::mismatch,
                "--tokenizer ", s.tokenizer ? s.tokenizer->name() : "", ": has ",
                s.tokenizer ? s.tokenizer->vocab_size() : 0, " tokens, the model ", c.model,
                " knows ", s.model.V, "; use the tokenizer that the model was trained with");
    } else {  // a new model takes the vocabulary of its tokenizer and the positions it needs
        if (s.tokenizer) s.model.V = s.tokenizer->vocab_size();
        s.model.max_T = std::max(s.model.max_T, c.seq_length);
    }
    s.cuda = device == "cuda";
    require(s.cuda || c.cuda_graph != CudaGraph::on, Exit::no_device,
            "--cuda-graph: needs a GPU, and --device auto found none: ", cuda_unavailable_reason());
    require(
        s.cuda || c.exchange != Exchange::copy, Exit::no_device,
        "--exchange copy: needs GPUs, and --device auto found none: ", cuda_unavailable_reason());
    validate(s.model);
    s.family = &family(s.model.family);
    require(s.family->rotary() || c.seq_length <= s.model.max_T, Exit::usage, "--seq-length ",
            c.seq_length, ": ", c.model, " has ", s.model.max_T,
            " learned positions; use at most that many");

    if (c.attention == AttentionKernels::cudnn) {
        require(s.cuda, Exit::usage, "--attention: cudnn needs a GPU; ", cuda_unavailable_reason());
        const std::string reason = cudnn_attention_refusal(c.seq_length, s.model.D);
        require(reason.empty(), Exit::usage, "--attention: ", reason);
    }
#ifdef _OPENMP
    if (c.threads > 0) omp_set_num_threads(c.threads);
#endif
    s.kernels = make_backend(c, dtype, s.cuda, gpu);
    s.summary =
        concat(c.model, ", ", millions(parameter_count(s.model)), " parameters (L ", s.model.L,
               ", C ", s.model.C, ", H ", s.model.H, "/", s.model.Hk, ", V ", s.model.V, "), ",
               name_of(dtype), state_text(precision), " on ", s.kernels->device().name());
    return s;
}

}  // namespace torus
