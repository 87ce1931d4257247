// Rotary position embedding in place, on views into the packed QKV matrix. One thread turns a
// vector of pairs (i, i + R/2); the angles' cosines and sines come from a table made once in fp64,
// so nothing here depends on how far the position is.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
template <class T>
struct RopeOp {
    static constexpr int width = vector_width<T>;
    T* x;                // (N, H, D) with strides n, h
    const int32_t* pos;  // (N)
    const float* table;  // (P, half, 2)
    uint32_t H;
    int64_t half, stride_n, stride_h;
    float sign;  // +1 turns forward, -1 back
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        const uint32_t n = uint32_t(row) / H, h = uint32_t(row) - n * H;
        T* p = x + n * stride_n + h * stride_h + col;
        const float* angles = table + (int64_t(pos[n]) * half + col) * 2;
        const Vec<T, W> low = load<W>(p), high = load<W>(p + half);
        const Vec<float, 2 * W> turn = load<2 * W>(angles);
        const auto c = [&](int k) { return turn.v[2 * k]; };
        const auto s = [&](int k) { return sign * turn.v[2 * k + 1]; };
        store(p, Vec<T, W>::of([&](int k) { return low.get(k) * c(k) - high.get(k) * s(k); }));
        store(p + half,
              Vec<T, W>::of([&](int k) { return high.get(k) * c(k) + low.get(k) * s(k); }));
    }
};

// --- launchers -----------------------------------------------------------------------------------
static void rope(const char* name, Stream& stream, const Tensor& x, const Tensor& pos,
                 const Tensor& table, DType act, float sign) {
    CHECK(x.rank() == 3 && x.dtype == act, ": ", name, " of ", name_of(x.dtype), " ",
          x.shape.str());
    CHECK(table.rank() == 3 && table.dim(2) == 2, ": rope table ", table.shape.str());
    const int64_t N = x.dim(0), H = x.dim(1), D = x.dim(2), half = table.dim(1);
    expect(pos, "rope: pos", DType::i32, N);
    expect(table, "rope: table", DType::f32, table.numel());
    CHECK(N * H < int64_t(1) << 32, ": ", name, " of ", x.shape.str());
    CHECK(2 * half <= D, ": rope table turns ", 2 * half, " of ", D, " dims");
    dispatch(act, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int W = vector_width<T>;
        const bool vectors = half % W == 0 && aligned16(x.data) && aligned16(table.data) &&
                             x.pitch(0) % W == 0 && x.pitch(1) % W == 0;
        map_rows(name, stream,
                 RopeOp<T>{static_cast<T*>(x.data), pos.as<int32_t>(), table.as<float>(),
                           uint32_t(H), half, x.pitch(0), x.pitch(1), sign},
                 N * H, half, vectors);
    });
}

void CudaKernels::rope_forward(Stream& stream, Tensor x, Tensor pos, Tensor table) {
    rope("rope_forward", stream, x, pos, table, precision_.act, 1.0f);
}

void CudaKernels::rope_backward(Stream& stream, Tensor dx, Tensor pos, Tensor table) {
    rope("rope_backward", stream, dx, pos, table, precision_.act, -1.0f);
}

}  // namespace torus::cuda
