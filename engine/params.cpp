// The flat parameter range and how it is filled: at random, from files, from a checkpoint.
#include "engine/params.h"

#include <algorithm>

#include "engine/precision.h"
#include "kernels/float16.h"
#include "kernels/rng.h"

namespace torus {
namespace {

// 128 elements: 256 bytes in 16-bit types, so that every tensor starts on a cache line pair.
constexpr int64_t element_alignment = 128;

int64_t aligned(int64_t n) {
    return (n + element_alignment - 1) / element_alignment * element_alignment;
}

Tensor range(const Tensor& flat, int64_t begin, int64_t count) { return flat.rows(begin, count); }

// Runs `make` for every parameter on a host tensor and copies the result into `flat`.
void upload(Parameters& p, Kernels& k, Stream& s, const Tensor& flat,
            const std::function<void(const Param&, Tensor)>& make) {
    std::vector<char> host;
    for (Component& c : p.components()) {
        for (const Param& param : c.params) {
            const Tensor device = p.part(flat, param);
            host.resize(size_t(device.bytes()));
            const Tensor staged(host.data(), device.dtype, device.shape);
            make(param, staged);
            k.device().copy(s, device.data, staged.data, staged.bytes());
            k.device().synchronize(s);  // `host` is used again for the next one
        }
    }
}

void clear_state(Parameters& p, Kernels& k, Stream& s) {
    if (!p.m) return;
    k.fill(s, p.m, 0);
    k.fill(s, p.v, 0);
    k.fill(s, p.control, 0);
    k.fill(s, p.loss_scale(), p.loss_scaling().initial);
}

// A file from before the loss scale has the first four numbers. A scale that stays is the flag's,
// not the file's.
void load_control(Parameters& p, Kernels& k, Stream& s, const TensorSource& source) {
    constexpr int64_t without_scale = Control::skipped + 1;
    const Tensor saved = source.find("control");
    const int64_t n = saved.numel();
    require(saved.dtype == DType::f64 && (n == Control::size || n == without_scale), Exit::bad_data,
            source.path(), ": control is ", name_of(saved.dtype), " ", saved.shape.str(),
            ", expected fp64 (", int(Control::size),
            "); this is not an optimizer file of this program");
    std::vector<double> control(Control::size);
    std::copy_n(saved.as<const double>(), n, control.begin());
    for (int i : {Control::applied, Control::skipped, Control::skipped_now, Control::good})
        require(control[size_t(i)] >= 0 && control[size_t(i)] < 0x1p53, Exit::bad_data,
                source.path(), ": control[", i, "] is ", control[size_t(i)],
                ", expected a count; the file is damaged");
    double& scale = control[Control::loss_scale];
    require(n == without_scale || is_loss_scale(scale), Exit::bad_data, source.path(),
            ": the loss scale is ", scale, ", expected a power of two; the file is damaged");
    if (n == without_scale || p.loss_scaling().window == 0) scale = p.loss_scaling().initial;
    k.device().copy(s, p.control.data, control.data(), p.control.bytes());
    k.device().synchronize(s);
}

void fill_random(const Param& param, Tensor host, uint64_t seed, uint64_t stream) {
    const int64_t n = host.numel();
    auto put = [&](int64_t i, double x) {
        switch (host.dtype) {
            case DType::f64: host.as<double>()[i] = x; return;
            case DType::f32: host.as<float>()[i] = float(x); return;
            default: host.as<uint16_t>()[i] = float_to_bf16(float(x)); return;
        }
    };
    CHECK(host.dtype == DType::f64 || host.dtype == DType::f32 || host.dtype == DType::bf16);
    switch (param.spec.init) {
        case Init::zeros:
            for (int64_t i = 0; i < n; ++i) put(i, 0);
            return;
        case Init::ones:
            for (int64_t i = 0; i < n; ++i) put(i, 1);
            return;
        case Init::normal: break;
    }
    int64_t rows = 0;  // padded rows are in no part and stay zero
    for (const HfPart& part : param.spec.hf) rows += part.rows;
    const int64_t filled = rows * (n / param.spec.shape[0]);
#pragma omp parallel for
    for (int64_t i = 0; i < n; ++i)
        put(i, i < filled ? param.spec.std * random_normal(seed, stream, uint64_t(i)) : 0.0);
}

}  // namespace

Parameters::Parameters(const ModelConfig& model, const Family& family, const Precision& precision,
                       const LossScale& loss_scaling)
    : precision_(precision), loss_scaling_(loss_scaling), tied_(model.tied) {
    const ParamTable table = family.params(model);
    auto add = [&](const std::string& name, const std::vector<ParamSpec>& specs, int64_t l) {
        Component c;
        c.name = name;
        c.begin = elements_;
        for (bool decay : {true, false}) {
            for (const ParamSpec& spec : specs) {
                if (spec.decay != decay) continue;
                c.params.push_back({spec, l, elements_});
                elements_ += aligned(spec.shape.numel());
            }
            if (decay) c.decay_end = elements_;
        }
        c.end = elements_;
        components_.push_back(std::move(c));
    };
    add("embed", table.embed, 0);
    for (int64_t l = 0; l < model.L; ++l) add("layer " + std::to_string(l), table.layer, l);
    add("head", table.head, 0);
}

void Parameters::plan(Layout& layout, bool train) const {
    layout.add("weights/all", precision_.act, {elements_});
    if (precision_.act != precision_.master)
        layout.add("optimizer/master", precision_.master, {elements_});
    if (!train) return;
    layout.add("gradients/all", precision_.grad, {elements_});
    layout.add("optimizer/m", precision_.moments, {elements_});
    layout.add("optimizer/v", precision_.moments, {elements_});
    layout.add("optimizer/control", DType::f64, {Control::size});
}

void Parameters::bind(const Arena& arena, bool train) {
    weights = arena["weights/all"];
    master = precision_.act == precision_.master ? weights : arena["optimizer/master"];
    if (train) {
        gradients = arena["gradients/all"];
        m = arena["optimizer/m"];
        v = arena["optimizer/v"];
        control = arena["optimizer/control"];
    }
    for (Component& c : components_) {
        c.w = c.dw = {};
        for (const Param& p : c.params) {
            c.w.set(p.spec.name, part(weights, p));
            if (train) c.dw.set(p.spec.name, part(gradients, p));
        }
    }
    if (tied_) {
        head().w.set("wte", embed().w["wte"]);
        if (train) head().dw.set("wte", embed().dw["wte"]);
    }
}

void Parameters::clear_sums(Kernels& k, Stream& s) {
    for (const Component& c : components_) {
        const int64_t begin = &c == &components_.front() ? c.begin : c.decay_end;
        k.fill(s, gradients.rows(begin, c.end - begin), 0);
    }
}

Tensor Parameters::part(const Tensor& flat, const Param& p) const {
    return range(flat, p.offset, p.spec.shape.numel()).view(p.spec.shape);
}

Tensor Parameters::loss_scale() const {
    return control ? control.rows(Control::loss_scale, 1) : Tensor{};
}

void initialize(Parameters& p, Kernels& k, Stream& s, uint64_t seed) {
    k.fill(s, p.master, 0);
    uint64_t tensor = 0;
    upload(p, k, s, p.master,
           [&](const Param& param, Tensor host) { fill_random(param, host, seed, tensor++); });
    publish_weights(p, k, s);
    clear_state(p, k, s);
}

void load_weights(Parameters& p, Kernels& k, Stream& s, const TensorSource& source) {
    k.fill(s, p.master, 0);
    upload(p, k, s, p.master, [&](const Param& param, Tensor host) {
        read_param(source, param.spec, param.layer, host);
    });
    publish_weights(p, k, s);
    clear_state(p, k, s);
}

void load_optimizer(Parameters& p, Kernels& k, Stream& s, const TensorSource& source) {
    clear_state(p, k, s);
    for (const auto& [prefix, flat] : {std::pair<const char*, Tensor>{"m.", p.m}, {"v.", p.v}})
        upload(p, k, s, flat, [&, prefix = prefix](const Param& param, Tensor host) {
            read_param(source, param.spec, param.layer, host, prefix);
        });
    load_control(p, k, s, source);
}

void publish_weights(Parameters& p, Kernels& k, Stream& s) {
    if (p.weights.data != p.master.data) k.cast(s, p.weights, p.master);
}

void for_each_host(const Parameters& p, Kernels& k, Stream& s, const Tensor& flat,
                   const std::function<void(const Param&, Tensor)>& visit) {
    std::vector<char> host;
    for (const Component& c : p.components()) {
        for (const Param& param : c.params) {
            const Tensor device = p.part(flat, param);
            host.resize(size_t(device.bytes()));
            k.device().copy(s, host.data(), device.data, device.bytes());
            k.device().synchronize(s);
            visit(param, Tensor(host.data(), device.dtype, device.shape));
        }
    }
}

}  // namespace torus
