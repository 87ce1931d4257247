// Attention against its definition, written out with the whole matrix of scores; split over blocks
// of keys; and at the edges: empty ranges, extreme log-sum-exps, poisoned keys out of sight.
#include <algorithm>
#include <cmath>
#include <limits>

#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

struct Problem {
    int64_t B, Tq, Tk, H, Hk, D;
    int64_t q0 = 0, k0 = 0;
    bool causal = true;
    std::vector<int32_t> first;  // (B * Tq) or empty
    double scale = 0.3;
};

struct Tensors {
    Tensors(const Problem& p, DType type)
        : q(random_value("q", type, {p.B, p.Tq, p.H, p.D})),
          k(random_value("k", type, {p.B, p.Tk, p.Hk, p.D})),
          v(random_value("v", type, {p.B, p.Tk, p.Hk, p.D})),
          o(type, {p.B, p.Tq, p.H, p.D}),
          lse(type, {p.B, p.H, p.Tq}),
          dout(random_value("do", type, {p.B, p.Tq, p.H, p.D})),
          delta(type, {p.B, p.H, p.Tq}),
          dq(type, {p.B, p.Tq, p.H, p.D}),
          dk(type, {p.B, p.Tk, p.Hk, p.D}),
          dv(type, {p.B, p.Tk, p.Hk, p.D}),
          first(DType::i32, {p.B, p.Tq}) {
        if (!p.first.empty()) first.set_all([&](int64_t i) { return double(p.first[size_t(i)]); });
    }
    Attn forward(const Problem& p) const {
        return {.q = q.tensor(),
                .k = k.tensor(),
                .v = v.tensor(),
                .o = o.tensor(),
                .lse = lse.tensor(),
                .first_key = p.first.empty() ? Tensor{} : first.tensor(),
                .q0 = p.q0,
                .k0 = p.k0,
                .scale = p.scale,
                .causal = p.causal};
    }
    AttnGrad backward(const Problem& p) const {
        return {.q = q.tensor(),
                .k = k.tensor(),
                .v = v.tensor(),
                .dout = dout.tensor(),
                .lse = lse.tensor(),
                .delta = delta.tensor(),
                .dq = dq.tensor(),
                .dk = dk.tensor(),
                .dv = dv.tensor(),
                .first_key = p.first.empty() ? Tensor{} : first.tensor(),
                .q0 = p.q0,
                .k0 = p.k0,
                .scale = p.scale,
                .causal = p.causal};
    }
    Value q, k, v, o, lse, dout, delta, dq, dk, dv, first;
};

// o and lse from the definition, in fp64.
void define(const Problem& p, const Tensors& t, std::vector<double>& o, std::vector<double>& lse) {
    o.assign(size_t(p.B * p.Tq * p.H * p.D), 0);
    lse.assign(size_t(p.B * p.H * p.Tq), -inf);
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t h = 0; h < p.H; ++h)
            for (int64_t i = 0; i < p.Tq; ++i) {
                const int64_t hk = h / (p.H / p.Hk);
                std::vector<double> weight(static_cast<size_t>(p.Tk), 0);
                double sum = 0;
                for (int64_t j = 0; j < p.Tk; ++j) {
                    const int64_t first = p.first.empty() ? 0 : p.first[size_t(b * p.Tq + i)];
                    if (p.k0 + j < first || (p.causal && p.k0 + j > p.q0 + i)) continue;
                    double s = 0;
                    for (int64_t d = 0; d < p.D; ++d)
                        s += t.q.get(((b * p.Tq + i) * p.H + h) * p.D + d) *
                             t.k.get(((b * p.Tk + j) * p.Hk + hk) * p.D + d);
                    sum += weight[size_t(j)] = std::exp(p.scale * s);
                }
                if (sum == 0) continue;
                lse[size_t((b * p.H + h) * p.Tq + i)] = std::log(sum);
                for (int64_t j = 0; j < p.Tk; ++j)
                    for (int64_t d = 0; d < p.D; ++d)
                        o[size_t(((b * p.Tq + i) * p.H + h) * p.D + d)] +=
                            weight[size_t(j)] / sum *
                            t.v.get(((b * p.Tk + j) * p.Hk + hk) * p.D + d);
            }
}

// Random masks of all sorts; sizes around the edges of blocks.
std::vector<Problem> problems() {
    std::vector<Problem> all;
    const int64_t lengths[] = {1, 2, 63, 64, 65, 130};
    int64_t n = 0;
    for (int64_t Tq : lengths)
        for (int64_t Tk : lengths) {
            ++n;
            Problem p{
                .B = 1 + n % 2, .Tq = Tq, .Tk = Tk, .H = 4, .Hk = n % 3 ? 2 : 1, .D = 5 + n % 13};
            p.causal = n % 4 != 0;
            p.q0 = n % 5 * 17;
            p.k0 = n % 3 * 20;
            if (n % 2)
                for (int64_t i = 0; i < p.B * Tq; ++i)
                    p.first.push_back(int32_t(p.q0 + i % Tq - (i * 7 + n) % 90));
            all.push_back(p);
        }
    return all;
}

// The same problem with keys [begin, begin + count) only.
Problem part_of(const Problem& p, int64_t begin, int64_t count) {
    Problem part = p;
    part.k0 = p.k0 + begin;
    part.Tk = count;
    return part;
}

std::vector<std::pair<int64_t, int64_t>> split(int64_t Tk) {
    std::vector<std::pair<int64_t, int64_t>> parts;
    const int64_t sizes[] = {37, 1, 64, 5};
    for (int64_t begin = 0, n = 0; begin < Tk; ++n) {
        const int64_t count = std::min(sizes[n % 4], Tk - begin);
        parts.push_back({begin, count});
        begin += count;
    }
    return parts;
}

}  // namespace

TEST_CASE("attention equals its definition") {
    for (DType type : {DType::f64, DType::f32}) {
        const auto k = make_cpu_kernels(type);
        const double bound = type == DType::f64 ? 1e-13 : 2e-6;
        for (const Problem& p : problems()) {
            Tensors t(p, type);
            Stream s;
            k->attention_forward(s, t.forward(p));
            std::vector<double> o, lse;
            define(p, t, o, lse);
            CAPTURE(p.Tq);
            CAPTURE(p.Tk);
            EXPECT(relative_error(t.o.all(), o) < bound);
            EXPECT(relative_error(t.lse.all(), lse) < bound);
            for (size_t i = 0; i < lse.size(); ++i)
                REQUIRE_TRUE((lse[i] == -inf) == (t.lse.get(int64_t(i)) == -inf));
        }
    }
}

TEST_CASE("attention carried over blocks of keys, in any order, equals one call") {
    for (DType type : {DType::f64, DType::f32}) {
        const auto k = make_cpu_kernels(type);
        const double bound = type == DType::f64 ? 1e-13 : 2e-6;
        for (const Problem& p : problems())
            for (int order = 0; order < 3; ++order) {
                Tensors whole(p, type), carried(p, type);
                Stream s;
                k->attention_forward(s, whole.forward(p));
                k->fill(s, carried.o.tensor(), std::nan(""));  // not to be read
                k->fill(s, carried.lse.tensor(), -inf);
                auto parts = split(p.Tk);
                if (order == 1) std::reverse(parts.begin(), parts.end());
                if (order == 2)
                    std::rotate(parts.begin(), parts.begin() + int64_t(parts.size()) / 2,
                                parts.end());
                for (const auto& [begin, count] : parts) {
                    Attn a = carried.forward(part_of(p, begin, count));
                    a.k = a.k.slice(1, begin, count);
                    a.v = a.v.slice(1, begin, count);
                    a.carry = true;
                    k->attention_forward(s, a);
                }
                EXPECT(relative_error(carried.o.all(), whole.o.all()) < bound);
                EXPECT(relative_error(carried.lse.all(), whole.lse.all()) < bound);
            }
    }
}

TEST_CASE("partial attention merged afterwards equals one call") {
    const auto k = make_cpu_kernels(DType::f64);
    for (const Problem& p : problems()) {
        Tensors whole(p, DType::f64), merged(p, DType::f64), next(p, DType::f64);
        Stream s;
        k->attention_forward(s, whole.forward(p));
        k->fill(s, merged.o.tensor(), 0);
        k->fill(s, merged.lse.tensor(), -inf);
        for (const auto& [begin, count] : split(p.Tk)) {
            Attn a = next.forward(part_of(p, begin, count));
            a.k = a.k.slice(1, begin, count);
            a.v = a.v.slice(1, begin, count);
            k->attention_forward(s, a);
            k->attention_merge(s, merged.o.tensor(), merged.lse.tensor(), a.o, a.lse);
        }
        EXPECT(relative_error(merged.o.all(), whole.o.all()) < 1e-13);
        EXPECT(relative_error(merged.lse.all(), whole.lse.all()) < 1e-13);
    }
}

TEST_CASE("attention gradients accumulated over blocks of keys equal one call") {
    for (DType type : {DType::f64, DType::f32}) {
        const auto k = make_cpu_kernels(type);
        const double bound = type == DType::f64 ? 1e-13 : 3e-6;
        for (const Problem& p : problems()) {
            Tensors whole(p, type), parts(p, type);
            Stream s;
            k->attention_forward(s, whole.forward(p));
            k->attention_delta(s, whole.delta.tensor(), whole.dout.tensor(), whole.o.tensor());
            k->attention_backward(s, whole.backward(p));
            parts.lse = whole.lse;
            parts.delta = whole.delta;
            for (const auto& [begin, count] : split(p.Tk)) {
                AttnGrad g = parts.backward(part_of(p, begin, count));
                for (Tensor* t : {&g.k, &g.v, &g.dk, &g.dv}) *t = t->slice(1, begin, count);
                g.add_q = begin > 0;  // else what was there before does not matter
                k->attention_backward(s, g);
            }
            EXPECT(relative_error(parts.dq.all(), whole.dq.all()) < bound);
            EXPECT(relative_error(parts.dk.all(), whole.dk.all()) < bound);
            EXPECT(relative_error(parts.dv.all(), whole.dv.all()) < bound);
        }
    }
}

TEST_CASE(
    "a query that sees no key gets o = 0, lse = -inf and no gradient; carry keeps its state") {
    const auto k = make_cpu_kernels(DType::f32);
    Problem p{.B = 1, .Tq = 70, .Tk = 80, .H = 2, .Hk = 1, .D = 8, .k0 = 200};
    Tensors t(p, DType::f32);
    Stream s;
    k->attention_forward(s, t.forward(p));
    k->attention_delta(s, t.delta.tensor(), t.dout.tensor(), t.o.tensor());
    k->attention_backward(s, t.backward(p));
    for (double v : t.o.all()) REQUIRE_TRUE(v == 0);
    for (double v : t.lse.all()) REQUIRE_TRUE(v == -inf);
    for (const Value* d : {&t.dq, &t.dk, &t.dv})
        for (double v : d->all()) REQUIRE_TRUE(v == 0);

    t.o = random_value("o", DType::f32, {1, 70, 2, 8});
    t.lse = random_value("lse", DType::f32, {1, 2, 70});
    const std::vector<double> o = t.o.all(), lse = t.lse.all();
    Attn a = t.forward(p);
    a.carry = true;
    k->attention_forward(s, a);
    EXPECT(same_bits(t.o.all(), o));
    EXPECT(same_bits(t.lse.all(), lse));

    Problem none = p;  // no keys at all
    none.Tk = 0;
    none.k0 = 0;
    Tensors e(none, DType::f32);
    k->attention_forward(s, e.forward(none));
    for (double v : e.o.all()) REQUIRE_TRUE(v == 0);
    for (double v : e.lse.all()) REQUIRE_TRUE(v == -inf);
}

TEST_CASE("keys that no query may see are not read") {
    const auto k = make_cpu_kernels(DType::f32);
    Problem p{.B = 1, .Tq = 100, .Tk = 300, .H = 2, .Hk = 2, .D = 8, .q0 = 80};
    p.first.assign(100, 70);  // keys 70 .. 179 are seen
    Tensors clean(p, DType::f32), poisoned(p, DType::f32);
    for (Value* v : {&poisoned.k, &poisoned.v})
        for (int64_t i = 0; i < v->size(); ++i)
            if (i / 16 < 70 || i / 16 >= 180) v->set(i, std::nan(""));
    Stream s;
    for (Tensors* t : {&clean, &poisoned}) {
        k->attention_forward(s, t->forward(p));
        k->attention_delta(s, t->delta.tensor(), t->dout.tensor(), t->o.tensor());
        k->attention_backward(s, t->backward(p));
    }
    EXPECT(same_bits(clean.o.all(), poisoned.o.all()));
    EXPECT(same_bits(clean.dq.all(), poisoned.dq.all()));
    EXPECT(same_bits(clean.dk.all(), poisoned.dk.all()));
    for (double v : clean.o.all()) REQUIRE_TRUE(std::isfinite(v));
}

TEST_CASE("large scores neither overflow nor lose the largest") {
    for (DType type : {DType::f32, DType::f64}) {
        const auto k = make_cpu_kernels(type);
        Problem p{.B = 1, .Tq = 4, .Tk = 200, .H = 1, .Hk = 1, .D = 4, .causal = false};
        p.scale = 3000;
        Tensors t(p, type);
        Stream s;
        k->attention_forward(s, t.forward(p));
        k->attention_delta(s, t.delta.tensor(), t.dout.tensor(), t.o.tensor());
        k->attention_backward(s, t.backward(p));
        for (const Value* x : {&t.o, &t.lse, &t.dq, &t.dk, &t.dv})
            for (double v : x->all()) REQUIRE_TRUE(std::isfinite(v));
        // One key takes all the weight: o is its v.
        for (int64_t i = 0; i < 4; ++i) {
            int64_t best = 0;
            double most = -inf;
            for (int64_t j = 0; j < 200; ++j) {
                double score = 0;
                for (int64_t d = 0; d < 4; ++d) score += t.q.get(i * 4 + d) * t.k.get(j * 4 + d);
                if (score > most) most = score, best = j;
            }
            for (int64_t d = 0; d < 4; ++d)
                EXPECT(std::fabs(t.o.get(i * 4 + d) - t.v.get(best * 4 + d)) < 1e-3);
        }
    }
}

TEST_CASE("attention_merge at the extremes") {
    for (DType type : {DType::f32, DType::f64}) {
        const auto k = make_cpu_kernels(type);
        Stream s;
        const auto merged = [&](double o1, double l1, double o2, double l2) {
            Value a(type, {1, 1, 1, 1}), la(type, {1, 1, 1}), b = a, lb = la;
            a.set(0, o1), la.set(0, l1), b.set(0, o2), lb.set(0, l2);
            k->attention_merge(s, a.tensor(), la.tensor(), b.tensor(), lb.tensor());
            return std::pair{a.get(0), la.get(0)};
        };
        const double eps = type == DType::f32 ? 1e-6 : 1e-14;
        for (double base : {0.0, -5.0, 1e4, -1e4})
            for (double gap : {0.0, 1.0, 88.0, 92.0, 1e4})
                for (bool swap : {false, true}) {
                    const double high = base, low = base - gap;
                    const auto [o, lse] = swap ? merged(3, low, 2, high) : merged(2, high, 3, low);
                    const double w = std::exp(-gap);
                    EXPECT(std::fabs(o - (2 + 3 * w) / (1 + w)) < 4 * eps);
                    EXPECT(std::fabs(lse - (base + std::log1p(w))) <= eps * (1 + std::fabs(base)));
                }
        // A part of lse = -inf weighs nothing, whatever its o.
        EXPECT(merged(2, 0.5, std::nan(""), -inf) == std::pair{2.0, 0.5});
        EXPECT(merged(std::nan(""), -inf, 2, 0.5) == std::pair{2.0, 0.5});
        EXPECT(merged(0, -inf, 0, -inf) == std::pair{0.0, -inf});
    }
}

TEST_CASE("attention rejects heads that do not divide") {
    const auto k = make_cpu_kernels(DType::f32);
    Problem p{.B = 1, .Tq = 3, .Tk = 3, .H = 3, .Hk = 2, .D = 4};
    Tensors t(p, DType::f32);
    Stream s;
    EXPECT_THROWS_AS(k->attention_forward(s, t.forward(p)), Error);
    EXPECT_THROWS_AS(k->attention_backward(s, t.backward(p)), Error);
}
