// AdamW on two ranges of each component: with weight decay and without.
#include "engine/optimizer.h"

namespace torus {

Optimizer::Optimizer(Kernels& k, Parameters& params, const Config& c)
    : k_(k),
      params_(params),
      beta1_(c.beta1),
      beta2_(c.beta2),
      eps_(c.eps),
      weight_decay_(c.weight_decay),
      grad_clip_(c.grad_clip),
      seed_(c.seed) {}

void Optimizer::plan(Layout& layout) const { layout.add("optimizer/sum_squares", DType::f64, {1}); }

void Optimizer::bind(const Arena& arena) { sum_squares_ = arena["optimizer/sum_squares"]; }

void Optimizer::step(Stream& s, double lr) {
    Parameters& p = params_;
    k_.sum_squares(s, sum_squares_, p.gradients, false);
    k_.grad_control(s, p.control, sum_squares_, grad_clip_, p.loss_scaling());
    for (const Component& c : p.components()) {
        struct Range {
            int64_t begin, end;
            double weight_decay;
        };
        for (const Range& r :
             {Range{c.begin, c.decay_end, weight_decay_}, Range{c.decay_end, c.end, 0.0}}) {
            if (r.begin == r.end) continue;
            auto rows = [&](const Tensor& flat) { return flat.rows(r.begin, r.end - r.begin); };
            k_.adamw(s, {.param = rows(p.weights),
                         .master = rows(p.master),
                         .m = rows(p.m),
                         .v = rows(p.v),
                         .grad = rows(p.gradients),
                         .control = p.control,
                         .lr = lr,
                         .beta1 = beta1_,
                         .beta2 = beta2_,
                         .eps = eps_,
                         .weight_decay = r.weight_decay,
                         .seed = seed_,
                         .offset = uint64_t(r.begin)});
        }
    }
}

}  // namespace torus
