// One attention shape against its definition: Check runs the forward, and the backward in every way
// there is, on memory that starts as NaN, and compares with attention_reference.cuh.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/flash/flash.h"
#include "test/cuda/attention_cases.cuh"
#include "test/cuda/attention_reference.cuh"
#include "test/cuda/gpu.h"
#include "test/test.h"

namespace torus::test {

inline void cuda_ok(cudaError_t e, const char* what) {
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
        if (c.level != 0 || c.rise != 0)  // q's column cancels the scale
            stairs(q_, std::sqrt(float(c.D)), 0), stairs(k_, c.level, c.rise);
        if (c.masks != Masks::none) {
            const std::vector<int32_t> host = first_keys(c);
            first_ = Tensor(m_.take<int32_t>(c.B * c.Tq), DType::i32, {c.B, c.Tq});
            gpu.k->device().copy(gpu.stream, first_.data, host.data(), first_.bytes());
            gpu.k->device().synchronize(gpu.stream);
        }
        const int64_t lse_batch = c.H * c.Tq + c.lse_room;
        lse_ = Tensor(m_.take<float>(c.B * lse_batch), DType::f32, {c.B, c.H, c.Tq});
        if (c.lse_room) lse_.stride = {lse_batch, c.Tq, 1};
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
        for (const Way& way : ways) {
            if (way.blocks != flash::Blocks::best && !has_pairs()) break;
            const double offset = adds(way) ? start : 0;
            const uint32_t held = adds(way) ? std::bit_cast<uint32_t>(float(start)) : poison;
            const size_t before = m_.count();
            AttnGrad g{.q = q_,
                       .k = k_,
                       .v = v_,
                       .dout = dout_,
                       .lse = lse_,
                       .delta = delta_,
                       .dq = gradient(way, c_.Tq, c_.H),
                       .dk = gradient(way, c_.Tk, c_.Hk),
                       .dv = gradient(way, c_.Tk, c_.Hk),
                       .first_key = first_,
                       .q0 = c_.q0,
                       .k0 = c_.k0,
                       .scale = problem_.scale,
                       .causal = c_.causal,
                       .o = c_.parts ? Tensor{} : o};
            if (way.direct && !flash::backward_supported(g)) break;
            run_backward(g, way);
            const auto name = [&](const char* what) { return concat(way.name, what); };
            compare(name("dq").c_str(), g.dq, want[0], want[1], q_rows, 3, offset, held);
            compare(name("dk").c_str(), g.dk, want[2], want[3], k_rows, 3, offset, held);
            compare(name("dv").c_str(), g.dv, want[4], want[5], k_rows, 3, offset, held);
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
    // With `parts` half of the ways add to sums that start at 0.5, half write over NaN where they
    // are the first.
    bool adds(const Way& way) const { return c_.parts && way.deterministic; }
    Tensor gradient(const Way& way, int64_t Tn, int64_t H) {
        if (!c_.parts) return matrix<T>(Tn, H);
        const Tensor t = matrix<float>(Tn, H);
        if (!adds(way)) return t;
        gpu_.k->fill(gpu_.stream, Tensor(t.data, DType::f32, {c_.B * t.pitch(0)}), start);
        return t;
    }
    void fill(const Tensor& t, uint32_t seed, float sigma) {
        reference::noise<T><<<1024, 256, 0, stream()>>>(static_cast<T*>(t.data), view<T>(t),
                                                        int(t.dim(1)), int(t.dim(2)), int(t.dim(3)),
                                                        t.numel(), seed, sigma);
    }

    void stairs(const Tensor& t, float level, float rise) {
        reference::stairs<T><<<256, 256, 0, stream()>>>(static_cast<T*>(t.data), view<T>(t),
                                                        int(t.dim(1)), int(t.dim(2)),
                                                        t.numel() / t.dim(3), level, rise);
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
            g.add_kv = adds(way), g.add_q = g.add_kv || (c_.parts && at == 0);
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
        compare("o", o, want, plain, rows, 2, 0, c_.parts ? 0 : poison);
        const std::vector<double> exact = download<double>(lse, items);
        const std::vector<float> got = download<float>(lse_.data, c_.B * lse_.pitch(0));
        double worst = 0;
        for (int64_t i = 0; i < items; ++i) {
            const int64_t row = rows.first + i % rows.count * rows.step;
            const int64_t head = i / rows.count;
            const double w = exact[size_t(i)];
            const double x = got[size_t(head / c_.H * lse_.pitch(0) + head % c_.H * c_.Tq + row)];
            if (std::isinf(w) && x == w) continue;
            const double e = std::fabs(x - w) / std::max(1.0, std::fabs(w));
            worst = std::isnan(e) ? INFINITY : std::max(worst, e);
        }
        verdict_.add("lse", worst, 1e-5);
    }

    // offset: what the sums started from; held: what the gaps between heads have to hold still.
    void compare(const char* what, const Tensor& got, const double* want, const double* plain,
                 reference::Rows rows, double limit, double offset, uint32_t held) {
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
            launch(float{}, held);
        else
            launch(T{}, uint16_t(held));
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
    static constexpr uint32_t poison = 0xFFFFFFFF;  // NaN in 32 and in 16 bits
    Gpu& gpu_;
    const Case& c_;
    Scratch m_;
    Tensor q_, k_, v_, dout_, first_, lse_, delta_;
    reference::Problem<T> problem_;
    Verdict verdict_;
};

}  // namespace torus::test
