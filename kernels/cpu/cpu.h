// The CPU backend: CpuKernels<float> and CpuKernels<double>, one .cpp file per family of ops, under
// the names of the CUDA files. All tensors of floats are of type T (activations, statistics,
// gradients and masters alike). Work is done at the call; the stream's workspace is not used.
// Every sum has a fixed order: threads share out independent outputs, never the terms of one sum.
#pragma once
#include <string>

#include "kernels/kernels.h"

namespace torus {

class CpuDevice : public Device {
public:
    std::string name() const override;
    int64_t total_bytes() const override;
    int64_t free_bytes() const override;
    void* allocate(Memory, int64_t bytes) override;
    void release(Memory, void*, int64_t bytes) noexcept override;
    Stream make_stream(bool high_priority) override;
    void destroy(Stream&) noexcept override;
    Event make_event() override;
    void destroy(Event&) noexcept override;
    void record(Event&, Stream&) override;
    void wait(Stream&, Event&) override;
    double elapsed_ms(Event& from, Event& to) override;
    void copy(Stream&, void* dst, const void* src, int64_t bytes) override;
    void set_bytes(Stream&, void* dst, uint8_t value, int64_t bytes) override;
    void synchronize(Stream&) override;
    void synchronize(Event&) override;
};

template <class T>
constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;

// Checks one argument of an op: there, of this type and shape, rows dense and, unless pitched,
// contiguous.
void expect(const char* op, const char* name, const Tensor& t, DType type, const Shape& shape,
            bool pitched = false);
// The same for an argument whose own shape is the measure.
void expect_rank(const char* op, const char* name, const Tensor& t, DType type, int rank,
                 bool pitched = false);
// All entries of an index tensor i32 (n) lie in [0, limit).
void expect_indices(const char* op, const char* name, const Tensor& t, int64_t limit);

template <class T>
class CpuKernels : public Kernels {
public:
    explicit CpuKernels(CpuOptions options);
    Device& device() override { return device_; }
    const Precision& precision() const override { return precision_; }
    int64_t workspace_bytes(const WorkspaceDims&) const override { return 0; }

    void fill(Stream&, Tensor x, double value) override;
    void cast(Stream&, Tensor dst, Tensor src) override;
    void cast_stochastic(Stream&, Tensor dst, Tensor src, uint64_t seed, uint64_t stream_id,
                         uint64_t offset) override;
    void add(Stream&, Tensor out, Tensor a, Tensor b) override;
    void scale(Stream&, Tensor x, double factor) override;
    void embedding_forward(Stream&, Tensor out, Tensor ids, Tensor wte, Tensor pos,
                           Tensor wpe) override;
    void embedding_backward(Stream&, Tensor dwte, Tensor dwpe, Tensor dout, Tensor ids,
                            Tensor pos) override;
    void layernorm_forward(Stream&, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor w,
                           Tensor b, double eps) override;
    void layernorm_backward(Stream&, Tensor dx, Tensor dw, Tensor db, Tensor dout, Tensor x,
                            Tensor w, Tensor mean, Tensor rstd) override;
    void rmsnorm_forward(Stream&, Tensor out, Tensor rstd, Tensor x, Tensor w, double eps) override;
    void rmsnorm_backward(Stream&, Tensor dx, Tensor dw, Tensor dout, Tensor x, Tensor w,
                          Tensor rstd) override;
    void matmul_forward(Stream&, Tensor out, Tensor x, Tensor w, Tensor bias,
                        Tensor residual) override;
    void matmul_backward_input(Stream&, Tensor dx, Tensor dout, Tensor w, bool accumulate) override;
    void matmul_backward_weight(Stream&, Tensor dw, Tensor db, Tensor dout, Tensor x,
                                bool accumulate) override;
    void gelu_forward(Stream&, Tensor out, Tensor x) override;
    void gelu_backward(Stream&, Tensor dx, Tensor dout, Tensor x) override;
    void swiglu_forward(Stream&, Tensor out, Tensor gate_up) override;
    void swiglu_backward(Stream&, Tensor dgate_up, Tensor dout, Tensor gate_up) override;
    void rope_forward(Stream&, Tensor x, Tensor pos, Tensor table) override;
    void rope_backward(Stream&, Tensor dx, Tensor pos, Tensor table) override;
    void attention_forward(Stream&, const Attn&) override;
    void attention_delta(Stream&, Tensor delta, Tensor dout, Tensor o) override;
    void attention_backward(Stream&, const AttnGrad&) override;
    void attention_merge(Stream&, Tensor o, Tensor lse, Tensor o2, Tensor lse2) override;
    void classifier(Stream&, Tensor loss, Tensor logits, Tensor dlogits, Tensor targets, int64_t V,
                    double dloss, Tensor loss_scale) override;
    void sum(Stream&, Tensor out, Tensor x, bool accumulate) override;
    void sum_squares(Stream&, Tensor out, Tensor x, bool accumulate) override;
    void grad_control(Stream&, Tensor control, Tensor sum_squares, double max_norm,
                      const LossScale&) override;
    void adamw(Stream&, const AdamW&) override;

private:
    static constexpr DType type = dtype_of<T>;
    CpuOptions options_;
    Precision precision_;
    CpuDevice device_;
};

// Every op is defined for both types in its own file.
#define INSTANTIATE(op, args)                 \
    template void CpuKernels<float>::op args; \
    template void CpuKernels<double>::op args

}  // namespace torus
