// Sums over whole tensors, in fp64: at most 1024 pieces whose size depends on n only, each over
// fixed lanes, then the pieces in order.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#include "kernels/float16.h"

namespace torus {
namespace {

// f(i) summed over [0, n).
template <class F>
double ordered_sum(int64_t n, F f) {
    constexpr int64_t most = 1024, least = 4096;
    const int64_t piece = std::max(least, (n + most - 1) / most);
    const int64_t pieces = (n + piece - 1) / piece;
    double part[most];
    parallel_for(pieces, piece, [&](int64_t p) {
        const int64_t begin = p * piece;
        part[p] =
            lane_sum<double>(std::min(piece, n - begin), [&](int64_t i) { return f(begin + i); });
    });
    double total = 0;
    for (int64_t p = 0; p < pieces; ++p) total += part[p];
    return total;
}

// g(value) summed over a tensor of any float type.
template <class G>
double sum_of(const char* op, const Tensor& x, G g) {
    expect(op, "x", x, x.dtype, x.shape);
    const void* data = x.data;
    switch (x.dtype) {
        case DType::f64:
            return ordered_sum(x.numel(), [=, p = static_cast<const double*>(data)](int64_t i) {
                return g(p[i]);
            });
        case DType::f32:
            return ordered_sum(x.numel(), [=, p = static_cast<const float*>(data)](int64_t i) {
                return g(double(p[i]));
            });
        case DType::bf16:
            return ordered_sum(x.numel(), [=, p = static_cast<const uint16_t*>(data)](int64_t i) {
                return g(double(bf16_to_float(p[i])));
            });
        case DType::f16:
            return ordered_sum(x.numel(), [=, p = static_cast<const uint16_t*>(data)](int64_t i) {
                return g(double(f16_to_float(p[i])));
            });
        default: CHECK(false, ": ", op, ": x is ", name_of(x.dtype), ", must be a float type");
    }
    return 0;
}

void put(const char* op, const Tensor& out, double value, bool accumulate) {
    expect(op, "out", out, DType::f64, {1});
    double& o = *out.as<double>();
    o = accumulate ? o + value : value;
}

}  // namespace

template <class T>
void CpuKernels<T>::sum(Stream&, Tensor out, Tensor x, bool accumulate) {
    const double value = sum_of("sum", x, [](double v) { return v; });
    put("sum", out, value, accumulate);
}

template <class T>
void CpuKernels<T>::sum_squares(Stream&, Tensor out, Tensor x, bool accumulate) {
    const double value = sum_of("sum_squares", x, [](double v) { return v * v; });
    put("sum_squares", out, value, accumulate);
}

INSTANTIATE(sum, (Stream&, Tensor, Tensor, bool));
INSTANTIATE(sum_squares, (Stream&, Tensor, Tensor, bool));

}  // namespace torus
