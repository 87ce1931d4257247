// The launchers' environment: Open MPI's OMPI_COMM_WORLD_*, MPICH's PMI_* and MPI_LOCAL*, Slurm's
// SLURM_*. srun sets its variables also in an interactive allocation's shell, for one task.
#include "comm/launch.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "comm/comm.h"

namespace torus {
namespace {

// A number of the environment; `fallback` when it is not set or not a number.
int env_int(const char* name, int fallback) {
    const char* text = std::getenv(name);
    if (!text || !*text) return fallback;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    return *end == '\0' ? int(value) : fallback;
}

std::string find_on_path(const char* program) {
    const char* path = std::getenv("PATH");
    std::string rest = path ? path : "/usr/local/bin:/usr/bin";
    for (size_t begin = 0; begin <= rest.size();) {
        const size_t end = std::min(rest.find(':', begin), rest.size());
        const std::string file = rest.substr(begin, end - begin) + "/" + program;
        if (access(file.c_str(), X_OK) == 0) return file;
        begin = end + 1;
    }
    return {};
}

}  // namespace

#ifdef TORUS_HAVE_MPI
void abort_mpi(int code);  // mpi.cpp
#else
static void abort_mpi(int) {}
std::unique_ptr<Comm> make_mpi_comm() {
    fail(Exit::usage,
         "several ranks need MPI, and this program was built without it: "
         "apt-get install libopenmpi-dev openmpi-bin, then build again");
}
#endif
#ifndef TORUS_HAVE_NCCL
std::unique_ptr<Comm> make_nccl_comm(Comm&, int, Exchange) {
    fail(Exit::usage,
         "several GPUs need NCCL, and this program was built without it: "
         "apt-get install libnccl-dev, then build again");
}
#endif

LaunchInfo launch_info() {
    struct Names {
        const char *launcher, *rank, *size, *local_rank, *local_size;
    };
    static constexpr Names known[] = {
        {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
        {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
         "SLURM_STEP_TASKS_PER_NODE"},
    };
    for (const Names& n : known) {
        const int rank = env_int(n.rank, -1), size = env_int(n.size, -1);
        if (rank < 0 || size < 1 || rank >= size) continue;
        return {rank, size, env_int(n.local_rank, rank), env_int(n.local_size, size), n.launcher};
    }
    return {};
}

// The kernel makes up a number at each boot.
std::string machine_id() {
    char id[64] = "";
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
        id[std::fread(id, 1, sizeof id - 1, file)] = '\0';
        std::fclose(file);
    }
    return id;
}

void relaunch(int ranks, int argc, const char* const* argv) {
    require(ranks >= 0, Exit::usage, "--ranks ", ranks, ": must be 1 or more");
    const LaunchInfo info = launch_info();
    if (!info.launcher.empty()) {
        require(ranks == 0 || ranks == info.size, Exit::usage, "--ranks ", ranks, ": ",
                info.launcher, " has started ", info.size, "; leave --ranks out or give ",
                info.size);
        return;
    }
    if (ranks <= 1) return;
#ifndef TORUS_HAVE_MPI
    make_mpi_comm();  // says what is missing
#endif
    const std::string mpirun = find_on_path("mpirun");
    require(
        !mpirun.empty(), Exit::usage, "--ranks ", ranks,
        ": mpirun is not on the PATH; apt-get install openmpi-bin, or start the ranks yourself");
    // Unbound, so that the CPU backend's threads of a rank may use all cores.
    std::vector<std::string> words{mpirun,      "-np", std::to_string(ranks), "--oversubscribe",
                                   "--bind-to", "none"};
    if (geteuid() == 0) words.push_back("--allow-run-as-root");
    words.push_back("/proc/self/exe");
    char self[4096] = "";
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length > 0) words.back().assign(self, size_t(length));
    for (int i = 1; i < argc; ++i) words.push_back(argv[i]);
    std::vector<char*> pointers;
    for (std::string& w : words) pointers.push_back(w.data());
    pointers.push_back(nullptr);
    execv(mpirun.c_str(), pointers.data());
    fail(Exit::usage, "--ranks ", ranks, ": cannot start ", mpirun, ": ", std::strerror(errno));
}

void die_with_parent() {
    if (launch_info().launcher.empty()) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have gone before the call above: init or a reaper has adopted this process.
    if (getppid() == 1) _exit(int(Exit::peer));
}

void exit_all_ranks(Exit code) {
    abort_mpi(int(code));
    std::_Exit(int(code));
}

}  // namespace torus
