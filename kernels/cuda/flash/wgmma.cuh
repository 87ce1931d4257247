// wgmma, the warpgroup matrix product of Hopper: D (64 x N, fp32, in registers) (+)= A (64 x 16) B
// (16 x N). A comes from shared memory (ss) or registers (rs), B from shared memory; both operands
// lie in panels of 64, 32 or 16 elements with the swizzle of 128, 64 or 32 bytes that TMA writes,
// so one loaded tile serves as "K-major" (the sum runs along the rows' elements) and "MN-major"
// operand (the sum runs over rows) without a transposition; small ones that threads write may lie
// unswizzled.
//
// Accumulators: thread t, lane l = t % 32 holds the rows 16 * (t / 32) + l / 4 (and + 8) and the
// columns 8 j + 2 (l % 4) (and + 1): d[4j], d[4j+1] in the first row, d[4j+2], d[4j+3] 8 rows
// below.
#pragma once
#include <type_traits>

#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

// The widest panel that divides a tile's columns: MN-major operands want whole ones.
constexpr int panel_columns(int columns) { return columns % 64 == 0 ? 64 : 32; }

// The shared-memory matrix descriptor of what lies `offset` bytes into a tile: 8-row groups
// follow one another. The offset is a constant, and added last: an instruction or two for each
// product, and the address below 2^18 needs no mask.
template <int Panel>
DEVICE uint64_t descriptor(uint32_t tile, uint32_t offset, uint32_t panel_bytes) {
    constexpr uint32_t swizzle = Panel == 64 ? 1 : Panel == 32 ? 2 : 3, group_bytes = Panel * 16;
    const uint32_t low = (tile >> 4) + ((offset >> 4) + (panel_bytes >> 4 << 16));
    return uint64_t(low) | uint64_t((group_bytes >> 4) | swizzle << 30) << 32;
}
// The k-th slice of 16 of a tile of `rows` rows: along the elements (K-major) or the rows
// (MN-major).
template <int Rows, int Panel = 64>
DEVICE uint64_t k_major(uint32_t tile, int k) {
    constexpr int slices = Panel / 16;
    return descriptor<Panel>(tile, k / slices * (Rows * Panel * 2) + k % slices * 32, 16);
}
template <int Rows, int Panel = 64>
DEVICE uint64_t mn_major(uint32_t tile, int k) {
    return descriptor<Panel>(tile, k * (Panel * 32), Rows * Panel * 2);
}

// Of 16-bit operands that are not swizzled, K-major: pieces of 8 rows by 8 columns, 128 bytes each;
// what lies between those of the next rows, and of columns 8 to 15.
template <uint32_t NextRows, uint32_t NextColumns>
DEVICE uint64_t unswizzled(uint32_t address) {
    return uint64_t((address >> 4) + (NextColumns >> 4 << 16)) | uint64_t(NextRows >> 4) << 32;
}

// A tile of `Rows` rows and D columns: one box of all panels, or one for each where the tensor map
// has to cut off columns behind the head dim.
template <int D, int Rows, int Panel = panel_columns(D)>
DEVICE void load_tile(uint32_t to, const CUtensorMap* map, uint64_t* b, int row, int head,
                      int batch, uint64_t policy) {
    if constexpr (Panel == 64) {
        tma_load(to, map, b, row, head, batch, policy);
    } else {
        UNROLL for (int i = 0; i < D / Panel; ++i)
            tma_load(to + i * (Rows * Panel * 2), map, b, row, head, batch, policy, i * Panel);
    }
}
template <int D, int Rows, int Panel = panel_columns(D)>
DEVICE void store_tile(const CUtensorMap* map, uint32_t from, int row, int head, int batch) {
    if constexpr (Panel == 64) {
        tma_store(map, from, row, head, batch);
    } else {
        UNROLL for (int i = 0; i < D / Panel; ++i)
            tma_store(map, from + i * (Rows * Panel * 2), row, head, batch, i * Panel);
    }
}

// Operand lists of N / 2 accumulators: their names in the text, and their constraints.
// clang-format off
#define WG_L_48                                                                          \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_L_64 WG_L_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_L_96 WG_L_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_L_128 WG_L_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_F8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WG_F_48 WG_F8(0), WG_F8(8), WG_F8(16)
#define WG_F_64 WG_F_48, WG_F8(24)
#define WG_F_96 WG_F_64, WG_F8(32), WG_F8(40)
#define WG_F_128 WG_F_96, WG_F8(48), WG_F8(56)
// clang-format on

// A, B, P ...: operand numbers of the inputs, which follow the accumulators.
#define WG_SS_TYPE(TYPE, N, A, B, P, TA, TB)                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                               \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                 " {" WG_L_##N "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"  \
                 : WG_F_##N                                                            \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB)           \
                 : "memory")
#define WG_RS_TYPE(TYPE, N, A0, A1, A2, A3, B, P, TB)                                              \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N       \
        "k16.f32." TYPE "." TYPE " {" WG_L_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B \
                                               ", p, 1, 1, %" #TB ";\n}"                           \
        : WG_F_##N                                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransB)         \
        : "memory")
#define WG_SS(N, ...)                               \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) \
        WG_SS_TYPE("bf16", N, __VA_ARGS__);         \
    else                                            \
        WG_SS_TYPE("f16", N, __VA_ARGS__)
#define WG_RS(N, ...)                               \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) \
        WG_RS_TYPE("bf16", N, __VA_ARGS__);         \
    else                                            \
        WG_RS_TYPE("f16", N, __VA_ARGS__)

// Trans 0: K-major, 1: MN-major. accumulate 0 overwrites d.
template <class T, int N, int TransA, int TransB>
DEVICE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 48 || N == 64 || N == 128);
    if constexpr (N == 48) {
        WG_SS(48, 24, 25, 26, 27, 28);
    } else if constexpr (N == 64) {
        WG_SS(64, 32, 33, 34, 35, 36);
    } else {
        WG_SS(128, 64, 65, 66, 67, 68);
    }
}
template <class T, int N, int TransB>
DEVICE void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 96 || N == 128);
    if constexpr (N == 64) {
        WG_RS(64, 32, 33, 34, 35, 36, 37, 38);
    } else if constexpr (N == 96) {
        WG_RS(96, 48, 49, 50, 51, 52, 53, 54);
    } else {
        WG_RS(128, 64, 65, 66, 67, 68, 69, 70);
    }
}

// Accumulators to 16-bit A operands of the next product; also the registers stmatrix wants.
template <class T, int N>
DEVICE void repack(const float (&d)[N], uint32_t (&a)[N / 2]) {
    UNROLL for (int i = 0; i < N / 2; ++i) a[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

// Of the columns below N that a thread with l % 4 == 0 has of an accumulator's row (0, 1, 8, 9,
// 16 ...), those in [begin, end): one bit each, in their order.
template <int N>
DEVICE uint32_t columns_between(int begin, int end) {
    static_assert(N <= 128);
    const auto below = [](int limit) {  // how many
        const int x = min(max(limit, 0), N);
        return x / 8 * 2 + min(x % 8, 2);
    };
    const int first = below(begin);
    return bit_range(first, max(below(end) - first, 0));
}

// 4x4 transposition of 32-bit words among the four lanes of a quad: lane q ends with the words that
// lanes 0..3 held in x[q]. Turns accumulators (two columns of each 8) into runs of eight columns.
DEVICE void transpose_quad(uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    const uint32_t b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    x[0] = odd ? a : x[0], x[1] = odd ? x[1] : a;
    x[2] = odd ? b : x[2], x[3] = odd ? x[3] : b;
    const uint32_t c = __shfl_xor_sync(~0u, upper ? x[0] : x[2], 2);
    const uint32_t e = __shfl_xor_sync(~0u, upper ? x[1] : x[3], 2);
    x[0] = upper ? c : x[0], x[2] = upper ? x[2] : c;
    x[1] = upper ? e : x[1], x[3] = upper ? x[3] : e;
}

}  // namespace torus::flash
