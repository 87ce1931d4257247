// Ranks as processes under mpirun or srun, on host memory. MPI only carries messages here (counts
// are cut to fit its ints); the collectives are HostComm's, so that their order of sums is ours.
#define OMPI_SKIP_MPICXX  // the C interface only; the old C++ one needs a library of its own
#define MPICH_SKIP_MPICXX
#include <mpi.h>

#include <algorithm>
#include <exception>

#include "comm/host_comm.h"
#include "comm/launch.h"

namespace torus {
namespace {

constexpr int64_t largest_message = 1 << 30;

void check_mpi(int code, const char* what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    fail(Exit::peer, "MPI: ", what, ": ", std::string(text, size_t(length)),
         "; another rank has probably stopped, see its message");
}

// Starts MPI, and ends it after the last communicator. When an error is on its way up, the other
// ranks may be waiting elsewhere: MPI is then left to exit_all_ranks().
struct Session {
    Session() {
        int started = 0, level = 0;
        MPI_Initialized(&started);
        CHECK(!started, ": MPI was started by someone else");
        check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "start");
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    ~Session() {
        if (std::uncaught_exceptions() == 0) MPI_Finalize();
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
};

int rank_in(MPI_Comm c) {
    int rank = 0;
    MPI_Comm_rank(c, &rank);
    return rank;
}
int size_of_group(MPI_Comm c) {
    int size = 0;
    MPI_Comm_size(c, &size);
    return size;
}

class MpiComm final : public HostComm {
public:
    MpiComm(std::shared_ptr<Session> session, MPI_Comm comm, std::string name)
        : HostComm(rank_in(comm), size_of_group(comm), std::move(name)),
          session_(std::move(session)),
          comm_(comm) {}
    ~MpiComm() override {
        if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
    }

protected:
    void transfer(std::span<const Message> sends, std::span<const Message> recvs) override {
        requests_.clear();
        for (const Message& m : recvs)
            for_pieces(m, [&](char* data, int bytes, MPI_Request* request) {
                return MPI_Irecv(data, bytes, MPI_BYTE, m.peer, 0, comm_, request);
            });
        for (const Message& m : sends)
            for_pieces(m, [&](char* data, int bytes, MPI_Request* request) {
                return MPI_Isend(data, bytes, MPI_BYTE, m.peer, 0, comm_, request);
            });
        statuses_.resize(requests_.size());
        const int code = MPI_Waitall(int(requests_.size()), requests_.data(), statuses_.data());
        if (code == MPI_ERR_IN_STATUS)
            for (const MPI_Status& status : statuses_) check_mpi(status.MPI_ERROR, "transfer");
        check_mpi(code, "transfer");
    }

    std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) override {
        MPI_Comm part = MPI_COMM_NULL;
        check_mpi(MPI_Comm_split(comm_, color, key, &part), "split");
        return std::make_unique<MpiComm>(session_, part, name);
    }

private:
    template <class F>
    void for_pieces(const Message& m, F start) {
        char* data = static_cast<char*>(m.data.data);
        for (int64_t at = 0; at < m.data.bytes(); at += largest_message) {
            const int64_t bytes = std::min(largest_message, m.data.bytes() - at);
            MPI_Request request = MPI_REQUEST_NULL;
            check_mpi(start(data + at, int(bytes), &request), "message");
            requests_.push_back(request);
        }
    }

    std::shared_ptr<Session> session_;
    MPI_Comm comm_;
    std::vector<MPI_Request> requests_;
    std::vector<MPI_Status> statuses_;
};

}  // namespace

std::unique_ptr<Comm> make_mpi_comm() {
    auto session = std::make_shared<Session>();
    MPI_Comm world = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "start");
    auto comm = std::make_unique<MpiComm>(session, world, "world");
    const LaunchInfo info = launch_info();
    require(comm->size() == info.size, Exit::peer, "MPI has ", comm->size(), " ranks but ",
            info.launcher, " started ", info.size,
            "; this program was built with another MPI than the launcher's: use that one's mpirun");
    return comm;
}

// Named by launch.cpp's exit_all_ranks().
void abort_mpi(int code) {
    int started = 0, ended = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    if (started && !ended) MPI_Abort(MPI_COMM_WORLD, code);
}

}  // namespace torus
