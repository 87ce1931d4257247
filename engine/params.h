// Parameters: where every weight, gradient and optimizer moment lives. One flat range of elements
// holds all tensors, component by component (embed, layer 0 .. L-1, head), those with weight decay
// first in each; gaps of alignment hold zeros and stay zero. The same element offset addresses a
// parameter in every one of the five arrays, so the optimizer runs over ranges and a shard is a
// range.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/io.h"
#include "model/model.h"

namespace torus {

struct Param {
    ParamSpec spec;
    int64_t layer = 0;   // 0 for embed and head
    int64_t offset = 0;  // elements into the flat range
};

struct Component {
    std::string name;  // "embed", "layer 3", "head"
    std::vector<Param> params;
    int64_t begin = 0, decay_end = 0, end = 0;  // elements; [begin, decay_end) has weight decay
    TensorMap w, dw;  // by short name; the head's also hold "wte" when tied
};

class Parameters {
public:
    Parameters(const ModelConfig&, const Family&, const Precision&, const LossScale& = {});

    // Owners "weights/", "gradients/", "optimizer/". A model that is only run forward plans
    // weights.
    void plan(Layout&, bool train) const;
    void bind(const Arena&, bool train);

    Component& embed() { return components_.front(); }
    Component& layer(int64_t l) { return components_[size_t(l + 1)]; }
    Component& head() { return components_.back(); }
    std::vector<Component>& components() { return components_; }
    const std::vector<Component>& components() const { return components_; }
    int64_t elements() const { return elements_; }

    // Flat arrays of elements() each; master is weights' own memory when their types agree.
    Tensor weights, gradients, master, m, v;
    Tensor control;             // f64 (Control::size)
    Tensor loss_scale() const;  // of control, f64 (1); absent when only run forward
    const LossScale& loss_scaling() const { return loss_scaling_; }

    // Zeroes the gradients that a backward pass only adds to: all but those of the layers' and the
    // head's matrices, which their products overwrite. (A tied head adds to the embedding's.)
    void clear_sums(Kernels&, Stream&);
    // A parameter's part of one of the arrays.
    Tensor part(const Tensor& flat, const Param& p) const;

private:
    Precision precision_;
    LossScale loss_scaling_;
    bool tied_;
    std::vector<Component> components_;
    int64_t elements_ = 0;
};

// Random weights by the specs' rules: a function of (seed, tensor, element) alone. Clears the
// optimizer's state.
void initialize(Parameters&, Kernels&, Stream&, uint64_t seed);
// Weights from files in the Hugging Face layout; clears the optimizer's state.
void load_weights(Parameters&, Kernels&, Stream&, const TensorSource&);
// Moments and control of a checkpoint's optimizer.safetensors.
void load_optimizer(Parameters&, Kernels&, Stream&, const TensorSource&);
// Working weights from master by rounding to nearest; nothing to do when they are the same memory.
void publish_weights(Parameters&, Kernels&, Stream&);

// Calls `visit` with every parameter and its host copy of `flat`, one at a time.
void for_each_host(const Parameters&, Kernels&, Stream&, const Tensor& flat,
                   const std::function<void(const Param&, Tensor host)>& visit);

}  // namespace torus
