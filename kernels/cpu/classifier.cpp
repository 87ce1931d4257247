// Softmax cross entropy with its gradient, one row at a time; the sum of exponentials is in fp64
// over pieces of a row. Columns from V on are padding: they take no part and get gradient 0.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {
namespace {

// out = exp(x - max) (out may be x); returns the sum.
template <class T>
CLONES double exponentials(T* out, const T* x, T max, int64_t n) {
    constexpr int64_t piece = 256;
    double sum = 0;
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t count = std::min(piece, n - i);
        T buffer[piece];
        T* e = out ? out + i : buffer;
        for (int64_t j = 0; j < count; ++j) e[j] = fast_exp(x[i + j] - max);
        sum += double(lane_sum<T>(count, [&](int64_t j) { return e[j]; }));
    }
    return sum;
}

}  // namespace

template <class T>
void CpuKernels<T>::classifier(Stream&, Tensor loss, Tensor logits, Tensor dlogits, Tensor targets,
                               int64_t V, double dloss, Tensor loss_scale) {
    expect_rank("classifier", "logits", logits, type, 2);
    const int64_t n = logits.dim(0), Vp = logits.dim(1);
    expect("classifier", "loss", loss, type, {n});
    expect("classifier", "targets", targets, DType::i32, {n});
    if (dlogits) expect("classifier", "dlogits", dlogits, type, {n, Vp});
    if (loss_scale) expect("classifier", "loss_scale", loss_scale, DType::f64, {1});
    if (loss_scale) dloss *= *loss_scale.as<double>();
    CHECK(V > 0 && V <= Vp, ": classifier: vocabulary ", V, " of ", Vp, " columns");
    const int32_t* target = targets.as<int32_t>();
    for (int64_t i = 0; i < n; ++i)
        CHECK(target[i] < V, ": classifier: targets[", i, "] is ", target[i], ", must be below ",
              V);
    parallel_for(n, 8 * V, [&](int64_t i) {
        const T* x = logits.as<T>() + i * Vp;
        T* dx = dlogits ? dlogits.as<T>() + i * Vp : nullptr;
        const int64_t t = target[i];
        if (t < 0) {
            loss.as<T>()[i] = 0;
            if (dx) std::fill(dx, dx + Vp, T(0));
            return;
        }
        const T max = lane_max(V, x), at_target = x[t];
        const double sum = exponentials(dx, x, max, V);
        loss.as<T>()[i] = T(std::log(sum) + (double(max) - double(at_target)));
        if (!dx) return;
        const T factor = T(dloss / sum);
        for (int64_t j = 0; j < V; ++j) dx[j] *= factor;
        dx[t] -= T(dloss);
        std::fill(dx + V, dx + Vp, T(0));
    });
}

INSTANTIATE(classifier, (Stream&, Tensor, Tensor, Tensor, Tensor, int64_t, double, Tensor));

}  // namespace torus
