#include "test/comm/fake_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/rng.h"

namespace torus {
namespace {

constexpr auto patience = std::chrono::seconds(20);  // of a stream that waits for an event

// What another rank opens: the file of anonymous memory as its owner's process has it.
struct Words {
    int64_t process, file, bytes;
};

char* map(int file, int64_t bytes, char* at = nullptr) {
    const int flags = MAP_SHARED | (at ? MAP_FIXED : 0);
    void* p = mmap(at, size_t(bytes), PROT_READ | PROT_WRITE, flags, file, 0);
    require(p != MAP_FAILED, Exit::internal, "mmap of ", bytes, " bytes");
    return static_cast<char*>(p);
}

}  // namespace

// --- streams ------------------------------------------------------------------------------------

FakeDevice::Worker::Worker(uint64_t s) : seed(s), thread([this] { run(); }) {
    stream.handle = this;
}

FakeDevice::Worker::~Worker() {
    {
        const std::lock_guard lock(mutex);
        stop = true;
    }
    changed.notify_all();
    thread.join();
}

void FakeDevice::Worker::add(std::function<void()> f) {
    const std::lock_guard lock(mutex);
    work.push_back(std::move(f));
    changed.notify_all();
}

void FakeDevice::Worker::drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return work.empty() && !busy; });
}

// Every fourth piece of work starts late.
void FakeDevice::Worker::run() {
    std::unique_lock lock(mutex);
    for (uint64_t n = 0;; ++n) {
        changed.wait(lock, [&] { return stop || !work.empty(); });
        if (work.empty()) return;
        const auto f = std::move(work.front());
        work.pop_front();
        busy = true;
        lock.unlock();
        const double late = random_uniform(seed, 0, n);
        if (late < 0.25) std::this_thread::sleep_for(std::chrono::microseconds(int(1200 * late)));
        f();
        lock.lock();
        busy = false;
        changed.notify_all();
    }
}

FakeDevice::FakeDevice(Comm& host, uint64_t seed)
    : rank_(host.rank()),
      size_(host.size()),
      seed_(seed),
      events_(host, int64_t(sizeof(Event)) * size_ * size_),
      waits_(size_t(size_), 0) {
    require(events_.shared(), Exit::internal, "no shared memory for the test");
    lane(0);
}

FakeDevice::~FakeDevice() {
    for (const auto& s : streams_) s->drain();
    for (const Block& b : opened_) munmap(b.data, size_t(b.bytes));
    for (const Block& b : blocks_) {
        munmap(b.data, size_t(b.bytes));
        ::close(b.file);
    }
}

void FakeDevice::later(Stream& s, std::function<void()> work) { worker(s).add(std::move(work)); }

Stream& FakeDevice::lane(int number) {
    while (int(streams_.size()) <= number)
        streams_.push_back(std::make_unique<Worker>(100 * seed_ + streams_.size()));
    return streams_[size_t(number)]->stream;
}

void FakeDevice::synchronize() {
    for (const auto& s : streams_) s->drain();
}

void FakeDevice::copy(Stream& s, void* to, const void* from, int64_t bytes) {
    later(s, [=] {  // in two halves, so that a reader that does not wait finds the first one
        const int64_t half = bytes / 2;
        std::memcpy(to, from, size_t(half));
        std::this_thread::yield();
        std::memcpy(static_cast<char*>(to) + half, static_cast<const char*>(from) + half,
                    size_t(bytes - half));
    });
}

// --- events -------------------------------------------------------------------------------------

FakeDevice::Event& FakeDevice::event(int rank, int number) {
    return static_cast<Event*>(events_.data())[rank * size_ + number];
}

void FakeDevice::record(Stream& s, int number) {
    Event& e = event(rank_, number);
    const int64_t record = ++e.recorded;
    later(s, [&e, record] { e.reached = std::max(record, e.reached.load()); });
}

void FakeDevice::wait(Stream& s, int rank, int number) {
    Event& e = event(rank, number);
    const int64_t record = e.recorded;
    if (!connected_) fail("a wait after the end");
    if (rank != rank_) {
        if (number != rank && number != rank_) fail("a wait for what concerns others");
        if (number == rank_ && record != ++waits_[size_t(rank)])
            fail("a mark was made again before this rank had waited for it");
        if (number == rank && !expected_ready.empty() && record != expected_ready[size_t(rank)])
            fail(concat("waits for mark ", record, " of rank ", rank, ", not ",
                        expected_ready[size_t(rank)]));
    }
    later(s, [&e, record, this] {
        const auto start = std::chrono::steady_clock::now();
        while (e.reached < record) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - start < patience) continue;
            return fail("a stream waits forever");
        }
    });
}

// --- memory -------------------------------------------------------------------------------------

char* FakeDevice::allocate(int64_t bytes, char* again) {
    if (again) {
        const auto old = std::find_if(blocks_.begin(), blocks_.end(),
                                      [&](const Block& b) { return b.data == again; });
        require(old != blocks_.end() && old->bytes == bytes, Exit::internal, "no such block");
        ::close(old->file);
        blocks_.erase(old);
    }
    const int file = memfd_create("torus-test", 0);
    require(file >= 0 && ftruncate(file, bytes) == 0, Exit::internal, "memfd_create");
    blocks_.push_back({file, map(file, bytes, again), bytes, next_id_++});
    return blocks_.back().data;
}

PeerDevice::Allocation FakeDevice::allocation_of(const void* mine) {
    const char* p = static_cast<const char*>(mine);
    for (const Block& b : blocks_) {
        if (p < b.data || p >= b.data + b.bytes) continue;
        Allocation a{.id = b.id, .base = b.data, .bytes = b.bytes, .words = {}};
        const Words words{getpid(), b.file, b.bytes};
        std::memcpy(a.words.data(), &words, sizeof words);
        return a;
    }
    torus::fail(Exit::internal, "not memory of the device");
}

char* FakeDevice::open(int, const Allocation& a) {
    Words words{};
    std::memcpy(&words, a.words.data(), sizeof words);
    const int file =
        ::open(concat("/proc/", words.process, "/fd/", words.file).c_str(), O_RDWR | O_CLOEXEC);
    require(file >= 0, Exit::peer, "another rank has gone with its memory");
    opened_.push_back({-1, map(file, words.bytes), words.bytes, 0});
    ::close(file);
    ++opens;
    return opened_.back().data;
}

void FakeDevice::close(int, char* base) noexcept {
    const auto at = std::find_if(opened_.begin(), opened_.end(),
                                 [&](const Block& b) { return b.data == base; });
    if (at == opened_.end()) return fail("closes what is not open");
    munmap(at->data, size_t(at->bytes));
    opened_.erase(at);
    ++closes;
}

void FakeDevice::fail(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (failures_.size() < 20) failures_.push_back(concat("rank ", rank_, ": ", what));
}

std::vector<std::string> FakeDevice::failures() {
    const std::lock_guard lock(mutex_);
    return failures_;
}

}  // namespace torus
