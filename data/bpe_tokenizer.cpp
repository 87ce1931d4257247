// The byte-level BPE tokenizer: text -> valid UTF-8 runs -> pieces (pre-tokenizer stages) -> ids.
// Natural text repeats its pieces, so a small direct-mapped cache of piece -> ids answers nearly
// all of them with one comparison of 16 bytes; merges run only for the rest. Invalid bytes become
// their own byte tokens, so that decoding gives back every input (of
// a tokenizer that normalizes: its normal form).
#include "data/bpe_tokenizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>

#include "data/bpe.h"
#include "data/files.h"
#include "data/normalize.h"
#include "data/pretokenize.h"
#include "data/tokenizer_json.h"
#include "kernels/check.h"
#include "kernels/utf8.h"

namespace torus::data {
namespace {

// Pieces of up to 16 bytes and 7 ids; a colliding piece replaces the one before it.
class PieceCache {
public:
    static constexpr int64_t longest = 16;
    static constexpr size_t most_ids = 7;

    struct Key {
        uint64_t low, high;
        uint32_t length;
        bool operator==(const Key&) const = default;
    };
    struct Entry {
        Key key{0, 0, 0};
        uint32_t count = 0;
        std::array<int32_t, most_ids> ids{};
    };

    PieceCache() : entries_(size_t(1) << bits) {}

    // Of a piece of 1 to 16 bytes, in a text that can be read up to `end`.
    static Key key_of(const char* p, int64_t n, const char* end) {
        Key key{0, 0, uint32_t(n)};
        if (end - p >= longest) {  // two loads and a mask instead of a copy of variable length
            std::memcpy(&key.low, p, 8);
            if (n < 8) {
                key.low &= (uint64_t(1) << 8 * n) - 1;
            } else if (n > 8) {
                std::memcpy(&key.high, p + 8, 8);
                key.high &= ~uint64_t(0) >> (64 - 8 * (n - 8));
            }
        } else {
            std::memcpy(&key.low, p, size_t(n < 8 ? n : 8));
            if (n > 8) std::memcpy(&key.high, p + 8, size_t(n - 8));
        }
        return key;
    }

    Entry& slot(const Key& key) {
        const uint64_t mixed = (key.low ^ std::rotl(key.high, 29)) * 0x9E3779B97F4A7C15u;
        return entries_[size_t((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9u >> (64 - bits))];
    }

private:
    static constexpr int bits = 15;
    std::vector<Entry> entries_;
};

// What one thread needs to encode: its own splitters, cache and scratch memory.
class Encoder {
public:
    Encoder(const TokenizerSpec& spec, const std::string& path) : spec_(spec), merger_(spec.model) {
        for (const SplitStage& stage : spec.stages) {
            splitters_.push_back(stage.pattern.empty() ? nullptr
                                                       : make_splitter(stage.pattern, path));
        }
    }

    void encode(std::string_view text, std::vector<int32_t>& ids) {
        const char* p = text.data();
        const char* const end = p + text.size();
        while (p < end) {
            const char* const stop = valid_until(p, end);
            if (stop > p) {
                std::string_view valid(p, size_t(stop - p));
                if (spec_.nfc) valid = to_nfc(valid, normal_);
                stage(0, valid.data(), valid.data() + valid.size(), ids);
            }
            p = stop;
            if (p < end) ids.push_back(spec_.model.byte_ids[uint8_t(*p++)]);
        }
    }

private:
    void stage(size_t k, const char* begin, const char* end, std::vector<int32_t>& ids) {
        if (k == spec_.stages.size()) return piece(begin, end - begin, end, ids);
        if (spec_.stages[k].add_prefix_space && *begin != ' ') {
            std::string longer = " ";
            longer.append(begin, end);
            return cut(k, longer.data(), longer.data() + longer.size(), ids);
        }
        cut(k, begin, end, ids);
    }

    void cut(size_t k, const char* begin, const char* end, std::vector<int32_t>& ids) {
        Splitter* const splitter = splitters_[k].get();
        if (splitter == nullptr) return stage(k + 1, begin, end, ids);
        const bool keep_gaps = !spec_.stages[k].drop_gaps;
        const bool last = k + 1 == spec_.stages.size();
        for (const char* p = begin; p < end;) {
            const Splitter::Cut c = splitter->next(begin, p, end);
            if (c.gap > 0 && keep_gaps) stage(k + 1, p, p + c.gap, ids);
            p += c.gap;
            if (last) {
                if (c.match > 0) piece(p, c.match, end, ids);
            } else if (c.match > 0) {
                stage(k + 1, p, p + c.match, ids);
            }
            p += c.match;
        }
    }

    void piece(const char* p, int64_t n, const char* end, std::vector<int32_t>& ids) {
        if (n > PieceCache::longest) return merger_.encode({p, size_t(n)}, ids);
        const PieceCache::Key key = PieceCache::key_of(p, n, end);
        PieceCache::Entry& entry = cache_.slot(key);
        if (entry.key == key) {
            for (uint32_t i = 0; i < entry.count; ++i) ids.push_back(entry.ids[i]);
            return;
        }
        const size_t before = ids.size();
        merger_.encode({p, size_t(n)}, ids);
        const size_t count = ids.size() - before;
        if (count > PieceCache::most_ids) return;
        entry.key = key;
        entry.count = uint32_t(count);
        std::copy_n(ids.begin() + int64_t(before), count, entry.ids.begin());
    }

    const TokenizerSpec& spec_;
    std::vector<std::unique_ptr<Splitter>> splitters_;
    BpeMerger merger_;
    PieceCache cache_;
    std::string normal_;
};

class BpeTokenizer : public Tokenizer {
public:
    BpeTokenizer(std::string json, std::string path)
        : path_(std::move(path)), spec_(parse_tokenizer_json(std::move(json), path_)) {
        idle_.push_back(std::make_unique<Encoder>(spec_, path_));  // its patterns are checked here
    }

    std::string name() const override { return path_; }
    int64_t vocab_size() const override { return int64_t(spec_.model.tokens.size()); }
    int32_t end_of_text() const override { return spec_.end_of_text; }

    // Threads take an idle encoder or make one; all of them give the same ids.
    void encode(std::string_view text, std::vector<int32_t>& ids) const override {
        std::unique_ptr<Encoder> encoder;
        {
            const std::lock_guard lock(mutex_);
            if (!idle_.empty()) {
                encoder = std::move(idle_.back());
                idle_.pop_back();
            }
        }
        if (encoder == nullptr) encoder = std::make_unique<Encoder>(spec_, path_);
        encoder->encode(text, ids);
        const std::lock_guard lock(mutex_);
        idle_.push_back(std::move(encoder));
    }

    std::string decode(const std::vector<int32_t>& ids) const override {
        std::string text;
        for (const int32_t id : ids) {
            require(id >= 0 && id < vocab_size(), Exit::bad_data, "token ", id, ", the tokenizer ",
                    path_, " has ids 0 to ", vocab_size() - 1,
                    "; use the tokenizer of these tokens");
            text += spec_.model.tokens[size_t(id)];
        }
        return text;
    }

    void save(const std::string& path) const override { write_file(path, spec_.json); }
    std::string fingerprint() const override { return hex(hash_bytes(spec_.json)); }

private:
    std::string path_;
    TokenizerSpec spec_;
    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<Encoder>> idle_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_bpe_tokenizer(std::string json, const std::string& path) {
    return std::make_unique<BpeTokenizer>(std::move(json), path);
}

}  // namespace torus::data
