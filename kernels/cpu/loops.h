// What the loops of the CPU backend share: threads over independent outputs, sums of fixed order,
// and an exponential that the compiler can vectorise. Nothing here may make a result depend on the
// number of threads or on the width of the machine's vectors: sums run over a fixed number of
// lanes, and hot functions are compiled for several instruction sets with contraction off
// (-ffp-contract=off), so each clone does the same roundings.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#ifdef _OPENMP
#include <omp.h>
#endif

// Compiles a function for AVX-512, AVX2 and the baseline, chosen at load time. Not under
// sanitizers, whose runtime is not up yet when the choice is made.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace torus {

inline int max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// f(0) ... f(n-1), which write disjoint outputs and do not throw. `cost` is a rough number of
// element operations per call: small loops stay on one thread.
template <class F>
void parallel_for(int64_t n, int64_t cost, F f) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (n > 1 && n * cost > 16384)
#endif
    for (int64_t i = 0; i < n; ++i) f(i);
}

// The same for few, large and unequal pieces of work.
template <class F>
void parallel_tasks(int64_t n, int64_t cost, F f) {
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (n > 1 && n * cost > 16384)
#endif
    for (int64_t i = 0; i < n; ++i) f(i);
}

// f(begin, end) over [0, n) in pieces of fixed size.
template <class F>
void parallel_ranges(int64_t n, F f) {
    constexpr int64_t piece = 8192;
    parallel_for((n + piece - 1) / piece, piece,
                 [&](int64_t i) { f(i * piece, (i + 1) * piece < n ? (i + 1) * piece : n); });
}

// Sum of f(0) ... f(n-1) over 16 lanes, then the lanes by halves.
template <class T, class F>
INLINE T lane_sum(int64_t n, F f) {
    constexpr int64_t L = 16;
    T lane[L] = {};
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int64_t l = 0; l < L; ++l) lane[l] += f(i + l);
    for (; i < n; ++i) lane[i % L] += f(i);
    for (int64_t half = L / 2; half > 0; half /= 2)
        for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    return lane[0];
}

// Largest of x[0 .. n); NaN is passed over. -inf when n is 0.
template <class T>
INLINE T lane_max(int64_t n, const T* x) {
    constexpr int64_t L = 16;
    T lane[L];
    for (T& m : lane) m = -std::numeric_limits<T>::infinity();
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int64_t l = 0; l < L; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; ++i) lane[i % L] = x[i] > lane[i % L] ? x[i] : lane[i % L];
    T m = lane[0];
    for (int64_t l = 1; l < L; ++l) m = lane[l] > m ? lane[l] : m;
    return m;
}

// exp(x) = 2^k exp(r), |r| <= log(2)/2, with the Taylor series of exp(r) to degree 7 (its remainder
// is below 6e-9). Within 2 units in the last place; 0 below -86; no branches and no library call,
// so loops over it vectorise and give the same bits on every machine.
INLINE float fast_exp(float x) {
    constexpr float round = 0x1.8p23f;  // adding it rounds to an integer
    constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // k * ln2_high is exact
    const float c = x > 89.0f ? 89.0f : x;
    const float t = c * 1.44269504f + round;
    const float k = t - round;
    const float r = (c - k * ln2_high) - k * ln2_low;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The integer k stands in the low bits of t; 2^(k-1) * 2 also reaches k = 128.
    const uint32_t exponent = (std::bit_cast<uint32_t>(t) + 126u) << 23;
    const float y = p * std::bit_cast<float>(exponent) * 2.0f;
    return x < -86.0f ? 0.0f : y;
}
INLINE double fast_exp(double x) { return std::exp(x); }

}  // namespace torus
