// One call of `advance` runs T tokens at positions [first, first + T) through the model, appends
// their keys and values to the cache and returns the last token's logits.
#include "engine/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/rng.h"

namespace torus {
namespace {

constexpr int64_t prompt_chunk = 64;  // tokens of a prompt per pass

const Life sampling{phase::sample, phase::sample};

std::string slot(std::string_view name) { return "sample/" + std::string(name); }

}  // namespace

Sampler::Sampler(Kernels& k, const ModelConfig& model, const Family& family, Parameters& params,
                 int64_t context)
    : k_(k),
      model_(model),
      family_(family),
      params_(params),
      context_(context),
      chunk_(std::min(prompt_chunk, context)) {
    CHECK(context >= 2);
}

void Sampler::plan(Layout& layout) const {
    const Precision& p = k_.precision();
    for (const ActSpec& a : family_.block(model_, p, 1, chunk_))
        if (a.keep != Keep::scratch)
            layout.add(slot("block." + a.name), a.dtype, a.shape, sampling);
    for (const char* name : {"x0", "x1", "normed"})
        layout.add(slot(name), p.act, {chunk_, model_.C}, sampling);
    for (const char* name : {"mean", "rstd"}) layout.add(slot(name), p.stat, {chunk_}, sampling);
    for (const char* name : {"k_cache", "v_cache"})
        layout.add(slot(name), p.act, {model_.L, context_, model_.Hk, model_.D}, sampling);
    layout.add(slot("logits"), p.act, {1, model_.Vp()}, sampling);
    layout.add(slot("logits_stat"), p.stat, {1, model_.Vp()}, sampling);
    layout.add(slot("ids"), DType::i32, {chunk_}, sampling);
    layout.add(slot("pos"), DType::i32, {chunk_}, sampling);
    if (family_.rotary())
        layout.add(slot("rope"), p.stat, {context_, int64_t(rope_frequencies(model_).size()), 2},
                   sampling);
}

void Sampler::bind(const Arena& arena) { arena_ = &arena; }

WorkspaceDims Sampler::workspace_dims() const {
    return {.rows = chunk_,
            .channels = model_.C,
            .vocab = model_.Vp(),
            .features = std::max({model_.qkv_width(), 2 * model_.F, model_.Vp()}),
            .heads = model_.H,
            .kv_heads = model_.Hk,
            .head_dim = model_.D,
            .batch = 1,
            .keys = context_};
}

// The step's activations may have overwritten the table since the last text.
void Sampler::prepare(Stream& s) {
    if (!family_.rotary()) return;
    const Tensor rope = (*arena_)[slot("rope")];
    std::vector<char> host(size_t(rope.bytes()));
    fill_rope_table(model_, Tensor(host.data(), rope.dtype, rope.shape));
    k_.device().copy(s, rope.data, host.data(), rope.bytes());
    k_.device().synchronize(s);
}

Tensor Sampler::advance(Stream& s, const int32_t* ids, int64_t T, int64_t first) {
    const Arena& a = *arena_;
    const Precision& p = k_.precision();
    const Tensor ids_device = a[slot("ids")].rows(0, T), pos = a[slot("pos")].rows(0, T);
    std::vector<int32_t> positions(size_t(T), 0);
    std::iota(positions.begin(), positions.end(), int32_t(first));
    k_.device().copy(s, ids_device.data, ids, ids_device.bytes());
    k_.device().copy(s, pos.data, positions.data(), pos.bytes());
    k_.device().synchronize(s);

    TensorMap block;  // the buffers of chunk_ tokens, cut to T
    for (const ActSpec& spec : family_.block(model_, p, 1, T))
        if (spec.keep != Keep::scratch)
            block.set(spec.name,
                      Tensor(a[slot("block." + spec.name)].data, spec.dtype, spec.shape));

    Ctx ctx{.k = k_, .stream = s, .model = model_, .B = 1, .T = T, .pos = pos};
    if (family_.rotary()) ctx.rope = a[slot("rope")];
    Tensor x = a[slot("x0")].rows(0, T), y = a[slot("x1")].rows(0, T);
    family_.embed(ctx, params_.embed().w, ids_device, x);
    const Shape cached{1, first + T, model_.Hk, model_.D};
    for (int64_t l = 0; l < model_.L; ++l) {
        const TensorMap& w = params_.layer(l).w;
        family_.pre(ctx, w, block, x);
        const Qkv qkv = split_qkv(model_, 1, T, block["qkv"]);
        auto append = [&](const char* name, const Tensor& fresh) {
            const Tensor cache = a[slot(name)].rows(l, 1);  // (1, context, Hk, D)
            k_.cast(s, cache.slice(1, first, T), fresh);
            return cache.slice(1, 0, first + T);
        };
        const Tensor keys = append("k_cache", qkv.k), values = append("v_cache", qkv.v);
        k_.attention_forward(s, {.q = qkv.q,
                                 .k = keys,
                                 .v = values,
                                 .o = block["o"].view({1, T, model_.H, model_.D}),
                                 .lse = block["lse"],
                                 .q0 = first,
                                 .scale = 1.0 / std::sqrt(double(model_.D))});
        family_.post(ctx, w, block, x, y);
        std::swap(x, y);
    }
    const Component& head = params_.head();
    const Tensor normed = a[slot("normed")].rows(0, T), logits = a[slot("logits")];
    family_.final_norm(ctx, head.w, normed, a[slot("mean")].rows(0, T), a[slot("rstd")].rows(0, T),
                       x);
    const Tensor classifier = model_.tied ? head.w["wte"] : head.w["head_w"];
    k_.matmul_forward(s, logits, normed.rows(T - 1, 1), classifier, {}, {});
    return logits;
}

int32_t Sampler::choose(Stream& s, Tensor logits, const SampleOptions& o, int64_t position) {
    const Tensor stat = (*arena_)[slot("logits_stat")];
    k_.cast(s, stat, logits);
    std::vector<char> raw(size_t(stat.bytes()));
    k_.device().copy(s, raw.data(), stat.data, stat.bytes());
    k_.device().synchronize(s);
    const size_t V = size_t(model_.V);
    std::vector<double> z(V);
    for (size_t i = 0; i < V; ++i)
        z[i] = stat.dtype == DType::f64 ? reinterpret_cast<const double*>(raw.data())[i]
                                        : double(reinterpret_cast<const float*>(raw.data())[i]);
    const double top = *std::max_element(z.begin(), z.end());
    require(std::isfinite(top), Exit::internal, "the model's logits are not finite; ",
            "the weights are damaged or training diverged");
    if (o.temperature <= 0) return int32_t(std::max_element(z.begin(), z.end()) - z.begin());
    double floor = -INFINITY;
    if (o.top_k > 0 && size_t(o.top_k) < V) {
        std::vector<double> sorted = z;
        std::nth_element(sorted.begin(), sorted.begin() + o.top_k - 1, sorted.end(),
                         std::greater<>());
        floor = sorted[size_t(o.top_k - 1)];
    }
    double total = 0;
    for (double& v : z) {
        v = v < floor ? 0.0 : std::exp((v - top) / o.temperature);
        total += v;
    }
    double left = random_uniform(o.seed, o.stream_id, uint64_t(position)) * total;
    for (size_t i = 0; i < V; ++i)
        if ((left -= z[i]) < 0) return int32_t(i);
    return int32_t(std::max_element(z.begin(), z.end()) - z.begin());
}

std::vector<int32_t> Sampler::generate(Stream& s, std::vector<int32_t> prompt,
                                       const SampleOptions& o) {
    CHECK(!prompt.empty());
    prepare(s);
    if (int64_t(prompt.size()) >= context_)
        prompt.erase(prompt.begin(), prompt.end() - (context_ - 1));
    int64_t done = 0;
    Tensor logits;
    const int64_t n = int64_t(prompt.size());
    while (done < n) {
        const int64_t T = std::min(chunk_, n - done);
        logits = advance(s, prompt.data() + done, T, done);
        done += T;
    }
    std::vector<int32_t> text;
    while (int64_t(text.size()) < o.tokens) {
        const int32_t next = choose(s, logits, o, done);
        if (next == o.stop_token) break;
        text.push_back(next);
        if (done >= context_ || int64_t(text.size()) == o.tokens) break;
        logits = advance(s, &next, 1, done++);
    }
    return text;
}

}  // namespace torus
