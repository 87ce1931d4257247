// One case of attention, on the GPU: inputs, the reference's answer and the comparison with ours.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bench/attention_reference.cuh"
#include "kernels/cuda/flash/flash.h"

namespace attention_cases {

using namespace torus;

inline void cuda_ok(cudaError_t e, const char* what) {
    if (e == cudaSuccess) return;
    std::printf("FAIL %s: %s\n", what, cudaGetErrorString(e));
    std::exit(1);
}
#define CU(x) cuda_ok((x), #x)

// Device memory of one case, poisoned with NaN bits.
class Scratch {
public:
    ~Scratch() {
        for (void* p : all_) cudaFree(p);
    }
    template <class T>
    T* take(int64_t n, int byte = 0xFF) {
        void* p = nullptr;
        CU(cudaMalloc(&p, size_t(std::max<int64_t>(n, 1)) * sizeof(T)));
        CU(cudaMemset(p, byte, size_t(n) * sizeof(T)));
        all_.push_back(p);
        return static_cast<T*>(p);
    }

private:
    std::vector<void*> all_;
};

enum class Masks { none, documents, window, random, empty };

struct Case {
    int64_t B, Tq, Tk, H, Hk, D;
    bool causal = true;
    int64_t q0 = 0, k0 = 0;
    Masks masks = Masks::none;
    bool parts = false;  // keys in two blocks: carry and accumulate
    bool half = false;
    float q_scale = 1, k_scale = 1;
    int64_t step = 1;  // check every step-th row

    std::string str() const {
        static const char* names[] = {"", " documents", " window", " random", " empty"};
        char s[200];
        std::snprintf(s, sizeof s, "%s D%ld B%ld T%ld/%ld H%ld/%ld %s q0=%ld k0=%ld%s%s%s",
                      half ? "fp16" : "bf16", long(D), long(B), long(Tq), long(Tk), long(H),
                      long(Hk), causal ? "causal" : "full", long(q0), long(k0), names[int(masks)],
                      parts ? " parts" : "", q_scale != 1 ? " scaled" : "");
        return s;
    }
};

inline Tensor tensor(void* data, DType dtype, int64_t B, int64_t T, int64_t H, int64_t D,
                     int64_t row) {
    Tensor t(data, dtype, {B, T, H, D});
    t.stride = {T * row, row, D, 1};
    return t;
}

template <class T>
reference::View<T> view(const Tensor& t) {
    return {static_cast<const T*>(t.data), t.pitch(0), t.pitch(1), t.pitch(2)};
}

inline std::vector<int32_t> make_first_key(const Case& c, std::mt19937& rng) {
    std::vector<int32_t> v(size_t(c.B * c.Tq));
    for (int64_t b = 0; b < c.B; ++b) {
        int64_t start = 0, end = 0;
        for (int64_t i = 0; i < c.Tq; ++i) {
            const int64_t position = c.q0 + i;
            if (position >= end) start = position, end = position + 1 + int64_t(rng() % 300);
            int64_t f = 0;
            if (c.masks == Masks::documents) f = start;
            if (c.masks == Masks::window) f = std::max<int64_t>(0, position - 100);
            if (c.masks == Masks::random) f = int64_t(rng() % uint32_t(c.k0 + c.Tk + 20));
            if (c.masks == Masks::empty) f = 1 << 30;
            v[size_t(b * c.Tq + i)] = int32_t(f);
        }
    }
    return v;
}

// Inputs of a case in one packed (B,T,H+2Hk,D) matrix when Tq == Tk, else apart; plus dout.
template <class T>
struct Inputs {
    Tensor q, k, v, dout, first_key;
    reference::Problem<T> problem;

    Inputs(const Case& c, Scratch& m, uint32_t seed) {
        const DType type = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
        const int64_t extra = 8;
        if (c.Tq == c.Tk) {
            const int64_t row = (c.H + 2 * c.Hk) * c.D + extra;
            T* p = m.take<T>(c.B * c.Tq * row);
            q = tensor(p, type, c.B, c.Tq, c.H, c.D, row);
            k = tensor(p + c.H * c.D, type, c.B, c.Tk, c.Hk, c.D, row);
            v = tensor(p + (c.H + c.Hk) * c.D, type, c.B, c.Tk, c.Hk, c.D, row);
            fill(p, c.B * c.Tq * row, seed, 1);
        } else {
            q = tensor(m.take<T>(c.B * c.Tq * c.H * c.D), type, c.B, c.Tq, c.H, c.D, c.H * c.D);
            k = tensor(m.take<T>(c.B * c.Tk * c.Hk * c.D), type, c.B, c.Tk, c.Hk, c.D, c.Hk * c.D);
            v = tensor(m.take<T>(c.B * c.Tk * c.Hk * c.D), type, c.B, c.Tk, c.Hk, c.D, c.Hk * c.D);
            fill(static_cast<T*>(q.data), q.numel(), seed, c.q_scale);
            fill(static_cast<T*>(k.data), k.numel(), seed + 1, c.k_scale);
            fill(static_cast<T*>(v.data), v.numel(), seed + 2, 1);
        }
        const int64_t row = c.H * c.D + extra;
        dout = tensor(m.take<T>(c.B * c.Tq * row), type, c.B, c.Tq, c.H, c.D, row);
        fill(static_cast<T*>(dout.data), c.B * c.Tq * row, seed + 3, 1);
        if (c.masks != Masks::none) {
            std::mt19937 rng(seed);
            const std::vector<int32_t> host = make_first_key(c, rng);
            int32_t* p = m.take<int32_t>(c.B * c.Tq);
            CU(cudaMemcpy(p, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
            first_key = Tensor(p, DType::i32, {c.B, c.Tq});
        }
        problem = {view<T>(q),
                   view<T>(k),
                   view<T>(v),
                   view<T>(dout),
                   static_cast<const int32_t*>(first_key.data),
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
    }
    static void fill(T* p, int64_t n, uint32_t seed, float sigma) {
        reference::noise<T><<<1024, 256>>>(p, n, seed, sigma);
    }
};

template <class T>
std::vector<T> download(const void* p, int64_t n) {
    std::vector<T> v(static_cast<size_t>(n));
    CU(cudaMemcpy(v.data(), p, size_t(n) * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

struct Verdict {
    bool ok = true;
    std::string text;
    void add(const char* what, double error, double yardstick, double limit, bool finite) {
        const bool good = finite && error <= limit * yardstick + 1e-4;
        ok = ok && good;
        char s[100];
        std::snprintf(s, sizeof s, "  %s %.2e (%.1fx)%s", what, error,
                      yardstick > 0 ? error / yardstick : 0, good ? "" : " WRONG");
        text += s;
    }
};

// got: (B,T,H,D) tensor on the device; want, plain: (B*H, rows, D) for rows first, first + step...
// Root mean square error over root mean square value, and the largest error likewise.
inline void compare(Verdict& verdict, const char* what, const Tensor& got,
                    const std::vector<double>& want, const std::vector<double>& plain, int64_t step,
                    double limit, double offset = 0) {
    const int64_t B = got.dim(0), T = got.dim(1), H = got.dim(2), D = got.dim(3);
    const int64_t rows = (T + step - 1) / step, span = B * got.pitch(0);
    std::vector<float> f;
    if (got.dtype == DType::f32)
        f = download<float>(got.data, span);
    else if (got.dtype == DType::bf16)
        for (__nv_bfloat16 x : download<__nv_bfloat16>(got.data, span)) f.push_back(float(x));
    else
        for (__half x : download<__half>(got.data, span)) f.push_back(float(x));
    double size = 0, error = 0, yard = 0, worst = 0, worst_yard = 0;
    bool finite = true;
    int64_t at = 0;
    for (int64_t bh = 0; bh < B * H; ++bh)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t d = 0; d < D; ++d, ++at) {
                const double x = f[size_t(bh / H * got.pitch(0) + r * step * got.pitch(1) +
                                          bh % H * got.pitch(2) + d)] -
                                 offset;
                const double w = want[size_t(at)], e = x - w, y = plain[size_t(at)] - w;
                finite = finite && std::isfinite(x);
                size += w * w, error += e * e, yard += y * y;
                worst = std::max(worst, std::fabs(e)),
                worst_yard = std::max(worst_yard, std::fabs(y));
            }
    const double unit = std::sqrt(size + 1e-4 * double(at));  // no smaller than rms 1e-2
    verdict.add(what, std::sqrt(error) / unit, std::sqrt(yard) / unit, limit, finite);
    if (worst > 2 * limit * worst_yard + 1e-4)
        verdict.ok = false, verdict.text += " MAX " + std::to_string(worst);
    // Padding between rows must still hold its poison.
    if (got.dtype != DType::f32 && got.pitch(1) > H * D) {
        const auto bits = download<uint16_t>(got.data, span);
        for (int64_t t = 0; t < B * T; ++t)
            for (int64_t i = H * D; i < got.pitch(1); ++i)
                if (bits[size_t(t * got.pitch(1) + i)] != 0xFFFF) {
                    verdict.ok = false, verdict.text += " padding overwritten";
                    return;
                }
    }
}

template <class T>
void run_forward(const Case& c, Inputs<T>& in, Scratch& m, Verdict& verdict,
                 const std::vector<double>& o, const std::vector<double>& plain,
                 const std::vector<double>& lse) {
    const DType type = in.q.dtype;
    const int64_t row = c.H * c.D + 8;
    Attn a;
    a.q = in.q, a.k = in.k, a.v = in.v, a.first_key = in.first_key;
    a.q0 = c.q0, a.k0 = c.k0, a.scale = in.problem.scale, a.causal = c.causal;
    a.lse = Tensor(m.take<float>(c.B * c.H * c.Tq), DType::f32, {c.B, c.H, c.Tq});
    void* workspace = m.take<char>(flash::forward_workspace_bytes());
    if (!c.parts) {
        a.o = tensor(m.take<T>(c.B * c.Tq * row), type, c.B, c.Tq, c.H, c.D, row);
        flash::forward(nullptr, a, workspace);
    } else {
        a.carry = true;
        a.o = tensor(m.take<float>(c.B * c.Tq * row, 0), DType::f32, c.B, c.Tq, c.H, c.D, row);
        std::vector<float> minus(size_t(c.B * c.H * c.Tq), -INFINITY);
        CU(cudaMemcpy(a.lse.data, minus.data(), minus.size() * 4, cudaMemcpyHostToDevice));
        const int64_t cut = c.Tk / 3 + 1;
        for (int part = 1; part >= 0; --part) {
            a.k = in.k.slice(1, part ? cut : 0, part ? c.Tk - cut : cut);
            a.v = in.v.slice(1, part ? cut : 0, part ? c.Tk - cut : cut);
            a.k0 = c.k0 + (part ? cut : 0);
            flash::forward(nullptr, a, workspace);
        }
    }
    CU(cudaDeviceSynchronize());
    compare(verdict, "o", a.o, o, plain, c.step, 2);
    const std::vector<float> got = download<float>(a.lse.data, c.B * c.H * c.Tq);
    double worst = 0;
    const int64_t rows = (c.Tq + c.step - 1) / c.step;
    for (int64_t i = 0; i < c.B * c.H * rows; ++i) {
        const double x = got[size_t(i / rows * c.Tq + i % rows * c.step)], w = lse[size_t(i)];
        if (std::isinf(w) && x == w) continue;
        const double e = std::fabs(x - w) / std::max(1.0, std::fabs(w));
        worst = std::isnan(e) ? INFINITY : std::max(worst, e);
    }
    verdict.add("lse", worst, 1e-5, 1, std::isfinite(worst));
}

template <class T>
void run_backward(const Case& c, Inputs<T>& in, Scratch& m, Verdict& verdict, const double* o,
                  const double* lse, bool exact) {
    const int64_t n = c.B * c.H * c.Tq;
    const int q_rows = int((c.Tq + c.step - 1) / c.step),
              k_rows = int((c.Tk + c.step - 1) / c.step);
    std::vector<double> lse_double = download<double>(lse, n);
    std::vector<float> lse_float(lse_double.begin(), lse_double.end());
    float *lse_at = m.take<float>(n), *delta = m.take<float>(n);
    CU(cudaMemcpy(lse_at, lse_float.data(), size_t(n) * 4, cudaMemcpyHostToDevice));
    reference::delta_rows<T><<<unsigned((n + 127) / 128), 128>>>(in.problem, o, delta);
    const int64_t nq = c.B * c.H * q_rows * c.D, nk = c.B * c.Hk * k_rows * c.D;
    double* want[6];
    for (int i = 0; i < 6; ++i) want[i] = m.take<double>(i < 2 ? nq : nk);
    reference::dq_rows<T>
        <<<132 * 8, 128>>>(in.problem, lse_at, delta, 0, int(c.step), q_rows, want[0], want[1]);
    reference::dkv_rows<T><<<132 * 8, 128>>>(in.problem, lse_at, delta, 0, int(c.step), k_rows,
                                             want[2], want[3], want[4], want[5]);
    AttnGrad a;
    a.q = in.q, a.k = in.k, a.v = in.v, a.dout = in.dout, a.first_key = in.first_key;
    a.q0 = c.q0, a.k0 = c.k0, a.scale = in.problem.scale, a.causal = c.causal;
    a.lse = Tensor(lse_at, DType::f32, {c.B, c.H, c.Tq});
    a.delta = Tensor(delta, DType::f32, {c.B, c.H, c.Tq});
    a.accumulate = c.parts;
    const float start = c.parts ? 0.5f : 0.f;
    auto output = [&](int64_t rows, int64_t heads) {
        const int64_t row = heads * c.D + 8, size = c.B * rows * row;
        if (!c.parts) return tensor(m.take<T>(size), in.q.dtype, c.B, rows, heads, c.D, row);
        const std::vector<float> fill(static_cast<size_t>(size), start);
        float* p = m.take<float>(size);
        CU(cudaMemcpy(p, fill.data(), fill.size() * 4, cudaMemcpyHostToDevice));
        return tensor(p, DType::f32, c.B, rows, heads, c.D, row);
    };
    a.dq = output(c.Tq, c.H), a.dk = output(c.Tk, c.Hk), a.dv = output(c.Tk, c.Hk);
    void* workspace =
        m.take<char>(flash::backward_workspace_bytes(c.B, c.H, c.Hk, c.Tq, c.Tk, c.D));
    if (!c.parts) {
        flash::backward(nullptr, a, workspace, exact);
    } else {
        const int64_t cut = c.Tk / 3 + 1;
        for (int part = 1; part >= 0; --part) {
            AttnGrad b = a;
            for (Tensor* t : {&b.k, &b.v, &b.dk, &b.dv})
                *t = t->slice(1, part ? cut : 0, part ? c.Tk - cut : cut);
            b.k0 = c.k0 + (part ? cut : 0);
            flash::backward(nullptr, b, workspace, exact);
        }
    }
    CU(cudaDeviceSynchronize());
    const Tensor got[3] = {a.dq, a.dk, a.dv};
    const char* names[3] = {exact ? "dq=" : "dq", exact ? "dk=" : "dk", exact ? "dv=" : "dv"};
    for (int i = 0; i < 3; ++i)
        compare(verdict, names[i], got[i], download<double>(want[2 * i], i ? nk : nq),
                download<double>(want[2 * i + 1], i ? nk : nq), c.step, 3, start);
}

template <class T>
bool check_case(const Case& c, uint32_t seed) {
    Scratch m;
    Inputs<T> in(c, m, seed);
    const int rows = int((c.Tq + c.step - 1) / c.step), blocks = 132 * 8;
    const int64_t n = c.B * c.H * rows;
    double* scratch = m.take<double>(int64_t(blocks) * c.Tk);
    double *o = m.take<double>(n * c.D), *plain = m.take<double>(n * c.D), *lse = m.take<double>(n);
    reference::forward_rows<T>
        <<<blocks, 128>>>(in.problem, 0, int(c.step), rows, scratch, o, plain, lse);
    CU(cudaDeviceSynchronize());
    Verdict verdict;
    for (bool exact : {false, true})
        if (c.step == 1) run_backward(c, in, m, verdict, o, lse, exact);
    run_forward(c, in, m, verdict, download<double>(o, n * c.D), download<double>(plain, n * c.D),
                download<double>(lse, n));
    std::printf("%s %s:%s\n", verdict.ok ? "ok  " : "FAIL", c.str().c_str(), verdict.text.c_str());
    std::fflush(stdout);
    return verdict.ok;
}

}  // namespace attention_cases
