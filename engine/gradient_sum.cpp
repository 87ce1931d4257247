#include "engine/gradient_sum.h"

#include "comm/exchange_sum.h"

namespace torus {

static constexpr int64_t others_bytes = int64_t(32) << 20;  // of other ranks' parts at a time

GradientSum::GradientSum(Kernels& k, Parameters& params, Comm* all, bool by_exchange)
    : k_(k), params_(params), all_(all), by_exchange_(all && by_exchange) {
    if (!all_) return;
    Device& device = k_.device();
    stream_ = device.make_stream(/*high_priority=*/true);
    ready_ = device.make_event();
    done_ = device.make_event();
}

GradientSum::~GradientSum() {
    if (!all_) return;
    Device& device = k_.device();
    device.destroy(done_);
    device.destroy(ready_);
    device.destroy(stream_);
}

void GradientSum::plan(Layout& device) const {
    if (!by_exchange_) return;
    const DType type = k_.precision().grad;
    device.add("gradients/others", type, {others_bytes / size_of(type)});
}

void GradientSum::bind(const Arena& device) {
    if (by_exchange_) others_ = device["gradients/others"];
}

void GradientSum::add(Stream& compute, const Component& c) {
    if (!all_ || c.begin == c.end) return;
    k_.device().record(ready_, compute);
    k_.device().wait(stream_, ready_);
    const Tensor x = params_.gradients.rows(c.begin, c.end - c.begin);
    if (!by_exchange_) return all_->all_reduce(stream_, x);
    sum_by_exchange(k_, stream_, *all_, x, others_);
}

void GradientSum::finish(Stream& compute) {
    if (!all_) return;
    k_.device().record(done_, stream_);
    k_.device().wait(compute, done_);
}

}  // namespace torus
