// A little of cuDNN's backend API in C++: descriptors that own themselves, a graph of operations
// under construction, and the plan that runs it. Names and attributes are those of NVIDIA's
// documentation of the graph API (cudnn_graph.h). Plans are made for a device's properties, not
// through a handle, so that only running one needs a handle.
#pragma once
#include <cudnn.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace torus::cuda::cudnn {

void check(cudnnStatus_t status, const char* what);

class Descriptor {
public:
    explicit Descriptor(cudnnBackendDescriptorType_t type);
    ~Descriptor();
    Descriptor(Descriptor&& o) noexcept : d_(o.d_) { o.d_ = nullptr; }
    Descriptor& operator=(Descriptor&&) = delete;

    void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
             const void* values);
    void set(cudnnBackendAttributeName_t name, const Descriptor& value);
    template <class T>
    void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
        set(name, type, 1, &value);
    }
    // Returns how many values there are; `values` may be null.
    int64_t get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t room,
                void* values) const;
    void finalize();
    cudnnStatus_t try_finalize();
    cudnnBackendDescriptor_t raw() const { return d_; }

private:
    cudnnBackendDescriptor_t d_ = nullptr;
};

Descriptor device_properties(int index);  // of a GPU of this machine

using Dims = std::array<int64_t, 4>;

struct Value {  // a tensor of a graph
    cudnnDataType_t type;
    Dims dim, stride;
    int64_t id;
};

class Plan {
public:
    int64_t workspace_bytes() const { return workspace_bytes_; }
    // `pointers`: of the graph's given values, in the order they were given; device memory but for
    // the scalars.
    void run(cudnnHandle_t handle, const std::vector<void*>& pointers, void* workspace) const;

private:
    friend class Graph;
    Plan(Descriptor plan, std::vector<int64_t> given);
    Descriptor plan_;
    std::vector<int64_t> given_;
    int64_t workspace_bytes_;
};

class Graph {
public:
    // What the caller passes to the plan: tensors, and fp32 numbers in host memory.
    Value given(cudnnDataType_t type, const Dims& dim, const Dims& stride);
    Value given_scalar();
    // What one operation makes for another; never in memory unless cuDNN decides so.
    Value made(cudnnDataType_t type, const Dims& dim);
    Value made(cudnnDataType_t type, const Dims& dim, const Dims& stride);

    // y = mode(in[0], in[1], in[2]), broadcast
    void pointwise(cudnnPointwiseMode_t mode, const Value& y, std::initializer_list<Value> in);
    // The same into a made fp32 value of in[0]'s shape.
    Value pointwise(cudnnPointwiseMode_t mode, std::initializer_list<Value> in);
    Value index(const Value& x, int64_t axis);  // i32: each element's position along an axis
    Value compare(cudnnPointwiseMode_t mode, const Value& a, const Value& b);  // bool
    void matmul(const Value& c, const Value& a, const Value& b);
    void reduce(cudnnReduceTensorOp_t op, const Value& y, const Value& x);
    Value reduce_rows(cudnnReduceTensorOp_t op, const Value& x);  // over the last axis
    void reshape(const Value& y, const Value& x);

    // The first of the heuristic's choices that this library can run. Throws when there is none.
    Plan plan(const Descriptor& device, const char* what) const;

private:
    Value add(Value value, bool real, bool scalar);
    void pointwise(Descriptor how, cudnnDataType_t arithmetic, const Value& y,
                   std::initializer_list<Value> in);
    std::vector<Descriptor> tensors_, operations_;  // tensors_[id]
    std::vector<int64_t> given_;
};

}  // namespace torus::cuda::cudnn
