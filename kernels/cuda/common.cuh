// Shared by all CUDA kernels: error checks, the one launch helper, 16-byte vectors, conversions to
// the arithmetic type (fp32, or fp64 for fp64 data), asynchronous copies, reductions in a fixed
// order, and two generic kernels that map a functor over a flat range or the rows of a matrix.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/check.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

namespace torus::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

// Throws with the name of the call that failed; out of memory has its own exit code.
void check(cudaError_t error, const char* what);

// --- types ---------------------------------------------------------------------------------------
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Widening is exact, narrowing rounds to nearest even; fp64 goes to 16 bits through fp32, as on the
// CPU.
template <class To, class From>
__device__ __forceinline__ To convert(From x) {
    if constexpr (std::is_same_v<To, From>) {
        return x;
    } else if constexpr (std::is_same_v<From, bf16>) {
        return To(__bfloat162float(x));
    } else if constexpr (std::is_same_v<From, f16>) {
        return To(__half2float(x));
    } else if constexpr (std::is_same_v<To, bf16>) {
        return __float2bfloat16_rn(float(x));
    } else if constexpr (std::is_same_v<To, f16>) {
        return __float2half_rn(float(x));
    } else {
        return To(x);
    }
}
// bf16 <-> fp16 goes through fp32, which both widen to.
template <>
__device__ __forceinline__ f16 convert<f16, bf16>(bf16 x) {
    return __float2half_rn(__bfloat162float(x));
}
template <>
__device__ __forceinline__ bf16 convert<bf16, f16>(f16 x) {
    return __float2bfloat16_rn(__half2float(x));
}

// Two halves in a word, the lower one first: one instruction for two roundings.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// W consecutive elements; loads and stores of W * sizeof(T) bytes, at most 16 at once. Halves are
// read by the word: as single halves the compiler keeps a register for each.
template <class T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Vec {
    T v[W];
    __device__ __forceinline__ Acc<T> get(int i) const {
        if constexpr (sizeof(T) == 2 && W % 2 == 0) {
            const uint32_t word = reinterpret_cast<const uint32_t*>(v)[i / 2];
            if constexpr (std::is_same_v<T, bf16>)  // bf16 is the upper half of an fp32
                return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
            else
                return __half2float(__ushort_as_half(uint16_t(i % 2 ? word >> 16 : word)));
        } else {
            return convert<Acc<T>>(v[i]);
        }
    }
    __device__ __forceinline__ void set(int i, Acc<T> x) { v[i] = convert<T>(x); }
    // By the word too: a selection between a vector and Vec{} would be made for each half.
    __device__ __forceinline__ static Vec zero() {
        Vec r;
        if constexpr (sizeof(Vec) % 4 == 0) {
#pragma unroll
            for (int i = 0; i < int(sizeof(Vec)) / 4; ++i) reinterpret_cast<uint32_t*>(r.v)[i] = 0;
        } else {
            r = Vec{};
        }
        return r;
    }
    // The vector of f(0), f(1), ...; halves are rounded in pairs.
    template <class F>
    __device__ __forceinline__ static Vec of(F f) {
        Vec r;
        if constexpr (sizeof(T) == 2 && W % 2 == 0) {
#pragma unroll
            for (int i = 0; i < W; i += 2)
                reinterpret_cast<uint32_t*>(r.v)[i / 2] = pack<T>(f(i), f(i + 1));
        } else {
#pragma unroll
            for (int i = 0; i < W; ++i) r.set(i, f(i));
        }
        return r;
    }
};
template <int W, class T>
__device__ __forceinline__ Vec<T, W> load(const T* p) {
    return *reinterpret_cast<const Vec<T, W>*>(p);
}
// Stores of 16 bytes are spelled out: where a kernel has a path of single elements too, the
// compiler moves the stores of both paths together and takes the vectors apart for it.
template <int W, class T>
__device__ __forceinline__ void store(T* p, const Vec<T, W>& x) {
    if constexpr (sizeof(x) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < int(sizeof(x)) / 16; ++i) {
            const uint4 word = reinterpret_cast<const uint4*>(&x)[i];
            asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(p) + i),
                         "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
                         : "memory");
        }
    } else {
        *reinterpret_cast<Vec<T, W>*>(p) = x;
    }
}

// Elements of one 16-byte access.
template <class T>
constexpr int vector_width = 16 / int(sizeof(T));

template <class T>
struct Type {
    using type = T;
};

// Calls f(Type<T>{}) for the activation types of this backend.
template <class F>
void dispatch(DType dtype, F&& f) {
    switch (dtype) {
        case DType::f32: return f(Type<float>{});
        case DType::bf16: return f(Type<bf16>{});
        case DType::f16: return f(Type<f16>{});
        default: fail(Exit::internal, "no CUDA kernel for ", name_of(dtype));
    }
}
// The same, and fp64.
template <class F>
void dispatch_float(DType dtype, F&& f) {
    if (dtype == DType::f64) return f(Type<double>{});
    dispatch(dtype, std::forward<F>(f));
}
// f(Type<T>{}, width) with width 16 bytes when `vectors`, else one element.
template <class F>
void dispatch_width(DType dtype, bool vectors, F&& f) {
    dispatch(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (vectors)
            f(type, std::integral_constant<int, vector_width<T>>{});
        else
            f(type, std::integral_constant<int, 1>{});
    });
}

// --- views ---------------------------------------------------------------------------------------
// A tensor as rows: all leading dimensions together, which must share one pitch.
struct Matrix {
    void* data;
    int64_t rows, cols, pitch;  // elements
    DType dtype;
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};
Matrix as_matrix(const Tensor& t, const char* name);

// True when every row starts at a multiple of 16 bytes and holds whole 16-byte vectors.
bool vectorizable(const Matrix& m);

// Throws unless `t` is there, has this type and number of elements, and is contiguous.
void expect(const Tensor& t, const char* name, DType dtype, int64_t numel);

// The first `bytes` of the stream's workspace.
void* workspace(const Stream& stream, int64_t bytes, const char* op);

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// --- launching -----------------------------------------------------------------------------------
struct Grid {
    int64_t blocks;  // in x: the only dimension without the 65,535 limit
    dim3 threads = dim3(256);
    int64_t shared = 0;  // bytes of dynamic shared memory
};

// NVTX ranges in the domain "torus", for profilers; see Device::push_range.
void push_range(const char* name, int64_t number = -1);
void pop_range();

struct Range {  // an op: where no Device is at hand
    explicit Range(const char* name) { push_range(name); }
    ~Range() { pop_range(); }
    Range(const Range&) = delete;
};

cudaLaunchConfig_t prepare(const char* op, const Stream& stream, const Grid& grid,
                           const void* kernel);

template <class... Params, class... Args>
void launch(const char* op, const Stream& stream, const Grid& grid, void (*kernel)(Params...),
            Args&&... args) {
    if (grid.blocks == 0) return;
    const Range range(op);
    const cudaLaunchConfig_t config =
        prepare(op, stream, grid, reinterpret_cast<const void*>(kernel));
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op);
}

// Bytes are planned without a device at hand: scratch memory that grows with the multiprocessors is
// for this many (the largest GPU today has 188), so that one plan holds on every GPU.
constexpr int most_multiprocessors = 192;
int multiprocessors();   // of the current device, at most as many
int64_t shared_limit();  // bytes of shared memory that a block may have there

// Blocks of this shape that one multiprocessor runs at a time.
int resident_blocks(const void* kernel, dim3 threads, int64_t shared);
template <class... Params>
int resident_blocks(void (*kernel)(Params...), dim3 threads, int64_t shared) {
    return resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared);
}

// --- asynchronous copies to shared memory --------------------------------------------------------
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// Copies 16 bytes, or writes zeros when not `valid`.
__device__ __forceinline__ void copy16(void* dst, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)),
                 "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
// Closes a group of copies. A thread sees what it copied itself once it has waited for the group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_copies() {  // for all but the last N groups
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- reductions in a fixed order -----------------------------------------------------------------
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
template <class T>
__device__ __forceinline__ T warp_max(T x) {
    for (int lane = 16; lane > 0; lane >>= 1) x = max(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// out[c] += sum of partial[i][c] over i < count, for c < cols, in a fixed order. With `second`,
// rows of partial are twice as long and the other halves are added to that. See reduce.cu.
void reduce_partials(const char* op, Stream& stream, float* out, float* second,
                     const float* partial, int64_t count, int64_t cols);

// db[c] += sum over rows of dout[row][c]. See bias_gradient.cu.
void bias_gradient(Stream& stream, float* db, const Matrix& dout);

// --- maps ----------------------------------------------------------------------------------------
// Op has `static constexpr int width` and `template <int W> __device__ void run(int64_t i) const`,
// which handles elements [i, i + W).
template <class Op>
__global__ void map_kernel(const Op op, int64_t n, bool vectors) {
    const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    const int64_t body = vectors ? n / Op::width : 0;
    for (int64_t i = first; i < body; i += step) op.template run<Op::width>(i * Op::width);
    for (int64_t i = body * Op::width + first; i < n; i += step) op.template run<1>(i);
}

// `vectors`: all pointers are 16-byte aligned. The tail is done element by element.
template <class Op>
void map(const char* name, const Stream& stream, const Op& op, int64_t n, bool vectors) {
    const int64_t work = vectors ? divide_up(n, Op::width) : n;
    const int64_t blocks = std::min<int64_t>(divide_up(work, 256), 1 << 22);
    launch(name, stream, {.blocks = blocks}, map_kernel<Op>, op, n, vectors);
}

// Op::run<W>(row, col) handles columns [col, col + W) of a row. 32-bit divisions: 64-bit ones would
// cost as much as the memory accesses.
template <class Op>
__global__ void map_rows_kernel(const Op op, int64_t rows, int64_t cols, uint32_t blocks_per_row,
                                bool vectors) {
    const uint32_t row_block = blockIdx.x / blocks_per_row;
    const int64_t row = int64_t(row_block) * blockDim.y + threadIdx.y;
    const int64_t item =
        int64_t(blockIdx.x - row_block * blocks_per_row) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    if (vectors) {
        if (item * Op::width < cols) op.template run<Op::width>(row, item * Op::width);
    } else {
        if (item < cols) op.template run<1>(row, item);
    }
}

// `vectors`: cols is a multiple of Op::width and all rows are 16-byte aligned.
template <class Op>
void map_rows(const char* name, const Stream& stream, const Op& op, int64_t rows, int64_t cols,
              bool vectors) {
    if (rows == 0 || cols == 0) return;
    const int64_t items = vectors ? cols / Op::width : cols;
    unsigned x = 1;
    while (x < 256 && x < items) x *= 2;
    const int64_t blocks_per_row = divide_up(items, x);
    launch(name, stream,
           {.blocks = divide_up(rows, 256 / x) * blocks_per_row, .threads = dim3(x, 256 / x)},
           map_rows_kernel<Op>, op, rows, cols, uint32_t(blocks_per_row), vectors);
}

}  // namespace torus::cuda
