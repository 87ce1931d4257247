// prepare_data: text to token shards. Trains a byte-pair tokenizer on text (train-bpe), writes text
// as train_*.bin and val_*.bin (tokenize), and shows what a shard holds (inspect). train_gpt can
// read .txt and .jsonl by itself; this program is for corpora that are worth keeping tokenized.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>

#include "data/data.h"
#include "data/documents.h"
#include "data/files.h"
#include "data/pretokenize.h"
#include "kernels/check.h"
#include "kernels/text.h"

namespace torus {
namespace {

struct Options {
    std::vector<std::string> input;
    std::string output, tokenizer, pattern = "gpt2", shard;
    int64_t vocab_size = 4096, val_last = 0, shard_tokens = 100'000'000, show = 64;
    double val_fraction = 0;
};

std::vector<std::string> input_files(const Options& options) {
    std::vector<std::string> paths;
    for (const std::string& glob : options.input) {
        for (const std::string& path : expand_glob(glob)) paths.push_back(path);
    }
    std::sort(paths.begin(), paths.end());
    paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
    return paths;
}

void train_bpe_command(const Options& options) {
    std::vector<std::string> texts;
    int64_t bytes = 0;
    for (const std::string& path : input_files(options)) {
        data::for_each_document(path, [&](std::string_view document) {
            texts.emplace_back(document);
            bytes += int64_t(document.size());
        });
    }
    require(!texts.empty(), Exit::bad_data, options.input.front(),
            ": holds no text; give .txt or .jsonl files");
    BpeTrainerOptions training;
    training.vocab_size = options.vocab_size;
    if (options.pattern == "llama3") {
        training.pattern = data::llama3_pattern;
    } else if (options.pattern == "qwen2") {
        training.pattern = data::qwen2_pattern;
    } else if (options.pattern != "gpt2") {
        training.pattern = options.pattern;
    }
    const auto tokenizer = train_bpe(texts, training);
    data::make_folders(options.output);
    const std::string path = options.output + "/tokenizer.json";
    tokenizer->save(path);
    std::cout << path << ": " << tokenizer->vocab_size() << " tokens from " << bytes
              << " bytes of text in " << texts.size() << " documents\n";
}

// Shards PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `shard_tokens` tokens.
class ShardSeries {
public:
    ShardSeries(const Options& options, std::string prefix, int64_t vocab)
        : folder_(options.output),
          prefix_(std::move(prefix)),
          shard_tokens_(options.shard_tokens),
          vocab_(vocab) {}

    void append(const std::vector<int32_t>& ids) {
        for (size_t i = 0; i < ids.size();) {
            if (!writer_) {
                char number[32];
                std::snprintf(number, sizeof number, "_%06d.bin", shards_++);
                path_ = folder_ + "/" + prefix_ + number;
                writer_.emplace(path_, vocab_);
            }
            const size_t n = std::min(ids.size() - i, size_t(shard_tokens_ - filled_));
            part_.assign(ids.begin() + int64_t(i), ids.begin() + int64_t(i + n));
            writer_->append(part_);
            i += n;
            filled_ += int64_t(n);
            if (filled_ == shard_tokens_) finish();
        }
    }
    void finish() {
        if (!writer_) return;
        writer_->finish();
        writer_.reset();
        std::cout << path_ << ": " << filled_ << " tokens\n";
        filled_ = 0;
    }

private:
    std::string folder_, prefix_, path_;
    int64_t shard_tokens_, vocab_, filled_ = 0;
    int shards_ = 0;
    std::optional<TokenShardWriter> writer_;
    std::vector<int32_t> part_;
};

// The last tokens of all are the validation set: how many is known only at the end, so everything
// goes through a temporary file first.
void tokenize_with_validation(const Options& options, const Tokenizer& tokenizer,
                              const std::vector<std::string>& paths) {
    data::NewFile spool(options.output + "/all_tokens");  // never published, so it vanishes
    int64_t total = 0;
    data::tokenize_files(paths, tokenizer, [&](const std::vector<int32_t>& ids) {
        spool.write(ids.data(), int64_t(ids.size() * sizeof(int32_t)));
        total += int64_t(ids.size());
    });
    const int64_t val =
        options.val_last > 0 ? options.val_last : int64_t(double(total) * options.val_fraction);
    require(val > 0 && val < total, Exit::usage, "--val-last or --val-fraction asks for ", val,
            " validation tokens of ", total, "; leave at least one on each side");
    ShardSeries train(options, "train", tokenizer.vocab_size());
    ShardSeries validation(options, "val", tokenizer.vocab_size());
    std::vector<int32_t> ids;
    const auto copy = [&](ShardSeries& to, int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at += int64_t(ids.size())) {
            ids.resize(size_t(std::min<int64_t>(1 << 20, last - at)));
            spool.read_at(at * 4, ids.data(), int64_t(ids.size() * sizeof(int32_t)));
            to.append(ids);
        }
        to.finish();
    };
    copy(train, 0, total - val);
    copy(validation, total - val, total);
}

void tokenize_command(const Options& options) {
    require(options.val_fraction >= 0 && options.val_fraction < 1, Exit::usage, "--val-fraction ",
            options.val_fraction, ", allowed is 0 to below 1");
    const auto tokenizer = open_tokenizer(options.tokenizer);
    const std::vector<std::string> paths = input_files(options);
    data::make_folders(options.output);
    // Shards of an earlier run would be read along with the new ones.
    for (const char* name : {"/train_000000.bin", "/val_000000.bin"}) {
        require(!data::is_file(options.output + name), Exit::usage, options.output, name,
                ": exists already; remove the old shards or choose another --output");
    }
    if (options.val_fraction > 0 || options.val_last > 0) {
        tokenize_with_validation(options, *tokenizer, paths);
    } else {
        ShardSeries train(options, "train", tokenizer->vocab_size());
        data::tokenize_files(paths, *tokenizer,
                             [&](const std::vector<int32_t>& ids) { train.append(ids); });
        train.finish();
    }
    tokenizer->save(options.output + "/tokenizer.json");
}

void inspect_command(const Options& options) {
    const TokenShard shard(options.shard);
    const int64_t highest = shard.max_token();
    const auto tokenizer = options.tokenizer.empty() ? nullptr : open_tokenizer(options.tokenizer);
    require(tokenizer == nullptr || highest < tokenizer->vocab_size(), Exit::bad_data, shard.path(),
            ": largest id ", highest, ", the tokenizer has ",
            tokenizer ? tokenizer->vocab_size() : 0, " tokens; use the tokenizer of this shard");
    std::cout << shard.path() << ": " << shard.size() << " tokens of " << shard.width()
              << " bytes, largest id " << highest << "\n";
    std::vector<int32_t> ids(size_t(std::min(options.show, shard.size())));
    shard.read(0, int64_t(ids.size()), ids.data());
    std::cout << "first ids:";
    for (const int32_t id : ids) std::cout << " " << uint32_t(id);
    std::cout << "\n";
    if (tokenizer == nullptr) return;
    std::cout << "first text:\n" << printable(tokenizer->decode(ids)) << "\n";
}

int run(int argc, char** argv) {
    Options options;
    CLI::App app("Prepares text for train_gpt: trains a tokenizer, writes and shows token shards.");
    app.require_subcommand(1);
    app.failure_message([](const CLI::App*, const CLI::Error& e) {
        return "error: " + std::string(e.what()) + "; see prepare_data --help\n";
    });

    CLI::App* train = app.add_subcommand("train-bpe", "Train a byte-pair tokenizer on text");
    train->add_option("--input", options.input, "Globs of .txt and .jsonl files")->required();
    train->add_option("--vocab-size", options.vocab_size, "Tokens, with 256 bytes and end of text")
        ->capture_default_str();
    train->add_option("--pattern", options.pattern, "gpt2, llama3, qwen2, or a regular expression")
        ->capture_default_str();
    train->add_option("--output", options.output, "Folder for tokenizer.json")->required();

    CLI::App* tokenize = app.add_subcommand("tokenize", "Write text as token shards");
    tokenize->add_option("--input", options.input, "Globs of .txt and .jsonl files")->required();
    tokenize->add_option("--tokenizer", options.tokenizer, "bytes, or a tokenizer file or folder")
        ->required();
    tokenize->add_option("--output", options.output, "Folder for train_*.bin and val_*.bin")
        ->required();
    CLI::Option* fraction = tokenize->add_option("--val-fraction", options.val_fraction,
                                                 "Share of the tokens, from the end, for val");
    tokenize->add_option("--val-last", options.val_last, "That many tokens from the end for val")
        ->check(CLI::Range(int64_t(1), int64_t(1) << 50))
        ->excludes(fraction);
    tokenize->add_option("--shard-tokens", options.shard_tokens, "Most tokens of one shard")
        ->check(CLI::Range(int64_t(1), int64_t(0x7fffffff)))
        ->capture_default_str();

    CLI::App* inspect = app.add_subcommand("inspect", "Show what a token shard holds");
    inspect->add_option("shard", options.shard, "Path of a .bin file")->required();
    inspect->add_option("--tokenizer", options.tokenizer, "Also show the first tokens as text");
    inspect->add_option("--tokens", options.show, "How many tokens to show")
        ->check(CLI::Range(int64_t(0), int64_t(1'000'000)))
        ->capture_default_str();

    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? int(Exit::ok) : int(Exit::usage);
    }
    if (train->parsed()) train_bpe_command(options);
    if (tokenize->parsed()) tokenize_command(options);
    if (inspect->parsed()) inspect_command(options);
    return int(Exit::ok);
}

}  // namespace
}  // namespace torus

int main(int argc, char** argv) {
    try {
        return torus::run(argc, argv);
    } catch (const torus::Error& e) {
        std::cerr << "error: " << e.what() << "\n";
        return int(e.code);
    } catch (const std::bad_alloc&) {
        std::cerr << "error: out of memory; use smaller files\n";
        return int(torus::Exit::out_of_memory);
    } catch (const std::exception& e) {
        std::cerr << "error: " << e.what() << "\n";
        return int(torus::Exit::internal);
    }
}
