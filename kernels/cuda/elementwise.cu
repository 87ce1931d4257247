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

// Where the rows of N pitched tensors of one shape begin. Dimensions that follow each other without
// a gap in all of them count as one: most often a single one is left, and nothing to divide.
template <int N>
struct RowOffsets {
    struct Offsets {  // in elements
        int64_t of[N];
        __device__ int64_t operator[](int i) const { return of[i]; }
    };
    int rank = 0;
    int64_t size[Shape::max_rank], pitch[Shape::max_rank][N];  // innermost first

    RowOffsets(const Tensor* const (&tensors)[N]) {
        for (int i = tensors[0]->rank() - 2; i >= 0; --i) {
            const int64_t n = tensors[0]->dim(i);
            if (n == 1) continue;
            bool goes_on = rank > 0;
            for (int t = 0; t < N; ++t) {
                pitch[rank][t] = tensors[t]->pitch(i);
                if (goes_on) goes_on = pitch[rank][t] == size[rank - 1] * pitch[rank - 1][t];
            }
            if (goes_on)
                size[rank - 1] *= n;
            else
                size[rank++] = n;
        }
    }
    __device__ Offsets at(int64_t row) const {
        Offsets sum{};
        for (int i = 0; i < rank; ++i) {
            const int64_t rest = i + 1 < rank ? row / size[i] : 0, here = row - rest * size[i];
            for (int t = 0; t < N; ++t) sum.of[t] += here * pitch[i][t];
            row = rest;
        }
        return sum;
    }
};

template <class Dst, class Src>
struct CastRowsOp {
    static constexpr int width = cast_width<Dst, Src>;
    Dst* dst;
    const Src* src;
    RowOffsets<2> rows;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const auto at = rows.at(row);
        cast_vector<W>(dst + at[0] + col, src + at[1] + col);
    }
};

// T: as wide as an element.
template <class T>
struct FillRowsOp {
    static constexpr int width = 16 / int(sizeof(T));
    T* x;
    RowOffsets<1> rows;
    uint64_t pattern;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const uint32_t low = uint32_t(pattern), high = uint32_t(pattern >> 32);
        T* const to = x + rows.at(row)[0] + col;
        if constexpr (W > 1)
            *reinterpret_cast<uint4*>(to) = make_uint4(low, high, low, high);
        else
            *to = T(pattern);
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

template <int W, class Out, class In>
__device__ __forceinline__ void add_vector(Out* out, const In* a, const In* b) {
    const Vec<In, W> x = load<W>(a), y = load<W>(b);
    store(out, Vec<Out, W>::of([&](int k) { return x.get(k) + y.get(k); }));
}

template <class Out, class In>
struct AddOp {
    static constexpr int width = cast_width<Out, In>;
    Out* out;
    const In *a, *b;
    template <int W>
    __device__ void run(int64_t i) const {
        add_vector<W>(out + i, a + i, b + i);
    }
};

template <class Out, class In>
struct AddRowsOp {
    static constexpr int width = cast_width<Out, In>;
    Out* out;
    const In *a, *b;
    RowOffsets<3> rows;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const auto at = rows.at(row);
        add_vector<W>(out + at[0] + col, a + at[1] + col, b + at[2] + col);
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
    const FillRowsOp<T> op{static_cast<T*>(x.data), {{&x}}, pattern};
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
    map_rows("cast", stream, CastRowsOp<Dst, Src>{to, from, {{&dst, &src}}}, dst.numel() / cols,
             cols, aligned_rows(dst, width) && aligned_rows(src, width));
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

template <class Out, class In>
static void add_to(Stream& stream, const Tensor& out, const Tensor& a, const Tensor& b) {
    Out* const to = static_cast<Out*>(out.data);
    const In *const x = static_cast<const In*>(a.data), *const y = static_cast<const In*>(b.data);
    if (out.contiguous() && a.contiguous() && b.contiguous()) {
        const bool aligned = aligned16(to) && aligned16(x) && aligned16(y);
        map("add", stream, AddOp<Out, In>{to, x, y}, out.numel(), aligned);
        return;
    }
    constexpr int width = cast_width<Out, In>;
    map_rows("add", stream, AddRowsOp<Out, In>{to, x, y, {{&out, &a, &b}}},
             out.numel() / out.dim(-1), out.dim(-1),
             aligned_rows(out, width) && aligned_rows(a, width) && aligned_rows(b, width));
}

void CudaKernels::add(Stream& stream, Tensor out, Tensor a, Tensor b) {
    CHECK(out && a && b && out.shape == a.shape && a.shape == b.shape, ": add of ", a.shape.str(),
          " and ", b.shape.str(), " to ", out.shape.str());
    CHECK(a.dtype == b.dtype &&
              (out.dtype == a.dtype || (out.dtype == precision_.act && a.dtype == precision_.stat)),
          ": add of ", name_of(a.dtype), " and ", name_of(b.dtype), " to ", name_of(out.dtype));
    for (const Tensor* t : {&out, &a, &b})
        CHECK(t->contiguous() || t->dim(-1) == 1 || t->pitch(-1) == 1, ": add without rows");
    if (a.numel() == 0) return;
    dispatch_float(a.dtype, [&](auto type) {
        using In = typename decltype(type)::type;
        if (out.dtype == a.dtype) return add_to<In, In>(stream, out, a, b);
        dispatch_float(out.dtype, [&](auto to) {
            add_to<typename decltype(to)::type, In>(stream, out, a, b);
        });
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
