// Tokenizers: round trips of any bytes, merges against a plain definition, the trainer against a
// direct count, and every broken or unknown tokenizer.json refused.
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/bpe.h"
#include "data/pretokenize.h"
#include "data/tokenizer_json.h"
#include "helpers.h"

namespace torus {
namespace {

using nlohmann::json;

const std::string sample =
    "It was the best of times, it was the worst of times. The thirty-three thieves thought that "
    "they thrilled the throne throughout Thursday; they'll say it's 1234 o'clock!\n\n  Well...\n";

std::unique_ptr<Tokenizer> trained(int64_t vocab, const std::string& pattern = "") {
    BpeTrainerOptions options;
    options.vocab_size = vocab;
    options.pattern = pattern;
    return train_bpe({sample, sample + sample}, options);
}

json trained_json() {
    const TempFolder folder;
    trained(300)->save(folder / "t.json");
    return json::parse(read_text(folder / "t.json"));
}

std::unique_ptr<Tokenizer> open_json(const TempFolder& folder, const json& value) {
    write_text(folder / "t.json", value.dump());
    return open_tokenizer(folder / "t.json");
}

TEST_CASE("tokenizer: bytes") {
    const TempFolder folder;
    const auto bytes = open_tokenizer("bytes");
    EXPECT_EQ(bytes->vocab_size(), 257);
    EXPECT_EQ(bytes->end_of_text(), 256);
    EXPECT_EQ(encode(*bytes, "A\xff"), std::vector<int32_t>{65, 255});
    EXPECT_EQ(bytes->decode({65, 256, 66}), "A<|endoftext|>B");
    expect_error(Exit::bad_data, "token 257", [&] { bytes->decode({257}); });
    expect_error(Exit::bad_data, "token -1", [&] { bytes->decode({-1}); });
    // Saved, it is a BPE without merges that gives the same ids.
    bytes->save(folder / "tokenizer.json");
    const auto same = open_tokenizer(folder.path());
    EXPECT_EQ(same->vocab_size(), 257);
    EXPECT_EQ(same->end_of_text(), 256);
    std::mt19937 random(4);
    const std::string any = random_bytes(random, 5000) + sample;
    EXPECT_EQ(encode(*same, any), encode(*bytes, any));
}

TEST_CASE("tokenizer: any bytes come back") {
    std::mt19937 random(5);
    const TempFolder folder;
    json prefix = trained_json();
    const std::unique_ptr<Tokenizer> tokenizers[] = {open_tokenizer("bytes"), trained(400),
                                                     trained(400, data::llama3_pattern),
                                                     trained(400, R"(\p{L}+| )")};
    for (const auto& tokenizer : tokenizers) {
        for (int i = 0; i < 300; ++i) {
            std::string text = random_bytes(random, random() % 60);
            if (i % 2 == 0) text.insert(random() % (text.size() + 1), sample);
            if (i % 50 == 0) text += std::string(3000, " \n\xe2"[i % 3]);
            const std::vector<int32_t> ids = encode(*tokenizer, text);
            REQUIRE_TRUE(tokenizer->decode(ids) == text);
            for (const int32_t id : ids) REQUIRE_TRUE(id != tokenizer->end_of_text());
        }
    }
    // Each invalid byte is a token of its own, and the text on its two sides does not meet.
    const auto bpe = trained(400);
    std::vector<int32_t> expected = encode(*bpe, "the");
    expected.push_back(0xff);
    for (const int32_t id : encode(*bpe, "the")) expected.push_back(id);
    EXPECT_EQ(encode(*bpe, "the\xffthe"), expected);
}

// The definition: join the lowest-ranked pair, leftmost first, until none is left.
std::vector<int32_t> merge_plainly(const std::map<std::pair<int32_t, int32_t>, int32_t>& merges,
                                   std::vector<int32_t> ids) {
    while (true) {
        size_t best = ids.size();
        int32_t id = 0x7fffffff;  // here the rank is the new id
        for (size_t i = 0; i + 1 < ids.size(); ++i) {
            const auto at = merges.find({ids[i], ids[i + 1]});
            if (at != merges.end() && at->second < id) {
                best = i;
                id = at->second;
            }
        }
        if (best == ids.size()) return ids;
        ids[best] = id;
        ids.erase(ids.begin() + int64_t(best) + 1);
    }
}

TEST_CASE("bpe: short and long pieces equal the plain definition") {
    std::mt19937 random(6);
    data::BpeModel model;
    for (int b = 0; b < 256; ++b) model.byte_ids[size_t(b)] = b;
    model.merges = data::MergeTable(200);
    std::map<std::pair<int32_t, int32_t>, int32_t> merges;
    for (int32_t id = 256; id < 456; ++id) {
        const auto any = [&] {
            return id > 260 && random() % 2 != 0 ? int32_t(256 + random() % uint32_t(id - 256))
                                                 : int32_t('a' + random() % 3);
        };
        const std::pair<int32_t, int32_t> pair{any(), any()};
        if (!merges.emplace(pair, id).second) continue;
        model.merges.insert(pair.first, pair.second, {uint32_t(id), id});
    }
    data::BpeMerger merger(model);
    for (int i = 0; i < 2000; ++i) {
        std::string piece;
        const size_t n = 1 + random() % (i % 10 == 0 ? 300 : 40);
        for (size_t j = 0; j < n; ++j) piece += char('a' + random() % 3);
        std::vector<int32_t> ids;
        merger.encode(piece, ids);
        const std::vector<int32_t> start(piece.begin(), piece.end());
        REQUIRE_TRUE(ids == merge_plainly(merges, start));
    }
    // A piece of a megabyte takes a heap, not an hour.
    std::vector<int32_t> ids;
    merger.encode(std::string(1 << 20, 'a'), ids);
    EXPECT(!ids.empty());
}

TEST_CASE("bpe: the cache changes nothing, threads neither") {
    const auto warm = trained(500);
    std::mt19937 random(8);
    std::vector<std::string> texts;
    for (int i = 0; i < 3000; ++i) {
        std::string text;
        for (size_t n = random() % 30; n > 0; --n) text += sample[random() % sample.size()];
        texts.push_back(text);
    }
    std::vector<std::vector<int32_t>> expected;
    for (const std::string& text : texts) expected.push_back(encode(*trained(500), text));
    std::vector<std::thread> threads;
    std::vector<int> wrong(4);
    for (size_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (size_t i = 0; i < texts.size(); ++i) {
                wrong[t] += encode(*warm, texts[i]) != expected[i];
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST_CASE("bpe trainer: the most frequent pair first, ties to the lower ids") {
    BpeTrainerOptions options;
    options.vocab_size = 259;
    // Pieces: "abab" and " cdcd": ab, cd twice each, and ba, dc once, " c" once.
    auto tokenizer = train_bpe({"abab cdcd"}, options);
    EXPECT_EQ(tokenizer->vocab_size(), 259);
    EXPECT_EQ(tokenizer->end_of_text(), 258);
    EXPECT_EQ(tokenizer->decode({256}), "ab");
    EXPECT_EQ(tokenizer->decode({257}), "cd");
    // Runs do not count overlapping pairs twice when they are merged: aaaa -> aa aa -> aaaa.
    options.vocab_size = 300;
    tokenizer = train_bpe({"aaaa aaaa aaaa"}, options);
    EXPECT_EQ(tokenizer->decode({256}), "aa");
    EXPECT_EQ(encode(*tokenizer, "aaaa").size(), 1u);
    // Nothing that occurs once is merged: the vocabulary stays small.
    tokenizer = train_bpe({"abcdefg"}, options);
    EXPECT_EQ(tokenizer->vocab_size(), 257);
    EXPECT_EQ(train_bpe({}, options)->vocab_size(), 257);
    options.vocab_size = 256;
    expect_error(Exit::usage, "--vocab-size 256", [&] { train_bpe({"a"}, options); });
    options.vocab_size = 300;
    options.pattern = "(";
    expect_error(Exit::bad_data, "pattern", [&] { train_bpe({"a"}, options); });
}

TEST_CASE("bpe trainer: counts equal a direct recount at every merge") {
    std::mt19937 random(10);
    std::string text;
    for (int i = 0; i < 3000; ++i) text += "abcab  "[random() % 7];
    BpeTrainerOptions options;
    options.vocab_size = 330;
    const auto tokenizer = train_bpe({text}, options);
    const TempFolder folder;
    tokenizer->save(folder / "t.json");
    const json merges = json::parse(read_text(folder / "t.json"))["model"]["merges"];
    // Replay: the words as lists of strings, every pair counted anew before each merge.
    std::vector<std::vector<std::string>> words;
    const auto splitter = data::make_splitter(data::gpt2_pattern, "test");
    for (const char *p = text.data(), *end = p + text.size(); p < end;) {
        const int64_t n = splitter->next(text.data(), p, end).match;
        words.emplace_back();
        for (int64_t i = 0; i < n; ++i) words.back().push_back(data::byte_alphabet({p + i, 1}));
        p += n;
    }
    REQUIRE_TRUE(merges.size() > 60);
    for (const json& merge : merges) {
        std::map<std::string, int64_t> counts;
        for (const auto& word : words) {
            for (size_t i = 0; i + 1 < word.size(); ++i) ++counts[word[i] + " " + word[i + 1]];
        }
        int64_t most = 0;
        for (const auto& [pair, count] : counts) most = std::max(most, count);
        const std::string pair = merge.get<std::string>();
        REQUIRE_TRUE(counts[pair] == most);
        const std::string left = pair.substr(0, pair.find(' ')),
                          right = pair.substr(left.size() + 1);
        for (auto& word : words) {
            for (size_t i = 0; i + 1 < word.size(); ++i) {
                if (word[i] != left || word[i + 1] != right) continue;
                word[i] += right;
                word.erase(word.begin() + int64_t(i) + 1);
            }
        }
    }
}

TEST_CASE("bpe trainer: deterministic, and saved tokenizers are the same again") {
    const TempFolder folder;
    for (const std::string pattern : {"", data::llama3_pattern, "\\p{L}+|[^\\p{L}]"}) {
        const auto a = trained(350, pattern);
        a->save(folder / "a.json");
        trained(350, pattern)->save(folder / "b.json");
        EXPECT_EQ(read_text(folder / "a.json"), read_text(folder / "b.json"));
        const auto again = open_tokenizer(folder / "a.json");
        EXPECT_EQ(again->vocab_size(), a->vocab_size());
        EXPECT_EQ(again->end_of_text(), a->end_of_text());
        EXPECT_EQ(again->fingerprint(), a->fingerprint());
        EXPECT_EQ(encode(*again, sample), encode(*a, sample));
        EXPECT(encode(*again, sample).size() < sample.size() / 2);
    }
}

TEST_CASE("tokenizer.json: the variants that are accepted") {
    const TempFolder folder;
    const json base = trained_json();
    const auto expected = encode(*open_json(folder, base), sample);
    json v = base;
    for (json& merge : v["model"]["merges"]) {  // merges as pairs
        const std::string both = merge;
        merge = {both.substr(0, both.find(' ')), both.substr(both.find(' ') + 1)};
    }
    EXPECT_EQ(encode(*open_json(folder, v), sample), expected);
    v = base;
    v["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {base["pre_tokenizer"]}}};
    EXPECT_EQ(encode(*open_json(folder, v), sample), expected);
    v["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", {{"Regex", data::gpt2_pattern}}},
           {"behavior", "Isolated"},
           {"invert", false}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    EXPECT_EQ(encode(*open_json(folder, v), sample), expected);
    v = base;
    v["pre_tokenizer"]["add_prefix_space"] = true;
    const auto prefixed = open_json(folder, v);
    EXPECT_EQ(encode(*prefixed, "the"), encode(*open_json(folder, base), " the"));
    EXPECT_EQ(encode(*prefixed, " the"), encode(*open_json(folder, base), " the"));
    EXPECT(encode(*prefixed, "").empty());
    v = base;
    v["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Digits"}, {"individual_digits", true}}, base["pre_tokenizer"]}}};
    EXPECT_EQ(open_json(folder, v)->decode(encode(*open_json(folder, v), sample)), sample);
    EXPECT_EQ(encode(*open_json(folder, v), "a12").size(), 3u);
    v = base;
    v["normalizer"] = {{"type", "NFC"}};
    const auto nfc = open_json(folder, v);
    EXPECT_EQ(encode(*nfc, "the\xff e\u0301x"),
              encode(*open_json(folder, base), "the\xff \u00e9x"));
    v["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
    EXPECT_EQ(nfc->decode(encode(*open_json(folder, v), "e\u0301")), "\u00e9");
    // ignore_merges: a piece that is a token needs no merges.
    v = base;
    const int64_t size = open_json(folder, base)->vocab_size();
    v["model"]["vocab"]["qqq"] = size;
    EXPECT_EQ(encode(*open_json(folder, v), "qqq").size(), 3u);
    v["model"]["ignore_merges"] = true;
    EXPECT_EQ(encode(*open_json(folder, v), "qqq"), std::vector<int32_t>{int32_t(size)});
}

TEST_CASE("tokenizer.json: GPT-2's folder layout") {
    const TempFolder folder;
    const json base = trained_json();
    const auto expected = open_json(folder, base);
    std::filesystem::remove(folder / "t.json");
    write_text(folder / "vocab.json", base["model"]["vocab"].dump());
    std::string merges = "#version: 0.2\r\n";
    for (const std::string merge : base["model"]["merges"]) merges += merge + "\r\n";
    write_text(folder / "merges.txt", merges);
    const auto tokenizer = open_tokenizer(folder.path());
    EXPECT_EQ(encode(*tokenizer, sample), encode(*expected, sample));
    EXPECT_EQ(tokenizer->end_of_text(), expected->end_of_text());
    write_text(folder / "merges.txt", "a\xff b\n");
    expect_error(Exit::bad_data, "merge 0", [&] { open_tokenizer(folder.path()); });
    std::filesystem::remove(folder / "merges.txt");
    expect_error(Exit::missing_input, "merges.txt", [&] { open_tokenizer(folder.path()); });
}

TEST_CASE("tokenizer.json: what is not known or broken is refused by name") {
    const TempFolder folder;
    const json base = trained_json();
    const auto refused = [&](const std::string& part, auto change) {
        json v = base;
        change(v);
        expect_error(Exit::bad_data, part, [&] { open_json(folder, v); });
    };
    const auto set = [](const char* pointer, json value) {
        return [pointer, value](json& v) { v[json::json_pointer(pointer)] = value; };
    };
    refused("normalizer \"NFKC\"", set("/normalizer", {{"type", "NFKC"}}));
    refused("pre-tokenizer \"Whitespace\"", set("/pre_tokenizer/type", "Whitespace"));
    refused("no ByteLevel", set("/pre_tokenizer", nullptr));
    refused("key type", set("/pre_tokenizer", json::object()));
    refused("use_regex", set("/pre_tokenizer/use_regex", 1));
    refused("model type", set("/model/type", "Unigram"));
    refused("dropout", set("/model/dropout", 0.1));
    refused("end_of_word_suffix", set("/model/end_of_word_suffix", "</w>"));
    refused("continuing_subword_prefix", set("/model/continuing_subword_prefix", "##"));
    refused("truncation", set("/truncation", json::object()));
    refused("padding", set("/padding", json::object()));
    refused("has no model", set("/model", 3));
    refused("model.vocab", set("/model/vocab", json::array()));
    refused("merges is not a list", set("/model/merges", "a b"));
    refused("added_tokens", set("/added_tokens", 1));
    refused("content", set("/added_tokens/0", json::object()));
    refused("has two ids", set("/added_tokens/0/id", 5));
    refused("has id \"-1\"", set("/model/vocab/A", -1));
    refused("has id \"1.5\"", set("/model/vocab/A", 1.5));
    refused("has id \"4294967296\"", set("/model/vocab/A", int64_t(1) << 32));
    refused("has id \"400\"", set("/model/vocab/A", 400));
    refused("given to two", set("/model/vocab/A", 66));
    refused("an empty token", set("/model/vocab/", 299));
    refused("no token for byte 65", [](json& v) {
        v["model"]["vocab"].erase("A");
        v["model"]["vocab"]["AAAA"] = 65;
    });
    refused("no token has id", [](json& v) { v["model"]["vocab"].erase("A"); });
    refused("merge 1 ", set("/model/merges/1", "a"));
    refused("merge 1 ", set("/model/merges/1", "a b c"));
    refused("merge 1 ", set("/model/merges/1", {"a", "b", "c"}));
    refused("merge 1 names \"qqqq\"", set("/model/merges/1", "qqqq a"));
    refused("merge 1 names \"qA\"", set("/model/merges/1", "q A"));
    refused("after ByteLevel", [](json& v) {
        v["pre_tokenizer"] = {{"type", "Sequence"},
                              {"pretokenizers", {v["pre_tokenizer"], {{"type", "Digits"}}}}};
    });
    const auto split = [&](json pattern, const char* behavior) {
        return [pattern, behavior](json& v) {
            v["pre_tokenizer"] = {
                {"type", "Sequence"},
                {"pretokenizers",
                 {{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}},
                  v["pre_tokenizer"]}}};
        };
    };
    refused("MergedWithNext", split({{"Regex", "a"}}, "MergedWithNext"));
    refused("\"Removed\"", split({{"Regex", "a"}}, "Removed"));
    refused("no pattern", split("a", "Isolated"));
    refused("key String", split(json::object(), "Isolated"));
    refused("empty pattern", split({{"String", ""}}, "Isolated"));
    refused("not supported", split({{"Regex", "\\w"}}, "Isolated"));
    refused("matches the empty text", split({{"Regex", "a*"}}, "Isolated"));
    expect_error(Exit::missing_input, "none", [&] { open_tokenizer(folder / "none"); });
    expect_error(Exit::missing_input, "tokenizer.json", [&] { open_tokenizer(folder.path()); });
}

TEST_CASE("tokenizer.json: hostile JSON") {
    const TempFolder folder;
    const std::string path = folder / "t.json";
    const auto refused = [&](const std::string& text, const std::string& part) {
        write_text(path, text);
        expect_error(Exit::bad_data, part, [&] { open_tokenizer(path); });
    };
    refused("", "t.json:byte 1");
    refused("[]", "not a JSON object");
    refused("{} {}", "not valid JSON");
    refused(std::string(100000, '['), "nested deeper");
    refused(std::string(65, '[') + std::string(65, ']'), "nested deeper");
    refused("{\"a\": \"\xff\"}", "not valid JSON");
    refused("{\"a\": 1e999}", "out of range");
    refused("{\"a\": 1, \"b\": 2, \"a\": 3}", "twice");
    refused("{\"model\": {\"vocab\": {\"a\": 0, \"a\": 1}}}", "twice");
    refused("{\"a\": \"\\ud800\"}", "not valid JSON");
}

TEST_CASE("tokenizer.json: cut at many bytes, and with flipped bits: an error or a tokenizer") {
    const TempFolder folder;
    const std::string whole = trained_json().dump();
    for (size_t n = 0; n < whole.size(); n += 1 + n / 40) {
        write_text(folder / "t.json", whole.substr(0, n));
        expect_error(Exit::bad_data, "t.json", [&] { open_tokenizer(folder / "t.json"); });
    }
    std::mt19937 random(12);
    for (int i = 0; i < 300; ++i) {
        std::string broken = whole;
        broken[random() % broken.size()] ^= char(1 << random() % 8);
        write_text(folder / "t.json", broken);
        try {
            const auto tokenizer = open_tokenizer(folder / "t.json");
            for (const int32_t id : encode(*tokenizer, sample)) {
                REQUIRE_TRUE((id >= 0 && id < tokenizer->vocab_size()));
            }
        } catch (const Error& e) {
            EXPECT_EQ(int(e.code), int(Exit::bad_data));
        }
    }
}

}  // namespace
}  // namespace torus
