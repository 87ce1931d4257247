// Where tokens come from: tokenizers, token shards, and a loader that is a pure function of
// (seed, position), so that resume and any number of ranks see the same data.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/files.h"

namespace torus {

// --- tokenizer -----------------------------------------------------------------------------------
struct Tokenizer {
    virtual ~Tokenizer() = default;
    virtual std::string name() const = 0;
    virtual int64_t vocab_size() const = 0;
    virtual int32_t end_of_text() const = 0;  // -1 when there is none
    // Appends the ids of `text` (any bytes; invalid UTF-8 is encoded byte by byte). No special
    // tokens are recognised in the text and none are added.
    virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;
    // Throws Error(bad_data) on an unknown id.
    virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
    virtual void save(const std::string& path) const = 0;  // as tokenizer.json
    virtual std::string fingerprint() const = 0;           // equal only when all ids are equal
};
// "bytes" (ids 0-255 and end of text 256), or a folder or file with a byte-level BPE
// tokenizer.json. Throws Error(missing_input | bad_data).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& spec);

struct BpeTrainerOptions {
    int64_t vocab_size = 4096;  // with the 256 bytes and the end-of-text token
    std::string pattern;        // pre-tokenizer regex; empty = GPT-2's
};
std::unique_ptr<Tokenizer> train_bpe(const std::vector<std::string>& texts,
                                     const BpeTrainerOptions&);

// --- shards --------------------------------------------------------------------------------------
// llm.c's token files: 256 int32 header {20240520, 1, count} + uint16 ids, or {20240801, 7, count}
// + uint32 ids.
class TokenShard {
public:
    explicit TokenShard(const std::string& path);  // Error(bad_data) when the header or size is off
    ~TokenShard();
    TokenShard(TokenShard&&) noexcept;
    TokenShard& operator=(TokenShard&&) noexcept;
    int64_t size() const { return count_; }
    int width() const { return width_; }  // bytes per token: 2 or 4
    void read(int64_t first, int64_t n, int32_t* out) const;
    int64_t max_token() const;  // scans the shard
    const std::string& path() const { return path_; }

private:
    std::string path_;
    data::File file_;
    int64_t count_ = 0;
    int width_ = 2;
};

class TokenShardWriter {
public:
    TokenShardWriter(std::string path, int64_t vocab_size);  // picks uint16 or uint32
    ~TokenShardWriter();
    void append(const std::vector<int32_t>& ids);
    void finish();  // header, fsync, rename from a temporary name; Error(io)

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Files matching a glob, sorted; Error(missing_input) when none.
std::vector<std::string> expand_glob(const std::string& pattern);

// .txt and .jsonl files are tokenized once into `cache_dir` (key: file sizes, times, tokenizer),
// .bin files are taken as they are. Returns the shard paths. jsonl: one document per line in key
// "text".
std::vector<std::string> prepare_data(const std::string& glob, const Tokenizer&,
                                      const std::string& cache_dir);

// --- loader --------------------------------------------------------------------------------------
struct Batch {
    int64_t B = 0, T = 0;
    std::vector<int32_t> ids, targets, pos, first_key;  // (B,T) each; targets < 0 = ignored
    int64_t valid = 0;                                  // targets >= 0
};

struct LoaderConfig {
    std::vector<std::string> shards;
    int64_t S = 0;      // tokens of one sequence
    int64_t vocab = 0;  // every token must be below
    int32_t end_of_text = -1;
    bool document_mask = false;  // first_key from the end-of-text tokens, see mask_documents
    bool shuffle = true;
    uint64_t seed = 0;
};

// Sequences are S+1 consecutive tokens of one shard, S apart (ids = first S, targets = last S).
// Sequence number n of the run is epoch n / sequences(), place permutation(seed, epoch)(n %
// sequences()); the permutation is a Feistel network over the index, so it needs no memory.
class Loader {
public:
    explicit Loader(LoaderConfig);  // checks every shard: S+1 tokens at least; Error(bad_data)
    int64_t sequences() const { return sequences_; }  // in one epoch
    int64_t tokens() const { return tokens_; }        // in all shards
    const LoaderConfig& config() const { return config_; }
    // B sequences from number `first`. Token >= vocab: Error(bad_data) with file and index.
    void read(int64_t first, int64_t B, Batch& out) const;
    // Shard and token offset where sequence number n starts.
    struct Place {
        int64_t shard, offset;
    };
    Place place(int64_t n) const;
    std::string fingerprint() const;  // of the data list: names, sizes, S, shuffle, seed

private:
    LoaderConfig config_;
    std::vector<TokenShard> shards_;
    std::vector<int64_t> first_sequence_;  // of each shard, and the total at the end
    int64_t sequences_ = 0, tokens_ = 0;
};

// first_key (S) of one sequence from its first S tokens: the end-of-text token opens the document
// that follows it (so it serves as its start mark, and predicting it means "this document ends"),
// as in llm.c's data; tokens before the first one belong to the document the previous sequence was
// in.
void mask_documents(const int32_t* tokens, int64_t S, int32_t end_of_text, int32_t* first_key);

}  // namespace torus
