// What must hold for every op of the table in cases.cpp.
#include <cmath>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

std::unique_ptr<Kernels> cpu(DType type, bool plain = true) {
    return make_cpu_kernels(type, {.plain_matmul = plain});
}

using Results = std::map<std::string, std::vector<double>>;

Results run(const OpCase& c, Kernels& k, bool pitched = false) {
    Run r(c, k, pitched);
    r.forward();
    if (c.backward) r.backward();
    EXPECT(r.gaps_intact());
    return r.results();
}

void expect_same_bits(const std::string& what, const Results& a, const Results& b) {
    for (const auto& result : a) {
        INFO(what << ": " << result.first);
        EXPECT(same_bits(result.second, b.at(result.first)));
    }
}

void expect_close(const std::string& what, const Results& a, const Results& b, double bound) {
    for (const auto& result : b) {
        const double error = relative_error(a.at(result.first), result.second);
        INFO(what << ": " << result.first << " differs by " << error);
        EXPECT(error < bound);
    }
}

// d(loss)/d(input) by central differences of fourth order.
std::vector<double> numeric_gradient(const OpCase& c, Kernels& k, const std::string& input) {
    constexpr double h = 1e-3;
    std::vector<double> gradient;
    Run r(c, k);
    Value& x = r.value(input);
    for (int64_t i = 0; i < x.size(); ++i) {
        const double at = x.get(i);
        const auto loss = [&](double step) {
            x.set(i, at + step);
            r.forward();
            return r.loss();
        };
        gradient.push_back((8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h));
        x.set(i, at);
    }
    return gradient;
}

}  // namespace

TEST_CASE("every op of Kernels is in the table or in a test of its own") {
    std::ifstream file(TORUS_SOURCE_DIR "/kernels/kernels.h");
    std::stringstream text;
    text << file.rdbuf();
    const std::string header = text.str();
    std::set<std::string> declared, tested(Covers::list().begin(), Covers::list().end());
    const std::regex op("virtual void (\\w+)\\(\\s*Stream&");
    for (std::sregex_iterator i(header.begin(), header.end(), op), end; i != end; ++i)
        declared.insert((*i)[1]);
    for (const OpCase& c : all_cases(false)) tested.insert(c.ops.begin(), c.ops.end());
    EXPECT(declared.size() > 25);
    for (const std::string& name : declared) {
        INFO("op without a test: " << name);
        EXPECT(tested.count(name) == 1);
    }
    for (const std::string& name : tested) {
        INFO("test of an op that does not exist: " << name);
        EXPECT(declared.count(name) == 1);
    }
}

TEST_CASE("gradients equal central differences in fp64") {
    const auto k = cpu(DType::f64);
    for (const OpCase& c : all_cases(false)) {
        if (!c.backward) continue;
        Run r(c, *k);
        r.forward();
        r.backward();
        for (const Spec& s : c.tensors) {
            if (s.grad == Grad::none) continue;
            const std::vector<double> numeric = numeric_gradient(c, *k, s.name);
            const double error = relative_error(r.gradient(s.name), numeric);
            INFO(c.name << ": d" << s.name << " differs by " << error);
            EXPECT(error < 1e-8);
        }
    }
}

TEST_CASE("fp32 equals fp64 within its precision") {
    const auto k32 = cpu(DType::f32), k64 = cpu(DType::f64);
    for (bool big : {false, true})
        for (const OpCase& c : all_cases(big))
            expect_close(c.name, run(c, *k32), run(c, *k64), 3e-6);
}

TEST_CASE("pitched tensors give the bits of contiguous ones") {
    for (DType type : {DType::f32, DType::f64}) {
        const auto k = cpu(type);
        for (bool big : {false, true})
            for (const OpCase& c : all_cases(big))
                expect_same_bits(c.name, run(c, *k, false), run(c, *k, true));
    }
}

TEST_CASE("results do not depend on the number of threads") {
    for (bool plain : {true, false})
        for (DType type : {DType::f32, DType::f64}) {
            const auto k = cpu(type, plain);
            for (const OpCase& c : all_cases(true)) {
                Results one;
                with_threads(1, [&] { one = run(c, *k); });
                for (int threads : {2, 3})
                    with_threads(threads, [&] {
                        expect_same_bits(concat(c.name, ", ", threads, " threads"), one,
                                         run(c, *k));
                    });
            }
        }
}

TEST_CASE("matrix products by BLAS and by plain loops agree") {
    for (DType type : {DType::f32, DType::f64}) {
        const auto plain = cpu(type, true), blas = cpu(type, false);
        for (bool big : {false, true})
            for (const OpCase& c : all_cases(big))
                expect_close(c.name, run(c, *blas), run(c, *plain),
                             type == DType::f32 ? 3e-6 : 1e-13);
    }
}

TEST_CASE("wrong types, shapes and layouts throw") {
    const auto k = cpu(DType::f64);
    for (const OpCase& c : all_cases(false)) {
        std::set<std::string> may_miss, may_pitch;
        for (const Spec& s : c.tensors)
            for (const std::string& name : {s.name, "d" + s.name}) {
                if (s.optional) may_miss.insert(name);
                if (s.pitched) may_pitch.insert(name);
            }
        for (const Indices& i : c.indices) {
            if (i.optional) may_miss.insert(i.name);
            if (i.pitched) may_pitch.insert(i.name);
        }

        const auto rejected = [&](const std::string& name, const Tensor& wrong) {
            Run r(c, *k);
            r.forward();
            if (c.backward) r.backward();
            r.replace(name, wrong);
            int errors = 0;
            for (const auto& call : {c.forward, c.backward}) try {
                    if (call) call(r);
                } catch (const Error&) {
                    ++errors;
                }
            return errors > 0;
        };
        for (const std::string& name : Run(c, *k).names()) {
            // Not arguments: the classifier's weights, a number; gradients of forward-only cases.
            if (c.name == "classifier" && name == "dloss") continue;
            if (!c.backward && name[0] == 'd') continue;
            INFO(c.name << ": " << name);
            const Tensor right = Run(c, *k)[name];
            if (!may_miss.count(name)) EXPECT(rejected(name, Tensor{}));

            const Value other(right.dtype == DType::f64 ? DType::f32 : DType::f64, right.shape);
            EXPECT(rejected(name, other.tensor()));

            for (int axis = 0; axis < right.rank(); ++axis) {
                if (name == "table" && axis == 1) continue;  // fewer dimensions turn
                INFO("one less in dimension " << axis);
                Shape smaller = right.shape;
                smaller.dim[size_t(axis)] -= 1;
                Value v(right.dtype, smaller);
                v.set_all([](int64_t) { return 0.0; });
                EXPECT(rejected(name, v.tensor()));
            }
            Value spread(right.dtype, right.shape, true);
            spread.set_all([](int64_t) { return 0.0; });
            if (!spread.tensor().contiguous() && !may_pitch.count(name))
                EXPECT(rejected(name, spread.tensor()));
        }
    }
}
