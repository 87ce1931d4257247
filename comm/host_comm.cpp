// The collectives of host memory. Reductions go in segments, so that the staging memory is bounded
// (256 KiB per rank) whatever the tensor's size.
#include "comm/host_comm.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "kernels/float16.h"

namespace torus {
namespace {

constexpr int64_t segment_bytes = 256 << 10;

template <class T>
struct Plain {
    using Stored = T;
    using Sum = T;
    static Sum load(T v) { return v; }
    static T store(Sum v) { return v; }
};
struct Bf16 {
    using Stored = uint16_t;
    using Sum = float;
    static float load(uint16_t v) { return bf16_to_float(v); }
    static uint16_t store(float v) { return float_to_bf16(v); }
};
struct F16 {
    using Stored = uint16_t;
    using Sum = float;
    static float load(uint16_t v) { return f16_to_float(v); }
    static uint16_t store(float v) { return float_to_f16(v); }
};

// NaN wins over every number, so that one rank's NaN is seen by all.
template <class S>
S combine(S a, S b, Reduce op) {
    if (op == Reduce::sum) return a + b;
    if (a != a) return a;
    if (b != b) return b;
    return op == Reduce::max ? std::max(a, b) : std::min(a, b);
}

template <class F>
void reduce_parts(Tensor out, std::span<const Tensor> parts, Reduce op) {
    using Stored = typename F::Stored;
    Stored* to = out.as<Stored>();
    for (int64_t i = 0; i < out.numel(); ++i) {
        typename F::Sum v = F::load(parts[0].as<Stored>()[i]);
        for (size_t p = 1; p < parts.size(); ++p)
            v = combine(v, F::load(parts[p].as<Stored>()[i]), op);
        to[i] = F::store(v);
    }
}

void copy(const Tensor& to, const Tensor& from) {
    if (to.data != from.data && to.numel() > 0) std::memmove(to.data, from.data, to.bytes());
}

}  // namespace

Tensor HostComm::staging(int part, DType dtype, int64_t count) {
    if (staging_.empty()) staging_.resize(size_t(segment_bytes) * size());
    return Tensor(staging_.data() + part * segment_bytes, dtype, {count});
}

void HostComm::reduce_segment(Tensor out, std::span<const Tensor> parts, Reduce op) {
    switch (out.dtype) {
        case DType::f64: return reduce_parts<Plain<double>>(out, parts, op);
        case DType::f32: return reduce_parts<Plain<float>>(out, parts, op);
        case DType::bf16: return reduce_parts<Bf16>(out, parts, op);
        case DType::f16: return reduce_parts<F16>(out, parts, op);
        case DType::i64: return reduce_parts<Plain<int64_t>>(out, parts, op);
        case DType::i32: return reduce_parts<Plain<int32_t>>(out, parts, op);
        default: CHECK(false, ": reduction of ", name_of(out.dtype));
    }
}

// 1. part p of every rank's segment goes to rank p; 2. each rank reduces its part in rank order.
void HostComm::do_reduce_scatter(Stream&, Tensor out, Tensor in, Reduce op) {
    const int P = size();
    const int64_t n = out.numel(), step = segment_bytes / size_of(in.dtype);
    const Tensor all = in.view({P, n}), mine = out.view({n});
    for (int64_t begin = 0; begin < n; begin += step) {
        const int64_t count = std::min(step, n - begin);
        std::vector<Message> sends, recvs;
        std::vector<Tensor> parts;
        for (int p = 0; p < P; ++p) {
            parts.push_back(staging(p, in.dtype, count));
            const Tensor part = all.rows(p, 1).view({n}).slice(0, begin, count);
            if (p == rank()) {
                copy(parts[p], part);
            } else {
                sends.push_back({p, part});
                recvs.push_back({p, parts[p]});
            }
        }
        transfer(sends, recvs);
        reduce_segment(mine.slice(0, begin, count), parts, op);
    }
}

// Each segment: reduce-scatter its P uneven parts, then gather them, all within x.
void HostComm::do_all_reduce(Stream&, Tensor x, Reduce op) {
    const int P = size();
    const Tensor flat = x.view({x.numel()});
    const int64_t step = segment_bytes / size_of(x.dtype) * P;
    for (int64_t begin = 0; begin < x.numel(); begin += step) {
        const int64_t count = std::min(step, x.numel() - begin);
        const auto part = [&](int p) {
            const int64_t a = count * p / P, b = count * (p + 1) / P;
            return flat.slice(0, begin + a, b - a);
        };
        const Tensor mine = part(rank());
        std::vector<Message> sends, recvs;
        std::vector<Tensor> parts;
        for (int p = 0; p < P; ++p) {
            parts.push_back(staging(p, x.dtype, mine.numel()));
            if (p == rank()) {
                copy(parts[p], mine);
            } else {
                sends.push_back({p, part(p)});
                recvs.push_back({p, parts[p]});
            }
        }
        transfer(sends, recvs);
        reduce_segment(mine, parts, op);
        for (Message& m : sends) m.data = mine;
        for (Message& m : recvs) m.data = part(m.peer);
        transfer(sends, recvs);
    }
}

void HostComm::do_all_gather(Stream&, Tensor out, Tensor in) {
    const Tensor all = out.view({size(), in.numel()});
    std::vector<Message> sends, recvs;
    for (int p = 0; p < size(); ++p) {
        const Tensor part = all.rows(p, 1);
        if (p == rank()) {
            copy(part, in);
        } else {
            sends.push_back({p, in});
            recvs.push_back({p, part});
        }
    }
    transfer(sends, recvs);
}

// A binomial tree: in step k the ranks that have the data (counted from the root) pass it to the
// rank 2^k further on.
void HostComm::do_broadcast(Stream&, Tensor x, int root) {
    const int P = size(), me = (rank() - root + P) % P;
    for (int step = 1; step < P; step *= 2) {
        std::vector<Message> sends, recvs;
        if (me < step && me + step < P) sends.push_back({(me + step + root) % P, x});
        if (me >= step && me < 2 * step) recvs.push_back({(me - step + root) % P, x});
        transfer(sends, recvs);
    }
}

void HostComm::do_exchange(Stream&, std::span<const Message> sends,
                           std::span<const Message> recvs) {
    std::vector<Message> out, in, own;
    for (const Message& m : sends) {
        if (m.data.numel() == 0) continue;
        (m.peer == rank() ? own : out).push_back(m);
    }
    size_t next = 0;
    for (const Message& m : recvs) {
        if (m.data.numel() == 0) continue;
        if (m.peer != rank()) {
            in.push_back(m);
            continue;
        }
        CHECK(next < own.size() && own[next].data.bytes() == m.data.bytes(),
              ": message to itself without an equal receive");
        copy(m.data, own[next++].data);
    }
    CHECK(next == own.size(), ": message to itself that nobody receives");
    transfer(out, in);
}

void HostComm::do_barrier(Stream& s) {
    uint8_t token = 0;
    std::vector<uint8_t> tokens(size());
    do_all_gather(s, Tensor(tokens.data(), DType::u8, {size()}), Tensor(&token, DType::u8, {1}));
}

std::vector<int> HostComm::members_of_split(int color, int key) {
    std::vector<int64_t> mine{color, key}, all(2 * size());
    Stream none;
    do_all_gather(none, Tensor(all.data(), DType::i64, {2 * size()}),
                  Tensor(mine.data(), DType::i64, {2}));
    std::vector<std::pair<int64_t, int>> order;  // key, rank
    for (int r = 0; r < size(); ++r)
        if (all[2 * r] == color) order.push_back({all[2 * r + 1], r});
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (const auto& [_, r] : order) members.push_back(r);
    return members;
}

}  // namespace torus
