// GradientSum: the ranks' gradients added up component by component, on a stream of its own, while
// backward still computes the components below. Every rank adds the same components in the same
// order.
#pragma once
#include "comm/comm.h"
#include "engine/params.h"

namespace torus {

class GradientSum {
public:
    // `all`: the ranks whose gradients add up; null = this one alone, and nothing is ever queued.
    // by_exchange: by exchanges and additions (comm/exchange_sum.h), else by all_reduce.
    GradientSum(Kernels&, Parameters&, Comm* all, bool by_exchange);
    ~GradientSum();
    GradientSum(const GradientSum&) = delete;
    GradientSum& operator=(const GradientSum&) = delete;

    void plan(Layout& device) const;
    void bind(const Arena& device);

    // The work queued on `compute` so far has completed this component's gradients.
    void add(Stream& compute, const Component&);
    // What is queued on `compute` from now on sees all sums.
    void finish(Stream& compute);

private:
    Kernels& k_;
    Parameters& params_;
    Comm* all_;
    bool by_exchange_;
    Stream stream_;
    Event ready_, done_;
    Tensor others_;  // by exchange: parts of other ranks' gradients
};

}  // namespace torus
