// What happens between processes: a hung rank, a dead launcher, an error, a launch. Each case
// starts this program again under mpirun for one of the "child:" cases, which do nothing by
// themselves.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "comm/watchdog.h"
#include "test/comm/ranks.h"
#include "test/test.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

struct Outcome {
    int status = -1;
    std::string text;
};

std::string this_program() { return fs::read_symlink("/proc/self/exe").string(); }

bool is_child() { return !launch_info().launcher.empty(); }

bool can_start_ranks() {
#ifdef TORUS_HAVE_MPI
    return !is_child() && std::system("mpirun --version > /dev/null 2>&1") == 0;
#else
    return false;
#endif
}

std::string mpirun(int ranks) {
    return concat("exec mpirun -np ", ranks, " --oversubscribe --bind-to none ",
                  geteuid() == 0 ? "--allow-run-as-root " : "");
}

std::string child(const char* name) {
    return concat("'", this_program(), "' --no-skip -tc='child: ", name, "' 2>&1");
}

Outcome run(const std::string& command) {
    Outcome out;
    FILE* pipe = popen(command.c_str(), "r");
    REQUIRE_TRUE(pipe != nullptr);
    char line[4096];
    while (std::fgets(line, sizeof line, pipe)) out.text += line;
    const int status = pclose(pipe);
    out.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return out;
}

bool contains(const Outcome& o, const std::string& part) {
    return o.text.find(part) != std::string::npos;
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// What a trainer does at its start, and one step that `f` makes.
template <class F>
void watched_step(F f) {
    run_mpi([&](Comm& world) {
        auto recorder = std::make_shared<FlightRecorder>(world);
        world.set_recorder(recorder);
        Stream s;
        world.barrier(s);
        Watchdog watchdog(recorder);
        watchdog.arm(1.5, "step 7");
        f(world);
        watchdog.disarm();
    });
}

}  // namespace

TEST_CASE("watchdog: the alarm names the step and the state") {
    run_ranks(1, [](Comm& c) {
        auto recorder = std::make_shared<FlightRecorder>(c);
        c.set_recorder(recorder);
        std::vector<double> x(12);
        Stream s;
        c.all_reduce(s, Tensor(x.data(), DType::f64, {12}));
        std::mutex mutex;
        std::string report;
        {
            Watchdog dog(recorder, [&](const std::string& text) {
                const std::lock_guard lock(mutex);
                report += text;
            });
            dog.arm(30, "step 1");
            dog.disarm();
            dog.arm(0.05, "step 2");
            sleep_ms(1000);
        }
        EXPECT(report.find("step 2 did not end within 0.05 s") != std::string::npos);
        EXPECT(report.find("rank 0: after collective 1, all_reduce of 12 fp64 on world") !=
               std::string::npos);
        EXPECT(report.find("step 1") == std::string::npos);
        EXPECT(report.find("step 2", report.find("step 2") + 1) == std::string::npos);  // once
    });
}

TEST_CASE("processes: a stopped rank ends the job with 76 and is named") {
    if (!can_start_ranks()) return;
    const Outcome o = run(mpirun(3) + child("stopped rank"));
    CAPTURE(o.text);
    EXPECT_EQ(o.status, int(Exit::peer));
    EXPECT(contains(o, "step 7 did not end within 1.5 s; waiting for rank 1\n"));
    EXPECT(contains(o, "rank 0: in collective"));
}

TEST_CASE("processes: a skipped call is named") {
    if (!can_start_ranks()) return;
    const Outcome o = run(mpirun(3) + child("skipped call"));
    CAPTURE(o.text);
    EXPECT_EQ(o.status, int(Exit::peer));
    EXPECT(contains(o, "waiting for rank 2\n"));
    EXPECT(contains(o, "all_reduce of 5 fp64 on world"));
}

TEST_CASE("processes: an error of one rank ends all with its code") {
    if (!can_start_ranks()) return;
    const Outcome o = run(mpirun(3) + child("error"));
    CAPTURE(o.text);
    EXPECT_EQ(o.status, int(Exit::bad_data));
    EXPECT(contains(o, "rank 1: shard 5 is broken"));
}

TEST_CASE("processes: --ranks starts the ranks") {
    if (!can_start_ranks()) return;
    const Outcome o = run("exec " + child("relaunch"));
    CAPTURE(o.text);
    EXPECT_EQ(o.status, 0);
    for (int r = 0; r < 3; ++r)
        EXPECT(contains(o, concat("rank ", r, " of 3, local rank ", r, " of 3, by mpirun")));
    EXPECT(contains(o, "--ranks 2: mpirun has started 3"));
}

TEST_CASE("processes: a rank goes when its launcher is killed") {
    // A shell plays the launcher: Open MPI's own library would notice, too, but only when it is up.
    if (is_child()) return;
    const fs::path folder = fs::temp_directory_path() / concat("torus_orphans_", getpid());
    fs::create_directories(folder);
    const pid_t launcher = fork();
    if (launcher == 0) {
        setenv("TMPDIR", folder.c_str(), 1);  // where the child leaves its id
        setenv("OMPI_COMM_WORLD_RANK", "0", 1);
        setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
        const std::string command = child("orphan") + " > /dev/null & wait";
        execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
        _exit(127);
    }
    std::vector<pid_t> ranks;
    for (int tries = 0; tries < 300 && ranks.empty(); ++tries) {
        sleep_ms(100);
        ranks.clear();
        for (const auto& entry : fs::directory_iterator(folder))
            if (entry.path().extension() == ".pid")
                ranks.push_back(pid_t(std::stoi(entry.path().stem().string())));
    }
    REQUIRE_TRUE(ranks.size() == 1);
    kill(launcher, SIGKILL);
    waitpid(launcher, nullptr, 0);
    bool alive = true;
    for (int tries = 0; tries < 100 && alive; ++tries) {
        sleep_ms(100);
        alive = false;
        for (const pid_t rank : ranks) {
            // A zombie that nobody has collected yet is dead, too.
            std::ifstream status(concat("/proc/", rank, "/stat"));
            std::string id, name, state;
            alive = alive || (status >> id >> name >> state && state != "Z");
        }
    }
    EXPECT(!alive);
    fs::remove_all(folder);
}

TEST_CASE("child: stopped rank" * doctest::skip()) {
    if (!is_child()) return;
    watched_step([](Comm& world) {
        if (world.rank() == 1) raise(SIGSTOP);
        Stream s;
        world.barrier(s);
    });
}

TEST_CASE("child: skipped call" * doctest::skip()) {
    if (!is_child()) return;
    watched_step([](Comm& world) {
        std::vector<double> x(5);
        Stream s;
        if (world.rank() == 2) sleep_ms(30000);
        world.all_reduce(s, Tensor(x.data(), DType::f64, {5}));
    });
}

TEST_CASE("child: error" * doctest::skip()) {
    if (!is_child()) return;
    run_mpi([](Comm& world) {
        Stream s;
        world.barrier(s);
        require(world.rank() != 1, Exit::bad_data, "shard 5 is broken");
        world.barrier(s);
    });
}

TEST_CASE("child: relaunch" * doctest::skip()) {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    std::vector<std::string> words;
    for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
    if (words.empty() || words.back() != "-tc=child: relaunch") return;  // not started for this
    std::vector<const char*> argv;
    for (const std::string& w : words) argv.push_back(w.c_str());
    relaunch(3, int(argv.size()), argv.data());
    const LaunchInfo info = launch_info();
    std::printf("%s\n", concat("rank ", info.rank, " of ", info.size, ", local rank ",
                               info.local_rank, " of ", info.local_size, ", by ", info.launcher)
                            .c_str());
    try {
        relaunch(2, int(argv.size()), argv.data());
    } catch (const Error& e) {
        std::printf("%s\n", e.what());
    }
}

TEST_CASE("child: orphan" * doctest::skip()) {
    if (!is_child()) return;
    die_with_parent();
    std::ofstream(fs::temp_directory_path() / concat(getpid(), ".pid")) << "here\n";
    sleep_ms(60000);
}

}  // namespace torus
