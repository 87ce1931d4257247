// See cudnn_graph.h.
#include "kernels/cuda/cudnn_graph.h"

#include <algorithm>
#include <string>

#include "kernels/check.h"

namespace torus::cuda::cudnn {
namespace {

std::string message_of(cudnnStatus_t status) {
    char text[512] = "";
    cudnnGetLastErrorString(text, sizeof text);
    std::string line = text;
    std::replace(line.begin(), line.end(), '\n', ' ');
    return concat(cudnnGetErrorString(status), line.empty() ? "" : ": ", line);
}

Dims row_major(const Dims& dim) { return {dim[1] * dim[2] * dim[3], dim[2] * dim[3], dim[3], 1}; }

}  // namespace

void check(cudnnStatus_t status, const char* what) {
    if (status != CUDNN_STATUS_SUCCESS)
        fail(Exit::internal, "cuDNN: ", what, ": ", message_of(status));
}

// --- descriptors ---------------------------------------------------------------------------------
Descriptor::Descriptor(cudnnBackendDescriptorType_t type) {
    check(cudnnBackendCreateDescriptor(type, &d_), "cudnnBackendCreateDescriptor");
}

Descriptor::~Descriptor() {
    if (d_) cudnnBackendDestroyDescriptor(d_);
}

void Descriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                     int64_t count, const void* values) {
    check(cudnnBackendSetAttribute(d_, name, type, count, values), "cudnnBackendSetAttribute");
}

void Descriptor::set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.d_);
}

int64_t Descriptor::get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                        int64_t room, void* values) const {
    int64_t count = 0;
    check(cudnnBackendGetAttribute(d_, name, type, room, &count, values),
          "cudnnBackendGetAttribute");
    return count;
}

void Descriptor::finalize() { check(try_finalize(), "cudnnBackendFinalize"); }

cudnnStatus_t Descriptor::try_finalize() { return cudnnBackendFinalize(d_); }

Descriptor device_properties(int index) {
    Descriptor device(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    const int32_t id = index;
    device.set(CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, id);
    device.finalize();
    return device;
}

// --- the graph -----------------------------------------------------------------------------------
Value Graph::add(Value value, bool real, bool scalar) {
    value.id = int64_t(tensors_.size());
    const int64_t alignment = 16;
    const bool is_virtual = !real;
    Descriptor t(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    t.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, value.type);
    t.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, value.dim.data());
    t.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, value.stride.data());
    t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, value.id);
    t.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment);
    t.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
    t.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, scalar);
    t.finalize();
    tensors_.push_back(std::move(t));
    if (real) given_.push_back(value.id);
    return value;
}

Value Graph::given(cudnnDataType_t type, const Dims& dim, const Dims& stride) {
    return add({type, dim, stride, 0}, true, false);
}
Value Graph::given_scalar() {
    return add({CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, 0}, true, true);
}
Value Graph::made(cudnnDataType_t type, const Dims& dim) { return made(type, dim, row_major(dim)); }
Value Graph::made(cudnnDataType_t type, const Dims& dim, const Dims& stride) {
    return add({type, dim, stride, 0}, false, false);
}

void Graph::pointwise(Descriptor how, cudnnDataType_t arithmetic, const Value& y,
                      std::initializer_list<Value> in) {
    how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, arithmetic);
    how.finalize();
    Descriptor op(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    constexpr cudnnBackendAttributeName_t names[] = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                                                     CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                                     CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
    for (size_t i = 0; i < in.size(); ++i) op.set(names[i], tensors_[size_t(std::data(in)[i].id)]);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensors_[size_t(y.id)]);
    op.finalize();
    operations_.push_back(std::move(op));
}

void Graph::pointwise(cudnnPointwiseMode_t mode, const Value& y, std::initializer_list<Value> in) {
    Descriptor how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    pointwise(std::move(how), CUDNN_DATA_FLOAT, y, in);
}

Value Graph::pointwise(cudnnPointwiseMode_t mode, std::initializer_list<Value> in) {
    const Value y = made(CUDNN_DATA_FLOAT, std::data(in)[0].dim);
    pointwise(mode, y, in);
    return y;
}

Value Graph::index(const Value& x, int64_t axis) {
    const Value y = made(CUDNN_DATA_INT32, x.dim);
    Descriptor how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_GEN_INDEX;
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    how.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    pointwise(std::move(how), CUDNN_DATA_INT32, y, {x});
    return y;
}

Value Graph::compare(cudnnPointwiseMode_t mode, const Value& a, const Value& b) {
    const Value y = made(CUDNN_DATA_BOOLEAN, a.dim);
    Descriptor how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    pointwise(std::move(how), CUDNN_DATA_BOOLEAN, y, {a, b});
    return y;
}

void Graph::matmul(const Value& c, const Value& a, const Value& b) {
    Descriptor how(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    const cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
    how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, arithmetic);
    how.finalize();
    Descriptor op(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, tensors_[size_t(a.id)]);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, tensors_[size_t(b.id)]);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, tensors_[size_t(c.id)]);
    op.finalize();
    operations_.push_back(std::move(op));
}

void Graph::reduce(cudnnReduceTensorOp_t mode, const Value& y, const Value& x) {
    Descriptor how(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    const cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
    how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, mode);
    how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, arithmetic);
    how.finalize();
    Descriptor op(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, tensors_[size_t(x.id)]);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, tensors_[size_t(y.id)]);
    op.finalize();
    operations_.push_back(std::move(op));
}

Value Graph::reduce_rows(cudnnReduceTensorOp_t mode, const Value& x) {
    const Value y = made(CUDNN_DATA_FLOAT, {x.dim[0], x.dim[1], x.dim[2], 1});
    reduce(mode, y, x);
    return y;
}

void Graph::reshape(const Value& y, const Value& x) {
    Descriptor op(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensors_[size_t(x.id)]);
    op.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensors_[size_t(y.id)]);
    op.finalize();
    operations_.push_back(std::move(op));
}

// --- the plan ------------------------------------------------------------------------------------
Plan Graph::plan(const Descriptor& device, const char* what) const {
    std::vector<cudnnBackendDescriptor_t> raw;
    for (const Descriptor& op : operations_) raw.push_back(op.raw());
    Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, int64_t(raw.size()),
              raw.data());
    graph.finalize();

    Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    cudnnStatus_t status = heuristic.try_finalize();
    std::vector<Descriptor> choices;
    if (status == CUDNN_STATUS_SUCCESS) {
        const int64_t count =
            heuristic.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr);
        raw.clear();
        for (int64_t i = 0; i < count; ++i) {
            choices.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
            raw.push_back(choices.back().raw());
        }
        heuristic.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                      raw.data());
    }
    for (const Descriptor& choice : choices) {
        Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, choice);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
        status = plan.try_finalize();
        if (status == CUDNN_STATUS_SUCCESS) return Plan(std::move(plan), given_);
    }
    fail(Exit::internal, "cuDNN ", cudnnGetVersion(), " has no kernel for ", what, " (",
         choices.size(), " candidates): ", message_of(status), "; take --attention flash");
}

Plan::Plan(Descriptor plan, std::vector<int64_t> given)
    : plan_(std::move(plan)), given_(std::move(given)) {
    plan_.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &workspace_bytes_);
}

void Plan::run(cudnnHandle_t handle, const std::vector<void*>& pointers, void* workspace) const {
    CHECK(pointers.size() == given_.size());
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, int64_t(given_.size()),
             given_.data());
    pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, int64_t(pointers.size()),
             pointers.data());
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
    pack.finalize();
    check(cudnnBackendExecute(handle, plan_.raw(), pack.raw()), "cudnnBackendExecute");
}

}  // namespace torus::cuda::cudnn
