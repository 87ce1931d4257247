// The table of options and how one option is read, shown and looked up. Numbers are read with
// std::from_chars: whole text, no locale, no "nan", no silent overflow.
#include "engine/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "comm/seq.h"
#include "kernels/text.h"
#include "kernels/utf8.h"

namespace torus {
namespace {

constexpr double any = 1e300;       // no upper bound
constexpr double big = 2147483647;  // positions and batch indices fit int32 on the device
constexpr double steps_limit = 1e12, tokens_limit = 1e15;
constexpr double seed_limit = 1e18;  // TOML's integers are signed

// The registry's modes and the names that other systems use for them.
std::vector<const char*> mode_names() {
    std::vector<const char*> names = {"auto"};
    for (const SeqMode& m : seq_modes()) {
        names.push_back(m.name.c_str());
        if (!m.alias.empty()) names.push_back(m.alias.c_str());
    }
    return names;
}

// name, group, value in --help, help, member, range of numbers, allowed words.
// clang-format off
using C = Config;
const std::vector<const char*> off_on = {"off", "on"};

std::vector<Option> model_options() {
    constexpr OptionGroup g = OptionGroup::model;
    return {
        {"model", g, "NAME|DIR|FILE",
         "gpt2:124M, gpt2:dN, llama3.2:1b, ...; a folder in Hugging Face layout; an llm.c .bin",
         &C::model},
        {"data", g, "GLOB", "training text: .txt and .jsonl files, or .bin token shards", &C::data},
        {"val-data", g, "GLOB", "held-out text for --eval-every", &C::val_data},
        {"tokenizer", g, "NAME|DIR|FILE", "bytes, gpt2, or a tokenizer.json of a byte-level BPE",
         &C::tokenizer},
        {"cache-dir", g, "DIR", "where .txt and .jsonl are kept once tokenized", &C::cache_dir},
        {"seq-length", g, "TOKENS", "context length of training", &C::seq_length, {1, big}},
        {"document-mask", g, "on|off", "attention stops at the start of each document",
         &C::document_mask, {0, 0}, off_on},
        {"shuffle", g, "on|off", "order of the sequences: shuffled by --seed, or as stored",
         &C::shuffle, {0, 0}, off_on},
    };
}

std::vector<Option> optimizer_options() {
    constexpr OptionGroup g = OptionGroup::optimizer;
    return {
        {"micro-batch-size", g, "N", "sequences in one forward and backward",
         &C::micro_batch_size, {1, big}},
        {"global-batch-tokens", g, "TOKENS", "tokens of one optimizer step; 0 = one micro-batch",
         &C::global_batch_tokens, {0, tokens_limit}},
        {"steps", g, "N", "optimizer steps of the run", &C::steps, {1, steps_limit}},
        {"lr", g, "X", "peak learning rate", &C::lr, {0, any, true}},
        {"min-lr-fraction", g, "X", "share of --lr left at the last step",
         &C::min_lr_fraction, {0, 1}},
        {"lr-schedule", g, "NAME", "cosine, linear, constant or wsd (constant, then 1-sqrt)",
         &C::lr_schedule, {0, 0}, {"cosine", "linear", "constant", "wsd"}},
        {"warmup-steps", g, "N", "steps of linear warm-up", &C::warmup_steps, {0, steps_limit}},
        {"decay-fraction", g, "X", "wsd: share of the steps that decays",
         &C::decay_fraction, {0, 1}},
        {"weight-decay", g, "X", "AdamW's decay, on tensors of two or more dimensions",
         &C::weight_decay, {0, any}},
        {"beta1", g, "X", "AdamW's averaging of the gradient", &C::beta1, {0, 1, false, true}},
        {"beta2", g, "X", "AdamW's averaging of the gradient's square",
         &C::beta2, {0, 1, false, true}},
        {"eps", g, "X", "AdamW's epsilon", &C::eps, {0, any, true}},
        {"grad-clip", g, "X", "largest global norm of the gradient; 0 = no clipping",
         &C::grad_clip, {0, any}},
        {"seed", g, "N", "of the initial weights, the shuffle and the samples",
         &C::seed, {0, seed_limit}},
    };
}

std::vector<Option> machine_options() {
    constexpr OptionGroup g = OptionGroup::machine;
    return {
        {"device", g, "NAME",
         "auto (a GPU when there is one), cuda (exit code 71 when there is none) or cpu",
         &C::device, {0, 0}, {"auto", "cuda", "cpu"}},
        {"dtype", g, "NAME", "auto (bf16 on cuda, fp32 on cpu), bf16, fp16, fp32 or fp64",
         &C::dtype, {0, 0}, {"auto", "bf16", "fp16", "fp32", "fp64"}},
        {"moments", g, "NAME",
         "type of AdamW's moments: auto (fp32, fp64 with fp64), fp32 or bf16 (rounded stochastically)",
         &C::moments, {0, 0}, {"auto", "fp32", "bf16"}},
        {"master-weights", g, "on|off",
         "off: no fp32 copy; bf16 weights are updated themselves, with stochastic rounding",
         &C::master_weights, {0, 0}, off_on},
        {"loss-scale", g, "auto|dynamic|X",
         "factor of the loss in backward: auto (dynamic with fp16, else 1), or a power of two",
         &C::loss_scale},
        {"loss-scale-window", g, "STEPS",
         "dynamic: updates without a skip until the scale doubles; a skip halves it",
         &C::loss_scale_window, {1, steps_limit}},
        {"ranks", g, "N",
         "processes, one GPU each; starts itself under mpirun. 0 = as many as the launcher",
         &C::ranks, {0, 65536}},
        {"parallel-mode", g, "NAME",
         "auto, data_parallel, ulysses, ring, zigzag_ring, dist_flash or usp",
         &C::parallel_mode, {0, 0}, mode_names()},
        {"sp", g, "N", "ranks that share each sequence; 0 = chosen", &C::sp, {0, 65536}},
        {"ring", g, "N", "of these, ranks in a ring; 0 = chosen", &C::ring, {0, 65536}},
        {"ulysses", g, "N", "of these, ranks that exchange heads; 0 = chosen",
         &C::ulysses, {0, 65536}},
        {"exchange", g, "NAME",
         "between GPUs: nccl, copy (the copy engines, for sums of gradients, too; one machine only), "
         "or auto: where they share sequences copy if it works, for sums nccl",
         &C::exchange, {0, 0}, {"auto", "nccl", "copy"}},
        {"verify-sp", g, "",
         "first compare loss and gradient norms of a short batch on all ranks with rank 0 alone",
         &C::verify_sp, {0, 0}, off_on},
        {"timeout", g, "SECONDS",
         "several ranks: longest step, save or evaluation before the run is ended; 0 = none",
         &C::timeout, {0, 1e9}},
        {"threads", g, "N", "threads of the CPU backend; 0 = all cores", &C::threads, {0, 4096}},
        {"recompute", g, "WHAT",
         "none; attention_out: all but attention again in backward; full: attention too; auto: as "
         "little as fits",
         &C::recompute, {0, 0}, {"none", "attention_out", "full", "auto"}},
        {"tune-matmul", g, "FILE",
         "GPU: time the matmul algorithms at first use and keep the choices in FILE", &C::tune_matmul},
        {"attention", g, "NAME",
         "on a GPU: flash (ours); cudnn: NVIDIA's, to compare; last bits then differ between runs",
         &C::attention, {0, 0}, {"flash", "cudnn"}},
        {"deterministic", g, "on|off",
         "on a GPU: off adds up attention's gradients in any order, which is faster; last bits then "
         "differ between runs",
         &C::deterministic, {0, 0}, off_on},
        {"cuda-graph", g, "WHEN",
         "auto, on, off: launch forward and backward as one CUDA graph; auto: one GPU, no profiler",
         &C::cuda_graph, {0, 0}, {"auto", "on", "off"}},
        {"plain-matmul", g, "", "CPU: loops instead of BLAS, the same bits on every machine",
         &C::plain_matmul, {0, 0}, off_on},
        {"plan", g, "", "print the memory plan and stop; --device cuda needs no GPU for it",
         &C::plan, {0, 0}, off_on},
    };
}

std::vector<Option> output_options() {
    constexpr OptionGroup g = OptionGroup::output;
    return {
        {"save-dir", g, "DIR", "folder of the checkpoints; none are written without it",
         &C::save_dir},
        {"save-every", g, "STEPS", "steps between checkpoints; 0 = one at the end",
         &C::save_every, {0, steps_limit}},
        {"keep", g, "N", "newest checkpoints kept", &C::keep, {1, 1e6}},
        {"resume", g, "WHEN",
         "auto: from the newest checkpoint, if any; must: there has to be one; never",
         &C::resume, {0, 0}, {"auto", "must", "never"}},
        {"eval-every", g, "STEPS", "steps between evaluations on --val-data; 0 = none",
         &C::eval_every, {0, steps_limit}},
        {"eval-batches", g, "N", "micro-batches of one evaluation, of each data-parallel rank", &C::eval_batches, {1, big}},
        {"sample-every", g, "STEPS", "steps between samples of text; 0 = none",
         &C::sample_every, {0, steps_limit}},
        {"sample-tokens", g, "TOKENS", "length of a sample", &C::sample_tokens, {1, big}},
        {"temperature", g, "X", "of samples; 0 = always the likeliest token",
         &C::temperature, {0, 1000}},
        {"top-k", g, "N", "samples choose among the N likeliest tokens; 0 = all",
         &C::top_k, {0, big}},
        {"generate", g, "TEXT", "continue this text and stop", &C::generate},
        {"verify", g, "DIR", "compare with a reference folder and stop", &C::verify},
        {"log-dir", g, "DIR", "write log.jsonl there, one record a step", &C::log_dir},
        {"profile-steps", g, "A:B", "steps that a profiler of GPUs records; see scripts/profile.sh",
         &C::profile_steps},
    };
}
// clang-format on

std::string list(const std::vector<const char*>& words) {
    std::string out;
    for (const char* word : words) out += (out.empty() ? "" : ", ") + std::string(word);
    return out;
}

std::string show_number(double x) {
    char text[32];
    return {text, std::to_chars(text, text + sizeof text, x).ptr};  // shortest that reads back
}

std::string describe(const NumberRange& r) {
    const auto bound = [](double x) { return std::to_string(int64_t(x)); };
    const std::string low = (r.above_low ? "above " : "from ") + bound(r.low);
    if (r.high == any) return r.above_low ? low : bound(r.low) + " or more";
    return low + (r.below_high ? " to below " : " to ") + bound(r.high);
}

bool inside(const NumberRange& r, double x) {
    return (r.above_low ? x > r.low : x >= r.low) && (r.below_high ? x < r.high : x <= r.high);
}

template <class T>
T read_number(const Option& o, const std::string& text, const std::string& where) {
    constexpr bool whole = !std::is_same_v<T, double>;
    const std::string kind = whole ? "a whole number " : "a number ";
    T value{};
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    bool finite = true;
    if constexpr (!whole) finite = std::isfinite(value);
    if (text.empty() || stop != end || error == std::errc::invalid_argument || !finite) {
        std::string hint;
        if (whole && error == std::errc() && value > 0 && value < T(1000000) && stop == end - 1 &&
            (*stop == 'k' || *stop == 'K'))
            hint = concat(": ", value, "000 or ", int64_t(value) * 1024);
        // A number below zero is a number; unsigned types do not read it.
        const bool negative =
            whole && text.size() > 1 && text[0] == '-' && stop == text.data() &&
            std::all_of(text.begin() + 1, text.end(), [](char c) { return c >= '0' && c <= '9'; });
        if (!negative)
            fail(Exit::usage, where, ": ", excerpt(text), " is not ",
                 kind.substr(0, kind.size() - 1), "; give ", kind, describe(o.range), hint);
    }
    require(error == std::errc() && inside(o.range, double(value)), Exit::usage, where, ": ",
            excerpt(text), " is out of range; give ", kind, describe(o.range));
    return value;
}

size_t read_choice(const Option& o, const std::string& text, const std::string& where) {
    for (size_t i = 0; i < o.allowed.size(); ++i)
        if (text == o.allowed[i]) return i;
    fail(Exit::usage, where, ": ", excerpt(text), " is not known; choose one of ", list(o.allowed));
}

std::string read_text(const Option& o, const std::string& text, const std::string& where) {
    require(!text.empty(), Exit::usage, where, ": the value is empty; give ", o.value,
            " or leave it out");
    const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
    for (const uint8_t* const end = p + text.size(); p < end;) {
        const Character c = next_character(p, end);
        require(c.code != invalid_character && c.code != 0, Exit::usage, where, ": ", excerpt(text),
                " is not valid UTF-8; rename the file or write the text anew");
        p += c.length;
    }
    const size_t limit = o.member == Option::Member(&Config::generate) ? 1000000 : 4000;
    require(text.size() <= limit, Exit::usage, where, ": ", text.size(), " bytes, at most ", limit,
            " are allowed; shorten it");
    if (!o.allowed.empty()) read_choice(o, text, where);
    return text;
}

size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), size_t(0));
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0]++;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

std::string canonical(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    return name;
}

}  // namespace

const std::vector<Option>& options() {
    static const std::vector<Option> table = [] {
        std::vector<Option> all;
        for (const auto& group :
             {model_options(), optimizer_options(), machine_options(), output_options()})
            all.insert(all.end(), group.begin(), group.end());
        return all;
    }();
    return table;
}

const Option* find_option(const std::string& name) {
    for (const Option& o : options())
        if (name == o.name) return &o;
    return nullptr;
}

void set_option(const Option& o, Config& config, const std::string& text,
                const std::string& where) {
    std::visit(
        [&](auto member) {
            auto& slot = config.*member;
            using T = std::remove_reference_t<decltype(slot)>;
            if constexpr (std::is_same_v<T, std::string>)
                slot = read_text(o, text, where);
            else if constexpr (std::is_same_v<T, bool> || std::is_enum_v<T>)
                slot = static_cast<T>(read_choice(o, text, where));
            else
                slot = read_number<T>(o, text, where);
        },
        o.member);
}

std::string show_option(const Option& o, const Config& config) {
    return std::visit(
        [&](auto member) -> std::string {
            const auto& value = config.*member;
            using T = std::remove_cvref_t<decltype(value)>;
            if constexpr (std::is_same_v<T, std::string>)
                return value;
            else if constexpr (std::is_same_v<T, bool> || std::is_enum_v<T>)
                return o.allowed[size_t(value)];
            else if constexpr (std::is_same_v<T, double>)
                return show_number(value);
            else
                return std::to_string(value);
        },
        o.member);
}

std::string did_you_mean(const std::string& name, const char* dashes) {
    const std::string wanted = canonical(name);
    std::string best;
    size_t best_distance = std::max<size_t>(1, wanted.size() / 3) + 1;  // more is another word
    for (const Option& o : options()) {
        const size_t distance = edit_distance(wanted, o.name);
        if (distance < best_distance) best = o.name, best_distance = distance;
    }
    for (const Option& o : options())  // --batch-size: --micro-batch-size
        if (best.empty() && wanted.size() >= 4 &&
            std::string(o.name).find(wanted) != std::string::npos)
            best = o.name;
    return best.empty() ? "" : concat("did you mean ", dashes, best, "?");
}

}  // namespace torus
