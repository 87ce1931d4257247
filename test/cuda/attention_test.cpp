// Attention on the GPU beyond the table of ops: a sequence cut into blocks of keys that are merged
// in the epilogue (what a ring does) equals the whole, masks of packed documents at lengths that
// cross tiles, and gradients accumulated block by block.
#include <cmath>
#include <limits>

#include "kernels/cuda/cuda_kernels.h"
#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

struct Problem {
    int64_t B, T, H, Hk, D;
    bool causal;
    int64_t document = 0;  // length of the packed documents; 0: no first_key
};

struct Outputs {
    std::vector<double> o, lse, dq, dk, dv;
};

std::vector<double> first_keys(const Problem& p) {
    std::vector<double> first;
    for (int64_t i = 0; i < p.B * p.T; ++i)
        first.push_back(double(i % p.T / p.document * p.document));
    return first;
}

// Forward with the keys in one call, backward too; in fp64 on the CPU.
Outputs exact(const Problem& p, DType type) {
    const auto k = make_cpu_kernels(DType::f64);
    Stream s;
    const auto given = [&](const char* name, int64_t heads) {
        Value v(DType::f64, {p.B, p.T, heads, p.D});
        const std::vector<double> r = rounded(random_values(name, v.size()), type);
        v.set_all([&](int64_t i) { return r[size_t(i)]; });
        return v;
    };
    Value q = given("q", p.H), key = given("k", p.Hk), v = given("v", p.Hk),
          dout = given("dout", p.H), o = q, dq = q, dk = key, dv = key,
          lse(DType::f64, {p.B, p.H, p.T}), delta = lse, first(DType::i32, {p.B, p.T});
    if (p.document) {
        const std::vector<double> f = first_keys(p);
        first.set_all([&](int64_t i) { return f[size_t(i)]; });
    }
    const Tensor mask = p.document ? first.tensor() : Tensor{};
    const double scale = 1 / std::sqrt(double(p.D));
    k->attention_forward(s, {.q = q.tensor(),
                             .k = key.tensor(),
                             .v = v.tensor(),
                             .o = o.tensor(),
                             .lse = lse.tensor(),
                             .first_key = mask,
                             .scale = scale,
                             .causal = p.causal});
    k->attention_delta(s, delta.tensor(), dout.tensor(), o.tensor());
    k->attention_backward(s, {.q = q.tensor(),
                              .k = key.tensor(),
                              .v = v.tensor(),
                              .dout = dout.tensor(),
                              .lse = lse.tensor(),
                              .delta = delta.tensor(),
                              .dq = dq.tensor(),
                              .dk = dk.tensor(),
                              .dv = dv.tensor(),
                              .first_key = mask,
                              .scale = scale,
                              .causal = p.causal});
    return {o.all(), lse.all(), dq.all(), dk.all(), dv.all()};
}

// The same on the GPU with the keys, and then the queries, in blocks.
Outputs in_blocks(const Problem& p, Gpu& gpu, int64_t block) {
    const DType type = gpu.k->precision().act;
    const auto given = [&](const char* name, int64_t heads) {
        const Shape shape{p.B, p.T, heads, p.D};
        return DeviceValue(gpu, type, shape, random_values(name, shape.numel()), 8);
    };
    const auto zero = [&](const Shape& shape, double value = 0) {
        return DeviceValue(gpu, DType::f32, shape, constant_values(shape.numel(), value));
    };
    const DeviceValue q = given("q", p.H), k = given("k", p.Hk), v = given("v", p.Hk),
                      dout = given("dout", p.H);
    const DeviceValue o = zero({p.B, p.T, p.H, p.D}, std::nan("")),  // not to be read
        lse = zero({p.B, p.H, p.T}, -std::numeric_limits<double>::infinity()),
                      delta = zero({p.B, p.H, p.T}), dq = zero({p.B, p.T, p.H, p.D}),
                      dk = zero({p.B, p.T, p.Hk, p.D}), dv = zero({p.B, p.T, p.Hk, p.D});
    const DeviceValue first(gpu, DType::i32, {p.B, p.T},
                            p.document ? first_keys(p) : constant_values(p.B * p.T, 0));
    const Tensor mask = p.document ? first.tensor() : Tensor{};
    const double scale = 1 / std::sqrt(double(p.D));
    const auto rows = [&](const DeviceValue& x, int64_t at) {
        return x.tensor().slice(1, at, std::min(block, p.T - at));
    };
    for (int64_t at = 0; at < p.T; at += block)
        gpu.k->attention_forward(gpu.stream, {.q = q.tensor(),
                                              .k = rows(k, at),
                                              .v = rows(v, at),
                                              .o = o.tensor(),
                                              .lse = lse.tensor(),
                                              .first_key = mask,
                                              .k0 = at,
                                              .scale = scale,
                                              .causal = p.causal,
                                              .carry = true});
    gpu.k->attention_delta(gpu.stream, delta.tensor(), dout.tensor(), o.tensor());
    for (int64_t at = 0; at < p.T; at += block)
        gpu.k->attention_backward(gpu.stream, {.q = q.tensor(),
                                               .k = rows(k, at),
                                               .v = rows(v, at),
                                               .dout = dout.tensor(),
                                               .lse = lse.tensor(),
                                               .delta = delta.tensor(),
                                               .dq = dq.tensor(),
                                               .dk = rows(dk, at),
                                               .dv = rows(dv, at),
                                               .first_key = mask,
                                               .k0 = at,
                                               .scale = scale,
                                               .causal = p.causal,
                                               .add_q = at > 0});
    return {o.all(), lse.all(), dq.all(), dk.all(), dv.all()};
}

void compare(const Problem& p, Gpu& gpu, int64_t block) {
    CAPTURE(p.D);
    CAPTURE(p.T);
    CAPTURE(block);
    const DType type = gpu.k->precision().act;
    const Outputs want = exact(p, type), got = in_blocks(p, gpu, block),
                  again = in_blocks(p, gpu, block);
    const auto check = [&](const char* name, std::vector<double> Outputs::*x, double factor) {
        const double bound = type == DType::f32
                                 ? 1e-5
                                 : factor * relative_error(rounded(want.*x, type), want.*x) + 1e-6;
        const double error = relative_error(got.*x, want.*x);
        INFO(name << ": relative error " << error << ", allowed " << bound);
        EXPECT(error <= bound);
        EXPECT(same_bits(got.*x, again.*x));
    };
    check("o", &Outputs::o, 2);
    check("dq", &Outputs::dq, 3);
    check("dk", &Outputs::dk, 3);
    check("dv", &Outputs::dv, 3);
    EXPECT(relative_error(got.lse, want.lse) < 1e-5);
}

}  // namespace

TEST_CASE("attention in blocks of keys equals the whole") {
    for (DType type : {DType::bf16, DType::f16, DType::f32}) {
        Gpu gpu(type);
        for (bool hopper : {true, false}) {
            if (!hopper && type == DType::f32) continue;
            dynamic_cast<cuda::CudaKernels&>(*gpu.k).use_hopper_attention(hopper);
            CAPTURE(name_of(type));
            CAPTURE(hopper);
            for (int64_t D : {16, 64, 80, 128, 256})
                for (bool causal : {true, false}) {
                    compare({.B = 1, .T = 393, .H = 4, .Hk = 2, .D = D, .causal = causal}, gpu,
                            197);
                    compare({.B = 2,
                             .T = 330,
                             .H = 2,
                             .Hk = 2,
                             .D = D,
                             .causal = causal,
                             .document = 47},
                            gpu, 110);
                }
            compare({.B = 1, .T = 1537, .H = 2, .Hk = 1, .D = 64, .causal = true, .document = 700},
                    gpu, 1537);
        }
    }
}
