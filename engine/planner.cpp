// The plan is the union of the layouts that each part of the run declares.
#include "engine/planner.h"

#include <algorithm>
#include <iomanip>

#include "engine/log.h"
#include "engine/precision.h"

namespace torus {
namespace {

WorkspaceDims larger(const WorkspaceDims& a, const WorkspaceDims& b) {
    return {.rows = std::max(a.rows, b.rows),
            .channels = std::max(a.channels, b.channels),
            .vocab = std::max(a.vocab, b.vocab),
            .features = std::max(a.features, b.features),
            .heads = std::max(a.heads, b.heads),
            .kv_heads = std::max(a.kv_heads, b.kv_heads),
            .head_dim = std::max(a.head_dim, b.head_dim),
            .batch = std::max(a.batch, b.batch),
            .keys = std::max(a.keys, b.keys)};
}

}  // namespace

Machine::Machine(Kernels& k, const ModelConfig& model, const Family& family, const Config& config,
                 const Options& o)
    : params(model, family, run_precision(config, k.precision()),
             run_loss_scale(config, k.precision().act)),
      k_(k),
      model_(model),
      family_(family),
      config_(config),
      o_(o) {
    params.plan(device_, o.train);
    WorkspaceDims dims;
    if (o.step) {
        const AttnDims attention{.B = o.B, .S = o.S, .H = model.H, .Hk = model.Hk, .D = model.D};
        const bool shared = o.mesh && o.mesh->shape.sp() > 1;
        CHECK(!o.record || k.device().records(), ": ", k.device().name(), " does not record");
        require(!o.record || !shared, Exit::usage, "--cuda-graph: this run shares each sequence ",
                "among ", shared ? o.mesh->shape.sp() : 1, " ranks, whose exchanges depend on the ",
                "batch; leave it out or give --parallel-mode data_parallel");
        seq_ = shared ? make_seq_parallel(o.mode, k, *o.mesh, attention)
                      : make_local_attention(k, attention);
        step = std::make_unique<Step>(k, model, family, params, *seq_,
                                      Step::Options{.B = o.B,
                                                    .S = o.S,
                                                    .positions = o.positions,
                                                    .recompute = o.recompute,
                                                    .train = o.train,
                                                    .document_mask = o.document_mask,
                                                    .all = o.all,
                                                    .sum_by_exchange = o.sum_by_exchange,
                                                    .record = o.record});
        step->plan(device_, pinned_);
        dims = larger(larger(dims, step->workspace_dims()), seq_->workspace());
    }
    if (o.train) {
        optimizer = std::make_unique<Optimizer>(k, params, config);
        optimizer->plan(device_);
    }
    if (o.logits) device_.add("verify/logits", k.precision().act, {o.B * o.S, model.V});
    pinned_.add("trainer/readback", DType::f64, {2, 1 + Control::size});
    if (o.sample_context > 0) {
        sampler = std::make_unique<Sampler>(k, model, family, params, o.sample_context);
        sampler->plan(device_);
        dims = larger(dims, sampler->workspace_dims());
    }
    workspace_bytes_ = k.workspace_bytes(dims);
}

Machine::~Machine() {
    k_.device().destroy(stream_);
    k_.device().thaw();
}

std::string Machine::table() const {
    std::ostringstream out;
    auto line = [&](const std::string& name, int64_t bytes, const std::string& note = "") {
        out << "  " << std::left << std::setw(14) << name << std::right << std::setw(12)
            << human_bytes(bytes) << std::setw(18) << bytes << " B" << note << "\n";
    };
    int64_t sum = 0;
    for (const auto& [owner, bytes] : device_.bytes_by_owner()) {
        line(owner, bytes);
        sum += bytes;
    }
    line("workspace", workspace_bytes_);
    const int64_t shared = sum - device_.bytes();
    if (shared > 0) line("shared", -shared, "  (parts that never live at the same time)");
    line("device total", device_bytes());
    line("pinned host", pinned_bytes());
    return out.str();
}

int64_t Machine::least_recompute(Kernels& k, const ModelConfig& model, const Family& family,
                                 const Config& config, Options o, int sharers) {
    // A 32nd of the device for what is loaded and allocated later: kernels, NCCL, cuBLAS.
    const int64_t room = (k.device().free_bytes() - k.device().total_bytes() / 32) / sharers;
    const auto fits = [&](int64_t step) {
        o.recompute = Recomputation::step(step, model.L);
        return Machine(k, model, family, config, o).device_bytes() <= room;
    };
    if (fits(0)) return 0;
    int64_t low = 1, high = 2 * model.L;  // less and less is kept from step to step
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        fits(middle) ? high = middle : low = middle + 1;
    }
    return low;
}

// The most sequences, below those asked for, that fit; 0 when not even one does.
int64_t Machine::largest_batch(int64_t budget) const {
    int64_t fits = 0, beyond = o_.B;
    while (beyond - fits > 1) {
        Options smaller = o_;
        smaller.B = fits + (beyond - fits) / 2;
        const Machine plan(k_, model_, family_, config_, smaller);
        (plan.device_bytes() <= budget ? fits : beyond) = smaller.B;
    }
    return fits;
}

void Machine::allocate_device() {
    Device& device = k_.device();
    const int64_t free = device.free_bytes(), total = device.total_bytes();
    if (device_bytes() > free) {
        const int64_t fits = o_.step ? largest_batch(free) : 0;
        fail(Exit::out_of_memory, "memory: the plan needs ", human_bytes(device_bytes()), ", ",
             device.name(), " has ", human_bytes(free), " free of ", human_bytes(total), "; ",
             device_bytes() <= total ? "wait for the programs that use the rest, or " : "",
             fits > 0 ? concat("the largest --micro-batch-size that fits is ", fits)
                      : std::string("use a smaller --seq-length or --model, or --recompute auto"),
             "\n", table());
    }
    try {
        device_arena_ = Arena(device, Memory::device, device_);
        workspace_ = Buffer(device, Memory::device, workspace_bytes_);
    } catch (const Error& e) {  // another program was faster
        if (e.code != Exit::out_of_memory) throw;
        fail(e.code, e.what(), "\n", table());
    }
}

void Machine::allocate() {
    Device& device = k_.device();
    allocate_device();
    pinned_arena_ = Arena(device, Memory::pinned, pinned_);
    stream_ = device.make_stream();
    stream_.workspace = Tensor(workspace_.data(), DType::u8, {workspace_bytes_});
    // NaN everywhere: a read before the first write shows up in the loss instead of in a lucky
    // zero.
    device.set_bytes(stream_, device_arena_.data(), 0xff, device_arena_.bytes());
    params.bind(device_arena_, o_.train);
    if (step) {
        step->bind(device_arena_, pinned_arena_);
        step->prepare(stream_);
    }
    if (optimizer) {
        optimizer->bind(device_arena_);
        k_.fill(stream_, params.gradients, 0);  // the gaps between tensors stay so
    }
    if (sampler) sampler->bind(device_arena_);
    device.freeze();
}

void Machine::check_high_water() const {
    const int64_t peak = k_.device().peak(Memory::device);
    CHECK(peak == device_bytes(), ": device memory peaked at ", peak, " bytes, the plan said ",
          device_bytes());
}

}  // namespace torus
