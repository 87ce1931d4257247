// Two measures of each difference: the largest element's over the largest magnitude of the
// reference's tensor, and the relative L2 norm.
#include "engine/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/eval.h"
#include "engine/setup.h"
#include "kernels/float16.h"

namespace torus {
namespace {

struct Reference {
    std::string dir;
    std::unique_ptr<TensorSource> tensors;
    Config optimizer;  // the run's, with the reference's lr, betas, eps, weight decay and clip
    int64_t B = 0, T = 0, positions = 0;
    Batch batch;
    bool documents = false;
    // Errors of a plain implementation in the run's type, by tensor; 16-bit types only.
    std::map<std::string, double> plain_error;
};

double number(const nlohmann::json& j, const std::string& path, const char* key) {
    require(j.contains(key) && j.at(key).is_number(), Exit::bad_data, path, ": optimizer.", key,
            " is missing or no number; make the reference again with scripts/make_reference.py");
    return j.at(key).get<double>();
}

void read_plain_errors(Reference& r, const nlohmann::json& about, const std::string& path,
                       DType dtype) {
    if (size_of(dtype) > 2) return;
    const std::string key = name_of(dtype);
    require(about.contains("plain_error") && about.at("plain_error").contains(key) &&
                about.at("plain_error").at(key).is_object(),
            Exit::bad_data, path, ": has no plain_error.", key, ", against which ", key,
            " is judged; add it with scripts/make_reference.py --add-errors ", r.dir);
    for (const auto& [name, value] : about.at("plain_error").at(key).items())
        if (value.is_number()) r.plain_error[name] = value.get<double>();
}

void read_about(Reference& r, DType dtype) {
    const std::string path = r.dir + "/reference.json";
    std::ifstream in(path);
    require(in.good(), Exit::missing_input, path, ": cannot be read; --verify needs a reference ",
            "folder as scripts/make_reference.py makes it");
    const nlohmann::json j = nlohmann::json::parse(in, nullptr, false);
    require(j.is_object() && j.contains("optimizer") && j.at("optimizer").is_object(),
            Exit::bad_data, path, ": no JSON object with \"optimizer\"");
    const nlohmann::json& o = j.at("optimizer");
    r.optimizer.lr = number(o, path, "lr");
    r.optimizer.eps = number(o, path, "eps");
    r.optimizer.weight_decay = number(o, path, "weight_decay");
    r.optimizer.grad_clip = number(o, path, "grad_clip");
    require(o.contains("betas") && o.at("betas").is_array() && o.at("betas").size() == 2,
            Exit::bad_data, path, ": optimizer.betas is not a pair");
    r.optimizer.beta1 = o.at("betas")[0].get<double>();
    r.optimizer.beta2 = o.at("betas")[1].get<double>();
    read_plain_errors(r, j, path, dtype);
}

std::vector<int32_t> read_ids(const Reference& r, const char* name, int64_t low, int64_t high) {
    const Tensor t = r.tensors->find(name);
    require(t.dtype == DType::i64 && t.rank() == 2, Exit::bad_data, r.tensors->path(), ": ", name,
            " is ", name_of(t.dtype), " ", t.shape.str(), ", expected int64 (B, T)");
    require(!r.B || t.shape == Shape{r.B, r.T}, Exit::bad_data, r.tensors->path(), ": ", name,
            " has shape ", t.shape.str(), ", input_ids have (", r.B, ", ", r.T, ")");
    std::vector<int32_t> out;
    for (int64_t i = 0; i < t.numel(); ++i) {
        const int64_t value = t.as<const int64_t>()[i];
        require(value >= low && value < high, Exit::bad_data, r.tensors->path(), ": ", name, "[", i,
                "] is ", value, ", allowed are ", low, " to ", high - 1);
        out.push_back(int32_t(value));
    }
    return out;
}

Reference read_reference(const Config& run, const ModelConfig& model, DType dtype) {
    const std::string& dir = run.verify;
    Reference r{
        .dir = dir, .tensors = open_safetensors(dir + "/reference.safetensors"), .optimizer = run};
    // In fp16 a scale that overflows nowhere here: a skipped step could not be compared.
    if (run.loss_scale == "auto" && dtype == DType::f16) r.optimizer.loss_scale = "1024";
    read_about(r, dtype);
    constexpr int64_t most = 1 << 30;
    Batch& b = r.batch;
    b.ids = read_ids(r, "input_ids", 0, model.V);
    r.B = b.B = r.tensors->find("input_ids").dim(0);
    r.T = b.T = r.tensors->find("input_ids").dim(1);
    b.targets = read_ids(r, "targets", -most, model.V);
    b.valid = std::count_if(b.targets.begin(), b.targets.end(), [](int32_t t) { return t >= 0; });
    b.pos.resize(b.ids.size());
    b.first_key.assign(b.ids.size(), 0);
    for (size_t i = 0; i < b.pos.size(); ++i) b.pos[i] = int32_t(int64_t(i) % r.T);
    if (r.tensors->has("position_ids")) b.pos = read_ids(r, "position_ids", 0, most);
    r.positions = 1 + *std::max_element(b.pos.begin(), b.pos.end());
    if (r.tensors->has("document_ids")) {
        r.documents = true;
        const std::vector<int32_t> document = read_ids(r, "document_ids", -most, most);
        for (size_t i = 0; i < document.size(); ++i) {
            const int64_t t = int64_t(i) % r.T;
            b.first_key[i] = t && document[i] == document[i - 1] ? b.first_key[i - 1] : int32_t(t);
        }
    }
    return r;
}

double at(const Tensor& t, int64_t i) {
    switch (t.dtype) {
        case DType::f64: return t.as<const double>()[i];
        case DType::f32: return double(t.as<const float>()[i]);
        case DType::bf16: return double(bf16_to_float(t.as<const uint16_t>()[i]));
        default: return double(f16_to_float(t.as<const uint16_t>()[i]));
    }
}

// How far `ours` is from `theirs` over any number of elements.
struct Difference {
    double largest = 0, scale = 0;  // largest |ours - theirs|, largest |theirs|
    double squares = 0, total = 0;  // sums of (ours - theirs)^2 and theirs^2

    void take(double ours, double theirs) {
        const double d = std::fabs(ours - theirs);
        if (!(d <= largest)) largest = d;  // keeps a NaN
        scale = std::max(scale, std::fabs(theirs));
        squares += d * d;
        total += theirs * theirs;
    }
    double relative_largest() const { return largest / std::max(scale, 1e-300); }
    double relative_l2() const { return std::sqrt(squares / std::max(total, 1e-300)); }
};

// Collects and prints the comparisons. In fp64 every element must agree. Otherwise the bound is on
// the relative L2 norm (where a gradient nearly vanishes, AdamW divides rounding noise by its own
// size, so single weights may differ by more): 1e-5 in fp32; in 16-bit types what a plain
// implementation in the same type gets wrong, times 2 for outputs and 3 for what gradients decide,
// plus a quarter of the type's rounding unit.
class Report {
public:
    Report(DType dtype, const Reference& reference) : dtype_(dtype), reference_(reference) {
        std::printf("  %-36s %12s %12s %9s\n", "quantity", "largest", "rel. L2", "bound");
    }

    // `names`: the tensors of the reference that were compared.
    void add(const std::string& what, const Difference& d, double f64_bound,
             const std::vector<std::string>& names, double factor) {
        const bool f64 = dtype_ == DType::f64;
        const double bound = f64 ? f64_bound : size_of(dtype_) > 2 ? 1e-5 : plain(names, factor);
        const bool ok = (f64 ? d.relative_largest() : d.relative_l2()) <= bound;  // NaN fails
        std::printf("  %-36s %12.3e %12.3e %9.1e  %s\n", what.c_str(), d.relative_largest(),
                    d.relative_l2(), bound, ok ? "ok" : "FAILED");
        passed_ = passed_ && ok;
        ++count_;
    }
    bool passed() const { return passed_ && count_ > 0; }

private:
    double plain(const std::vector<std::string>& names, double factor) const {
        double worst = 0;
        for (const std::string& name : names) {
            const auto it = reference_.plain_error.find(name);
            require(it != reference_.plain_error.end(), Exit::bad_data, reference_.dir,
                    "/reference.json: plain_error has no ", name,
                    "; add it with scripts/make_reference.py --add-errors ", reference_.dir);
            worst = std::max(worst, it->second);
        }
        const double unit = dtype_ == DType::bf16 ? 0x1p-9 : 0x1p-12;
        return factor * worst + unit / 4;
    }

    DType dtype_;
    const Reference& reference_;
    bool passed_ = true;
    int count_ = 0;
};

// Every parameter of `flat`, over `scale`, against prefix + name.
void compare_parameters(Machine& m, const Tensor& flat, double scale, const Reference& r,
                        const std::string& prefix, Report& report) {
    constexpr double limit = 1e-9;
    for_each_host(m.params, m.kernels(), m.stream(), flat, [&](const Param& p, Tensor ours) {
        std::vector<double> theirs(size_t(ours.numel()));
        read_param(*r.tensors, p.spec, p.layer, Tensor(theirs.data(), DType::f64, ours.shape),
                   prefix);
        Difference d;
        for (int64_t i = 0; i < ours.numel(); ++i) d.take(at(ours, i) / scale, theirs[size_t(i)]);
        std::vector<std::string> names;
        for (const HfTensor& t : hf_tensors(p.spec, p.layer)) names.push_back(prefix + t.name);
        report.add(concat(prefix, p.spec.name, ".", p.layer), d, limit, names, 3);
    });
}

void compare_logits(Machine& m, const Reference& r, Report& report) {
    const Tensor logits = m.logits(), theirs = r.tensors->find("logits");
    require(theirs.dtype == DType::f64 && theirs.numel() == logits.numel(), Exit::bad_data,
            r.tensors->path(), ": logits are ", name_of(theirs.dtype), " ", theirs.shape.str(),
            ", expected fp64 (B, T, V) with ", logits.numel(), " elements");
    std::vector<char> raw(size_t(logits.bytes()));
    m.kernels().device().copy(m.stream(), raw.data(), logits.data, logits.bytes());
    m.kernels().device().synchronize(m.stream());
    const Tensor ours(raw.data(), logits.dtype, logits.shape);
    Difference d;
    for (int64_t i = 0; i < ours.numel(); ++i) d.take(at(ours, i), at(theirs, i));
    report.add("logits", d, 1e-10, {"logits"}, 2);
}

double run_batch(Machine& m, const Reference& r, Tensor logits) {
    m.step->begin(m.stream());
    const double valid = double(std::max<int64_t>(1, r.batch.valid));
    m.step->forward_backward(m.stream(), r.batch, 1 / valid, logits);
    return read_f64(m, m.step->loss_sum()) / valid;
}

void compare_steps(Machine& m, const Reference& r, Report& report) {
    const Tensor losses = r.tensors->find("losses"), norms = r.tensors->find("grad_norms");
    require(
        losses.dtype == DType::f64 && norms.dtype == DType::f64 && losses.numel() == norms.numel(),
        Exit::bad_data, r.tensors->path(),
        ": losses and grad_norms must be fp64 and of one length");
    Difference loss, norm;
    for (int64_t i = 0; i < losses.numel(); ++i) {
        loss.take(run_batch(m, r, {}), losses.as<const double>()[i]);
        m.optimizer->step(m.stream(), r.optimizer.lr);
        norm.take(read_f64(m, m.params.control), norms.as<const double>()[i]);
    }
    const std::string steps = concat(losses.numel(), " AdamW steps: ");
    report.add(steps + "losses", loss, 1e-9, {"losses"}, 2);
    report.add(steps + "gradient norms", norm, 1e-9, {"grad_norms"}, 3);
    compare_parameters(m, m.params.master, 1, r, "after.", report);
}

}  // namespace

bool verify(const Config& c) {
    Config config = c;
    config.model = c.verify;
    config.seq_length = 1;
    Setup setup = make_setup(config, 0);
    const DType dtype = setup.kernels->precision().act;
    const Reference r = read_reference(c, setup.model, dtype);
    require(setup.family->rotary() || r.positions <= setup.model.max_T, Exit::bad_data, c.verify,
            ": position ", r.positions - 1, " in a model of ", setup.model.max_T, " positions");
    Machine m(*setup.kernels, setup.model, *setup.family, r.optimizer,
              {.B = r.B,
               .S = r.T,
               .recompute = c.recompute == Recompute::automatic ? Recompute::none : c.recompute,
               .document_mask = r.documents,
               .positions = r.positions,
               .logits = true});
    m.allocate();
    load_weights(m.params, m.kernels(), m.stream(), *setup.weights);

    std::printf("%s\n", setup.summary.c_str());
    Report report(dtype, r);
    Difference loss;
    loss.take(run_batch(m, r, m.logits()), at(r.tensors->find("loss"), 0));
    report.add("loss", loss, 1e-10, {"loss"}, 2);
    compare_logits(m, r, report);
    compare_parameters(m, m.params.gradients, read_f64(m, m.params.loss_scale()), r, "grad.",
                       report);
    compare_steps(m, r, report);
    std::printf("verify %s: %s\n", c.verify.c_str(), report.passed() ? "passed" : "FAILED");
    return report.passed();
}

}  // namespace torus
