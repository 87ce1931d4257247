// Ranks as threads of one process: the tests run whole grids of layouts without starting a process,
// and one GPU can play many ranks. A transfer is a meeting, where all ranks lay out what they send,
// and a parting: each copies what is for it, and nobody leaves before all have copied.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>

#include "comm/host_comm.h"

namespace torus {
namespace {

// Shared by all groups of a world, so that a rank that stops wakes everyone wherever they wait.
struct Hall {
    std::mutex mutex;
    std::condition_variable moved;
    bool broken = false;
};

struct Group {
    Group(std::shared_ptr<Hall> hall, int size, Device* device)
        : hall(std::move(hall)), size(size), device(device), sends(size_t(size)) {}

    // Throws when a rank has stopped.
    void meet() {
        std::unique_lock lock(hall->mutex);
        require(!hall->broken, Exit::peer, "another rank has stopped");
        const uint64_t round = arrive();
        hall->moved.wait(lock, [&] { return rounds != round || hall->broken; });
        require(rounds != round, Exit::peer, "another rank has stopped");
    }
    // After a meeting: all who were there come here, too, before any of them goes on, because until
    // then they read each other's memory.
    void part() {
        std::unique_lock lock(hall->mutex);
        const uint64_t round = arrive();
        hall->moved.wait(lock, [&] { return rounds != round; });
    }

    std::shared_ptr<Hall> hall;
    int size;
    Device* device;  // null: exchanges are of host memory
    int arrived = 0;
    uint64_t rounds = 0;
    std::vector<std::span<const Message>> sends;  // what each rank has laid out

private:
    uint64_t arrive() {
        const uint64_t round = rounds;
        if (++arrived == size) {
            arrived = 0;
            ++rounds;
            hall->moved.notify_all();
        }
        return round;
    }
};

class ThreadComm final : public HostComm {
public:
    ThreadComm(std::shared_ptr<Group> group, int rank, std::string name)
        : HostComm(rank, group->size, std::move(name)), group_(std::move(group)) {}

    void break_off() {
        const std::lock_guard lock(group_->hall->mutex);
        group_->hall->broken = true;
        group_->hall->moved.notify_all();
    }

protected:
    void do_exchange(Stream& s, std::span<const Message> sends,
                     std::span<const Message> recvs) override {
        if (!group_->device) return HostComm::do_exchange(s, sends, recvs);
        for (const Message& m : sends) CHECK(m.peer != rank(), ": message to itself on a device");
        stream_ = &s;
        group_->device->synchronize(s);  // what is sent is written
        HostComm::do_exchange(s, sends, recvs);
        stream_ = nullptr;
    }

    void transfer(std::span<const Message> sends, std::span<const Message> recvs) override {
        group_->sends[size_t(rank())] = sends;
        group_->meet();
        std::exception_ptr error;
        try {
            take(recvs);
        } catch (const Error&) {
            error = std::current_exception();
        }
        group_->part();
        if (error) std::rethrow_exception(error);
    }

    std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) override {
        const std::vector<int> members = members_of_split(color, key);
        const int lead = members[0];
        // The lead makes the group; the others copy its pointer while it waits at the meeting.
        std::shared_ptr<Group> group;
        if (lead == rank())
            group = std::make_shared<Group>(group_->hall, int(members.size()), group_->device);
        auto* mine = &group;
        std::vector<std::shared_ptr<Group>*> all(size_t(size()), nullptr);
        static_assert(sizeof(mine) == sizeof(int64_t));
        Stream none;
        do_all_gather(none, Tensor(all.data(), DType::i64, {size()}),
                      Tensor(&mine, DType::i64, {1}));
        if (lead != rank()) group = *all[size_t(lead)];
        group_->part();
        const auto at = std::find(members.begin(), members.end(), rank());
        return std::make_unique<ThreadComm>(group, int(at - members.begin()), name);
    }

private:
    // Copies what the others have laid out for this rank.
    void take(std::span<const Message> recvs) {
        std::vector<size_t> next(size_t(size()), 0);
        for (const Message& m : recvs) {
            const auto from = group_->sends[size_t(m.peer)];
            size_t& i = next[size_t(m.peer)];
            while (i < from.size() && from[i].peer != rank()) ++i;
            CHECK(i < from.size(), ": rank ", rank(), " waits for a message that rank ", m.peer,
                  " does not send");
            CHECK(from[i].data.bytes() == m.data.bytes(), ": rank ", m.peer, " sends ",
                  from[i].data.shape.str(), ", rank ", rank(), " expects ", m.data.shape.str());
            copy(m.data, from[i++].data);
        }
        for (int peer = 0; peer < size(); ++peer) {
            const auto from = group_->sends[size_t(peer)];
            for (size_t i = next[size_t(peer)]; i < from.size(); ++i)
                CHECK(from[i].peer != rank(), ": rank ", rank(), " leaves a message of rank ",
                      peer);
        }
        if (stream_) group_->device->synchronize(*stream_);
    }

    void copy(const Tensor& to, const Tensor& from) {
        if (stream_) {
            group_->device->copy(*stream_, to.data, from.data, to.bytes());
        } else {
            std::memcpy(to.data, from.data, size_t(to.bytes()));
        }
    }

    std::shared_ptr<Group> group_;
    Stream* stream_ = nullptr;  // of an exchange on a device, while it runs
};

}  // namespace

std::vector<std::unique_ptr<Comm>> make_thread_comms(int P, Device* device) {
    const auto group = std::make_shared<Group>(std::make_shared<Hall>(), P, device);
    std::vector<std::unique_ptr<Comm>> comms;
    for (int r = 0; r < P; ++r) comms.push_back(std::make_unique<ThreadComm>(group, r, "world"));
    return comms;
}

void break_off(Comm& comm) {
    auto* mine = dynamic_cast<ThreadComm*>(&comm);
    CHECK(mine, ": not a communicator of threads");
    mine->break_off();
}

}  // namespace torus
