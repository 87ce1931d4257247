// bf16 and fp16 as 16-bit storage on the host: exact widening, round to nearest even, and
// stochastic rounding of fp32 to bf16. The CPU backend computes in fp32 or fp64 only; these are for
// casts, checkpoints and tests.
#pragma once
#include <bit>
#include <cstdint>

#include "kernels/rng.h"

namespace torus {

TORUS_HD inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }

TORUS_HD inline uint16_t float_to_bf16(float f) {
    const uint32_t u = std::bit_cast<uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);  // quiet NaN
    return uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

// Rounds up with probability equal to the discarded fraction; `bits` supplies 16 random bits.
// Infinities and NaN are kept.
TORUS_HD inline uint16_t float_to_bf16_stochastic(float f, uint32_t bits) {
    const uint32_t u = std::bit_cast<uint32_t>(f);
    if ((u & 0x7f800000u) == 0x7f800000u) return float_to_bf16(f);
    return uint16_t((u + (bits & 0xffffu)) >> 16);
}

TORUS_HD inline float f16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exp = h >> 10 & 31, man = h & 1023;
    if (exp == 31) return std::bit_cast<float>(sign | 0x7f800000u | man << 13);
    if (exp == 0) {  // zero and subnormals: man * 2^-24, exact in fp32
        const float f = float(man) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(f) | sign);
    }
    return std::bit_cast<float>(sign | (exp + 112) << 23 | man << 13);
}

TORUS_HD inline uint16_t float_to_f16(float f) {
    const uint32_t u = std::bit_cast<uint32_t>(f), sign = u >> 16 & 0x8000u;
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
    if (a < 0x38800000u) {                                  // below 2^-14: fixed point of 2^-24
        const float scaled = std::bit_cast<float>(a) * 0x1p24f;
        uint32_t n = uint32_t(scaled);
        const float rest = scaled - float(n);
        if (rest > 0.5f || (rest == 0.5f && (n & 1))) ++n;
        return uint16_t(sign | n);
    }
    const uint32_t r = a + 0xfffu + (a >> 13 & 1);
    return uint16_t(sign | (r - 0x38000000u) >> 13);
}

}  // namespace torus
