// See seq_case.h.
#include "test/comm/seq_case.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "kernels/float16.h"
#include "kernels/rng.h"
#include "test/comm/ranks.h"
#include "test/test.h"

namespace torus {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<double> random_values(int64_t n, uint64_t stream) {
    std::vector<double> v(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = random_normal(7, stream, uint64_t(i));
    return v;
}

std::vector<int32_t> make_first_key(const AttnDims& d, Documents documents, int P) {
    std::vector<int32_t> first(size_t(d.B * d.S));
    for (int64_t b = 0; b < d.B; ++b) {
        int64_t start = 0;
        for (int64_t i = 0; i < d.S; ++i) {
            bool starts = i == 0 || i == 1 || i == d.S - 1;
            if (documents == Documents::scattered) {
                starts = random_bits(11, uint64_t(b), uint64_t(i)) % 9 == 0;
            } else {
                for (int p = 0; p < 2 * P; ++p) starts = starts || i == d.S * p / (2 * P);
                if (b % 2) starts = i == 0 || i == d.S / 2;
            }
            if (starts) start = i;
            int64_t f = start;
            if (documents == Documents::scattered) {
                if (b == 1) f = std::max<int64_t>(0, i - 5);  // a window in place of documents
                if (i % 13 == 4) f = i + 1;                   // sees nothing
            }
            first[size_t(b * d.S + i)] = int32_t(f);
        }
    }
    return first;
}

// Rows of a (B,S,row) array that the runs name, as (B,T,row).
template <class T>
std::vector<T> take(const std::vector<T>& all, const AttnDims& d, int64_t row,
                    const std::vector<TokenRun>& runs) {
    std::vector<T> out;
    for (int64_t b = 0; b < d.B; ++b)
        for (const TokenRun& r : runs) {
            const auto from = all.begin() + (b * d.S + r.begin) * row;
            out.insert(out.end(), from, from + r.count * row);
        }
    return out;
}
// The same of (B,H,S), as (B,H,T).
std::vector<double> take_stats(const std::vector<double>& all, const AttnDims& d,
                               const std::vector<TokenRun>& runs) {
    AttnDims flat = d;
    flat.B = d.B * d.H;
    return take(all, flat, 1, runs);
}

// Memory of a backend with values copied in and out; starts as NaN.
class Values {
public:
    Values(Kernels& k, Stream& s, DType dtype, const Shape& shape)
        : k_(k),
          s_(s),
          buffer_(k.device(), Memory::device, shape.numel() * size_of(dtype) + 1),
          staging_(k.device(), Memory::device, shape.numel() * 8 + 1) {
        k.device().set_bytes(s, buffer_.data(), 0xff, buffer_.bytes());
        t = Tensor(buffer_.data(), dtype, shape);
    }
    void put(const Tensor& part, const std::vector<double>& v) {
        if (v.empty()) return;
        const Tensor wide(staging_.data(), DType::f64, part.shape);
        k_.device().copy(s_, wide.data, v.data(), wide.bytes());
        k_.cast(s_, part, wide);
        k_.device().synchronize(s_);
    }
    std::vector<double> get(const Tensor& part) {
        std::vector<double> v(static_cast<size_t>(part.numel()));
        if (v.empty()) return v;
        const Tensor wide(staging_.data(), DType::f64, part.shape);
        k_.cast(s_, wide, part);
        k_.device().copy(s_, v.data(), wide.data, wide.bytes());
        k_.device().synchronize(s_);
        return v;
    }
    Tensor t;

private:
    Kernels& k_;
    Stream& s_;
    Buffer buffer_, staging_;
};

double difference(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE_TRUE(a.size() == b.size());
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i]) continue;  // also -inf
        const double e = std::fabs(a[i] - b[i]) / (1 + std::fabs(b[i]));
        worst = e <= worst ? worst : e;
        if (!(e <= worst)) return infinity;  // NaN
    }
    return worst;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

}  // namespace

WholeAttention make_whole(const AttnDims& d, Documents documents, int P, double sharpness,
                          DType inputs) {
    std::vector<int32_t> first_key;
    if (documents != Documents::none) first_key = make_first_key(d, documents, P);
    return make_whole(d, std::move(first_key), sharpness, inputs);
}

WholeAttention make_whole(const AttnDims& d, std::vector<int32_t> first_key, double sharpness,
                          DType inputs) {
    WholeAttention w;
    w.d = d;
    w.first_key = std::move(first_key);
    const int64_t q_size = d.B * d.S * d.H * d.D, k_size = d.B * d.S * d.Hk * d.D;
    w.q = random_values(q_size, 1);
    for (double& x : w.q) x *= sharpness;
    w.k = random_values(k_size, 2);
    w.v = random_values(k_size, 3);
    w.dout = random_values(q_size, 4);
    if (inputs == DType::bf16)
        for (auto* values : {&w.q, &w.k, &w.v, &w.dout})
            for (double& x : *values) x = double(bf16_to_float(float_to_bf16(float(x))));
    w.o.assign(size_t(q_size), 0);
    w.dq = w.o;
    w.dk.assign(size_t(k_size), 0);
    w.dv = w.dk;
    w.lse.assign(size_t(d.B * d.H * d.S), -infinity);
    const double scale = 1 / std::sqrt(double(d.D));
    std::vector<double> p(static_cast<size_t>(d.S)), dp(static_cast<size_t>(d.S));
    for (int64_t b = 0; b < d.B; ++b)
        for (int64_t h = 0; h < d.H; ++h)
            for (int64_t i = 0; i < d.S; ++i) {
                const int64_t hk = h / (d.H / d.Hk);
                const auto row = [&](std::vector<double>& all, int64_t s, int64_t heads,
                                     int64_t head) {
                    return &all[size_t(((b * d.S + s) * heads + head) * d.D)];
                };
                const auto dot = [&](const double* x, const double* y) {
                    double sum = 0;
                    for (int64_t c = 0; c < d.D; ++c) sum += x[c] * y[c];
                    return sum;
                };
                const int64_t first = w.first_key.empty() ? 0 : w.first_key[size_t(b * d.S + i)];
                if (first > i) continue;
                const double* q = row(w.q, i, d.H, h);
                const double* dout = row(w.dout, i, d.H, h);
                double most = -infinity, sum = 0, delta = 0;
                for (int64_t j = first; j <= i; ++j) {
                    p[size_t(j)] = scale * dot(q, row(w.k, j, d.Hk, hk));
                    most = std::max(most, p[size_t(j)]);
                }
                for (int64_t j = first; j <= i; ++j)
                    sum += p[size_t(j)] = std::exp(p[size_t(j)] - most);
                w.lse[size_t((b * d.H + h) * d.S + i)] = most + std::log(sum);
                for (int64_t j = first; j <= i; ++j) {
                    p[size_t(j)] /= sum;
                    dp[size_t(j)] = dot(dout, row(w.v, j, d.Hk, hk));
                    delta += p[size_t(j)] * dp[size_t(j)];
                    for (int64_t c = 0; c < d.D; ++c)
                        row(w.o, i, d.H, h)[c] += p[size_t(j)] * row(w.v, j, d.Hk, hk)[c];
                }
                for (int64_t j = first; j <= i; ++j) {
                    const double ds = p[size_t(j)] * (dp[size_t(j)] - delta) * scale;
                    for (int64_t c = 0; c < d.D; ++c) {
                        row(w.dq, i, d.H, h)[c] += ds * row(w.k, j, d.Hk, hk)[c];
                        row(w.dk, j, d.Hk, hk)[c] += ds * q[c];
                        row(w.dv, j, d.Hk, hk)[c] += p[size_t(j)] * dout[c];
                    }
                }
            }
    return w;
}

RankResult run_rank(Comm& world, const SeqCase& c, const WholeAttention& w, DType dtype) {
    const auto kernels = make_cpu_kernels(dtype);
    return run_rank(world, c, w, *kernels);
}

RankResult run_rank(Comm& world, const SeqCase& c, const WholeAttention& w, Kernels& k) {
    Mesh mesh = make_mesh(world, c.shape);
    return run_rank(mesh, c, w, k);
}

RankResult run_rank(Mesh& mesh, const SeqCase& c, const WholeAttention& w, Kernels& k) {
    const AttnDims d = w.d;
    const DType act = k.precision().act;
    const auto seq = make_seq_parallel(c.mode, k, mesh, d, c.head_slices);
    Layout device_plan, pinned_plan;
    seq->plan(device_plan, pinned_plan);
    const Arena device(k.device(), Memory::device, device_plan);
    const Arena pinned(k.device(), Memory::pinned, pinned_plan);
    Stream s = k.device().make_stream();
    const Buffer workspace(k.device(), Memory::device, k.workspace_bytes(seq->workspace()));
    s.workspace = Tensor(workspace.data(), DType::u8, {workspace.bytes()});
    if (device.bytes()) k.device().set_bytes(s, device.data(), 0xff, device.bytes());
    seq->bind(device, pinned);
    if (c.earlier) seq->set_documents(c.earlier);
    if (c.announce) seq->set_documents(w.first_key.empty() ? nullptr : w.first_key.data());

    RankResult r;
    r.runs = seq->placement();
    int64_t T = 0;
    for (const TokenRun& run : r.runs) T += run.count;
    // q, k and v are views of one packed matrix, as the model has them.
    const Shape packed{d.B, T, d.H + 2 * d.Hk, d.D};
    Values qkv(k, s, act, packed), dqkv(k, s, act, packed);
    Values o(k, s, act, {d.B, T, d.H, d.D}), dout(k, s, act, {d.B, T, d.H, d.D});
    Values lse(k, s, k.precision().stat, {d.B, d.H, T});
    Values delta(k, s, k.precision().stat, {d.B, d.H, T});
    const auto heads = [&](const Values& v, int64_t first, int64_t count) {
        return v.t.slice(2, first, count);
    };
    qkv.put(heads(qkv, 0, d.H), take(w.q, d, d.H * d.D, r.runs));
    qkv.put(heads(qkv, d.H, d.Hk), take(w.k, d, d.Hk * d.D, r.runs));
    qkv.put(heads(qkv, d.H + d.Hk, d.Hk), take(w.v, d, d.Hk * d.D, r.runs));
    dout.put(dout.t, take(w.dout, d, d.H * d.D, r.runs));
    AttnGradIn g{.q = heads(qkv, 0, d.H),
                 .k = heads(qkv, d.H, d.Hk),
                 .v = heads(qkv, d.H + d.Hk, d.Hk),
                 .o = o.t,
                 .lse = lse.t,
                 .dout = dout.t,
                 .first_key = {},
                 .dq = heads(dqkv, 0, d.H),
                 .dk = heads(dqkv, d.H, d.Hk),
                 .dv = heads(dqkv, d.H + d.Hk, d.Hk),
                 .delta = {}};
    const Buffer mask(k.device(), Memory::device, d.B * T * 4);
    if (!w.first_key.empty()) {
        const std::vector<int32_t> first = take(w.first_key, d, 1, r.runs);
        if (T > 0) k.device().copy(s, mask.data(), first.data(), mask.bytes());
        k.device().synchronize(s);
        g.first_key = Tensor(mask.data(), DType::i32, {d.B, T});
    }
    k.device().freeze();
    for (int repeat = 0; repeat < 2; ++repeat) {
        const auto sent = [&] { return mesh.ring->bytes_sent() + mesh.ulysses->bytes_sent(); };
        const int64_t before = sent();
        seq->forward(
            s, {.q = g.q, .k = g.k, .v = g.v, .o = g.o, .lse = g.lse, .first_key = g.first_key});
        AttnGradIn given = g;
        if (repeat == 1) {  // delta in place of o
            if (T > 0) k.attention_delta(s, delta.t, g.dout, g.o);
            given.delta = delta.t;
            given.o = {};
        }
        seq->backward(s, given);
        RankResult now = r;
        now.o = o.get(o.t);
        now.lse = lse.get(lse.t);
        now.dq = dqkv.get(g.dq);
        now.dk = dqkv.get(g.dk);
        now.dv = dqkv.get(g.dv);
        now.bytes_sent = sent() - before;
        now.imbalance = seq->imbalance();
        const bool same = repeat == 0 || (same_bits(now.o, r.o) && same_bits(now.lse, r.lse) &&
                                          same_bits(now.dq, r.dq) && same_bits(now.dk, r.dk) &&
                                          same_bits(now.dv, r.dv));
        require(same, Exit::internal, c.mode, ": other bits in a second run");
        r = now;
    }
    k.device().thaw();
    k.device().synchronize(s);
    k.device().destroy(s);
    return r;
}

double largest_error(const RankResult& r, const WholeAttention& w) {
    const AttnDims& d = w.d;
    double worst = 0;
    for (const double e : {difference(r.o, take(w.o, d, d.H * d.D, r.runs)),
                           difference(r.lse, take_stats(w.lse, d, r.runs)),
                           difference(r.dq, take(w.dq, d, d.H * d.D, r.runs)),
                           difference(r.dk, take(w.dk, d, d.Hk * d.D, r.runs)),
                           difference(r.dv, take(w.dv, d, d.Hk * d.D, r.runs))})
        worst = std::max(worst, e);
    return worst;
}

SquareSums gradient_error(const RankResult& r, const WholeAttention& w) {
    SquareSums sums;
    const auto add = [&](const std::vector<double>& got, const std::vector<double>& want) {
        for (size_t i = 0; i < got.size(); ++i) {
            sums.error += (got[i] - want[i]) * (got[i] - want[i]);
            sums.norm += want[i] * want[i];
        }
    };
    const AttnDims& d = w.d;
    add(r.dq, take(w.dq, d, d.H * d.D, r.runs));
    add(r.dk, take(w.dk, d, d.Hk * d.D, r.runs));
    add(r.dv, take(w.dv, d, d.Hk * d.D, r.runs));
    return sums;
}

double run_case(const SeqCase& c, const WholeAttention& w) {
    std::mutex mutex;
    std::vector<int> held(size_t(w.d.S), 0);
    double worst = 0;
    run_ranks(c.shape.size(), [&](Comm& world) {
        const RankResult r = run_rank(world, c, w);
        const std::lock_guard lock(mutex);
        worst = std::max(worst, largest_error(r, w));
        for (const TokenRun& run : r.runs)
            for (int64_t i = run.begin; i < run.end(); ++i) ++held[size_t(i)];
    });
    for (const int n : held)
        if (n != c.shape.dp) return infinity;
    return worst;
}

std::vector<MeshShape> shapes_for(const SeqMode& mode, int P) {
    if (!mode.ring && !mode.ulysses) return {{.dp = P}};
    std::vector<MeshShape> shapes;
    for (int ulysses = 1; ulysses <= P; ++ulysses) {
        if (P % ulysses) continue;
        const int ring = P / ulysses;
        if ((ring > 1 && !mode.ring) || (ulysses > 1 && !mode.ulysses)) continue;
        // Of a mode with both axes the mixed meshes, when there are any.
        const bool mixed = ring > 1 && ulysses > 1, prime = P < 4 || P == 5 || P == 7;
        if (mode.ring && mode.ulysses && !mixed && !prime) continue;
        shapes.push_back({.ring = ring, .ulysses = ulysses});
    }
    return shapes;
}

std::vector<int> slices_for(const MeshShape& shape, int64_t Hk) {
    if (shape.ulysses == 1 || Hk == 1) return {1};
    int least = 2;
    while (Hk % least != 0) ++least;
    return {1, least};
}

}  // namespace torus
