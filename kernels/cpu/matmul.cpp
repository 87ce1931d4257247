// Matrix products. The output is cut into tiles of a size that depends on nothing else; threads
// share out tiles and each tile is one product over the whole inner dimension, by the library's
// kernel on one thread or by plain loops. So the bits do not depend on the number of threads, and
// with plain loops not on the machine either.
#include <algorithm>

#include "kernels/cpu/block.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#ifdef TORUS_HAVE_BLAS
#include <cblas.h>
#endif

namespace torus {
namespace {

// 512 x 512, where the library is within 20 % of its rate on whole matrices; less for small
// outputs, so that there are 8 tiles to share out.
struct Tiles {
    Tiles(int64_t m, int64_t n) : m(m), n(n) {
        while (down() * across() < 8 && std::max(rows, columns) > 128)
            (rows > columns ? rows : columns) /= 2;
    }
    int64_t down() const { return (m + rows - 1) / rows; }
    int64_t across() const { return (n + columns - 1) / columns; }
    int64_t m, n, rows = 512, columns = 512;
};

#ifdef TORUS_HAVE_BLAS
// What BLAS calls a row-major matrix: the longer stride and whether it is transposed. The number of
// columns decides where both strides are 1.
template <class T>
struct BlasMatrix {
    BlasMatrix(Strided<T> s, int64_t columns) : data(s.data) {
        const bool rows_dense = s.col == 1 && s.row >= columns;
        order = rows_dense ? CblasNoTrans : CblasTrans;
        ld = blasint(rows_dense ? s.row : s.col);
    }
    const T* data;
    CBLAS_TRANSPOSE order;
    blasint ld;
};

void gemm(blasint m, blasint n, blasint k, BlasMatrix<float> a, BlasMatrix<float> b, float beta,
          float* c, blasint ldc) {
    cblas_sgemm(CblasRowMajor, a.order, b.order, m, n, k, 1, a.data, a.ld, b.data, b.ld, beta, c,
                ldc);
}
void gemm(blasint m, blasint n, blasint k, BlasMatrix<double> a, BlasMatrix<double> b, double beta,
          double* c, blasint ldc) {
    cblas_dgemm(CblasRowMajor, a.order, b.order, m, n, k, 1, a.data, a.ld, b.data, b.ld, beta, c,
                ldc);
}
#endif

template <class T>
struct Product {  // c (m,n) = start + a (m,k) b (k,n)
    int64_t m, n, k;
    Strided<T> a, b;
    T* c;
    int64_t c_row;
    bool plain;

    // start(i, j, count) sets c[i][j .. j + count) to what is added to, or returns false for 0.
    template <class Start>
    void run(Start start) const {
        const Tiles tiles(m, n);
        const int64_t across = tiles.across(), cost = std::min(tiles.rows, m) * tiles.columns * k;
        parallel_tasks(tiles.down() * across, cost / 8, [&](int64_t tile) {
            const int64_t i = tile / across * tiles.rows, j = tile % across * tiles.columns;
            const int64_t rows = std::min(tiles.rows, m - i);
            const int64_t columns = std::min(tiles.columns, n - j);
            bool accumulate = false;
            for (int64_t r = i; r < i + rows; ++r) accumulate = start(r, j, columns);
            multiply(rows, columns, {a.at(i, 0), a.row, a.col}, {b.at(0, j), b.row, b.col},
                     c + i * c_row + j, accumulate);
        });
    }

private:
    void multiply(int64_t rows, int64_t columns, Strided<T> at, Strided<T> bt, T* ct,
                  bool accumulate) const {
#ifdef TORUS_HAVE_BLAS
        if (!plain && k > 0) {
            gemm(blasint(rows), blasint(columns), blasint(k), BlasMatrix<T>(at, k),
                 BlasMatrix<T>(bt, columns), accumulate ? T(1) : T(0), ct, blasint(c_row));
            return;
        }
#endif
        block_product(rows, columns, k, at, bt, ct, c_row, accumulate);
    }
};

template <class T>
Strided<T> matrix(const Tensor& t) {
    CHECK(t.pitch(0) < int64_t(1) << 31 && t.dim(0) < int64_t(1) << 31, ": a matrix of rows ",
          t.pitch(0), " apart is beyond 32-bit BLAS");
    return {t.as<T>(), t.pitch(0), 1};
}

}  // namespace

template <class T>
void CpuKernels<T>::matmul_forward(Stream&, Tensor out, Tensor x, Tensor w, Tensor bias,
                                   Tensor residual) {
    expect_rank("matmul_forward", "x", x, type, 2, true);
    expect_rank("matmul_forward", "w", w, type, 2);
    const int64_t N = x.dim(0), C = x.dim(1), O = w.dim(0);
    expect("matmul_forward", "w", w, type, {O, C});
    expect("matmul_forward", "out", out, type, {N, O}, true);
    if (bias) expect("matmul_forward", "bias", bias, type, {O});
    if (residual) expect("matmul_forward", "residual", residual, type, {N, O}, true);
    T* o = out.as<T>();
    const T *b = bias ? bias.as<T>() : nullptr, *r = residual ? residual.as<T>() : nullptr;
    const Product<T> product{
        N, O, C, matrix<T>(x), matrix<T>(w).t(), o, out.pitch(0), options_.plain_matmul};
    product.run([=, pitch = out.pitch(0), r_pitch = r ? residual.pitch(0) : 0](
                    int64_t i, int64_t begin, int64_t count) {
        T* to = o + i * pitch;
        const T* from = r ? r + i * r_pitch : nullptr;
        for (int64_t j = begin; j < begin + count; ++j)
            if (b && from)
                to[j] = b[j] + from[j];
            else if (b)
                to[j] = b[j];
            else if (from)
                to[j] = from[j];
        return b || r;
    });
}

template <class T>
void CpuKernels<T>::matmul_backward_input(Stream&, Tensor dx, Tensor dout, Tensor w,
                                          bool accumulate) {
    expect_rank("matmul_backward_input", "dout", dout, type, 2, true);
    expect_rank("matmul_backward_input", "w", w, type, 2);
    const int64_t N = dout.dim(0), O = dout.dim(1), C = w.dim(1);
    expect("matmul_backward_input", "w", w, type, {O, C});
    expect("matmul_backward_input", "dx", dx, type, {N, C}, true);
    const Product<T> product{
        N, C, O, matrix<T>(dout), matrix<T>(w), dx.as<T>(), dx.pitch(0), options_.plain_matmul};
    product.run([=](int64_t, int64_t, int64_t) { return accumulate; });
}

template <class T>
void CpuKernels<T>::matmul_backward_weight(Stream&, Tensor dw, Tensor db, Tensor dout, Tensor x,
                                           bool accumulate) {
    expect_rank("matmul_backward_weight", "dout", dout, type, 2, true);
    expect_rank("matmul_backward_weight", "x", x, type, 2, true);
    const int64_t N = dout.dim(0), O = dout.dim(1), C = x.dim(1);
    expect("matmul_backward_weight", "x", x, type, {N, C}, true);
    expect("matmul_backward_weight", "dw", dw, type, {O, C});
    if (db) expect("matmul_backward_weight", "db", db, type, {O});
    const Product<T> product{
        O, C, N, matrix<T>(dout).t(), matrix<T>(x), dw.as<T>(), dw.pitch(0), options_.plain_matmul};
    product.run([=](int64_t, int64_t, int64_t) { return accumulate; });
    if (!db) return;
    constexpr int64_t columns = 64;
    parallel_for((O + columns - 1) / columns, N * columns, [&](int64_t block) {
        const int64_t begin = block * columns, width = std::min(columns, O - begin);
        double sum[columns] = {};
        for (int64_t n = 0; n < N; ++n) {
            const T* d = dout.as<T>() + n * dout.pitch(0) + begin;
            for (int64_t j = 0; j < width; ++j) sum[j] += double(d[j]);
        }
        for (int64_t j = 0; j < width; ++j) db.as<T>()[begin + j] += T(sum[j]);
    });
}

INSTANTIATE(matmul_forward, (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor));
INSTANTIATE(matmul_backward_input, (Stream&, Tensor, Tensor, Tensor, bool));
INSTANTIATE(matmul_backward_weight, (Stream&, Tensor, Tensor, Tensor, Tensor, bool));

}  // namespace torus
