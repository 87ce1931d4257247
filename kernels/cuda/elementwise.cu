// Fill, conversions, sums and scaling: bound by memory, so every access is 16 bytes where the
// addresses allow it.
#include <cstring>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
// Writes a pattern whose period divides 8 bytes: the byte at address a is byte a % 8 of it.
static __global__ void fill_kernel(uint8_t* begin, uint8_t* end, uint64_t pattern) {
    const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    uint8_t* body = begin + (16 - reinterpret_cast<uintptr_t>(begin) % 16) % 16;
    if (body > end) body = end;
    uint8_t* tail = body + (end - body) / 16 * 16;
    const uint32_t low = uint32_t(pattern), high = uint32_t(pattern >> 32);
    for (int64_t i = first; i < (tail - body) / 16; i += step)
        reinterpret_cast<uint4*>(body)[i] = make_uint4(low, high, low, high);
    const auto byte = [pattern](uint8_t* p) {
        *p = uint8_t(pattern >> reinterpret_cast<uintptr_t>(p) % 8 * 8);
    };
    if (first < body - begin) byte(begin + first);
    if (first < end - tail) byte(tail + first);
}

template <class Dst, class Src>
constexpr int cast_width = 16 / int(sizeof(Dst) < sizeof(Src) ? sizeof(Dst) : sizeof(Src));

template <int W, class Dst, class Src>
__device__ __forceinline__ void cast_vector(Dst* dst, const Src* src) {
    const Vec<Src, W> x = load<W>(src);
    Vec<Dst, W> y;
    for (int k = 0; k < W; ++k) y.v[k] = convert<Dst>(x.v[k]);
    store(dst, y);
}

template <class Dst, class Src>
struct CastOp {
    static constexpr int width = cast_width<Dst, Src>;
    Dst* dst;
    const Src* src;
    template <int W>
    __device__ void run(int64_t i) const {
        cast_vector<W>(dst + i, src + i);
    }
};

// Where the rows of two pitched tensors of one shape begin. Dimensions that follow each other
// without a gap in both count as one: most often a single one is left, and nothing to divide.
struct RowOffsets {
    int rank = 0;
    int64_t size[Shape::max_rank], dst[Shape::max_rank], src[Shape::max_rank];  // innermost first

    RowOffsets(const Tensor& to, const Tensor& from) {
        for (int i = to.rank() - 2; i >= 0; --i) {
            const int64_t n = to.dim(i), d = to.pitch(i), s = from.pitch(i);
            const int last = rank - 1;
            if (n == 1) continue;
            if (rank > 0 && d == size[last] * dst[last] && s == size[last] * src[last])
                size[last] *= n;
            else
                size[rank] = n, dst[rank] = d, src[rank++] = s;
        }
    }
    template <class F>
    __device__ void at(int64_t row, F f) const {  // f(offset in dst, offset in src), in elements
        int64_t to = 0, from = 0;
        for (int i = 0; i < rank; ++i) {
            const int64_t rest = i + 1 < rank ? row / size[i] : 0, here = row - rest * size[i];
            to += here * dst[i], from += here * src[i];
            row = rest;
        }
        f(to, from);
    }
};

template <class Dst, class Src>
struct CastRowsOp {
    static constexpr int width = cast_width<Dst, Src>;
    Dst* dst;
    const Src* src;
    RowOffsets rows;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        rows.at(row, [&](int64_t to, int64_t from) {
            cast_vector<W>(dst + to + col, src + from + col);
        });
    }
};

// T: as wide as an element.
template <class T>
struct FillRowsOp {
    static constexpr int width = 16 / int(sizeof(T));
    T* x;
    RowOffsets rows;
    uint64_t pattern;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const uint32_t low = uint32_t(pattern), high = uint32_t(pattern >> 32);
        rows.at(row, [&](int64_t to, int64_t) {
            if constexpr (W > 1)
                *reinterpret_cast<uint4*>(x + to + col) = make_uint4(low, high, low, high);
            else
                x[to + col] = T(pattern);
        });
    }
};

// One Philox call makes four numbers, for elements whose random index shares index / 4.
struct CastStochasticOp {
    static constexpr int width = 1;
    bf16* dst;
    const float* src;
    int64_t n;
    uint64_t seed, stream_id, offset;
    template <int W>
    __device__ void run(int64_t group) const {
        const uint64_t counter = (offset >> 2) + uint64_t(group);
        const Random4 random = philox(seed, stream_id, counter);
        for (int k = 0; k < 4; ++k) {
            const int64_t i = int64_t(counter * 4 - offset) + k;
            if (i >= 0 && i < n)
                dst[i] = __ushort_as_bfloat16(float_to_bf16_stochastic(src[i], random.v[k]));
        }
    }
};

template <class T>
struct AddOp {
    static constexpr int width = vector_width<T>;
    T* out;
    const T *a, *b;
    template <int W>
    __device__ void run(int64_t i) const {
        const Vec<T, W> x = load<W>(a + i), y = load<W>(b + i);
        store(out + i, Vec<T, W>::of([&](int k) { return x.get(k) + y.get(k); }));
    }
};

template <class T>
struct ScaleOp {
    static constexpr int width = vector_width<T>;
    T* x;
    Acc<T> factor;
    template <int W>
    __device__ void run(int64_t i) const {
        const Vec<T, W> v = load<W>(x + i);
        store(x + i, Vec<T, W>::of([&](int k) { return v.get(k) * factor; }));
    }
};

// --- launchers -----------------------------------------------------------------------------------
// The bytes of `value` in type `t`, repeated to 8.
static uint64_t pattern_of(DType t, double value) {
    uint8_t one[8] = {};
    switch (t) {
        case DType::f64: std::memcpy(one, &value, 8); break;
        case DType::f32: {
            const float f = float(value);
            std::memcpy(one, &f, 4);
            break;
        }
        case DType::i32: {
            const int32_t i = int32_t(value);
            std::memcpy(one, &i, 4);
            break;
        }
        case DType::bf16: {
            const uint16_t h = float_to_bf16(float(value));
            std::memcpy(one, &h, 2);
            break;
        }
        case DType::f16: {
            const uint16_t h = float_to_f16(float(value));
            std::memcpy(one, &h, 2);
            break;
        }
        default: fail(Exit::internal, "fill: no kernel for ", name_of(t));
    }
    uint64_t all = 0;
    for (int i = 0; i < 8; ++i) all |= uint64_t(one[i % size_of(t)]) << 8 * i;
    return all;
}

// Whether rows of these may be accessed 16 bytes at a time.
static bool aligned_rows(const Tensor& t, int64_t width) {
    bool aligned = aligned16(t.data) && t.dim(-1) % width == 0;
    for (int i = 0; i < t.rank() - 1; ++i) aligned = aligned && t.pitch(i) % width == 0;
    return aligned;
}

template <class T>
static void fill_rows(Stream& stream, const Tensor& x, uint64_t pattern) {
    const FillRowsOp<T> op{static_cast<T*>(x.data), RowOffsets(x, x), pattern};
    map_rows("fill", stream, op, x.numel() / x.dim(-1), x.dim(-1), aligned_rows(x, op.width));
}

void CudaKernels::fill(Stream& stream, Tensor x, double value) {
    if (x.numel() == 0) return;
    const uint64_t pattern = pattern_of(x.dtype, value);
    if (!x.contiguous()) {
        CHECK(x.dim(-1) == 1 || x.pitch(-1) == 1, ": fill of ", x.shape.str(), " without rows");
        switch (size_of(x.dtype)) {
            case 2: return fill_rows<uint16_t>(stream, x, pattern);
            case 4: return fill_rows<uint32_t>(stream, x, pattern);
            default: return fill_rows<uint64_t>(stream, x, pattern);
        }
    }
    uint8_t* begin = static_cast<uint8_t*>(x.data);
    const int64_t blocks = std::min<int64_t>(divide_up(x.bytes(), 16 * 256), 1 << 22);
    launch("fill", stream, {.blocks = blocks}, fill_kernel, begin, begin + x.bytes(), pattern);
}

template <class Dst, class Src>
static void cast_to(Stream& stream, const Tensor& dst, const Tensor& src) {
    Dst* const to = static_cast<Dst*>(dst.data);
    const Src* const from = static_cast<const Src*>(src.data);
    const int width = cast_width<Dst, Src>;
    if (dst.contiguous() && src.contiguous()) {
        const bool aligned = aligned16(to) && aligned16(from);
        map("cast", stream, CastOp<Dst, Src>{to, from}, dst.numel(), aligned);
        return;
    }
    const int64_t cols = dst.dim(-1);
    map_rows("cast", stream, CastRowsOp<Dst, Src>{to, from, RowOffsets(dst, src)},
             dst.numel() / cols, cols, aligned_rows(dst, width) && aligned_rows(src, width));
}

void CudaKernels::cast(Stream& stream, Tensor dst, Tensor src) {
    CHECK(dst.shape == src.shape, ": cast of ", src.shape.str(), " to ", dst.shape.str());
    if (dst.numel() == 0) return;
    if (dst.dtype == DType::i32 || src.dtype == DType::i32) {
        CHECK(dst.dtype == src.dtype, ": cast of ", name_of(src.dtype), " to ", name_of(dst.dtype));
        cast_to<int32_t, int32_t>(stream, dst, src);
        return;
    }
    dispatch_float(dst.dtype, [&](auto to) {
        dispatch_float(src.dtype, [&](auto from) {
            cast_to<typename decltype(to)::type, typename decltype(from)::type>(stream, dst, src);
        });
    });
}

void CudaKernels::cast_stochastic(Stream& stream, Tensor dst, Tensor src, uint64_t seed,
                                  uint64_t stream_id, uint64_t offset) {
    const int64_t n = src.numel();
    expect(dst, "cast_stochastic: dst", DType::bf16, n);
    expect(src, "cast_stochastic: src", DType::f32, n);
    if (n == 0) return;
    const CastStochasticOp op{
        static_cast<bf16*>(dst.data), src.as<float>(), n, seed, stream_id, offset};
    const int64_t groups = int64_t((offset + uint64_t(n) - 1) / 4 - offset / 4) + 1;
    map("cast_stochastic", stream, op, groups, false);
}

void CudaKernels::add(Stream& stream, Tensor out, Tensor a, Tensor b) {
    expect(out, "add: out", a.dtype, a.numel());
    expect(a, "add: a", a.dtype, a.numel());
    expect(b, "add: b", a.dtype, a.numel());
    const bool vectors = aligned16(out.data) && aligned16(a.data) && aligned16(b.data);
    dispatch_float(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        map("add", stream,
            AddOp<T>{static_cast<T*>(out.data), static_cast<const T*>(a.data),
                     static_cast<const T*>(b.data)},
            a.numel(), vectors);
    });
}

void CudaKernels::scale(Stream& stream, Tensor x, double factor) {
    expect(x, "scale: x", x.dtype, x.numel());
    dispatch_float(x.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        map("scale", stream, ScaleOp<T>{static_cast<T*>(x.data), Acc<T>(factor)}, x.numel(),
            aligned16(x.data));
    });
}

}  // namespace torus::cuda
