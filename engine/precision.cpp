#include "engine/precision.h"

#include <charconv>
#include <cmath>

#include "kernels/text.h"

namespace torus {
namespace {

constexpr double first_scale = 65536;  // of a scale that moves; PyTorch's

}  // namespace

Precision run_precision(const Config& c, const Precision& backend) {
    Precision p = backend;
    require(c.moments == "auto" || backend.moments == DType::f32, Exit::usage,
            "--moments: ", c.moments, " does not go with --dtype ", name_of(backend.act),
            ", which keeps everything in fp64; leave it out");
    if (c.moments == "bf16") p.moments = DType::bf16;
    require(c.master_weights || backend.act == DType::bf16, Exit::usage,
            "--master-weights: off goes with --dtype bf16 only, this run's is ",
            name_of(backend.act), "; leave it out");
    if (!c.master_weights) p.master = p.act;
    return p;
}

bool is_loss_scale(double x) {
    int exponent = 0;
    return x >= LossScale::lowest && x <= LossScale::highest && std::frexp(x, &exponent) == 0.5;
}

LossScale run_loss_scale(const Config& c, DType act) {
    const std::string& text = c.loss_scale;
    if (text == "dynamic" || (text == "auto" && act == DType::f16))
        return {.initial = first_scale, .window = c.loss_scale_window};
    if (text == "auto") return {};
    double value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    require(stop == end && error == std::errc() && is_loss_scale(value), Exit::usage,
            "--loss-scale: ", excerpt(text), " is not allowed; give auto, dynamic, or a power ",
            "of two from ", int64_t(LossScale::lowest), " to ", int64_t(LossScale::highest));
    return {.initial = value};
}

std::string state_types(const Precision& p) {
    return concat(name_of(p.master),
                  p.moments == p.master ? "" : concat(", moments ", name_of(p.moments)));
}

}  // namespace torus
