// Rotary position embedding (Su et al. 2021) in the half-split pairing of Llama: element i of the
// first R/2 turns with element i + R/2. Elements from R on stay. Backward is the turn back.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {
namespace {

template <class T>
void turn(const char* op, Tensor x, Tensor pos, Tensor table, T direction) {
    expect_rank(op, "x", x, dtype_of<T>, 3, true);
    expect_rank(op, "table", table, dtype_of<T>, 3);
    const int64_t N = x.dim(0), H = x.dim(1), half = table.dim(1);
    expect(op, "table", table, dtype_of<T>, {table.dim(0), half, 2});
    expect(op, "pos", pos, DType::i32, {N});
    CHECK(2 * half <= x.dim(2), ": ", op, ": turns ", 2 * half, " of ", x.dim(2), " dimensions");
    expect_indices(op, "pos", pos, table.dim(0));
    parallel_for(N, 4 * H * half, [&](int64_t n) {
        const T* angle = table.as<T>() + pos.as<int32_t>()[n] * half * 2;
        for (int64_t h = 0; h < H; ++h) {
            T* a = x.as<T>() + n * x.pitch(0) + h * x.pitch(1);
            T* b = a + half;
            for (int64_t i = 0; i < half; ++i) {
                const T cos = angle[2 * i], sin = direction * angle[2 * i + 1];
                const T u = a[i], v = b[i];
                a[i] = u * cos - v * sin;
                b[i] = v * cos + u * sin;
            }
        }
    });
}

}  // namespace

template <class T>
void CpuKernels<T>::rope_forward(Stream&, Tensor x, Tensor pos, Tensor table) {
    turn<T>("rope_forward", x, pos, table, T(1));
}

template <class T>
void CpuKernels<T>::rope_backward(Stream&, Tensor dx, Tensor pos, Tensor table) {
    turn<T>("rope_backward", dx, pos, table, T(-1));
}

INSTANTIATE(rope_forward, (Stream&, Tensor, Tensor, Tensor));
INSTANTIATE(rope_backward, (Stream&, Tensor, Tensor, Tensor));

}  // namespace torus
