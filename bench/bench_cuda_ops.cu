// Every op of the CUDA backend at training shapes: milliseconds (median), GB/s or TFLOP/s, and the
// share of the ceiling measured in the same run (a device copy for memory, an 8192^3 product for
// arithmetic). Bytes count each tensor once, read or written. Operands are random: products of
// zeros run faster than real ones.
//   bench_cuda_ops [--tune FILE] [FILTER]     FILTER: only lines whose name contains it
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float16.h"
#include "kernels/kernels.h"
#include "kernels/rng.h"

using namespace torus;

namespace {

class Bench {
public:
    explicit Bench(std::string filter)
        : k(make_cuda_kernels(DType::bf16, 0)),
          filter_(std::move(filter)),
          memory_(k->device(), Memory::device, int64_t(24) << 30),
          workspace_(k->device(), Memory::device, int64_t(256) << 20),
          stream(k->device().make_stream()) {
        stream.workspace = Tensor(workspace_.data(), DType::u8, {workspace_.bytes()});
        from_ = k->device().make_event();
        to_ = k->device().make_event();
        for (int64_t i = 0; i < pattern_; ++i) {
            const double v = random_uniform(1, 2, uint64_t(i)) * 2 - 1;
            floats_.push_back(float(v));
            halves_.push_back(float_to_bf16(float(v)));
        }
    }
    ~Bench() {
        k->device().destroy(from_);
        k->device().destroy(to_);
        k->device().destroy(stream);
    }

    // Random numbers in [-1, 1); a pattern of 2^21 of them, repeated.
    Tensor tensor(const Shape& shape, DType type = DType::bf16) {
        const Tensor t = empty(shape, type);
        const void* source = type == DType::bf16 ? static_cast<const void*>(halves_.data())
                                                 : static_cast<const void*>(floats_.data());
        const int64_t whole = pattern_ * size_of(type);
        for (int64_t at = 0; at < t.bytes(); at += whole)
            k->device().copy(stream, static_cast<char*>(t.data) + at, source,
                             std::min(whole, t.bytes() - at));
        return t;
    }
    Tensor indices(int64_t n, const std::function<int64_t(int64_t)>& f) {
        std::vector<int32_t> host;
        for (int64_t i = 0; i < n; ++i) host.push_back(int32_t(f(i)));
        const Tensor t = empty({n}, DType::i32);
        k->device().copy(stream, t.data, host.data(), t.bytes());
        k->device().synchronize(stream);
        return t;
    }
    Tensor empty(const Shape& shape, DType type) {
        const Tensor t(static_cast<char*>(memory_.data()) + used_, type, shape);
        used_ += (t.bytes() + 255) / 256 * 256;
        CHECK(used_ <= memory_.bytes(), ": the bench needs more memory");
        return t;
    }
    void reset() { used_ = 0; }
    bool wanted(const std::string& name) const { return name.find(filter_) != std::string::npos; }

    // Median milliseconds.
    double time(const std::function<void()>& f) {
        std::vector<double> ms;
        double total = 0;
        for (int i = 0; i < 3 || (total < 60 && i < 40); ++i) {
            k->device().record(from_, stream);
            f();
            k->device().record(to_, stream);
            const double t = k->device().elapsed_ms(from_, to_);
            if (i == 0) continue;  // makes plans, loads code
            ms.push_back(t);
            total += t;
        }
        std::sort(ms.begin(), ms.end());
        return ms[ms.size() / 2];
    }
    void bytes(const std::string& name, double count, const std::function<void()>& f) {
        if (!wanted(name)) return;
        const double ms = time(f), rate = count / ms / 1e9;
        if (memory_ceiling == 0) memory_ceiling = rate;
        std::printf("%-52s %9.4f ms %7.2f TB/s   %5.1f%%\n", name.c_str(), ms, rate,
                    100 * rate / memory_ceiling);
    }
    void flops(const std::string& name, double count, const std::function<void()>& f) {
        if (!wanted(name)) return;
        const double ms = time(f), rate = count / ms / 1e9;
        if (matmul_ceiling == 0) matmul_ceiling = rate;
        std::printf("%-52s %9.4f ms %7.0f TFLOP/s %5.1f%%\n", name.c_str(), ms, rate,
                    100 * rate / matmul_ceiling);
    }

    std::unique_ptr<Kernels> k;
    double memory_ceiling = 0, matmul_ceiling = 0;

private:
    static constexpr int64_t pattern_ = 1 << 21;
    std::string filter_;
    Buffer memory_, workspace_;
    std::vector<float> floats_;
    std::vector<uint16_t> halves_;
    int64_t used_ = 0;
    Event from_, to_;

public:
    Stream stream;
};

std::string label(const char* op, const Shape& s) { return op + (" " + s.str()); }

void ceilings(Bench& b) {
    b.reset();
    const int64_t n = int64_t(4) << 30;
    const Tensor from = b.empty({n}, DType::u8), to = b.empty({n}, DType::u8);
    const double ms = b.time([&] { b.k->device().copy(b.stream, to.data, from.data, n); });
    b.memory_ceiling = 2 * double(n) / ms / 1e9;
    b.reset();
    const int64_t m = 8192;
    const Tensor x = b.tensor({m, m}), w = b.tensor({m, m}), out = b.empty({m, m}, DType::bf16);
    const double product = b.time([&] { b.k->matmul_forward(b.stream, out, x, w, {}, {}); });
    b.matmul_ceiling = 2 * std::pow(double(m), 3) / product / 1e9;
    std::printf("%s: copy %.2f TB/s, 8192^3 product %.0f TFLOP/s\n", b.k->device().name().c_str(),
                b.memory_ceiling, b.matmul_ceiling);
}

void norms(Bench& b, int64_t N, int64_t C) {
    b.reset();
    const double e = double(N) * double(C) * 2;
    const Tensor x = b.tensor({N, C}), out = b.tensor({N, C}), dout = b.tensor({N, C}),
                 w = b.tensor({C}), bias = b.tensor({C}), mean = b.tensor({N}, DType::f32),
                 rstd = b.tensor({N}, DType::f32), dw = b.tensor({C}, DType::f32),
                 db = b.tensor({C}, DType::f32);
    Kernels& k = *b.k;
    const Shape s{N, C};
    b.bytes(label("layernorm_forward", s), 2 * e,
            [&] { k.layernorm_forward(b.stream, out, mean, rstd, x, w, bias, 1e-5); });
    b.bytes(label("layernorm_backward", s), 4 * e,
            [&] { k.layernorm_backward(b.stream, out, dw, db, dout, x, w, mean, rstd); });
    b.bytes(label("rmsnorm_forward", s), 2 * e,
            [&] { k.rmsnorm_forward(b.stream, out, rstd, x, w, 1e-5); });
    b.bytes(label("rmsnorm_backward", s), 4 * e,
            [&] { k.rmsnorm_backward(b.stream, out, dw, dout, x, w, rstd); });
    b.bytes(label("add", s), 3 * e, [&] { k.add(b.stream, out, x, dout); });
    b.bytes(label("scale", s), 2 * e, [&] { k.scale(b.stream, out, 0.999); });
    b.bytes(label("fill", s), e, [&] { k.fill(b.stream, out, 1); });
}

void activations(Bench& b, int64_t N, int64_t F) {
    b.reset();
    const double e = double(N) * double(F) * 2;
    const Tensor x = b.tensor({N, 2 * F}), out = b.tensor({N, F}), dout = b.tensor({N, F}),
                 dx = b.tensor({N, 2 * F});
    Kernels& k = *b.k;
    const Shape s{N, F};
    const Tensor half = x.view({2 * N, F}).rows(0, N), dhalf = dx.view({2 * N, F}).rows(0, N);
    b.bytes(label("gelu_forward", s), 2 * e, [&] { k.gelu_forward(b.stream, out, half); });
    b.bytes(label("gelu_backward", s), 3 * e,
            [&] { k.gelu_backward(b.stream, dhalf, dout, half); });
    b.bytes(label("swiglu_forward", s), 3 * e, [&] { k.swiglu_forward(b.stream, out, x); });
    b.bytes(label("swiglu_backward", s), 5 * e, [&] { k.swiglu_backward(b.stream, dx, dout, x); });
}

void rest(Bench& b) {
    Kernels& k = *b.k;
    b.reset();
    const int64_t N = 65536, C = 768, V = 50257, Vp = 50304, T = 1024;
    const double e = double(N) * double(C) * 2;
    // Tokens of a text are far from uniform: squares of a uniform number give many frequent ones.
    const Tensor ids = b.indices(N, [&](int64_t i) {
        const double u = random_uniform(5, 6, uint64_t(i));
        return int64_t(u * u * u * u * double(V));
    });
    const Tensor pos = b.indices(N, [&](int64_t i) { return i % T; });
    const Tensor wte = b.tensor({Vp, C}), wpe = b.tensor({T, C}), out = b.tensor({N, C}),
                 dwte = b.tensor({Vp, C}, DType::f32), dwpe = b.tensor({T, C}, DType::f32);
    b.bytes("embedding_forward (65536, 768)", 2 * e,
            [&] { k.embedding_forward(b.stream, out, ids, wte, pos, wpe); });
    b.bytes("embedding_backward (65536, 768), tokens", e,
            [&] { k.embedding_backward(b.stream, dwte, {}, out, ids, pos); });
    b.bytes("embedding_backward (65536, 768), bytes", e,
            [&] { k.embedding_backward(b.stream, dwpe, {}, out, pos, pos); });
    const Tensor table = b.tensor({T, 32, 2}, DType::f32), qkv = b.tensor({N, 36, 64});
    b.bytes("rope_forward (65536, 12, 64) of packed qkv", 2 * e,
            [&] { k.rope_forward(b.stream, qkv.slice(1, 0, 12), pos, table); });
    b.reset();
    const int64_t n = 16384;
    const Tensor logits = b.tensor({n, Vp}), loss = b.tensor({n}, DType::f32);
    const Tensor targets = b.indices(n, [&](int64_t i) { return i * 7919 % V; });
    b.bytes("classifier (16384, 50304), loss and dlogits", 2 * double(logits.bytes()),
            [&] { k.classifier(b.stream, loss, logits, logits, targets, V, 1, {}); });
    b.reset();
    const int64_t params = 124475904;
    const Tensor master = b.tensor({params}, DType::f32), grad = b.tensor({params}, DType::f32),
                 param = b.tensor({params}), control = b.empty({Control::size}, DType::f64),
                 total = b.empty({1}, DType::f64);
    k.fill(b.stream, control, 1);
    for (DType moments : {DType::f32, DType::bf16}) {
        const Tensor m = b.tensor({params}, moments), v = b.tensor({params}, moments);
        k.fill(b.stream, v, 1);
        for (const Tensor& w : {master, param}) {
            const int64_t bytes = 4 + 4 * size_of(moments) + (w.dtype == DType::f32 ? 10 : 4);
            b.bytes(concat("adamw, ", name_of(moments), " moments, ", name_of(w.dtype),
                           " master (124M)"),
                    double(params * bytes), [&] {
                        k.adamw(b.stream, {.param = param,
                                           .master = w,
                                           .m = m,
                                           .v = v,
                                           .grad = grad,
                                           .control = control,
                                           .lr = 1e-4,
                                           .beta1 = 0.9,
                                           .beta2 = 0.95,
                                           .eps = 1e-8,
                                           .weight_decay = 0.1});
                    });
        }
    }
    b.bytes("sum_squares (124M, fp32)", double(params) * 4,
            [&] { k.sum_squares(b.stream, total, grad, false); });
    b.bytes("cast fp32 -> bf16 (124M)", double(params) * 6,
            [&] { k.cast(b.stream, param, master); });
}

struct MatmulShape {
    int64_t N, O, C;
};

void matmul(Bench& b, const MatmulShape& s) {
    b.reset();
    Kernels& k = *b.k;
    const double count = 2.0 * double(s.N) * double(s.O) * double(s.C);
    const Tensor x = b.tensor({s.N, s.C}), w = b.tensor({s.O, s.C}), out = b.tensor({s.N, s.O}),
                 bias = b.tensor({s.O}), dw = b.tensor({s.O, s.C}, DType::f32),
                 db = b.tensor({s.O}, DType::f32), dx = b.tensor({s.N, s.C});
    const Shape shape{s.N, s.O, s.C};
    b.flops(label("matmul_forward", shape), count,
            [&] { k.matmul_forward(b.stream, out, x, w, {}, {}); });
    b.flops(label("matmul_forward + bias", shape), count,
            [&] { k.matmul_forward(b.stream, out, x, w, bias, {}); });
    b.flops(label("matmul_forward + bias + residual", shape), count,
            [&] { k.matmul_forward(b.stream, out, x, w, bias, out); });
    b.flops(label("matmul_backward_input", shape), count,
            [&] { k.matmul_backward_input(b.stream, dx, out, w, false); });
    b.flops(label("matmul_backward_weight", shape), count,
            [&] { k.matmul_backward_weight(b.stream, dw, {}, out, x, true); });
    b.flops(label("matmul_backward_weight + bias", shape), count,
            [&] { k.matmul_backward_weight(b.stream, dw, db, out, x, true); });
}

void attention(Bench& b, int64_t B, int64_t T, int64_t H, int64_t Hk, int64_t D, bool hopper) {
    b.reset();
    dynamic_cast<cuda::CudaKernels&>(*b.k).use_hopper_attention(hopper);
    const Tensor qkv = b.tensor({B, T, H + 2 * Hk, D}), o = b.tensor({B, T, H, D}),
                 dout = b.tensor({B, T, H, D}), dqkv = b.tensor({B, T, H + 2 * Hk, D}),
                 lse = b.tensor({B, H, T}, DType::f32), delta = b.tensor({B, H, T}, DType::f32);
    const auto part = [&](const Tensor& t, int64_t at, int64_t count) {
        return t.slice(2, at, count);
    };
    const double scale = 1 / std::sqrt(double(D)),
                 count = 2.0 * double(B * H) * double(T) * double(T) * double(D);
    const std::string shape =
        concat(hopper ? "" : "portable ", "B ", B, " T ", T, " H ", H, "/", Hk, " D ", D);
    b.flops("attention_forward " + shape, count, [&] {
        b.k->attention_forward(b.stream, {.q = part(qkv, 0, H),
                                          .k = part(qkv, H, Hk),
                                          .v = part(qkv, H + Hk, Hk),
                                          .o = o,
                                          .lse = lse,
                                          .first_key = {},
                                          .scale = scale});
    });
    b.bytes("attention_delta " + shape, 2 * double(o.bytes()),
            [&] { b.k->attention_delta(b.stream, delta, dout, o); });
    b.flops("attention_backward " + shape, 2.5 * count, [&] {
        b.k->attention_backward(b.stream, {.q = part(qkv, 0, H),
                                           .k = part(qkv, H, Hk),
                                           .v = part(qkv, H + Hk, Hk),
                                           .dout = dout,
                                           .lse = lse,
                                           .delta = delta,
                                           .dq = part(dqkv, 0, H),
                                           .dk = part(dqkv, H, Hk),
                                           .dv = part(dqkv, H + Hk, Hk),
                                           .first_key = {},
                                           .scale = scale});
    });
}

const MatmulShape matmul_shapes[] = {{65536, 2304, 768},  {65536, 768, 768},   {65536, 3072, 768},
                                     {65536, 768, 3072},  {65536, 50304, 768}, {32768, 8192, 2048},
                                     {32768, 22016, 4096}};

int run(const std::string& filter, const std::string& tune) {
    Bench b(filter);
    ceilings(b);
    norms(b, 65536, 768);
    norms(b, 32768, 4096);
    activations(b, 65536, 3072);
    activations(b, 32768, 11008);
    rest(b);
    for (bool hopper : {true, false}) {
        attention(b, 16, 1024, 32, 32, 64, hopper);
        attention(b, 1, 16384, 16, 16, 128, hopper);
        attention(b, 1, 8192, 32, 8, 128, hopper);
    }
    for (const MatmulShape& s : matmul_shapes) matmul(b, s);
    if (tune.empty()) return 0;
    std::printf("with algorithms chosen by timing:\n");
    b.k->tune_matmul(tune);
    for (const MatmulShape& s : matmul_shapes) matmul(b, s);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    std::string filter, tune;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--tune") == 0 && i + 1 < argc)
            tune = argv[++i];
        else
            filter = argv[i];
    }
    try {
        return run(filter, tune);
    } catch (const Error& e) {
        std::fprintf(stderr, "bench_cuda_ops: %s\n", e.what());
        return int(e.code);
    }
}
