// Who this process is among those that mpirun or srun started, and --ranks N: start it again under
// mpirun. The only place that reads the launcher's environment.
#pragma once
#include <string>

namespace torus {

struct LaunchInfo {
    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;  // among the ranks of this machine: picks the GPU
    std::string launcher;                // "mpirun", "srun", or empty: started by hand
};
LaunchInfo launch_info();

// The same text on ranks of one machine, also in different containers; another one elsewhere.
std::string machine_id();

// With ranks > 1 in a process started by hand: replaces it by `mpirun -np ranks` of the same
// command line, in which this call does nothing. Throws Error(usage) when the launcher's number of
// ranks is another one, or when mpirun is not there. ranks 0 = as many as the launcher says.
void relaunch(int ranks, int argc, const char* const* argv);

// The kernel kills this process when its parent goes: no orphans after a killed mpirun.
void die_with_parent();

}  // namespace torus
