// Rates of the CPU ops at the shapes of a small GPT, next to two ceilings that the program measures
// itself: a large copy (bytes read and written) and a large matrix product. A share above 100 %
// means that the op's tensors stay in the caches.
//
//   bench_cpu_ops [substring of op names]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "bench/help.h"
#include "kernels/kernels.h"
#include "kernels/layout.h"
#include "kernels/rng.h"

using namespace torus;

namespace {

// Milliseconds of one call: the fastest of several runs of at least 20 ms each.
double time_ms(const std::function<void()>& f) {
    using Clock = std::chrono::steady_clock;
    f();
    double best = 1e30;
    int calls = 1;
    for (int run = 0; run < 7;) {
        const auto start = Clock::now();
        for (int i = 0; i < calls; ++i) f();
        const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
        if (ms < 20 && calls < 1 << 20) {
            calls *= 2;
            continue;
        }
        best = std::min(best, ms / calls);
        ++run;
    }
    return best;
}

// Tensors filled with random numbers, kept until the end.
class Pool {
public:
    explicit Pool(Kernels& k) : k_(k) {}
    Tensor floats(const Shape& shape, double size = 1) {
        const Tensor t = make(k_.precision().act, shape);
        for (int64_t i = 0; i < t.numel(); ++i)
            t.as<float>()[i] =
                float(size * (2 * random_uniform(1, buffers_.size(), uint64_t(i)) - 1));
        return t;
    }
    Tensor indices(int64_t n, int64_t limit) {
        const Tensor t = make(DType::i32, {n});
        for (int64_t i = 0; i < n; ++i)
            t.as<int32_t>()[i] = int32_t(random_bits(2, buffers_.size(), uint64_t(i)) % limit);
        return t;
    }
    Tensor make(DType type, const Shape& shape) {
        buffers_.emplace_back(k_.device(), Memory::device, shape.numel() * size_of(type));
        k_.device().set_bytes(stream_, buffers_.back().data(), 0, buffers_.back().bytes());
        return Tensor(buffers_.back().data(), type, shape);
    }

private:
    Kernels& k_;
    Stream stream_;
    std::vector<Buffer> buffers_;
};

class Table {
public:
    Table(std::string only, double copy_gbs, double gemm_gflops)
        : only_(std::move(only)), copy_gbs_(copy_gbs), gemm_gflops_(gemm_gflops) {
        std::printf("%-31s %-20s %9s %16s %14s\n", "op", "shape", "ms", "rate", "of ceiling");
    }
    void bytes(const char* op, const Shape& shape, double bytes, const std::function<void()>& f) {
        row(op, shape, bytes, "GB/s", copy_gbs_, f);
    }
    void flops(const char* op, const Shape& shape, double flops, const std::function<void()>& f) {
        row(op, shape, flops, "GFLOP/s", gemm_gflops_, f);
    }

private:
    void row(const char* op, const Shape& shape, double work, const char* unit, double ceiling,
             const std::function<void()>& f) {
        if (!std::strstr(op, only_.c_str())) return;
        const double ms = time_ms(f), rate = work / ms / 1e6;
        std::printf("%-31s %-20s %9.3f %8.1f %-7s %6.0f %% %s\n", op, shape.str().c_str(), ms, rate,
                    unit, 100 * rate / ceiling, unit[1] == 'B' ? "copy" : "gemm");
        std::fflush(stdout);
    }
    std::string only_;
    double copy_gbs_, gemm_gflops_;
};

// B sequences of T tokens; the numbers of the quickstart's kind of model.
struct Sizes {
    int64_t B = 8, T = 256, C = 384, H = 6, Hk = 6, V = 4096, F = 1536;
    int64_t N() const { return B * T; }
    int64_t D() const { return C / H; }
};

void bench_tokenwise(Kernels& k, Table& table, const Sizes& z) {
    Stream s;
    Pool p(k);
    const int64_t N = z.N(), C = z.C, V = z.V, F = z.F;
    const double f = 4;  // bytes of a float
    Tensor x = p.floats({N, C}), y = p.floats({N, C}), w = p.floats({C}), b = p.floats({C});
    Tensor mean = p.floats({N}), rstd = p.floats({N}), dw = p.floats({C}), db = p.floats({C});
    Tensor wte = p.floats({V, C}), ids = p.indices(N, V), wide = p.floats({N, F}, 3);
    Tensor wide2 = p.floats({N, F}, 3), gate_up = p.floats({N, 2 * F}, 3);
    Tensor dgate_up = p.floats({N, 2 * F});
    const double nc = double(N * C) * f, nf = double(N * F) * f;
    table.bytes("add", x.shape, 3 * nc, [&] { k.add(s, y, x, y); });
    table.bytes("embedding_forward", x.shape, 2 * nc,
                [&] { k.embedding_forward(s, y, ids, wte, {}, {}); });
    table.bytes("embedding_backward", x.shape, 3 * nc,
                [&] { k.embedding_backward(s, wte, {}, y, ids, {}); });
    table.bytes("layernorm_forward", x.shape, 2 * nc,
                [&] { k.layernorm_forward(s, y, mean, rstd, x, w, b, 1e-5); });
    table.bytes("layernorm_backward", x.shape, 4 * nc,
                [&] { k.layernorm_backward(s, y, dw, db, y, x, w, mean, rstd); });
    table.bytes("rmsnorm_forward", x.shape, 2 * nc,
                [&] { k.rmsnorm_forward(s, y, rstd, x, w, 1e-5); });
    table.bytes("rmsnorm_backward", x.shape, 4 * nc,
                [&] { k.rmsnorm_backward(s, y, dw, y, x, w, rstd); });
    table.bytes("gelu_forward", wide.shape, 2 * nf, [&] { k.gelu_forward(s, wide2, wide); });
    table.bytes("gelu_backward", wide.shape, 3 * nf,
                [&] { k.gelu_backward(s, wide2, wide2, wide); });
    table.bytes("swiglu_forward", wide.shape, 3 * nf, [&] { k.swiglu_forward(s, wide2, gate_up); });
    table.bytes("swiglu_backward", wide.shape, 5 * nf,
                [&] { k.swiglu_backward(s, dgate_up, wide, gate_up); });
    Tensor heads = x.view({N, z.H, z.D()}), angles = p.floats({z.T, z.D() / 2, 2});
    // Turns that keep lengths: by other pairs of numbers some elements would become subnormal in
    // the course of the repetitions, and slow.
    for (int64_t i = 0; i < angles.numel(); i += 2) {
        float* const turn = angles.as<float>() + i;
        const float angle = turn[0];
        turn[0] = std::cos(angle), turn[1] = std::sin(angle);
    }
    Tensor pos = p.indices(N, z.T);
    table.bytes("rope_forward", heads.shape, 2 * nc,
                [&] { k.rope_forward(s, heads, pos, angles); });
    Tensor logits = p.floats({N, V}, 5), dlogits = p.floats({N, V}), loss = p.floats({N});
    Tensor targets = p.indices(N, V);
    table.bytes("classifier", logits.shape, 2 * double(N * V) * f,
                [&] { k.classifier(s, loss, logits, dlogits, targets, V, 1, {}); });
}

void bench_matmul(Kernels& k, Table& table, const char* suffix, int64_t N, int64_t C, int64_t O) {
    Stream s;
    Pool p(k);
    Tensor x = p.floats({N, C}), w = p.floats({O, C}), out = p.floats({N, O}),
           dx = p.floats({N, C});
    Tensor dw = p.floats({O, C}), db = p.floats({O}), bias = p.floats({O});
    const double flops = 2 * double(N) * double(C) * double(O);
    const Shape shape{N, C, O};
    const auto name = [&](const char* op) { return std::string(op) + suffix; };
    table.flops(name("matmul_forward").c_str(), shape, flops,
                [&] { k.matmul_forward(s, out, x, w, bias, {}); });
    table.flops(name("matmul_backward_input").c_str(), shape, flops,
                [&] { k.matmul_backward_input(s, dx, out, w, false); });
    table.flops(name("matmul_backward_weight").c_str(), shape, flops,
                [&] { k.matmul_backward_weight(s, dw, db, out, x, true); });
}

void bench_attention(Kernels& k, Table& table, int64_t B, int64_t T, int64_t H, int64_t Hk,
                     int64_t D) {
    Stream s;
    Pool p(k);
    const Shape qs{B, T, H, D}, ks{B, T, Hk, D};
    Tensor q = p.floats(qs), kk = p.floats(ks), v = p.floats(ks), o = p.floats(qs);
    Tensor lse = p.floats({B, H, T}), delta = p.floats({B, H, T}), dout = p.floats(qs);
    Tensor dq = p.floats(qs), dk = p.floats(ks), dv = p.floats(ks);
    const double scale = 1 / std::sqrt(double(D));
    // Two products forward and five backward over the visible half of the scores.
    const double product = 2 * double(B * H * D) * double(T) * double(T + 1) / 2;
    const Attn forward{
        .q = q, .k = kk, .v = v, .o = o, .lse = lse, .first_key = {}, .scale = scale};
    AttnGrad backward{.q = q,
                      .k = kk,
                      .v = v,
                      .dout = dout,
                      .lse = lse,
                      .delta = delta,
                      .dq = dq,
                      .dk = dk,
                      .dv = dv,
                      .first_key = {},
                      .scale = scale};
    table.flops("attention_forward", qs, 2 * product, [&] { k.attention_forward(s, forward); });
    table.bytes("attention_delta", qs, 2 * 4 * double(q.numel()),
                [&] { k.attention_delta(s, delta, dout, o); });
    table.flops("attention_backward", qs, 5 * product, [&] { k.attention_backward(s, backward); });
}

void bench_optimizer(Kernels& k, Table& table, int64_t n) {
    Stream s;
    Pool p(k);
    Tensor param = p.floats({n}), m = p.floats({n}, 1e-3), v = p.make(DType::f32, {n});
    Tensor grad = p.floats({n}), control = p.make(DType::f64, {Control::size}),
           out = p.make(DType::f64, {1});
    k.fill(s, control, 1);
    const double bytes = 4 * double(n);
    const AdamW call{.param = param,
                     .master = param,
                     .m = m,
                     .v = v,
                     .grad = grad,
                     .control = control,
                     .lr = 1e-4,
                     .beta1 = 0.9,
                     .beta2 = 0.95,
                     .eps = 1e-8,
                     .weight_decay = 0.1};
    table.bytes("adamw", {n}, 7 * bytes, [&] { k.adamw(s, call); });
    table.bytes("sum_squares", {n}, bytes, [&] { k.sum_squares(s, out, grad, false); });
    table.bytes("fill", {n}, bytes, [&] { k.fill(s, grad, 0); });
    Tensor half = p.make(DType::bf16, {n});
    table.bytes("cast to bf16", {n}, 1.5 * bytes, [&] { k.cast(s, half, grad); });
    table.bytes("cast_stochastic", {n}, 1.5 * bytes,
                [&] { k.cast_stochastic(s, half, grad, 1, 2, 0); });
}

struct Ceilings {
    double copy_gbs, gemm_gflops;
};

Ceilings measure_ceilings(Kernels& k) {
    Stream s;
    Pool p(k);
    const Tensor a = p.floats({1 << 24}), b = p.floats({1 << 24});
    const Tensor x = p.floats({1536, 1536}), y = p.floats({1536, 1536}), z = p.floats({1536, 1536});
    const double copy_ms = time_ms([&] { k.cast(s, b, a); });
    const double gemm_ms = time_ms([&] { k.matmul_forward(s, z, x, y, {}, {}); });
    return {2 * double(a.bytes()) / copy_ms / 1e6, 2 * std::pow(1536.0, 3) / gemm_ms / 1e6};
}

void bench_all(const char* only) {
    const auto k = make_cpu_kernels(DType::f32);
    const auto plain = make_cpu_kernels(DType::f32, {.plain_matmul = true});
    const Ceilings c = measure_ceilings(*k);
    std::printf("%s: copy %.1f GB/s, gemm %.1f GFLOP/s\n", k->device().name().c_str(), c.copy_gbs,
                c.gemm_gflops);
    Table table(only, c.copy_gbs, c.gemm_gflops);
    const Sizes z;
    bench_matmul(*k, table, "", z.N(), z.C, 3 * z.C);
    bench_matmul(*k, table, "", z.N(), z.C, z.F);
    bench_matmul(*k, table, "", z.N(), z.F, z.C);
    bench_matmul(*k, table, "", z.N(), z.C, z.V);
    bench_matmul(*plain, table, " (plain)", z.N(), z.C, z.F);
    bench_attention(*k, table, z.B, z.T, z.H, z.Hk, z.D());
    bench_attention(*k, table, 1, 2048, 8, 2, 64);
    bench_attention(*k, table, 1, 1024, 4, 4, 128);
    bench_tokenwise(*k, table, z);
    bench_optimizer(*k, table, 10'000'000);
}

}  // namespace

int main(int argc, char** argv) try {
    if (printed_help(argc, argv)) return 0;
    if (!only_words(argc, argv)) return int(Exit::usage);
    bench_all(argc > 1 ? argv[1] : "");
    return 0;
} catch (const Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return int(e.code);
}
