// The command line, --help, the relations between values, and to_toml(). CLI11 cuts argv into flags
// and values; every value is then read by the table in options.cpp, so that flags and the file
// obey the same rules and give the same messages.
#include "engine/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>

#include "engine/options.h"
#include "engine/precision.h"
#include "kernels/text.h"

namespace torus {
namespace {

constexpr const char* version_text = "train_gpt (Torus) 0.1.0";
constexpr size_t help_width = 100, help_column = 30;

struct Group {
    OptionGroup group;
    const char* title;
    const char* section;  // in to_toml()
};
constexpr Group groups[] = {{OptionGroup::model, "Model and data", "model"},
                            {OptionGroup::optimizer, "Batch and optimizer", "optimizer"},
                            {OptionGroup::machine, "Machine and memory", "machine"},
                            {OptionGroup::output, "Output", "output"}};

// One entry of --help: flag, then text wrapped in its column.
void add_entry(std::string& out, const std::string& flag, const std::string& text) {
    std::string line = "  " + flag;
    if (line.size() + 2 > help_column) {
        out += line + "\n";
        line.clear();
    }
    line.resize(help_column, ' ');
    size_t begin = 0;
    while (begin < text.size()) {
        size_t end = std::min(text.size(), begin + help_width - help_column);
        if (end < text.size()) end = text.rfind(' ', end);
        out += line + text.substr(begin, end - begin) + "\n";
        line.assign(help_column, ' ');
        begin = end + 1;
    }
}

std::string toml_string(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        const uint8_t byte = uint8_t(c);
        if (c == '"' || c == '\\') {
            out += {'\\', c};
        } else if (byte < 0x20 || byte == 0x7f) {
            const char* digits = "0123456789abcdef";
            out += concat("\\u00", digits[byte >> 4], digits[byte & 15]);
        } else {
            out += c;
        }
    }
    return out + "\"";
}

struct CommandLine {
    bool help = false, version = false;
    std::string file;                                           // --config
    std::vector<std::pair<const Option*, std::string>> values;  // of the flags
};

// A value that is itself a flag means that the real value was forgotten.
void check_value(const std::string& flag, const std::string& value, const char* placeholder) {
    const bool is_flag = value.rfind("--", 0) == 0 && find_option(value.substr(2)) != nullptr;
    require(!is_flag, Exit::usage, flag, ": the value is missing before ", value, "; give ",
            placeholder);
}

CommandLine read_command_line(int argc, const char* const* argv) {
    CommandLine out;
    CLI::App app;
    app.set_help_flag();  // help_text() replaces CLI11's
    app.allow_extras();   // unknown flags get our own message
    CLI::Option* help = app.add_flag("-h,--help");
    CLI::Option* version = app.add_flag("--version");
    CLI::Option* file = app.add_option("--config")->take_all();
    std::vector<CLI::Option*> flags;
    for (const Option& o : options()) {
        const std::string flag = concat("--", o.name);
        flags.push_back(o.is_switch() ? app.add_flag(flag) : app.add_option(flag));
        flags.back()->take_all();
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        std::string last = argv[argc - 1];  // only the last flag can lack its value
        last = last.substr(0, last.find('='));
        const Option* o = last.rfind("--", 0) == 0 ? find_option(last.substr(2)) : nullptr;
        if (o) fail(Exit::usage, last, ": the value is missing; give ", o->value);
        if (last == "--config") fail(Exit::usage, last, ": the value is missing; give FILE");
        fail(Exit::usage, "command line: ", excerpt(e.what()), "; see train_gpt --help");
    }
    out.help = help->count() > 0;
    out.version = version->count() > 0;
    if (out.help || out.version) return out;

    require(file->count() <= 1, Exit::usage, "--config: given ", file->count(),
            " times; give it once");
    if (file->count() == 1) {
        out.file = file->results()[0];
        check_value("--config", out.file, "FILE");
    }
    for (size_t i = 0; i < flags.size(); ++i) {
        const Option& o = options()[i];
        if (flags[i]->count() == 0) continue;
        const std::string flag = concat("--", o.name);
        require(flags[i]->count() == 1, Exit::usage, flag, ": given ", flags[i]->count(),
                " times; give it once");
        std::string value = flags[i]->results()[0];
        if (o.is_switch() && value == "true") value = "on";  // CLI11's value of a bare flag
        check_value(flag, value, o.value);
        out.values.emplace_back(&o, value);
    }
    for (const std::string& extra : app.remaining()) {
        const std::string name = extra.substr(0, extra.find('='));
        const bool dashed = name.rfind("-", 0) == 0;
        const std::string hint =
            did_you_mean(name.substr(std::min(name.size(), name.find_first_not_of('-'))), "--");
        fail(Exit::usage, dashed ? "unknown flag " : "unexpected argument ", excerpt(name), "; ",
             dashed && !hint.empty() ? hint : "see train_gpt --help");
    }
    return out;
}

// Sums and products of the step's sizes.
void check_batch(const Config& c) {
    const int64_t micro = c.micro_batch_size * c.seq_length;
    const int64_t step = c.global_batch_tokens > 0 ? c.global_batch_tokens : micro;
    if (step % micro != 0) {
        const int64_t below = step / micro * micro;
        fail(Exit::usage, "--global-batch-tokens: ", step, " is not a multiple of ", micro,
             " (--micro-batch-size ", c.micro_batch_size, " x --seq-length ", c.seq_length,
             "); the nearest that work: ", below > 0 ? concat(below, " and ") : "", below + micro);
    }
    require(double(step) * double(c.steps) < 9e18, Exit::usage, "--steps: ", c.steps, " steps of ",
            step, " tokens are more tokens than can be counted (2^63); take fewer");
}

void check_schedule(const Config& c) {
    require(c.warmup_steps < c.steps, Exit::usage, "--warmup-steps: ", c.warmup_steps,
            " must be below --steps ", c.steps, "; give at most ", c.steps - 1);
    const int64_t decay = std::llround(c.decay_fraction * double(c.steps));
    require(c.lr_schedule != Schedule::wsd || c.warmup_steps + decay <= c.steps, Exit::usage,
            "--decay-fraction: warm-up (", c.warmup_steps, " steps) and decay (", decay,
            ") overlap in --steps ", c.steps, "; shorten one");
}

void check_device(const Config& c) {
    require(c.device != "cuda" || c.dtype != "fp64", Exit::usage,
            "--dtype: fp64 runs on the CPU only; give --device cpu, or bf16, fp16 or fp32");
    require(c.device != "cpu" || (c.dtype != "bf16" && c.dtype != "fp16"), Exit::usage,
            "--dtype: ", c.dtype, " runs on a GPU only; give --device cuda, or fp32 or fp64");
    require(c.device != "cpu" || c.tune_matmul.empty(), Exit::usage,
            "--tune-matmul: is for the GPU; leave it out with --device cpu");
    require(c.device != "cpu" || c.deterministic, Exit::usage,
            "--deterministic: the CPU always is; leave it out with --device cpu");
    require(c.device != "cpu" || c.cuda_graph != CudaGraph::on, Exit::usage,
            "--cuda-graph: is for the GPU; leave it out with --device cpu");
    require(c.device != "cpu" || c.exchange != Exchange::copy, Exit::usage,
            "--exchange: copy is between GPUs; leave it out with --device cpu");
    require(c.device != "cuda" || !c.plain_matmul, Exit::usage,
            "--plain-matmul: is for the CPU; give --device cpu or leave it out");
}

void check_profile(const Config& c) {
    profiled_steps(c);
    require(c.profile_steps.empty() || c.device != "cpu", Exit::usage,
            "--profile-steps: ", excerpt(c.profile_steps),
            " tells the profiler of a GPU when to record; give --device cuda or leave it out");
    require(c.profile_steps.empty() || (c.generate.empty() && c.verify.empty()), Exit::usage,
            "--profile-steps: ", excerpt(c.profile_steps), " counts the steps of training; leave ",
            "it out with --generate and --verify");
}

void check_verify_sp(const Config& c) {
    require(!c.verify_sp || (c.generate.empty() && c.verify.empty()), Exit::usage,
            "--verify-sp: is a check before training; leave it out with --generate and --verify");
    require(
        !c.verify_sp || c.ranks != 1, Exit::usage,
        "--verify-sp: compares ranks with one alone, and --ranks is 1; give --ranks N or leave ",
        "it out");
}

// What can be said without a device; setup.cpp knows the rest. Named as the flag to change.
void check_attention(const Config& c) {
    if (c.attention == AttentionKernels::flash) return;
    const char* const cannot = "cudnn cannot be used with ";
    require(c.device != "cpu", Exit::usage, "--attention: ", cannot,
            "--device cpu; give --device cuda or leave --attention out");
    require(c.dtype == "auto" || c.dtype == "bf16" || c.dtype == "fp16", Exit::usage,
            "--attention: ", cannot, "--dtype ", c.dtype, "; give --dtype bf16 or fp16");
    require(!c.document_mask, Exit::usage, "--attention: ", cannot,
            "--document-mask on; give --attention flash or --document-mask off");
    const bool split = c.sp > 1 || c.ring > 1 || c.ulysses > 1 ||
                       (c.parallel_mode != "auto" && c.parallel_mode != "data_parallel");
    require(!split, Exit::usage, "--attention: ", cannot,
            "a sequence over several ranks (--parallel-mode, --sp, --ring, --ulysses); give "
            "--attention flash or --parallel-mode data_parallel");
}

}  // namespace

StepRange profiled_steps(const Config& c) {
    const std::string& text = c.profile_steps;
    if (text.empty()) return {};
    StepRange r;
    const char* const end = text.data() + text.size();
    const auto [colon, first_error] = std::from_chars(text.data(), end, r.first);
    bool valid = first_error == std::errc() && colon != end && *colon == ':';
    if (valid) {
        const auto [stop, last_error] = std::from_chars(colon + 1, end, r.last);
        valid = last_error == std::errc() && stop == end;
    }
    require(valid && 1 <= r.first && r.first <= r.last && r.last <= c.steps, Exit::usage,
            "--profile-steps: ", excerpt(text), " is not a range of steps; give A:B with 1 <= A ",
            "<= B <= ", c.steps, " (--steps)");
    return r;
}

void check_relations(const Config& c) {
    check_batch(c);
    check_schedule(c);
    check_device(c);
    check_profile(c);
    check_attention(c);
    check_verify_sp(c);
    run_loss_scale(c, DType::f32);
    const int modes = int(c.plan) + int(!c.generate.empty()) + int(!c.verify.empty());
    require(modes <= 1, Exit::usage,
            "--plan, --generate and --verify: each is a run of its own; give one of them");
    require(modes == 1 || !c.data.empty(), Exit::usage,
            "--data: missing; give a text file or token shards to train on, or see --help");
    require(c.save_every == 0 || !c.save_dir.empty(), Exit::usage, "--save-every: ", c.save_every,
            " needs a folder to save in; give --save-dir DIR");
    require(c.resume != ResumeMode::must || !c.save_dir.empty(), Exit::usage,
            "--resume: must needs a folder to resume from; give --save-dir DIR");
    require(c.eval_every == 0 || !c.val_data.empty(), Exit::usage, "--eval-every: ", c.eval_every,
            " needs held-out text; give --val-data GLOB");
}

std::string help_text() {
    std::string out =
        "Train GPT and Llama models on long contexts.\n\n"
        "usage: train_gpt --data GLOB [flags]\n"
        "       train_gpt --config run.toml [flags]\n";
    const Config defaults;
    for (const Group& g : groups) {
        out += concat("\n", g.title, ":\n");
        for (const Option& o : options()) {
            if (o.group != g.group) continue;
            const std::string value = show_option(o, defaults);
            const bool shown = !o.is_switch() && !value.empty();
            add_entry(out, concat("--", o.name, o.is_switch() ? "" : " ", o.value),
                      concat(o.help, shown ? concat(" [", value, "]") : ""));
        }
    }
    out += "\nOther:\n";
    add_entry(out, "--config FILE",
              "TOML file of options: keys are the flags without dashes, sections are free; flags "
              "win over the file");
    add_entry(out, "--version", "print the version and stop");
    add_entry(out, "-h, --help", "print this and stop");
    out +=
        "\nWhole numbers are plain digits (65536, not 64k). Values in [] are the defaults.\n"
        "\nExamples:\n"
        "  train_gpt --data book.txt --model gpt2:d6 --seq-length 256 --steps 500 --save-dir "
        "runs/a\n"
        "  train_gpt --config run.toml --lr 1e-4 --log-dir runs/b\n"
        "  train_gpt --model runs/a/step_00000500 --generate \"It was a\"\n";
    return out;
}

bool parse_config(int argc, const char* const* argv, Config& out) {
    const CommandLine line = read_command_line(argc, argv);
    if (line.help || line.version) {
        std::fputs(line.help ? help_text().c_str() : concat(version_text, "\n").c_str(), stdout);
        return false;
    }
    Config config;
    if (!line.file.empty()) read_config_file(line.file, config, config.given);
    for (const auto& [option, value] : line.values) {
        set_option(*option, config, value, concat("--", option->name));
        if (std::find(config.given.begin(), config.given.end(), option->name) == config.given.end())
            config.given.push_back(option->name);
    }
    check_relations(config);
    out = std::move(config);
    return true;
}

std::string to_toml(const Config& config) {
    std::string out;
    for (const Group& g : groups) {
        out += concat(out.empty() ? "" : "\n", "[", g.section, "]\n");
        for (const Option& o : options()) {
            if (o.group != g.group) continue;
            const std::string value = show_option(o, config);
            const bool text =
                std::holds_alternative<std::string Config::*>(o.member) || !o.allowed.empty();
            out += concat(o.name, " = ", text ? toml_string(value) : value, "\n");
        }
    }
    return out;
}

}  // namespace torus
