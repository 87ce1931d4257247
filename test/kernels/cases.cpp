// The table of ops. Sizes are odd and, where `big`, cross the edges of tiles, blocks and threads.
#include <algorithm>
#include <cmath>

#include "test/kernels/harness.h"

namespace torus::test {
namespace {

Spec input(const char* name, Shape shape, Grad grad, bool pitched = false) {
    return {.name = name, .shape = shape, .grad = grad, .pitched = pitched};
}
Spec output(const char* name, Shape shape, bool pitched = false) {
    return {.name = name, .shape = shape, .kind = Kind::output, .pitched = pitched};
}
Spec stat(const char* name, Shape shape, bool pitched = false) {
    return {.name = name, .shape = shape, .kind = Kind::stat, .pitched = pitched};
}

// n indices below `limit` with repeats; the last index of the table is among them.
std::vector<int32_t> some_indices(int64_t n, int64_t limit) {
    std::vector<int32_t> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(int32_t((i * i + 3 * i) % limit));
    v[size_t(n / 2)] = int32_t(limit - 1);
    return v;
}

OpCase add(bool big) {
    const Shape s = big ? Shape{131, 257} : Shape{3, 7};
    return {.name = "add",
            .ops = {"add"},
            .tensors = {input("a", s, Grad::none, true), input("b", s, Grad::none, true),
                        output("out", s, true)},
            .forward = [](Run& r) { r.k.add(r.stream, r["out"], r["a"], r["b"]); }};
}

OpCase embedding(bool big, bool positions) {
    const int64_t N = big ? 300 : 9, V = big ? 61 : 5, P = big ? 300 : 6, C = big ? 131 : 7;
    OpCase c{.name = positions ? "embedding + positions" : "embedding",
             .ops = {"embedding_forward", "embedding_backward"},
             .tensors = {input("wte", {V, C}, Grad::adds), output("out", {N, C})},
             .indices = {{"ids", {N}, some_indices(N, V)}},
             .forward =
                 [](Run& r) {
                     r.k.embedding_forward(r.stream, r["out"], r["ids"], r["wte"], r["pos"],
                                           r["wpe"]);
                 },
             .backward =
                 [](Run& r) {
                     r.k.embedding_backward(r.stream, r["dwte"], r["dwpe"], r["dout"], r["ids"],
                                            r["pos"]);
                 }};
    if (positions) {
        c.tensors.push_back(input("wpe", {P, C}, Grad::adds));
        c.tensors.back().optional = true;
        c.indices.push_back({"pos", {N}, some_indices(N, P)});
    }
    return c;
}

OpCase layernorm(bool big) {
    const int64_t N = big ? 203 : 5, C = big ? 131 : 19;
    return {.name = "layernorm",
            .ops = {"layernorm_forward", "layernorm_backward"},
            .tensors = {input("x", {N, C}, Grad::adds), input("w", {C}, Grad::adds),
                        input("b", {C}, Grad::adds), output("out", {N, C}), stat("mean", {N}),
                        stat("rstd", {N})},
            .forward =
                [](Run& r) {
                    r.k.layernorm_forward(r.stream, r["out"], r["mean"], r["rstd"], r["x"], r["w"],
                                          r["b"], 1e-5);
                },
            .backward =
                [](Run& r) {
                    r.k.layernorm_backward(r.stream, r["dx"], r["dw"], r["db"], r["dout"], r["x"],
                                           r["w"], r["mean"], r["rstd"]);
                }};
}

OpCase rmsnorm(bool big) {
    const int64_t N = big ? 203 : 5, C = big ? 131 : 19;
    return {.name = "rmsnorm",
            .ops = {"rmsnorm_forward", "rmsnorm_backward"},
            .tensors = {input("x", {N, C}, Grad::adds), input("w", {C}, Grad::adds),
                        output("out", {N, C}), stat("rstd", {N})},
            .forward =
                [](Run& r) {
                    r.k.rmsnorm_forward(r.stream, r["out"], r["rstd"], r["x"], r["w"], 1e-5);
                },
            .backward =
                [](Run& r) {
                    r.k.rmsnorm_backward(r.stream, r["dx"], r["dw"], r["dout"], r["x"], r["w"],
                                         r["rstd"]);
                }};
}

struct MatmulCase {
    int64_t N, C, O;
    bool bias = false, residual = false, adds = false;  // adds: dx accumulates, dw does not
};

OpCase matmul(const MatmulCase& m) {
    const auto [N, C, O, bias, residual, adds] = m;
    OpCase c{.name = concat("matmul ", N, " x ", C, " x ", O) + (bias ? " + bias" : "") +
                     (residual ? " + residual" : "") + (adds ? ", dx +=, dw =" : ""),
             .ops = {"matmul_forward", "matmul_backward_input", "matmul_backward_weight"},
             .tensors = {input("x", {N, C}, adds ? Grad::adds : Grad::writes, true),
                         input("w", {O, C}, adds ? Grad::writes : Grad::adds),
                         output("out", {N, O}, true)},
             .forward =
                 [](Run& r) {
                     r.k.matmul_forward(r.stream, r["out"], r["x"], r["w"], r["bias"],
                                        r["residual"]);
                 },
             .backward =
                 [m](Run& r) {
                     r.k.matmul_backward_input(r.stream, r["dx"], r["dout"], r["w"], m.adds);
                     r.k.matmul_backward_weight(r.stream, r["dw"], r["dbias"], r["dout"], r["x"],
                                                !m.adds);
                     // The residual's gradient is dout itself: no op of its own.
                     if (m.residual) r.copy("dresidual", "dout");
                 }};
    if (bias) c.tensors.push_back(input("bias", {O}, Grad::adds));
    if (residual) c.tensors.push_back(input("residual", {N, O}, Grad::writes, true));
    for (Spec& s : c.tensors) s.optional = s.name == "bias" || s.name == "residual";
    return c;
}

std::vector<MatmulCase> matmul_cases(bool big) {
    const MatmulCase m = big ? MatmulCase{260, 140, 135} : MatmulCase{5, 7, 9};
    return {m,
            {m.N, m.C, m.O, true, false, true},
            {m.N, m.C, m.O, false, true, false},
            {m.N, m.C, m.O, true, true, true},
            {1, m.C, m.O, true, true, false},  // vectors and numbers
            {m.N, 1, m.O, true, true, false},
            {m.N, m.C, 1, true, true, false},
            {1, 1, 1, true, true, false}};
}

OpCase gelu(bool big) {
    const Shape s = big ? Shape{131, 257} : Shape{3, 2, 7};
    OpCase c{.name = "gelu",
             .ops = {"gelu_forward", "gelu_backward"},
             .tensors = {input("x", s, Grad::writes), output("out", s)},
             .forward = [](Run& r) { r.k.gelu_forward(r.stream, r["out"], r["x"]); },
             .backward = [](Run& r) { r.k.gelu_backward(r.stream, r["dx"], r["dout"], r["x"]); }};
    c.tensors[0].size = 2;
    return c;
}

// Both in 8s, which a backend can fuse, and odd.
OpCase matmul_gelu(int64_t N, int64_t C, int64_t O, bool bias) {
    OpCase c{.name = concat("matmul with GELU ", N, " x ", C, " x ", O) + (bias ? " + bias" : ""),
             .ops = {"matmul_gelu_forward"},
             .tensors = {input("x", {N, C}, Grad::none, true), input("w", {O, C}, Grad::none),
                         output("pre", {N, O}), output("out", {N, O})},
             .forward = [](Run& r) {
                 r.k.matmul_gelu_forward(r.stream, r["out"], r["pre"], r["x"], r["w"], r["bias"]);
             }};
    if (bias) c.tensors.push_back(input("bias", {O}, Grad::none));
    if (bias) c.tensors.back().optional = true;
    return c;
}

// The backward pass of out = gelu(pre) w^T with respect to pre.
OpCase matmul_gelu_backward(int64_t N, int64_t C, int64_t O) {
    return {.name = concat("matmul after GELU ", N, " x ", C, " x ", O),
            .ops = {"matmul_gelu_backward_input"},
            .tensors = {input("pre", {N, C}, Grad::writes),
                        input("w", {O, C}, Grad::none),
                        {.name = "gelu", .shape = {N, C}, .kind = Kind::constant},
                        output("out", {N, O}, true)},
            .forward =
                [](Run& r) {
                    r.k.gelu_forward(r.stream, r["gelu"], r["pre"]);
                    r.k.matmul_forward(r.stream, r["out"], r["gelu"], r["w"], {}, {});
                },
            .backward =
                [](Run& r) {
                    r.k.matmul_gelu_backward_input(r.stream, r["dpre"], r["dout"], r["w"],
                                                   r["pre"]);
                }};
}

OpCase swiglu(bool big) {
    const int64_t N = big ? 203 : 4, F = big ? 177 : 7;
    OpCase c{
        .name = "swiglu",
        .ops = {"swiglu_forward", "swiglu_backward"},
        .tensors = {input("gate_up", {N, 2 * F}, Grad::writes), output("out", {N, F})},
        .forward = [](Run& r) { r.k.swiglu_forward(r.stream, r["out"], r["gate_up"]); },
        .backward =
            [](Run& r) { r.k.swiglu_backward(r.stream, r["dgate_up"], r["dout"], r["gate_up"]); }};
    c.tensors[0].size = 2;
    return c;
}

// R of D dimensions turn. In place: forward works on a copy.
OpCase rope(bool big, int64_t D, int64_t R) {
    const int64_t N = big ? 301 : 5, H = 3, P = big ? 97 : 11;
    return {.name = concat("rope, ", R, " of ", D),
            .ops = {"rope_forward", "rope_backward"},
            .tensors = {input("x", {N, H, D}, Grad::writes, true),
                        {.name = "table", .shape = {P, R / 2, 2}, .kind = Kind::constant},
                        output("out", {N, H, D}, true)},
            .indices = {{"pos", {N}, some_indices(N, P)}},
            .forward =
                [](Run& r) {
                    r.copy("out", "x");
                    r.k.rope_forward(r.stream, r["out"], r["pos"], r["table"]);
                },
            .backward =
                [](Run& r) {
                    r.copy("dx", "dout");
                    r.k.rope_backward(r.stream, r["dx"], r["pos"], r["table"]);
                }};
}

struct AttentionCase {
    std::string name;
    int64_t B, Tq, Tk, H, Hk, D;
    int64_t q0 = 0, k0 = 0;
    bool causal = true, accumulate = false;
    std::function<int32_t(int64_t i)> first_key;  // of query i, in global positions
};

OpCase attention(const AttentionCase& a) {
    const Grad grad = a.accumulate ? Grad::adds : Grad::writes;
    OpCase c{
        .name = "attention, " + a.name,
        .ops = {"attention_forward", "attention_delta", "attention_backward"},
        .tensors = {input("q", {a.B, a.Tq, a.H, a.D}, grad, true),
                    input("k", {a.B, a.Tk, a.Hk, a.D}, grad, true),
                    input("v", {a.B, a.Tk, a.Hk, a.D}, grad, true),
                    output("o", {a.B, a.Tq, a.H, a.D}, true), stat("lse", {a.B, a.H, a.Tq}, true),
                    stat("delta", {a.B, a.H, a.Tq}, true)}};
    if (a.first_key) {
        std::vector<int32_t> first;
        for (int64_t i = 0; i < a.B * a.Tq; ++i) first.push_back(a.first_key(i % a.Tq));
        c.indices = {{"first_key", {a.B, a.Tq}, first, true, true}};
    }
    const double scale = 0.9 / std::sqrt(double(a.D));
    c.forward = [a, scale](Run& r) {
        r.k.attention_forward(r.stream, {.q = r["q"],
                                         .k = r["k"],
                                         .v = r["v"],
                                         .o = r["o"],
                                         .lse = r["lse"],
                                         .first_key = r["first_key"],
                                         .q0 = a.q0,
                                         .k0 = a.k0,
                                         .scale = scale,
                                         .causal = a.causal});
    };
    c.backward = [a, scale](Run& r) {
        r.k.attention_delta(r.stream, r["delta"], r["do"], r["o"]);
        r.k.attention_backward(r.stream, {.q = r["q"],
                                          .k = r["k"],
                                          .v = r["v"],
                                          .dout = r["do"],
                                          .lse = r["lse"],
                                          .delta = r["delta"],
                                          .dq = r["dq"],
                                          .dk = r["dk"],
                                          .dv = r["dv"],
                                          .first_key = r["first_key"],
                                          .q0 = a.q0,
                                          .k0 = a.k0,
                                          .scale = scale,
                                          .causal = a.causal,
                                          .add_q = a.accumulate,
                                          .add_kv = a.accumulate});
    };
    return c;
}

std::vector<AttentionCase> attention_cases(bool big) {
    const int64_t T = big ? 203 : 9, D = big ? 40 : 6;
    std::vector<AttentionCase> v;
    v.push_back({.name = "causal", .B = 2, .Tq = T, .Tk = T, .H = 3, .Hk = 3, .D = D});
    v.push_back({.name = "not causal, Tq != Tk",
                 .B = 2,
                 .Tq = T,
                 .Tk = T - 4,
                 .H = 2,
                 .Hk = 2,
                 .D = D,
                 .causal = false});
    v.push_back({.name = "groups of 2, offsets, accumulate",
                 .B = 1,
                 .Tq = T,
                 .Tk = T + 2,
                 .H = 4,
                 .Hk = 2,
                 .D = D,
                 .q0 = 13,
                 .k0 = 11,
                 .accumulate = true});
    v.push_back({.name = "groups of 3, documents",
                 .B = 2,
                 .Tq = T,
                 .Tk = T,
                 .H = 3,
                 .Hk = 1,
                 .D = D,
                 .first_key = [](int64_t i) { return int32_t(i / 4 * 4); }});
    // Queries 5 .. of a window of 3 keys against keys from 7 on: the first see none, the last few
    // see none either where Tk is short.
    v.push_back({.name = "window with empty rows",
                 .B = 1,
                 .Tq = T,
                 .Tk = T - 3,
                 .H = 2,
                 .Hk = 1,
                 .D = D,
                 .q0 = 5,
                 .k0 = 7,
                 .first_key = [](int64_t i) { return int32_t(i + 5 - 2); }});
    v.push_back({.name = "nothing visible",
                 .B = 1,
                 .Tq = 3,
                 .Tk = T,
                 .H = 1,
                 .Hk = 1,
                 .D = D,
                 .q0 = 0,
                 .k0 = 100});
    return v;
}

OpCase attention_merge(bool big) {
    const int64_t B = 2, T = big ? 203 : 5, H = 3, D = big ? 40 : 6;
    OpCase c{.name = "attention_merge",
             .ops = {"attention_merge"},
             .tensors = {input("o1", {B, T, H, D}, Grad::none, true),
                         input("l1", {B, H, T}, Grad::none, true),
                         input("o2", {B, T, H, D}, Grad::none, true),
                         input("l2", {B, H, T}, Grad::none, true), output("o", {B, T, H, D}, true),
                         output("l", {B, H, T}, true)},
             .forward = [](Run& r) {
                 r.copy("o", "o1");
                 r.copy("l", "l1");
                 r.k.attention_merge(r.stream, r["o"], r["l"], r["o2"], r["l2"]);
             }};
    return c;
}

OpCase classifier(bool big) {
    const int64_t n = big ? 67 : 7, V = big ? 517 : 11, Vp = big ? 640 : 16;
    constexpr double dloss = 0.7;
    // The columns in front of the padding, also when a test has resized the rows.
    const auto vocabulary = [pad = Vp - V](Run& r) { return r["logits"].dim(-1) - pad; };
    std::vector<int32_t> targets = some_indices(n, V);
    targets[1] = -1;
    targets[size_t(n - 1)] = -100;
    OpCase c{.name = "classifier",
             .ops = {"classifier"},
             .tensors = {input("logits", {n, Vp}, Grad::writes),
                         output("loss", {n}),
                         {.name = "loss_scale",
                          .shape = {1},
                          .kind = Kind::constant,
                          .optional = true,
                          .f64 = true}},
             .indices = {{"targets", {n}, targets}},
             .forward =
                 [=](Run& r) {
                     r.k.classifier(r.stream, r["loss"], r["logits"], {}, r["targets"],
                                    vocabulary(r), 1, {});
                 },
             .backward =
                 [=](Run& r) {
                     CHECK(r["dlogits"]);
                     r.k.classifier(r.stream, r["loss"], r["logits"], r["dlogits"], r["targets"],
                                    vocabulary(r), dloss, r["loss_scale"]);
                 }};
    c.tensors[1].weight = dloss * noise("loss_scale", 0);
    return c;
}

}  // namespace

std::vector<OpCase> all_cases(bool big) {
    std::vector<OpCase> v = {add(big),
                             embedding(big, false),
                             embedding(big, true),
                             layernorm(big),
                             rmsnorm(big),
                             gelu(big),
                             swiglu(big),
                             rope(big, 8, 8),
                             rope(big, 10, 6),
                             attention_merge(big),
                             classifier(big)};
    for (const MatmulCase& m : matmul_cases(big)) v.push_back(matmul(m));
    for (const bool even : {true, false}) {
        const MatmulCase m = big ? MatmulCase{260, 144, 136} : MatmulCase{5, 8, 8};
        const int64_t C = m.C - !even, O = m.O - !even;
        v.push_back(matmul_gelu(m.N, C, O, even));
        v.push_back(matmul_gelu_backward(m.N, C, O));
    }
    for (const AttentionCase& a : attention_cases(big)) v.push_back(attention(a));
    return v;
}

}  // namespace torus::test
