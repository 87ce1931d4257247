// World: this process among the ranks of the run. Control decisions (how many targets are valid,
// stop, save failed) are taken together over the host communicator; tensors travel over `data`.
#pragma once
#include <memory>
#include <string>

#include "comm/handshake.h"
#include "comm/launch.h"
#include "comm/mesh.h"
#include "comm/seq.h"
#include "comm/watchdog.h"
#include "engine/config.h"

namespace torus {

class World {
public:
    // The ranks that the launcher started; alone when there was none.
    explicit World(const LaunchInfo&);
    // For tests: a rank of a communicator that exists already, such as a thread's.
    explicit World(Comm& host);

    int rank() const { return host_->rank(); }
    int size() const { return host_->size(); }
    bool first() const { return rank() == 0; }  // the rank that prints, logs and saves
    int local_rank() const { return launch_.local_rank; }
    int local_size() const { return launch_.local_size; }

    // Data travels from now on between GPUs, or through host memory when `device` is the CPU.
    void connect(Device& device, bool cuda, Exchange exchange = Exchange::automatic);
    // Cuts the world into dp x ring x ulysses for this shape of attention.
    void arrange(const ParallelChoice&);

    Comm& data() { return data_ ? *data_ : *host_; }
    Mesh& mesh() { return mesh_; }
    const ParallelChoice& choice() const { return choice_; }
    int64_t dp() const { return mesh_.shape.dp; }
    int64_t dp_rank() const { return mesh_.dp_rank; }

    // From now on `what` may take this many seconds on every rank; then the watchdog ends the run
    // with exit code 76, naming the ranks that lag. Nothing on one rank or with 0 seconds.
    void allow(int64_t seconds, const std::string& what);

    // Over all ranks, on the host. Collective.
    int64_t sum(int64_t value);
    int64_t most(int64_t value);
    bool any(bool value);
    std::string from_first(const std::string& text);  // rank 0's text
    void barrier();
    void agree(const Facts& facts) { handshake(*host_, facts); }

    // A line on the console of rank 0.
    template <class... Args>
    void say(const Args&... args) const {
        if (first()) print(concat(args...));
    }

private:
    static void print(const std::string& line);

    LaunchInfo launch_;
    std::unique_ptr<Comm> owned_, data_;
    Comm* host_;
    std::shared_ptr<FlightRecorder> recorder_;
    std::unique_ptr<Watchdog> watchdog_;
    Stream host_stream_;  // host transports queue nothing
    ParallelChoice choice_;
    Mesh mesh_;
};

// What --parallel-mode, --sp, --ring and --ulysses ask of `world` ranks.
ParallelRequest parallel_request(const Config&, int world, int ranks_per_machine);
ParallelRequest parallel_request(const Config&, const World&);

// Whether gradients are summed by exchanges and additions: with --exchange copy, when all ranks are
// on one machine. Over several the groups that share sequences may still exchange by copies.
bool sums_by_exchange(const Config&, int world, int ranks_per_machine);
bool sums_by_exchange(const Config&, const World&);

}  // namespace torus
