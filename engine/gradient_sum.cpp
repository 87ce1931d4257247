#include "engine/gradient_sum.h"

namespace torus {

GradientSum::GradientSum(Kernels& k, Parameters& params, Comm* all)
    : device_(k.device()), params_(params), all_(all) {
    if (!all_) return;
    stream_ = device_.make_stream(/*high_priority=*/true);
    ready_ = device_.make_event();
    done_ = device_.make_event();
}

GradientSum::~GradientSum() {
    if (!all_) return;
    device_.destroy(done_);
    device_.destroy(ready_);
    device_.destroy(stream_);
}

void GradientSum::add(Stream& compute, const Component& c) {
    if (!all_ || c.begin == c.end) return;
    device_.record(ready_, compute);
    device_.wait(stream_, ready_);
    all_->all_reduce(stream_, params_.gradients.rows(c.begin, c.end - c.begin));
}

void GradientSum::finish(Stream& compute) {
    if (!all_) return;
    device_.record(done_, stream_);
    device_.wait(compute, done_);
}

}  // namespace torus
