// Indices past 2^31 and more rows than a grid's y dimension has: logits of 50,304 columns by 42,752
// rows (8.6 GB of GPU memory in bf16), 70,000 rows in every op over rows: slow, run with --no-skip.
// And embedding rows with more uses than one warp adds.
#include <cmath>

#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

TEST_CASE("classifier beyond 2^31 elements" * doctest::skip()) {
    Gpu gpu(DType::bf16);
    Device& d = gpu.k->device();
    constexpr int64_t n = 42752, Vp = 50304, V = 50257;
    static_assert(n * Vp > int64_t(1) << 31);
    const Buffer memory(d, Memory::device, n * Vp * 2);
    const Tensor logits(memory.data(), DType::bf16, {n, Vp});
    gpu.k->fill(gpu.stream, logits, 0);
    // In the last row one logit stands out; all others are equal.
    const int64_t peak = 50000;
    gpu.k->fill(gpu.stream, logits.rows(n - 1, 1).slice(1, peak, 1), 5);
    std::vector<double> ids(size_t(n), 3);
    ids[size_t(n - 1)] = double(peak);
    ids[size_t(n - 2)] = -1;
    DeviceValue targets(gpu, DType::i32, {n}, ids), loss(gpu, DType::f32, {n});
    gpu.k->classifier(gpu.stream, loss.tensor(), logits, logits, targets.tensor(), V, 1, {});
    const std::vector<double> losses = loss.all();
    EXPECT(std::abs(losses[0] - std::log(double(V))) < 1e-4);
    EXPECT(losses[size_t(n - 2)] == 0);
    EXPECT(std::abs(losses[size_t(n - 1)] - (std::log(V - 1 + std::exp(5.0)) - 5)) < 1e-4);
    DeviceValue last(gpu, DType::f32, {2, Vp});
    gpu.k->cast(gpu.stream, last.tensor(), logits.rows(n - 2, 2));
    const std::vector<double> g = last.all();
    const double sum = V - 1 + std::exp(5.0);
    EXPECT(g[size_t(peak)] == 0);  // the ignored row
    EXPECT(std::abs(g[size_t(Vp + peak)] - (std::exp(5.0) / sum - 1)) < 4e-3);
    EXPECT(std::abs(g[size_t(Vp + 7)] * sum - 1) < 4e-3);
    EXPECT(g[size_t(Vp + V)] == 0);  // padding
}

TEST_CASE("matmul beyond 2^31 elements" * doctest::skip()) {
    Gpu gpu(DType::bf16);
    Device& d = gpu.k->device();
    constexpr int64_t N = 42752, O = 50304, C = 8;
    const Buffer memory(d, Memory::device, N * O * 2);
    const Tensor out(memory.data(), DType::bf16, {N, O});
    DeviceValue x(gpu, DType::bf16, {N, C}, random_values("x", N * C));
    DeviceValue w(gpu, DType::bf16, {O, C}, random_values("w", O * C));
    DeviceValue db(gpu, DType::f32, {O}, constant_values(O, 0));
    DeviceValue dw(gpu, DType::f32, {O, C}, constant_values(O * C, 0));
    gpu.k->matmul_forward(gpu.stream, out, x.tensor(), w.tensor(), {}, {});
    gpu.k->matmul_backward_weight(gpu.stream, dw.tensor(), db.tensor(), out, x.tensor(), true);
    DeviceValue last(gpu, DType::f32, {1, O});
    gpu.k->cast(gpu.stream, last.tensor(), out.rows(N - 1, 1));
    const std::vector<double> got = last.all(), xs = x.all(), ws = w.all(), sums = db.all();
    for (int64_t o : {int64_t(0), O / 2, O - 1}) {
        double want = 0, column = 0;
        for (int64_t c = 0; c < C; ++c) {
            want += xs[size_t((N - 1) * C + c)] * ws[size_t(o * C + c)];
            double of_c = 0;
            for (int64_t r = 0; r < N; ++r) of_c += xs[size_t(r * C + c)];
            column += of_c * ws[size_t(o * C + c)];
        }
        EXPECT(std::abs(got[size_t(o)] - want) < 0.02 * (1 + std::abs(want)));
        EXPECT(std::abs(sums[size_t(o)] - column) < 0.05 * std::sqrt(double(N)));
    }
}

TEST_CASE("embedding rows with hundreds of uses") {
    Gpu gpu(DType::bf16);
    constexpr int64_t N = 1537, V = 7;
    for (int64_t C : {5, 24, 264}) {
        CAPTURE(C);
        std::vector<double> x, ids, sum(size_t(V * C), 0);  // whole numbers: sums are exact
        for (int64_t i = 0; i < N; ++i) {
            const int64_t id = i % 3 == 0 ? 2 : i * i % V;
            ids.push_back(double(id));
            for (int64_t c = 0; c < C; ++c) {
                x.push_back(double((i * 5 + c) % 17 - 8));
                sum[size_t(id * C + c)] += x.back();
            }
        }
        DeviceValue dout(gpu, DType::bf16, {N, C}, x), index(gpu, DType::i32, {N}, ids);
        DeviceValue dwte(gpu, DType::f32, {V, C}, constant_values(V * C, 0));
        gpu.k->embedding_backward(gpu.stream, dwte.tensor(), {}, dout.tensor(), index.tensor(), {});
        EXPECT(same_bits(dwte.all(), sum));
    }
}

TEST_CASE("70,000 rows in the ops over rows" * doctest::skip()) {
    Gpu gpu(DType::bf16);
    const auto cpu = make_cpu_kernels(DType::f64);
    constexpr int64_t N = 70001, C = 16;
    Stream none;
    const std::vector<double> xs = rounded(random_values("x", N * C), DType::bf16);
    const std::vector<double> ws = rounded(random_values("w", C), DType::bf16);
    DeviceValue x(gpu, DType::bf16, {N, C}, xs), w(gpu, DType::bf16, {C}, ws);
    DeviceValue out(gpu, DType::bf16, {N, C}), rstd(gpu, DType::f32, {N});
    gpu.k->rmsnorm_forward(gpu.stream, out.tensor(), rstd.tensor(), x.tensor(), w.tensor(), 1e-5);
    Value hx(DType::f64, {N, C}), hw(DType::f64, {C}), ho(DType::f64, {N, C}), hr(DType::f64, {N});
    hx.set_all([&](int64_t i) { return xs[size_t(i)]; });
    hw.set_all([&](int64_t i) { return ws[size_t(i)]; });
    cpu->rmsnorm_forward(none, ho.tensor(), hr.tensor(), hx.tensor(), hw.tensor(), 1e-5);
    EXPECT(relative_error(rstd.all(), hr.all()) < 1e-5);
    EXPECT(relative_error(out.all(), ho.all()) < 4e-3);

    // One embedding row used by all, and one by each: both ends of the gradient's two kernels.
    std::vector<double> same(size_t(N), 2), each;
    for (int64_t i = 0; i < N; ++i) each.push_back(double(N - 1 - i));
    DeviceValue ids(gpu, DType::i32, {N}, same), pos(gpu, DType::i32, {N}, each);
    DeviceValue dwte(gpu, DType::f32, {3, C}, constant_values(3 * C, 0));
    DeviceValue dwpe(gpu, DType::f32, {N, C}, constant_values(N * C, 0));
    gpu.k->embedding_backward(gpu.stream, dwte.tensor(), dwpe.tensor(), x.tensor(), ids.tensor(),
                              pos.tensor());
    std::vector<double> sum(size_t(3 * C), 0), reversed(size_t(N * C), 0);
    for (int64_t i = 0; i < N; ++i)
        for (int64_t c = 0; c < C; ++c) {
            sum[size_t(2 * C + c)] += xs[size_t(i * C + c)];
            reversed[size_t((N - 1 - i) * C + c)] = xs[size_t(i * C + c)];
        }
    EXPECT(relative_error(dwte.all(), sum) < 1e-5);
    EXPECT(same_bits(dwpe.all(), reversed));
}
