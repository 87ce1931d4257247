// Checkpoints on a bad disk: the process dies, the disk is full, fails or lies at every single call
// that save() makes. Whatever happens, a whole checkpoint is found afterwards, and the next run
// saves again as if nothing had happened.
#include <sys/resource.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <functional>

#include "checkpoint.h"
#include "disk_faults.h"

using namespace torus;
using namespace torus::test;

namespace {

int in_child(const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        body();
        ::_exit(0);
    }
    int status = -1;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// How many disk calls of a kind a save of `step` over what lies in `dir` makes.
int64_t calls_of_save(int64_t step, DiskFault::Calls calls, int64_t rows = 11) {
    const TempDir dir;
    CheckpointStore store(dir / "s");
    store.save(state_at(1), files_at(1), 1);
    arm({.calls = calls});
    store.save(state_at(step), files_at(step + 10, rows), 1);
    return disarm();
}

// After any accident: one whole checkpoint is found, of the old or of the new save, and the next
// save works and leaves nothing else behind.
void expect_sound(const std::string& dir, int64_t step, bool new_allowed, bool old_allowed) {
    CheckpointStore store(dir);
    const std::string found = store.newest();
    REQUIRE_TRUE(!found.empty());
    const int64_t at = verify_checkpoint(found).step;
    if (at == 1 && step != 1) {
        EXPECT(old_allowed);
        expect_content(found, 1);
    } else if (step != 1) {
        EXPECT(new_allowed);
        EXPECT_EQ(at, step);
        expect_content(found, step + 10);
    }
    store.save(state_at(step + 1), files_at(step + 1), 1);
    EXPECT_EQ(folders_in(dir), std::vector<std::string>{CheckpointStore::folder_of(step + 1)});
    expect_content(store.newest(), step + 1);
}

}  // namespace

TEST_CASE("checkpoint faults: death at every call of save") {
    for (const int64_t step : {2, 1}) {  // a later step, and the same step again
        const int64_t calls = calls_of_save(step, DiskFault::Calls::all);
        REQUIRE_TRUE(calls > 15);
        for (const bool half : {false, true}) {
            for (int64_t at = 1; at <= calls + 1; ++at) {
                CAPTURE(step);
                CAPTURE(at);
                const TempDir dir;
                CheckpointStore(dir / "s").save(state_at(1), files_at(1), 1);
                const int status = in_child([&] {
                    CheckpointStore store(dir / "s");
                    arm({.kind = DiskFault::Kind::die, .at = at, .half = half});
                    store.save(state_at(step), files_at(step + 10), 1);
                });
                EXPECT_EQ(status, at <= calls ? died : 0);
                expect_sound(dir / "s", step, at > 10, at <= calls);
            }
        }
    }
}

TEST_CASE("checkpoint faults: a full or failing disk at every call of save") {
    const std::pair<DiskFault::Calls, int> kinds[] = {{DiskFault::Calls::writes, ENOSPC},
                                                      {DiskFault::Calls::writes, EIO},
                                                      {DiskFault::Calls::syncs, EIO},
                                                      {DiskFault::Calls::syncs, ENOSPC},
                                                      {DiskFault::Calls::renames, EIO}};
    for (const int64_t step : {2, 1}) {
        for (const auto& [calls, error] : kinds) {
            const int64_t count = calls_of_save(step, calls);
            REQUIRE_TRUE(count > 0);
            int64_t failures = 0;
            for (int64_t at = 1; at <= count; ++at) {
                CAPTURE(step);
                CAPTURE(error);
                CAPTURE(at);
                const TempDir dir;
                bool threw = false;
                {
                    CheckpointStore store(dir / "s");
                    store.save(state_at(1), files_at(1), 1);
                    arm({.kind = DiskFault::Kind::fail,
                         .at = at,
                         .error = error,
                         .half = true,
                         .calls = calls});
                    const Failure f =
                        failure_of([&] { store.save(state_at(step), files_at(step + 10), 1); });
                    disarm();
                    threw = f.code != Exit::ok;
                    if (threw) {
                        EXPECT_EQ(int(f.code), int(Exit::io));
                        EXPECT(f.says(dir / "s"));
                        EXPECT(f.says("the checkpoint needs 1.00 MiB, "));
                        EXPECT(f.says(std::strerror(error)));
                        EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000001"});
                        expect_content(dir / "s/step_00000001", 1);
                    }
                }
                failures += threw;
                expect_sound(dir / "s", step, !threw, threw);
            }
            // All fail, but for the rename that begins the removal of an old checkpoint: the new
            // one is good then, and a warning is enough.
            const bool prunes = calls == DiskFault::Calls::renames && step == 2;
            EXPECT_EQ(failures, count - int64_t(prunes));
        }
    }
}

TEST_CASE("checkpoint faults: everything is on the disk before the name appears") {
    const TempDir dir;
    const std::string top = fs::canonical(dir.path).string() + "/s";
    CheckpointStore store(top);
    arm({});
    store.save(state_at(2), files_at(2), 1);
    disarm();
    const std::vector<std::string>& calls = trace();
    const auto last = [&](const std::string& call) {
        const auto found = std::find(calls.rbegin(), calls.rend(), call);
        CAPTURE(call);
        REQUIRE_TRUE(found != calls.rend());
        return calls.rend() - found;  // place in the order, from 1
    };
    const std::string folder = top + "/step_00000002.tmp";
    const auto published = last("rename " + folder);
    for (const char* name :
         {"config.json", "model.safetensors", "optimizer.safetensors", "manifest.json"}) {
        const std::string file = folder + "/" + name;
        EXPECT(last("write " + file) < last("fsync " + file));
        EXPECT(last("fsync " + file) < last("fsync " + folder));
        EXPECT(last("write " + file) <= last("write " + folder + "/manifest.json"));
    }
    EXPECT(last("fsync " + folder) < published);
    EXPECT(published < last("fsync " + top));
}

TEST_CASE("checkpoint faults: a write that the disk acknowledged and lost") {
    // Tensors of 3 MB: several writes to a file, so that holes in its middle are tried too.
    const int64_t writes = calls_of_save(2, DiskFault::Calls::writes, 100000);
    REQUIRE_TRUE(writes >= 7);
    for (int64_t at = 1; at <= writes; ++at) {
        CAPTURE(at);
        const TempDir dir;
        CheckpointStore store(dir / "s");
        store.save(state_at(1), files_at(1), 1);
        arm({.kind = DiskFault::Kind::lose, .at = at, .calls = DiskFault::Calls::writes});
        const Failure f = failure_of([&] { store.save(state_at(2), files_at(2, 100000), 1); });
        disarm();
        CAPTURE(f.text);
        EXPECT_EQ(int(f.code), int(Exit::io));
        EXPECT(f.says("read back"));
        EXPECT_EQ(fs::path(store.newest()).filename(), "step_00000001");
        EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000001"});
    }
}

TEST_CASE("checkpoint faults: a limit on file sizes is an error, not the end of the process") {
    const TempDir dir;
    const int status = in_child([&] {
        CheckpointStore store(dir / "s");
        store.save(state_at(1), files_at(1), 1);
        const rlimit limit{5000, 5000};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        const Failure f = failure_of([&] { store.save(state_at(2), files_at(2, 1000), 1); });
        ::_exit(f.code == Exit::io && f.says("File too large") ? 7 : 1);
    });
    EXPECT_EQ(status, 7);
    EXPECT_EQ(newest_in(dir / "s"), "step_00000001");
    EXPECT_EQ(folders_in(dir / "s"), std::vector<std::string>{"step_00000001"});
}
