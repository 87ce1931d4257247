// The block product in the manner of GotoBLAS (Goto & van de Geijn 2008), cut down to one level: a
// panel of b, 64 bytes wide, is packed on the stack and 4 rows of c at a time stay in registers.
// Each vector lane is one output, so the order of sums is the same for every vector width.
#include "kernels/cpu/block.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/loops.h"

namespace torus {
namespace {

constexpr int64_t depth = 256;  // rows of a packed panel

template <class T>
struct Vec {
    static constexpr int64_t width = 64 / sizeof(T);
    typedef T type __attribute__((vector_size(64), may_alias));
};

// R rows of c times one panel: c[r][0..width) (+)= sum over p of a[r][p] * panel[p].
template <class T, int R>
INLINE void rows_times_panel(int64_t k, Strided<T> a, const T* panel, T* c, int64_t c_row,
                             int64_t columns, bool accumulate) {
    using V = typename Vec<T>::type;
    constexpr int64_t width = Vec<T>::width;
    V sum[R];
    for (int r = 0; r < R; ++r) sum[r] = V{};
    for (int64_t p = 0; p < k; ++p) {
        V bp;
        std::memcpy(&bp, panel + p * width, sizeof(V));
        for (int r = 0; r < R; ++r) sum[r] += *a.at(r, p) * bp;
    }
    for (int r = 0; r < R; ++r) {
        V cr{};
        if (accumulate) std::memcpy(&cr, c + r * c_row, size_t(columns) * sizeof(T));
        sum[r] += cr;
        std::memcpy(c + r * c_row, &sum[r], size_t(columns) * sizeof(T));
    }
}

template <class T>
INLINE void pack(int64_t k, int64_t columns, Strided<T> b, T* panel) {
    constexpr int64_t width = Vec<T>::width;
    if (columns < width) std::fill(panel, panel + k * width, T(0));
    if (b.col == 1) {
        for (int64_t p = 0; p < k; ++p)
            std::memcpy(panel + p * width, b.at(p, 0), size_t(columns) * sizeof(T));
    } else {
        for (int64_t j = 0; j < columns; ++j)
            for (int64_t p = 0; p < k; ++p) panel[p * width + j] = *b.at(p, j);
    }
}

template <class T, bool full>
INLINE void panel_product(int64_t m, int64_t k, Strided<T> a, const T* panel, T* c, int64_t c_row,
                          int64_t columns, bool accumulate) {
    if (full) columns = Vec<T>::width;
    int64_t i = 0;
    for (; i + 4 <= m; i += 4)
        rows_times_panel<T, 4>(k, {a.at(i, 0), a.row, a.col}, panel, c + i * c_row, c_row, columns,
                               accumulate);
    for (; i < m; ++i)
        rows_times_panel<T, 1>(k, {a.at(i, 0), a.row, a.col}, panel, c + i * c_row, c_row, columns,
                               accumulate);
}

}  // namespace

template <class T>
CLONES void block_product(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c,
                          int64_t c_row, bool accumulate) {
    constexpr int64_t width = Vec<T>::width;
    alignas(64) T panel[depth * width];
    for (int64_t j = 0; j < n; j += width) {
        const int64_t columns = std::min(width, n - j);
        for (int64_t p = 0; p == 0 || p < k; p += depth) {  // once for k = 0: c = 0
            const int64_t part = std::min(depth, k - p);
            const bool add = accumulate || p > 0;
            pack(part, columns, {b.at(p, j), b.row, b.col}, panel);
            const Strided<T> ap{a.at(0, p), a.row, a.col};
            if (columns == width)
                panel_product<T, true>(m, part, ap, panel, c + j, c_row, columns, add);
            else
                panel_product<T, false>(m, part, ap, panel, c + j, c_row, columns, add);
        }
    }
}

template void block_product<float>(int64_t, int64_t, int64_t, Strided<float>, Strided<float>,
                                   float*, int64_t, bool);
template void block_product<double>(int64_t, int64_t, int64_t, Strided<double>, Strided<double>,
                                    double*, int64_t, bool);

}  // namespace torus
