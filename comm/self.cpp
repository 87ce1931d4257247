// One rank alone (every exchange is a copy to itself, on whatever memory the device has), and ranks
// that exist only on paper.
#include "comm/comm.h"

namespace torus {
namespace {

class SelfComm final : public Comm {
public:
    explicit SelfComm(Device& device, std::string name = "self")
        : Comm(0, 1, std::move(name)), device_(device) {}

protected:
    void do_all_reduce(Stream&, Tensor, Reduce) override {}
    void do_all_gather(Stream& s, Tensor out, Tensor in) override { copy(s, out, in); }
    void do_reduce_scatter(Stream& s, Tensor out, Tensor in, Reduce) override { copy(s, out, in); }
    void do_broadcast(Stream&, Tensor, int) override {}
    void do_exchange(Stream& s, std::span<const Message> sends,
                     std::span<const Message> recvs) override {
        size_t at = 0;
        const auto next = [&] {  // the next message that is not empty
            while (at < sends.size() && sends[at].data.numel() == 0) ++at;
            return at < sends.size() ? &sends[at++] : nullptr;
        };
        for (const Message& m : recvs) {
            if (m.data.numel() == 0) continue;
            const Message* from = next();
            CHECK(from, ": receive of ", m.data.shape.str(), " that nobody sends");
            copy(s, m.data, from->data);
        }
        CHECK(!next(), ": message to itself that nobody receives");
    }
    void do_barrier(Stream& s) override { device_.synchronize(s); }
    std::unique_ptr<Comm> do_split(int, int, const std::string& name) override {
        return std::make_unique<SelfComm>(device_, name);
    }

private:
    void copy(Stream& s, const Tensor& to, const Tensor& from) {
        CHECK(to.bytes() == from.bytes(), ": receive of ", to.shape.str(), ", sent ",
              from.shape.str());
        if (to.data != from.data && to.bytes() > 0) device_.copy(s, to.data, from.data, to.bytes());
    }
    Device& device_;
};

class PlanComm final : public Comm {
public:
    PlanComm(int rank, int size) : Comm(rank, size, "plan") {}

protected:
    void do_all_reduce(Stream&, Tensor, Reduce) override { refuse(); }
    void do_all_gather(Stream&, Tensor, Tensor) override { refuse(); }
    void do_reduce_scatter(Stream&, Tensor, Tensor, Reduce) override { refuse(); }
    void do_broadcast(Stream&, Tensor, int) override { refuse(); }
    void do_exchange(Stream&, std::span<const Message>, std::span<const Message>) override {
        refuse();
    }
    void do_barrier(Stream&) override { refuse(); }
    std::unique_ptr<Comm> do_split(int, int, const std::string&) override { refuse(); }

private:
    [[noreturn]] static void refuse() {
        fail(Exit::internal, "exchange on a communicator that is for planning only");
    }
};

}  // namespace

std::unique_ptr<Comm> make_self_comm(Device& device) { return std::make_unique<SelfComm>(device); }

std::unique_ptr<Comm> make_plan_comm(int rank, int size) {
    CHECK(rank >= 0 && rank < size, ": rank ", rank, " of ", size);
    return std::make_unique<PlanComm>(rank, size);
}

}  // namespace torus
