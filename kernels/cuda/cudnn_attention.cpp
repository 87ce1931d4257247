// See cudnn_attention.h. The graphs are the sequences of operations that cuDNN's fused attention
// kernels recognise: matmul, scale, mask, softmax spelled out, matmul; everything between is
// virtual. (cudnn-frontend, which composes the same ones, documents them in
// docs/operations/Attention.md.) cuDNN wants (B,H,T,D) with K, and in the backward V, transposed:
// our (B,T,H,D) views are that, by strides.
#include "kernels/cuda/cudnn_attention.h"

#include <cuda_runtime.h>

#include <limits>
#include <map>

#include "kernels/cuda/cudnn_graph.h"

namespace torus::cuda {
namespace {

using cudnn::Dims;
using cudnn::Graph;
using cudnn::Value;

cudnnDataType_t cudnn_type(DType t) {
    return t == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
}

// (B,T,H,D) as (B,H,T,D) and as (B,H,D,T).
Value heads(Graph& g, const Tensor& t) {
    return g.given(cudnn_type(t.dtype), {t.dim(0), t.dim(2), t.dim(1), t.dim(3)},
                   {t.pitch(0), t.pitch(2), t.pitch(1), 1});
}
Value heads_transposed(Graph& g, const Tensor& t) {
    return g.given(cudnn_type(t.dtype), {t.dim(0), t.dim(2), t.dim(3), t.dim(1)},
                   {t.pitch(0), t.pitch(2), 1, t.pitch(1)});
}
Value row_statistic(Graph& g, const Tensor& q) {  // (B,H,Tq,1)
    const int64_t B = q.dim(0), T = q.dim(1), H = q.dim(2);
    return g.given(CUDNN_DATA_FLOAT, {B, H, T, 1}, {H * T, T, 1, 1});
}

// scale * q k^T, the scores' shape being (B,H,Tq,Tk)
Value scores(Graph& g, const Value& q, const Value& k, const Value& scale) {
    const Value s = g.made(CUDNN_DATA_FLOAT, {q.dim[0], q.dim[1], q.dim[2], k.dim[3]});
    g.matmul(s, q, k);
    return g.pointwise(CUDNN_POINTWISE_MUL, {s, scale});
}

// Keys after the query: minus infinity.
Value causal(Graph& g, const Value& s, const Value& minus_infinity) {
    const Value row = g.index(s, 2), column = g.index(s, 3);
    const Value visible = g.compare(CUDNN_POINTWISE_CMP_GE, row, column);
    return g.pointwise(CUDNN_POINTWISE_BINARY_SELECT, {s, minus_infinity, visible});
}

// Given: q, k, v, o, lse, scale, and -inf when causal.
Graph forward_graph(const Attn& a) {
    Graph g;
    const cudnnDataType_t type = cudnn_type(a.q.dtype);
    const Value q = heads(g, a.q), k = heads_transposed(g, a.k), v = heads(g, a.v),
                o = heads(g, a.o), lse = row_statistic(g, a.q), scale = g.given_scalar();
    Value s = scores(g, q, k, scale);
    if (a.causal) s = causal(g, s, g.given_scalar());
    const Value top = g.reduce_rows(CUDNN_REDUCE_TENSOR_MAX, s);
    const Value e = g.pointwise(CUDNN_POINTWISE_EXP, {g.pointwise(CUDNN_POINTWISE_SUB, {s, top})});
    const Value sum = g.reduce_rows(CUDNN_REDUCE_TENSOR_ADD, e);
    g.pointwise(CUDNN_POINTWISE_ADD, lse, {top, g.pointwise(CUDNN_POINTWISE_LOG, {sum})});
    const Value p = g.made(type, s.dim);
    g.pointwise(CUDNN_POINTWISE_DIV, p, {e, sum});
    g.matmul(o, p, v);
    return g;
}

// (B,H,Tq,Tk) -> (B,H,Tk,Tq), rounded: the left operand of a product over queries.
Value transposed(Graph& g, const Value& x, cudnnDataType_t type) {
    const Value y = g.made(type, {x.dim[0], x.dim[1], x.dim[3], x.dim[2]},
                           {x.stride[0], x.stride[1], 1, x.stride[2]});
    g.reshape(y, x);
    return y;
}

// y (B,Hk,Tk,D) = x^T z, summed over the query heads of each key-value head.
void product_over_queries(Graph& g, const Value& y, const Value& x, const Value& z) {
    const Value left = transposed(g, x, z.type);
    if (y.dim[1] == z.dim[1]) {
        g.matmul(y, left, z);
        return;
    }
    const Value each = g.made(z.type, {y.dim[0], z.dim[1], y.dim[2], y.dim[3]});
    g.matmul(each, left, z);
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, y, each);
}

// Given: q, k, v, dout, o, lse, dq, dk, dv, delta and sums of dq (both scratch), scale, one, and
// -inf when causal.
Graph backward_graph(const AttnGrad& a) {
    Graph g;
    const Value q = heads(g, a.q), k = heads_transposed(g, a.k), v = heads_transposed(g, a.v),
                dout = heads(g, a.dout), o = heads(g, a.o), lse = row_statistic(g, a.q),
                dq = heads(g, a.dq), dk = heads(g, a.dk), dv = heads(g, a.dv),
                delta = row_statistic(g, a.q);
    const Dims row_major = {q.dim[1] * q.dim[2] * q.dim[3], q.dim[2] * q.dim[3], q.dim[3], 1};
    const Value dq_sum = g.given(CUDNN_DATA_FLOAT, q.dim, row_major), scale = g.given_scalar(),
                one = g.given_scalar();
    const Value product = g.pointwise(CUDNN_POINTWISE_MUL, {dout, o});
    const Value sum = g.reduce_rows(CUDNN_REDUCE_TENSOR_ADD, product);
    g.pointwise(CUDNN_POINTWISE_MUL, delta, {sum, one});
    Value s = g.pointwise(CUDNN_POINTWISE_SUB, {scores(g, q, k, scale), lse});
    if (a.causal) s = causal(g, s, g.given_scalar());
    const Value p = g.pointwise(CUDNN_POINTWISE_EXP, {s});
    product_over_queries(g, dv, p, dout);

    const Value dp = g.made(CUDNN_DATA_FLOAT, s.dim);
    g.matmul(dp, dout, v);
    const Value centred = g.pointwise(CUDNN_POINTWISE_SUB, {dp, delta});
    const Value ds =
        g.pointwise(CUDNN_POINTWISE_MUL, {g.pointwise(CUDNN_POINTWISE_MUL, {centred, p}), scale});
    product_over_queries(g, dk, ds, q);
    const Value keys = g.made(k.type, {k.dim[0], k.dim[1], k.dim[3], k.dim[2]},
                              {k.stride[0], k.stride[1], k.stride[3], k.stride[2]});
    g.reshape(keys, k);
    g.matmul(dq_sum, ds, keys);
    g.pointwise(CUDNN_POINTWISE_IDENTITY, dq, {dq_sum});
    return g;
}

// --- what it can do ------------------------------------------------------------------------------
constexpr size_t oldest_version = 91002;  // 9.10.0 and 9.10.1 have known faults in attention
// Up to here the backward needs masks of padding when the keys do not fill its tiles.
constexpr size_t whole_tiles_version = 91500;
constexpr int64_t key_tile = 128;

std::string version_text(size_t v) { return concat(v / 10000, ".", v / 100 % 100, ".", v % 100); }

bool aligned(const Tensor& t) {  // rows and heads at multiples of 16 bytes
    const int64_t width = 16 / size_of(t.dtype);
    bool ok = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) ok = ok && (t.dim(i) == 1 || t.pitch(i) % width == 0);
    return ok;
}

template <class Call>
std::string refusal_of(const Call& a, bool fp32_sums, std::initializer_list<Tensor> tensors) {
    const int64_t D = a.q.dim(3);
    if (a.first_key) return "cudnn has no masks of documents or windows";
    if (fp32_sums) return "cudnn keeps no sums over blocks of keys";
    if (a.q.dtype != DType::bf16 && a.q.dtype != DType::f16)
        return concat("cudnn computes in bf16 and fp16, not in ", name_of(a.q.dtype));
    if (D % 8 || D > 128)
        return concat("cudnn needs a head dim that is a multiple of 8 up to 128, not ", D);
    for (const Tensor& t : tensors)
        if (!aligned(t)) return "cudnn needs rows and heads at multiples of 16 bytes";
    return {};
}

std::string backward_refusal(int64_t Tq, int64_t Tk) {
    if (Tq == 1 && Tk == 1) return "cudnn has no backward of one query and one key";
    if (cudnnGetVersion() <= whole_tiles_version && Tk % key_tile)
        return concat("cudnn ", version_text(cudnnGetVersion()),
                      " needs sequences of a multiple of ", key_tile, " tokens, not ", Tk, " (",
                      (Tk / key_tile + 1) * key_tile, " works, so does a later cuDNN)");
    return {};
}

void require_supported(const std::string& refusal) {
    require(refusal.empty(), Exit::usage, "--attention: ", refusal, "; take --attention flash");
}

// --- running -------------------------------------------------------------------------------------
constexpr int64_t plan_scratch = 1024;  // of a plan itself; 256 bytes were seen

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The workspace of a backward, in this order.
struct Scratch {
    int64_t dq_sum, delta, plan;  // bytes
    explicit Scratch(const AttentionSizes& s)
        : dq_sum(round_up(s.B * s.Tq * s.H * s.D * 4)),
          delta(round_up(s.B * s.Tq * s.H * 4)),
          // dk and dv of every query head, in 16 bits, before they are summed over a group
          plan(plan_scratch + (s.H == s.Hk ? 0 : round_up(2 * 2 * s.B * s.Tk * s.H * s.D))) {}
};

// All that a plan depends on.
using Key = std::vector<int64_t>;

Key key_of(bool forward, bool causal, std::initializer_list<Tensor> tensors) {
    Key key = {forward, causal};
    for (const Tensor& t : tensors) {
        key.push_back(int64_t(t.dtype));
        for (int i = 0; i < 4; ++i) key.push_back(t.dim(i));
        for (int i = 0; i < 3; ++i) key.push_back(t.pitch(i));
    }
    return key;
}

int current_device() {
    int index = 0;
    require(cudaGetDevice(&index) == cudaSuccess, Exit::usage, "--attention: cudnn needs a GPU");
    return index;
}

class Cudnn final : public CudnnAttention {
public:
    Cudnn() : device_(cudnn::device_properties(current_device())) {
        cudnn::check(cudnnCreate(&handle_), "cudnnCreate");
    }
    ~Cudnn() override { cudnnDestroy(handle_); }

    void forward(const Stream& stream, const Attn& a, void* workspace) override {
        require_supported(refusal_of(a, a.carry, {a.q, a.k, a.v, a.o}));
        const cudnn::Plan& plan =
            plan_of(key_of(true, a.causal, {a.q, a.k, a.v, a.o}), [&] { return forward_graph(a); });
        CHECK(plan.workspace_bytes() <= plan_scratch, ": ", plan.workspace_bytes());
        float scale = float(a.scale), minus = minus_infinity;
        std::vector<void*> given = {a.q.data, a.k.data, a.v.data, a.o.data, a.lse.data, &scale};
        if (a.causal) given.push_back(&minus);
        run(stream, plan, given, workspace);
    }

    void backward(const Stream& stream, const AttnGrad& a, void* workspace) override {
        CHECK(a.o, ": cuDNN's backward needs the output of the forward");
        const auto tensors = {a.q, a.k, a.v, a.dout, a.o, a.dq, a.dk, a.dv};
        require_supported(refusal_of(a, a.dq.dtype != a.q.dtype, tensors));
        require_supported(backward_refusal(a.q.dim(1), a.k.dim(1)));
        const cudnn::Plan& plan =
            plan_of(key_of(false, a.causal, tensors), [&] { return backward_graph(a); });
        const Scratch scratch(
            {a.q.dim(0), a.q.dim(1), a.k.dim(1), a.q.dim(2), a.k.dim(2), a.q.dim(3)});
        CHECK(plan.workspace_bytes() <= scratch.plan, ": ", plan.workspace_bytes());
        char* const dq_sum = static_cast<char*>(workspace);
        char* const delta = dq_sum + scratch.dq_sum;
        float scale = float(a.scale), one = 1, minus = minus_infinity;
        std::vector<void*> given = {a.q.data,   a.k.data,  a.v.data,  a.dout.data, a.o.data,
                                    a.lse.data, a.dq.data, a.dk.data, a.dv.data,   delta,
                                    dq_sum,     &scale,    &one};
        if (a.causal) given.push_back(&minus);
        run(stream, plan, given, delta + scratch.delta);
    }

private:
    static constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

    template <class Build>
    const cudnn::Plan& plan_of(const Key& key, Build&& build) {
        const auto found = plans_.find(key);
        if (found != plans_.end()) return found->second;
        const char* what = key[0] ? "this forward" : "this backward";
        return plans_.emplace(key, build().plan(device_, what)).first->second;
    }
    void run(const Stream& stream, const cudnn::Plan& plan, const std::vector<void*>& given,
             void* workspace) {
        cudnn::check(cudnnSetStream(handle_, static_cast<cudaStream_t>(stream.handle)),
                     "cudnnSetStream");
        plan.run(handle_, given, workspace);
    }

    cudnn::Descriptor device_;
    cudnnHandle_t handle_ = nullptr;
    std::map<Key, cudnn::Plan> plans_;
};

}  // namespace

int64_t cudnn_workspace_bytes(const AttentionSizes& s) {
    const Scratch scratch(s);
    return scratch.dq_sum + scratch.delta + scratch.plan;
}

std::unique_ptr<CudnnAttention> make_cudnn_attention() {
    const std::string reason = cudnn_attention_refusal(key_tile, 8);
    require(reason.empty(), Exit::usage, "--attention: ", reason);
    return std::make_unique<Cudnn>();
}

}  // namespace torus::cuda

namespace torus {

std::string cudnn_version() { return cuda::version_text(cudnnGetVersion()); }

std::string cudnn_attention_refusal(int64_t T, int64_t D) {
    const size_t version = cudnnGetVersion();
    if (version < cuda::oldest_version)
        return concat("cudnn: this machine has cuDNN ", cuda::version_text(version), ", ",
                      cuda::version_text(cuda::oldest_version),
                      " or later is needed; install that or take --attention flash");
    if (D % 8 || D > 128)
        return concat("cudnn needs a head dim that is a multiple of 8 up to 128, the model has ", D,
                      "; take --attention flash");
    const std::string reason = cuda::backward_refusal(T, T);
    return reason.empty() ? reason : reason + "; take --attention flash";
}

}  // namespace torus
