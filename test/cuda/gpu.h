// What the CUDA tests share: a backend with a stream and workspace, and tensors on the device that
// are filled from and read back into fp64 vectors on the host.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace torus::test {

struct Gpu {
    explicit Gpu(DType dtype, int64_t workspace_bytes = int64_t(64) << 20);
    ~Gpu();
    std::unique_ptr<Kernels> k;
    Buffer workspace;
    Stream stream;
};

// A tensor on the device. Dimensions inside the first lie `gap` elements apart from each other; the
// gaps hold a pattern that must survive.
class DeviceValue {
public:
    DeviceValue(Gpu& gpu, DType dtype, const Shape& shape, int64_t gap = 0);
    DeviceValue(Gpu& gpu, DType dtype, const Shape& shape, const std::vector<double>& values,
                int64_t gap = 0);
    Tensor tensor() const { return view_; }
    void set(const std::vector<double>& values);  // rounded to the type
    std::vector<double> all() const;              // waits for the stream
    bool gaps_intact() const;

private:
    std::vector<uint8_t> memory() const;
    int64_t offset(int64_t i) const;
    Gpu& gpu_;
    Buffer buffer_;
    Tensor view_;
};

// Each value rounded to the type.
std::vector<double> rounded(std::vector<double> values, DType dtype);
// n reproducible numbers of mean 0 and variance `size` squared.
std::vector<double> random_values(const std::string& name, int64_t n, double size = 1);
std::vector<double> constant_values(int64_t n, double value);

}  // namespace torus::test
