// Ops outside the table of ops: moving, filling and sums over tensors, against the CPU backend; and
// that their results do not change from run to run.
#include <cmath>
#include <limits>

#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

const DType float_types[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
const double nan_ = std::numeric_limits<double>::quiet_NaN();

// A view of n elements that starts `skip` elements into a larger tensor: misaligned vectors.
Tensor part(const DeviceValue& v, int64_t skip, int64_t n) { return v.tensor().slice(0, skip, n); }

std::vector<double> middle(const std::vector<double>& v, int64_t skip, int64_t n) {
    return {v.begin() + skip, v.begin() + skip + n};
}

const int64_t lengths[] = {1, 2, 7, 8, 31, 256, 1000, 4099};

}  // namespace

TEST_CASE("fill writes its range and nothing else") {
    Gpu gpu(DType::bf16);
    for (DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32})
        for (int64_t n : lengths)
            for (int64_t skip : {0, 1, 3})
                for (double value : {0.0, 3.0}) {
                    CAPTURE(name_of(type));
                    CAPTURE(n);
                    CAPTURE(skip);
                    const std::vector<double> before = constant_values(n + skip + 5, -1);
                    DeviceValue x(gpu, type, {n + skip + 5}, before);
                    gpu.k->fill(gpu.stream, part(x, skip, n), value);
                    std::vector<double> expected = before;
                    for (int64_t i = 0; i < n; ++i) expected[size_t(skip + i)] = value;
                    EXPECT(x.all() == expected);
                }
}

TEST_CASE("cast rounds to nearest even between all types") {
    Gpu gpu(DType::bf16);
    std::vector<double> values = random_values("cast", 4099, 3);
    values[0] = 65520;       // rounds to infinity in fp16
    values[1] = 1e-7;        // subnormal there
    values[2] = 1.00390625;  // half way between two bf16
    values[3] = std::numeric_limits<double>::infinity();
    values[4] = nan_;
    values[5] = -0.0;
    for (DType from : float_types)
        for (DType to : float_types)
            for (int64_t skip : {0, 1}) {
                CAPTURE(name_of(from));
                CAPTURE(name_of(to));
                const int64_t n = 4099 - skip;
                DeviceValue src(gpu, from, {4099}, values);
                DeviceValue dst(gpu, to, {4099}, constant_values(4099, nan_));
                gpu.k->cast(gpu.stream, part(dst, skip, n), part(src, skip, n));
                EXPECT(same_bits(middle(dst.all(), skip, n),
                                 middle(rounded(rounded(values, from), to), skip, n)));
            }
}

TEST_CASE("fill of pitched tensors") {
    Gpu gpu(DType::bf16);
    const Shape shape{3, 5, 2, 24};
    for (DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32})
        for (int64_t gap : {3, 8}) {
            CAPTURE(name_of(type));
            CAPTURE(gap);
            const DeviceValue x(gpu, type, shape, constant_values(shape.numel(), -1), gap);
            gpu.k->fill(gpu.stream, x.tensor(), 3);
            EXPECT(x.all() == constant_values(shape.numel(), 3));
            EXPECT(x.gaps_intact());
        }
}

TEST_CASE("cast of pitched tensors") {
    Gpu gpu(DType::bf16);
    const Shape shape{3, 5, 2, 24};
    const std::vector<double> values = random_values("cast", shape.numel());
    for (DType from : {DType::f32, DType::bf16})
        for (int64_t gap : {0, 3, 8})
            for (int64_t other : {0, 3, 8}) {
                CAPTURE(gap);
                CAPTURE(other);
                DeviceValue src(gpu, from, shape, values, gap);
                DeviceValue dst(gpu, DType::bf16, shape, constant_values(shape.numel(), nan_),
                                other);
                gpu.k->cast(gpu.stream, dst.tensor(), src.tensor());
                EXPECT(same_bits(dst.all(), rounded(values, DType::bf16)));
                EXPECT(dst.gaps_intact());
            }
    const std::vector<double> ints = {1, -7, 2147483647, 0, 5};
    DeviceValue a(gpu, DType::i32, {5}, ints), b(gpu, DType::i32, {5});
    gpu.k->cast(gpu.stream, b.tensor(), a.tensor());
    EXPECT(b.all() == ints);
}

TEST_CASE("sums of statistics, rounded to activations") {
    for (DType act : {DType::bf16, DType::f16}) {
        Gpu gpu(act);
        const Shape shape{3, 5, 2, 24};
        const std::vector<double> x = random_values("a", shape.numel()),
                                  y = random_values("b", shape.numel());
        std::vector<double> sum;
        for (size_t i = 0; i < x.size(); ++i) sum.push_back(float(x[i]) + float(y[i]));
        for (int64_t gap : {0, 3, 8}) {
            CAPTURE(gap);
            const DeviceValue a(gpu, DType::f32, shape, x, gap), b(gpu, DType::f32, shape, y);
            const DeviceValue out(gpu, act, shape, constant_values(shape.numel(), nan_), gap);
            gpu.k->add(gpu.stream, out.tensor(), a.tensor(), b.tensor());
            EXPECT(same_bits(out.all(), rounded(sum, act)));
            EXPECT(out.gaps_intact());
            EXPECT_THROWS_AS(gpu.k->add(gpu.stream, a.tensor(), out.tensor(), out.tensor()), Error);
        }
    }
}

// Slices of dense tensors: rows that follow each other with and without gaps, in one of the two or
// in both, over sequences of one or several.
TEST_CASE("cast between slices of tensors") {
    Gpu gpu(DType::bf16);
    const Shape whole{3, 6, 4, 16};
    const int64_t heads = whole[2], width = whole[3];
    const std::vector<double> values = random_values("slices", whole.numel());
    struct Cut {
        int64_t batch, row, head, batches, rows, count;
        Tensor of(const Tensor& t) const {
            return t.rows(batch, batches).slice(1, row, rows).slice(2, head, count);
        }
    };
    for (const Cut& from : {Cut{0, 0, 0, 3, 6, 4}, Cut{1, 2, 1, 1, 3, 2}, Cut{0, 0, 1, 2, 6, 3},
                            Cut{1, 1, 0, 2, 4, 4}, Cut{0, 3, 2, 3, 1, 1}})
        for (bool dense : {true, false}) {
            CAPTURE(from.batches);
            CAPTURE(dense);
            const Shape shape{from.batches, from.rows, from.count, width};
            DeviceValue src(gpu, DType::f32, whole, values);
            DeviceValue packed(gpu, DType::bf16, shape, constant_values(shape.numel(), nan_));
            DeviceValue dst(gpu, DType::bf16, whole, constant_values(whole.numel(), 7));
            gpu.k->cast(gpu.stream, dense ? packed.tensor() : from.of(dst.tensor()),
                        from.of(src.tensor()));
            std::vector<double> want = constant_values(whole.numel(), 7), part;
            const std::vector<double> bf16 = rounded(values, DType::bf16);
            for (int64_t i = 0; i < whole.numel(); ++i) {
                const int64_t h = i / width % heads, t = i / width / heads % whole[1];
                const int64_t b = i / width / heads / whole[1];
                const auto inside = [](int64_t x, int64_t begin, int64_t n) {
                    return x >= begin && x < begin + n;
                };
                if (!inside(b, from.batch, from.batches) || !inside(t, from.row, from.rows) ||
                    !inside(h, from.head, from.count))
                    continue;
                want[size_t(i)] = bf16[size_t(i)];
                part.push_back(bf16[size_t(i)]);
            }
            EXPECT(same_bits(dense ? packed.all() : dst.all(), dense ? part : want));
        }
}

TEST_CASE("stochastic rounding gives the bits of the CPU backend") {
    Gpu gpu(DType::bf16);
    const auto cpu = make_cpu_kernels(DType::f32);
    Stream none;
    for (int64_t n : lengths)
        for (uint64_t offset : {uint64_t(0), uint64_t(1), uint64_t(6), uint64_t(1) << 33}) {
            CAPTURE(n);
            CAPTURE(offset);
            const std::vector<double> values = random_values("sr", n);
            Value src(DType::f32, {n}), dst(DType::bf16, {n});
            src.set_all([&](int64_t i) { return values[size_t(i)]; });
            cpu->cast_stochastic(none, dst.tensor(), src.tensor(), 11, 22, offset);
            DeviceValue from(gpu, DType::f32, {n}, values);
            DeviceValue to(gpu, DType::bf16, {n}, constant_values(n, nan_));
            gpu.k->cast_stochastic(gpu.stream, to.tensor(), from.tensor(), 11, 22, offset);
            EXPECT(same_bits(to.all(), dst.all()));
        }
}

TEST_CASE("add and scale round once, at any alignment") {
    Gpu gpu(DType::bf16);
    for (DType type : float_types)
        for (int64_t n : lengths)
            for (int64_t skip : {0, 1}) {
                CAPTURE(name_of(type));
                CAPTURE(n);
                const std::vector<double> a = rounded(random_values("a", n + skip), type);
                const std::vector<double> b = rounded(random_values("b", n + skip), type);
                std::vector<double> sum, scaled;
                for (size_t i = 0; i < a.size(); ++i) {
                    sum.push_back(a[i] + b[i]);
                    scaled.push_back(a[i] * 0.375);
                }
                DeviceValue x(gpu, type, {n + skip}, a), y(gpu, type, {n + skip}, b);
                gpu.k->add(gpu.stream, part(x, skip, n), part(x, skip, n), part(y, skip, n));
                EXPECT(same_bits(middle(x.all(), skip, n), middle(rounded(sum, type), skip, n)));
                x.set(a);
                gpu.k->scale(gpu.stream, part(x, skip, n), 0.375);
                EXPECT(same_bits(middle(x.all(), skip, n), middle(rounded(scaled, type), skip, n)));
            }
}

TEST_CASE("sums of tensors are exact to fp64 and reproducible") {
    Gpu gpu(DType::bf16);
    for (DType type : float_types)
        for (int64_t n : {1, 7, 4099, 3000001})
            for (int64_t skip : {0, 1}) {
                CAPTURE(name_of(type));
                CAPTURE(n);
                const std::vector<double> values = rounded(random_values("x", n + skip), type);
                double sum = 0, squares = 0;
                for (int64_t i = skip; i < n + skip; ++i) {
                    sum += values[size_t(i)];
                    squares += values[size_t(i)] * values[size_t(i)];
                }
                DeviceValue x(gpu, type, {n + skip}, values);
                DeviceValue out(gpu, DType::f64, {2}, {nan_, nan_});
                const Tensor xs = part(x, skip, n);
                gpu.k->sum(gpu.stream, part(out, 0, 1), xs, false);
                gpu.k->sum_squares(gpu.stream, part(out, 1, 1), xs, false);
                const std::vector<double> once = out.all();
                EXPECT(std::abs(once[0] - sum) <= 1e-12 * (std::abs(sum) + double(n)));
                EXPECT(std::abs(once[1] - squares) <= 1e-12 * squares);
                gpu.k->sum(gpu.stream, part(out, 0, 1), xs, true);
                gpu.k->sum_squares(gpu.stream, part(out, 1, 1), xs, true);
                EXPECT(same_bits(out.all(), {once[0] + once[0], once[1] + once[1]}));
            }
}
