// The watchdog owns hangs: neither MPI nor NCCL notices a rank that has stopped or that skipped a
// call. Every rank notes its collectives in a FlightRecorder, whose newest entry all ranks of one
// machine can read; a thread looks at the deadline that the trainer set for the step, and when it
// has passed prints who is where, names the ranks that lag, and ends the job with exit code 76.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"
#include "comm/shared_memory.h"

namespace torus {

// What one rank is doing, in memory that the ranks of a machine share. Plain bytes and atomics.
struct FlightSlot {
    std::atomic<uint64_t> begun, ended;  // collectives, counted over all groups of the rank
    std::atomic<int64_t> alive_ms;       // monotonic clock of the last sign of life
    std::atomic<int64_t> count;
    std::atomic<int> rank, dtype;
    char op[24], comm[24];
};

class FlightRecorder {
public:
    // Collective over `host`, whose ranks of one machine then share a board.
    explicit FlightRecorder(Comm& host);

    void begin(const char* op, const std::string& comm, int64_t count, DType dtype);
    void end();
    void sign_of_life();

    // One line per rank of this machine, and the ranks that lag behind or have stopped.
    std::string report(std::vector<int>* missing) const;

private:
    std::unique_ptr<SharedMemory> board_;
    FlightSlot* slots_ = nullptr;  // on it, by rank of this machine
    int local_size_ = 1, local_rank_ = 0;
    int world_size_ = 1;
};

class Watchdog {
public:
    // Called in the watchdog's thread with the report when a deadline has passed; the default
    // prints it and ends the job with exit code 76.
    using Alarm = std::function<void(const std::string& report)>;
    explicit Watchdog(std::shared_ptr<FlightRecorder> recorder, Alarm alarm = {});
    ~Watchdog();

    // From now on `what` (for example "step 12") has this many seconds; replaces the last deadline.
    void arm(double seconds, const std::string& what);
    void disarm();

private:
    void watch();

    std::shared_ptr<FlightRecorder> recorder_;
    Alarm alarm_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool stop_ = false;
    int64_t deadline_ms_ = -1;  // on the monotonic clock; -1: none
    double seconds_ = 0;
    std::string what_;
    std::thread thread_;
};

}  // namespace torus
