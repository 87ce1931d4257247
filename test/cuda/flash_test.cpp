// The Hopper attention kernels by themselves: the deterministic backward, by pairs of blocks too,
// gives the same bits in every run however the blocks fall, softmax parts of very different weight
// merge without overflow, and inputs that the kernels are not made for are refused. Skipped where
// there is no such GPU.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/flash/flash.h"
#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Tensors {
    DeviceValue q, k, v, dout, o, lse, delta, dq, dk, dv;

    Tensors(Gpu& gpu, DType type, int64_t Tq, int64_t Tk, int64_t H, int64_t Hk, int64_t D)
        : q(noise(gpu, type, "q", Tq, H, D)),
          k(noise(gpu, type, "k", Tk, Hk, D)),
          v(noise(gpu, type, "v", Tk, Hk, D)),
          dout(noise(gpu, type, "dout", Tq, H, D)),
          o(gpu, type, {1, Tq, H, D}),
          lse(gpu, DType::f32, {1, H, Tq}),
          delta(gpu, DType::f32, {1, H, Tq}),
          dq(gpu, type, {1, Tq, H, D}),
          dk(gpu, type, {1, Tk, Hk, D}),
          dv(gpu, type, {1, Tk, Hk, D}) {}

    static DeviceValue noise(Gpu& gpu, DType type, const char* name, int64_t T, int64_t H,
                             int64_t D) {
        const Shape shape{1, T, H, D};
        return DeviceValue(gpu, type, shape, random_values(name, shape.numel()));
    }
    Attn forward() const {
        return {.q = q.tensor(),
                .k = k.tensor(),
                .v = v.tensor(),
                .o = o.tensor(),
                .lse = lse.tensor(),
                .first_key = {},
                .q0 = k.tensor().dim(1) - q.tensor().dim(1),
                .scale = 1 / std::sqrt(double(q.tensor().dim(3)))};
    }
    AttnGrad backward() const {
        return {.q = q.tensor(),
                .k = k.tensor(),
                .v = v.tensor(),
                .dout = dout.tensor(),
                .lse = lse.tensor(),
                .delta = delta.tensor(),
                .dq = dq.tensor(),
                .dk = dk.tensor(),
                .dv = dv.tensor(),
                .first_key = {},
                .q0 = k.tensor().dim(1) - q.tensor().dim(1),
                .scale = 1 / std::sqrt(double(q.tensor().dim(3)))};
    }
};

struct Heads {
    int64_t H, Hk, D;
};

void same_every_time(Gpu& gpu, int runs, int64_t Tq, int64_t Tk, const Heads& heads,
                     flash::Blocks blocks = flash::Blocks::single) {
    const auto [H, Hk, D] = heads;
    CAPTURE(int(blocks));
    CAPTURE(Tk);
    CAPTURE(D);
    CAPTURE(Hk);
    const Tensors t(gpu, DType::bf16, Tq, Tk, H, Hk, D);
    gpu.k->attention_forward(gpu.stream, t.forward());
    gpu.k->attention_delta(gpu.stream, t.delta.tensor(), t.dout.tensor(), t.o.tensor());
    const AttnGrad g = t.backward();
    REQUIRE_TRUE(flash::backward_supported(g));
    Buffer scratch(gpu.k->device(), Memory::device,
                   flash::backward_workspace_bytes(1, H, Hk, Tq, Tk, D));
    const auto run = [&] {
        flash::backward(static_cast<cudaStream_t>(gpu.stream.handle), g, scratch.data(),
                        /*deterministic=*/true, blocks);
        return std::vector<std::vector<double>>{t.dq.all(), t.dk.all(), t.dv.all()};
    };
    const auto first = run();
    int different = 0;
    for (int i = 1; i < runs; ++i) {
        const auto again = run();
        for (size_t x = 0; x < 3; ++x) different += !same_bits(again[x], first[x]);
    }
    EXPECT_EQ(different, 0);
}

bool hopper(Gpu& gpu) {
    return flash::forward_supported(Tensors(gpu, DType::bf16, 8, 8, 1, 1, 64).forward());
}

}  // namespace

TEST_CASE("flash: the same gradients in every run") {
    Gpu gpu(DType::bf16);
    if (!hopper(gpu)) return;
    for (int64_t D : {40, 64, 80, 128}) {
        same_every_time(gpu, 250, 515, 515, {4, 2, D});
        same_every_time(gpu, 20, 2600, 2600, {8, 1, D});  // the heads of a group in several units
        same_every_time(gpu, 10, 200, 33000, {1, 1, D});  // sums in fixed point
    }
    same_every_time(gpu, 250, 515, 515, {4, 2, 128}, flash::Blocks::pairs);
    same_every_time(gpu, 20, 2600, 2600, {8, 1, 128}, flash::Blocks::pairs);
    same_every_time(gpu, 20, 200, 33000, {1, 1, 128}, flash::Blocks::pairs);
}

// Several in a row for each block of threads: its warpgroups pass over them at their own pace.
TEST_CASE("flash: many query tiles that see nothing") {
    Gpu gpu(DType::bf16);
    if (!hopper(gpu)) return;
    const int64_t Tq = 640, H = 128, blind = 500;
    for (int64_t D : {64, 128})
        for (int64_t Tk : {640, 4200}) {
            CAPTURE(D);
            CAPTURE(Tk);
            const Tensors t(gpu, DType::bf16, Tq, Tk, H, 1, D);
            Attn a = t.forward();
            a.q0 = 0, a.k0 = blind;
            gpu.k->attention_forward(gpu.stream, a);
            const std::vector<double> o = t.o.all(), lse = t.lse.all();
            int64_t wrong = 0;
            for (int64_t row = 0; row < Tq; ++row)
                for (int64_t h = 0; h < H; ++h) {
                    const double* const from = &o[size_t((row * H + h) * D)];
                    const bool zero = std::all_of(from, from + D, [](double x) { return x == 0; });
                    const bool none = lse[size_t(h * Tq + row)] == -infinity;
                    wrong += zero != (row < blind) || none != (row < blind);
                }
            EXPECT_EQ(wrong, 0);
        }
}

TEST_CASE("flash: parts of very different weight merge") {
    Gpu gpu(DType::bf16);
    if (!hopper(gpu)) return;
    const int64_t Tq = 70, Tk = 300, cut = 130, D = 64;
    const auto k64 = make_cpu_kernels(DType::f64);
    Stream s;
    for (double gap : {0., 88., 92., 1e4, -1e4}) {
        CAPTURE(gap);
        // Queries of ones: a constant added to all coordinates of the later keys moves their
        // scores.
        std::vector<double> ones = constant_values(Tq * D, 1), keys = random_values("k", Tk * D);
        for (int64_t i = cut * D; i < Tk * D; ++i) keys[size_t(i)] += gap / 8;
        keys = rounded(keys, DType::bf16);
        const std::vector<double> values = rounded(random_values("v", Tk * D), DType::bf16);
        Value q(DType::f64, {1, Tq, 1, D}), k(DType::f64, {1, Tk, 1, D}),
            v = k, o = q, lse(DType::f64, {1, 1, Tq});
        q.set_all([](int64_t) { return 1; });
        k.set_all([&](int64_t i) { return keys[size_t(i)]; });
        v.set_all([&](int64_t i) { return values[size_t(i)]; });
        Attn want{.q = q.tensor(),
                  .k = k.tensor(),
                  .v = v.tensor(),
                  .o = o.tensor(),
                  .lse = lse.tensor(),
                  .first_key = {},
                  .scale = 1. / 8,
                  .causal = false};
        k64->attention_forward(s, want);
        const DeviceValue dq(gpu, DType::bf16, {1, Tq, 1, D}, ones),
            dk(gpu, DType::bf16, {1, Tk, 1, D}, keys), dv(gpu, DType::bf16, {1, Tk, 1, D}, values),
            out(gpu, DType::f32, {1, Tq, 1, D}, constant_values(Tq * D, 0)),
            sums(gpu, DType::f32, {1, 1, Tq}, constant_values(Tq, -infinity));
        Buffer scratch(gpu.k->device(), Memory::device, flash::forward_workspace_bytes(1, Tq));
        for (int64_t at : {int64_t(0), cut}) {
            const int64_t count = at == 0 ? cut : Tk - cut;
            const Attn part{.q = dq.tensor(),
                            .k = dk.tensor().slice(1, at, count),
                            .v = dv.tensor().slice(1, at, count),
                            .o = out.tensor(),
                            .lse = sums.tensor(),
                            .first_key = {},
                            .k0 = at,
                            .scale = 1. / 8,
                            .causal = false,
                            .carry = true};
            REQUIRE_TRUE(flash::forward_supported(part));
            flash::forward(static_cast<cudaStream_t>(gpu.stream.handle), part, scratch.data());
        }
        EXPECT(relative_error(out.all(), o.all()) < 4e-3);
        EXPECT(relative_error(sums.all(), lse.all()) < 1e-5);
    }
}

TEST_CASE("flash: what the kernels are not made for is refused") {
    Gpu gpu(DType::bf16);
    if (!hopper(gpu)) return;
    const auto supported = [&](DType type, int64_t D) {
        const Tensors t(gpu, type, 8, 8, 2, 1, D);
        EXPECT_EQ(flash::forward_supported(t.forward()), flash::backward_supported(t.backward()));
        return flash::forward_supported(t.forward());
    };
    for (int64_t D = 8; D <= 96; D += 8) EXPECT(supported(D % 16 ? DType::bf16 : DType::f16, D));
    EXPECT(supported(DType::f16, 128));
    for (int64_t D : {4, 60, 92, 104, 120, 136, 256}) EXPECT(!supported(DType::bf16, D));
    EXPECT(!supported(DType::f32, 64));
    const Tensors t(gpu, DType::bf16, 8, 8, 2, 1, 64);
    Attn a = t.forward();
    a.scale = -1;
    EXPECT(!flash::forward_supported(a));
    a = t.forward();
    a.q.stride[1] += 1;  // rows that do not start at 16 bytes
    EXPECT(!flash::forward_supported(a));
}
