// The softmax of the attention forward: of one tile of scores after the other, in place, with the
// running sums of a thread's two rows (r = 0, 1; the row of s[i] is i / 2 % 2). Four lanes hold the
// columns of a row between them. Probabilities are powers of 2 relative to a base that follows the
// row's maximum only when that has grown by more than a margin, so that the output is seldom
// rescaled; that changes no relative precision.
//
// Two ways to find out whether a base has to follow, behind one interface:
//   begin     the first tile of a query tile; the rows' visible keys are [low, high)
//   step      a further tile
//   shrinks   whether the output before this tile has to be multiplied by decay[r]
//   log_sum   natural logarithm of a row's sum, given the sum of its four lanes
#pragma once
#include <type_traits>

#include "kernels/cuda/flash/ptx.cuh"

namespace torus::flash {

// Scores of keys that a row does not see become -inf. column: key number of s[0].
template <int N>
DEVICE void hide_keys(float (&s)[N], int column, const int (&low)[2], const int (&high)[2]) {
    UNROLL for (int r = 0; r < 2; ++r) {
        const int base = column - low[r];
        const uint32_t visible = uint32_t(max(high[r] - low[r], 0));
        UNROLL for (int i = 2 * r; i < N; i += 4) {
            s[i] = uint32_t(base + i / 4 * 8) < visible ? s[i] : -INFINITY;
            s[i + 1] = uint32_t(base + i / 4 * 8 + 1) < visible ? s[i + 1] : -INFINITY;
        }
    }
}

// The largest of row r among s[First] to s[End - 1], over its four lanes.
template <int First, int End, int N>
DEVICE float row_maximum(const float (&s)[N], int r) {
    float high = s[First + 2 * r];
    UNROLL for (int i = First + 2 * r; i < End; i += 4) high = fmaxf(high, fmaxf(s[i], s[i + 1]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    return fmaxf(high, __shfl_xor_sync(~0u, high, 2));
}

// The maximum of each row first.
template <int N>
struct SoftmaxByMaximum {
    static constexpr float margin = 8;
    float top[2], sum[2], decay[2];

    DEVICE void begin(float (&s)[N], float scale_log2, const int (&)[2], const int (&)[2]) {
        UNROLL for (int r = 0; r < 2; ++r) top[r] = -INFINITY, sum[r] = 0;
        step(s, scale_log2);
    }
    DEVICE void step(float (&s)[N], float scale_log2) {
        UNROLL for (int r = 0; r < 2; ++r) {
            float high = row_maximum<0, N>(s, r);
            high = (high - top[r]) * scale_log2 > margin ? high : top[r];
            const float safe = high == -INFINITY ? 0.f : high;  // a row without keys so far
            decay[r] = exp2_fast((top[r] - safe) * scale_log2);
            top[r] = high;
            const float shift = safe * scale_log2;
            float total = 0;
            UNROLL for (int i = 2 * r; i < N; i += 4) {
                s[i] = exp2_fast(fmaf(s[i], scale_log2, -shift));
                s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, -shift));
                total += s[i] + s[i + 1];
            }
            sum[r] = sum[r] * decay[r] + total;
        }
    }
    DEVICE bool shrinks() const { return __any_sync(~0u, decay[0] != 1.f || decay[1] != 1.f); }
    DEVICE float log_sum(int r, float total, float scale) const {
        return top[r] * scale + __logf(total);
    }
};

// No maxima: the base lies a margin above the largest score, so exponents are below 0 unless it
// has to follow, and the signs of all exponents of a warp tell. Half a tile at a time, so that the
// exponentials of one half run beside the exponents of the other.
template <class T, int N>
struct SoftmaxBySigns {
    // fp16 has fewer octaves below 1 than bf16.
    static constexpr float margin = std::is_same_v<T, __half> ? 3 : 8;
    static constexpr uint32_t no_key = 0x80000000;  // -0: the base of a row without keys so far
    float base[2], sum[2], decay[2];
    uint32_t quiet;  // all bits, without the sign while a row of the warp still waits for keys
    bool followed;

    DEVICE void begin(float (&s)[N], float scale_log2, const int (&low)[2], const int (&high)[2]) {
        bool waits = false;
        UNROLL for (int r = 0; r < 2; ++r) {
            const float top = row_maximum<0, N>(s, r);
            const bool none = top == -INFINITY, may = low[r] < high[r];
            base[r] = none ? __uint_as_float(may ? no_key : 0) : fmaf(top, scale_log2, margin);
            sum[r] = 0;
            waits |= none && may;
        }
        quiet = quiet_unless(waits);
        UNROLL for (int i = 0; i < N; ++i) s[i] = fmaf(s[i], scale_log2, -base[i / 2 % 2]);
        exponentiate<0, N>(s);
    }
    DEVICE void step(float (&s)[N], float scale_log2) {
        followed = exceeds<0, N / 2>(s, scale_log2);
        if (followed) follow<0, N / 2>(s);
        exponentiate<0, N / 2>(s);
        if (exceeds<N / 2, N>(s, scale_log2)) {
            const float before[2] = {followed ? decay[0] : 1.f, followed ? decay[1] : 1.f};
            follow<N / 2, N>(s);
            UNROLL for (int i = 0; i < N / 2; ++i) s[i] *= decay[i / 2 % 2];
            decay[0] *= before[0], decay[1] *= before[1];
            followed = true;
        }
        exponentiate<N / 2, N>(s);
    }
    DEVICE bool shrinks() const { return followed; }
    DEVICE float log_sum(int r, float total, float) const {
        return (base[r] + __log2f(total)) * 0.693147181f;
    }

private:
    static DEVICE uint32_t quiet_unless(bool waits) {
        return __any_sync(~0u, waits) ? ~0u >> 1 : ~0u;
    }
    // Scores to exponents. Whether one of the warp's is not below 0.
    template <int First, int End>
    DEVICE bool exceeds(float (&s)[N], float scale_log2) const {
        uint32_t signs[4] = {quiet, ~0u, ~0u, ~0u};
        UNROLL for (int i = First; i < End; ++i) {
            s[i] = fmaf(s[i], scale_log2, -base[i / 2 % 2]);
            signs[i / 2 % 4] &= __float_as_uint(s[i]);
        }
        return __any_sync(~0u, int32_t(signs[0] & signs[1] & (signs[2] & signs[3])) >= 0);
    }
    // Raises the bases that exponents exceed, sets those of rows that had none, and takes the
    // difference off the exponents and the sums.
    template <int First, int End>
    DEVICE void follow(float (&s)[N]) {
        bool waits = false;
        UNROLL for (int r = 0; r < 2; ++r) {
            const float high = row_maximum<First, End>(s, r);
            const bool none = __float_as_uint(base[r]) == no_key;
            const bool moves = high > (none ? -INFINITY : 0.f);
            const float by = moves ? high + margin : 0.f;
            if (moves) base[r] += by;
            UNROLL for (int i = First + 2 * r; i < End; i += 4) s[i] -= by, s[i + 1] -= by;
            decay[r] = none ? 1.f : exp2_fast(-by);
            sum[r] *= decay[r];
            waits |= none && !moves;
        }
        quiet = quiet_unless(waits);
    }
    template <int First, int End>
    DEVICE void exponentiate(float (&s)[N]) {
        UNROLL for (int r = 0; r < 2; ++r) {
            float total = 0;
            UNROLL for (int i = First + 2 * r; i < End; i += 4) {
                s[i] = exp2_fast(s[i]), s[i + 1] = exp2_fast(s[i + 1]);
                total += s[i] + s[i + 1];
            }
            sum[r] += total;
        }
    }
};

}  // namespace torus::flash
