// Runs P ranks as threads of this process and hands an error of any of them to the test.
#pragma once
#include <cstdio>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "comm/comm.h"
#include "comm/launch.h"
#include "test/test.h"

namespace torus {

// MPI starts once in a process, so the world stays.
inline Comm& mpi_world() {
    static const std::unique_ptr<Comm> world = make_mpi_comm();
    return *world;
}

// f(world) under mpirun; nothing when this program was started by hand. An error of one
// rank ends all.
template <class F>
void run_mpi(F f) {
    if (launch_info().launcher.empty()) {
        MESSAGE("not under mpirun: nothing to do");
        return;
    }
    try {
        f(mpi_world());
    } catch (const Error& e) {
        std::fprintf(stderr, "rank %d: %s\n", launch_info().rank, e.what());
        exit_all_ranks(e.code);
    }
}

// f(world) on each of P ranks. An error of one rank wakes the others; the first one is thrown, and
// of several the one that is not just "another rank has stopped".
template <class F>
void run_ranks(int P, F f, Device* device = nullptr) {
    auto comms = make_thread_comms(P, device);
    std::vector<std::exception_ptr> errors(static_cast<size_t>(P));
    std::vector<std::thread> threads;
    for (int r = 0; r < P; ++r)
        threads.emplace_back([&, r] {
#ifdef _OPENMP
            omp_set_num_threads(1);
#endif
            try {
                f(*comms[size_t(r)]);
            } catch (...) {
                errors[size_t(r)] = std::current_exception();
                break_off(*comms[size_t(r)]);
            }
        });
    for (std::thread& t : threads) t.join();
    std::exception_ptr first;
    for (const auto& e : errors) {
        if (!e) continue;
        try {
            std::rethrow_exception(e);
        } catch (const Error& error) {
            if (error.code != Exit::peer) std::rethrow_exception(e);
            first = first ? first : e;
        }
    }
    if (first) std::rethrow_exception(first);
}

}  // namespace torus
