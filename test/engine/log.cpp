// The log: fields and precision of the records, what a resume keeps, and that no failure of the
// disk or of a pipe stops a run.
#include "engine/log.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "kernels/check.h"
#include "test/test.h"

using namespace torus;
namespace fs = std::filesystem;

namespace {

struct TempDir {
    fs::path path;
    TempDir() {
        std::string name = (fs::temp_directory_path() / "torus_log_XXXXXX").string();
        REQUIRE_TRUE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~TempDir() { fs::remove_all(path); }
};

std::string read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<nlohmann::json> records(const fs::path& path) {
    std::vector<nlohmann::json> out;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
    return out;
}

// Runs `body` in a child with stdout and stderr in files; returns its wait status.
int in_child(const TempDir& dir, const std::function<void()>& body, const char* out = nullptr) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        const std::string to = out ? out : (dir.path / "out").string();
        ::dup2(::open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
        ::dup2(::open((dir.path / "err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
        body();
        std::fflush(nullptr);
        ::_exit(0);
    }
    int status = -1;
    ::waitpid(pid, &status, 0);
    return status;
}

StepRecord record(int64_t step) {
    StepRecord r;
    r.step = step;
    r.steps = 1000;
    r.loss = 4.0 + 1.0 / (3 * double(step));
    r.grad_norm = 0.98;
    r.lr = 3e-4;
    r.step_ms = 340.2;
    r.tokens_per_s = 12345;
    r.mfu = 0.4123;
    r.peak_gib = 1.2;
    r.eta_s = 200;
    r.tokens = step * 4096;
    return r;
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
}

}  // namespace

TEST_CASE("log: the console line") {
    const TempDir dir;
    in_child(dir, [] {
        Log log("", 0);
        log.step(record(12));
        StepRecord bare = record(1000);
        bare.mfu = bare.eta_s = -1;
        bare.peak_gib = 0;
        bare.tokens_per_s = 950;
        bare.step_ms = 3.21;
        bare.update_skipped = true;
        bare.skipped = 3;
        bare.loss_scale = 32768;
        bare.imbalance = 1.0234;
        log.step(bare);
        log.eval(20, 4.0, 100);
        log.sample(20, "a\x1b[2Jb\n\xff");
        log.message("done");
    });
    EXPECT_EQ(read(dir.path / "out"),
              "step   12/1000 | loss 4.0278 | norm 0.98 | lr 3.00e-04 | 12.3k tok/s | mfu 41.2% | "
              "340 ms | 1.20 GiB | eta 3m20s\n"
              "step 1000/1000 | loss 4.0003 | norm 0.98 | lr 3.00e-04 | 950 tok/s | 3.2 ms | "
              "imbalance 1.02 | scale 32768 | update skipped: not finite (3 so far)\n"
              "step 20 | val loss 4.0000 | perplexity 54.60\n"
              "step 20 | sample:\na\\x1b[2Jb\n\\xff\n"
              "done\n");
    EXPECT_EQ(read(dir.path / "err"), "");
}

TEST_CASE("log: records are JSON with every bit of each number") {
    const TempDir dir;
    in_child(dir, [&] {
        Log log(dir.path / "logs" / "deep", 0);
        StepRecord exact = record(1);
        exact.loss = 0.1 + 0.2;  // needs 17 digits
        log.step(exact);
        StepRecord odd = record(2);
        odd.loss = std::numeric_limits<double>::quiet_NaN();
        odd.grad_norm = std::numeric_limits<double>::infinity();
        odd.mfu = odd.eta_s = -1;
        odd.update_skipped = true;
        odd.skipped = 1;
        odd.loss_scale = 512;
        odd.imbalance = 1.0 / 3;
        log.step(odd);
        log.eval(2, 1.0 / 3, 8192);
    });
    const auto r = records(dir.path / "logs" / "deep" / "log.jsonl");
    REQUIRE_TRUE(r.size() == 3);
    const StepRecord expected = record(1);
    EXPECT_EQ(r[0]["step"].get<int64_t>(), 1);
    EXPECT_EQ(r[0]["steps"].get<int64_t>(), 1000);
    EXPECT_EQ(r[0]["loss"].get<double>(), 0.1 + 0.2);
    EXPECT_EQ(r[0]["grad_norm"].get<double>(), expected.grad_norm);
    EXPECT_EQ(r[0]["lr"].get<double>(), expected.lr);
    EXPECT_EQ(r[0]["tokens"].get<int64_t>(), expected.tokens);
    EXPECT_EQ(r[0]["tokens_per_s"].get<double>(), expected.tokens_per_s);
    EXPECT_EQ(r[0]["mfu"].get<double>(), expected.mfu);
    EXPECT_EQ(r[0]["step_ms"].get<double>(), expected.step_ms);
    EXPECT_EQ(r[0]["peak_gib"].get<double>(), expected.peak_gib);
    EXPECT_EQ(r[0]["eta_s"].get<double>(), expected.eta_s);
    EXPECT_EQ(r[0]["skipped"].get<int64_t>(), 0);
    EXPECT_EQ(r[0]["update_skipped"].get<bool>(), false);
    for (const char* key : {"loss", "grad_norm", "mfu", "eta_s"}) EXPECT(r[1][key].is_null());
    EXPECT_EQ(r[1]["update_skipped"].get<bool>(), true);
    EXPECT_EQ(r[0]["loss_scale"].get<double>(), 1);
    EXPECT_EQ(r[1]["loss_scale"].get<double>(), 512);
    EXPECT(r[0]["imbalance"].is_null());
    EXPECT_EQ(r[1]["imbalance"].get<double>(), 1.0 / 3);
    EXPECT_EQ(r[2]["val_loss"].get<double>(), 1.0 / 3);
    EXPECT_EQ(r[2]["tokens"].get<int64_t>(), 8192);
}

TEST_CASE("log: a resumed run's log has each step once") {
    for (const bool torn : {false, true}) {
        const TempDir dir;
        const fs::path path = dir.path / "log.jsonl";
        std::string whole;
        in_child(dir, [&] {
            Log log(dir.path, 0);
            for (int64_t s = 1; s <= 6; ++s) log.step(record(s));
            log.eval(6, 3.5, 1);
        });
        whole = read(path);
        if (torn) fs::resize_file(path, fs::file_size(path) - 5);
        in_child(dir, [&] {
            Log log(dir.path, 4);
            for (int64_t s = 5; s <= 6; ++s) log.step(record(s));
            log.eval(6, 3.5, 1);
        });
        EXPECT_EQ(read(path), whole);
        in_child(dir, [&] { Log log(dir.path, 6); });  // nothing to cut
        EXPECT_EQ(read(path), whole);
        std::ofstream(path, std::ios::app) << "{\"step\":7,\"los";
        in_child(dir, [&] { Log log(dir.path, 7); });  // a torn line of a kept step goes too
        EXPECT_EQ(read(path), whole);
    }
}

TEST_CASE("log: a new run keeps an older log under another name") {
    const TempDir dir;
    for (int64_t run = 1; run <= 3; ++run)
        in_child(dir, [&] {
            Log log(dir.path, 0);
            log.step(record(run));
        });
    EXPECT_EQ(records(dir.path / "log.1.jsonl").at(0)["step"].get<int64_t>(), 1);
    EXPECT_EQ(records(dir.path / "log.2.jsonl").at(0)["step"].get<int64_t>(), 2);
    EXPECT_EQ(records(dir.path / "log.jsonl").at(0)["step"].get<int64_t>(), 3);
}

TEST_CASE("log: a failing file or console is one warning, and the run goes on") {
    const TempDir dir;
    const auto body = [&] {
        Log log(dir.path / "logs", 0);
        for (int64_t s = 1; s <= 100; ++s) log.step(record(s));
    };
    SUBCASE("the disk is full") {
        EXPECT_EQ(in_child(dir,
                           [&] {
                               std::signal(SIGXFSZ, SIG_IGN);
                               const rlimit limit{6000, 6000};
                               ::setrlimit(RLIMIT_FSIZE, &limit);
                               body();
                           }),
                  0);
        EXPECT_EQ(count(read(dir.path / "err"), "warning:"), 2);  // the console is a file here too
    }
    SUBCASE("the console is full") {
        EXPECT_EQ(in_child(dir, body, "/dev/full"), 0);
        EXPECT_EQ(count(read(dir.path / "err"), "warning:"), 1);
        EXPECT_EQ(records(dir.path / "logs" / "log.jsonl").size(), 100);
    }
    SUBCASE("the pipe is closed") {
        EXPECT_EQ(in_child(dir,
                           [&] {
                               int ends[2];
                               REQUIRE_TRUE(::pipe(ends) == 0);
                               ::dup2(ends[1], 1);
                               ::close(ends[0]);
                               body();
                           }),
                  0);
        EXPECT_EQ(count(read(dir.path / "err"), "warning:"), 1);
        EXPECT_EQ(records(dir.path / "logs" / "log.jsonl").size(), 100);
    }
    SUBCASE("the folder cannot be made") {
        std::ofstream(dir.path / "logs") << "a file";
        EXPECT_EQ(in_child(dir, body), 0);
        EXPECT_EQ(count(read(dir.path / "err"), "warning:"), 1);
        EXPECT_EQ(count(read(dir.path / "out"), "\n"), 100);
        EXPECT_EQ(read(dir.path / "logs"), "a file");
    }
}

TEST_CASE("log: sizes and durations for people") {
    EXPECT_EQ(human_bytes(0), "0 B");
    EXPECT_EQ(human_bytes(1023), "1023 B");
    EXPECT_EQ(human_bytes(1024), "1.00 KiB");
    EXPECT_EQ(human_bytes(1610612736), "1.50 GiB");
    EXPECT_EQ(human_bytes((1 << 20) - 1), "1.00 MiB");
    EXPECT_EQ(human_bytes(-2048), "-2.00 KiB");
    EXPECT_EQ(human_bytes(std::numeric_limits<int64_t>::max()), "8.00 EiB");
    EXPECT_EQ(human_duration(0), "0s");
    EXPECT_EQ(human_duration(12.4), "12s");
    EXPECT_EQ(human_duration(59.6), "1m00s");
    EXPECT_EQ(human_duration(200), "3m20s");
    EXPECT_EQ(human_duration(3720), "1h02m");
    EXPECT_EQ(human_duration(183600), "2d03h");
    EXPECT_EQ(human_duration(-1), "?");
    EXPECT_EQ(human_duration(std::numeric_limits<double>::quiet_NaN()), "?");
}
