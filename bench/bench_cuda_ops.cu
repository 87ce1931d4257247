// Every op of the CUDA backend at training shapes: milliseconds of one call, GB/s or TFLOP/s, and
// the share of the ceiling measured in the same run (a device copy for memory, an 8192^3 product
// for arithmetic). Bytes count each tensor once, read or written. Operands are random: products of
// zeros run faster than real ones.
//   bench_cuda_ops [--tune FILE] [FILTER...]     FILTER: only lines whose name contains one of them
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "bench/help.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float16.h"
#include "kernels/kernels.h"
#include "kernels/rng.h"

using namespace torus;

namespace {

class Bench {
public:
    explicit Bench(std::vector<std::string> filters)
        : k(make_cuda_kernels(DType::bf16, 0)),
          filters_(std::move(filters)),
          memory_(k->device(), Memory::device, int64_t(24) << 30),
          pattern_(k->device(), Memory::device, kPattern * 6),
          workspace_(k->device(), Memory::device, int64_t(256) << 20),
          stream(k->device().make_stream()) {
        stream.workspace = Tensor(workspace_.data(), DType::u8, {workspace_.bytes()});
        from_ = k->device().make_event();
        to_ = k->device().make_event();
        std::vector<float> floats;
        for (int64_t i = 0; i < kPattern; ++i)
            floats.push_back(float(random_uniform(1, 2, uint64_t(i)) * 2 - 1));
        k->device().copy(stream, pattern(DType::f32).data, floats.data(), kPattern * 4);
        k->cast(stream, pattern(DType::bf16), pattern(DType::f32));
        k->device().synchronize(stream);
    }
    ~Bench() {
        k->device().destroy(from_);
        k->device().destroy(to_);
        k->device().destroy(stream);
    }

    // Random numbers in [-1, 1); a pattern of 2^21 of them, repeated.
    Tensor tensor(const Shape& shape, DType type = DType::bf16) {
        const Tensor t = empty(shape, type), source = pattern(type);
        for (int64_t at = 0; at < t.bytes(); at += source.bytes())
            k->device().copy(stream, static_cast<char*>(t.data) + at, source.data,
                             std::min(source.bytes(), t.bytes() - at));
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
    bool wanted(const std::string& name) const {
        const auto in_name = [&](const std::string& f) {
            return name.find(f) != std::string::npos;
        };
        return filters_.empty() || std::any_of(filters_.begin(), filters_.end(), in_name);
    }

    // Median milliseconds of a call. Calls are timed in rows of a few milliseconds: as in a
    // training step, the host's launches then hide behind the calls before them.
    double time(const std::function<void()>& f) {
        const auto row = [&](int calls) {
            k->device().record(from_, stream);
            for (int i = 0; i < calls; ++i) f();
            k->device().record(to_, stream);
            return k->device().elapsed_ms(from_, to_) / calls;
        };
        row(1);  // makes plans, loads code
        const int calls = int(std::clamp(4 / row(1), 1.0, 100.0));
        std::vector<double> ms;
        for (int i = 0; i < 9; ++i) ms.push_back(row(calls));
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
    static constexpr int64_t kPattern = 1 << 21;
    Tensor pattern(DType type) const {  // fp32, and the same numbers in bf16 after them
        char* at = static_cast<char*>(pattern_.data());
        return Tensor(type == DType::f32 ? at : at + kPattern * 4, type, {kPattern});
    }
    std::vector<std::string> filters_;
    Buffer memory_, pattern_, workspace_;
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

// N tokens over a vocabulary of V, and positions below T.
void embeddings(Bench& b, int64_t N, int64_t C, int64_t V, int64_t T) {
    b.reset();
    Kernels& k = *b.k;
    const double e = double(N) * double(C) * 2;
    // Tokens of a text are far from uniform: powers of a uniform number give many frequent ones.
    std::set<int64_t> used;
    const Tensor ids = b.indices(N, [&](int64_t i) {
        const double u = random_uniform(5, 6, uint64_t(i));
        const int64_t id = int64_t(u * u * u * u * double(V));
        used.insert(id);
        return id;
    });
    const double row = double(C) * 4 * 2;  // of the table's gradient, read and written
    const Tensor pos = b.indices(N, [&](int64_t i) { return i % T; });
    const Tensor wte = b.tensor({V, C}), wpe = b.tensor({T, C}), out = b.tensor({N, C}),
                 dwte = b.tensor({V, C}, DType::f32), dwpe = b.tensor({T, C}, DType::f32);
    const Shape s{N, C};
    b.bytes(label("embedding_forward", s), 2 * e,
            [&] { k.embedding_forward(b.stream, out, ids, wte, pos, wpe); });
    b.bytes(label("embedding_backward", s) + concat(", V ", V), e + row * double(used.size()),
            [&] { k.embedding_backward(b.stream, dwte, {}, out, ids, pos); });
    b.bytes(label("embedding_backward", s) + concat(", V ", T), e + row * double(T),
            [&] { k.embedding_backward(b.stream, dwpe, {}, out, pos, pos); });
}

void rope(Bench& b, int64_t N, int64_t H, int64_t Hk, int64_t D) {
    b.reset();
    const int64_t T = 1024;
    const Tensor pos = b.indices(N, [&](int64_t i) { return i % T; });
    const Tensor table = b.tensor({T, D / 2, 2}, DType::f32), qkv = b.tensor({N, H + 2 * Hk, D});
    const Tensor turned = qkv.slice(1, 0, H + Hk);
    const double bytes = 2 * double(turned.numel()) * 2;
    b.bytes(label("rope_forward", turned.shape) + " of packed qkv", bytes,
            [&] { b.k->rope_forward(b.stream, turned, pos, table); });
    b.bytes(label("rope_backward", turned.shape) + " of packed qkv", bytes,
            [&] { b.k->rope_backward(b.stream, turned, pos, table); });
}

void classifier(Bench& b, int64_t n, int64_t V) {
    b.reset();
    const Tensor logits = b.tensor({n, (V + 127) / 128 * 128}), loss = b.tensor({n}, DType::f32);
    const Tensor targets = b.indices(n, [&](int64_t i) { return i * 7919 % V; });
    b.bytes(label("classifier", logits.shape) + ", loss", double(logits.bytes()),
            [&] { b.k->classifier(b.stream, loss, logits, {}, targets, V, 1, {}); });
    b.bytes(label("classifier", logits.shape) + ", loss and dlogits", 2 * double(logits.bytes()),
            [&] { b.k->classifier(b.stream, loss, logits, logits, targets, V, 1, {}); });
}

void merge(Bench& b, int64_t B, int64_t T, int64_t H, int64_t D) {
    b.reset();
    const Tensor o = b.tensor({B, T, H, D}, DType::f32), o2 = b.tensor({B, T, H, D}, DType::f32),
                 lse = b.tensor({B, H, T}, DType::f32), lse2 = b.tensor({B, H, T}, DType::f32);
    b.bytes(label("attention_merge", o.shape), 3 * double(o.bytes()),
            [&] { b.k->attention_merge(b.stream, o, lse, o2, lse2); });
}

void optimizer(Bench& b, int64_t params) {
    b.reset();
    Kernels& k = *b.k;
    const Tensor master = b.tensor({params}, DType::f32), grad = b.tensor({params}, DType::f32),
                 param = b.tensor({params}), control = b.empty({Control::size}, DType::f64),
                 total = b.empty({1}, DType::f64);
    k.fill(b.stream, control, 1);
    const Shape s{params};
    for (DType moments : {DType::f32, DType::bf16}) {
        const Tensor m = b.tensor({params}, moments), v = b.tensor({params}, moments);
        k.fill(b.stream, v, 1);
        for (const Tensor& w : {master, param}) {
            const int64_t bytes = 4 + 4 * size_of(moments) + (w.dtype == DType::f32 ? 10 : 4);
            b.bytes(label("adamw", s) +
                        concat(", ", name_of(moments), " moments, ", name_of(w.dtype), " master"),
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
    b.bytes(label("sum_squares", s) + " of fp32", double(params) * 4,
            [&] { k.sum_squares(b.stream, total, grad, false); });
    b.bytes(label("cast", s) + " fp32 to bf16", double(params) * 6,
            [&] { k.cast(b.stream, param, master); });
    const int64_t rows = params / 6144, heads = 1024;  // a sixth of a packed row
    const Tensor from = param.slice(0, 0, rows * 6144).view({rows, 6144}).slice(1, heads, heads);
    const Tensor packed = master.slice(0, 0, rows * heads).view({rows, heads});
    b.bytes(concat("cast (", rows, ", ", heads, " of 6144) to fp32"), double(rows * heads) * 6,
            [&] { k.cast(b.stream, packed, from); });
    b.bytes(label("cast_stochastic", s), double(params) * 6,
            [&] { k.cast_stochastic(b.stream, param, master, 1, 2, 0); });
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

int run(std::vector<std::string> filters, const std::string& tune) {
    Bench b(std::move(filters));
    ceilings(b);
    norms(b, 65536, 768);
    norms(b, 16384, 1536);
    norms(b, 32768, 4096);
    norms(b, 8192, 16384);
    activations(b, 65536, 768);
    activations(b, 32768, 4096);
    activations(b, 65536, 3072);
    activations(b, 32768, 11008);
    embeddings(b, 65536, 768, 50304, 1024);
    embeddings(b, 16384, 1536, 151936, 1024);
    rope(b, 65536, 12, 12, 64);
    rope(b, 16384, 12, 2, 128);
    classifier(b, 2668, 50257);  // a chunk of the head
    classifier(b, 16384, 50257);
    classifier(b, 883, 151936);  // a chunk again
    merge(b, 1, 16384, 16, 128);
    optimizer(b, 124475904);
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
    if (printed_help(argc, argv)) return 0;
    std::vector<std::string> filters;
    std::string tune;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--tune") == 0 && i + 1 < argc) {
            tune = argv[++i];
            continue;
        }
        if (!only_words(2, argv + i - 1)) return int(Exit::usage);
        filters.push_back(argv[i]);
    }
    try {
        return run(std::move(filters), tune);
    } catch (const Error& e) {
        std::fprintf(stderr, "bench_cuda_ops: %s\n", e.what());
        return int(e.code);
    }
}
