// The safetensors reader and writer: round trips, and a corpus of hostile files. Each must give
// Error(bad_data) with the file's name, whatever was done to it.
#include "model/io.h"
#include "test/model/files.h"
#include "test/test.h"

using namespace torus;

namespace {

std::string with_header(const std::string& json, const std::string& data) {
    const uint64_t n = json.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &n, 8);
    return out + json + data;
}

std::string length_bytes(uint64_t n) {
    std::string out(8, '\0');
    std::memcpy(out.data(), &n, 8);
    return out;
}

// One tensor "a" with the given members.
std::string tensor(const std::string& members) { return "{\"a\":{" + members + "}}"; }

struct Attack {
    const char* what;
    std::string file;
};

std::vector<Attack> header_attacks() {
    const std::string ok = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])");
    const std::string d8(8, 'x');
    return {
        {"empty", ""},
        {"seven bytes", "1234567"},
        {"length 0", length_bytes(0)},
        {"length 1", length_bytes(1) + "{"},
        {"length above the file", length_bytes(1000) + ok + d8},
        {"length above 100 MB", length_bytes(100'000'001) + ok + d8},
        {"length 2^63", length_bytes(uint64_t(1) << 63) + ok + d8},
        {"length 2^64-1", length_bytes(~uint64_t(0)) + ok + d8},
        {"not JSON", with_header("{\"a\":", d8)},
        {"no object", with_header("[1,2]", d8)},
        {"white space first", with_header(" " + ok, d8)},
        {"junk after the object", with_header(ok + "x", d8)},
        {"not UTF-8", with_header("{\"\xff\xfe\":{}}", d8)},
        {"duplicate key", with_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                      R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                      d8)},
        {"duplicate member",
         with_header(tensor(R"("dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8])"), d8)},
        {"tensor is a number", with_header("{\"a\":3}", "")},
        {"metadata is a list", with_header("{\"__metadata__\":[]}", "")},
        {"metadata holds a number", with_header("{\"__metadata__\":{\"a\":1}}", "")},
        {"deep", with_header("{\"a\":" + std::string(100'000, '['), "")},
        {"long list", with_header("{\"a\":[" + std::string(100'000, '0') + "]}", "")},
        {"long name", with_header("{\"" + std::string(513, 'n') +
                                      R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                                  d8)},
    };
}

std::vector<Attack> tensor_attacks() {
    const std::string d8(8, 'x');
    std::vector<Attack> out;
    const auto members = [&](const char* what, const std::string& m) {
        out.push_back({what, with_header(tensor(m), d8)});
    };
    members("no dtype", R"("shape":[2],"data_offsets":[0,8])");
    members("no shape", R"("dtype":"F32","data_offsets":[0,8])");
    members("no offsets", R"("dtype":"F32","shape":[2])");
    members("a fourth member", R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)");
    members("unknown dtype", R"("dtype":"F33","shape":[2],"data_offsets":[0,8])");
    members("dtype is a number", R"("dtype":32,"shape":[2],"data_offsets":[0,8])");
    members("dtype in lower case", R"("dtype":"f32","shape":[2],"data_offsets":[0,8])");
    for (const char* offsets : {"[]",
                                "[0]",
                                "[0,8,8]",
                                "[8,0]",
                                "[-1,7]",
                                "[0,8.0]",
                                "[0,1e1]",
                                "[0,18446744073709551615]",
                                "[0,9223372036854775808]",
                                "[0,99999999999999999999999]",
                                "[0,\"8\"]",
                                "[0,null]",
                                "8",
                                "{}",
                                "[0,9]",
                                "[0,4]",
                                "[4,8]",
                                "[1,9]",
                                "[0,16]",
                                "[8,16]"})
        members(offsets, std::string(R"("dtype":"F32","shape":[2],"data_offsets":)") + offsets);
    for (const char* shape : {"[3]", "[-2]", "[2.0]", "[4294967296,4294967296]",
                              "[9223372036854775807,2]", "[2,9223372036854775808]", "[\"2\"]", "2",
                              "{}", "[1,1,1,1,1,2]", "[0]", "[]", "[null]", "[1e999]"})
        members(shape, std::string(R"("dtype":"F32","data_offsets":[0,8],"shape":)") + shape);
    const auto pair = [&](const char* what, const char* b, const std::string& data) {
        out.push_back(
            {what, with_header(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":)" +
                                   std::string(b) + "}",
                               data)});
    };
    pair("gap", R"({"dtype":"F32","shape":[1],"data_offsets":[8,12]})", std::string(12, 'x'));
    pair("overlap", R"({"dtype":"F32","shape":[1],"data_offsets":[2,6]})", std::string(6, 'x'));
    pair("the same bytes", R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})", "xxxx");
    pair("longer than covered", R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})",
         std::string(9, 'x'));
    out.push_back({"no tensor, but data", with_header("{}", "x")});
    return out;
}

void write_sample(const std::string& path) {
    const double a[3] = {1, -2, 3.5};
    const float b[4] = {1, 2, 3, 4};
    const uint8_t c[3] = {7, 8, 9};
    SafetensorsWriter w(path, {{"format", "pt"}});
    w.add("c", DType::u8, {3});
    w.add("a", DType::f64, {3});  // not aligned, after three bytes
    w.add("empty", DType::f32, {0, 5});
    w.add("b", DType::f32, {2, 2});
    w.write(c, sizeof c);
    w.write(a, 8);
    w.write(a + 1, 16);
    w.write(b, sizeof b);
    w.finish();
}

}  // namespace

TEST_CASE("safetensors: round trip") {
    const TempFolder dir;
    const std::string path = dir / "x.safetensors";
    write_sample(path);
    const auto file = open_safetensors(path);
    EXPECT_EQ(file->names(), std::vector<std::string>{"a", "b", "c", "empty"});
    EXPECT_EQ(file->path(), path);
    const Tensor a = file->find("a"), b = file->find("b"), c = file->find("c");
    EXPECT((a.dtype == DType::f64 && a.shape == Shape{3}));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 8, 0);
    EXPECT_EQ(a.as<double>()[1], -2);
    EXPECT_EQ(a.as<double>()[2], 3.5);
    EXPECT((b.dtype == DType::f32 && b.shape == Shape{2, 2}));
    EXPECT_EQ(b.as<float>()[3], 4);
    EXPECT_EQ(c.as<uint8_t>()[2], 9);
    EXPECT((file->find("empty").shape == Shape{0, 5}));
    EXPECT(file->has("a"));
    EXPECT(!file->has("A"));
    EXPECT(error_of([&] { file->find("A"); }).starts_with("65 " + path));

    const std::string again = dir / "y.safetensors";
    write_sample(again);
    EXPECT_EQ(read_file(path), read_file(again));
}

TEST_CASE("safetensors: dtypes of no use here open, and say so when read") {
    const TempFolder dir;
    const std::string path = dir / "bool.safetensors";
    write_file(path,
               with_header(tensor(R"("dtype":"BOOL","shape":[2],"data_offsets":[0,2])"), "ab"));
    const auto file = open_safetensors(path);
    EXPECT(file->has("a"));
    EXPECT(error_of([&] { file->find("a"); }).find("of type BOOL") != std::string::npos);
}

TEST_CASE("safetensors: the attack corpus") {
    const TempFolder dir;
    const std::string path = dir / "attack.safetensors";
    std::vector<Attack> attacks = header_attacks();
    for (Attack& a : tensor_attacks()) attacks.push_back(std::move(a));
    for (const auto& [what, file] : attacks) {
        CAPTURE(what);
        write_file(path, file);
        const std::string message = error_of([&] { open_safetensors(path); });
        CAPTURE(message);
        EXPECT(message.starts_with("65 " + path));
        EXPECT(message.size() < path.size() + 500);
    }
    EXPECT(error_of([&] { open_safetensors(dir / "none"); }).starts_with("66 "));
    EXPECT(error_of([&] { open_safetensors(dir.path()); }).starts_with("65 "));
}

TEST_CASE("safetensors: cut at every byte, every bit of the header flipped") {
    const TempFolder dir;
    const std::string path = dir / "x.safetensors", broken = dir / "broken.safetensors";
    write_sample(path);
    const std::string whole = read_file(path);
    for (size_t n = 0; n < whole.size(); ++n) {
        write_file(broken, whole.substr(0, n));
        CAPTURE(n);
        EXPECT(error_of([&] { open_safetensors(broken); }).starts_with("65 " + broken));
    }
    write_file(broken, whole + "x");
    EXPECT(error_of([&] { open_safetensors(broken); }).starts_with("65 "));
    uint64_t header = 0;
    std::memcpy(&header, whole.data(), 8);
    int rejected = 0, read = 0;
    for (size_t bit = 0; bit < (8 + header) * 8; ++bit) {
        std::string flipped = whole;
        flipped[bit / 8] = char(flipped[bit / 8] ^ (1 << bit % 8));
        write_file(broken, flipped);
        // a flip within a name, the metadata or the padding may still be a valid file; then every
        // byte of every tensor must be readable
        const std::string message = error_of([&] {
            const auto file = open_safetensors(broken);
            for (const std::string& name : file->names()) {
                const Tensor t = file->find(name);
                for (int64_t i = 0; i < t.bytes(); ++i)
                    read += static_cast<const char*>(t.data)[i] != 0;
            }
        });
        CAPTURE(message);
        EXPECT((message == "none" || message.starts_with("65 " + broken)));
        rejected += message != "none";
    }
    EXPECT(read > 0);
    EXPECT(rejected > int(header) * 4);
}

TEST_CASE("safetensors: index with shards") {
    const TempFolder dir;
    write_sample(dir / "one.safetensors");
    write_file(dir / "two.safetensors",
               with_header(R"({"d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "z"));
    const std::string index = dir / "model.safetensors.index.json";
    const std::string first = R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors",)"
                              R"("c":"one.safetensors","empty":"one.safetensors","d":)";
    write_file(index, first + R"("two.safetensors"},"metadata":{"total_size":1}})");
    const auto model = open_safetensors(index);
    EXPECT_EQ(model->names().size(), 5);
    EXPECT_EQ(model->find("d").as<uint8_t>()[0], 'z');
    EXPECT_EQ(model->find("b").as<float>()[0], 1);

    const auto error = [&](const std::string& json) {
        write_file(index, json);
        return error_of([&] { open_safetensors(index); });
    };
    for (const char* shard : {"\"../two.safetensors\"", "\"/etc/passwd\"", "\"\"", "\"..\"", "3",
                              "\"sub/two.safetensors\"", "\"two.safetensors\\u0000\"", "\"a\\\\b\"",
                              "\"one.safetensors\"", "null"}) {
        CAPTURE(shard);
        EXPECT(error(first + shard + "}}").starts_with("65 "));
    }
    EXPECT(error(first + "\"three.safetensors\"}}").starts_with("66 "));
    EXPECT(error("{}").starts_with("65 " + index));
    EXPECT(error("{\"weight_map\":[]}").starts_with("65 " + index));
    EXPECT(error("[]").starts_with("65 " + index));
    // a tensor that the index hides
    EXPECT(error(R"({"weight_map":{"a":"one.safetensors"}})").find("not in the index") !=
           std::string::npos);
}

TEST_CASE("safetensors: writer reports what the disk says") {
    const std::vector<char> big(1 << 22, 'x');
    const std::string full = error_of([&] {
        SafetensorsWriter w("/dev/full");
        w.add("a", DType::u8, {int64_t(big.size())});
        w.write(big.data(), int64_t(big.size()));
        w.finish();
    });
    EXPECT(full.starts_with("74 /dev/full: write failed: No space left"));
    const std::string small = error_of([&] {
        SafetensorsWriter w("/dev/full");  // fits the buffer: the error must show at finish
        w.add("a", DType::u8, {3});
        w.write("abc", 3);
        w.finish();
    });
    EXPECT(small.starts_with("74 /dev/full"));
    EXPECT(error_of([&] { SafetensorsWriter("/none/such/file"); }).starts_with("74 "));
    const TempFolder dir;
    const std::string short_by_one = error_of([&] {
        SafetensorsWriter w(dir / "x");
        w.add("a", DType::u8, {3});
        w.write("ab", 2);
        w.finish();
    });
    EXPECT(short_by_one.starts_with("70 "));
}
