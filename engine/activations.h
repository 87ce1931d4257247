// Activations: what each layer keeps from forward to backward, and what is computed again.
//
//   --recompute none            every tensor of every block
//               attention_out   each block's input, and attention's output and lse: backward runs
//                               the norms and matmuls again, never attention
//               full            each block's input alone
//               auto            the least of these, layer by layer, that fits
//
// What is not kept lives in one set of buffers that all layers share.
#pragma once
#include <string>
#include <vector>

#include "engine/config.h"
#include "model/model.h"

namespace torus {

// Phases of a step for tensor lifetimes (kernels/layout.h).
namespace phase {
inline constexpr int forward = 0, head = 1, backward = 2, sample = 3;
}

// How much of each layer is computed again: `most` in the first `layers`, one level less in the
// others. In steps from 0, nothing, over attention_out in more and more of the L layers, to 2 L,
// full in all of them.
struct Recomputation {
    Recompute most = Recompute::none;
    int64_t layers = INT64_MAX;

    Recomputation(Recompute level = Recompute::none, int64_t in_layers = INT64_MAX)
        : most(level), layers(in_layers) {}
    static Recomputation step(int64_t number, int64_t L);

    Recompute of(int64_t layer) const;
    std::string str(int64_t L) const;  // "attention_out in 7 of 24 layers"
};

class Activations {
public:
    // Without `train` nothing is kept: two alternating inputs and one block set.
    Activations(const ModelConfig&, const Family&, const Precision&, int64_t B, int64_t T,
                const Recomputation&, bool train);

    void plan(Layout&) const;  // owner "activations/"
    void bind(const Arena&);

    Tensor x(int64_t l) const {
        return x_[size_t(train_ ? l : l % 2)];
    }  // (N,C); l = L: the output
    const TensorMap& block(int64_t l) const { return blocks_[size_t(l)]; }
    Tensor dx() const { return dx_; }  // (N,C)

private:
    bool kept(Keep, int64_t l) const;
    std::string slot(const ActSpec&, int64_t l) const;

    int64_t L_, N_, C_;
    DType act_;
    Recomputation recompute_;
    bool train_;
    std::vector<ActSpec> specs_;
    std::vector<Tensor> x_;
    std::vector<TensorMap> blocks_;
    Tensor dx_;
};

}  // namespace torus
