// What the benches of several ranks share: their flags, the ranks themselves, which are processes
// of mpirun or threads of this process, on a GPU each, all on one, or on the CPU, and times in
// which the slowest rank counts.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"
#include "comm/launch.h"
#include "kernels/kernels.h"

namespace torus {

struct RankSettings {
    std::string device = "cpu";
    int ranks = 0, threads = 0;
    int played = 0;  // ranks that are threads of this process and share its first GPU
    Exchange exchange = Exchange::automatic;
    int size() const { return std::max({1, ranks, threads, played}); }
};

inline int64_t whole_number(const std::string& flag, const std::string& value) {
    require(!value.empty() && value.size() < 19 &&
                value.find_first_not_of("0123456789") == std::string::npos,
            Exit::usage, flag, " ", value, ": must be a number");
    return std::stoll(value);
}

// Whether the flag is one of these.
inline bool parse_rank_flag(const std::string& flag, const std::string& value, RankSettings& out) {
    if (flag == "--device") {
        require(value == "cpu" || value == "cuda", Exit::usage, "--device ", value,
                ": must be cpu or cuda");
        out.device = value;
    } else if (flag == "--exchange") {
        require(value == "auto" || value == "nccl" || value == "copy", Exit::usage, "--exchange ",
                value, ": must be auto, nccl or copy");
        out.exchange = value == "copy"   ? Exchange::copy
                       : value == "nccl" ? Exchange::nccl
                                         : Exchange::automatic;
    } else if (flag == "--ranks") {
        out.ranks = int(whole_number(flag, value));
    } else if (flag == "--threads") {
        out.threads = int(whole_number(flag, value));
    } else if (flag == "--play") {
        out.played = int(whole_number(flag, value));
    } else {
        return false;
    }
    return true;
}

// Calls body(Kernels&, Comm& device, Comm& host) on each rank: device exchanges the kernels'
// memory, host the host's.
template <class Body>
void run_on_ranks(const RankSettings& settings, int argc, char** argv, Body body) {
    const bool cuda = settings.device == "cuda";
    require(cuda || settings.exchange != Exchange::copy, Exit::usage,
            "--exchange copy: is between GPUs; give --device cuda");
    require(settings.played == 0 || settings.threads + settings.ranks == 0, Exit::usage,
            "--play: says how many ranks there are; give neither --ranks nor --threads");
    const auto work = [&](Comm& host, int gpu) {
        const auto kernels =
            cuda ? make_cuda_kernels(DType::bf16, gpu) : make_cpu_kernels(DType::f32);
        const bool linked = cuda && host.size() > 1 && settings.played == 0;
        const auto device = linked ? make_nccl_comm(host, gpu, settings.exchange)
                                   : host.split(0, host.rank(), "world");
        body(*kernels, *device, host);
    };
    if (const int count = settings.threads + settings.played; count > 0) {
        const auto shared =
            cuda && settings.played > 0 ? make_cuda_kernels(DType::bf16, 0) : nullptr;
        auto comms = make_thread_comms(count, shared ? &shared->device() : nullptr);
        std::vector<std::thread> threads;
        for (int r = 0; r < count; ++r)
            threads.emplace_back([&, r] {
                try {
                    work(*comms[size_t(r)], settings.played > 0 ? 0 : r);
                } catch (const Error& e) {
                    std::fprintf(stderr, "error: rank %d: %s\n", r, e.what());
                    exit_all_ranks(e.code);
                }
            });
        for (std::thread& t : threads) t.join();
        return;
    }
    relaunch(settings.ranks, argc, argv);
    const LaunchInfo launch = launch_info();
    const auto alone = make_cpu_kernels(DType::f32);
    const auto host = launch.launcher.empty() ? make_self_comm(alone->device()) : make_mpi_comm();
    work(*host, launch.local_rank);
}

// Milliseconds of f() and of wait(), which waits for the device, on the slowest rank: of all at the
// same time, or in turn, each while the others rest.
template <class F, class Wait>
double slowest_ms(Comm& host, F f, Wait wait, bool in_turn = false) {
    using Clock = std::chrono::steady_clock;
    Stream none;
    double ms = 0;
    for (int turn = 0; turn < (in_turn ? host.size() : 1); ++turn) {
        wait();
        host.barrier(none);
        if (in_turn && turn != host.rank()) continue;
        const auto start = Clock::now();
        f();
        wait();
        ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    }
    host.all_reduce(none, Tensor(&ms, DType::f64, {1}), Reduce::max);
    return ms;
}

}  // namespace torus
