// Filling, conversion between float types, sums and multiples. Half types exist here only as
// storage: values pass through fp32 or fp64.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus {
namespace {

// Storage types, and conversion from and to double through the nearest wider type.
struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

template <class S>
S narrow(double v) {
    return S(v);
}
template <class S>
double widen(S v) {
    return double(v);
}
template <>
double widen(Bf16 v) {
    return double(bf16_to_float(v.bits));
}
template <>
double widen(F16 v) {
    return double(f16_to_float(v.bits));
}

// fp64 -> fp32 rounding to odd, so that a second rounding to a half type is correct: when the
// fp32 value is not exact, its last bit is set (Boldo & Melquiond 2008).
float round_to_odd(double v) {
    const float f = float(v);
    if (!std::isfinite(f) && !std::isfinite(v)) return f;
    if (double(f) == v) return f;
    const uint32_t u = std::bit_cast<uint32_t>(f);
    if (u & 1) return f;
    const bool away = std::isinf(f) || std::fabs(double(f)) > std::fabs(v);
    return std::bit_cast<float>(away ? u - 1 : u + 1);
}
template <>
Bf16 narrow(double v) {
    return {float_to_bf16(round_to_odd(v))};
}
template <>
F16 narrow(double v) {
    return {float_to_f16(round_to_odd(v))};
}

// f(S{}) with the storage type S of a float dtype.
template <class F>
void with_float_type(const char* what, DType t, F f) {
    switch (t) {
        case DType::f64: return f(double{});
        case DType::f32: return f(float{});
        case DType::bf16: return f(Bf16{});
        case DType::f16: return f(F16{});
        default: CHECK(false, ": ", what, " is ", name_of(t), ", must be a float type");
    }
}

// The dense pieces of a tensor: all of it when contiguous, else its rows.
struct Pieces {
    explicit Pieces(const Tensor& t) : t(t), width(t.rank() ? t.dim(-1) : 1) {}
    const Tensor& t;
    int64_t width;
    int64_t offset(int64_t row) const {  // of row number `row`, counting over all leading dims
        int64_t at = 0;
        for (int i = t.rank() - 2; i >= 0; --i) {
            at += row % t.dim(i) * t.stride[i];
            row /= t.dim(i);
        }
        return at;
    }
};

template <class D, class S>
void cast_elements(Tensor dst, Tensor src) {
    D* to = static_cast<D*>(dst.data);
    const S* from = static_cast<const S*>(src.data);
    const auto convert = [](D* d, const S* s, int64_t n) {
        for (int64_t i = 0; i < n; ++i) d[i] = narrow<D>(widen<S>(s[i]));
    };
    if (dst.contiguous() && src.contiguous())
        return parallel_ranges(dst.numel(), [&](int64_t begin, int64_t end) {
            convert(to + begin, from + begin, end - begin);
        });
    const Pieces d(dst), s(src);
    parallel_for(dst.numel() / d.width, d.width,
                 [&](int64_t row) { convert(to + d.offset(row), from + s.offset(row), d.width); });
}

}  // namespace

template <class T>
void CpuKernels<T>::fill(Stream&, Tensor x, double value) {
    expect("fill", "x", x, x.dtype, x.shape, true);
    if (x.numel() == 0) return;
    const auto all = [&](auto* p, auto v) {
        if (x.contiguous())
            return parallel_ranges(
                x.numel(), [&](int64_t begin, int64_t end) { std::fill(p + begin, p + end, v); });
        const Pieces rows(x);
        parallel_for(x.numel() / rows.width, rows.width,
                     [&](int64_t row) { std::fill_n(p + rows.offset(row), rows.width, v); });
    };
    if (x.dtype == DType::i32) return all(static_cast<int32_t*>(x.data), int32_t(value));
    with_float_type("fill: x", x.dtype, [&](auto s) {
        using S = decltype(s);
        all(static_cast<S*>(x.data), narrow<S>(value));
    });
}

template <class T>
void CpuKernels<T>::cast(Stream&, Tensor dst, Tensor src) {
    expect("cast", "src", src, src.dtype, src.shape, true);
    expect("cast", "dst", dst, dst.dtype, src.shape, true);
    if (dst.numel() == 0) return;
    if (src.dtype == DType::i32) {
        CHECK(dst.dtype == DType::i32, ": cast: int32 to ", name_of(dst.dtype));
        return cast_elements<int32_t, int32_t>(dst, src);
    }
    with_float_type("cast: src", src.dtype, [&](auto s) {
        with_float_type("cast: dst", dst.dtype,
                        [&](auto d) { cast_elements<decltype(d), decltype(s)>(dst, src); });
    });
}

template <class T>
void CpuKernels<T>::cast_stochastic(Stream&, Tensor dst, Tensor src, uint64_t seed,
                                    uint64_t stream_id, uint64_t offset) {
    expect_rank("cast_stochastic", "src", src, DType::f32, 1);
    expect("cast_stochastic", "dst", dst, DType::bf16, src.shape);
    uint16_t* to = dst.as<uint16_t>();
    const float* from = src.as<float>();
    parallel_ranges(src.numel(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            to[i] = float_to_bf16_stochastic(from[i],
                                             random_bits(seed, stream_id, offset + uint64_t(i)));
    });
}

template <class T>
void CpuKernels<T>::add(Stream&, Tensor out, Tensor a, Tensor b) {
    expect("add", "out", out, type, out.shape, true);
    expect("add", "a", a, type, out.shape, true);
    expect("add", "b", b, type, out.shape, true);
    if (out.numel() == 0) return;
    const auto sum = [](T* o, const T* x, const T* y, int64_t n) {
        for (int64_t i = 0; i < n; ++i) o[i] = x[i] + y[i];
    };
    T* o = out.as<T>();
    const T *x = a.as<T>(), *y = b.as<T>();
    if (out.contiguous() && a.contiguous() && b.contiguous())
        return parallel_ranges(out.numel(), [&](int64_t begin, int64_t end) {
            sum(o + begin, x + begin, y + begin, end - begin);
        });
    const Pieces to(out), one(a), two(b);
    parallel_for(out.numel() / to.width, to.width, [&](int64_t row) {
        sum(o + to.offset(row), x + one.offset(row), y + two.offset(row), to.width);
    });
}

template <class T>
void CpuKernels<T>::scale(Stream&, Tensor x, double factor) {
    expect("scale", "x", x, type, x.shape);
    T* p = x.as<T>();
    parallel_ranges(x.numel(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) p[i] *= T(factor);
    });
}

INSTANTIATE(fill, (Stream&, Tensor, double));
INSTANTIATE(cast, (Stream&, Tensor, Tensor));
INSTANTIATE(cast_stochastic, (Stream&, Tensor, Tensor, uint64_t, uint64_t, uint64_t));
INSTANTIATE(add, (Stream&, Tensor, Tensor, Tensor));
INSTANTIATE(scale, (Stream&, Tensor, double));

}  // namespace torus
