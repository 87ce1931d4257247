// HostComm: every collective on host memory, written as numbered steps over one verb, `transfer`.
// A transport (threads, MPI) supplies that verb and nothing else. A reduction is computed by one
// rank, adding in rank order, and handed to the others: equal bits on all ranks, in every run.
#pragma once
#include "comm/comm.h"

namespace torus {

class HostComm : public Comm {
protected:
    using Comm::Comm;

    // Sends and receives these messages, none to or from this rank itself, and returns when the
    // receives are complete and the sent memory may change.
    virtual void transfer(std::span<const Message> sends, std::span<const Message> recvs) = 0;

    void do_all_reduce(Stream&, Tensor x, Reduce) override;
    void do_all_gather(Stream&, Tensor out, Tensor in) override;
    void do_reduce_scatter(Stream&, Tensor out, Tensor in, Reduce) override;
    void do_broadcast(Stream&, Tensor x, int root) override;
    void do_exchange(Stream&, std::span<const Message> sends,
                     std::span<const Message> recvs) override;
    void do_barrier(Stream&) override;

    // Where this rank's part of a split stands: the old ranks of my color, in their new order.
    std::vector<int> members_of_split(int color, int key);

private:
    Tensor staging(int part, DType, int64_t count);
    void reduce_segment(Tensor out, std::span<const Tensor> parts, Reduce op);

    std::vector<uint8_t> staging_;  // one segment per rank, made at the first reduction
};

}  // namespace torus
