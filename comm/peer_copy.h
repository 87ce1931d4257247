// PeerCopy: exchange() between GPUs of one machine by their copy engines, so that the
// multiprocessors stay with attention. Senders write straight into the receivers' memory:
//   1. a receiver marks on its stream that its buffers may be written, and posts where they lie
//   2. a sender's stream waits for that mark, copies, and marks that it is done
//   3. the receiver's stream waits for the second mark
// Marks are events that the ranks share, posts go through a Mailbox. Only hosts wait for each
// other's posts, and hosts run ahead of their GPUs, so a stream sees what it would see with NCCL.
// No mark is made again before those who wait for its last time have queued that: a rank marks
// "ready" in its next exchange, which it enters when every sender's "done" has been posted, after
// that sender's wait; and it marks "done" for a peer when it has taken the peer's next post, made
// after the peer's wait.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "comm/comm.h"
#include "comm/mailbox.h"

namespace torus {

// What the protocol asks of a rank's device. Events: each rank has one per rank of the group,
// numbered 0 to P - 1, that the others can wait for.
class PeerDevice {
public:
    // An allocation in words for other ranks. Two with the same id are the same memory: an address
    // that was freed and given out again has another id.
    struct Allocation {
        uint64_t id;
        char* base;  // in its own process
        int64_t bytes;
        std::array<unsigned char, 64> words;
        bool holds(const void* p) const { return p >= base && p < base + bytes; }
    };
    virtual ~PeerDevice() = default;
    virtual Allocation allocation_of(const void* mine) = 0;  // the one that holds this address
    virtual char* open(int peer, const Allocation&) = 0;     // where its base lies for this rank
    virtual void close(int peer, char* base) noexcept = 0;   // of open(); nothing may be queued
    virtual void copy(Stream&, void* to, const void* from, int64_t bytes) = 0;
    virtual void record(Stream&, int event) = 0;
    virtual void wait(Stream&, int rank, int event) = 0;  // for the newest record at this call
    // Further streams, for copies beside each other; made when first asked for.
    virtual Stream& lane(int number) = 0;
    // The host waits until nothing is queued on the device.
    virtual void synchronize() = 0;
    // Gives up what other ranks own, when nothing is queued and before any of them is destroyed.
    virtual void disconnect() noexcept = 0;
};

class PeerCopy {
public:
    // Collective over `host`, a communicator of its own for the group. Throws Error(usage) on every
    // rank when the ranks share no memory.
    PeerCopy(std::unique_ptr<Comm> host, std::unique_ptr<PeerDevice> device);
    // Collective, too, unless an error is on its way up; waits for the device.
    ~PeerCopy();
    PeerCopy(const PeerCopy&) = delete;
    PeerCopy& operator=(const PeerCopy&) = delete;

    // As Comm::exchange, but for messages to itself, which it passes over. Throws Error(internal)
    // when sends and receives of two ranks do not match, naming both, and Error(peer) when another
    // rank of the group has met an error here.
    void exchange(Stream&, std::span<const Message> sends, std::span<const Message> recvs);

private:
    struct Piece;
    struct Opened {  // memory of a peer
        PeerDevice::Allocation allocation;
        char* base;  // for this rank
        int64_t last_call;
    };
    void run(Stream&, std::span<const Message> sends, std::span<const Message> recvs);
    void post_places(int to, std::span<const Message> recvs);
    std::vector<char*> take_places(int from, std::span<const Message> sends);
    char* opened(int peer, const PeerDevice::Allocation&);
    std::vector<Opened>::iterator close(int peer, std::vector<Opened>::iterator);
    void send(Stream&, int to, std::span<const Message>);

    std::unique_ptr<Comm> host_;
    std::unique_ptr<PeerDevice> device_;
    Mailbox mailbox_;
    int rank_, size_;
    int64_t call_ = 0;
    std::vector<std::vector<Opened>> opened_;  // by peer
};

// Throws Error(usage) on every rank, with the reason of the first that has one. Collective.
void agree_that_copies_work(Comm& host, const std::string& obstacle);

// The ranks of `host` on their GPUs, through CUDA IPC between processes and peer access between
// threads of one. Collective; throws as above. In builds with NCCL only.
std::unique_ptr<PeerDevice> make_cuda_peers(Comm& host, int gpu);

}  // namespace torus
