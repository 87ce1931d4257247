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
    GradientSum(Kernels&, Parameters&, Comm* all);
    ~GradientSum();
    GradientSum(const GradientSum&) = delete;
    GradientSum& operator=(const GradientSum&) = delete;

    // The work queued on `compute` so far has completed this component's gradients.
    void add(Stream& compute, const Component&);
    // What is queued on `compute` from now on sees all sums.
    void finish(Stream& compute);

private:
    Device& device_;
    Parameters& params_;
    Comm* all_;
    Stream stream_;
    Event ready_, done_;
};

}  // namespace torus
