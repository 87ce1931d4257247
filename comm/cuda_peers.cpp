// PeerCopy's device on CUDA. Between processes, memory and events go as CUDA IPC handles, and an
// opened allocation is mapped for direct access over NVLink or PCIe; a process cannot open its own
// handles, so threads of one use each other's addresses and events as they are.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <random>

#include "comm/launch.h"
#include "comm/peer_copy.h"

namespace torus {
namespace {

void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    fail(Exit::internal, "CUDA: ", what, ": ", cudaGetErrorString(code));
}

// Why a CUDA call did not work, for the user; the error does not stick.
std::string reason(const char* what, cudaError_t code) {
    cudaGetLastError();
    return concat(what, ": ", cudaGetErrorString(code));
}

// The same number in all threads of a process, another one in every other process: process ids of
// two containers may be equal.
uint64_t process_number() {
    static const uint64_t number = [] {
        std::random_device random;
        return uint64_t(random()) << 32 | random();
    }();
    return number;
}

// The driver's, by its entry point: the program starts without a driver, too.
decltype(&cuPointerGetAttributes) pointer_attributes() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &found, 12000,
                                           cudaEnableDefault, &result),
          "cuPointerGetAttributes");
    CHECK(found && result == cudaDriverEntryPointSuccess, ": no cuPointerGetAttributes");
    return reinterpret_cast<decltype(&cuPointerGetAttributes)>(found);
}

// What a rank tells the others at the start.
struct Card {
    char machine[64], bus_id[32];
    uint64_t process;
    int64_t gpu;
};
struct EventCard {
    cudaIpcEventHandle_t handle;
    cudaEvent_t event;  // for threads of the same process
};
static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(PeerDevice::Allocation::words));

template <class T>
std::vector<T> gather(Comm& host, const T* mine, size_t count) {
    const int64_t bytes = int64_t(count * sizeof(T));
    std::vector<T> all(count * size_t(host.size()));
    Stream none;
    host.all_gather(none, Tensor(all.data(), DType::u8, {bytes * host.size()}),
                    Tensor(const_cast<T*>(mine), DType::u8, {bytes}));
    return all;
}

cudaStream_t handle(const Stream& s) {
    CHECK(s.handle, ": a copy between GPUs needs a stream");
    return static_cast<cudaStream_t>(s.handle);
}

class CudaPeers final : public PeerDevice {
public:
    CudaPeers(Comm& host, int gpu) : rank_(host.rank()), size_(size_t(host.size())), gpu_(gpu) {
        check(cudaSetDevice(gpu_), "device");
        attributes_ = pointer_attributes();
        const Card mine = my_card();
        const auto cards = gather(host, &mine, 1);
        for (const Card& c : cards) {
            same_process_.push_back(c.process == mine.process);
            ipc_ = ipc_ || c.process != mine.process;
        }
        std::string obstacle = no_access(cards);
        agree_that_copies_work(host, obstacle);

        const std::vector<EventCard> my_events = make_events(obstacle);
        const auto events = gather(host, my_events.data(), size_);
        if (obstacle.empty()) obstacle = connect(events);
        Probe mine_to_open;
        const auto probe = make_probe(mine_to_open, obstacle);
        const auto probes = gather(host, &mine_to_open, 1);
        for (size_t r = 0; r < size_ && obstacle.empty(); ++r) {
            if (same_process_[r] || !probes[r].there) continue;
            void* const base = map(probes[r].words, obstacle);
            if (base) cudaIpcCloseMemHandle(base);
        }
        agree_that_copies_work(host, obstacle);  // and all have closed the probes
    }
    ~CudaPeers() override {
        for (Stream& s : lanes_) cudaStreamDestroy(static_cast<cudaStream_t>(s.handle));
        for (const cudaEvent_t e : events_) cudaEventDestroy(e);
    }

    Allocation allocation_of(const void* mine) override {
        CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                       CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                       CU_POINTER_ATTRIBUTE_BUFFER_ID};
        char* base = nullptr;
        size_t bytes = 0;
        unsigned long long id = 0;  // of the driver: never given to another allocation
        void* values[] = {&base, &bytes, &id};
        const CUresult code = attributes_(3, names, values, reinterpret_cast<CUdeviceptr>(mine));
        CHECK(code == CUDA_SUCCESS && base && id, ": ", mine, " is no memory of a GPU (", int(code),
              ")");
        for (const Allocation& a : exported_)
            if (a.id == id) return a;
        Allocation a{.id = id, .base = base, .bytes = int64_t(bytes), .words = {}};
        if (ipc_) {
            cudaIpcMemHandle_t words{};
            check(cudaIpcGetMemHandle(&words, base), "cudaIpcGetMemHandle");
            std::memcpy(a.words.data(), &words, sizeof words);
        }
        if (exported_.size() == most_exported) exported_.erase(exported_.begin());
        exported_.push_back(a);
        return a;
    }

    char* open(int peer, const Allocation& a) override {
        if (same_process_[size_t(peer)]) return a.base;
        std::string obstacle;
        cudaIpcMemHandle_t words{};
        std::memcpy(&words, a.words.data(), sizeof words);
        void* const base = map(words, obstacle);
        require(base, Exit::usage, "--exchange copy: rank ", rank_, " ", obstacle,
                "; use --exchange nccl");
        return static_cast<char*>(base);
    }

    void close(int peer, char* base) noexcept override {
        if (same_process_[size_t(peer)]) return;
        cudaIpcCloseMemHandle(base);
        cudaGetLastError();  // its owner may have freed it: nothing is lost
    }

    void copy(Stream& s, void* to, const void* from, int64_t bytes) override {
        check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, handle(s)), "copy");
    }

    void record(Stream& s, int event) override {
        check(cudaEventRecord(events_[size_t(event)], handle(s)), "record");
    }

    void wait(Stream& s, int rank, int event) override {
        cudaEvent_t e = events_[size_t(event)];
        if (rank != rank_) {  // of others only what concerns this rank is open
            CHECK(event == rank || event == rank_);
            e = event == rank ? ready_[size_t(rank)] : done_[size_t(rank)];
        }
        check(cudaStreamWaitEvent(handle(s), e, 0), "wait");
    }

    Stream& lane(int number) override {
        while (int(lanes_.size()) < number) {
            int least = 0, greatest = 0;
            check(cudaSetDevice(gpu_), "device");
            check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
            cudaStream_t stream = nullptr;
            check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "stream");
            lanes_.push_back({.handle = stream, .workspace = {}});
        }
        return lanes_[size_t(number - 1)];
    }

    void synchronize() override {
        check(cudaSetDevice(gpu_), "device");
        check(cudaDeviceSynchronize(), "a copy queued before");
    }

    void disconnect() noexcept override {
        for (size_t r = 0; r < size_; ++r) {
            if (same_process_[r]) continue;
            if (ready_[r]) cudaEventDestroy(ready_[r]);
            if (done_[r]) cudaEventDestroy(done_[r]);
        }
    }

private:
    static constexpr size_t most_exported = 16;

    struct Free {
        void operator()(void* p) const { cudaFree(p); }
    };
    // A little memory for the other processes to open, before a model counts on that.
    struct Probe {
        cudaIpcMemHandle_t words{};
        bool there = false;
    };
    std::unique_ptr<void, Free> make_probe(Probe& probe, std::string& obstacle) const {
        void* p = nullptr;
        if (!ipc_ || !obstacle.empty()) return nullptr;
        cudaError_t code = cudaMalloc(&p, 256);
        std::unique_ptr<void, Free> memory(p);
        if (code == cudaSuccess) code = cudaIpcGetMemHandle(&probe.words, p);
        probe.there = code == cudaSuccess;
        if (!probe.there) obstacle = reason("CUDA IPC does not work here", code);
        return memory;
    }

    // The memory of another process in this one; null, and why, when it cannot be opened.
    void* map(const cudaIpcMemHandle_t& words, std::string& obstacle) const {
        check(cudaSetDevice(gpu_), "device");  // the access is this device's
        void* base = nullptr;
        const cudaError_t code = cudaIpcOpenMemHandle(&base, words, cudaIpcMemLazyEnablePeerAccess);
        if (code == cudaSuccess) return base;
        obstacle = reason("cannot open another one's memory", code);
        return nullptr;
    }

    Card my_card() const {
        Card c{};
        machine_id().copy(c.machine, sizeof c.machine - 1);
        check(cudaDeviceGetPCIBusId(c.bus_id, sizeof c.bus_id, gpu_), "bus id");
        c.process = process_number();
        c.gpu = gpu_;
        return c;
    }

    // Why this rank cannot write into the others' memory; empty when it can. Threads of one process
    // get their access here, processes when they open memory.
    std::string no_access(const std::vector<Card>& cards) const {
        for (size_t r = 0; r < size_; ++r) {
            if (int(r) == rank_) continue;
            const Card& c = cards[r];
            if (std::strcmp(c.machine, cards[size_t(rank_)].machine) != 0)
                return concat("ranks ", rank_, " and ", r, " are on different machines");
            int gpu = int(c.gpu), can = 0;
            if (!same_process_[r] && cudaDeviceGetByPCIBusId(&gpu, c.bus_id) != cudaSuccess) {
                cudaGetLastError();  // hidden from this process: open() will tell
                continue;
            }
            cudaError_t code = cudaDeviceCanAccessPeer(&can, gpu_, gpu);
            if (code != cudaSuccess || !can) {
                cudaGetLastError();
                return concat("the GPUs of ranks ", rank_, " and ", r,
                              " cannot access each other's memory");
            }
            if (!same_process_[r]) continue;
            code = cudaDeviceEnablePeerAccess(gpu, 0);
            if (code != cudaSuccess && code != cudaErrorPeerAccessAlreadyEnabled)
                return reason("peer access", code);
            cudaGetLastError();
        }
        return {};
    }

    // One per rank, for the others.
    std::vector<EventCard> make_events(std::string& obstacle) {
        std::vector<EventCard> cards(size_);
        for (EventCard& card : cards) {
            const unsigned flags = cudaEventDisableTiming | (ipc_ ? cudaEventInterprocess : 0);
            cudaError_t code = cudaEventCreateWithFlags(&card.event, flags);
            if (code == cudaSuccess) {
                events_.push_back(card.event);
                if (ipc_) code = cudaIpcGetEventHandle(&card.handle, card.event);
            }
            if (code == cudaSuccess) continue;
            obstacle = reason("CUDA IPC does not work here", code);
            break;
        }
        return cards;
    }

    // all: P events of each rank.
    std::string connect(const std::vector<EventCard>& all) {
        ready_.resize(size_);
        done_.resize(size_);
        for (size_t r = 0; r < size_; ++r) {
            if (int(r) == rank_) continue;
            const EventCard& ready = all[r * size_ + r];
            const EventCard& done = all[r * size_ + size_t(rank_)];
            if (same_process_[r]) {
                ready_[r] = ready.event;
                done_[r] = done.event;
                continue;
            }
            cudaError_t code = cudaIpcOpenEventHandle(&ready_[r], ready.handle);
            if (code == cudaSuccess) code = cudaIpcOpenEventHandle(&done_[r], done.handle);
            if (code != cudaSuccess) return reason("CUDA IPC does not work here", code);
        }
        return {};
    }

    int rank_;
    size_t size_;
    int gpu_;
    decltype(&cuPointerGetAttributes) attributes_ = nullptr;
    bool ipc_ = false;                       // some rank is another process
    std::vector<bool> same_process_;         // by rank
    std::vector<cudaEvent_t> events_;        // mine, by number
    std::vector<cudaEvent_t> ready_, done_;  // the others', by rank: its own number, and mine
    std::vector<Stream> lanes_;
    std::vector<Allocation> exported_;  // newest last
};

}  // namespace

std::unique_ptr<PeerDevice> make_cuda_peers(Comm& host, int gpu) {
    return std::make_unique<CudaPeers>(host, gpu);
}

}  // namespace torus
