// One rank holds every token: attention is a single kernel call.
#include <cmath>

#include "comm/seq.h"
#include "comm/seq/tensors.h"

namespace torus {
namespace {

class LocalAttention final : public SeqParallel {
public:
    LocalAttention(Kernels& k, const AttnDims& d, std::string name)
        : k_(k), d_(d), name_(std::move(name)) {}

    std::vector<TokenRun> placement() const override { return {{0, d_.S}}; }

    void plan(Layout& device, Layout&) const override {
        device.add(name_ + "/delta", k_.precision().stat, {d_.B, d_.H, d_.S});
    }
    WorkspaceDims workspace() const override {
        return {.rows = d_.B * d_.S,
                .heads = d_.H,
                .kv_heads = d_.Hk,
                .head_dim = d_.D,
                .batch = d_.B,
                .keys = d_.S};
    }
    void bind(const Arena& device, const Arena&) override { delta_ = device[name_ + "/delta"]; }

    void forward(Stream& s, const AttnIn& in) override {
        k_.attention_forward(s, {.q = in.q,
                                 .k = in.k,
                                 .v = in.v,
                                 .o = in.o,
                                 .lse = in.lse,
                                 .first_key = in.first_key,
                                 .scale = scale()});
    }

    void backward(Stream& s, const AttnGradIn& g) override {
        if (!present(g.delta)) k_.attention_delta(s, delta_, g.dout, g.o);
        k_.attention_backward(s, {.q = g.q,
                                  .k = g.k,
                                  .v = g.v,
                                  .dout = g.dout,
                                  .lse = g.lse,
                                  .delta = present(g.delta) ? g.delta : delta_,
                                  .dq = g.dq,
                                  .dk = g.dk,
                                  .dv = g.dv,
                                  .first_key = g.first_key,
                                  .scale = scale(),
                                  .o = g.o});
    }

private:
    double scale() const { return 1.0 / std::sqrt(double(d_.D)); }
    Kernels& k_;
    AttnDims d_;
    std::string name_;
    Tensor delta_;
};

}  // namespace

std::unique_ptr<SeqParallel> make_local_attention(Kernels& k, const AttnDims& d,
                                                  const std::string& name) {
    return std::make_unique<LocalAttention>(k, d, name);
}

}  // namespace torus
