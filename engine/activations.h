// Activations: what each layer keeps from forward to backward, and what is computed again.
//
//   --recompute none            every tensor of every block
//               attention_out   each block's input, and attention's output and lse: backward runs
//               the
//                               norms and matmuls again, never attention
//               full            each block's input alone
//
// What is not kept lives in one set of buffers that all layers share.
#pragma once
#include <vector>

#include "engine/config.h"
#include "model/model.h"

namespace torus {

// Phases of a step for tensor lifetimes (kernels/layout.h).
namespace phase {
inline constexpr int forward = 0, head = 1, backward = 2, sample = 3;
}

class Activations {
public:
    // Without `train` nothing is kept: two alternating inputs and one block set.
    Activations(const ModelConfig&, const Family&, const Precision&, int64_t B, int64_t T,
                Recompute, bool train);

    void plan(Layout&) const;  // owner "activations/"
    void bind(const Arena&);

    Tensor x(int64_t l) const {
        return x_[size_t(train_ ? l : l % 2)];
    }  // (N,C); l = L: the output
    const TensorMap& block(int64_t l) const { return blocks_[size_t(l)]; }
    Tensor dx() const { return dx_; }  // (N,C)

private:
    bool kept(Keep) const;
    std::string slot(const ActSpec&, int64_t l) const;

    int64_t L_, N_, C_;
    DType act_;
    Recompute recompute_;
    bool train_;
    std::vector<ActSpec> specs_;
    std::vector<Tensor> x_;
    std::vector<TensorMap> blocks_;
    Tensor dx_;
};

}  // namespace torus
