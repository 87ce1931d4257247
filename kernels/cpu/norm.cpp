// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019). Statistics are summed in fp64, in
// two passes: the variance is of the centred row, so a large mean costs no digits.
//
//   LayerNorm: n = (x - mean) rstd, out = n w + b       RMSNorm: n = x rstd, out = n w
//   dn = dout w;  dx += rstd (dn - mean(dn) - n mean(dn n))     (RMSNorm: without mean(dn))
//   dw += sum over rows of dout n;  db += sum over rows of dout
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {
namespace {

template <class T>
double row_mean(const T* x, int64_t C) {
    return lane_sum<double>(C, [&](int64_t c) { return double(x[c]); }) / double(C);
}

// 1 / sqrt(mean of (x - shift)^2 + eps)
template <class T>
double row_rstd(const T* x, double shift, int64_t C, double eps) {
    const double squares = lane_sum<double>(C, [&](int64_t c) {
        const double d = double(x[c]) - shift;
        return d * d;
    });
    return 1 / std::sqrt(squares / double(C) + eps);
}

// One row of dx. RMSNorm has mean = 0 and leaves out the term that keeps the row centred.
template <class T>
void row_backward(T* dx, const T* dout, const T* x, const T* w, double mean, double rstd, int64_t C,
                  bool centred) {
    const auto n = [&](int64_t c) { return (double(x[c]) - mean) * rstd; };
    const auto dn = [&](int64_t c) { return double(dout[c]) * double(w[c]); };
    const double a = centred ? lane_sum<double>(C, dn) / double(C) : 0;
    const double b = lane_sum<double>(C, [&](int64_t c) { return dn(c) * n(c); }) / double(C);
    for (int64_t c = 0; c < C; ++c) dx[c] += T(rstd * (dn(c) - a - n(c) * b));
}

// dw and db (optional), summed over rows in order; threads share out columns.
template <class T>
void weights_backward(T* dw, T* db, const T* dout, const T* x, const T* mean, const T* rstd,
                      int64_t N, int64_t C) {
    constexpr int64_t columns = 32;
    parallel_for((C + columns - 1) / columns, N * columns, [&](int64_t block) {
        const int64_t begin = block * columns, width = std::min(columns, C - begin);
        double sum_w[columns] = {}, sum_b[columns] = {};
        for (int64_t n = 0; n < N; ++n) {
            const T *d = dout + n * C + begin, *xn = x + n * C + begin;
            const double m = mean ? double(mean[n]) : 0, r = double(rstd[n]);
            for (int64_t c = 0; c < width; ++c) {
                sum_w[c] += double(d[c]) * ((double(xn[c]) - m) * r);
                sum_b[c] += double(d[c]);
            }
        }
        for (int64_t c = 0; c < width; ++c) dw[begin + c] += T(sum_w[c]);
        if (db)
            for (int64_t c = 0; c < width; ++c) db[begin + c] += T(sum_b[c]);
    });
}

}  // namespace

template <class T>
void CpuKernels<T>::layernorm_forward(Stream&, Tensor out, Tensor mean, Tensor rstd, Tensor x,
                                      Tensor w, Tensor b, double eps) {
    expect_rank("layernorm_forward", "x", x, type, 2);
    const int64_t N = x.dim(0), C = x.dim(1);
    expect("layernorm_forward", "out", out, type, {N, C});
    expect("layernorm_forward", "mean", mean, type, {N});
    expect("layernorm_forward", "rstd", rstd, type, {N});
    expect("layernorm_forward", "w", w, type, {C});
    expect("layernorm_forward", "b", b, type, {C});
    const T *weight = w.as<T>(), *bias = b.as<T>();
    parallel_for(N, 4 * C, [&](int64_t n) {
        const T* xn = x.as<T>() + n * C;
        T* o = out.as<T>() + n * C;
        const double m = row_mean(xn, C), r = row_rstd(xn, m, C, eps);
        for (int64_t c = 0; c < C; ++c)
            o[c] = T((double(xn[c]) - m) * r * double(weight[c]) + double(bias[c]));
        mean.as<T>()[n] = T(m);
        rstd.as<T>()[n] = T(r);
    });
}

template <class T>
void CpuKernels<T>::layernorm_backward(Stream&, Tensor dx, Tensor dw, Tensor db, Tensor dout,
                                       Tensor x, Tensor w, Tensor mean, Tensor rstd) {
    expect_rank("layernorm_backward", "x", x, type, 2);
    const int64_t N = x.dim(0), C = x.dim(1);
    expect("layernorm_backward", "dx", dx, type, {N, C});
    expect("layernorm_backward", "dout", dout, type, {N, C});
    expect("layernorm_backward", "dw", dw, type, {C});
    expect("layernorm_backward", "db", db, type, {C});
    expect("layernorm_backward", "w", w, type, {C});
    expect("layernorm_backward", "mean", mean, type, {N});
    expect("layernorm_backward", "rstd", rstd, type, {N});
    weights_backward(dw.as<T>(), db.as<T>(), dout.as<T>(), x.as<T>(), mean.as<T>(), rstd.as<T>(), N,
                     C);
    parallel_for(N, 4 * C, [&](int64_t n) {
        row_backward(dx.as<T>() + n * C, dout.as<T>() + n * C, x.as<T>() + n * C, w.as<T>(),
                     double(mean.as<T>()[n]), double(rstd.as<T>()[n]), C, true);
    });
}

template <class T>
void CpuKernels<T>::rmsnorm_forward(Stream&, Tensor out, Tensor rstd, Tensor x, Tensor w,
                                    double eps) {
    expect_rank("rmsnorm_forward", "x", x, type, 2);
    const int64_t N = x.dim(0), C = x.dim(1);
    expect("rmsnorm_forward", "out", out, type, {N, C});
    expect("rmsnorm_forward", "rstd", rstd, type, {N});
    expect("rmsnorm_forward", "w", w, type, {C});
    const T* weight = w.as<T>();
    parallel_for(N, 4 * C, [&](int64_t n) {
        const T* xn = x.as<T>() + n * C;
        T* o = out.as<T>() + n * C;
        const double r = row_rstd(xn, 0, C, eps);
        for (int64_t c = 0; c < C; ++c) o[c] = T(double(xn[c]) * r * double(weight[c]));
        rstd.as<T>()[n] = T(r);
    });
}

template <class T>
void CpuKernels<T>::rmsnorm_backward(Stream&, Tensor dx, Tensor dw, Tensor dout, Tensor x, Tensor w,
                                     Tensor rstd) {
    expect_rank("rmsnorm_backward", "x", x, type, 2);
    const int64_t N = x.dim(0), C = x.dim(1);
    expect("rmsnorm_backward", "dx", dx, type, {N, C});
    expect("rmsnorm_backward", "dout", dout, type, {N, C});
    expect("rmsnorm_backward", "dw", dw, type, {C});
    expect("rmsnorm_backward", "w", w, type, {C});
    expect("rmsnorm_backward", "rstd", rstd, type, {N});
    weights_backward<T>(dw.as<T>(), nullptr, dout.as<T>(), x.as<T>(), nullptr, rstd.as<T>(), N, C);
    parallel_for(N, 4 * C, [&](int64_t n) {
        row_backward(dx.as<T>() + n * C, dout.as<T>() + n * C, x.as<T>() + n * C, w.as<T>(), 0.0,
                     double(rstd.as<T>()[n]), C, false);
    });
}

INSTANTIATE(layernorm_forward, (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, double));
INSTANTIATE(layernorm_backward,
            (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor));
INSTANTIATE(rmsnorm_forward, (Stream&, Tensor, Tensor, Tensor, Tensor, double));
INSTANTIATE(rmsnorm_backward, (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor));

}  // namespace torus
