// Each ring counts the bytes written and read since the start; the writer owns one count, the
// reader the other, and each publishes its own after it has touched the bytes.
#include "comm/mailbox.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace torus {
namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free,
              "atomics are shared between processes");

// The other side is usually a few calls away: looks at once, then lets others run, then sleeps.
constexpr int looks = 4000, yields = 4000;

void pause_thread() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

constexpr int64_t line = 64;  // of the caches

int64_t ring_bytes(int64_t room) { return 2 * line + (room + line - 1) / line * line; }

}  // namespace

// A cache line for each side's count; the bytes follow. Starts as zeros.
struct Mailbox::Ring {
    alignas(line) std::atomic<int64_t> written;
    std::atomic<bool> writer_stopped;
    alignas(line) std::atomic<int64_t> read;

    char* bytes() { return reinterpret_cast<char*>(this) + sizeof(Ring); }
};

Mailbox::Mailbox(Comm& local, int64_t room)
    : rank_(local.rank()),
      size_(local.size()),
      room_(room),
      memory_(local, ring_bytes(room) * local.size() * local.size()) {
    static_assert(sizeof(Ring) == 2 * line);
}

Mailbox::Ring& Mailbox::ring(int from, int to) const {
    const int64_t at = (int64_t(from) * size_ + to) * ring_bytes(room_);
    return *reinterpret_cast<Ring*>(static_cast<char*>(memory_.data()) + at);
}

template <class Ready>
void Mailbox::wait(Ready ready) const {
    for (int64_t i = 0; !ready(); ++i) {
        if (i < looks) {
            pause_thread();
            continue;
        }
        for (int peer = 0; peer < size_; ++peer)
            require(peer == rank_ || !ring(peer, rank_).writer_stopped || ready(), Exit::peer,
                    "another rank has stopped");
        if (i < looks + yields)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void Mailbox::post(int to, const void* data, int64_t bytes) {
    CHECK(bytes <= room_, ": a post of ", bytes, " bytes into ", room_);
    Ring& r = ring(rank_, to);
    const int64_t written = r.written.load(std::memory_order_relaxed);
    wait([&] { return written + bytes - r.read.load(std::memory_order_acquire) <= room_; });
    const int64_t at = written % room_, first = std::min(bytes, room_ - at);
    std::memcpy(r.bytes() + at, data, size_t(first));
    std::memcpy(r.bytes(), static_cast<const char*>(data) + first, size_t(bytes - first));
    r.written.store(written + bytes, std::memory_order_release);
}

void Mailbox::take(int from, void* data, int64_t bytes) {
    CHECK(bytes <= room_, ": ", bytes, " bytes asked of a mailbox that takes ", room_);
    Ring& r = ring(from, rank_);
    const int64_t read = r.read.load(std::memory_order_relaxed);
    wait([&] { return r.written.load(std::memory_order_acquire) - read >= bytes; });
    const int64_t at = read % room_, first = std::min(bytes, room_ - at);
    std::memcpy(data, r.bytes() + at, size_t(first));
    std::memcpy(static_cast<char*>(data) + first, r.bytes(), size_t(bytes - first));
    r.read.store(read + bytes, std::memory_order_release);
}

void Mailbox::stop() noexcept {
    for (int peer = 0; peer < size_; ++peer) ring(rank_, peer).writer_stopped = true;
}

}  // namespace torus
