// Comm: a group of ranks and the ways they exchange tensors. One interface, four transports: one
// rank alone, threads of one process, MPI on host memory, NCCL on device memory. Every call is
// collective: all ranks of the group make the same calls in the same order. Work is queued on the
// stream where the transport is asynchronous (NCCL, copies), done at the call where it is not.
// Results are the same bits on every rank and in every run: reductions add in a fixed order.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tensor.h"

namespace torus {

class FlightRecorder;

enum class Reduce : uint8_t { sum, max, min };

// What moves the bytes of Comm::exchange between GPUs: NCCL's kernels, which take multiprocessors
// from what runs beside them, or the copy engines, between GPUs of one machine only. automatic: the
// copy engines where the world's GPUs can write into each other's memory, else NCCL.
enum class Exchange : uint8_t { automatic, nccl, copy };

// One message of an exchange; the data is contiguous. Empty messages are not sent, and must be
// empty on both sides. Messages between the same two ranks match in the order of the lists.
struct Message {
    int peer;
    Tensor data;
};

class Comm {
public:
    virtual ~Comm() = default;
    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& name() const { return name_; }   // "world", "ring", ... for messages
    int64_t bytes_sent() const { return bytes_sent_; }  // to other ranks, since the start
    // Whether exchange() leaves the multiprocessors alone.
    virtual bool by_copy_engines() const { return false; }

    // x = reduction over ranks of x. Types: fp64 fp32 bf16 fp16 (these two sum in fp32), i64, i32.
    void all_reduce(Stream&, Tensor x, Reduce op = Reduce::sum);
    // out (P*n) = the ranks' in (n), in rank order; in may be my part of out.
    void all_gather(Stream&, Tensor out, Tensor in);
    // out (n) = my part of the reduction of in (P*n); out may be my part of in.
    void reduce_scatter(Stream&, Tensor out, Tensor in, Reduce op = Reduce::sum);
    void broadcast(Stream&, Tensor x, int root);
    // Any pattern of point-to-point messages as one call; my own messages to myself are copied.
    void exchange(Stream&, std::span<const Message> sends, std::span<const Message> recvs);
    // in and out (n) cut into P consecutive parts of these many elements, one per rank.
    void all_to_all(Stream&, Tensor out, std::span<const int64_t> out_counts, Tensor in,
                    std::span<const int64_t> in_counts);
    // in goes to the rank `distance` further on, out comes from the one as far back (mod P).
    void shift(Stream&, Tensor out, Tensor in, int distance = 1);
    // Waits until every rank has come here and the stream's work of each is done.
    void barrier(Stream&);
    // Ranks with the same color form a group, ordered by key, then by rank.
    std::unique_ptr<Comm> split(int color, int key, const std::string& name);

    // Where calls are noted for the watchdog; inherited by split(). May be null.
    void set_recorder(std::shared_ptr<FlightRecorder> recorder) { recorder_ = recorder; }

protected:
    Comm(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

    virtual void do_all_reduce(Stream&, Tensor x, Reduce) = 0;
    virtual void do_all_gather(Stream&, Tensor out, Tensor in) = 0;
    virtual void do_reduce_scatter(Stream&, Tensor out, Tensor in, Reduce) = 0;
    virtual void do_broadcast(Stream&, Tensor x, int root) = 0;
    virtual void do_exchange(Stream&, std::span<const Message> sends,
                             std::span<const Message> recvs) = 0;
    virtual void do_barrier(Stream&) = 0;
    virtual std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) = 0;

private:
    int rank_, size_;
    std::string name_;
    int64_t bytes_sent_ = 0;
    std::shared_ptr<FlightRecorder> recorder_;
};

// One rank. Memory of any kind that `device` can copy.
std::unique_ptr<Comm> make_self_comm(Device& device);

// P ranks that are threads of this process, on host memory: element r is for thread r. When a rank
// stops with an exception its thread must call break_off(), so that the others throw, not wait.
// With `device`, exchange() moves that device's memory: one GPU plays all the ranks of an
// attention.
std::vector<std::unique_ptr<Comm>> make_thread_comms(int P, Device* device = nullptr);
void break_off(Comm& thread_comm);

// Ranks without a transport, to plan bytes for any rank of any world: every exchange throws.
std::unique_ptr<Comm> make_plan_comm(int rank, int size);

// The ranks that mpirun or srun started, on host memory; starts MPI at the first call and ends it
// with the last communicator. Throws Error(usage) in a build without MPI.
std::unique_ptr<Comm> make_mpi_comm();

// The ranks of `host` on GPU `gpu` of this machine, one GPU each, through NCCL. `host` must outlive
// it: it carries the barriers and the splits. Throws Error(usage) in a build without NCCL, and with
// Exchange::copy where the ranks' GPUs cannot write into each other's memory; when the world spans
// machines, that is found at the first exchange of a group that does. With it the host waits in
// exchange() until the ranks that it sends to and receives from are there, too.
std::unique_ptr<Comm> make_nccl_comm(Comm& host, int gpu, Exchange = Exchange::automatic);

// Ends this process and, under mpirun, every other rank of the job, without waiting for any of
// them.
[[noreturn]] void exit_all_ranks(Exit code);

}  // namespace torus
