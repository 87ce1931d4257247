// --verify-sp passes where ranks compute what one rank does, in every mode, and fails, naming mode,
// mesh and numbers, when one transfer or one rank's share of a sum is lost.
#include "engine/verify_sp.h"

#include <cstring>
#include <functional>

#include "test/comm/ranks.h"
#include "test/test.h"

using namespace torus;

namespace {

// What goes wrong with one call on one rank.
struct Faults {
    std::string group;    // the fault is in this one: "ring", "ulysses", "world"
    bool lose = false;    // of every exchange the last message arrives as zeros
    bool forget = false;  // a sum leaves this rank's share out
};

// A communicator of threads with faults.
class FaultyComm final : public Comm {
public:
    FaultyComm(std::unique_ptr<Comm> inner, const Faults& faults)
        : Comm(inner->rank(), inner->size(), inner->name()),
          owned_(std::move(inner)),
          inner_(*owned_),
          faults_(faults) {}
    FaultyComm(Comm& inner, const Faults& faults)
        : Comm(inner.rank(), inner.size(), inner.name()), inner_(inner), faults_(faults) {}

protected:
    void do_all_reduce(Stream& s, Tensor x, Reduce op) override {
        if (here() && faults_.forget && x.dtype == DType::f64 && x.numel() > 1)
            std::memset(x.data, 0, size_t(x.bytes()));
        inner_.all_reduce(s, x, op);
    }
    void do_all_gather(Stream& s, Tensor out, Tensor in) override { inner_.all_gather(s, out, in); }
    void do_reduce_scatter(Stream& s, Tensor out, Tensor in, Reduce op) override {
        inner_.reduce_scatter(s, out, in, op);
    }
    void do_broadcast(Stream& s, Tensor x, int root) override { inner_.broadcast(s, x, root); }
    void do_exchange(Stream& s, std::span<const Message> sends,
                     std::span<const Message> recvs) override {
        inner_.exchange(s, sends, recvs);
        if (here() && faults_.lose && !recvs.empty())
            std::memset(recvs.back().data.data, 0, size_t(recvs.back().data.bytes()));
    }
    void do_barrier(Stream& s) override { inner_.barrier(s); }
    std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) override {
        return std::make_unique<FaultyComm>(inner_.split(color, key, name), faults_);
    }

private:
    bool here() const { return name() == faults_.group && rank() == size() - 1; }

    std::unique_ptr<Comm> owned_;
    Comm& inner_;
    Faults faults_;
};

Config run_of(const std::string& mode, const std::string& dtype) {
    Config c;
    c.model = "llama:d2x64";
    c.given = {"tokenizer"};  // bytes: a small vocabulary
    c.device = "cpu", c.dtype = dtype;
    c.parallel_mode = mode;
    c.seq_length = 61;
    c.micro_batch_size = 2;
    c.verify_sp = true;
    return c;
}

// The error of --verify-sp on `ranks` ranks, or "" when it passes.
std::string check(const Config& c, int ranks, const Faults& faults = {}) {
    std::string failure;
    try {
        run_ranks(ranks, [&](Comm& comm) {
            FaultyComm faulty(comm, faults);
            World world(faulty);
            const Setup setup = make_setup(c, 0);
            const ModelConfig& m = setup.model;
            world.connect(setup.kernels->device(), false);
            world.arrange(choose_parallel(
                parallel_request(c, world),
                {.B = c.micro_batch_size, .S = c.seq_length, .H = m.H, .Hk = m.Hk, .D = m.D}));
            verify_sp(c, setup, world);
            // Nothing stays behind, and the run's own device never knew.
            EXPECT_EQ(setup.kernels->device().peak(Memory::device), 0);
        });
    } catch (const Error& e) {
        EXPECT_EQ(int(e.code), int(Exit::internal));
        failure = e.what();
    }
    return failure;
}

}  // namespace

TEST_CASE("verify-sp passes in every mode") {
    for (const SeqMode& mode : seq_modes())
        for (const char* dtype : {"fp64", "fp32"}) {
            Config c = run_of(mode.name, dtype);
            EXPECT_EQ(check(c, 2), "");
            c.document_mask = true;
            c.global_batch_tokens = 3 * 2 * 61 * 3;  // accumulates on up to three ranks
            EXPECT_EQ(check(c, 3), "");
        }
}

TEST_CASE("verify-sp fails when a transfer is lost") {
    for (const SeqMode& mode : seq_modes()) {
        if (!mode.ring && !mode.ulysses) continue;
        const std::string group = mode.ring ? "ring" : "ulysses";
        const std::string failure =
            check(run_of(mode.name, "fp64"), 3, {.group = group, .lose = true});
        CAPTURE(failure);
        EXPECT(failure.find(concat("--verify-sp: ", mode.name, " on dp 1 x ")) == 0);
        EXPECT(failure.find("2 x 61 tokens") != std::string::npos);
        EXPECT(failure.find("allowed 1e-10; the ranks do not") != std::string::npos);
        // By more than bf16 is allowed.
        const size_t worst = failure.find("by at most ");
        REQUIRE_TRUE(worst != std::string::npos);
        EXPECT(std::stod(failure.substr(worst + 11)) > 4 * 0x1p-9);
    }
}

TEST_CASE("verify-sp fails when the ranks' gradients do not add up") {
    for (const char* mode : {"data_parallel", "zigzag_ring"}) {
        Config c = run_of(mode, "fp64");
        c.seq_length = 4096;  // of which the check takes few tokens a rank
        const std::string failure = check(c, 2, {.group = "world", .forget = true});
        CAPTURE(failure);
        const bool whole = c.parallel_mode == "data_parallel";
        EXPECT(failure.find(whole ? "2 x 256 tokens" : "2 x 513 tokens") != std::string::npos);
    }
}
