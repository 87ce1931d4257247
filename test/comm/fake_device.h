// A device of host memory that behaves like a GPU in what copies between ranks rely on: streams are
// threads that work behind the host's back, at odd times; memory has to be opened by other ranks,
// processes or threads alike; an event's wait is for the record that is the newest when the wait is
// queued. What must not happen ends in failures().
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/peer_copy.h"

namespace torus {

class FakeDevice final : public PeerDevice {
public:
    // Collective over `host`.
    FakeDevice(Comm& host, uint64_t seed);
    ~FakeDevice() override;
    FakeDevice(const FakeDevice&) = delete;
    FakeDevice& operator=(const FakeDevice&) = delete;

    // With `again`, at the address of the allocation of that address, which is freed.
    char* allocate(int64_t bytes, char* again = nullptr);
    Stream& stream() { return streams_[0]->stream; }
    void later(Stream&, std::function<void()> work);  // queues it
    void fail(const std::string& what);
    std::vector<std::string> failures();
    // How often rank r has marked its buffers as ready by now, this call included; empty: unknown.
    std::vector<int64_t> expected_ready;
    int opens = 0, closes = 0;

    Allocation allocation_of(const void* mine) override;
    char* open(int peer, const Allocation&) override;
    void close(int peer, char* base) noexcept override;
    void copy(Stream&, void* to, const void* from, int64_t bytes) override;
    void record(Stream&, int event) override;
    void wait(Stream&, int rank, int event) override;
    Stream& lane(int number) override;
    void synchronize() override;
    void disconnect() noexcept override { connected_ = false; }

private:
    struct Event {
        std::atomic<int64_t> recorded, reached;
    };
    struct Block {
        int file;
        char* data;
        int64_t bytes;
        uint64_t id;
    };
    struct Worker {
        explicit Worker(uint64_t seed);
        ~Worker();
        void add(std::function<void()> work);
        void drain();
        void run();
        uint64_t seed;
        Stream stream;  // its handle is this
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        bool busy = false, stop = false;
        std::thread thread;
    };
    static Worker& worker(Stream& s) { return *static_cast<Worker*>(s.handle); }
    Event& event(int rank, int number);

    int rank_, size_;
    uint64_t seed_;
    SharedMemory events_;
    std::vector<Block> blocks_, opened_;
    std::vector<int64_t> waits_;  // for other ranks' marks "done"
    uint64_t next_id_ = 1;
    bool connected_ = true;
    std::mutex mutex_;  // of failures_
    std::vector<std::string> failures_;
    std::vector<std::unique_ptr<Worker>> streams_;  // last: their threads end first
};

}  // namespace torus
