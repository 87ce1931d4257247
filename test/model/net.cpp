// See net.h.
#include "test/model/net.h"

#include <cmath>
#include <cstring>

#include "kernels/rng.h"

namespace torus {

Net::Net(const ModelConfig& c, int64_t B, int64_t T, Options options)
    : config(c),
      family_(family(c.family)),
      B_(B),
      T_(T),
      options_(options),
      k_(make_cpu_kernels(DType::f64, {.plain_matmul = true})),
      seq_(make_local_attention(*k_, {B, T, c.H, c.Hk, c.D})) {
    const ParamTable table = family_.params(c);
    components_.push_back({"embed", table.embed, {}, {}});
    for (int64_t l = 0; l < c.L; ++l)
        components_.push_back({std::to_string(l), table.layer, {}, {}});
    components_.push_back({"head", table.head, {}, {}});
    Layout weights, state, pinned;
    for (const Component& p : components_)
        for (const ParamSpec& s : p.specs) weights.add(p.name + "/" + s.name, DType::f64, s.shape);
    plan(state);
    seq_->plan(state, pinned);
    Device& device = k_->device();
    weights_ = Arena(device, Memory::host, weights);
    gradients_ = Arena(device, Memory::host, weights);
    state_ = Arena(device, Memory::host, state);
    pinned_ = Arena(device, Memory::host, pinned);
    seq_->bind(state_, pinned_);
    stream_ = device.make_stream();
    workspace_ = Buffer(device, Memory::host,
                        k_->workspace_bytes({.rows = B * T,
                                             .channels = c.C,
                                             .vocab = c.Vp(),
                                             .features = c.Vp() + 2 * c.F + c.qkv_width(),
                                             .heads = c.H,
                                             .kv_heads = c.Hk,
                                             .head_dim = c.D,
                                             .batch = B,
                                             .keys = T}));
    stream_.workspace = Tensor(workspace_.data(), DType::u8, {workspace_.bytes()});
    for (Component& p : components_)
        for (const ParamSpec& s : p.specs) {
            p.w.set(s.name, weights_[p.name + "/" + s.name]);
            p.dw.set(s.name, gradients_[p.name + "/" + s.name]);
        }
    if (c.tied) {
        components_.back().w.set("wte", weights_["embed/wte"]);
        components_.back().dw.set("wte", gradients_["embed/wte"]);
    }
    for (int64_t l = 0; l < c.L; ++l) {
        acts_.emplace_back();
        for (const ActSpec& s : family_.block(c, k_->precision(), B, T)) {
            const bool own =
                s.keep == Keep::attention || (s.keep == Keep::block && !options.recompute);
            acts_.back().set(s.name, state_[(own ? std::to_string(l) : "shared") + "/" + s.name]);
        }
    }
    for (int64_t i = 0; i < B * T; ++i) state_["pos"].as<int32_t>()[i] = int32_t(i % T);
    if (family_.rotary()) fill_rope_table(c, state_["rope"]);
}

void Net::plan(Layout& state) const {
    const ModelConfig& c = config;
    const int64_t N = B_ * T_;
    for (int64_t l = 0; l <= c.L; ++l) state.add("x" + std::to_string(l), DType::f64, {N, c.C});
    state.add("dx", DType::f64, {N, c.C});
    for (const ActSpec& s : family_.block(c, k_->precision(), B_, T_)) {
        const bool own =
            s.keep == Keep::attention || (s.keep == Keep::block && !options_.recompute);
        for (int64_t l = 0; l < (own ? c.L : 1); ++l)
            state.add((own ? std::to_string(l) : "shared") + "/" + s.name, s.dtype, s.shape);
    }
    for (const char* name : {"ids", "targets", "pos"}) state.add(name, DType::i32, {N});
    state.add("first_key", DType::i32, {B_, T_});
    if (family_.rotary()) state.add("rope", DType::f64, {T_, c.D / 2, 2});
    state.add("losses", DType::f64, {N});
    state.add("logits", DType::f64, {N, c.V});
    if (options_.head_chunk == 0) {
        Head::plan(state, c, k_->precision(), N, {});
    } else {
        Layout head;
        Head::plan(head, c, k_->precision(), options_.head_chunk, {});
        state.add_all("", head);
    }
}

void Net::randomize(uint64_t seed) {
    uint64_t stream = 0;
    for (const Component& p : components_)
        for (const ParamSpec& s : p.specs) {
            const Tensor w = p.w[s.name];
            for (int64_t i = 0; i < w.numel(); ++i) {
                const double z = random_normal(seed, stream, uint64_t(i));
                w.as<double>()[i] = s.init == Init::ones ? 1 + 0.3 * z : 0.2 * z;
            }
            ++stream;
        }
    for (int64_t i = 0; i < B_ * T_; ++i) {
        ids().as<int32_t>()[i] = int32_t(random_bits(seed, 1000, uint64_t(i)) % uint64_t(config.V));
        targets().as<int32_t>()[i] =
            int32_t(random_bits(seed, 1001, uint64_t(i)) % uint64_t(config.V));
        first_key().as<int32_t>()[i] = 0;
    }
}

void Net::load(const TensorSource& source) {
    for (const std::string& name : names())
        read_param(source, spec(name), layer_of(name), weight(name));
}

std::vector<std::string> Net::names() const {
    std::vector<std::string> out;
    for (const Component& p : components_)
        for (const ParamSpec& s : p.specs) out.push_back(p.name + "/" + s.name);
    return out;
}

const ParamSpec& Net::spec(const std::string& name) const {
    for (const Component& p : components_)
        for (const ParamSpec& s : p.specs)
            if (p.name + "/" + s.name == name) return s;
    fail(Exit::internal, "no parameter ", name);
}

int64_t Net::layer_of(const std::string& name) const {
    return name[0] >= '0' && name[0] <= '9' ? std::stoll(name) : 0;
}

Ctx Net::context(bool recompute) {
    return {.k = *k_,
            .stream = stream_,
            .model = config,
            .B = B_,
            .T = T_,
            .pos = state_["pos"],
            .rope = family_.rotary() ? state_["rope"] : Tensor(),
            .recompute = recompute};
}

void Net::attention(int64_t l) {
    const TensorMap& a = acts_[size_t(l)];
    const Qkv x = split_qkv(config, B_, T_, a["qkv"]);
    seq_->forward(stream_, {.q = x.q,
                            .k = x.k,
                            .v = x.v,
                            .o = a["o"].view({B_, T_, config.H, config.D}),
                            .lse = a["lse"],
                            .first_key = options_.first_key ? first_key() : Tensor()});
}

void Net::forward() {
    Ctx ctx = context(false);
    family_.embed(ctx, components_.front().w, ids(), state_["x0"]);
    for (int64_t l = 0; l < config.L; ++l) {
        const TensorMap &w = components_[size_t(l) + 1].w, &a = acts_[size_t(l)];
        const Tensor x = state_["x" + std::to_string(l)];
        family_.pre(ctx, w, a, x);
        attention(l);
        family_.post(ctx, w, a, x, state_["x" + std::to_string(l + 1)]);
    }
}

void Net::head(bool backward) {
    Ctx ctx = context(false);
    const Component& c = components_.back();
    Head::run(ctx, family_, c.w, backward ? c.dw : TensorMap(), state_,
              {.x = state_["x" + std::to_string(config.L)],
               .dx = backward ? dx() : Tensor(),
               .targets = targets(),
               .loss = losses(),
               .logits = backward ? Tensor() : logits(),
               .dloss = dloss});
}

void Net::backward() {
    Ctx ctx = context(false), again = context(true);
    for (int64_t l = config.L - 1; l >= 0; --l) {
        const Component& c = components_[size_t(l) + 1];
        const TensorMap& a = acts_[size_t(l)];
        const Tensor x = state_["x" + std::to_string(l)];
        if (options_.recompute) {
            family_.pre(again, c.w, a, x);
            family_.post(again, c.w, a, x, Tensor());
        }
        family_.post_backward(ctx, c.w, c.dw, a, x, dx());
        const Qkv q = split_qkv(config, B_, T_, a["qkv"]),
                  dq = split_qkv(config, B_, T_, a["dqkv"]);
        const Shape heads{B_, T_, config.H, config.D};
        seq_->backward(stream_, {.q = q.q,
                                 .k = q.k,
                                 .v = q.v,
                                 .o = a["o"].view(heads),
                                 .lse = a["lse"],
                                 .dout = a["do"].view(heads),
                                 .first_key = options_.first_key ? first_key() : Tensor(),
                                 .dq = dq.q,
                                 .dk = dq.k,
                                 .dv = dq.v});
        family_.pre_backward(ctx, c.w, c.dw, a, x, dx());
    }
    family_.embed_backward(ctx, components_.front().dw, ids(), dx());
}

double Net::loss() {
    forward();
    head(false);
    double sum = 0;
    for (int64_t i = 0; i < losses().numel(); ++i) sum += losses().as<double>()[i];
    return dloss * sum;
}

double Net::loss_and_gradients() {
    std::memset(gradients_.data(), 0, size_t(gradients_.bytes()));
    forward();
    head(true);
    double sum = 0;
    for (int64_t i = 0; i < losses().numel(); ++i) sum += losses().as<double>()[i];
    backward();
    return dloss * sum;
}

double relative_difference(Tensor a, Tensor b) {
    CHECK(a.numel() == b.numel());
    double difference = 0, size = 0;
    for (int64_t i = 0; i < a.numel(); ++i) {
        const double x = a.as<double>()[i], y = b.as<double>()[i];
        difference =
            std::isnan(x) || std::isnan(y) ? INFINITY : std::max(difference, std::abs(x - y));
        size = std::max(size, std::abs(y));
    }
    return size > 0 ? difference / size : difference;
}

bool same_bits(Tensor a, Tensor b) {
    return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, size_t(a.bytes())) == 0;
}

}  // namespace torus
