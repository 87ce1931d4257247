// What every transport shares: the checks, the record for the watchdog, the count of bytes, and the
// calls that are patterns of others.
#include "comm/comm.h"

#include "comm/watchdog.h"

namespace torus {
namespace {

// Notes a call for as long as it runs.
class Noted {
public:
    Noted(FlightRecorder* r, const char* op, const std::string& comm, int64_t count, DType dtype)
        : recorder_(r) {
        if (recorder_) recorder_->begin(op, comm, count, dtype);
    }
    ~Noted() {
        if (recorder_) recorder_->end();
    }
    Noted(const Noted&) = delete;
    Noted& operator=(const Noted&) = delete;

private:
    FlightRecorder* recorder_;
};

void check_dense(const char* op, const Tensor& t) {
    CHECK(t.contiguous(), ": ", op, " of a tensor with pitch, ", t.shape.str());
}

}  // namespace

void Comm::all_reduce(Stream& s, Tensor x, Reduce op) {
    check_dense("all_reduce", x);
    const Noted noted(recorder_.get(), "all_reduce", name_, x.numel(), x.dtype);
    if (x.numel() == 0) return;
    bytes_sent_ += 2 * x.bytes() / size_ * (size_ - 1);
    do_all_reduce(s, x, op);
}

void Comm::all_gather(Stream& s, Tensor out, Tensor in) {
    check_dense("all_gather", out);
    check_dense("all_gather", in);
    CHECK(out.dtype == in.dtype && out.numel() == in.numel() * size_, ": all_gather of ",
          in.shape.str(), " into ", out.shape.str(), " on ", size_, " ranks");
    const Noted noted(recorder_.get(), "all_gather", name_, in.numel(), in.dtype);
    if (in.numel() == 0) return;
    bytes_sent_ += in.bytes() * (size_ - 1);
    do_all_gather(s, out, in);
}

void Comm::reduce_scatter(Stream& s, Tensor out, Tensor in, Reduce op) {
    check_dense("reduce_scatter", out);
    check_dense("reduce_scatter", in);
    CHECK(out.dtype == in.dtype && in.numel() == out.numel() * size_, ": reduce_scatter of ",
          in.shape.str(), " into ", out.shape.str(), " on ", size_, " ranks");
    const Noted noted(recorder_.get(), "reduce_scatter", name_, out.numel(), out.dtype);
    if (out.numel() == 0) return;
    bytes_sent_ += out.bytes() * (size_ - 1);
    do_reduce_scatter(s, out, in, op);
}

void Comm::broadcast(Stream& s, Tensor x, int root) {
    check_dense("broadcast", x);
    CHECK(root >= 0 && root < size_, ": root ", root, " of ", size_, " ranks");
    const Noted noted(recorder_.get(), "broadcast", name_, x.numel(), x.dtype);
    if (x.numel() == 0) return;
    if (rank_ == root) bytes_sent_ += x.bytes() * (size_ - 1);
    do_broadcast(s, x, root);
}

void Comm::exchange(Stream& s, std::span<const Message> sends, std::span<const Message> recvs) {
    int64_t count = 0;
    for (const auto& list : {sends, recvs})
        for (const Message& m : list) {
            check_dense("exchange", m.data);
            CHECK(m.peer >= 0 && m.peer < size_, ": peer ", m.peer, " of ", size_, " ranks");
        }
    for (const Message& m : sends) {
        count += m.data.numel();
        if (m.peer != rank_) bytes_sent_ += m.data.bytes();
    }
    const Noted noted(recorder_.get(), "exchange", name_, count,
                      sends.empty() ? DType::u8 : sends[0].data.dtype);
    do_exchange(s, sends, recvs);
}

void Comm::all_to_all(Stream& s, Tensor out, std::span<const int64_t> out_counts, Tensor in,
                      std::span<const int64_t> in_counts) {
    CHECK(int(out_counts.size()) == size_ && int(in_counts.size()) == size_,
          ": all_to_all needs one count per rank");
    const auto cut = [&](const Tensor& t, std::span<const int64_t> counts) {
        std::vector<Message> parts;
        const Tensor flat = t.view({t.numel()});
        int64_t begin = 0;
        for (int peer = 0; peer < size_; begin += counts[peer], ++peer)
            parts.push_back({peer, flat.slice(0, begin, counts[peer])});
        return parts;
    };
    exchange(s, cut(in, in_counts), cut(out, out_counts));
}

void Comm::shift(Stream& s, Tensor out, Tensor in, int distance) {
    const auto wrap = [&](int r) { return (r % size_ + size_) % size_; };
    const Message send{wrap(rank_ + distance), in}, recv{wrap(rank_ - distance), out};
    exchange(s, {&send, 1}, {&recv, 1});
}

void Comm::barrier(Stream& s) {
    const Noted noted(recorder_.get(), "barrier", name_, 0, DType::u8);
    do_barrier(s);
}

std::unique_ptr<Comm> Comm::split(int color, int key, const std::string& name) {
    const Noted noted(recorder_.get(), "split", name_, 0, DType::u8);
    std::unique_ptr<Comm> part = do_split(color, key, name);
    part->recorder_ = recorder_;
    return part;
}

}  // namespace torus
