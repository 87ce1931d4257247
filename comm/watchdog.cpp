// Where the board cannot be shared each rank keeps its own, and a report then names only itself.
// The process is ended with _Exit: aborting a communicator can itself hang.
#include "comm/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "comm/launch.h"

namespace torus {
namespace {

constexpr int64_t life_period_ms = 500, lifeless_ms = 5000;

int64_t now_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void copy_text(char (&to)[24], const std::string& from) {
    std::strncpy(to, from.c_str(), sizeof to - 1);
}

// The same number on the ranks of one machine.
int machine_color(Comm& host) {
    char id[64] = "";
    machine_id().copy(id, sizeof id - 1);
    std::vector<char> all(sizeof id * size_t(host.size()));
    Stream none;
    host.all_gather(none, Tensor(all.data(), DType::u8, {int64_t(all.size())}),
                    Tensor(id, DType::u8, {sizeof id}));
    int color = 0;
    while (std::strcmp(&all[sizeof id * size_t(color)], id) != 0) ++color;
    return color;
}

}  // namespace

FlightRecorder::FlightRecorder(Comm& host) : world_size_(host.size()) {
    const auto local = host.split(machine_color(host), host.rank(), "machine");
    local_size_ = local->size();
    local_rank_ = local->rank();
    board_ =
        std::make_unique<SharedMemory>(*local, int64_t(sizeof(FlightSlot)) * int64_t(local_size_));
    slots_ = static_cast<FlightSlot*>(board_->data());
    slots_[local_rank_].rank = host.rank();
    sign_of_life();
    Stream none;
    local->barrier(none);
}

void FlightRecorder::begin(const char* op, const std::string& comm, int64_t count, DType dtype) {
    FlightSlot& me = slots_[local_rank_];
    copy_text(me.op, op);
    copy_text(me.comm, comm);
    me.count = count;
    me.dtype = int(dtype);
    ++me.begun;
}

void FlightRecorder::end() {
    FlightSlot& me = slots_[local_rank_];
    me.ended = me.begun.load();
}

void FlightRecorder::sign_of_life() { slots_[local_rank_].alive_ms = now_ms(); }

std::string FlightRecorder::report(std::vector<int>* missing) const {
    uint64_t furthest = 0;
    for (int i = 0; i < local_size_; ++i) furthest = std::max(furthest, slots_[i].begun.load());
    std::ostringstream out;
    for (int i = 0; i < local_size_; ++i) {
        const FlightSlot& s = slots_[i];
        const int64_t silent = now_ms() - s.alive_ms;
        const bool running = s.begun != s.ended;
        out << "  rank " << s.rank << ": " << (running ? "in" : "after") << " collective "
            << s.begun << ", " << s.op << " of " << s.count << " " << name_of(DType(s.dtype.load()))
            << " on " << s.comm;
        if (s.begun < furthest) out << ", behind by " << furthest - s.begun;
        if (silent > lifeless_ms) out << ", no sign of life for " << silent / 1000 << " s";
        out << "\n";
        if (missing && (s.begun < furthest || silent > lifeless_ms)) missing->push_back(s.rank);
    }
    if (local_size_ < world_size_)
        out << "  (" << world_size_ - local_size_ << " ranks on other machines report there)\n";
    return out.str();
}

Watchdog::Watchdog(std::shared_ptr<FlightRecorder> recorder, Alarm alarm)
    : recorder_(std::move(recorder)), alarm_(std::move(alarm)) {
    if (!alarm_)
        alarm_ = [](const std::string& report) {
            std::fputs(report.c_str(), stderr);
            std::fflush(stderr);
            std::_Exit(int(Exit::peer));
        };
    thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Watchdog::arm(double seconds, const std::string& what) {
    const std::lock_guard lock(mutex_);
    seconds_ = seconds;
    what_ = what;
    deadline_ms_ = now_ms() + int64_t(seconds * 1000);
    changed_.notify_all();
}

void Watchdog::disarm() {
    const std::lock_guard lock(mutex_);
    deadline_ms_ = -1;
}

void Watchdog::watch() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
        recorder_->sign_of_life();
        const int64_t left = deadline_ms_ < 0 ? life_period_ms : deadline_ms_ - now_ms();
        if (left > 0) {
            changed_.wait_for(lock, std::chrono::milliseconds(std::min(left, life_period_ms)));
            continue;
        }
        deadline_ms_ = -1;
        std::vector<int> missing;
        const std::string lines = recorder_->report(&missing);
        std::ostringstream out;
        out << "torus: " << what_ << " did not end within " << seconds_ << " s; ";
        if (missing.empty()) {
            out << "all ranks of this machine are at the same call";
        } else {
            out << "waiting for rank";
            for (int r : missing) out << " " << r;
        }
        out << "\n" << lines;
        lock.unlock();
        alarm_(out.str());
        lock.lock();
    }
}

}  // namespace torus
