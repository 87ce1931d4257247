// Attention in blocks of queries and keys with a running maximum and sum (Milakov & Gimelshein
// 2018; FlashAttention, Dao et al. 2022): memory does not grow with Tq * Tk. A call sees one block
// of keys of a longer sequence; (o, lse) of earlier blocks enter as the starting state, which is
// all that `carry` means. Backward recomputes the probabilities from the final lse; one task owns a
// key-value head with its group of query heads, so dq, dk and dv are summed in one fixed order.
#include <algorithm>
#include <limits>

#include "kernels/cpu/block.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {
namespace {

constexpr int64_t block_q = 64, block_k = 64;

template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

// One head of a (B,T,H,D) tensor: rows `row` apart.
template <class T>
struct Head {
    Head(const Tensor& t, int64_t b, int64_t h)
        : data(t.as<T>() + b * t.pitch(0) + h * t.pitch(2)), row(t.pitch(1)) {}
    T* at(int64_t i) const { return data + i * row; }
    Strided<T> rows(int64_t first) const { return {at(first), row, 1}; }
    T* data;
    int64_t row;
};

struct Range {
    int64_t begin, end;
    bool empty() const { return begin >= end; }
    Range within(Range o) const { return {std::max(begin, o.begin), std::min(end, o.end)}; }
};

// The one mask rule. Keys are counted from the call's first: key j stands at position k0 + j.
struct Mask {
    int64_t q0, k0, Tk;
    bool causal;
    const int32_t* first_key;  // of sequence b, or null

    Range keys_of(int64_t i) const {
        const int64_t begin = first_key ? int64_t(first_key[i]) - k0 : 0;
        const int64_t end = causal ? q0 + i + 1 - k0 : Tk;
        return Range{begin, end}.within({0, Tk});
    }
    // The smallest range that holds the keys of all these queries.
    Range keys_of(Range queries) const {
        Range all{Tk, 0};
        for (int64_t i = queries.begin; i < queries.end; ++i) {
            const Range r = keys_of(i);
            if (!r.empty()) all = {std::min(all.begin, r.begin), std::max(all.end, r.end)};
        }
        return all;
    }
};

struct Sizes {
    int64_t B, Tq, Tk, H, Hk, D;
};

// The numbers of one head in a (B,H,T) tensor.
template <class T>
T* row_stats(const Tensor& t, int64_t b, int64_t h) {
    return t.as<T>() + b * t.pitch(0) + h * t.pitch(1);
}

template <class Call>
Sizes check_inputs(const char* op, const Call& c, DType type) {
    expect_rank(op, "q", c.q, type, 4, true);
    expect_rank(op, "k", c.k, type, 4, true);
    const Sizes z{c.q.dim(0), c.q.dim(1), c.k.dim(1), c.q.dim(2), c.k.dim(2), c.q.dim(3)};
    CHECK(z.Hk > 0 && z.H % z.Hk == 0, ": ", op, ": ", z.H, " heads over ", z.Hk,
          " key-value heads");
    expect(op, "k", c.k, type, {z.B, z.Tk, z.Hk, z.D}, true);
    expect(op, "v", c.v, type, {z.B, z.Tk, z.Hk, z.D}, true);
    expect(op, "lse", c.lse, type, {z.B, z.H, z.Tq}, true);
    if (c.first_key) expect(op, "first_key", c.first_key, DType::i32, {z.B, z.Tq}, true);
    return z;
}

template <class Call>
Mask mask_of(const Call& c, int64_t b) {
    return {c.q0, c.k0, c.k.dim(1), c.causal,
            c.first_key ? c.first_key.template as<int32_t>() + b * c.first_key.pitch(0) : nullptr};
}

// The running softmax of one query over the keys seen so far.
template <class T>
struct Running {
    T max;
    double sum;
};

// Turns a row of scores into exp(scale * score - max) within `range`, 0 outside, over [0, width);
// returns what the row of o must be multiplied by.
template <class T>
CLONES T softmax_row(T* s, int64_t width, Range range, T scale, Running<T>& state) {
    for (int64_t j = 0; j < std::min(range.begin, width); ++j) s[j] = 0;
    for (int64_t j = std::max<int64_t>(range.end, 0); j < width; ++j) s[j] = 0;
    if (range.empty()) return 1;
    T* x = s + range.begin;
    const int64_t n = range.end - range.begin;
    for (int64_t j = 0; j < n; ++j) x[j] *= scale;
    const T max = std::max(state.max, lane_max(n, x));
    const T factor = state.max == max ? T(1) : fast_exp(state.max - max);
    for (int64_t j = 0; j < n; ++j) x[j] = fast_exp(x[j] - max);
    state.sum =
        state.sum * double(factor) + double(lane_sum<T>(n, [&](int64_t j) { return x[j]; }));
    state.max = max;
    return factor;
}

// Block of queries [rows.begin, rows.end) of one head against all keys.
template <class T>
void forward_block(const Attn& a, const Mask& mask, Range rows, int64_t b, int64_t h) {
    const int64_t D = a.q.dim(3), hk = h / (a.q.dim(2) / a.k.dim(2));
    const Head<T> q(a.q, b, h), k(a.k, b, hk), v(a.v, b, hk), o(a.o, b, h);
    T* lse = row_stats<T>(a.lse, b, h);
    const int64_t n = rows.end - rows.begin;
    Running<T> state[block_q];
    for (int64_t r = 0; r < n; ++r) {
        const int64_t i = rows.begin + r;
        const bool started = a.carry && lse[i] > -infinity<T>;
        state[r] = started ? Running<T>{lse[i], 1} : Running<T>{-infinity<T>, 0};
        if (!started) std::fill(o.at(i), o.at(i) + D, T(0));
    }
    alignas(64) T s[block_q * block_k];
    const Range all = mask.keys_of(rows);
    for (int64_t j0 = all.begin; j0 < all.end; j0 += block_k) {
        const int64_t width = std::min(block_k, all.end - j0);
        block_product<T>(n, width, D, q.rows(rows.begin), k.rows(j0).t(), s, block_k, false);
        for (int64_t r = 0; r < n; ++r) {
            Range range = mask.keys_of(rows.begin + r).within({j0, j0 + width});
            range = {range.begin - j0, range.end - j0};
            const T factor = softmax_row(s + r * block_k, width, range, T(a.scale), state[r]);
            if (factor == 1) continue;
            T* row = o.at(rows.begin + r);
            for (int64_t d = 0; d < D; ++d) row[d] *= factor;
        }
        block_product<T>(n, D, width, {s, block_k, 1}, v.rows(j0), o.at(rows.begin), o.row, true);
    }
    for (int64_t r = 0; r < n; ++r) {
        const int64_t i = rows.begin + r;
        if (state[r].sum == 0) {  // no key seen: o is 0 already
            lse[i] = -infinity<T>;
            continue;
        }
        const T inverse = T(1 / state[r].sum);
        for (int64_t d = 0; d < D; ++d) o.at(i)[d] *= inverse;
        lse[i] = T(double(state[r].max) + std::log(state[r].sum));
    }
}

// s = scores, dp = dout v^T  ->  s = probabilities p, dp = scale * p * (dp - delta); 0 outside.
template <class T>
CLONES void gradient_row(T* s, T* dp, int64_t width, Range range, T scale, T lse, T delta) {
    for (int64_t j = 0; j < width; ++j) {
        const bool visible = j >= range.begin && j < range.end;
        const T p = visible ? fast_exp(s[j] * scale - lse) : T(0);
        s[j] = p;
        dp[j] = visible ? scale * p * (dp[j] - delta) : T(0);
    }
}

// Query head h against its key-value head.
template <class T>
void backward_head(const AttnGrad& g, const Mask& mask, int64_t b, int64_t h) {
    const int64_t Tq = g.q.dim(1), H = g.q.dim(2), D = g.q.dim(3), hk = h / (H / g.k.dim(2));
    const Head<T> q(g.q, b, h), k(g.k, b, hk), v(g.v, b, hk), dout(g.dout, b, h);
    const Head<T> dq(g.dq, b, h), dk(g.dk, b, hk), dv(g.dv, b, hk);
    const T *lse = row_stats<T>(g.lse, b, h), *delta = row_stats<T>(g.delta, b, h);
    alignas(64) T s[block_q * block_k], dp[block_q * block_k];
    for (int64_t i0 = 0; i0 < Tq; i0 += block_q) {
        const int64_t n = std::min(block_q, Tq - i0);
        const Range all = mask.keys_of(Range{i0, i0 + n});
        for (int64_t j0 = all.begin; j0 < all.end; j0 += block_k) {
            const int64_t width = std::min(block_k, all.end - j0);
            block_product<T>(n, width, D, q.rows(i0), k.rows(j0).t(), s, block_k, false);
            block_product<T>(n, width, D, dout.rows(i0), v.rows(j0).t(), dp, block_k, false);
            for (int64_t r = 0; r < n; ++r) {
                const int64_t i = i0 + r;
                Range range = mask.keys_of(i).within({j0, j0 + width});
                range = {range.begin - j0, range.end - j0};
                if (lse[i] == -infinity<T>) range = {0, 0};
                gradient_row(s + r * block_k, dp + r * block_k, width, range, T(g.scale), lse[i],
                             delta[i]);
            }
            const Strided<T> p{s, block_k, 1}, ds{dp, block_k, 1};
            block_product<T>(width, D, n, p.t(), dout.rows(i0), dv.at(j0), dv.row, true);
            block_product<T>(width, D, n, ds.t(), q.rows(i0), dk.at(j0), dk.row, true);
            block_product<T>(n, D, width, ds, k.rows(j0), dq.at(i0), dq.row, true);
        }
    }
}

template <class T>
void clear_head(const Tensor& t, int64_t b, int64_t h) {
    const Head<T> head(t, b, h);
    for (int64_t i = 0; i < t.dim(1); ++i) std::fill(head.at(i), head.at(i) + t.dim(3), T(0));
}

}  // namespace

template <class T>
void CpuKernels<T>::attention_forward(Stream&, const Attn& a) {
    const Sizes z = check_inputs("attention_forward", a, type);
    expect("attention_forward", "o", a.o, type, {z.B, z.Tq, z.H, z.D}, true);
    const int64_t blocks = (z.Tq + block_q - 1) / block_q;
    parallel_tasks(z.B * z.H * blocks, std::min(block_q, z.Tq) * z.Tk * z.D / 8, [&](int64_t task) {
        const int64_t i = task % blocks * block_q, h = task / blocks % z.H, b = task / blocks / z.H;
        forward_block<T>(a, mask_of(a, b), {i, std::min(z.Tq, i + block_q)}, b, h);
    });
}

template <class T>
void CpuKernels<T>::attention_delta(Stream&, Tensor delta, Tensor dout, Tensor o) {
    expect_rank("attention_delta", "dout", dout, type, 4, true);
    const int64_t B = dout.dim(0), Tn = dout.dim(1), H = dout.dim(2), D = dout.dim(3);
    expect("attention_delta", "o", o, type, {B, Tn, H, D}, true);
    expect("attention_delta", "delta", delta, type, {B, H, Tn}, true);
    parallel_for(B * H, Tn * D, [&](int64_t bh) {
        const Head<T> g(dout, bh / H, bh % H), out(o, bh / H, bh % H);
        for (int64_t i = 0; i < Tn; ++i) {
            const T *x = g.at(i), *y = out.at(i);
            row_stats<T>(delta, bh / H, bh % H)[i] =
                T(lane_sum<double>(D, [&](int64_t d) { return double(x[d]) * double(y[d]); }));
        }
    });
}

template <class T>
void CpuKernels<T>::attention_backward(Stream&, const AttnGrad& g) {
    const Sizes z = check_inputs("attention_backward", g, type);
    expect("attention_backward", "dout", g.dout, type, {z.B, z.Tq, z.H, z.D}, true);
    expect("attention_backward", "delta", g.delta, type, {z.B, z.H, z.Tq}, true);
    expect("attention_backward", "dq", g.dq, type, {z.B, z.Tq, z.H, z.D}, true);
    expect("attention_backward", "dk", g.dk, type, {z.B, z.Tk, z.Hk, z.D}, true);
    expect("attention_backward", "dv", g.dv, type, {z.B, z.Tk, z.Hk, z.D}, true);
    const int64_t group = z.H / z.Hk;
    parallel_tasks(z.B * z.Hk, group * z.Tq * z.Tk * z.D / 4, [&](int64_t task) {
        const int64_t b = task / z.Hk, hk = task % z.Hk;
        if (!g.add_kv) clear_head<T>(g.dk, b, hk), clear_head<T>(g.dv, b, hk);
        for (int64_t h = hk * group; h < (hk + 1) * group; ++h) {
            if (!g.add_q) clear_head<T>(g.dq, b, h);
            backward_head<T>(g, mask_of(g, b), b, h);
        }
    });
}

template <class T>
void CpuKernels<T>::attention_merge(Stream&, Tensor o, Tensor lse, Tensor o2, Tensor lse2) {
    expect_rank("attention_merge", "o", o, type, 4, true);
    const int64_t B = o.dim(0), Tn = o.dim(1), H = o.dim(2), D = o.dim(3);
    expect("attention_merge", "o2", o2, type, {B, Tn, H, D}, true);
    expect("attention_merge", "lse", lse, type, {B, H, Tn}, true);
    expect("attention_merge", "lse2", lse2, type, {B, H, Tn}, true);
    parallel_for(B * H, Tn * D, [&](int64_t bh) {
        const Head<T> x(o, bh / H, bh % H), y(o2, bh / H, bh % H);
        for (int64_t i = 0; i < Tn; ++i) {
            T& l = row_stats<T>(lse, bh / H, bh % H)[i];
            const T l2 = row_stats<T>(lse2, bh / H, bh % H)[i];
            if (l2 == -infinity<T>) continue;
            T *to = x.at(i), *from = y.at(i);
            if (l == -infinity<T>) {
                std::copy(from, from + D, to);
                l = l2;
                continue;
            }
            // Weights relative to the larger part: one exponent is 0, the other negative.
            const double max = std::max(double(l), double(l2));
            const double w1 = std::exp(double(l) - max), w2 = std::exp(double(l2) - max);
            const T f1 = T(w1 / (w1 + w2)), f2 = T(w2 / (w1 + w2));
            for (int64_t d = 0; d < D; ++d) to[d] = f1 * to[d] + f2 * from[d];
            l = T(max + std::log(w1 + w2));
        }
    });
}

INSTANTIATE(attention_forward, (Stream&, const Attn&));
INSTANTIATE(attention_delta, (Stream&, Tensor, Tensor, Tensor));
INSTANTIATE(attention_backward, (Stream&, const AttnGrad&));
INSTANTIATE(attention_merge, (Stream&, Tensor, Tensor, Tensor, Tensor));

}  // namespace torus
