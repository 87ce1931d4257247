// Packed documents for the benchmarks.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/rng.h"

namespace torus {

// first_key (B,S) of sequences filled with documents of log-normal length, spread 1.
inline std::vector<int32_t> packed_documents(int64_t B, int64_t S, double median, uint64_t seed) {
    std::vector<int32_t> first;
    uint64_t drawn = 0;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t begin = 0; begin < S;) {
            const double length = median * std::exp(random_normal(seed, 0, drawn++));
            const int64_t end = std::min(S, begin + std::max<int64_t>(1, int64_t(length)));
            first.insert(first.end(), size_t(end - begin), int32_t(begin));
            begin = end;
        }
    return first;
}

}  // namespace torus
