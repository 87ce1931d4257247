// See harness.h.
#include "test/kernels/harness.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/float16.h"
#include "kernels/rng.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace torus::test {
namespace {

constexpr uint8_t gap = 0xA5;

uint64_t hash(const std::string& s) {
    uint64_t h = 14695981039346656037u;
    for (char c : s) h = (h ^ uint64_t(uint8_t(c))) * 1099511628211u;
    return h;
}

}  // namespace

Value::Value(DType dtype, const Shape& shape, bool pitched) : view_(nullptr, dtype, shape) {
    int64_t step = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
        view_.stride[i] = step;
        step *= shape.dim[i];
        if (pitched && i > 0) step += 3 + i;
    }
    memory_.resize(size_t(std::max<int64_t>(step, 1) * size_of(dtype) + 7) / 8);
    std::memset(memory_.data(), gap, memory_.size() * 8);
}

Tensor Value::tensor() const {
    Tensor t = view_;
    t.data = memory_.data();
    return t;
}

int64_t Value::offset(int64_t i) const {
    if (view_.contiguous()) return i;
    int64_t at = 0;
    for (int d = view_.rank() - 1; d >= 0; --d) {
        at += i % view_.dim(d) * view_.stride[d];
        i /= view_.dim(d);
    }
    return at;
}

double Value::get(int64_t i) const {
    const int64_t at = offset(i);
    switch (view_.dtype) {
        case DType::f64: return tensor().as<double>()[at];
        case DType::f32: return double(tensor().as<float>()[at]);
        case DType::i32: return double(tensor().as<int32_t>()[at]);
        case DType::bf16: return double(bf16_to_float(tensor().as<uint16_t>()[at]));
        case DType::f16: return double(f16_to_float(tensor().as<uint16_t>()[at]));
        default: fail(Exit::internal, "no such test value");
    }
}

void Value::set(int64_t i, double v) {
    const int64_t at = offset(i);
    switch (view_.dtype) {
        case DType::f64: tensor().as<double>()[at] = v; break;
        case DType::f32: tensor().as<float>()[at] = float(v); break;
        case DType::i32: tensor().as<int32_t>()[at] = int32_t(v); break;
        case DType::bf16: tensor().as<uint16_t>()[at] = float_to_bf16(float(v)); break;
        case DType::f16: tensor().as<uint16_t>()[at] = float_to_f16(float(v)); break;
        default: fail(Exit::internal, "no such test value");
    }
}

void Value::set_all(const std::function<double(int64_t)>& f) {
    for (int64_t i = 0; i < size(); ++i) set(i, f(i));
}

std::vector<double> Value::all() const {
    std::vector<double> v;
    for (int64_t i = 0; i < size(); ++i) v.push_back(get(i));
    return v;
}

bool Value::gaps_intact() const {
    if (view_.contiguous()) return true;
    const int64_t width = size_of(view_.dtype);
    std::vector<bool> used(memory_.size() * 8);
    for (int64_t i = 0; i < size(); ++i)
        for (int64_t b = 0; b < width; ++b) used[size_t(offset(i) * width + b)] = true;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(memory_.data());
    for (size_t i = 0; i < used.size(); ++i)
        if (!used[i] && bytes[i] != gap) return false;
    return true;
}

// Values that fp32 holds exactly, so that both precisions start from the same numbers.
double noise(const std::string& name, int64_t i) {
    const double u = random_uniform(1234, hash(name), uint64_t(i));
    return double(float((2 * u - 1) * 1.7320508));
}

Value random_value(const std::string& name, DType dtype, const Shape& shape, double size,
                   bool pitched) {
    Value v(dtype, shape, pitched);
    v.set_all([&](int64_t i) { return double(float(size * noise(name, i))); });
    return v;
}

Covers::Covers(std::initializer_list<const char*> ops) {
    for (const char* op : ops) list().push_back(op);
}
std::vector<std::string>& Covers::list() {
    static std::vector<std::string> all;
    return all;
}

Run::Run(const OpCase& c, Kernels& kernels, bool pitched)
    : k(kernels), stream(kernels.device().make_stream()), case_(c) {
    const DType type = k.precision().act;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto unset = [&](const Spec& s) {
        Value v(s.f64 ? DType::f64 : type, s.shape, pitched && s.pitched);
        v.set_all([&](int64_t) { return nan; });
        return v;
    };
    const auto random = [&](const Spec& s, const std::string& name, double size) {
        return random_value(name, s.f64 ? DType::f64 : type, s.shape, size, pitched && s.pitched);
    };
    for (const Spec& s : c.tensors) {
        const bool given = s.kind == Kind::input || s.kind == Kind::constant;
        values_[s.name] = given ? random(s, s.name, s.size) : unset(s);
        if (s.kind == Kind::output) values_["d" + s.name] = random(s, "d" + s.name, 1);
        if (s.weight != 0) values_["d" + s.name].set_all([&](int64_t) { return s.weight; });
        if (s.grad == Grad::adds) values_["d" + s.name] = random(s, "d" + s.name, 1);
        if (s.grad == Grad::writes) values_["d" + s.name] = unset(s);
    }
    for (const Indices& i : c.indices) {
        Value v(DType::i32, i.shape, pitched && i.pitched);
        v.set_all([&](int64_t at) { return double(i.values.at(size_t(at))); });
        values_[i.name] = v;
    }
}

Tensor Run::operator[](const std::string& name) const {
    if (const auto r = replaced_.find(name); r != replaced_.end()) return r->second;
    const auto v = values_.find(name);
    return v == values_.end() ? Tensor{} : v->second.tensor();
}

void Run::copy(const std::string& dst, const std::string& src) {
    const Tensor to = (*this)[dst], from = (*this)[src];
    CHECK(to && from && to.dtype == from.dtype && to.shape == from.shape &&
          to.stride == from.stride);
    k.cast(stream, to, from);
}

std::vector<std::string> Run::names() const {
    std::vector<std::string> all;
    for (const auto& [name, _] : values_) all.push_back(name);
    return all;
}

double Run::loss() const {
    double sum = 0;
    for (const Spec& s : case_.tensors) {
        if (s.kind != Kind::output) continue;
        const Value &out = values_.at(s.name), &weight = values_.at("d" + s.name);
        for (int64_t i = 0; i < out.size(); ++i) sum += weight.get(i) * out.get(i);
    }
    return sum;
}

std::map<std::string, std::vector<double>> Run::results() const {
    std::map<std::string, std::vector<double>> r;
    for (const Spec& s : case_.tensors) {
        if (s.kind == Kind::output || s.kind == Kind::stat) r[s.name] = values_.at(s.name).all();
        if (s.grad != Grad::none) r["d" + s.name] = values_.at("d" + s.name).all();
    }
    return r;
}

std::vector<double> Run::gradient(const std::string& input) const {
    std::vector<double> g = values_.at("d" + input).all();
    for (const Spec& s : case_.tensors)
        if (s.name == input && s.grad == Grad::adds)
            for (size_t i = 0; i < g.size(); ++i) g[i] -= noise("d" + input, int64_t(i));
    return g;
}

bool Run::gaps_intact() const {
    for (const auto& [_, v] : values_)
        if (!v.gaps_intact()) return false;
    return true;
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
    if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i]) continue;  // also two infinities
        difference += (a[i] - b[i]) * (a[i] - b[i]);
    }
    for (double v : b)
        if (std::isfinite(v)) size += v * v;
    return size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) && std::isnan(b[i])) continue;
        if (std::bit_cast<uint64_t>(a[i]) != std::bit_cast<uint64_t>(b[i])) return false;
    }
    return true;
}

void with_threads(int n, const std::function<void()>& f) {
#ifdef _OPENMP
    const int before = omp_get_max_threads();
    omp_set_num_threads(n);
    f();
    omp_set_num_threads(before);
#else
    f();
#endif
}

}  // namespace torus::test
