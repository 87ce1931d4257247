// The loader: a pure function from a sequence number to tokens. It has no position and no random
// state of its own, so ranks, gradient accumulation and resume all agree by asking for numbers.
// Shuffling needs no memory either: each epoch is a Feistel network over the sequence index (Luby
// and Rackoff 1988), walked until it falls inside the range (Black and Rogaway 2002), with Philox
// keyed by (seed, epoch) as its round function.
#include <algorithm>
#include <bit>
#include <filesystem>

#include "data/data.h"
#include "data/files.h"
#include "kernels/check.h"
#include "kernels/rng.h"

namespace torus {
namespace {

constexpr uint64_t shuffle_stream = 0x73687566666c6500u;  // "shuffle\0": apart from other streams
constexpr int feistel_rounds = 6;

// A permutation of 0..n-1.
int64_t permute(int64_t index, int64_t n, uint64_t seed, uint64_t epoch) {
    // The smallest 2*half bits that hold n-1: at most 4n values, so about 4 walks at worst.
    const int bits = std::bit_width(uint64_t(n - 1));
    const int half = std::max(1, (bits + 1) / 2);
    const uint64_t mask = (uint64_t(1) << half) - 1;
    uint64_t value = uint64_t(index);
    do {
        uint64_t left = value >> half, right = value & mask;
        for (uint64_t round = 0; round < feistel_rounds; ++round) {
            const Random4 r = philox(seed, shuffle_stream + epoch, round << 32 | right);
            left ^= r.v[0] & mask;
            std::swap(left, right);
        }
        value = left << half | right;
    } while (value >= uint64_t(n));
    return int64_t(value);
}

}  // namespace

Loader::Loader(LoaderConfig config) : config_(std::move(config)) {
    CHECK(config_.S > 0 && config_.vocab > 0);
    require(!config_.shards.empty(), Exit::missing_input, "no token shards; give them with --data");
    require(!config_.document_mask || config_.end_of_text >= 0, Exit::usage,
            "--document-mask on needs a tokenizer with an end-of-text token; choose one or turn it "
            "off");
    for (const std::string& path : config_.shards) {
        TokenShard shard(path);
        require(shard.size() > config_.S, Exit::bad_data, path, ": ", shard.size(),
                " tokens, a sequence of --seq-length ", config_.S, " needs ", config_.S + 1,
                "; use at most --seq-length ", shard.size() - 1, " or leave this shard out");
        first_sequence_.push_back(sequences_);
        sequences_ += (shard.size() - 1) / config_.S;
        tokens_ += shard.size();
        shards_.push_back(std::move(shard));
    }
    first_sequence_.push_back(sequences_);
}

Loader::Place Loader::place(int64_t n) const {
    CHECK(n >= 0);
    const int64_t epoch = n / sequences_;
    int64_t index = n % sequences_;
    if (config_.shuffle) index = permute(index, sequences_, config_.seed, uint64_t(epoch));
    const auto after = std::upper_bound(first_sequence_.begin(), first_sequence_.end(), index);
    const int64_t shard = after - first_sequence_.begin() - 1;
    return {shard, (index - first_sequence_[size_t(shard)]) * config_.S};
}

void Loader::read(int64_t first, int64_t B, Batch& out) const {
    CHECK(B >= 0);
    const int64_t S = config_.S;
    out.B = B;
    out.T = S;
    out.valid = B * S;
    for (auto* field : {&out.ids, &out.targets, &out.pos, &out.first_key}) {
        field->resize(size_t(B * S));
    }
    std::vector<int32_t> tokens(size_t(S + 1));
    for (int64_t b = 0; b < B; ++b) {
        const Place at = place(first + b);
        const TokenShard& shard = shards_[size_t(at.shard)];
        shard.read(at.offset, S + 1, tokens.data());
        uint32_t highest = 0;  // unsigned: a uint32 token above 2^31 is too large, not negative
        for (const int32_t token : tokens) highest = std::max(highest, uint32_t(token));
        if (int64_t(highest) >= config_.vocab) {
            const auto bad = std::find(tokens.begin(), tokens.end(), int32_t(highest));
            fail(Exit::bad_data, shard.path(), ": token ", highest, " at index ",
                 at.offset + (bad - tokens.begin()), ", the model's vocabulary has ", config_.vocab,
                 " entries; use the tokenizer that the model was made for");
        }
        const int64_t row = b * S;
        std::copy_n(tokens.data(), S, out.ids.data() + row);
        std::copy_n(tokens.data() + 1, S, out.targets.data() + row);
        for (int64_t i = 0; i < S; ++i) out.pos[size_t(row + i)] = int32_t(i);
        if (config_.document_mask) {
            mask_documents(tokens.data(), S, config_.end_of_text, out.first_key.data() + row);
        } else {
            std::fill_n(out.first_key.data() + row, S, 0);
        }
    }
}

std::string Loader::fingerprint() const {
    // File names without their folders: the data may be moved between a run and its resume.
    std::string facts = concat("S ", config_.S, " shuffle ", config_.shuffle, " seed ",
                               config_.seed, " mask ", config_.document_mask);
    for (const TokenShard& shard : shards_) {
        facts += concat("\n", std::filesystem::path(shard.path()).filename().string(), " ",
                        shard.size(), " ", shard.width());
    }
    return data::hex(data::hash_bytes(facts));
}

}  // namespace torus
