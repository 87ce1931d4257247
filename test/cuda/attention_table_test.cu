// Tables of attention shapes in bf16 and fp16 against the definition in fp64 on the GPU, through
// Kernels: lengths around the tiles' edges and up to a million tokens, all head dims, grouped
// heads, all masks, blocks of keys, scaled scores; the Hopper kernels, the backward by single
// blocks and by pairs, the mma.sync ones and cuDNN's. An output may be at most twice, a gradient
// three times as far off (rms over the tensor) as a textbook 16-bit implementation, its largest
// error twice that, lse 1e-5; memory between rows, and between heads, must survive.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/flash/flash.h"
#include "test/cuda/attention_cases.cuh"
#include "test/cuda/attention_reference.cuh"
#include "test/cuda/gpu.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

void cuda_ok(cudaError_t e, const char* what) {
    require(e == cudaSuccess, Exit::internal, what, ": ", cudaGetErrorString(e));
}

// Device memory of one case, filled with 0xFF: NaN in every type.
class Scratch {
public:
    explicit Scratch(Gpu& gpu) : gpu_(gpu) {}
    template <class T>
    T* take(int64_t n, uint8_t fill = 0xFF) {
        const int64_t bytes = std::max<int64_t>(n, 1) * int64_t(sizeof(T));
        all_.emplace_back(gpu_.k->device(), Memory::device, bytes);
        gpu_.k->device().set_bytes(gpu_.stream, all_.back().data(), fill, bytes);
        return static_cast<T*>(all_.back().data());
    }
    size_t count() const { return all_.size(); }
    void give_back(size_t first) {  // all from this one on
        gpu_.k->device().synchronize(gpu_.stream);
        all_.erase(all_.begin() + ptrdiff_t(first), all_.end());
    }

private:
    Gpu& gpu_;
    std::vector<Buffer> all_;
};

Tensor heads_in(void* data, DType dtype, const Shape& shape, int64_t row, int64_t head) {
    Tensor t(data, dtype, shape);
    t.stride = {shape[1] * row, row, head, 1};
    return t;
}

template <class T>
reference::View<T> view(const Tensor& t) {
    return {static_cast<const T*>(t.data), t.pitch(0), t.pitch(1), t.pitch(2)};
}

constexpr int gap = 8;  // elements between rows, and heads
constexpr int blocks = 132 * 8;

// One case in activations of type T.
template <class T>
class Check {
public:
    Check(Gpu& gpu, const Case& c) : gpu_(gpu), c_(c), m_(gpu) {
        const int64_t packed = (c.H + 2 * c.Hk) * c.D + gap;
        T* const all = c.Tq == c.Tk ? m_.take<T>(c.B * c.Tq * packed) : nullptr;
        const auto part = [&](int64_t at, int64_t Tn, int64_t H) {
            const Shape shape{c.B, Tn, H, c.D};
            if (all) return heads_in(all + at * c.D, type(), shape, packed, c.D);
            const int64_t row = H * c.D + gap;
            return heads_in(m_.take<T>(c.B * Tn * row), type(), shape, row, c.D);
        };
        q_ = part(0, c.Tq, c.H), k_ = part(c.H, c.Tk, c.Hk), v_ = part(c.H + c.Hk, c.Tk, c.Hk);
        dout_ = matrix<T>(c.Tq, c.H);
        fill(q_, 1, c.q_scale), fill(k_, 2, c.k_scale), fill(v_, 3, 1), fill(dout_, 4, 1);
        if (c.masks != Masks::none) {
            const std::vector<int32_t> host = first_keys(c);
            first_ = Tensor(m_.take<int32_t>(c.B * c.Tq), DType::i32, {c.B, c.Tq});
            gpu.k->device().copy(gpu.stream, first_.data, host.data(), first_.bytes());
            gpu.k->device().synchronize(gpu.stream);
        }
        lse_ = Tensor(m_.take<float>(c.B * c.H * c.Tq), DType::f32, {c.B, c.H, c.Tq});
        delta_ = Tensor(m_.take<float>(c.B * c.H * c.Tq), DType::f32, {c.B, c.H, c.Tq});
        problem_ = {view<T>(q_),
                    view<T>(k_),
                    view<T>(v_),
                    view<T>(dout_),
                    static_cast<const int32_t*>(first_.data),
                    c.Tq,
                    c.q0,
                    c.k0,
                    int(c.B),
                    int(c.Tq),
                    int(c.Tk),
                    int(c.H),
                    int(c.Hk),
                    int(c.D),
                    c.causal,
                    1 / std::sqrt(double(c.D))};
        const int64_t bytes = gpu.k->workspace_bytes({.rows = c.B * std::max(c.Tq, c.Tk),
                                                      .heads = c.H,
                                                      .kv_heads = c.Hk,
                                                      .head_dim = c.D,
                                                      .batch = c.B,
                                                      .keys = c.Tk});
        gpu.stream.workspace = Tensor(m_.take<uint8_t>(bytes), DType::u8, {bytes});
    }

    Verdict run(bool backward = true) {
        const Tensor o = forward();
        check_forward(o);
        if (!backward) return verdict_;
        gpu_.k->attention_delta(gpu_.stream, delta_, dout_, o);
        const reference::Rows q_rows = c_.rows_of(c_.Tq), k_rows = c_.rows_of(c_.Tk);
        const int64_t nq = c_.B * c_.H * q_rows.count * c_.D,
                      nk = c_.B * c_.Hk * k_rows.count * c_.D;
        double* want[6];
        for (int i = 0; i < 6; ++i) want[i] = m_.take<double>(i < 2 ? nq : nk);
        const float *lse = lse_.as<float>(), *delta = delta_.as<float>();
        reference::dq_rows<T><<<blocks, reference::threads, 0, stream()>>>(
            problem_, lse, delta, q_rows, want[0], want[1]);
        reference::dkv_rows<T><<<blocks, reference::threads, 0, stream()>>>(
            problem_, lse, delta, k_rows, want[2], want[3], want[4], want[5]);
        const double offset = c_.parts ? start : 0;
        for (const Way& way : ways) {
            if (way.blocks != flash::Blocks::best && !has_pairs()) break;
            const size_t before = m_.count();
            AttnGrad g{.q = q_,
                       .k = k_,
                       .v = v_,
                       .dout = dout_,
                       .lse = lse_,
                       .delta = delta_,
                       .dq = gradient(c_.Tq, c_.H),
                       .dk = gradient(c_.Tk, c_.Hk),
                       .dv = gradient(c_.Tk, c_.Hk),
                       .first_key = first_,
                       .q0 = c_.q0,
                       .k0 = c_.k0,
                       .scale = problem_.scale,
                       .causal = c_.causal,
                       .accumulate = c_.parts,
                       .o = c_.parts ? Tensor{} : o};
            if (way.direct && !flash::backward_supported(g)) break;
            run_backward(g, way);
            const auto name = [&](const char* what) { return concat(way.name, what); };
            compare(name("dq").c_str(), g.dq, want[0], want[1], q_rows, 3, offset);
            compare(name("dk").c_str(), g.dk, want[2], want[3], k_rows, 3, offset);
            compare(name("dv").c_str(), g.dv, want[4], want[5], k_rows, 3, offset);
            m_.give_back(before);
        }
        return verdict_;
    }

private:
    bool has_pairs() const { return c_.D == 128 && type() == DType::bf16; }
    static DType type() { return std::is_same_v<T, __half> ? DType::f16 : DType::bf16; }
    cudaStream_t stream() const { return static_cast<cudaStream_t>(gpu_.stream.handle); }
    template <class U>
    Tensor matrix(int64_t Tn, int64_t H, uint8_t fill = 0xFF) {
        const DType dtype = sizeof(U) == 4 ? DType::f32 : type();
        const int64_t head = c_.D + (c_.apart ? gap : 0), row = H * head + gap;
        return heads_in(m_.template take<U>(c_.B * Tn * row, fill), dtype, {c_.B, Tn, H, c_.D}, row,
                        head);
    }
    // Sums start at 0.5 with `parts`.
    Tensor gradient(int64_t Tn, int64_t H) {
        if (!c_.parts) return matrix<T>(Tn, H);
        const Tensor t = matrix<float>(Tn, H);
        gpu_.k->fill(gpu_.stream, Tensor(t.data, DType::f32, {c_.B * t.pitch(0)}), start);
        return t;
    }
    void fill(const Tensor& t, uint32_t seed, float sigma) {
        reference::noise<T><<<1024, 256, 0, stream()>>>(static_cast<T*>(t.data), view<T>(t),
                                                        int(t.dim(1)), int(t.dim(2)), int(t.dim(3)),
                                                        t.numel(), seed, sigma);
    }

    // Calls f with the keys in one block, or in two, the later first.
    template <class F>
    void in_parts(F&& f) {
        const int64_t cut = c_.Tk / 3 + 1;
        if (!c_.parts) return f(int64_t(0), c_.Tk);
        f(cut, c_.Tk - cut);
        f(int64_t(0), cut);
    }

    Tensor forward() {
        const Tensor o = c_.parts ? matrix<float>(c_.Tq, c_.H, 0) : matrix<T>(c_.Tq, c_.H);
        if (c_.parts) gpu_.k->fill(gpu_.stream, lse_, -std::numeric_limits<double>::infinity());
        in_parts([&](int64_t at, int64_t count) {
            gpu_.k->attention_forward(gpu_.stream, {.q = q_,
                                                    .k = k_.slice(1, at, count),
                                                    .v = v_.slice(1, at, count),
                                                    .o = o,
                                                    .lse = lse_,
                                                    .first_key = first_,
                                                    .q0 = c_.q0,
                                                    .k0 = c_.k0 + at,
                                                    .scale = problem_.scale,
                                                    .causal = c_.causal,
                                                    .carry = c_.parts});
        });
        return o;
    }

    void run_backward(const AttnGrad& all, const Way& way) {
        in_parts([&](int64_t at, int64_t count) {
            AttnGrad g = all;
            for (Tensor* t : {&g.k, &g.v, &g.dk, &g.dv}) *t = t->slice(1, at, count);
            g.k0 += at;
            if (!way.direct) return gpu_.k->attention_backward(gpu_.stream, g);
            const int64_t bytes =
                flash::backward_workspace_bytes(c_.B, c_.H, c_.Hk, c_.Tq, count, c_.D);
            flash::backward(stream(), g, m_.template take<char>(bytes), way.deterministic,
                            way.blocks);
        });
    }

    void check_forward(const Tensor& o) {
        const reference::Rows rows = c_.rows_of(c_.Tq);
        const int64_t items = c_.B * c_.H * rows.count;
        const int64_t n = std::min<int64_t>(c_.Tk > 100000 ? blocks / 2 : blocks, items);
        double *want = m_.take<double>(items * c_.D), *plain = m_.take<double>(items * c_.D),
               *lse = m_.take<double>(items);
        reference::forward_rows<T><<<unsigned(n), reference::threads, 0, stream()>>>(
            problem_, rows, m_.take<double>(n * c_.Tk), want, plain, lse);
        compare("o", o, want, plain, rows, 2);
        const std::vector<double> exact = download<double>(lse, items);
        const std::vector<float> got = download<float>(lse_.data, lse_.numel());
        double worst = 0;
        for (int64_t i = 0; i < items; ++i) {
            const int64_t row = rows.first + i % rows.count * rows.step;
            const double w = exact[size_t(i)], x = got[size_t(i / rows.count * c_.Tq + row)];
            if (std::isinf(w) && x == w) continue;
            const double e = std::fabs(x - w) / std::max(1.0, std::fabs(w));
            worst = std::isnan(e) ? INFINITY : std::max(worst, e);
        }
        verdict_.add("lse", worst, 1e-5);
    }

    void compare(const char* what, const Tensor& got, const double* want, const double* plain,
                 reference::Rows rows, double limit, double offset = 0) {
        const int64_t items = got.dim(0) * got.dim(2) * rows.count * got.dim(3);
        auto* const sums = m_.take<reference::Difference>(1, 0);
        auto* const overwritten = m_.take<unsigned long long>(1, 0);
        const auto launch = [&](auto element, auto held) {
            using U = decltype(element);
            reference::compare_rows<U><<<264, 256, 0, stream()>>>(view<U>(got), want, plain,
                                                                  int(got.dim(2)), int(got.dim(3)),
                                                                  rows, items, offset, sums);
            reference::count_overwritten<<<264, 256, 0, stream()>>>(
                static_cast<const decltype(held)*>(got.data), got.dim(0) * got.pitch(0),
                got.pitch(1), got.pitch(2), int(got.dim(2)), int(got.dim(3)), held, overwritten);
        };
        if (got.dtype == DType::f32)
            launch(float{}, std::bit_cast<uint32_t>(float(offset)));
        else
            launch(T{}, uint16_t(0xFFFF));
        const reference::Difference d = download<reference::Difference>(sums, 1)[0];
        // No smaller than an rms of 1e-2: gradients that are nearly zero have no relative error.
        const double unit = std::sqrt(d.size + 1e-4 * double(items));
        verdict_.add(what, d.broken ? INFINITY : std::sqrt(d.error) / unit,
                     limit * std::sqrt(d.yard) / unit + 1e-4);
        verdict_.add("largest", d.worst, 2 * limit * d.worst_yard + 1e-4);
        verdict_.add("padding", double(download<unsigned long long>(overwritten, 1)[0]), 0);
    }

    template <class U>
    std::vector<U> download(const void* p, int64_t n) {
        std::vector<U> v(static_cast<size_t>(n));
        cuda_ok(cudaGetLastError(), "a kernel of the test");
        gpu_.k->device().copy(gpu_.stream, v.data(), p, n * int64_t(sizeof(U)));
        gpu_.k->device().synchronize(gpu_.stream);
        return v;
    }

    static constexpr double start = 0.5;
    Gpu& gpu_;
    const Case& c_;
    Scratch m_;
    Tensor q_, k_, v_, dout_, first_, lse_, delta_;
    reference::Problem<T> problem_;
    Verdict verdict_;
};

Verdict check(Gpu& gpu, const Case& c, bool backward = true) {
    return gpu.k->precision().act == DType::f16 ? Check<__half>(gpu, c).run(backward)
                                                : Check<__nv_bfloat16>(gpu, c).run(backward);
}

void expect_all(const std::vector<Case>& cases, bool hopper = true, bool only_bf16 = false) {
    Gpu bf16(DType::bf16, 256), f16(DType::f16, 256);
    int64_t n = 0;
    for (Gpu* gpu : {&bf16, &f16})
        dynamic_cast<cuda::CudaKernels&>(*gpu->k).use_hopper_attention(hopper);
    for (const Case& c : cases) {
        Gpu& gpu = n++ % 2 && !only_bf16 ? f16 : bf16;
        const Verdict v = check(gpu, c);
        INFO(name_of(gpu.k->precision().act) << " " << c.str() << ":" << v.text);
        EXPECT(v.ok);
    }
}

struct Heads {
    int64_t H, Hk;
};
constexpr Heads head_table[] = {{1, 1}, {4, 4}, {8, 1}, {12, 3}, {8, 8}};
// To 128 all on the Hopper kernels: of whole tiles, of the least and the most room behind the head.
constexpr int64_t dim_table[] = {8, 32, 40, 64, 72, 80, 88, 96, 128, 192, 256};

}  // namespace

TEST_CASE("attention table: lengths, head dims, grouped heads") {
    std::vector<Case> cases;
    for (int64_t D : dim_table)
        for (int64_t T : {1, 63, 64, 65, 97, 129, 200, 1025, 4096, 16384})
            for (bool causal : {true, false}) {
                const size_t n = cases.size() / 2 + size_t(D / 32);
                const Heads h = head_table[n % (T > 2000 ? 3 : 5)];
                cases.push_back({.B = T > 2000 || n % 2 ? 1 : 3,
                                 .Tq = T,
                                 .Tk = T,
                                 .H = h.H,
                                 .Hk = h.Hk,
                                 .D = D,
                                 .causal = causal,
                                 .rows = T > 2000 ? 32 : 256});
            }
    expect_all(cases);
}

TEST_CASE("attention table: masks, offsets, blocks of keys, scaled scores") {
    std::vector<Case> cases;
    for (int64_t D : dim_table)
        for (size_t n = 0; n < 5; ++n) {
            const auto [H, Hk] = head_table[n];
            if (n < 4) {
                const Masks masks[] = {Masks::documents, Masks::window, Masks::random,
                                       Masks::empty};
                cases.push_back({2, 611, 611, H, Hk, D, true, 0, 0, masks[n]});
                cases.push_back({3, 355, 477, H, Hk, D, false, 0, 10, masks[n]});
                cases.push_back({1, 377, 377, H, Hk, D, n % 2 == 0, 0, 0, masks[3 - n], true});
            }
            cases.push_back({1, 300, 700, H, Hk, D, true, 400, 0});
            cases.push_back({1, 300, 700, H, Hk, D, true, 100, 333, Masks::none, n % 2 == 0});
            cases.push_back({1, 700, 300, H, Hk, D, false});
            cases.push_back({1, 100, 200, H, Hk, D, true, 0, 1000});  // no key visible
            cases.push_back({1, 500, 600, H, Hk, D, n % 2 == 0, 100, 0, Masks::none, n > 2, 5, 3});
        }
    expect_all(cases);
}

TEST_CASE("attention table: mma.sync kernels where Hopper's are the rule") {
    std::vector<Case> cases;
    for (int64_t D : {8, 32, 64, 80, 96, 128})
        for (int64_t T : {1, 65, 200, 1025})
            for (bool causal : {true, false})
                for (Masks masks : {Masks::none, Masks::documents})
                    cases.push_back({3, T, T, 12, 3, D, causal, 0, 0, masks, false, 1, 1, 256});
    expect_all(cases, /*hopper=*/false);
}

// Documents so long that units of work begin where they do.
TEST_CASE("attention table: long documents") {
    std::vector<Case> cases;
    for (int64_t D : {40, 64, 96, 128})
        for (auto [H, Hk] : {Heads{2, 2}, Heads{8, 2}}) {
            cases.push_back({.B = 2, .Tq = 4333, .Tk = 4333, .H = H, .Hk = Hk, .D = D});
            cases.push_back({.B = 1, .Tq = 8200, .Tk = 8200, .H = H, .Hk = Hk, .D = D});
            cases.push_back({1, 4101, 4101, H, Hk, D, false});
            cases.push_back({1, 3000, 5000, H, Hk, D, true, 2000, 0});
            cases.push_back({1, 5000, 3000, H, Hk, D, true, 0, 700});
            cases.push_back({2, 4333, 4333, H, Hk, D, true, 0, 0, Masks::none, true});
        }
    for (Case& c : cases) c.masks = Masks::long_documents, c.rows = 64;
    expect_all(cases);
    expect_all(cases, /*hopper=*/true, /*only_bf16=*/true);
}

// Few and short: compute-sanitizer has time for these.
TEST_CASE("attention table: small shapes") {
    std::vector<Case> cases;
    for (int64_t D : {40, 64, 80, 128})
        for (int64_t T : {1, 65, 200}) {
            cases.push_back({2, T, T, 4, 2, D});
            cases.push_back({1, T, T + 64, 4, 1, D, false, 0, 0, Masks::documents});
            if (T > 1) cases.push_back({1, T, T, 2, 2, D, true, 0, 0, Masks::window, true});
        }
    for (int64_t D : {64, 128})
        cases.push_back({1, 1200, 1200, 2, 1, D, true, 0, 0, Masks::long_documents});
    expect_all(cases);
}

// What only pairs of blocks can get wrong: a key tile without a partner, few query tiles, more
// units than pairs, several heads in a unit (the case of 26 batches) or one.
TEST_CASE("attention table: pairs of blocks") {
    std::vector<Case> cases;
    for (int64_t Tk : {100, 129, 200, 300, 520})
        for (int64_t Tq : {1, 65, 200}) {
            cases.push_back({1, Tq, Tk, 2, 2, 128, false});
            cases.push_back({2, Tq, Tk, 8, 2, 128, true, Tk - Tq, 0});
            cases.push_back({1, Tq, Tk, 2, 1, 128, true, 50, 0, Masks::random, true});
        }
    for (Masks masks : {Masks::documents, Masks::window, Masks::random, Masks::empty}) {
        cases.push_back({2, 611, 611, 4, 1, 128, true, 0, 0, masks});
        cases.push_back({1, 377, 377, 3, 3, 128, false, 0, 0, masks, true});
        cases.push_back({26, 150, 300, 8, 4, 128, false, 0, 0, masks});
    }
    cases.push_back({1, 100, 200, 2, 1, 128, true, 0, 1000});  // no key visible
    cases.push_back({26, 300, 300, 8, 4, 128, true, 0, 0, Masks::none, false, 5, 3});
    cases.push_back({1, 2600, 2600, 8, 1, 128});
    cases.push_back({1, 300, 65536, 2, 1, 128, false});  // rounded sums at their longest
    cases.push_back({1, 130, 66000, 2, 1, 128, false});  // sums in fixed point
    expect_all(cases, /*hopper=*/true, /*only_bf16=*/true);
}

TEST_CASE("attention table: 65,536 batches x heads") {
    std::vector<Case> cases;
    for (int64_t D : {64, 80})
        for (bool causal : {true, false}) {
            cases.push_back({4096, 5, 5, 16, 4, D, causal});
            cases.push_back({65536, 2, 3, 1, 1, D, causal});
        }
    expect_all(cases);
}

TEST_CASE("attention: cuDNN's kernels") {
    std::vector<Case> cases = {{2, 256, 256, 4, 4, 64},         {1, 1024, 1024, 8, 2, 128},
                               {1, 384, 512, 4, 1, 128, false}, {3, 128, 128, 1, 1, 32},
                               {1, 200, 200, 12, 3, 80},        {1, 1025, 1025, 2, 2, 128},
                               {3, 97, 97, 4, 1, 96, false}};
    Gpu bf16(DType::bf16, 256), f16(DType::f16, 256), f32(DType::f32, 256);
    if (!cudnn_attention_refusal(128, 64).empty()) {
        MESSAGE(cudnn_attention_refusal(128, 64));
        EXPECT_THROWS_AS(use_cudnn_attention(*bf16.k), Error);
        return;
    }
    for (Gpu* gpu : {&bf16, &f16, &f32}) use_cudnn_attention(*gpu->k);
    int64_t n = 0;
    for (Case& c : cases) {
        c.apart = false;  // as attention's outputs are
        Gpu& gpu = n++ % 2 ? f16 : bf16;
        const std::string refusal = cudnn_attention_refusal(c.Tk, c.D);
        const Verdict v = check(gpu, c, refusal.empty());
        INFO(c.str() << ":" << v.text);
        EXPECT(v.ok);
        if (!refusal.empty()) EXPECT_THROWS_AS(check(gpu, c), Error);
    }
    // A key-value cache takes our kernels; what cuDNN cannot do is refused.
    const Verdict cache = check(bf16, {1, 1, 300, 4, 2, 64, true, 299}, false);
    INFO(cache.text);
    EXPECT(cache.ok);
    const auto refused = [&](Case c) {
        c.apart = false;
        try {
            check(bf16, c);
        } catch (const Error& e) {
            return e.code == Exit::usage && std::string(e.what()).find("--attention") == 0;
        }
        return false;
    };
    EXPECT(refused({1, 128, 128, 2, 2, 64, true, 0, 0, Masks::documents}));
    EXPECT(refused({1, 128, 128, 2, 2, 64, true, 0, 0, Masks::none, true}));
    EXPECT(refused({1, 128, 128, 2, 2, 256}));
    EXPECT(refused({1, 1, 1, 2, 2, 64}));
    const DeviceValue x(f32, DType::f32, {1, 128, 1, 64}, constant_values(128 * 64, 0)),
        lse(f32, DType::f32, {1, 1, 128});
    const Attn single{.q = x.tensor(),
                      .k = x.tensor(),
                      .v = x.tensor(),
                      .o = x.tensor(),
                      .lse = lse.tensor(),
                      .first_key = {},
                      .scale = 1};
    EXPECT_THROWS_AS(f32.k->attention_forward(f32.stream, single), Error);
}

// 2.3 billion elements a tensor. The window makes the backward cheap at that length.
TEST_CASE("attention of a million tokens" * doctest::skip()) {
    Gpu gpu(DType::bf16, 256);
    Case c{.B = 1, .Tq = 1 << 20, .Tk = 1 << 20, .H = 17, .Hk = 17, .D = 128, .rows = 128};
    c.last = true;
    for (Masks masks : {Masks::none, Masks::window}) {
        c.masks = masks;
        const Verdict v = check(gpu, c, masks == Masks::window);
        INFO(c.str() << ":" << v.text);
        EXPECT(v.ok);
    }
}
