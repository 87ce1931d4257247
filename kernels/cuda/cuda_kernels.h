// The CUDA backend's classes. Each op is defined in the file of its family; kernels.h says what it
// computes. Activations are bf16, fp16 or fp32, arithmetic and sums are fp32 (fp64 for norms of
// whole gradients), and every sum has a fixed order.
#pragma once
#include <memory>
#include <string>

#include "kernels/kernels.h"

namespace torus::cuda {

class CudaDevice final : public Device {
public:
    explicit CudaDevice(int index);
    std::string name() const override { return name_; }
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
    bool records() const override { return true; }
    void begin_recording(Stream&) override;
    Recording end_recording(Stream&) override;
    void replay(Stream&, const Recording&) override;
    void destroy(Recording&) noexcept override;
    void push_range(const char* name, int64_t number) override;
    void pop_range() override;
    void start_profiler() override;
    void stop_profiler() override;

private:
    void use() const;  // makes this the calling thread's current device
    int index_;
    std::string name_;
};

class Matmul;  // matmul.cu: the cuBLASLt handle and its plans
struct CudnnAttention;

class CudaKernels final : public Kernels {
public:
    CudaKernels(DType dtype, std::unique_ptr<Device> device);
    ~CudaKernels() override;
    Device& device() override { return *device_; }
    const Precision& precision() const override { return precision_; }
    int64_t workspace_bytes(const WorkspaceDims&) const override;
    void tune_matmul(const std::string& file) override;
    void allow_any_order() override { deterministic_ = false; }
    void use_cudnn_attention();  // see cudnn_attention.h
    // False: mma.sync attention on Hopper too, so that tests can check it there.
    void use_hopper_attention(bool on) { hopper_attention_ = on; }

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
    void matmul_gelu_forward(Stream&, Tensor out, Tensor pre, Tensor x, Tensor w,
                             Tensor bias) override;
    void matmul_gelu_backward_input(Stream&, Tensor dpre, Tensor dout, Tensor w,
                                    Tensor pre) override;
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
    int64_t attention_workspace(const WorkspaceDims&) const;

    std::unique_ptr<Device> device_;
    Precision precision_;
    std::unique_ptr<Matmul> matmul_;
    std::shared_ptr<CudnnAttention> cudnn_;  // null: our own attention
    bool hopper_attention_ = true;
    bool deterministic_ = true;
};

// Bytes of Stream::workspace that each family needs; workspace_bytes takes the largest.
int64_t embedding_workspace(const WorkspaceDims&);
int64_t norm_workspace(const WorkspaceDims&);
int64_t matmul_workspace();
int64_t bias_gradient_workspace(const WorkspaceDims&);
int64_t reduce_workspace();

}  // namespace torus::cuda
