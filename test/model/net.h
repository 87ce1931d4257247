// A whole model in fp64 on the CPU, driven by hand: embed, blocks, head and the backwards, with
// local attention. The engine does the same with plans, types and devices; here every tensor is in
// reach.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/seq.h"
#include "kernels/layout.h"
#include "model/io.h"
#include "model/model.h"

namespace torus {

class Net {
public:
    struct Options {
        bool recompute = false;  // blocks share one set of `Keep::block` tensors
        bool first_key = false;
        int64_t head_chunk = 0;  // 0 = as Head::plan chooses
    };
    Net(const ModelConfig&, int64_t B, int64_t T, Options);
    Net(const ModelConfig& c, int64_t B, int64_t T) : Net(c, B, T, Options{}) {}

    void randomize(uint64_t seed);           // weights: large enough for gradients of order one
    void load(const TensorSource&);          // weights
    double loss();                           // forward only: sum of token losses * dloss
    double loss_and_gradients();             // clears the gradients first
    std::vector<std::string> names() const;  // "embed/wte", "1/qkv_w", "head/lnf_w"
    const ParamSpec& spec(const std::string& name) const;
    int64_t layer_of(const std::string& name) const;  // 0 for embed and head
    Tensor weight(const std::string& name) const { return weights_[name]; }
    Tensor gradient(const std::string& name) const { return gradients_[name]; }
    Tensor ids() const { return state_["ids"]; }              // i32 (N)
    Tensor targets() const { return state_["targets"]; }      // i32 (N)
    Tensor first_key() const { return state_["first_key"]; }  // i32 (B,T)
    Tensor logits() const { return state_["logits"]; }        // (N,V), written by loss()
    Tensor losses() const { return state_["losses"]; }        // (N)
    Tensor dx() const { return state_["dx"]; }                // (N,C), at the embedding's output

    ModelConfig config;
    double dloss = 1;

private:
    struct Component {
        std::string name;
        std::vector<ParamSpec> specs;
        TensorMap w, dw;
    };
    void plan(Layout&) const;
    Ctx context(bool recompute);
    void forward();
    void attention(int64_t l);
    void head(bool backward);
    void backward();

    const Family& family_;
    int64_t B_, T_;
    Options options_;
    std::unique_ptr<Kernels> k_;
    Stream stream_;
    Buffer workspace_;
    std::unique_ptr<SeqParallel> seq_;
    std::vector<Component> components_;  // embed, layers, head
    std::vector<TensorMap> acts_;
    Arena weights_, gradients_, state_, pinned_;
};

// Largest |a - b| over the largest |b|; both f64.
double relative_difference(Tensor a, Tensor b);
bool same_bits(Tensor a, Tensor b);

}  // namespace torus
