// Memory and order of work, one implementation per backend. All memory of a run comes from a few
// Buffers made at the start; `freeze()` then turns any further allocation into an error.
#pragma once
#include <cstdint>
#include <string>
#include <utility>

#include "kernels/tensor.h"

namespace torus {

enum class Memory : uint8_t { host, pinned, device };

// An order of work, with scratch memory that the ops queued on it may use: two ops of one stream
// never overlap, so they share it. On the CPU work is done at the call and `handle` is null.
struct Stream {
    void* handle = nullptr;
    Tensor workspace;  // (bytes) uint8, at least Kernels::workspace_bytes for the largest op
};

struct Event {
    void* handle = nullptr;
};

// Work that was queued once and can be queued again; see Device::begin_recording.
struct Recording {
    void* handle = nullptr;
};

struct Device {
    virtual ~Device() = default;
    virtual std::string name() const = 0;     // "NVIDIA H200", "CPU (2 threads)"
    virtual int64_t total_bytes() const = 0;  // device memory in all
    virtual int64_t free_bytes() const = 0;   // device memory not in use now, by anyone

    // Throws Error(out_of_memory). Memory is not cleared. 256-byte aligned.
    virtual void* allocate(Memory, int64_t bytes) = 0;
    virtual void release(Memory, void*, int64_t bytes) noexcept = 0;

    virtual Stream make_stream(bool high_priority = false) = 0;
    virtual void destroy(Stream&) noexcept = 0;
    virtual Event make_event() = 0;
    virtual void destroy(Event&) noexcept = 0;
    virtual void record(Event&, Stream&) = 0;
    virtual void wait(Stream&, Event&) = 0;                 // work queued later waits for the event
    virtual void synchronize(Event&) = 0;                   // the host waits for the event
    virtual double elapsed_ms(Event& from, Event& to) = 0;  // waits for `to`

    // Any direction between host, pinned and device memory; asynchronous where the hardware allows.
    virtual void copy(Stream&, void* dst, const void* src, int64_t bytes) = 0;
    virtual void set_bytes(Stream&, void* dst, uint8_t value, int64_t bytes) = 0;
    virtual void synchronize(Stream&) = 0;  // throws on any error of the work queued before

    // Where records() is true: what is queued on the stream from begin to end is kept instead of
    // run, and each replay queues all of it with one launch. Addresses and arguments are those of
    // the recording, the contents of memory those of the replay.
    virtual bool records() const { return false; }
    virtual void begin_recording(Stream&) { fail(Exit::internal, name(), " cannot record"); }
    virtual Recording end_recording(Stream&) { fail(Exit::internal, name(), " cannot record"); }
    virtual void replay(Stream&, const Recording&) {
        fail(Exit::internal, name(), " cannot record");
    }
    virtual void destroy(Recording&) noexcept {}

    // For profilers (docs/profiling.md); without one they do nothing. A range names what the host
    // queues between push and pop, "layer 3" with a number; ranges nest. A profiler that waits to
    // be told records from start to stop, both with the device idle.
    virtual void push_range(const char* /*name*/, int64_t /*number*/ = -1) {}
    virtual void pop_range() {}
    virtual void start_profiler() {}
    virtual void stop_profiler() {}

    int64_t allocated(Memory m) const { return in_use_[int(m)]; }
    int64_t peak(Memory m) const { return peak_[int(m)]; }
    void freeze() { frozen_ = true; }  // after the plan: allocate() throws
    void thaw() { frozen_ = false; }

protected:
    void count(Memory m, int64_t bytes) {
        CHECK(!frozen_ || bytes <= 0, ": allocation of ", bytes, " bytes after the plan was laid");
        in_use_[int(m)] += bytes;
        if (in_use_[int(m)] > peak_[int(m)]) peak_[int(m)] = in_use_[int(m)];
    }

private:
    int64_t in_use_[3] = {}, peak_[3] = {};
    bool frozen_ = false;
};

// A range from here to the end of the block.
class ProfileRange {
public:
    explicit ProfileRange(Device& device, const char* name, int64_t number = -1) : device_(device) {
        device_.push_range(name, number);
    }
    ~ProfileRange() { device_.pop_range(); }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;

private:
    Device& device_;
};

// Owns one allocation.
class Buffer {
public:
    Buffer() = default;
    Buffer(Device& device, Memory memory, int64_t bytes)
        : device_(&device),
          memory_(memory),
          bytes_(bytes),
          data_(bytes ? device.allocate(memory, bytes) : nullptr) {}
    Buffer(Buffer&& o) noexcept { swap(o); }
    Buffer& operator=(Buffer&& o) noexcept {
        swap(o);
        return *this;
    }
    ~Buffer() {
        if (data_) device_->release(memory_, data_, bytes_);
    }
    void* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

private:
    void swap(Buffer& o) noexcept {
        std::swap(device_, o.device_);
        std::swap(memory_, o.memory_);
        std::swap(bytes_, o.bytes_);
        std::swap(data_, o.data_);
    }
    Device* device_ = nullptr;
    Memory memory_ = Memory::host;
    int64_t bytes_ = 0;
    void* data_ = nullptr;
};

}  // namespace torus
