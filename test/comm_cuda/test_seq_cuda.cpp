// Sequence parallelism on GPUs. One GPU plays P ranks (threads of this process, each with its own
// stream): the orchestration, the views and the kernels' running sums are those of a real run.
// On two GPUs, threads of this process or ranks of mpirun, the "nccl:" cases run the same over
// NCCL, with its exchange and with the copy engines'.
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>

#include "comm/exchange_sum.h"
#include "test/comm/ranks.h"
#include "test/comm/seq_case.h"
#include "test/test.h"

namespace torus {
namespace {

constexpr Documents all_documents[] = {Documents::none, Documents::at_edges, Documents::scattered,
                                       Documents::unannounced};

// Relative L2 error of dq, dk, dv over all ranks; o and lse are covered by `worst`.
struct Errors {
    double gradients = 0, worst = 0;
};
Errors errors_on_one_gpu(const SeqCase& c, const WholeAttention& whole, DType dtype) {
    std::mutex mutex;
    SquareSums sums;
    Errors e;
    const auto device = make_cuda_kernels(dtype, 0);
    run_ranks(
        c.shape.size(),
        [&](Comm& world) {
            const auto kernels = make_cuda_kernels(dtype, 0);
            const RankResult r = run_rank(world, c, whole, *kernels);
            const std::lock_guard lock(mutex);
            const SquareSums mine = gradient_error(r, whole);
            sums.error += mine.error;
            sums.norm += mine.norm;
            e.worst = std::max(e.worst, largest_error(r, whole));
        },
        &device->device());
    e.gradients = std::sqrt(sums.error / sums.norm);
    return e;
}

// f(host, gpu) on each rank.
template <class F>
void run_gpus(F f) {
    if (!launch_info().launcher.empty())
        return run_mpi([&](Comm& host) { f(host, launch_info().local_rank); });
    try {
        make_cuda_kernels(DType::f32, 1);
    } catch (const Error&) {
        MESSAGE("one GPU only: nothing to do");
        return;
    }
    run_ranks(2, [&](Comm& host) { f(host, host.rank()); });
}

// f(world) for each transport of exchange(); says so where GPUs cannot write into each other.
template <class F>
void each_exchange(Comm& host, int gpu, F f) {
    for (const Exchange by : {Exchange::nccl, Exchange::copy}) {
        std::unique_ptr<Comm> world;
        try {
            world = make_nccl_comm(host, gpu, by);
        } catch (const Error& e) {
            if (by == Exchange::nccl || e.code != Exit::usage) throw;
            std::printf("rank %d: not tested: %s\n", host.rank(), e.what());
            continue;
        }
        f(*world);
    }
}

}  // namespace

TEST_CASE("one GPU plays the ranks: fp32, every mode, many shapes") {
    int cases = 0;
    for (const int P : {2, 3, 4, 8})
        for (const int64_t S : {int64_t(1), int64_t(P + 1), int64_t(97)})
            for (const auto& [H, Hk] : {std::pair(4, 4), std::pair(6, 3), std::pair(7, 1)})
                for (const SeqMode& mode : seq_modes())
                    for (const MeshShape& shape : shapes_for(mode, P)) {
                        const Documents documents = all_documents[size_t(cases++) % 4];
                        const WholeAttention whole = make_whole({2, S, H, Hk, 8}, documents, P);
                        const bool announce = documents != Documents::unannounced;
                        const int slices = slices_for(shape, Hk).back();
                        const Errors e = errors_on_one_gpu(
                            {mode.name, shape, announce, nullptr, slices}, whole, DType::f32);
                        CAPTURE(mode.name);
                        CAPTURE(shape.str());
                        CAPTURE(S);
                        CAPTURE(H);
                        EXPECT(e.worst < 2e-5);
                    }
    MESSAGE(cases, " cases");
}

TEST_CASE("one GPU plays the ranks: the bf16 error does not grow with their number") {
    for (const int64_t D : {64, 128}) {
        const WholeAttention whole =
            make_whole({1, 1024, 8, 8, D}, Documents::none, 1, 1, DType::bf16);
        const double plain =
            errors_on_one_gpu({"data_parallel", {}, true}, whole, DType::bf16).gradients;
        EXPECT(plain > 1e-4);
        for (const SeqMode& mode : seq_modes()) {
            if (!mode.ring && !mode.ulysses) continue;
            double error[2] = {};
            for (const int i : {0, 1}) {
                const int P = i ? 8 : 2;
                const MeshShape shape = shapes_for(mode, P).front();
                error[i] =
                    errors_on_one_gpu({mode.name, shape, true}, whole, DType::bf16).gradients;
            }
            CAPTURE(mode.name);
            CAPTURE(plain);
            CAPTURE(error[0]);
            CAPTURE(error[1]);
            EXPECT(error[0] <= 1.2 * plain);
            EXPECT(error[1] <= 1.2 * error[0]);
        }
    }
}

// On each rank's GPU: sums of whole numbers, with additions in vectors of 16 bytes and without.
static void check_sums(Kernels& kernels, Comm& world) {
    Device& device = kernels.device();
    Stream s = device.make_stream();
    const int P = world.size();
    for (const int64_t n : {1, 5, 4096, 100003}) {
        std::vector<float> x(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) x[size_t(i)] = float(i % 1000 + world.rank());
        const int64_t room = 5000 * (P - 1);  // less than the longest needs at once
        const Buffer memory(device, Memory::device, (n + room) * 4);
        const Tensor sum(memory.data(), DType::f32, {n});
        const Tensor others(sum.as<float>() + n, DType::f32, {room});
        for (int round = 0; round < 3; ++round) {  // nobody waits between them
            device.copy(s, sum.data, x.data(), sum.bytes());
            sum_by_exchange(kernels, s, world, sum, others);
        }
        std::vector<float> got(x.size());
        device.copy(s, got.data(), sum.data, sum.bytes());
        device.synchronize(s);
        for (int64_t i = 0; i < n; ++i)
            require(got[size_t(i)] == float(P * (i % 1000) + P * (P - 1) / 2), Exit::internal,
                    "sum ", i, " of ", n, " is ", got[size_t(i)]);
    }
    world.barrier(s);
    device.destroy(s);
}

TEST_CASE("one GPU plays the ranks: sums by exchanges") {
    const auto device = make_cuda_kernels(DType::f32, 0);
    for (const int P : {2, 3, 8})
        run_ranks(
            P,
            [&](Comm& world) {
                const auto kernels = make_cuda_kernels(DType::f32, 0);
                check_sums(*kernels, world);
            },
            &device->device());
}

TEST_CASE("nccl: sums by exchanges") {
    run_gpus([](Comm& host, int gpu) {
        const auto kernels = make_cuda_kernels(DType::f32, gpu);
        each_exchange(host, gpu, [&](Comm& world) { check_sums(*kernels, world); });
    });
}

TEST_CASE("nccl: every operation of exchange and reduction") {
    run_gpus([](Comm& host, int gpu) {
        const auto kernels = make_cuda_kernels(DType::f32, gpu);
        Device& device = kernels->device();
        each_exchange(host, gpu, [&](Comm& world) {
            Stream s = device.make_stream();
            const int P = world.size(), me = world.rank();
            const int64_t n = 1000;
            const Buffer memory(device, Memory::device, (P + 1) * n * 4);
            const Tensor all(memory.data(), DType::f32, {P * n});
            const Tensor one(static_cast<float*>(memory.data()) + P * n, DType::f32, {n});
            std::vector<float> host_values(size_t(P * n));
            const auto look = [&](const Tensor& t) {
                device.copy(s, host_values.data(), t.data, t.bytes());
                device.synchronize(s);
                return host_values;
            };
            kernels->fill(s, one, me + 1);
            world.all_gather(s, all, one);
            const auto gathered = look(all);
            for (int r = 0; r < P; ++r)
                require(gathered[size_t(r * n + n - 1)] == float(r + 1), Exit::internal,
                        "all_gather");
            world.reduce_scatter(s, one, all);
            require(look(one)[5] == float(P * (me + 1)), Exit::internal, "reduce_scatter");
            world.all_reduce(s, one, Reduce::max);
            require(look(one)[7] == float(P * P), Exit::internal, "all_reduce");
            kernels->fill(s, one, me);
            world.shift(s, all.slice(0, 0, n), one, 1);
            require(look(all)[3] == float((me + P - 1) % P), Exit::internal, "shift");
            world.broadcast(s, one, P - 1);
            require(look(one)[0] == float(P - 1), Exit::internal, "broadcast");
            const auto part = world.split(me % 2, me, "part");
            kernels->fill(s, one, 1);
            part->all_reduce(s, one);
            require(look(one)[0] == float(part->size()), Exit::internal, "split");
            world.barrier(s);
            device.destroy(s);
        });
    });
}

// The host never waits: what is sent is overwritten right after each exchange, and what came is
// added up before the next one overwrites it.
TEST_CASE("nccl: exchanges in a row keep the order of the streams") {
    run_gpus([](Comm& host, int gpu) {
        const auto kernels = make_cuda_kernels(DType::f32, gpu);
        Device& device = kernels->device();
        each_exchange(host, gpu, [&](Comm& world) {
            const int P = world.size(), me = world.rank(), calls = 200;
            Stream s = device.make_stream();
            for (const int64_t n : {int64_t(3), int64_t(1) << 14, int64_t(1) << 22}) {
                // New memory for each length: addresses may return.
                const Buffer memory(device, Memory::device, 4 * (2 * P + 1) * n);
                const Tensor all(memory.data(), DType::f32, {2 * P + 1, n});
                const auto row = [&](int i) { return all.rows(i, 1).view({n}); };
                const Tensor sum = row(2 * P);
                kernels->fill(s, all.view({(2 * P + 1) * n}), 0);
                for (int call = 0; call < calls; ++call) {
                    std::vector<Message> sends, recvs;
                    for (int peer = 0; peer < P; ++peer) {
                        if (peer == me) continue;
                        const int64_t half = n / 2;  // two messages, the second a little longer
                        kernels->fill(s, row(peer), call % 7 + 1);
                        for (const auto& [at, count] :
                             {std::pair(int64_t(0), half), {half, n - half}}) {
                            sends.push_back({peer, row(peer).slice(0, at, count)});
                            recvs.push_back({peer, row(P + peer).slice(0, at, count)});
                        }
                    }
                    world.exchange(s, sends, recvs);
                    for (int peer = 0; peer < P; ++peer) {
                        if (peer == me) continue;
                        kernels->fill(s, row(peer), -1000);
                        kernels->add(s, sum, sum, row(P + peer));
                        kernels->fill(s, row(P + peer), -1000);
                    }
                }
                float want = 0;
                for (int call = 0; call < calls; ++call) want += float(call % 7 + 1);
                std::vector<float> got(static_cast<size_t>(n));
                device.copy(s, got.data(), sum.data, sum.bytes());
                device.synchronize(s);
                for (int64_t i = 0; i < n; ++i)
                    require(got[size_t(i)] == want * float(P - 1), Exit::internal, "element ", i,
                            " of ", n, ": ", got[size_t(i)], ", not ", want * float(P - 1));
                world.barrier(s);
            }
            device.destroy(s);
        });
    });
}

TEST_CASE("nccl: every mode equals one rank") {
    run_gpus([](Comm& host, int gpu) {
        each_exchange(host, gpu, [&](Comm& world) {
            const int P = host.size();
            int cases = 0;
            constexpr std::pair<int64_t, int64_t> heads[] = {{4, 4}, {6, 3}, {3, 1}};
            std::map<std::string, Mesh> meshes;  // NCCL takes long to make a group
            for (const DType dtype : {DType::f32, DType::bf16}) {
                const auto kernels = make_cuda_kernels(dtype, gpu);
                for (const int64_t S : {int64_t(1), int64_t(97), int64_t(500)})
                    for (const SeqMode& mode : seq_modes())
                        for (const MeshShape& shape : shapes_for(mode, P)) {
                            const Documents documents =
                                cases % 2 ? Documents::none : Documents::scattered;
                            const auto [H, Hk] = heads[size_t(cases++) % 3];
                            const WholeAttention whole =
                                make_whole({2, S, H, Hk, 64}, documents, P, 1, dtype);
                            const int slices = slices_for(shape, Hk).back();
                            if (!meshes.count(shape.str()))
                                meshes.emplace(shape.str(), make_mesh(world, shape));
                            const RankResult r = run_rank(meshes.at(shape.str()),
                                                          {mode.name, shape, true, nullptr, slices},
                                                          whole, *kernels);
                            const double worst = largest_error(r, whole);
                            require(worst < (dtype == DType::f32 ? 5e-5 : 0.1), Exit::internal,
                                    mode.name, " on ", shape.str(), ", ", name_of(dtype), ", ", S,
                                    " tokens, ", H, " heads: error ", worst);
                        }
            }
            if (host.rank() == 0) MESSAGE(cases, " cases");
        });
    });
}

}  // namespace torus
