// The program: parse, run, and turn whatever went wrong into one line and an exit code.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <new>

#include "comm/comm.h"
#include "comm/launch.h"
#include "engine/config.h"
#include "engine/run.h"

namespace {

// One line from one rank: rank 0 mostly met the same, and its abort ends the others. They give it
// time to, also on a machine that is busy, and across signals, which would end a single sleep.
int report(torus::Exit code, const char* what) {
    const torus::LaunchInfo info = torus::launch_info();
    for (unsigned left = info.rank > 0 ? 10 : 0; left > 0;) left = sleep(left);
    if (info.rank > 0)
        std::fprintf(stderr, "error: rank %d: %s\n", info.rank, what);
    else
        std::fprintf(stderr, "error: %s\n", what);
    if (info.size > 1) torus::exit_all_ranks(code);
    return int(code);
}

}  // namespace

int main(int argc, char** argv) {
    using torus::Exit;
    try {
        torus::Config config;
        if (!torus::parse_config(argc, argv, config)) return int(Exit::ok);
        if (!config.plan) torus::relaunch(config.ranks, argc, argv);
        return int(torus::run(config));
    } catch (const torus::Error& e) {
        return report(e.code, e.what());
    } catch (const std::bad_alloc&) {
        return report(Exit::out_of_memory,
                      "host memory: an allocation failed; use a smaller model or batch");
    } catch (const std::exception& e) {
        return report(Exit::internal, e.what());
    }
}
