// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC11). A number is a function of (seed, stream, index): no state, no order, so the same
// bits on every backend and for every number of ranks.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TORUS_HD __host__ __device__
#else
#define TORUS_HD
#endif

namespace torus {

struct Random4 {
    uint32_t v[4];
};

// Four 32-bit words for counter `index` of `stream` under `seed`.
TORUS_HD inline Random4 philox(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32);
    uint32_t c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1);
        c3 = uint32_t(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

TORUS_HD inline uint32_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox(seed, stream, index >> 2).v[index & 3];
}

// The streams of the optimizer's stochastic rounding at its update t, apart from all others
// ("round"): one word an element, of which m takes the low half and v the high one, and one word
// for weights without a master, which take the low half.
TORUS_HD inline uint64_t moments_stream(uint64_t t) { return 0x726f756e64000000u + 2 * t; }
TORUS_HD inline uint64_t weights_stream(uint64_t t) { return moments_stream(t) + 1; }

// In (0, 1): never 0, so a logarithm of it is finite.
TORUS_HD inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    const Random4 r = philox(seed, stream, index);
    return (double(uint64_t(r.v[0]) << 20 | r.v[1] >> 12) + 0.5) * 0x1p-52;
}

// Standard normal by Box-Muller, in fp64 on the host (device libraries round differently).
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const Random4 r = philox(seed, stream, index);
    const double u = (double(uint64_t(r.v[0]) << 20 | r.v[1] >> 12) + 0.5) * 0x1p-52;
    const double w = (double(uint64_t(r.v[2]) << 20 | r.v[3] >> 12) + 0.5) * 0x1p-52;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * w);
}

}  // namespace torus
