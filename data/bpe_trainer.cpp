// Trains byte-pair merges: count the distinct pieces of the text, then join the most frequent pair
// of neighbours, again and again (Sennrich et al. 2016). Counts are kept up to date per pair with
// the list of words that hold it, so a merge costs only the words it changes. Deterministic: of
// equally frequent pairs the one with the lower left id wins, then the one with the lower right id.
#include <algorithm>
#include <queue>
#include <unordered_map>

#include "data/bpe_tokenizer.h"
#include "data/data.h"
#include "data/pretokenize.h"
#include "data/tokenizer_json.h"
#include "kernels/check.h"
#include "kernels/utf8.h"

namespace torus {
namespace {

using Pair = std::pair<int32_t, int32_t>;

struct Word {
    std::vector<int32_t> symbols;
    int64_t count = 0;
};

struct PairHash {
    size_t operator()(const Pair& p) const {
        return size_t(
            (uint64_t(uint32_t(p.first)) << 32 | uint32_t(p.second)) * 0x9E3779B97F4A7C15u >> 16);
    }
};

class Trainer {
public:
    explicit Trainer(std::vector<Word> words) : words_(std::move(words)) {
        for (size_t w = 0; w < words_.size(); ++w) {
            const std::vector<int32_t>& s = words_[w].symbols;
            for (size_t i = 0; i + 1 < s.size(); ++i) change({s[i], s[i + 1]}, w, +1);
        }
        for (const auto& [pair, info] : pairs_) queue_.push({info.count, pair});
        touched_.clear();
    }

    // The most frequent pair, false when none occurs twice.
    bool best(Pair& pair) {
        while (!queue_.empty()) {
            const Candidate top = queue_.top();
            queue_.pop();
            const auto at = pairs_.find(top.pair);
            if (at == pairs_.end() || at->second.count != top.count) continue;  // outdated
            if (top.count < 2) return false;
            pair = top.pair;
            return true;
        }
        return false;
    }

    void join(const Pair& pair, int32_t id) {
        std::vector<size_t> words = std::move(pairs_[pair].words);
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        for (const size_t w : words) join_in(w, pair, id);
        for (const Pair& changed : touched_) {
            const auto at = pairs_.find(changed);
            if (at == pairs_.end()) continue;
            if (at->second.count == 0) {
                pairs_.erase(at);
            } else {
                queue_.push({at->second.count, changed});
            }
        }
        touched_.clear();
    }

private:
    struct Info {
        int64_t count = 0;
        std::vector<size_t> words;  // may hold a word twice, or one that has lost the pair
    };
    struct Candidate {
        int64_t count;
        Pair pair;
        bool operator<(const Candidate& other) const {  // the queue's top is the largest
            return count != other.count ? count < other.count : pair > other.pair;
        }
    };

    void change(const Pair& pair, size_t word, int64_t sign) {
        Info& info = pairs_[pair];
        info.count += sign * words_[word].count;
        if (sign > 0 && (info.words.empty() || info.words.back() != word)) {
            info.words.push_back(word);
        }
        touched_.push_back(pair);
    }

    void join_in(size_t word, const Pair& pair, int32_t id) {
        std::vector<int32_t>& s = words_[word].symbols;
        for (size_t i = 0; i + 1 < s.size(); ++i) {
            if (s[i] != pair.first || s[i + 1] != pair.second) continue;
            if (i > 0) change({s[i - 1], s[i]}, word, -1);
            change(pair, word, -1);
            if (i + 2 < s.size()) change({s[i + 1], s[i + 2]}, word, -1);
            s[i] = id;
            s.erase(s.begin() + int64_t(i) + 1);
            if (i > 0) change({s[i - 1], id}, word, +1);
            if (i + 1 < s.size()) change({id, s[i + 1]}, word, +1);
        }
    }

    std::vector<Word> words_;
    std::unordered_map<Pair, Info, PairHash> pairs_;
    std::priority_queue<Candidate> queue_;
    std::vector<Pair> touched_;
};

// Distinct pieces of all texts with their counts. Bytes that are not UTF-8 end a piece: they are
// encoded alone, so no merge may cross them.
std::vector<Word> count_words(const std::vector<std::string>& texts, const std::string& pattern) {
    std::unordered_map<std::string, int64_t> counts;
    const auto splitter = data::make_splitter(pattern, "BPE training");
    for (const std::string& text : texts) {
        const char* p = text.data();
        const char* const end = p + text.size();
        while (p < end) {
            const char* stop = valid_until(p, end);
            for (const char* at = p; at < stop;) {
                const data::Splitter::Cut cut = splitter->next(p, at, stop);
                if (cut.gap > 0) ++counts[std::string(at, size_t(cut.gap))];
                at += cut.gap;
                if (cut.match > 0) ++counts[std::string(at, size_t(cut.match))];
                at += cut.match;
            }
            p = stop < end ? stop + 1 : stop;
        }
    }
    std::vector<Word> words;
    words.reserve(counts.size());
    for (const auto& [text, count] : counts) {
        if (text.size() < 2) continue;
        Word word;
        for (const char c : text) word.symbols.push_back(uint8_t(c));
        word.count = count;
        words.push_back(std::move(word));
    }
    return words;
}

}  // namespace

std::unique_ptr<Tokenizer> train_bpe(const std::vector<std::string>& texts,
                                     const BpeTrainerOptions& options) {
    require(options.vocab_size >= 257 && options.vocab_size <= 10'000'000, Exit::usage,
            "--vocab-size ", options.vocab_size,
            ", allowed are 257 (256 bytes and end of text) to 10000000; choose one of them");
    data::BpeFile file;
    file.pattern = options.pattern.empty() ? data::gpt2_pattern : options.pattern;
    for (int b = 0; b < 256; ++b) file.tokens.push_back(std::string(1, char(b)));
    std::unordered_map<std::string, int32_t> known;  // of merged tokens
    Trainer trainer(count_words(texts, file.pattern));
    Pair pair;
    while (int64_t(file.tokens.size()) < options.vocab_size - 1 && trainer.best(pair)) {
        const std::string bytes =
            file.tokens[size_t(pair.first)] + file.tokens[size_t(pair.second)];
        // Two pairs may spell the same token (ab+c, a+bc): then it has one id and two merges.
        const auto [at, fresh] = known.emplace(bytes, int32_t(file.tokens.size()));
        trainer.join(pair, at->second);
        file.merges.push_back(pair);
        if (fresh) file.tokens.push_back(bytes);
    }
    file.end_of_text = int32_t(file.tokens.size());
    file.tokens.push_back(data::end_of_text_name);
    return data::make_bpe_tokenizer(data::to_tokenizer_json(file), "BPE training");
}

}  // namespace torus
