// Text to shards: documents of .txt and .jsonl files, the cache, and faults with file and line.
#include <sys/stat.h>

#include "data/documents.h"
#include "helpers.h"

namespace torus {
namespace {

using Documents = std::vector<std::string>;

Documents documents(const std::string& path) {
    Documents out;
    data::for_each_document(path, [&](std::string_view text) { out.emplace_back(text); });
    return out;
}

TEST_CASE("documents: text files") {
    const TempFolder folder;
    const std::string path = folder / "a.txt";
    const auto read = [&](const std::string& text) {
        write_text(path, text);
        return documents(path);
    };
    EXPECT_EQ(read(""), Documents{});
    EXPECT_EQ(read("one\ntwo"), Documents{"one\ntwo"});
    EXPECT_EQ(read("one\n<|endoftext|>\ntwo\n"), Documents{"one\n", "two\n"});
    EXPECT_EQ(read("<|endoftext|>\r\none\r\n<|endoftext|>"), Documents{"one\r\n"});
    EXPECT_EQ(read("<|endoftext|>\n<|endoftext|>\n"), Documents{});
    // Only a line of its own separates.
    EXPECT_EQ(read("a <|endoftext|>\n<|endoftext|> b\n"),
              Documents{"a <|endoftext|>\n<|endoftext|> b\n"});
    EXPECT_EQ(read("\xef\xbb\xbfone"), Documents{"one"});
    EXPECT_EQ(read("\xef\xbb\xbf"), Documents{});
    EXPECT_EQ(read(std::string("a\0\xff\n\n", 5)), Documents{std::string("a\0\xff\n\n", 5)});
    // Lines and documents across the reader's buffer.
    std::string big;
    Documents expected;
    std::mt19937 random(2);
    for (int i = 0; i < 40; ++i) {
        expected.push_back(std::string(1 + random() % 200000, char('a' + i % 26)) + "\n");
        big += (i > 0 ? "<|endoftext|>\n" : "") + expected.back();
    }
    EXPECT(read(big) == expected);
}

TEST_CASE("documents: jsonl") {
    const TempFolder folder;
    const std::string path = folder / "a.jsonl";
    write_text(path,
               "\xef\xbb\xbf{\"text\": \"one\"}\r\n\n  \r\n"
               "{\"id\": 7, \"text\": \"two\\n\\u00e9\\u0000\", \"more\": [1, {\"text\": 2}]}\n"
               "{\"text\": \"\"}\n{\"text\":\"three\"}");
    EXPECT_EQ(documents(path), Documents{"one", std::string("two\n\u00e9\0", 7), "three"});
    const auto refused = [&](const std::string& line, const std::string& part) {
        write_text(path, "{\"text\": \"fine\"}\n\n" + line);
        expect_error(Exit::bad_data, "a.jsonl:line 3" + part, [&] { documents(path); });
    };
    refused("{\"txt\": \"x\"}\n", ": key \"text\" is missing (found \"txt\")");
    refused("{}\n", ": key \"text\" is missing (found no key)");
    refused("{\"text\": 3}\n", ": key \"text\" is number");
    refused("{\"text\": null}\n", ": key \"text\" is null");
    refused("[\"text\"]\n", ": not a JSON object");
    refused("{\"text\": \"cut", ":byte 14: not valid JSON");
    refused("{\"text\": \"a\"} {\"text\": \"b\"}\n", ":byte");
    refused("{\"text\": \"\xff\"}\n", ":byte 11: not valid JSON");
    refused("{\"text\": \"\\ud800\"}\n", ":byte");
    refused(std::string("{\"text\": \"\0\"}\n", 14), ":byte");
    refused("{\"text\": \"a\", \"text\": \"b\"}\n", ": a JSON key appears twice");
    refused("{\"text\": " + std::string(10000, '['), ": JSON nested deeper");
    refused("{\"text\": \"" + std::string(65 << 20, 'x') + "\"}\n", ": longer than");
    refused("{\"\x1b[31m\\u001b[31m\": 1}", ":byte");
    refused("{\"\\u001b[31m\": 1}", ": key \"text\" is missing (found \"\\x1b[31m\")");
}

TEST_CASE("prepare: documents become shards, once") {
    const TempFolder folder;
    const auto tokenizer = open_tokenizer("bytes");
    const std::string cache = folder / "cache/deep";
    write_text(folder / "a.txt", "ab\n<|endoftext|>\nc");
    write_text(folder / "b.jsonl", "{\"text\": \"d\"}\n{\"text\": \"ef\"}\n");
    write_shard(folder / "c.bin", {1, 2, 3});
    const auto shards = prepare_data(folder / "[abc].*", *tokenizer, cache);
    REQUIRE_TRUE(shards.size() == 3);
    EXPECT_EQ(shards[2], folder / "c.bin");
    const auto ids = [](const std::string& path) {
        const TokenShard shard(path);
        std::vector<int32_t> out(size_t(shard.size()));
        shard.read(0, shard.size(), out.data());
        return out;
    };
    EXPECT_EQ(ids(shards[0]), std::vector<int32_t>{256, 'a', 'b', '\n', 256, 'c'});
    EXPECT_EQ(ids(shards[1]), std::vector<int32_t>{256, 'd', 256, 'e', 'f'});

    // Asked again, nothing is written.
    const auto inode = [](const std::string& path) {
        struct stat status {};
        REQUIRE_TRUE(::stat(path.c_str(), &status) == 0);
        return std::pair(status.st_ino, status.st_mtim.tv_nsec);
    };
    const auto before = inode(shards[0]);
    EXPECT_EQ(prepare_data(folder / "[abc].*", *tokenizer, cache), shards);
    EXPECT(inode(shards[0]) == before);
    // A damaged shard is made again.
    std::filesystem::resize_file(shards[0], 1025);
    EXPECT_EQ(prepare_data(folder / "a.txt", *tokenizer, cache)[0], shards[0]);
    EXPECT_EQ(ids(shards[0]).size(), 6u);
    // Another tokenizer, another text and another time are other entries.
    BpeTrainerOptions options;
    options.vocab_size = 258;
    const auto bpe = train_bpe({"abab"}, options);
    const std::string with_bpe = prepare_data(folder / "a.txt", *bpe, cache)[0];
    EXPECT(with_bpe != shards[0]);
    EXPECT_EQ(ids(with_bpe), std::vector<int32_t>{257, 256, '\n', 257, 'c'});
    write_text(folder / "a.txt", "xy");
    const std::string changed = prepare_data(folder / "a.txt", *tokenizer, cache)[0];
    EXPECT(changed != shards[0]);
    EXPECT_EQ(ids(changed), std::vector<int32_t>{256, 'x', 'y'});
    std::filesystem::last_write_time(
        folder / "a.txt", std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    EXPECT(prepare_data(folder / "a.txt", *tokenizer, cache)[0] != changed);
}

TEST_CASE("prepare: wrong input leaves nothing in the cache") {
    const TempFolder folder;
    const auto tokenizer = open_tokenizer("bytes");
    const std::string cache = folder / "cache";
    write_text(folder / "a.csv", "x");
    write_text(folder / "empty.txt", "");
    write_text(folder / "bad.jsonl", "{\"text\": \"fine\"}\n{\n");
    write_text(folder / "file", "x");
    expect_error(Exit::usage, "a.csv: unknown kind",
                 [&] { prepare_data(folder / "a.csv", *tokenizer, cache); });
    expect_error(Exit::bad_data, "empty.txt: holds no text",
                 [&] { prepare_data(folder / "empty.txt", *tokenizer, cache); });
    expect_error(Exit::bad_data, "bad.jsonl:line 2",
                 [&] { prepare_data(folder / "bad.jsonl", *tokenizer, cache); });
    EXPECT(std::filesystem::is_empty(cache));
    expect_error(Exit::permission, "file",
                 [&] { prepare_data(folder / "bad.jsonl", *tokenizer, folder / "file/cache"); });
    expect_error(Exit::missing_input, "no file matches",
                 [&] { prepare_data(folder / "none*.txt", *tokenizer, cache); });
}

TEST_CASE("files: a new file appears only when it is published") {
    const TempFolder folder;
    {
        data::NewFile file(folder / "a");
        file.write("abcdef", 6);
        file.write_at(2, "XY", 2);
        char back[3] = {};
        file.read_at(1, back, 3);
        EXPECT_EQ(std::string(back, 3), "bXY");
        EXPECT(!data::is_file(folder / "a"));
        file.publish();
    }
    EXPECT_EQ(data::read_file(folder / "a", 6), "abXYef");
    expect_error(Exit::bad_data, "6 bytes, at most 5", [&] { data::read_file(folder / "a", 5); });
    expect_error(Exit::missing_input, "b: cannot open", [&] { data::read_file(folder / "b", 5); });
    EXPECT_EQ(data::hex(data::hash_bytes("")), "cbf29ce484222325");
    EXPECT_EQ(data::hex(data::hash_bytes("a")), "af63dc4c8601ec8c");  // FNV's own test vector
}

}  // namespace
}  // namespace torus
