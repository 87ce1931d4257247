// A line of the tables of attention shapes: sizes and masks of a call, the ways to call its
// backward, and what came out.
#pragma once
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/flash/flash.h"
#include "test/cuda/attention_reference.cuh"
#include "test/test.h"

namespace torus::test {

enum class Masks { none, documents, long_documents, window, random, empty };

struct Case {
    int64_t B, Tq, Tk, H, Hk, D;
    bool causal = true;
    int64_t q0 = 0, k0 = 0;
    Masks masks = Masks::none;
    bool parts = false;  // keys in two blocks: carry and accumulate
    float q_scale = 1, k_scale = 1;
    int64_t rows = 1 << 30;  // compared: about so many of each head, the last among them
    bool last = false;       // the last ones only
    bool apart = true;       // room between the heads of dout and of outputs
    // Scores change by `rise` at every 50th key towards the first one, from `level` at the last.
    float level = 0, rise = 0;
    int64_t lse_room = 0;  // numbers between the batches of lse; the forward only

    std::string str() const {
        static const char* names[] = {"",        " documents", " long documents",
                                      " window", " random",    " empty"};
        return concat("D", D, " B", B, " T", Tq, "/", Tk, " H", H, "/", Hk,
                      causal ? " causal" : " full", " q0=", q0, " k0=", k0, names[int(masks)],
                      parts ? " parts" : "", q_scale != 1 ? " scaled" : "",
                      level != 0 || rise != 0 ? concat(" level ", level, " rise ", rise) : "",
                      lse_room ? " lse apart" : "");
    }
    reference::Rows rows_of(int64_t T) const {
        const int64_t step = last ? 1 : std::max<int64_t>(1, T / rows);
        const int64_t count = std::min(rows, (T + step - 1) / step);
        return {int(T - 1 - (count - 1) * step), int(step), int(count)};
    }
};

// How the backward is called: as the engine does, or directly; the last ones where there are
// kernels by pairs of blocks, too.
struct Way {
    const char* name;
    bool direct, deterministic;
    flash::Blocks blocks;
};
constexpr Way ways[] = {{"", false, true, flash::Blocks::best},
                        {"plain ", true, false, flash::Blocks::best},
                        {"single ", true, true, flash::Blocks::single},
                        {"plain single ", true, false, flash::Blocks::single},
                        {"pairs ", true, true, flash::Blocks::pairs},
                        {"plain pairs ", true, false, flash::Blocks::pairs}};

inline std::vector<int32_t> first_keys(const Case& c) {
    std::mt19937 rng(uint32_t(c.Tq + c.D));
    std::vector<int32_t> v(size_t(c.B * c.Tq));
    for (int64_t b = 0; b < c.B; ++b) {
        int64_t start = 0, end = 0;
        for (int64_t i = 0; i < c.Tq; ++i) {
            const int64_t position = c.q0 + i;
            if (position >= end) {
                const bool is_long = c.masks == Masks::long_documents && rng() % 3 > 0;
                start = position, end = position + 1 + int64_t(rng() % (is_long ? 2500 : 300));
            }
            int64_t f = 0;
            if (c.masks == Masks::documents || c.masks == Masks::long_documents) f = start;
            if (c.masks == Masks::window) f = std::max<int64_t>(0, position - 100);
            if (c.masks == Masks::random) f = int64_t(rng() % uint32_t(c.k0 + c.Tk + 20));
            if (c.masks == Masks::empty) f = 1 << 30;
            v[size_t(b * c.Tq + i)] = int32_t(f);
        }
    }
    return v;
}

struct Verdict {
    bool ok = true;
    std::string text;
    void add(const char* what, double error, double allowed) {
        const bool good = error <= allowed;  // false for NaN
        ok = ok && good;
        if (good)
            text += concat("  ", what, " ", error);
        else
            text += concat("  ", what, " ", error, " ABOVE ", allowed);
    }
};

}  // namespace torus::test
