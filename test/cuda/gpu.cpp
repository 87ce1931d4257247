// See gpu.h.
#include "test/cuda/gpu.h"

#include <cstring>

#include "kernels/float16.h"
#include "test/kernels/harness.h"

namespace torus::test {
namespace {

constexpr uint8_t pattern = 0xA5;

void write(uint8_t* at, DType dtype, double v) {
    const auto put = [&](auto x) { std::memcpy(at, &x, sizeof(x)); };
    switch (dtype) {
        case DType::f64: return put(v);
        case DType::f32: return put(float(v));
        case DType::i32: return put(int32_t(v));
        case DType::bf16: return put(float_to_bf16(float(v)));
        case DType::f16: return put(float_to_f16(float(v)));
        default: fail(Exit::internal, "no such test value");
    }
}

template <class T>
T get(const uint8_t* at) {
    T x;
    std::memcpy(&x, at, sizeof(x));
    return x;
}

double read(const uint8_t* at, DType dtype) {
    switch (dtype) {
        case DType::f64: return get<double>(at);
        case DType::f32: return double(get<float>(at));
        case DType::i32: return double(get<int32_t>(at));
        case DType::bf16: return double(bf16_to_float(get<uint16_t>(at)));
        case DType::f16: return double(f16_to_float(get<uint16_t>(at)));
        default: fail(Exit::internal, "no such test value");
    }
}

}  // namespace

Gpu::Gpu(DType dtype, int64_t workspace_bytes)
    : k(make_cuda_kernels(dtype, 0)),
      workspace(k->device(), Memory::device, workspace_bytes),
      stream(k->device().make_stream()) {
    stream.workspace = Tensor(workspace.data(), DType::u8, {workspace_bytes});
    k->device().set_bytes(stream, workspace.data(), 0xFF, workspace_bytes);  // NaN in every type
}

Gpu::~Gpu() { k->device().destroy(stream); }

DeviceValue::DeviceValue(Gpu& gpu, DType dtype, const Shape& shape, int64_t gap)
    : gpu_(gpu), view_(nullptr, dtype, shape) {
    int64_t step = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
        view_.stride[i] = step;
        step *= shape.dim[i];
        if (i > 0) step += gap;
    }
    const int64_t bytes = std::max<int64_t>(step, 1) * size_of(dtype);
    buffer_ = Buffer(gpu.k->device(), Memory::device, bytes);
    gpu.k->device().set_bytes(gpu.stream, buffer_.data(), pattern, bytes);
    view_.data = buffer_.data();
}

DeviceValue::DeviceValue(Gpu& gpu, DType dtype, const Shape& shape,
                         const std::vector<double>& values, int64_t gap)
    : DeviceValue(gpu, dtype, shape, gap) {
    set(values);
}

int64_t DeviceValue::offset(int64_t i) const {
    if (view_.contiguous()) return i;
    int64_t at = 0;
    for (int d = view_.rank() - 1; d >= 0; --d) {
        at += i % view_.dim(d) * view_.stride[d];
        i /= view_.dim(d);
    }
    return at;
}

std::vector<uint8_t> DeviceValue::memory() const {
    std::vector<uint8_t> host(size_t(buffer_.bytes()));
    gpu_.k->device().copy(gpu_.stream, host.data(), buffer_.data(), buffer_.bytes());
    gpu_.k->device().synchronize(gpu_.stream);
    return host;
}

void DeviceValue::set(const std::vector<double>& values) {
    CHECK(int64_t(values.size()) == view_.numel());
    std::vector<uint8_t> host(size_t(buffer_.bytes()), pattern);
    for (int64_t i = 0; i < view_.numel(); ++i)
        write(host.data() + offset(i) * size_of(view_.dtype), view_.dtype, values[size_t(i)]);
    gpu_.k->device().copy(gpu_.stream, buffer_.data(), host.data(), buffer_.bytes());
    gpu_.k->device().synchronize(gpu_.stream);
}

std::vector<double> DeviceValue::all() const {
    const std::vector<uint8_t> host = memory();
    std::vector<double> v(size_t(view_.numel()));
    for (int64_t i = 0; i < view_.numel(); ++i)
        v[size_t(i)] = read(host.data() + offset(i) * size_of(view_.dtype), view_.dtype);
    return v;
}

bool DeviceValue::gaps_intact() const {
    if (view_.contiguous()) return true;
    const std::vector<uint8_t> host = memory();
    std::vector<bool> used(host.size());
    const int64_t width = size_of(view_.dtype);
    for (int64_t i = 0; i < view_.numel(); ++i)
        for (int64_t b = 0; b < width; ++b) used[size_t(offset(i) * width + b)] = true;
    for (size_t i = 0; i < host.size(); ++i)
        if (!used[i] && host[i] != pattern) return false;
    return true;
}

std::vector<double> rounded(std::vector<double> values, DType dtype) {
    uint8_t bytes[8];
    for (double& v : values) {
        write(bytes, dtype, v);
        v = read(bytes, dtype);
    }
    return values;
}

std::vector<double> random_values(const std::string& name, int64_t n, double size) {
    std::vector<double> v(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = size * noise(name, i);
    return v;
}

std::vector<double> constant_values(int64_t n, double value) {
    return std::vector<double>(size_t(n), value);
}

}  // namespace torus::test
