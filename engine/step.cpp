// The straight line of one micro-batch:
//   upload -> embed -> for each layer up: pre, attention, post -> head (loss and its gradient in
//   chunks)
//   -> for each layer down: restore, post_backward, attention backward, pre_backward ->
//   embed_backward
#include "engine/step.h"

#include <algorithm>

namespace torus {
namespace {

int64_t tokens_of(const std::vector<TokenRun>& runs) {
    int64_t n = 0;
    for (const TokenRun& r : runs) n += r.count;
    return n;
}

}  // namespace

Step::Step(Kernels& k, const ModelConfig& model, const Family& family, Parameters& params,
           SeqParallel& seq, const Options& options)
    : k_(k),
      model_(model),
      family_(family),
      params_(params),
      seq_(seq),
      o_(options),
      T_(tokens_of(seq.placement())),
      acts_(model, family, k.precision(), options.B, T_, options.recompute, options.train),
      uploaded_(k.device().make_event()),
      sum_(k, params, options.train ? options.all : nullptr, options.sum_by_exchange) {}

Step::~Step() {
    for (Recorded& r : recorded_) k_.device().destroy(r.recording);
    k_.device().destroy(uploaded_);
}

void Step::plan(Layout& device, Layout& pinned) const {
    const Precision& p = k_.precision();
    acts_.plan(device);
    Head::plan(device, model_, p, rows(), {phase::head, phase::head});
    seq_.plan(device, pinned);
    sum_.plan(device);
    for (const char* name : {"ids", "targets", "pos", "first_key"})
        device.add(concat("step/", name), DType::i32, {o_.B, T_});
    if (family_.rotary())
        device.add("step/rope", p.stat,
                   {std::max(o_.S, o_.positions), int64_t(rope_frequencies(model_).size()), 2});
    device.add("step/losses", p.stat, {rows()}, {phase::head, phase::head});
    device.add("step/loss_sum", DType::f64, {1});
    pinned.add("step/staged", DType::i32, {4, o_.B, T_});
}

WorkspaceDims Step::workspace_dims() const {
    return {.rows = rows(),
            .channels = model_.C,
            .vocab = model_.Vp(),
            .features = std::max({model_.qkv_width(), 2 * model_.F, model_.Vp()}),
            .heads = model_.H,
            .kv_heads = model_.Hk,
            .head_dim = model_.D,
            .batch = o_.B,
            .keys = o_.S};
}

void Step::bind(const Arena& device, const Arena& pinned) {
    device_ = &device;
    acts_.bind(device);
    seq_.bind(device, pinned);
    sum_.bind(device);
    ids_ = device["step/ids"];
    targets_ = device["step/targets"];
    pos_ = device["step/pos"];
    first_key_ = device["step/first_key"];
    losses_ = device["step/losses"];
    loss_sum_ = device["step/loss_sum"];
    staged_ = pinned["step/staged"];
    if (family_.rotary()) rope_ = device["step/rope"];
}

void Step::prepare(Stream& s) {
    if (!rope_) return;
    std::vector<char> host(size_t(rope_.bytes()));
    fill_rope_table(model_, Tensor(host.data(), rope_.dtype, rope_.shape));
    k_.device().copy(s, rope_.data, host.data(), rope_.bytes());
    k_.device().synchronize(s);
}

Ctx Step::context(Stream& s, bool recompute) const {
    return {.k = k_,
            .stream = s,
            .model = model_,
            .B = o_.B,
            .T = T_,
            .pos = pos_.view({rows()}),
            .rope = rope_,
            .recompute = recompute,
            .accumulate = accumulate_};
}

// This rank's tokens of every sequence, in the order its placement holds them.
void Step::upload(Stream& s, const Batch& batch) {
    const ProfileRange data(k_.device(), "data");
    CHECK(batch.B == o_.B && batch.T == o_.S, ": batch of ", batch.B, " x ", batch.T, ", step of ",
          o_.B, " x ", o_.S);
    seq_.set_documents(o_.document_mask ? batch.first_key.data() : nullptr);
    const std::vector<TokenRun> placement = seq_.placement();  // of this batch
    CHECK(tokens_of(placement) == T_, ": ", tokens_of(placement), " tokens, planned for ", T_);
    Device& device = k_.device();
    if (in_flight_) device.synchronize(uploaded_);  // the copy from the staging buffer
    int32_t* out = staged_.as<int32_t>();
    for (const auto* source : {&batch.ids, &batch.targets, &batch.pos, &batch.first_key}) {
        for (int64_t b = 0; b < o_.B; ++b)
            for (const TokenRun& run : placement)
                out = std::copy_n(source->data() + b * o_.S + run.begin, run.count, out);
    }
    const int64_t n = rows();
    int64_t part = 0;
    for (Tensor t : {ids_, targets_, pos_, first_key_})
        device.copy(s, t.data, staged_.as<int32_t>() + n * part++, t.bytes());
    device.record(uploaded_, s);
    in_flight_ = true;
}

void Step::attention_forward(Stream& s, int64_t l) {
    const TensorMap& a = acts_.block(l);
    const Qkv x = split_qkv(model_, o_.B, T_, a["qkv"]);
    const Shape heads{o_.B, T_, model_.H, model_.D};
    seq_.forward(s, {.q = x.q,
                     .k = x.k,
                     .v = x.v,
                     .o = a["o"].view(heads),
                     .lse = a["lse"],
                     .first_key = o_.document_mask ? first_key_ : Tensor{}});
}

void Step::run_forward(Stream& s) {
    const ProfileRange forward(k_.device(), "forward");
    Ctx ctx = context(s, false);
    family_.embed(ctx, params_.embed().w, ids_.view({rows()}), acts_.x(0));
    for (int64_t l = 0; l < model_.L; ++l) {
        const ProfileRange layer(k_.device(), "layer", l);
        const TensorMap& w = params_.layer(l).w;
        family_.pre(ctx, w, acts_.block(l), acts_.x(l));
        attention_forward(s, l);
        family_.post(ctx, w, acts_.block(l), acts_.x(l), acts_.x(l + 1));
    }
}

void Step::run_head(Stream& s, double dloss, bool backward, Tensor logits) {
    const ProfileRange range(k_.device(), "head");
    Ctx ctx = context(s, false);
    const Component& head = params_.head();
    Head::run(ctx, family_, head.w, head.dw, *device_,
              {.x = acts_.x(model_.L),
               .dx = backward ? acts_.dx() : Tensor{},
               .targets = targets_.view({rows()}),
               .loss = losses_,
               .logits = logits,
               .dloss = dloss,
               .loss_scale = params_.loss_scale()});
    k_.sum(s, loss_sum_, losses_, true);
}

// Brings back what the layer did not keep; bit for bit what forward computed.
void Step::restore(Stream& s, int64_t l) {
    const Recompute level = o_.recompute.of(l);
    if (level == Recompute::none) return;
    Ctx ctx = context(s, true);
    const TensorMap& w = params_.layer(l).w;
    family_.pre(ctx, w, acts_.block(l), acts_.x(l));
    if (level == Recompute::full) attention_forward(s, l);
    family_.post(ctx, w, acts_.block(l), acts_.x(l), {});
}

void Step::run_backward(Stream& s) {
    const ProfileRange backward(k_.device(), "backward");
    Ctx ctx = context(s, false);
    const Shape heads{o_.B, T_, model_.H, model_.D};
    for (int64_t l = model_.L - 1; l >= 0; --l) {
        const ProfileRange layer(k_.device(), "layer", l);
        const TensorMap& a = acts_.block(l);
        Component& c = params_.layer(l);
        restore(s, l);
        family_.post_backward(ctx, c.w, c.dw, a, acts_.x(l), acts_.dx());
        const Qkv x = split_qkv(model_, o_.B, T_, a["qkv"]);
        const Qkv dx = split_qkv(model_, o_.B, T_, a["dqkv"]);
        seq_.backward(s, {.q = x.q,
                          .k = x.k,
                          .v = x.v,
                          .o = a["o"].view(heads),
                          .lse = a["lse"],
                          .dout = a["do"].view(heads),
                          .first_key = o_.document_mask ? first_key_ : Tensor{},
                          .dq = dx.q,
                          .dk = dx.k,
                          .dv = dx.v});
        family_.pre_backward(ctx, c.w, c.dw, a, acts_.x(l), acts_.dx());
        add_up(s, c);
    }
    family_.embed_backward(ctx, params_.embed().dw, ids_.view({rows()}), acts_.dx());
    add_up(s, params_.embed());  // last: a tied head adds to it too
}

void Step::begin(Stream& s, int64_t micro_batches) {
    k_.fill(s, loss_sum_, 0);
    accumulate_ = false;
    micro_batches_ = micro_batches;
}

void Step::compute(Stream& s, double dloss, Tensor logits) {
    if (!accumulate_) params_.clear_sums(k_, s);
    run_forward(s);
    run_head(s, dloss, true, logits);
    add_up(s, params_.head());
    run_backward(s);
}

// In a step's last micro-batch: this component is done.
void Step::add_up(Stream& s, const Component& c) {
    if (micro_batches_ == 1 && !o_.record) sum_.add(s, c);
}

// dloss is an argument of the recorded launches: a recording serves for as long as it stays the
// same. The first micro-batch of each kind runs unrecorded, since it chooses algorithms and loads
// code.
void Step::compute_recorded(Stream& s, double dloss) {
    Device& device = k_.device();
    Recorded& r = recorded_[accumulate_ ? 1 : 0];
    if (r.dloss != dloss) {
        device.destroy(r.recording);
        r.dloss = dloss;
        compute(s, dloss, {});
        return;
    }
    if (!r.recording.handle) {
        device.begin_recording(s);
        compute(s, dloss, {});
        r.recording = device.end_recording(s);
    }
    device.replay(s, r.recording);
}

void Step::forward_backward(Stream& s, const Batch& batch, double dloss, Tensor logits) {
    upload(s, batch);
    if (o_.record && !logits)
        compute_recorded(s, dloss);
    else
        compute(s, dloss, logits);
    accumulate_ = true;
    if (--micro_batches_ > 0) return;
    if (o_.record)  // exchanges are not recorded
        for (const Component& c : params_.components()) sum_.add(s, c);
    sum_.finish(s);
}

void Step::forward(Stream& s, const Batch& batch) {
    upload(s, batch);
    run_forward(s);
    run_head(s, 0, false, {});
}

}  // namespace torus
