// One matrix product of a block that fits the caches: the inner loop of the plain matmul and of
// attention. Vectorised over columns; each output sums 256 terms at a time in the order of k, from
// 0, and adds these parts to c in turn.
#pragma once
#include <cstdint>

namespace torus {

// Element (i, j) of a matrix is data[i * row + j * col]: a transpose is a swap of the strides.
template <class T>
struct Strided {
    const T* data;
    int64_t row, col;
    Strided t() const { return {data, col, row}; }
    const T* at(int64_t i, int64_t j) const { return data + i * row + j * col; }
};

// c (m,n) = a (m,k) b (k,n); with `accumulate` +=. Row i of c starts at c + i * c_row.
template <class T>
void block_product(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t c_row,
                   bool accumulate);

}  // namespace torus
