// Ranks with one GPU each, over NCCL: device memory, work queued on CUDA streams. The bootstrap,
// the barriers and the checks go over a communicator of host memory. exchange() may go by the copy
// engines instead (peer_copy.h).
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <exception>

#include "comm/comm.h"
#include "comm/launch.h"
#include "comm/peer_copy.h"

namespace torus {
namespace {

void check_cuda(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    fail(Exit::internal, "CUDA: ", what, ": ", cudaGetErrorString(code));
}

void check_nccl(ncclResult_t code, const char* what) {
    if (code == ncclSuccess) return;
    fail(Exit::peer, "NCCL: ", what, ": ", ncclGetErrorString(code), ": ",
         ncclGetLastError(nullptr), "; NCCL_DEBUG=INFO in the environment says more");
}

ncclDataType_t type_of(DType t) {
    switch (t) {
        case DType::f64: return ncclDouble;
        case DType::f32: return ncclFloat;
        case DType::bf16: return ncclBfloat16;
        case DType::f16: return ncclHalf;
        case DType::i64: return ncclInt64;
        case DType::i32: return ncclInt32;
        case DType::u8: return ncclUint8;
        case DType::u16: break;
    }
    fail(Exit::internal, "NCCL has no type for ", name_of(t));
}

ncclRedOp_t op_of(Reduce op) {
    return op == Reduce::sum ? ncclSum : op == Reduce::max ? ncclMax : ncclMin;
}

cudaStream_t stream_of(const Stream& s) {
    CHECK(s.handle, ": NCCL needs a stream");
    return static_cast<cudaStream_t>(s.handle);
}

// Two ranks on one GPU would hang or fail deep inside NCCL. Returns whether all are on one machine.
bool check_distinct_gpus(Comm& host, int gpu) {
    // The same bus id on two machines is two GPUs.
    struct Place {
        char machine[64], bus_id[32];
    };
    Place mine{};
    machine_id().copy(mine.machine, sizeof mine.machine - 1);
    check_cuda(cudaDeviceGetPCIBusId(mine.bus_id, sizeof mine.bus_id, gpu), "bus id");
    std::vector<Place> all(static_cast<size_t>(host.size()));
    Stream none;
    host.all_gather(none, Tensor(all.data(), DType::u8, {int64_t(sizeof mine) * host.size()}),
                    Tensor(&mine, DType::u8, {sizeof mine}));
    bool one_machine = true;
    for (size_t a = 0; a < all.size(); ++a)
        for (size_t b = a + 1; b < all.size(); ++b) {
            const bool same = std::strcmp(all[a].machine, all[b].machine) == 0;
            require(!same || std::strcmp(all[a].bus_id, all[b].bus_id) != 0, Exit::usage,
                    "--ranks ", host.size(), ": ranks ", a, " and ", b,
                    " use the same GPU; start at most one rank per GPU");
            one_machine = one_machine && same;
        }
    return one_machine;
}

class NcclComm final : public Comm {
public:
    NcclComm(Comm& host, int gpu, Exchange by, std::string name)
        : Comm(host.rank(), host.size(), std::move(name)), host_(&host), gpu_(gpu), by_(by) {}
    NcclComm(std::unique_ptr<Comm> host, int gpu, Exchange by, std::string name)
        : NcclComm(*host, gpu, by, std::move(name)) {
        owned_host_ = std::move(host);
    }
    ~NcclComm() override {
        // With an error on its way up, other ranks may never come here: leave it to the process.
        if (comm_ && std::uncaught_exceptions() == 0) ncclCommDestroy(comm_);
    }

    bool by_copy_engines() const override { return by_ == Exchange::copy; }

    // Copies from now on, when they work on every rank. Collective.
    void copy_if_possible() {
        try {
            copies();
            by_ = Exchange::copy;
        } catch (const Error& e) {
            if (e.code != Exit::usage) throw;
        }
    }

    // Collective over the group the first time.
    PeerCopy& copies() {
        if (copies_) return *copies_;
        auto host = host_->split(0, rank(), name());
        host->set_recorder(nullptr);  // the watchdog is to see the exchange, not its parts
        auto peers = make_cuda_peers(*host, gpu_);
        copies_ = std::make_unique<PeerCopy>(std::move(host), std::move(peers));
        return *copies_;
    }

protected:
    void do_all_reduce(Stream& s, Tensor x, Reduce op) override {
        if (size() == 1) return;
        check_nccl(ncclAllReduce(x.data, x.data, size_t(x.numel()), type_of(x.dtype), op_of(op),
                                 comm(), stream_of(s)),
                   "all_reduce");
    }
    void do_all_gather(Stream& s, Tensor out, Tensor in) override {
        if (size() == 1) return copy(s, out, in);
        check_nccl(ncclAllGather(in.data, out.data, size_t(in.numel()), type_of(in.dtype), comm(),
                                 stream_of(s)),
                   "all_gather");
    }
    void do_reduce_scatter(Stream& s, Tensor out, Tensor in, Reduce op) override {
        if (size() == 1) return copy(s, out, in);
        check_nccl(ncclReduceScatter(in.data, out.data, size_t(out.numel()), type_of(in.dtype),
                                     op_of(op), comm(), stream_of(s)),
                   "reduce_scatter");
    }
    void do_broadcast(Stream& s, Tensor x, int root) override {
        if (size() == 1) return;
        check_nccl(
            ncclBroadcast(x.data, x.data, size_t(x.bytes()), ncclUint8, root, comm(), stream_of(s)),
            "broadcast");
    }
    void do_exchange(Stream& s, std::span<const Message> sends,
                     std::span<const Message> recvs) override {
        copy_own(s, sends, recvs);
        if (size() == 1) return;
        if (by_ == Exchange::copy) return copies().exchange(s, sends, recvs);
        const ncclComm_t c = comm();
        check_nccl(ncclGroupStart(), "exchange");
        for (const Message& m : sends)
            if (m.peer != rank() && m.data.numel() > 0)
                check_nccl(ncclSend(m.data.data, size_t(m.data.bytes()), ncclUint8, m.peer, c,
                                    stream_of(s)),
                           "send");
        for (const Message& m : recvs)
            if (m.peer != rank() && m.data.numel() > 0)
                check_nccl(ncclRecv(m.data.data, size_t(m.data.bytes()), ncclUint8, m.peer, c,
                                    stream_of(s)),
                           "receive");
        check_nccl(ncclGroupEnd(), "exchange");
    }
    void do_barrier(Stream& s) override {
        check_cuda(cudaStreamSynchronize(stream_of(s)), "barrier");
        Stream none;
        host_->barrier(none);
    }
    std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) override {
        return std::make_unique<NcclComm>(host_->split(color, key, name), gpu_, by_, name);
    }

private:
    // Collective over the group the first time.
    ncclComm_t comm() {
        if (comm_) return comm_;
        check_cuda(cudaSetDevice(gpu_), "device");
        ncclUniqueId id{};
        if (rank() == 0) check_nccl(ncclGetUniqueId(&id), "start");
        Stream none;
        host_->broadcast(none, Tensor(&id, DType::u8, {sizeof id}), 0);
        check_nccl(ncclCommInitRank(&comm_, size(), id, rank()), "start");
        return comm_;
    }

    void copy(Stream& s, const Tensor& to, const Tensor& from) {
        if (to.data != from.data)
            check_cuda(cudaMemcpyAsync(to.data, from.data, size_t(to.bytes()),
                                       cudaMemcpyDeviceToDevice, stream_of(s)),
                       "copy");
    }

    void copy_own(Stream& s, std::span<const Message> sends, std::span<const Message> recvs) {
        size_t at = 0;
        for (const Message& m : recvs) {
            if (m.peer != rank() || m.data.numel() == 0) continue;
            while (at < sends.size() && (sends[at].peer != rank() || sends[at].data.numel() == 0))
                ++at;
            CHECK(at < sends.size() && sends[at].data.bytes() == m.data.bytes(),
                  ": message to itself without an equal receive");
            copy(s, m.data, sends[at++].data);
        }
    }

    std::unique_ptr<Comm> owned_host_;
    Comm* host_;
    int gpu_;
    Exchange by_;
    ncclComm_t comm_ = nullptr;
    std::unique_ptr<PeerCopy> copies_;
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(Comm& host, int gpu, Exchange exchange) {
    check_cuda(cudaSetDevice(gpu), "device");
    const bool one_machine = check_distinct_gpus(host, gpu);
    const bool by_choice = exchange == Exchange::automatic;
    auto world =
        std::make_unique<NcclComm>(host, gpu, by_choice ? Exchange::nccl : exchange, "world");
    if (host.size() == 1 || !one_machine) return world;
    // Now, rather than after a model has been loaded.
    if (by_choice) world->copy_if_possible();
    if (exchange == Exchange::copy) world->copies();
    return world;
}

}  // namespace torus
