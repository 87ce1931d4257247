// Token shards: both widths there and back, offsets beyond 2 GiB, and every broken file refused.
#include <unistd.h>

#include <cstring>

#include "helpers.h"

namespace torus {
namespace {

std::string header(int32_t magic, int32_t version, int32_t count) {
    std::string bytes(1024, '\0');
    const int32_t fields[3] = {magic, version, count};
    std::memcpy(bytes.data(), fields, sizeof fields);
    return bytes;
}

TEST_CASE("shards: written and read back in both widths") {
    const TempFolder folder;
    std::mt19937 random(1);
    for (const int64_t vocab : {257, 65536, 65537, 151936}) {
        std::vector<int32_t> ids(70001);
        for (int32_t& id : ids) id = int32_t(int64_t(random()) % vocab);
        ids[12345] = int32_t(vocab - 1);
        const TokenShard shard(write_shard(folder / "a.bin", ids, vocab));
        EXPECT_EQ(shard.width(), vocab > 65536 ? 4 : 2);
        EXPECT_EQ(shard.size(), int64_t(ids.size()));
        EXPECT_EQ(shard.max_token(), vocab - 1);
        for (const auto& [first, n] : std::vector<std::pair<int64_t, int64_t>>{
                 {0, 70001}, {0, 0}, {70001, 0}, {70000, 1}, {1, 16384}, {16383, 16386}}) {
            std::vector<int32_t> part(size_t(n) + 1, -7);
            shard.read(first, n, part.data());
            EXPECT(std::equal(part.begin(), part.end() - 1, ids.begin() + first));
            EXPECT_EQ(part.back(), -7);
        }
        EXPECT_THROWS_AS(shard.read(70000, 2, ids.data()), Error);
        EXPECT_THROWS_AS(shard.read(-1, 1, ids.data()), Error);
    }
}

TEST_CASE("shards: llm.c's layout, byte by byte") {
    const TempFolder folder;
    const std::string path = write_shard(folder / "a.bin", {1, 256, 65535}, 65536);
    EXPECT_EQ(read_text(path), header(20240520, 1, 3) + std::string("\1\0\0\1\xff\xff", 6));
    write_shard(folder / "b.bin", {1, 70000}, 100000);
    EXPECT_EQ(read_text(folder / "b.bin"),
              header(20240801, 7, 2) + std::string("\1\0\0\0\x70\x11\1\0", 8));
    // Nothing else is left in the folder, and writing again replaces the file.
    write_shard(path, {5});
    EXPECT_EQ(TokenShard(path).size(), 1);
    int files = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        ++files;
    }
    EXPECT_EQ(files, 2);
}

TEST_CASE("shards: offsets beyond 2 GiB") {
    // A sparse file: 2^31-1 tokens of 4 bytes are 8 GiB that take a few blocks on the disk.
    const TempFolder folder;
    const std::string path = folder / "big.bin";
    const int64_t count = 0x7fffffff;
    write_text(path, header(20240801, 7, int32_t(count)));
    std::filesystem::resize_file(path, uint64_t(1024 + count * 4));
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(1024 + (count - 1) * 4);
        file.write("\x39\x30\0\0", 4);
    }
    const TokenShard shard(path);
    int32_t last[2] = {-1, -1};
    shard.read(count - 2, 2, last);
    EXPECT_EQ(last[0], 0);
    EXPECT_EQ(last[1], 12345);
    LoaderConfig config;
    config.shards = {path};
    config.S = 1 << 20;
    config.vocab = 100;
    config.shuffle = false;
    const Loader loader(config);
    EXPECT_EQ(loader.sequences(), 2047);
    EXPECT_EQ(loader.place(2046).offset, int64_t(2046) << 20);
    Batch batch;
    loader.read(2045, 1, batch);
    EXPECT_EQ(batch.ids.size(), size_t(1) << 20);
}

TEST_CASE("shards: wrong files are refused") {
    const TempFolder folder;
    const std::string path = folder / "bad.bin";
    const auto refused = [&](const std::string& bytes, const std::string& part) {
        write_text(path, bytes);
        expect_error(Exit::bad_data, part, [&] { TokenShard shard(path); });
    };
    refused("", "0 bytes");
    refused(std::string(1023, '\0'), "1023 bytes");
    refused(header(20240521, 1, 1) + "ab", "magic number 20240521");
    refused(header(20240520, 2, 1) + "ab", "version 2");
    refused(header(20240801, 1, 1) + "abcd", "version 1");
    refused(header(20240520, 1, 0), "counts 0 tokens");
    refused(header(20240520, 1, -1), "counts -1 tokens");
    refused(header(20240520, 1, 0x7fffffff) + "ab", "cut");
    refused(header(20240520, 1, 1) + "abc", "1027 bytes");
    refused(header(20240520, 1, 2) + "ab", "cut");
    refused(header(20240801, 7, 2) + "abcdabc", "cut");
    expect_error(Exit::missing_input, "none.bin", [&] { TokenShard shard(folder / "none.bin"); });
    expect_error(Exit::bad_data, "not a regular file", [&] { TokenShard shard(folder.path()); });
    std::filesystem::create_symlink("loop.bin", folder / "loop.bin");
    expect_error(Exit::io, "symbolic links", [&] { TokenShard shard(folder / "loop.bin"); });
}

TEST_CASE("shards: cut at every byte") {
    const TempFolder folder;
    const std::string whole = read_text(write_shard(folder / "a.bin", {1, 2, 3, 4, 5}));
    for (size_t n = 0; n < whole.size(); ++n) {
        write_text(folder / "cut.bin", whole.substr(0, n));
        expect_error(Exit::bad_data, "cut.bin", [&] { TokenShard shard(folder / "cut.bin"); });
    }
}

TEST_CASE("shards: a file that shrinks after it was opened is an error, not a crash") {
    const TempFolder folder;
    const std::string path = write_shard(folder / "a.bin", std::vector<int32_t>(100000, 7));
    const TokenShard shard(path);
    std::filesystem::resize_file(path, 1024 + 1000);
    std::vector<int32_t> ids(100000);
    shard.read(0, 500, ids.data());
    expect_error(Exit::bad_data, "a.bin:byte 2024: the file ended",
                 [&] { shard.read(0, 501, ids.data()); });
}

TEST_CASE("shards: a writer that is dropped or fails leaves nothing") {
    const TempFolder folder;
    write_shard(folder / "old.bin", {1});
    {
        TokenShardWriter writer(folder / "old.bin", 300);
        writer.append({2, 3});
    }
    EXPECT_EQ(TokenShard(folder / "old.bin").size(), 1);
    {
        TokenShardWriter writer(folder / "empty.bin", 300);
        writer.append({});
        expect_error(Exit::bad_data, "no tokens", [&] { writer.finish(); });
    }
    {
        TokenShardWriter writer(folder / "wrong.bin", 300);
        EXPECT_THROWS_AS(writer.append({300}), Error);
        EXPECT_THROWS_AS(writer.append({-1}), Error);
    }
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        names.push_back(entry.path().filename());
    }
    EXPECT_EQ(names, std::vector<std::string>{"old.bin"});
    expect_error(Exit::io, "none/a.bin", [&] { TokenShardWriter w(folder / "none/a.bin", 300); });
    TokenShardWriter writer(folder / "taken.bin", 300);
    writer.append({1});
    std::filesystem::create_directory(folder / "taken.bin");  // the rename cannot replace it
    expect_error(Exit::io, "taken.bin: cannot finish", [&] { writer.finish(); });
    EXPECT(std::filesystem::is_empty(folder / "taken.bin"));
}

TEST_CASE("shards: globs") {
    const TempFolder folder;
    for (const char* name : {"b_10.bin", "b_2.bin", "a.bin", "c.txt"}) {
        write_text(folder / name, "x");
    }
    EXPECT_EQ(expand_glob(folder / "*.bin"),
              std::vector<std::string>{folder / "a.bin", folder / "b_10.bin", folder / "b_2.bin"});
    EXPECT_EQ(expand_glob(folder / "{c.txt,a.bin,a.bin}"),
              std::vector<std::string>{folder / "a.bin", folder / "c.txt"});
    expect_error(Exit::missing_input, "no file matches", [&] { expand_glob(folder / "*.x"); });
    expect_error(Exit::usage, "empty file pattern", [] { expand_glob(""); });
    expect_error(Exit::missing_input, "is a folder", [&] { expand_glob(folder.path()); });
}

}  // namespace
}  // namespace torus
