// What the softmax of attention costs while matrix products run beside it: on every multiprocessor
// of a Hopper GPU three warpgroups do parts of it on 64 numbers a thread, as in a tile of 64
// queries and 128 keys, and a fourth multiplies, without pause or with some. Nobody waits for
// anybody, so the cycles are what the units allow, and a bound for the attention forward.
//   bench_pipes
// Cycles for one such tile of each warpgroup, the share of them in which the exponentials' unit is
// busy (32 of a warp take 8 cycles), and the share in which the products' are.
#include <cstdio>
#include <utility>

#include "bench/help.h"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/flash/wgmma.cuh"
#include "kernels/kernels.h"

using namespace torus;
using namespace torus::flash;

namespace {

enum Part : int { exponents = 1, exponentials = 2, sums = 4, maxima = 8, packing = 16 };
struct Mix {
    const char* name;
    int parts;
};
constexpr Mix mixes[] = {
    {"exponentials", exponentials},
    {"exponents, exponentials", exponents | exponentials},
    {"exponents, exponentials, sums", exponents | exponentials | sums},
    {"... and packing", exponents | exponentials | sums | packing},
    {"... and maxima", exponents | exponentials | sums | packing | maxima},
};
constexpr int kMixes = sizeof mixes / sizeof *mixes, kNumbers = 64;
constexpr int kThreads = 512;
[[maybe_unused]] constexpr int kProducts = 384;  // the first thread of those that multiply
constexpr int kSlices = 4, kSliceCycles = 64;    // of 16 in a product of 64 x 128 x 64

struct Result {
    int64_t cycles;
    int products;  // in that time
};

// One tile; the numbers stay between 0 and 1.
template <int Parts>
DEVICE void softmax(float (&s)[kNumbers], float (&top)[2], float (&sum)[2], uint32_t& packed) {
    constexpr float scale = 0.5f;
    pin(s);  // between the two clocks, each tile behind the one before
    if constexpr (Parts & maxima) {
        UNROLL for (int r = 0; r < 2; ++r) {
            float high = s[2 * r];
            UNROLL for (int i = 2 * r; i < kNumbers; i += 4) high =
                fmaxf(high, fmaxf(s[i], s[i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            top[r] = (high - top[r]) * scale > 8 ? high : top[r];
        }
    }
    UNROLL for (int i = 0; i < kNumbers; ++i) {
        if constexpr (Parts & exponents) s[i] = fmaf(s[i], scale, -top[i / 2 % 2]);
        if constexpr (Parts & exponentials) s[i] = exp2_fast(s[i]);
        if constexpr (Parts & sums) sum[i / 2 % 2] += s[i];
    }
    if constexpr (Parts & packing) {
        UNROLL for (int i = 0; i < kNumbers; i += 4) packed ^=
            pack<__nv_bfloat16>(s[i], s[i + 1]) ^ pack<__nv_bfloat16>(s[i + 2], s[i + 3]);
    }
}

// Rate: 0 no products, 1 with pauses, 2 without.
template <int Parts, int Rate>
__global__ void __launch_bounds__(kThreads, 1)
    softmax_beside_products(Result* results, float* out, int tiles) {
#ifdef TORUS_SM90A
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ volatile int products;
    for (int i = threadIdx.x; i < 24576 / 4; i += kThreads)
        reinterpret_cast<uint32_t*>(memory)[i] = 0x3c003c00u + i * 77;
    products = 0;
    __syncthreads();
    if (__shfl_sync(~0u, threadIdx.x, 0) < kProducts) {
        float s[kNumbers], top[2] = {1, 1}, sum[2] = {0, 0};
        uint32_t packed = 0;
        UNROLL for (int i = 0; i < kNumbers; ++i) s[i] = float(threadIdx.x + i) * 0.001f;
        const int64_t from = clock64();
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) softmax<Parts>(s, top, sum, packed);
        pin(s);
        const int64_t to = clock64();
        float all = sum[0] + sum[1] + top[0] + float(packed);
        UNROLL for (int i = 0; i < kNumbers; ++i) all += s[i];
        out[blockIdx.x * kThreads + threadIdx.x] = all;
        if (threadIdx.x == 0) results[blockIdx.x] = {to - from, products};
    } else if (Rate > 0) {
        const uint32_t a = shared_address(memory), b = a + 8192;
        float d[64] = {};
        // Enough to outlast the others, who are never four times as slow as their unit.
#pragma unroll 1
        for (int i = 0; i < tiles * (Rate == 1 ? 10 : 20); ++i) {
            wgmma_fence();
            UNROLL for (int k = 0; k < kSlices; ++k)
                wgmma_ss<__nv_bfloat16, 128, 0, 0>(d, k_major<64>(a, k), k_major<128>(b, k), 1);
            wgmma_commit();
            if (Rate == 1)
                wgmma_wait<0>(), __nanosleep(100);
            else
                wgmma_wait<1>();
            if (threadIdx.x == kProducts) products = i;
        }
        wgmma_wait<0>();
        pin(d);
        float all = 0;
        UNROLL for (int i = 0; i < 64; ++i) all += d[i];
        out[blockIdx.x * kThreads + threadIdx.x] = all;
    }
#endif
}

template <int Parts, int Rate>
void measure(Result* results, float* out) {
    constexpr int tiles = 2000;
    for (int i = 0; i < 2; ++i)
        softmax_beside_products<Parts, Rate>
            <<<cuda::multiprocessors(), kThreads, 24576>>>(results, out, tiles);
    Result r{};
    cuda::check(cudaMemcpy(&r, results, sizeof r, cudaMemcpyDeviceToHost), "softmax");
    const double cycles = double(r.cycles);
    std::printf("| %5.0f, %3.0f%%, %3.0f%% ", cycles / tiles,
                100.0 * 3 * kNumbers * 8 * tiles / cycles,
                100.0 * r.products * kSlices * kSliceCycles / cycles);
}

template <int I>
void line(Result* results, float* out) {
    std::printf("| %-30s", mixes[I].name);
    measure<mixes[I].parts, 0>(results, out);
    measure<mixes[I].parts, 1>(results, out);
    measure<mixes[I].parts, 2>(results, out);
    std::printf("|\n");
}

template <int... I>
void run_all(std::integer_sequence<int, I...>, Result* results, float* out) {
    (line<I>(results, out), ...);
}

int run() {
    make_cuda_kernels(DType::bf16, 0);  // says what is missing where there is no GPU
    cudaDeviceProp device;
    cuda::check(cudaGetDeviceProperties(&device, 0), "device 0");
    require(device.major == 9, Exit::usage, device.name, ": bench_pipes needs a Hopper GPU");
    std::printf("%s. Cycles, exponentials' unit, products' units:\n| %-30s| %-17s| %-17s| %-17s|\n",
                device.name, "a tile of three warpgroups", "no products", "some", "all the time");
    Result* results = nullptr;
    float* out = nullptr;
    const size_t blocks = size_t(cuda::multiprocessors());
    cuda::check(cudaMalloc(&results, blocks * sizeof(Result)), "cudaMalloc");
    cuda::check(cudaMalloc(&out, blocks * kThreads * sizeof(float)), "cudaMalloc");
    run_all(std::make_integer_sequence<int, kMixes>(), results, out);
    cudaFree(results), cudaFree(out);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    if (!only_words(argc, argv)) return int(Exit::usage);
    if (argc > 1) {
        std::fprintf(stderr, "error: bench_pipes takes no arguments\n");
        return int(Exit::usage);
    }
    try {
        return run();
    } catch (const Error& e) {
        std::fprintf(stderr, "bench_pipes: %s\n", e.what());
        return int(e.code);
    }
}
