#include "engine/world.h"

#include <cstdio>

namespace torus {

World::World(const LaunchInfo& launch)
    : launch_(launch),  // alone: one thread's communicator, on host memory and without MPI
      owned_(launch.size > 1 ? make_mpi_comm() : std::move(make_thread_comms(1)[0])),
      host_(owned_.get()) {}

World::World(Comm& host) : host_(&host) {
    launch_.rank = launch_.local_rank = host.rank();
    launch_.size = launch_.local_size = host.size();
}

void World::connect(Device& device, bool cuda, Exchange exchange) {
    if (size() == 1) {
        data_ = make_self_comm(device);
    } else if (cuda) {
        data_ = make_nccl_comm(*host_, launch_.local_rank, exchange);
    }
    if (size() > 1) {
        recorder_ = std::make_shared<FlightRecorder>(*host_);
        host_->set_recorder(recorder_);
        data().set_recorder(recorder_);
        watchdog_ = std::make_unique<Watchdog>(recorder_);
    }
}

void World::arrange(const ParallelChoice& choice) {
    choice_ = choice;
    mesh_ = make_mesh(data(), choice.shape);
}

void World::allow(int64_t seconds, const std::string& what) {
    if (!watchdog_ || seconds == 0) return;
    watchdog_->arm(double(seconds), what);
}

int64_t World::sum(int64_t value) {
    host_->all_reduce(host_stream_, Tensor(&value, DType::i64, {1}));
    return value;
}

int64_t World::most(int64_t value) {
    host_->all_reduce(host_stream_, Tensor(&value, DType::i64, {1}), Reduce::max);
    return value;
}

bool World::any(bool value) { return sum(value ? 1 : 0) > 0; }

std::string World::from_first(const std::string& text) {
    std::string out = text;
    out.resize(size_t(sum(first() ? int64_t(text.size()) : 0)));
    if (!out.empty())
        host_->broadcast(host_stream_, Tensor(out.data(), DType::u8, {int64_t(out.size())}), 0);
    return out;
}

void World::barrier() { host_->barrier(host_stream_); }

void World::print(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
}

ParallelRequest parallel_request(const Config& c, const World& world) {
    return parallel_request(c, world.size(), world.local_size());
}

ParallelRequest parallel_request(const Config& c, int world, int ranks_per_machine) {
    // cuDNN's attention takes whole sequences.
    const bool whole = c.attention == AttentionKernels::cudnn && c.parallel_mode == "auto";
    return {.mode = whole ? "data_parallel" : c.parallel_mode,
            .world = world,
            .sp = int(c.sp),
            .ring = int(c.ring),
            .ulysses = int(c.ulysses),
            .ranks_per_machine = ranks_per_machine};
}

bool sums_by_exchange(const Config& c, int world, int ranks_per_machine) {
    return c.exchange == Exchange::copy && ranks_per_machine == world;
}

bool sums_by_exchange(const Config& c, const World& world) {
    return sums_by_exchange(c, world.size(), world.local_size());
}

}  // namespace torus
