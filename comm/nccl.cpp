// Ranks with one GPU each, over NCCL: device memory, work queued on CUDA streams. The bootstrap,
// the barriers and the checks go over a communicator of host memory.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "comm/comm.h"

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

// Two ranks on one GPU would hang or fail deep inside NCCL.
void check_distinct_gpus(Comm& host, int gpu) {
    char mine[64] = "";
    check_cuda(cudaDeviceGetPCIBusId(mine, 32, gpu), "bus id");
    // The same bus id on two machines is two GPUs: the machine's boot id tells them apart.
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
        const size_t used = std::strlen(mine);
        mine[used + std::fread(mine + used, 1, sizeof mine - used - 1, file)] = '\0';
        std::fclose(file);
    }
    std::vector<char> all(sizeof mine * size_t(host.size()));
    Stream none;
    host.all_gather(none, Tensor(all.data(), DType::u8, {int64_t(all.size())}),
                    Tensor(mine, DType::u8, {sizeof mine}));
    for (int a = 0; a < host.size(); ++a)
        for (int b = a + 1; b < host.size(); ++b)
            require(std::memcmp(&all[sizeof mine * size_t(a)], &all[sizeof mine * size_t(b)],
                                sizeof mine) != 0,
                    Exit::usage, "--ranks ", host.size(), ": ranks ", a, " and ", b,
                    " use the same GPU; start at most one rank per GPU");
}

class NcclComm final : public Comm {
public:
    NcclComm(Comm& host, int gpu, std::string name)
        : Comm(host.rank(), host.size(), std::move(name)), host_(&host), gpu_(gpu) {}
    NcclComm(std::unique_ptr<Comm> host, int gpu, std::string name)
        : NcclComm(*host, gpu, std::move(name)) {
        owned_host_ = std::move(host);
    }
    ~NcclComm() override {
        // With an error on its way up, other ranks may never come here: leave it to the process.
        if (comm_ && std::uncaught_exceptions() == 0) ncclCommDestroy(comm_);
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
        return std::make_unique<NcclComm>(host_->split(color, key, name), gpu_, name);
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
    ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(Comm& host, int gpu) {
    check_cuda(cudaSetDevice(gpu), "device");
    check_distinct_gpus(host, gpu);
    return std::make_unique<NcclComm>(host, gpu, "world");
}

}  // namespace torus
