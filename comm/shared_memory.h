// Memory that ranks of one machine share, processes or threads. It has no name once all have it, so
// nothing is left behind whatever happens.
#pragma once
#include <cstdint>

#include "comm/comm.h"

namespace torus {

class SharedMemory {
public:
    // Collective over `local`, whose ranks are on one machine. The bytes are zero. Where they
    // cannot be shared (no shm_open, /dev/shm is full, ranks of several containers) each rank gets
    // memory of its own and shared() is false, on all ranks alike. Throws Error(out_of_memory).
    SharedMemory(Comm& local, int64_t bytes);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    void* data() const { return data_; }
    bool shared() const { return shared_; }

private:
    void* data_ = nullptr;
    int64_t bytes_;
    bool shared_ = false;
};

}  // namespace torus
