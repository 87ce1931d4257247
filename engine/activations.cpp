// Which activation goes into which buffer; see activations.h for the levels.
#include "engine/activations.h"

#include <algorithm>

#include "kernels/check.h"

namespace torus {

Recomputation Recomputation::step(int64_t number, int64_t L) {
    if (number <= 0) return Recompute::none;
    if (number <= L) return {Recompute::attention_out, number};
    return {Recompute::full, number - L};
}

Recompute Recomputation::of(int64_t layer) const {
    if (layer < layers || most == Recompute::none) return most;
    return most == Recompute::full ? Recompute::attention_out : Recompute::none;
}

std::string Recomputation::str(int64_t L) const {
    if (most == Recompute::none) return "nothing";
    const std::string name = most == Recompute::full ? "full" : "attention_out";
    if (layers >= L) return concat(name, " in all layers");
    const std::string rest = most == Recompute::full ? ", attention_out in the others" : "";
    return concat(name, " in ", layers, " of ", L, " layers", rest);
}

Activations::Activations(const ModelConfig& m, const Family& family, const Precision& precision,
                         int64_t B, int64_t T, const Recomputation& recompute, bool train)
    : L_(m.L),
      N_(B * T),
      C_(m.C),
      act_(precision.act),
      recompute_(recompute),
      train_(train),
      specs_(family.block(m, precision, B, T)) {
    CHECK(recompute.most != Recompute::automatic);
}

bool Activations::kept(Keep keep, int64_t l) const {
    if (!train_ || keep == Keep::scratch) return false;
    if (keep == Keep::attention) return recompute_.of(l) != Recompute::full;
    return recompute_.of(l) == Recompute::none;
}

std::string Activations::slot(const ActSpec& spec, int64_t l) const {
    const std::string owner = kept(spec.keep, l) ? "l" + std::to_string(l) : "shared";
    return "activations/" + owner + "." + spec.name;
}

void Activations::plan(Layout& layout) const {
    const Life step{phase::forward, phase::backward}, forward{phase::forward, phase::forward};
    const Life backward{phase::backward, phase::backward};
    const int64_t inputs = train_ ? L_ + 1 : 2;
    for (int64_t l = 0; l < inputs; ++l)
        layout.add("activations/x" + std::to_string(l), act_, {N_, C_}, step);
    if (train_) layout.add("activations/dx", act_, {N_, C_}, {phase::head, phase::backward});
    for (const ActSpec& spec : specs_) {
        if (spec.keep == Keep::scratch) {  // gradients, of use in backward only
            if (train_) layout.add(slot(spec, 0), spec.dtype, spec.shape, backward);
            continue;
        }
        std::string last;
        for (int64_t l = L_ - 1; l >= 0; --l) {  // layers that share a slot are neighbours
            const std::string name = slot(spec, l);
            if (name != last) layout.add(name, spec.dtype, spec.shape, train_ ? step : forward);
            last = name;
        }
    }
}

void Activations::bind(const Arena& arena) {
    x_.clear();
    blocks_.assign(size_t(L_), {});
    for (int64_t l = 0; l < (train_ ? L_ + 1 : 2); ++l)
        x_.push_back(arena["activations/x" + std::to_string(l)]);
    if (train_) dx_ = arena["activations/dx"];
    for (int64_t l = 0; l < L_; ++l)
        for (const ActSpec& spec : specs_)
            if (train_ || spec.keep != Keep::scratch)
                blocks_[size_t(l)].set(spec.name, arena[slot(spec, l)]);
}

}  // namespace torus
