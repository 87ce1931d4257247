// Every operation of Comm against its definition, on one rank, on threads and, when this program
// runs under mpirun, on MPI ("mpi:" cases).
#include <cmath>
#include <cstring>
#include <limits>

#include "comm/comm.h"
#include "comm/handshake.h"
#include "comm/launch.h"
#include "comm/mesh.h"
#include "kernels/float16.h"
#include "kernels/kernels.h"
#include "kernels/rng.h"
#include "test/comm/ranks.h"
#include "test/test.h"

namespace torus {
namespace {

// Reports from rank threads: doctest's checks would race in number; one throw per fault is enough.
void must(bool ok, const char* what) { require(ok, Exit::internal, what); }

template <class T>
Tensor tensor_of(std::vector<T>& v, DType t) {
    return Tensor(v.data(), t, {int64_t(v.size())});
}

// Element i of rank r; sums of up to nine ranks are exact in every type.
double value(int r, int64_t i) { return double((i * 7 + r * 5) % 13 - 6); }

template <class T>
struct Codec {
    static T encode(double v) { return T(v); }
    static double decode(T v) { return double(v); }
};
struct Bf16Codec {
    static uint16_t encode(double v) { return float_to_bf16(float(v)); }
    static double decode(uint16_t v) { return double(bf16_to_float(v)); }
};
struct F16Codec {
    static uint16_t encode(double v) { return float_to_f16(float(v)); }
    static double decode(uint16_t v) { return double(f16_to_float(v)); }
};

double reduced(int P, int64_t i, Reduce op) {
    double v = value(0, i);
    for (int r = 1; r < P; ++r) {
        const double w = value(r, i);
        v = op == Reduce::sum ? v + w : op == Reduce::max ? std::fmax(v, w) : std::fmin(v, w);
    }
    return v;
}

template <class T, class C>
void check_reductions(Comm& c, DType type) {
    Stream s;
    const int P = c.size();
    // The longest takes several segments of the staging memory.
    for (const int64_t n : {int64_t(1), int64_t(2), int64_t(7), int64_t(1000),
                            type == DType::f32 ? int64_t(140000) : int64_t(77)})
        for (const Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
            std::vector<T> x(static_cast<size_t>(n)), all(size_t(n * P)),
                mine(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; ++i) x[size_t(i)] = C::encode(value(c.rank(), i));
            c.all_reduce(s, tensor_of(x, type), op);
            for (int64_t i = 0; i < n; ++i)
                must(C::decode(x[size_t(i)]) == reduced(P, i, op), "all_reduce");
            for (int64_t i = 0; i < n * P; ++i) all[size_t(i)] = C::encode(value(c.rank(), i));
            c.reduce_scatter(s, tensor_of(mine, type), tensor_of(all, type), op);
            for (int64_t i = 0; i < n; ++i)
                must(C::decode(mine[size_t(i)]) == reduced(P, c.rank() * n + i, op),
                     "reduce_scatter");
        }
}

void check_moves(Comm& c) {
    Stream s;
    const int P = c.size(), me = c.rank();
    const auto code = [](int from, int to, int64_t i) {
        return int32_t(from * 10000 + to * 100 + i % 97);
    };
    for (const int64_t n : {1, 5, 70000}) {
        std::vector<int32_t> in(static_cast<size_t>(n)), out(size_t(n * P));
        for (int64_t i = 0; i < n; ++i) in[size_t(i)] = code(me, 0, i);
        c.all_gather(s, tensor_of(out, DType::i32), tensor_of(in, DType::i32));
        for (int r = 0; r < P; ++r)
            for (int64_t i = 0; i < n; ++i)
                must(out[size_t(r * n + i)] == code(r, 0, i), "all_gather");
        // In place: my part of the output is the input.
        std::fill(out.begin(), out.end(), -1);
        const Tensor all = tensor_of(out, DType::i32);
        std::copy(in.begin(), in.end(), out.begin() + me * n);
        c.all_gather(s, all, all.slice(0, me * n, n));
        for (int r = 0; r < P; ++r)
            must(out[size_t(r * n)] == code(r, 0, 0), "all_gather in place");
        for (int root = 0; root < P; ++root) {
            for (int64_t i = 0; i < n; ++i) in[size_t(i)] = code(me, 1, i);
            c.broadcast(s, tensor_of(in, DType::i32), root);
            for (int64_t i = 0; i < n; ++i) must(in[size_t(i)] == code(root, 1, i), "broadcast");
        }
        for (const int distance : {1, -1, 2, 0}) {
            std::vector<int32_t> got(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; ++i) in[size_t(i)] = code(me, 2, i);
            c.shift(s, tensor_of(got, DType::i32), tensor_of(in, DType::i32), distance);
            const int from = ((me - distance) % P + P) % P;
            for (int64_t i = 0; i < n; ++i) must(got[size_t(i)] == code(from, 2, i), "shift");
        }
    }
    // Uneven: rank a sends b + (a % 2) elements to rank b, so some messages are empty.
    std::vector<int64_t> to(static_cast<size_t>(P)), from(static_cast<size_t>(P));
    std::vector<int32_t> in, out;
    for (int b = 0; b < P; ++b) {
        to[size_t(b)] = b + me % 2;
        from[size_t(b)] = me + b % 2;
        for (int64_t i = 0; i < to[size_t(b)]; ++i) in.push_back(code(me, b, i));
        out.resize(out.size() + size_t(from[size_t(b)]));
    }
    c.all_to_all(s, tensor_of(out, DType::i32), from, tensor_of(in, DType::i32), to);
    size_t at = 0;
    for (int a = 0; a < P; ++a)
        for (int64_t i = 0; i < from[size_t(a)]; ++i)
            must(out[at++] == code(a, me, i), "all_to_all");
    // Two messages between the same ranks arrive in order; empty ones are passed over.
    std::vector<int32_t> first(3, code(me, 3, 0)), second(2, code(me, 4, 0)), got1(3), got2(2),
        none;
    const int next = (me + 1) % P, last = (me + P - 1) % P;
    const Message sends[] = {{next, tensor_of(first, DType::i32)},
                             {next, tensor_of(none, DType::i32)},
                             {next, tensor_of(second, DType::i32)}};
    const Message recvs[] = {{last, tensor_of(got1, DType::i32)},
                             {last, tensor_of(got2, DType::i32)}};
    c.exchange(s, sends, recvs);
    must(got1[2] == code(last, 3, 0) && got2[1] == code(last, 4, 0), "exchange");
    c.barrier(s);
}

void check_split(Comm& c) {
    Stream s;
    const int P = c.size(), me = c.rank();
    const auto part = c.split(me % 2, -me, "odd or even");  // in reverse order
    const int size = (P + 1 - me % 2) / 2;
    must(part->size() == size && part->rank() == size - 1 - me / 2, "split");
    double sum = me;
    part->all_reduce(s, Tensor(&sum, DType::f64, {1}));
    double want = 0;
    for (int r = me % 2; r < P; r += 2) want += r;
    must(sum == want, "all_reduce of a part");
    check_moves(*part);
}

void check_mesh(Comm& c) {
    const int P = c.size();
    for (int u = 1; u <= P; ++u) {
        if (P % u) continue;
        for (int r = 1; r <= P / u; ++r) {
            if (P / u % r) continue;
            const MeshShape shape{.dp = P / u / r, .ring = r, .ulysses = u};
            const Mesh m = make_mesh(c, shape);
            must(m.ulysses_rank == c.rank() % u && m.ring_rank == c.rank() / u % r &&
                     m.dp_rank == c.rank() / u / r,
                 "coordinates");
            must(m.sp->size() == r * u && m.sp->rank() == m.ring_rank * u + m.ulysses_rank, "sp");
            const Mesh paper = make_plan_mesh(shape, c.rank());
            must(paper.ring->rank() == m.ring->rank() && paper.sp->size() == m.sp->size() &&
                     paper.dp->rank() == m.dp->rank(),
                 "mesh on paper");
            // Neighbours of the ulysses axis are neighbours of the world.
            Stream s;
            std::vector<int32_t> ranks(static_cast<size_t>(u));
            int32_t mine = c.rank();
            m.ulysses->all_gather(s, tensor_of(ranks, DType::i32), Tensor(&mine, DType::i32, {1}));
            for (int i = 0; i < u; ++i)
                must(ranks[size_t(i)] == c.rank() / u * u + i, "neighbours");
        }
    }
}

void check_sum_order(Comm& c) {
    // The sum must be ((x0 + x1) + x2) + ... exactly, on every rank, also where a rank is not
    // first.
    Stream s;
    std::vector<float> x(100000);
    const auto element = [](int r, size_t i) {
        return float(random_normal(3, uint64_t(r), i) * std::pow(10.0, double(i % 7)));
    };
    for (size_t i = 0; i < x.size(); ++i) x[i] = element(c.rank(), i);
    c.all_reduce(s, tensor_of(x, DType::f32));
    for (size_t i = 0; i < x.size(); ++i) {
        float want = element(0, i);
        for (int r = 1; r < c.size(); ++r) want += element(r, i);
        must(x[i] == want, "order of the sum");
    }
    // A NaN of one rank reaches all, whatever the operation.
    for (const Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
        double v = c.rank() == c.size() - 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
        c.all_reduce(s, Tensor(&v, DType::f64, {1}), op);
        must(std::isnan(v), "NaN of one rank");
    }
    // bf16 adds in fp32 and rounds once: 256 + 1 + ... + 1 is not lost step by step.
    uint16_t h = float_to_bf16(c.rank() == 0 ? 256.0f : 1.0f);
    c.all_reduce(s, Tensor(&h, DType::bf16, {1}));
    must(bf16_to_float(h) == bf16_to_float(float_to_bf16(256.0f + float(c.size() - 1))),
         "bf16 sum");
}

void check_handshake(Comm& c) {
    handshake(c, {{"build", "1"}, {"sequence length", "4096"}, {"odd\nkey ", " 3 x"}});
    if (c.size() == 1) return;
    const auto message_of = [&](const Facts& facts) {
        try {
            handshake(c, facts);
        } catch (const Error& e) {
            must(e.code == Exit::mismatch, "exit code");
            return std::string(e.what());
        }
        return std::string();
    };
    const bool odd = c.rank() == c.size() - 1;
    const std::string who = std::to_string(c.size() - 1);
    must(message_of({{"build", "1"}, {"sequence length", odd ? "2048" : "4096"}, {"seed", "1"}})
                 .find("sequence length is 4096 on rank 0 but 2048 on rank " + who) !=
             std::string::npos,
         "value differs");
    must(message_of({{odd ? "data" : "build", "1"}}).find("rank 0 has build where") !=
             std::string::npos,
         "key differs");
    Facts facts{{"build", "1"}};
    if (odd) facts.push_back({"extra", "2"});
    must(message_of(facts).find("extra is there only on rank " + who) != std::string::npos,
         "extra");
}

void check_all(Comm& c) {
    check_reductions<double, Codec<double>>(c, DType::f64);
    check_reductions<float, Codec<float>>(c, DType::f32);
    check_reductions<int64_t, Codec<int64_t>>(c, DType::i64);
    check_reductions<int32_t, Codec<int32_t>>(c, DType::i32);
    check_reductions<uint16_t, Bf16Codec>(c, DType::bf16);
    check_reductions<uint16_t, F16Codec>(c, DType::f16);
    check_moves(c);
    check_split(c);
    check_mesh(c);
    check_sum_order(c);
    check_handshake(c);
}

}  // namespace

TEST_CASE("comm: threads") {
    for (const int P : {1, 2, 3, 4, 9}) run_ranks(P, check_all);
}

TEST_CASE("mpi: every operation") { run_mpi(check_all); }

TEST_CASE("mpi: more bytes than an int counts" * doctest::skip()) {
    run_mpi([](Comm& c) {
        const int64_t n = (int64_t(1) << 31) + 4096;  // untouched pages of in and out cost nothing
        Stream s;
        std::vector<uint8_t> x(c.rank() <= 1 ? size_t(n) : 0);
        const Tensor all = tensor_of(x, DType::u8);
        if (c.rank() == 0) x.front() = x.back() = 7;
        const Message message{1 - c.rank(), all};
        const std::span<const Message> one(&message, 1), none;
        c.exchange(s, c.rank() == 0 ? one : none, c.rank() == 1 ? one : none);
        if (c.rank() == 1) must(x.front() == 7 && x.back() == 7 && x[5] == 0, "long message");
    });
}

TEST_CASE("comm: one rank") {
    const auto kernels = make_cpu_kernels(DType::f64);
    const auto self = make_self_comm(kernels->device());
    check_all(*self);
    EXPECT_EQ(self->bytes_sent(), 0);
}

TEST_CASE("comm: a stopped rank wakes the others") {
    const auto stop_one = [] {
        run_ranks(4, [](Comm& c) {
            const auto part = c.split(c.rank() % 2, 0, "part");
            require(c.rank() != 1, Exit::bad_data, "rank 1 stops");
            Stream s;
            part->barrier(s);
            c.barrier(s);
        });
    };
    try {
        stop_one();
        FAIL_TEST("no error");
    } catch (const Error& e) {
        EXPECT(e.code == Exit::bad_data);  // the cause, not "another rank has stopped"
    }
}

TEST_CASE("comm: threads notice a message of the wrong length") {
    EXPECT_THROWS_AS(
        run_ranks(2,
                  [](Comm& c) {
                      Stream s;
                      std::vector<double> a(4), b(4);
                      const int64_t n = c.rank() == 0 ? 4 : 2;
                      const Message send{1 - c.rank(), Tensor(a.data(), DType::f64, {n})};
                      const Message recv{1 - c.rank(), Tensor(b.data(), DType::f64, {4})};
                      c.exchange(s, {&send, 1}, {&recv, 1});
                  }),
        Error);
}

TEST_CASE("comm: bytes sent are counted") {
    run_ranks(4, [](Comm& c) {
        Stream s;
        std::vector<float> x(1000), all(4000);
        c.all_gather(s, tensor_of(all, DType::f32), tensor_of(x, DType::f32));
        must(c.bytes_sent() == 3 * 4000, "all_gather");
        c.reduce_scatter(s, tensor_of(x, DType::f32), tensor_of(all, DType::f32));
        must(c.bytes_sent() == 6 * 4000, "reduce_scatter");
        c.shift(s, tensor_of(x, DType::f32), tensor_of(x, DType::f32), 0);
        must(c.bytes_sent() == 6 * 4000, "to itself");
        c.all_reduce(s, tensor_of(x, DType::f32));
        must(c.bytes_sent() == 6 * 4000 + 6000, "all_reduce");
    });
}

TEST_CASE("mesh: a shape that is not the world") {
    try {
        run_ranks(4, [](Comm& c) { make_mesh(c, {.ring = 3}); });
        FAIL_TEST("no error");
    } catch (const Error& e) {
        EXPECT(e.code == Exit::usage);
        EXPECT(std::string(e.what()).find("--ranks 3") != std::string::npos);
    }
}

}  // namespace torus
