// The loader: batches are a pure function of the sequence number, each epoch is a permutation, and
// packed documents see only themselves.
#include <algorithm>
#include <numeric>
#include <set>

#include "helpers.h"

namespace torus {
namespace {

constexpr int32_t end_token = 0;

// Two shards whose tokens tell shard and index: id = 1 + shard * 1000 + index.
LoaderConfig two_shards(const TempFolder& folder, int64_t S, int64_t first = 100,
                        int64_t second = 57) {
    LoaderConfig config;
    for (const int64_t n : {first, second}) {
        std::vector<int32_t> ids(size_t(n), 0);
        std::iota(ids.begin(), ids.end(), int32_t(1 + 1000 * int64_t(config.shards.size())));
        config.shards.push_back(
            write_shard(folder / concat("s", config.shards.size(), ".bin"), ids));
    }
    config.S = S;
    config.vocab = 2000;
    return config;
}

TEST_CASE("loader: sequences, targets and places") {
    const TempFolder folder;
    LoaderConfig config = two_shards(folder, 8);
    config.shuffle = false;
    const Loader loader(config);
    EXPECT_EQ(loader.tokens(), 157);
    EXPECT_EQ(loader.sequences(), 12 + 7);  // (100-1)/8 and (57-1)/8: the last needs its target
    Batch batch;
    loader.read(11, 2, batch);
    EXPECT_EQ(batch.B, 2);
    EXPECT_EQ(batch.T, 8);
    EXPECT_EQ(batch.valid, 16);
    for (int32_t i = 0; i < 8; ++i) {
        EXPECT_EQ(batch.ids[size_t(i)], 1 + 88 + i);
        EXPECT_EQ(batch.targets[size_t(i)], 2 + 88 + i);
        EXPECT_EQ(batch.ids[size_t(8 + i)], 1001 + i);
        EXPECT_EQ(batch.targets[size_t(8 + i)], 1002 + i);
        EXPECT_EQ(batch.pos[size_t(8 + i)], i);
        EXPECT_EQ(batch.first_key[size_t(8 + i)], 0);
    }
    loader.read(18, 1, batch);  // the last token of all is the last target: 56 = 7 * 8
    EXPECT_EQ(batch.targets.back(), 1001 + 56);
    EXPECT_EQ(loader.place(18).shard, 1);
    EXPECT_EQ(loader.place(18).offset, 48);
}

TEST_CASE("loader: each epoch is a permutation, and all epochs differ") {
    const TempFolder folder;
    for (const int64_t n : {1, 2, 3, 5, 16, 17, 100, 1023, 1024, 1025}) {
        LoaderConfig config;
        config.shards = {write_shard(folder / "s.bin", std::vector<int32_t>(size_t(n + 1), 1))};
        config.S = 1;
        config.vocab = 2;
        config.seed = 5;
        const Loader loader(config);
        REQUIRE_TRUE(loader.sequences() == n);
        std::set<std::vector<int64_t>> orders;
        for (int64_t epoch = 0; epoch < 4; ++epoch) {
            std::vector<int64_t> order;
            for (int64_t i = 0; i < n; ++i) order.push_back(loader.place(epoch * n + i).offset);
            orders.insert(order);
            std::sort(order.begin(), order.end());
            for (int64_t i = 0; i < n; ++i) EXPECT_EQ(order[size_t(i)], i);
        }
        if (n >= 16) EXPECT_EQ(orders.size(), 4u);
        config.seed = 6;
        const Loader other(config);
        int64_t equal = 0;
        for (int64_t i = 0; i < n; ++i) equal += loader.place(i).offset == other.place(i).offset;
        if (n >= 16) EXPECT(equal < n / 2);
    }
}

TEST_CASE("loader: shuffled order is spread evenly") {
    // Place 0 over many epochs: each of 8 sequences about equally often.
    const TempFolder folder;
    LoaderConfig config = two_shards(folder, 8, 33, 33);
    const Loader loader(config);
    REQUIRE_TRUE(loader.sequences() == 8);
    std::vector<int64_t> seen(8);
    for (int64_t epoch = 0; epoch < 4000; ++epoch) {
        const Loader::Place at = loader.place(epoch * 8);
        ++seen[size_t(at.shard * 4 + at.offset / 8)];
    }
    for (const int64_t n : seen) EXPECT(std::abs(n - 500) < 120);  // more than 5 sigma
}

TEST_CASE("loader: any split of the reads gives the same batches, also across epochs") {
    const TempFolder folder;
    const Loader loader(two_shards(folder, 8));
    const int64_t n = 3 * loader.sequences() + 4;
    Batch whole, part;
    loader.read(0, n, whole);
    std::mt19937 random(3);
    for (int64_t at = 0; at < n;) {
        const int64_t B = std::min<int64_t>(n - at, 1 + int64_t(random() % 6));
        loader.read(at, B, part);
        EXPECT(std::equal(part.ids.begin(), part.ids.end(), whole.ids.begin() + at * 8));
        EXPECT(
            std::equal(part.targets.begin(), part.targets.end(), whole.targets.begin() + at * 8));
        at += B;
    }
    // Each epoch holds each sequence once.
    std::vector<int32_t> starts;
    for (int64_t i = 0; i < 3 * loader.sequences(); ++i) {
        starts.push_back(whole.ids[size_t(i * 8)]);
    }
    const int64_t E = loader.sequences();
    for (int64_t epoch = 1; epoch < 3; ++epoch) {
        EXPECT(std::is_permutation(starts.begin(), starts.begin() + E, starts.begin() + epoch * E));
    }
}

TEST_CASE("loader: fingerprint follows the data and the order") {
    const TempFolder folder;
    const LoaderConfig config = two_shards(folder, 8);
    const std::string print = Loader(config).fingerprint();
    EXPECT_EQ(print, Loader(config).fingerprint());
    std::set<std::string> prints{print};
    const auto changed = [&](auto change) {
        LoaderConfig other = config;
        change(other);
        EXPECT(prints.insert(Loader(other).fingerprint()).second);
    };
    changed([](LoaderConfig& c) { c.S = 7; });
    changed([](LoaderConfig& c) { c.seed = 1; });
    changed([](LoaderConfig& c) { c.shuffle = false; });
    changed([](LoaderConfig& c) { c.shards.pop_back(); });
    changed([](LoaderConfig& c) { std::swap(c.shards[0], c.shards[1]); });
    two_shards(folder, 8, 101, 57);
    EXPECT(prints.insert(Loader(config).fingerprint()).second);
}

TEST_CASE("loader: wrong input") {
    const TempFolder folder;
    LoaderConfig config = two_shards(folder, 57);
    expect_error(Exit::bad_data, "s1.bin: 57 tokens", [&] { Loader loader(config); });
    config.S = 56;
    EXPECT_EQ(Loader(config).sequences(), 2);
    config.vocab = 1020;
    config.shuffle = false;
    const Loader loader(config);
    Batch batch;
    loader.read(0, 1, batch);
    expect_error(Exit::bad_data, "s1.bin: token 1057 at index 56",
                 [&] { loader.read(1, 1, batch); });
    config.document_mask = true;
    expect_error(Exit::usage, "--document-mask", [&] { Loader l(config); });
    config.shards.clear();
    expect_error(Exit::missing_input, "no token shards", [&] { Loader l(config); });
    // A uint32 token with the top bit set is too large, not negative.
    std::string bytes = read_text(write_shard(folder / "w.bin", {1, 2, 3}, 100000));
    bytes[1024 + 4 + 3] = char(0x80);
    write_text(folder / "w.bin", bytes);
    config.shards = {folder / "w.bin"};
    config.document_mask = false;
    config.S = 2;
    const Loader wide(config);
    expect_error(Exit::bad_data, "token 2147483650 at index 1", [&] { wide.read(0, 1, batch); });
}

std::vector<int32_t> masked(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> first_key(tokens.size(), -1);
    mask_documents(tokens.data(), int64_t(tokens.size()), end_token, first_key.data());
    return first_key;
}

TEST_CASE("packing: documents") {
    using Keys = std::vector<int32_t>;
    EXPECT_EQ(masked({}), Keys{});
    EXPECT_EQ(masked({5, 6, 7}), Keys{0, 0, 0});  // in the middle of one document
    EXPECT_EQ(masked({0, 6, 7}), Keys{0, 0, 0});  // starts exactly at an edge
    EXPECT_EQ(masked({5, 6, 0}), Keys{0, 0, 2});  // the next one starts at the end
    EXPECT_EQ(masked({5, 0, 6, 7, 0, 8}), Keys{0, 1, 1, 1, 4, 4});
    EXPECT_EQ(masked({0, 0, 0, 1}), Keys{0, 1, 2, 2});  // empty and one-token documents
}

TEST_CASE("packing: the loader's first_key equals a direct definition") {
    const TempFolder folder;
    std::mt19937 random(11);
    std::vector<int32_t> ids(5000);
    for (int32_t& id : ids) id = random() % 9 == 0 ? end_token : int32_t(1 + random() % 50);
    LoaderConfig config;
    config.shards = {write_shard(folder / "s.bin", ids)};
    config.S = 64;
    config.vocab = 51;
    config.end_of_text = end_token;
    config.document_mask = true;
    const Loader loader(config);
    Batch batch;
    loader.read(0, loader.sequences(), batch);
    EXPECT_EQ(batch.valid, batch.B * batch.T);
    for (int64_t b = 0; b < batch.B; ++b) {
        const int64_t offset = loader.place(b).offset;
        for (int64_t i = 0; i < 64; ++i) {
            // The nearest end-of-text at or before i, inside the sequence, else its start.
            int64_t j = i;
            while (j > 0 && ids[size_t(offset + j)] != end_token) --j;
            REQUIRE_TRUE(batch.first_key[size_t(b * 64 + i)] == j);
        }
    }
}

}  // namespace
}  // namespace torus
