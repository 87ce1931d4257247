// The command line and the TOML file: every option by flag, by file and back, every wrong input
// with its exit code and a message that names the flag.
#include "engine/config.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "engine/options.h"
#include "test/test.h"

using namespace torus;

namespace {

Config parse(std::vector<std::string> args) {
    args.insert(args.begin(), "train_gpt");
    std::vector<const char*> argv;
    for (const std::string& a : args) argv.push_back(a.c_str());
    Config c;
    const bool run = parse_config(int(argv.size()), argv.data(), c);
    if (!run) FAIL_TEST("parse_config has nothing to run");
    return c;
}

struct Failure {
    Exit code = Exit::ok;
    std::string text;
    bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};

Failure failure(std::vector<std::string> args) {
    try {
        parse(std::move(args));
    } catch (const Error& e) {
        return {e.code, e.what()};
    }
    return {};
}

struct TempFile {
    std::string path;
    explicit TempFile(const std::string& text) {
        path =
            (std::filesystem::temp_directory_path() / concat("torus_config_", ::getpid(), ".toml"))
                .string();
        std::ofstream(path, std::ios::binary) << text;
    }
    ~TempFile() { std::filesystem::remove(path); }
};

Failure file_failure(const std::string& text) {
    const TempFile file(text);
    Failure f = failure({"--config", file.path, "--data", "x"});
    const size_t at = f.text.find(file.path);
    if (at == std::string::npos) return f;
    f.text.erase(at, file.path.size());
    f.text.insert(f.text.begin() + int64_t(at), 'F');
    return f;
}

// A value of the option that differs from its default and breaks no relation.
std::string other_value(const Option& o) {
    const Config defaults;
    const std::string now = show_option(o, defaults);
    if (std::string(o.name) == "global-batch-tokens") return "8192";
    if (std::string(o.name) == "profile-steps") return "3:7";
    if (std::string(o.name) == "loss-scale") return "1024";
    for (const char* word : o.allowed)
        if (word != now) return word;
    if (std::holds_alternative<std::string Config::*>(o.member))
        return concat("x \"y\" \\ \t ", o.name);
    if (std::holds_alternative<double Config::*>(o.member)) return "0.3333333333333333";
    return std::to_string(std::stoll(now) + 1);
}

void expect_equal(const Config& a, const Config& b) {
    for (const Option& o : options()) {
        CAPTURE(o.name);
        EXPECT_EQ(show_option(o, a), show_option(o, b));
    }
}

}  // namespace

TEST_CASE("config: defaults need only --data") {
    const Config c = parse({"--data", "book.txt"});
    EXPECT_EQ(c.data, "book.txt");
    EXPECT_EQ(c.model, "gpt2:124M");
    EXPECT_EQ(c.steps, 1000);
    EXPECT(c.shuffle);
    EXPECT_EQ(c.given, std::vector<std::string>{"data"});
    EXPECT_EQ(parse({"--data=a=b.txt"}).data, "a=b.txt");
}

TEST_CASE("config: every option is set by its flag and by its key, and only it changes") {
    for (const Option& o : options()) {
        CAPTURE(o.name);
        const std::string value = other_value(o);
        std::vector<std::string> base;  // what some options need
        for (const char* needed : {"data", "save-dir", "val-data"})
            if (std::string(needed) != o.name) base.push_back(concat("--", needed, "=x"));
        if (std::string(o.name) == "data") base.push_back("--steps=1000");

        std::vector<std::string> by_flag = base, by_file = base;
        by_flag.push_back(concat("--", o.name));
        if (!o.is_switch()) by_flag.push_back(value);
        Config only;
        set_option(o, only, value, "test");
        const std::string toml = to_toml(only);
        const size_t line = toml.find(concat("\n", o.name, " = ")) + 1;
        const TempFile file(toml.substr(line, toml.find('\n', line) - line) + "\n");
        by_file.insert(by_file.end(), {"--config", file.path});

        for (const auto& args : {by_flag, by_file}) {
            const Config c = parse(args);
            EXPECT_EQ(show_option(o, c), value);
            EXPECT(std::find(c.given.begin(), c.given.end(), std::string(o.name)) != c.given.end());
            for (const Option& p : options()) {
                const bool of_base =
                    std::find(base.begin(), base.end(), concat("--", p.name, "=x")) != base.end();
                if (&p != &o && !of_base) EXPECT_EQ(show_option(p, c), show_option(p, Config()));
            }
        }
    }
}

TEST_CASE("config: to_toml reads back to the same configuration") {
    Config c = parse({"--data",
                      "a\n\x01\x7f\"\\ü*.txt",
                      "--seed",
                      "1000000000000000000",
                      "--lr",
                      "0.00031415926535897931",
                      "--eps",
                      "1e-300",
                      "--steps",
                      "123456789012",
                      "--save-dir",
                      "s",
                      "--save-every",
                      "7",
                      "--shuffle",
                      "off",
                      "--lr-schedule",
                      "wsd",
                      "--recompute",
                      "full",
                      "--resume",
                      "never",
                      "--plain-matmul",
                      "--grad-clip",
                      "0",
                      "--warmup-steps",
                      "5",
                      "--global-batch-tokens",
                      "40960"});
    const TempFile file(to_toml(c));
    const Config back = parse({"--config", file.path});
    expect_equal(c, back);
    EXPECT_EQ(back.lr, 0.00031415926535897931);
    EXPECT_EQ(back.given.size(), options().size());
    EXPECT_EQ(to_toml(back), to_toml(c));
    const TempFile defaults(to_toml(Config()));
    expect_equal(parse({"--config", defaults.path, "--data", "x"}), parse({"--data", "x"}));
}

TEST_CASE("config: flags win over the file; tables only group; - and _ are the same") {
    const TempFile file(
        "data = 'x'\nlr = 1\n[anything]\nseq_length = 2_048\nshuffle = false\n"
        "[anything.deeper]\nwarmup-steps = 3\nplain-matmul = true\ndocument-mask = 'on'\n"
        "[optimizer]\nbeta1 = 0.5\nval-data = ''\n");
    const Config c = parse({"--config", file.path, "--lr", "2e-4", "--beta2=0.75"});
    EXPECT_EQ(c.lr, 2e-4);
    EXPECT_EQ(c.seq_length, 2048);
    EXPECT_EQ(c.warmup_steps, 3);
    EXPECT_EQ(c.beta1, 0.5);
    EXPECT_EQ(c.beta2, 0.75);
    EXPECT(!c.shuffle);
    EXPECT(c.plain_matmul);
    EXPECT(c.document_mask);
    EXPECT_EQ(c.val_data, "");
    EXPECT_EQ(c.given.size(), 10);  // 9 keys of the file, lr once, and beta2
}

TEST_CASE("config: wrong numbers are refused, never half read") {
    struct Case {
        const char *flag, *value, *says;
    };
    const Case cases[] = {
        {"--lr", "abc", "not a number"},
        {"--lr", "1e-4x", "not a number"},
        {"--lr", "", "not a number"},
        {"--lr", "nan", "not a number"},
        {"--lr", "inf", "not a number"},
        {"--lr", "-inf", "not a number"},
        {"--lr", "1e999", "out of range"},
        {"--lr", "-1", "out of range"},
        {"--lr", "0", "out of range"},
        {"--lr", "0x10", "not a number"},
        {"--lr", " 1", "not a number"},
        {"--lr", "1,5", "not a number"},
        {"--steps", "0", "out of range"},
        {"--steps", "-1", "out of range"},
        {"--steps", "1.5", "whole number"},
        {"--steps", "1e3", "whole number"},
        {"--steps", "12x", "whole number"},
        {"--steps", "64k", "64000 or 65536"},
        {"--steps", "+5", "whole number"},
        {"--steps", "9223372036854775808", "out of range"},
        {"--seed", "-1", "out of range"},
        {"--seed", "18446744073709551616", "out of range"},
        {"--keep", "0", "out of range"},
        {"--seq-length", "2147483648", "out of range"},
        {"--threads", "99999", "out of range"},
        {"--threads", "-2", "out of range"},
        {"--beta1", "1", "out of range"},
        {"--beta2", "-0.1", "out of range"},
        {"--min-lr-fraction", "1.01", "out of range"},
        {"--grad-clip", "-1", "out of range"},
        {"--eps", "0", "out of range"},
        {"--temperature", "-1", "out of range"},
        {"--micro-batch-size", "0", "out of range"},
        {"--eval-batches", "0", "out of range"},
        {"--sample-tokens", "0", "out of range"},
        {"--dtype", "fp8", "auto, bf16, fp16, fp32, fp64"},
        {"--shuffle", "yes", "off, on"},
        {"--moments", "fp16", "auto, fp32, bf16"},
        {"--master-weights", "no", "off, on"},
        {"--loss-scale", "1000", "power of two"},
        {"--loss-scale", "-2", "power of two"},
        {"--loss-scale", "0.5", "power of two"},
        {"--loss-scale", "fast", "auto, dynamic"},
        {"--loss-scale", "", "is empty"},
        {"--loss-scale-window", "0", "out of range"},
        {"--lr-schedule", "Cosine", "cosine, linear"},
        {"--recompute", "all", "none, attention_out, full, auto"},
        {"--exchange", "ring", "choose one of auto, nccl, copy"},
        {"--resume", "", "auto, must, never"},
        {"--device", "tpu", "auto, cuda, cpu"},
        {"--model", "", "is empty"},
        {"--save-dir", "", "is empty"},
        {"--tokenizer", "\xff", "UTF-8"},
    };
    for (const Case& c : cases) {
        CAPTURE(c.flag);
        CAPTURE(c.value);
        const Failure f = failure({"--data", "x", c.flag, c.value});
        CAPTURE(f.text);
        EXPECT_EQ(int(f.code), int(Exit::usage));
        EXPECT_EQ(f.text.rfind(c.flag, 0), 0);  // begins with the flag
        EXPECT(f.says(c.says));
        EXPECT_EQ(f.text.find('\n'), std::string::npos);
    }
    EXPECT_EQ(parse({"--data", "x", "--lr", "1e0"}).lr, 1.0);
    EXPECT(failure({"--data", "x", "--cache-dir", std::string(5000, 'a')}).says("5000 bytes"));
}

TEST_CASE("config: unknown, repeated and unfinished flags") {
    const auto usage = [](std::vector<std::string> args, const std::string& says) {
        const Failure f = failure(std::move(args));
        CAPTURE(f.text);
        CAPTURE(says);
        EXPECT_EQ(int(f.code), int(Exit::usage));
        EXPECT(f.says(says));
        EXPECT_EQ(f.text.find('\n'), std::string::npos);
    };
    usage({"--lrr", "3"}, "did you mean --lr?");
    usage({"--learnrate", "3"}, "unknown flag \"--learnrate\"");
    usage({"--seq_length", "3"}, "did you mean --seq-length?");
    usage({"--batch-size=3"}, "did you mean --micro-batch-size?");
    usage({"--warmup_step", "3"}, "did you mean --warmup-steps?");
    usage({"-q"}, "unknown flag \"-q\"");
    usage({"--data", "x", "book.txt"}, "unexpected argument \"book.txt\"");
    usage({"--data", "x", ""}, "unexpected argument");
    usage({"--\x1b[2J"}, "\\x1b");
    usage({"--lr", "1", "--lr", "1"}, "--lr: given 2 times");
    usage({"--plan", "--plan"}, "--plan: given 2 times");
    usage({"--config", "a", "--config", "b"}, "--config: given 2 times");
    usage({"--data", "x", "--lr"}, "--lr: the value is missing");
    usage({"--data="}, "--data: the value is missing");
    usage({"--data", "--steps", "5"}, "--data: the value is missing before --steps");
    usage({"--data", "x", "--config"}, "--config: the value is missing");
    usage({"--config", "--data", "x"}, "--config: the value is missing");
    EXPECT_EQ(parse({"--generate", "--is this a flag?"}).generate, "--is this a flag?");
    EXPECT_EQ(parse({"--generate", "[a,b]"}).generate, "[a,b]");
    EXPECT_EQ(parse({"--generate", "{}"}).generate, "{}");
}

TEST_CASE("config: relations between values") {
    const auto usage = [](std::vector<std::string> args, const std::string& says) {
        args.insert(args.end(), {"--data", "x"});
        const Failure f = failure(std::move(args));
        CAPTURE(f.text);
        CAPTURE(says);
        EXPECT_EQ(int(f.code), int(Exit::usage));
        EXPECT(f.says(says));
    };
    usage({"--steps", "10", "--warmup-steps", "10"}, "--warmup-steps: 10 must be below --steps 10");
    usage({"--global-batch-tokens", "5000"}, "nearest that work: 4096 and 8192");
    usage({"--global-batch-tokens", "100"}, "nearest that work: 4096");
    usage({"--save-every", "5"}, "--save-every: 5 needs");
    usage({"--eval-every", "5"}, "--eval-every: 5 needs");
    usage({"--resume", "must"}, "--resume: must needs");
    usage({"--device", "cuda", "--dtype", "fp64"}, "--dtype: fp64");
    usage({"--device", "cpu", "--dtype", "bf16"}, "--dtype: bf16");
    usage({"--device", "cuda", "--plain-matmul"}, "--plain-matmul");
    usage({"--device", "cpu", "--tune-matmul", "file"}, "--tune-matmul");
    usage({"--device", "cpu", "--cuda-graph", "on"}, "--cuda-graph");
    usage({"--device", "cpu", "--exchange", "copy"}, "--exchange: copy is between GPUs");
    usage({"--device", "cpu", "--deterministic", "off"}, "--deterministic");
    for (const char* range : {"0:1", "2:1", "1:11", "a:b", "1", "1:", ":2", "1:2:3", "1.0:2", "1-2",
                              "-1:2", " 1:2", "1:99999999999999999999"})
        usage({"--steps", "10", "--profile-steps", range}, "give A:B with 1 <= A <= B <= 10");
    usage({"--device", "cpu", "--profile-steps", "2:2"}, "--profile-steps: \"2:2\"");
    usage({"--generate", "x", "--profile-steps", "2:2"}, "--profile-steps: \"2:2\"");
    for (const std::vector<std::string>& with : {std::vector<std::string>{"--device", "cpu"},
                                                 {"--dtype", "fp32"},
                                                 {"--dtype", "fp64"},
                                                 {"--document-mask", "on"},
                                                 {"--sp", "2"},
                                                 {"--ring", "2"},
                                                 {"--ulysses", "2"},
                                                 {"--parallel-mode", "zigzag_ring"}}) {
        std::vector<std::string> args = {"--attention", "cudnn"};
        args.insert(args.end(), with.begin(), with.end());
        usage(args, "--attention: cudnn cannot be used with ");
        usage(args, with[0]);
    }
    usage({"--plan", "--verify", "x"}, "give one of them");
    usage({"--verify-sp", "--verify", "x"}, "--verify-sp: is a check before training");
    usage({"--verify-sp", "--generate", "x"}, "--verify-sp: is a check before training");
    usage({"--verify-sp", "--ranks", "1"}, "--verify-sp: compares ranks");
    usage(
        {"--lr-schedule", "wsd", "--steps", "10", "--warmup-steps", "6", "--decay-fraction", "0.5"},
        "overlap");
    usage({"--steps", "1000000000000", "--seq-length", "2147483647"}, "more tokens");
    EXPECT(failure({}).says("--data: missing"));
    for (const char* mode : {"--plan", "--generate=x", "--verify=x"})
        EXPECT_EQ(int(failure({mode}).code), int(Exit::ok));
    EXPECT_EQ(parse({"--data", "x", "--global-batch-tokens", "8192"}).global_batch_tokens, 8192);
    EXPECT_EQ(parse({"--data", "x", "--steps", "1"}).steps, 1);
}

TEST_CASE("config: wrong files are refused with file and line") {
    const auto usage = [](const std::string& text, const std::string& says) {
        const Failure f = file_failure(text);
        CAPTURE(f.text);
        CAPTURE(says);
        EXPECT_EQ(int(f.code), int(Exit::usage));
        EXPECT(f.says(says));
        EXPECT_EQ(f.text.find('\n'), std::string::npos);
    };
    usage("\n[model]\nlrr = 3\n", "F:3: unknown key \"lrr\"; did you mean lr?");
    usage("colour = 3\n", "F:1: unknown key \"colour\"; the keys are the flags");
    usage("lr = 1\n\n[a]\nlr = 2\n", "F:4: lr: given twice");
    usage("warmup-steps = 1\nwarmup_steps = 2\n", "F:2: warmup-steps: given twice");
    usage("lr = 1\nlr = 2\n", "F:2: ");
    usage("lr = \"x\"\n", "F:1: lr: a number is needed");
    usage("lr = true\n", "F:1: lr: a number is needed");
    usage("lr = nan\n", "F:1: lr: ");
    usage("steps = 1.0e2\n", "F:1: steps: ");
    usage("steps = -3\n", "F:1: steps: \"-3\" is out of range");
    usage("model = 3\n", "F:1: model: a text is needed");
    usage("model = ''\n", "F:1: model: the value is empty");
    usage("shuffle = 1\n", "F:1: shuffle: a text is needed");
    usage("lr = [1, 2]\n", "F:1: lr: a number is needed");
    usage("[[lr]]\nx = 1\n", "F:1: lr: a number is needed");
    usage("config = 'other.toml'\n", "F:1: unknown key \"config\"");
    usage("dtype = 'fp8'\n", "F:1: dtype: \"fp8\" is not known");
    usage("model = 'a\nb'\n", "F:1: ");
    usage("lr 3\n", "F:1: ");
    usage("lr = \xff\n", "F:1: ");
    usage(std::string(100000, '[') + "\n", "F:1: ");
    const Failure missing = failure({"--config", "/no/such/file.toml"});
    EXPECT_EQ(int(missing.code), int(Exit::missing_input));
    EXPECT(missing.says("/no/such/file.toml"));
    EXPECT_EQ(int(file_failure(std::string(2000000, '#')).code), int(Exit::bad_data));
}

TEST_CASE("config: help shows every option with its default and fits 100 columns") {
    const std::string help = help_text();
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) {
        CAPTURE(line);
        EXPECT(line.size() <= 100);
    }
    for (const Option& o : options()) {
        const size_t at = help.find(concat("\n  --", o.name, o.is_switch() ? "" : " ", o.value));
        CAPTURE(o.name);
        REQUIRE_TRUE(at != std::string::npos);
        const std::string value = show_option(o, Config());
        const std::string entry = help.substr(at, help.find("\n  --", at + 1) - at);
        if (!o.is_switch() && !value.empty())
            EXPECT(entry.find("[" + value + "]") != std::string::npos);
    }
    for (const char* title :
         {"Model and data:", "Batch and optimizer:", "Machine and memory:", "Output:", "Examples:"})
        EXPECT(help.find(title) != std::string::npos);
}

TEST_CASE("config: the option table is sound") {
    for (const Option& o : options()) {
        CAPTURE(o.name);
        EXPECT_EQ(find_option(o.name), &o);
        EXPECT(std::string(o.help).size() > 10);
        const bool choice = std::visit(
            [](auto member) {
                using T = std::remove_cvref_t<decltype(Config().*member)>;
                return std::is_same_v<T, bool> || std::is_enum_v<T>;
            },
            o.member);
        EXPECT(choice <= !o.allowed.empty());
        const bool number = !choice && !std::holds_alternative<std::string Config::*>(o.member);
        EXPECT_EQ(number, o.range.high > o.range.low);
        // Each default obeys its own rule.
        const std::string value = show_option(o, Config());
        Config c;
        if (!value.empty()) set_option(o, c, value, "default");
    }
    EXPECT_EQ(find_option("no-such-flag"), nullptr);
}
