// Tokenizer and loader rates on one core: MB/s of text encoded by `bytes` and by byte-pair
// tokenizers of 4k and 32k trained on that text, by each pre-tokenizer pattern, and tokens/s of the
// loader from the page cache. Text: a file given as the argument, else English-like text generated
// here. Each line is the best of five runs.
//   bench_tokenizer [FILE]
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "bench/help.h"
#include "data/data.h"
#include "data/pretokenize.h"
#include "kernels/check.h"
#include "kernels/rng.h"

namespace torus {
namespace {

// Processor time of this thread, so that other programs on the machine hardly matter.
double now() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

double seconds(const std::function<void()>& run) {
    double best = 1e30;
    for (int i = 0; i < 5; ++i) {
        const double start = now();
        run();
        best = std::min(best, now() - start);
    }
    return best;
}

// Words of a Zipf-like vocabulary of 40,000 in sentences: like English in word length, repetition
// and punctuation.
std::string english_like(int64_t bytes) {
    std::vector<std::string> words;
    for (uint64_t w = 0; w < 40000; ++w) {
        std::string word;
        const uint64_t syllables = 1 + (w > 100) + (w > 3000) + random_bits(1, 0, w) % 2;
        for (uint64_t s = 0; s < syllables; ++s) {
            const uint32_t r = random_bits(1, 1 + s, w);
            word += "bcdfghlmnprstvwy"[r & 15];
            word += "aeiou"[(r >> 4) % 5];
            if ((r >> 8 & 3) != 0) word += "nrstldm"[(r >> 10) % 7];
        }
        words.push_back(word);
    }
    std::string text;
    for (uint64_t i = 0; int64_t(text.size()) < bytes; ++i) {
        const double rank = std::pow(double(words.size()), random_uniform(2, 0, i));
        std::string word = words[size_t(rank) - 1];
        const uint32_t r = random_bits(2, 1, i) % 100;
        if (r < 8) word[0] = char(word[0] - 32);
        text += word;
        text += r < 5 ? ".\n" : r < 12 ? ", " : r < 13 ? " 1849 " : r < 14 ? "'s " : " ";
    }
    return text;
}

void bench_encode(const char* name, const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int32_t> ids;
    ids.reserve(text.size() + 1);
    const double time = seconds([&] {
        ids.clear();
        tokenizer.encode(text, ids);
    });
    CHECK(tokenizer.decode(ids) == text);
    std::printf("%-28s %8.1f MB/s   %.2f bytes a token\n", name, double(text.size()) / time / 1e6,
                double(text.size()) / double(ids.size()));
}

void bench_split(const char* name, const std::string& pattern, bool by_hand,
                 const std::string& text) {
    const auto splitter = by_hand ? data::make_splitter(pattern, "bench")
                                  : data::make_regex_splitter(pattern, "bench");
    int64_t pieces = 0;
    const double time = seconds([&] {
        pieces = 0;
        const char* const end = text.data() + text.size();
        for (const char* p = text.data(); p < end; ++pieces) {
            const data::Splitter::Cut cut = splitter->next(text.data(), p, end);
            p += cut.gap + cut.match;
        }
    });
    std::printf("%-28s %8.1f MB/s   %.2f bytes a piece\n", name, double(text.size()) / time / 1e6,
                double(text.size()) / double(pieces));
}

std::unique_ptr<Tokenizer> train(int64_t vocab, const std::string& pattern,
                                 const std::string& text) {
    BpeTrainerOptions options;
    options.vocab_size = vocab;
    options.pattern = pattern;
    const double start = now();
    auto tokenizer = train_bpe({text}, options);
    std::printf("train to %5d tokens        %8.2f s\n", int(tokenizer->vocab_size()),
                now() - start);
    return tokenizer;
}

void bench_loader(const Tokenizer& tokenizer, const std::string& text) {
    std::string folder = (std::filesystem::temp_directory_path() / "torus-bench-XXXXXX").string();
    CHECK(::mkdtemp(folder.data()) != nullptr);
    LoaderConfig config;
    config.shards = {folder + "/bench.bin"};
    config.S = 1024;
    config.vocab = tokenizer.vocab_size();
    config.end_of_text = tokenizer.end_of_text();
    config.document_mask = true;
    {
        std::vector<int32_t> ids;
        tokenizer.encode(text, ids);
        TokenShardWriter writer(config.shards[0], config.vocab);
        for (int64_t n = 0; n < 16'000'000; n += int64_t(ids.size())) writer.append(ids);
        writer.finish();
    }
    const Loader loader(config);
    Batch batch;
    const int64_t n = loader.sequences() / 16 * 16;
    const double time = seconds([&] {
        for (int64_t i = 0; i < n; i += 16) loader.read(i, 16, batch);
    });
    std::printf("loader, shuffled, S 1024     %8.1f million tokens/s\n",
                double(n * config.S) / time / 1e6);
    std::filesystem::remove_all(folder);
}

void run(const char* file) {
    std::string text;
    if (file != nullptr) {
        std::ifstream in(file, std::ios::binary);
        require(bool(in), Exit::missing_input, file, ": cannot open; check the path");
        std::ostringstream all;
        all << in.rdbuf();
        text = all.str();
        require(!text.empty(), Exit::bad_data, file, ": empty; give a text file");
    } else {
        text = english_like(16 << 20);
    }
    std::printf("%s, %.1f MB\n", file != nullptr ? file : "generated text",
                double(text.size()) / 1e6);
    const auto small = train(4096, data::gpt2_pattern, text);
    const auto large = train(32768, data::gpt2_pattern, text);
    const auto llama = train(32768, data::llama3_pattern, text);
    bench_encode("bytes", *open_tokenizer("bytes"), text);
    bench_encode("BPE 4k, GPT-2 pattern", *small, text);
    bench_encode("BPE 32k, GPT-2 pattern", *large, text);
    bench_encode("BPE 32k, Llama-3 pattern", *llama, text);
    bench_split("split GPT-2, by hand", data::gpt2_pattern, true, text);
    bench_split("split GPT-2, PCRE2", data::gpt2_pattern, false, text);
    bench_split("split Llama-3, by hand", data::llama3_pattern, true, text);
    bench_split("split Llama-3, PCRE2", data::llama3_pattern, false, text);
    bench_loader(*small, text);
}

}  // namespace
}  // namespace torus

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    if (!only_words(argc, argv)) return int(torus::Exit::usage);
    try {
        torus::run(argc > 1 ? argv[1] : nullptr);
        return 0;
    } catch (const torus::Error& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return int(e.code);
    }
}
