// Checkpoints on a good disk: what is saved comes back, every damage is found and named, and
// folders, locks and older checkpoints are handled as checkpoint.h says.
#include "checkpoint.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <random>

#include "engine/checkpoint_format.h"

using namespace torus;
using namespace torus::test;

namespace {

std::string saved(const TempDir& dir, int64_t step = 7) {
    CheckpointStore store(dir / "s");
    store.save(state_at(step), files_at(step), 5);
    return dir / "s/" + CheckpointStore::folder_of(step);
}

// The file is put back by the caller. Every damage must be bad_data and name the file.
void expect_damage_found(const std::string& dir, const std::string& file) {
    const Failure f = failure_of([&] { verify_checkpoint(dir); });
    CAPTURE(f.text);
    EXPECT_EQ(int(f.code), int(Exit::bad_data));
    EXPECT(f.says("/" + file));
    EXPECT_EQ(f.text.find('\n'), std::string::npos);
}

const char* const file_names[] = {"manifest.json", "config.json", "model.safetensors",
                                  "optimizer.safetensors", "tokenizer.json"};

// A checkpoint whose manifest was changed and given a fitting checksum: what a forger could do.
void forge(const std::string& dir, const std::string& from, const std::string& to) {
    std::string text = read(dir + "/manifest.json");
    const size_t at = text.find(from);
    REQUIRE_TRUE(at != std::string::npos);
    text.replace(at, from.size(), to);
    text.resize(text.rfind("  \"checksum\""));
    char hex[17];
    std::snprintf(hex, sizeof hex, "%016llx",
                  static_cast<unsigned long long>(checksum(text.data(), int64_t(text.size()))));
    write(dir + "/manifest.json", text + "  \"checksum\": \"" + hex + "\"\n}\n");
}

}  // namespace

TEST_CASE("checkpoint: what is saved comes back") {
    const TempDir dir;
    write(dir / "tok.json", "{\"tokenizer\": 1}");
    CheckpointStore store(dir / "a/b/c");
    EXPECT_EQ(store.newest(), "");
    CheckpointFiles files = files_at(7);
    files.tokenizer_path = dir / "tok.json";
    store.save(state_at(7), files, 2);
    const std::string path = store.newest();
    EXPECT_EQ(path, dir / "a/b/c/step_00000007");
    const CheckpointState s = verify_checkpoint(path);
    const CheckpointState expected = state_at(7);
    EXPECT_EQ(s.step, expected.step);
    EXPECT_EQ(s.next_sequence, expected.next_sequence);
    EXPECT_EQ(s.run_id, expected.run_id);
    EXPECT_EQ(s.data_fingerprint, expected.data_fingerprint);
    EXPECT_EQ(s.config_toml, expected.config_toml);
    EXPECT_EQ(s.model_json, expected.model_json);
    EXPECT_EQ(s.precision, expected.precision);
    expect_content(path, 7);
    EXPECT_EQ(read(path + "/tokenizer.json"), "{\"tokenizer\": 1}");
    EXPECT_EQ(read_hf_config(path + "/config.json").C, 8);
    EXPECT_EQ(open_safetensors(path + "/model.safetensors")->names().size(), 2);

    files.tokenizer_path = dir / "gone.json";  // weights without it are better than none
    store.save(state_at(8), files, 2);
    EXPECT_EQ(verify_checkpoint(store.newest()).step, 8);
}

TEST_CASE("checkpoint: two saves of the same state are the same bytes") {
    const TempDir dir;
    for (const char* name : {"x", "y"})
        CheckpointStore(dir / name).save(state_at(3), files_at(3), 1);
    int compared = 0;
    for (const auto& e : fs::directory_iterator(dir / "x/step_00000003")) {
        EXPECT_EQ(read(e.path()), read(dir / "y/step_00000003/" + e.path().filename().string()));
        ++compared;
    }
    EXPECT_EQ(compared, 4);
}

TEST_CASE("checkpoint: every flipped bit and every cut is found") {
    const TempDir dir;
    write(dir / "tok.json", "{\"tokenizer\": [1, 2, 3]}");
    CheckpointFiles files = files_at(7);
    files.tokenizer_path = dir / "tok.json";
    CheckpointStore(dir / "s").save(state_at(7), files, 1);
    const std::string path = dir / "s/step_00000007";
    std::mt19937 random(1);
    for (const std::string name : file_names) {
        CAPTURE(name);
        const std::string file = path + "/" + name, good = read(file);
        const bool manifest = name == "manifest.json";
        std::vector<size_t> bits, cuts;
        for (int i = 0; i < 200; ++i) bits.push_back(random() % (8 * good.size()));
        for (size_t i = 0; manifest && i < 8 * good.size(); ++i) bits.push_back(i);
        for (size_t i = 0; i < good.size(); i += manifest ? 1 : 1 + random() % 9) cuts.push_back(i);
        cuts.push_back(good.size() - 1);
        for (const size_t bit : bits) {
            std::string bad = good;
            bad[bit / 8] = char(uint8_t(bad[bit / 8]) ^ (1u << bit % 8));
            write(file, bad);
            CAPTURE(bit);
            expect_damage_found(path, name);
        }
        for (const size_t cut : cuts) {
            write(file, good.substr(0, cut));
            CAPTURE(cut);
            expect_damage_found(path, name);
        }
        for (const char* more : {"x", "\n", " "}) {
            write(file, good + more);
            expect_damage_found(path, name);
        }
        fs::remove(file);
        expect_damage_found(path, name);
        fs::create_directory(file);
        expect_damage_found(path, name);
        fs::remove(file);
        REQUIRE_TRUE(::mkfifo(file.c_str(), 0600) == 0);
        expect_damage_found(path, name);
        fs::remove(file);
        write(dir / "elsewhere", good);
        fs::create_symlink(dir / "elsewhere", file);
        expect_damage_found(path, name);
        fs::remove(file);
        write(file, good);
        EXPECT_EQ(verify_checkpoint(path).step, 7);
    }
}

TEST_CASE("checkpoint: the message names file, range and both checksums") {
    const TempDir dir;
    const int64_t rows = (9 << 20) / 32;  // 9 MiB: three chunks
    CheckpointStore(dir / "s").save(state_at(1), files_at(1, rows), 1);
    const std::string path = dir / "s/step_00000001";
    EXPECT_EQ(verify_checkpoint(path).step, 1);
    const std::string file = path + "/model.safetensors";
    std::string bytes = read(file);
    bytes[5 << 20] = char(bytes[5 << 20] ^ 1);
    write(file, bytes);
    const Failure f = failure_of([&] { verify_checkpoint(path); });
    EXPECT(f.says(file + ":bytes 4194304-8388607: checksum "));
    EXPECT(f.says(", the manifest says \""));
}

TEST_CASE("checkpoint: files of another checkpoint do not pass") {
    const TempDir dir;
    const std::string one = saved(dir, 1), two = saved(dir, 2);
    fs::copy_file(one + "/optimizer.safetensors", two + "/optimizer.safetensors",
                  fs::copy_options::overwrite_existing);
    expect_damage_found(two, "optimizer.safetensors");
    EXPECT_EQ(verify_checkpoint(one).step, 1);
    fs::rename(two, dir / "s/step_00000099");
    fs::copy(one, two);  // the right files under the wrong step
    const Failure f = failure_of([&] { verify_checkpoint(two); });
    EXPECT_EQ(int(f.code), int(Exit::bad_data));
    EXPECT(f.says("step: is 1, the folder's name says 2"));
    fs::copy(one, dir / "best");  // any other name is free
    EXPECT_EQ(verify_checkpoint(dir / "best").step, 1);
    EXPECT_EQ(int(failure_of([&] { verify_checkpoint(dir / "none"); }).code),
              int(Exit::missing_input));
}

TEST_CASE("checkpoint: a forged manifest cannot reach outside or break the reader") {
    const std::pair<const char*, const char*> forgeries[] = {
        {"\"config.json\"", "\"../x.json\""},
        {"\"config.json\"", "\"/etc/passwd\""},
        {"\"config.json\"", "\"..\""},
        {"\"config.json\"", "\"\""},
        {"\"config.json\"", "\"a/b\""},
        {"\"config.json\"", "\"\\u001b[2J\""},
        {"\"config.json\"", "\"model.safetensors\""},
        {"\"config.json\"", "\"other.json\""},
        {"\"config.json\"", "7"},
        {"\"step\": 7", "\"step\": -7"},
        {"\"step\": 7", "\"step\": 7.5"},
        {"\"step\": 7", "\"step\": \"7\""},
        {"\"step\": 7", "\"step\": 99999999999999999999"},
        {"\"step\": 7", "\"stepp\": 7"},
        {"\"step\": 7", "\"step\": 7, \"step\": 7"},
        {"\"next_sequence\": 21", "\"next_sequence\": null"},
        {"\"run_id\": \"run-a\"", "\"run_id\": 1"},
        {"\"version\": 1", "\"version\": 2"},
        {"torus-checkpoint", "other"},
        {"\"checksum_chunk\": 4194304", "\"checksum_chunk\": 0"},
        {"\"files\": [", "\"files\": {\"a\": 1}, \"filez\": ["},
        {"\"files\": [", "\"files\": [1, "},
        {"\"files\": [", "\"files\": ["},  // nothing changed: passes, see below
        {"\"checksums\": [", "\"checksums\": [\"0\", "},
        {"\"checksums\": [", "\"checksums\": \"0\", \"x\": ["},
        {"\"bytes\": ", "\"bytes\": 99999999999999"},
        {"{", "[[["},
    };
    for (const auto& [from, to] : forgeries) {
        const TempDir dir;
        const std::string path = saved(dir);
        CAPTURE(from);
        CAPTURE(to);
        forge(path, from, to);
        if (std::string(from) == to)
            EXPECT_EQ(verify_checkpoint(path).step, 7);
        else
            expect_damage_found(path, "manifest.json");
    }
}

TEST_CASE("checkpoint: newest falls back, and never to nothing") {
    const TempDir dir;
    for (int64_t step : {1, 2, 3}) saved(dir, step);
    fs::create_directory(dir / "s/step_3");  // not our way to write 3
    fs::create_directory(dir / "s/step_99999999999999999999");
    fs::create_directory(dir / "s/DONE_00000009");
    fs::create_directory_symlink(dir / "s/step_00000003", dir / "s/step_00000004");
    EXPECT_EQ(newest_in(dir / "s"), "step_00000003");
    fs::resize_file(dir / "s/step_00000003/manifest.json", 100);
    EXPECT_EQ(newest_in(dir / "s"), "step_00000002");
    fs::remove(dir / "s/step_00000002/model.safetensors");
    EXPECT_EQ(newest_in(dir / "s"), "step_00000001");
    fs::resize_file(dir / "s/step_00000001/optimizer.safetensors", 10);
    const Failure f = failure_of([&] { newest_in(dir / "s"); });
    EXPECT_EQ(int(f.code), int(Exit::bad_data));
    EXPECT(f.says("none of its 3 checkpoints is intact"));
}

TEST_CASE("checkpoint: keeps the newest, and counts only intact ones") {
    const TempDir dir;
    {
        CheckpointStore store(dir / "s");
        for (int64_t step = 1; step <= 6; ++step) store.save(state_at(step), files_at(step), 2);
    }
    using Names = std::vector<std::string>;
    EXPECT_EQ(folders_in(dir / "s"), Names{"step_00000005", "step_00000006"});
    // A broken one does not count: 5 stays until two intact ones are newer.
    std::string bytes = read(dir / "s/step_00000006/model.safetensors");
    bytes.back() = char(bytes.back() ^ 1);
    write(dir / "s/step_00000006/model.safetensors", bytes);
    CheckpointStore store(dir / "s");
    store.save(state_at(7), files_at(7), 2);
    EXPECT_EQ(folders_in(dir / "s"), Names{"step_00000005", "step_00000006", "step_00000007"});
    store.save(state_at(8), files_at(8), 2);
    EXPECT_EQ(folders_in(dir / "s"), Names{"step_00000007", "step_00000008"});
    store.save(state_at(123456789), files_at(9), 1);
    EXPECT_EQ(folders_in(dir / "s"), Names{"step_123456789"});
}

TEST_CASE("checkpoint: saving a step again replaces it") {
    const TempDir dir;
    CheckpointStore store(dir / "s");
    store.save(state_at(4), files_at(4), 2);
    store.save(state_at(4), files_at(5), 2);
    EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000004"});
    EXPECT_EQ(verify_checkpoint(store.newest()).step, 4);
    expect_content(store.newest(), 5);
}

TEST_CASE("checkpoint: a stale checkpoint of another run or of a later step is never resumed") {
    const TempDir dir;
    CheckpointStore store(dir / "s");
    store.save(state_at(1000, "run-old"), files_at(1000), 2);
    store.save(state_at(150, "run-old"), files_at(150), 2);  // the old run went back
    EXPECT_EQ(fs::path(store.newest()).filename(), "step_00000150");
    store.save(state_at(200, "run-new"), files_at(200), 2);
    EXPECT_EQ(fs::path(store.newest()).filename(), "step_00000200");
    store.save(state_at(200, "run-newer"), files_at(201), 2);
    expect_content(store.newest(), 201);
    EXPECT_EQ(folders_in(dir / "s"),
              std::vector<std::string>{"step_00000150.aside", "step_00000200",
                                       "step_00000200.aside", "step_00001000.aside"});
    EXPECT_EQ(verify_checkpoint(dir / "s/step_00001000.aside").run_id, "run-old");
}

TEST_CASE("checkpoint: leftovers of a dead run are cleared, other folders are not touched") {
    const TempDir dir;
    saved(dir, 1);
    fs::copy(dir / "s/step_00000001", dir / "s/step_00000002.tmp");
    fs::copy(dir / "s/step_00000001", dir / "s/step_00000001.old");  // replaced, not yet removed
    fs::copy(dir / "s/step_00000001", dir / "s/mine.tmp");
    fs::copy(dir / "s/step_00000001", dir / "s/step_9.tmp");
    write(dir / "s/step_00000003.tmp", "a file");
    const TempDir outside;
    write(outside / "precious", "x");
    fs::create_directory_symlink(outside.path, dir / "s/step_00000005.tmp");
    fs::create_directory_symlink(outside.path, dir / "s/step_00000001/link");
    EXPECT_EQ(newest_in(dir / "s"), "step_00000001");
    EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"mine.tmp", "step_00000001",
                                                              "step_00000005.tmp", "step_9.tmp"});
    fs::rename(dir / "s/step_00000001", dir / "s/step_00000001.old");  // died between two renames
    EXPECT_EQ(newest_in(dir / "s"), "step_00000001");
    CheckpointStore(dir / "s").save(state_at(5), files_at(5), 1);
    EXPECT_EQ(newest_in(dir / "s"), "step_00000005");
    EXPECT_EQ(read(outside / "precious"), "x");  // links are not followed
}

TEST_CASE("checkpoint: two runs in one folder") {
    const TempDir dir;
    {
        const CheckpointStore first(dir / "s");
        const Failure f = failure_of([&] { CheckpointStore second(dir / "s"); });
        EXPECT_EQ(int(f.code), int(Exit::mismatch));
        EXPECT(f.says(concat("process ", ::getpid(), " on ")));
    }
    CheckpointStore(dir / "s").newest();  // released
    int ready[2];
    REQUIRE_TRUE(::pipe(ready) == 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
        const CheckpointStore store(dir / "s");
        (void)!::write(ready[1], "x", 1);
        ::pause();
    }
    char byte;
    REQUIRE_TRUE(::read(ready[0], &byte, 1) == 1);
    EXPECT(failure_of([&] { CheckpointStore second(dir / "s"); }).says(concat("process ", pid)));
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    EXPECT_EQ(CheckpointStore(dir / "s").newest(), "");  // a dead owner's lock is taken over
    ::close(ready[0]);
    ::close(ready[1]);
}

TEST_CASE("checkpoint: a folder that cannot be written is found at the start") {
    const TempDir dir;
    write(dir / "file", "x");
    for (const std::string& path : {dir / "file", dir / "file/below", std::string("/proc/torus")}) {
        CAPTURE(path);
        const Failure f = failure_of([&] { CheckpointStore store(path); });
        EXPECT_EQ(int(f.code), int(Exit::permission));
        EXPECT(f.says(path));
    }
    EXPECT_EQ(read(dir / "file"), "x");
}

TEST_CASE("checkpoint: too little space is said before anything is written") {
    const TempDir dir;
    CheckpointStore store(dir / "s");
    store.save(state_at(1), files_at(1), 1);
    CheckpointFiles files = files_at(2);
    files.model.push_back({"huge", DType::f32, {int64_t(1) << 55}, [](void*) {
                               FAIL_TEST("asked for the data of a checkpoint that cannot fit");
                           }});
    const Failure f = failure_of([&] { store.save(state_at(2), files, 1); });
    EXPECT_EQ(int(f.code), int(Exit::io));
    EXPECT(f.says("needs 128.00 PiB, "));
    EXPECT(f.says("free"));
    EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000001"});
}

TEST_CASE("checkpoint: an error while the data is read leaves nothing behind") {
    const TempDir dir;
    CheckpointStore store(dir / "s");
    store.save(state_at(1), files_at(1), 1);
    CheckpointFiles files = files_at(2);
    files.optimizer[1].fill = [](void*) { throw std::runtime_error("device lost"); };
    EXPECT_THROWS_AS(store.save(state_at(2), files, 1), std::runtime_error);
    EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000001"});
}

TEST_CASE("checkpoint: the checksum sees position, length and every bit") {
    std::vector<uint8_t> bytes(100);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i * 37 + 1);
    std::vector<uint64_t> sums;
    for (int64_t n = 0; n <= 100; ++n) {
        sums.push_back(checksum(bytes.data(), n));
        for (int64_t bit = 0; bit < 8 * n; ++bit) {
            bytes[size_t(bit / 8)] ^= uint8_t(1u << bit % 8);
            EXPECT(checksum(bytes.data(), n) != sums.back());
            bytes[size_t(bit / 8)] ^= uint8_t(1u << bit % 8);
        }
    }
    const std::vector<uint8_t> zeros(100, 0);
    for (int64_t n = 0; n <= 100; ++n) sums.push_back(checksum(zeros.data(), n));
    std::swap(bytes[0], bytes[32]);  // the same lane
    sums.push_back(checksum(bytes.data(), 100));
    std::sort(sums.begin(), sums.end());
    // The empty text appears twice.
    EXPECT_EQ(std::unique(sums.begin(), sums.end()) - sums.begin(), int64_t(sums.size()) - 1);
    // The format on the disk: these values must never change.
    EXPECT_EQ(checksum("", 0), 0x3c9b36507ae1b708u);
    EXPECT_EQ(checksum("torus", 5), 0x735a9bc6bc4568beu);
}

TEST_CASE("checkpoint: folder names") {
    EXPECT_EQ(CheckpointStore::folder_of(0), "step_00000000");
    EXPECT_EQ(CheckpointStore::folder_of(1000), "step_00001000");
    EXPECT_EQ(CheckpointStore::folder_of(1234567890), "step_1234567890");
    for (const int64_t step : {int64_t(0), int64_t(12345678), int64_t(1) << 62})
        EXPECT_EQ(step_of_folder(CheckpointStore::folder_of(step)), step);
    for (const char* name : {"step_", "step_1", "step_0000001x", "step_-0000001", "step_000000001",
                             "step_99999999999999999999", "Step_00000001", "step_00000001.tmp"})
        EXPECT_EQ(step_of_folder(name), -1);
}
