// The loop of ring.h. The buffers of forward and backward share one planned tensor, each cut from
// it by a layout of its own.
#include "comm/seq/ring.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/seq/balance.h"
#include "comm/seq/running_sum.h"
#include "comm/seq/tensors.h"

namespace torus {
namespace {

using List = std::vector<Message>;

// Rows [lo, ...) of one rank's queries as the kernels see them: mine, or fetched by a helper.
struct Queries {
    Tensor q, dout, first_key;  // act (B,rows,H,D) twice, optional i32 (B,rows)
    Tensor o;                   // stat (B,rows,H,D)
    RunningSum dq;              // of (B,rows,H,D)
    Tensor lse, delta;          // stat (B,H,rows)
    int64_t lo = 0;
};
// One rank's keys and values: all of mine, or the spans that were fetched.
struct Keys {
    Tensor kv;       // act (B,rows,2*Hk,D): keys first
    RunningSum dkv;  // of the same
};
// One forward or backward.
struct Call {
    bool back, masked;
    const Table& table;
    const Layout& buffers;
    Queries queries;   // mine
    Keys keys;         // mine
    AttnGradIn given;  // what the caller gave
};

class RingAttention final : public SeqParallel {
public:
    RingAttention(Kernels& k, Comm& comm, const AttnDims& d, RingPlan plan, std::string name)
        : k_(k),
          comm_(comm),
          d_(d),
          p_(std::move(plan)),
          standing_(p_.runs),
          name_(std::move(name)),
          me_(comm.rank()),
          T_(tokens(me_)),
          scale_(1.0 / std::sqrt(double(d.D))),
          plain_(make_table(p_, false, nullptr, d.B, d.S)),
          masked_(make_table(p_, true, nullptr, d.B, d.S)),
          imbalance_(imbalance_of(plain_, nullptr, d.B, d.S)) {
        lay_out();
    }
    ~RingAttention() override {
        if (!bound_) return;
        k_.device().destroy(stream_);
        k_.device().destroy(ready_);
        k_.device().destroy(arrived_);
    }

    std::vector<TokenRun> placement() const override { return joined(p_.runs[size_t(me_)]); }

    void plan(Layout& device, Layout&) const override {
        device.add(name_ + "/ring", DType::u8, {std::max(forward_.bytes(), backward_.bytes())});
    }

    // No call has more queries or keys than the fullest rank has tokens.
    WorkspaceDims workspace() const override {
        int64_t most = 0;
        for (int r = 0; r < ranks(); ++r) most = std::max(most, tokens(r));
        return {.rows = d_.B * most,
                .heads = d_.H,
                .kv_heads = d_.Hk,
                .head_dim = d_.D,
                .batch = d_.B,
                .keys = most};
    }

    void bind(const Arena& device, const Arena&) override {
        CHECK(!bound_, ": bound twice");
        bound_ = true;
        base_ = device[name_ + "/ring"].data;
        stream_ = k_.device().make_stream(true);
        ready_ = k_.device().make_event();
        arrived_ = k_.device().make_event();
    }

    void set_documents(const int32_t* first_key) override {
        if (!first_key && !has_documents_) return;  // the tables at hand are those
        has_documents_ = first_key != nullptr;
        if (p_.by_work) p_.runs = balanced_placement(standing_, first_key, d_.B, d_.S);
        masked_ = make_table(p_, true, first_key, d_.B, d_.S);
        imbalance_ = imbalance_of(masked_, first_key, d_.B, d_.S);
    }
    double imbalance() const override { return imbalance_; }

    void forward(Stream& s, const AttnIn& in) override;
    void backward(Stream& s, const AttnGradIn& g) override;

private:
    int ranks() const { return comm_.size(); }
    int steps() const { return int(p_.schedule.size()); }
    int64_t tokens(int rank) const { return count_tokens(p_.runs[size_t(rank)]); }

    void lay_out();
    Tensor buffer(const Layout& l, const std::string& what, const Shape& shape) const;
    Tensor buffer(const Layout& l, const std::string& what, int step, const Shape& shape) const {
        return buffer(l, what + std::to_string(step % slots_), shape);
    }

    Call start(Stream& s, bool back, const AttnGradIn& g) const;
    Queries fetched_queries(const Call& c, int step) const;
    Keys fetched_keys(const Call& c, int step) const;
    void loop(Stream& s, Call& c);
    bool anything_travels(const Call& c, int t) const;
    void blocks_in(Stream& s, const Call& c, int step, List& sends, List& recvs) const;
    void results_home(const Call& c, int step, List& sends, List& recvs) const;
    void compute(Stream& s, Call& c, int step, bool late) const;
    void collect(Stream& s, Call& c, int step) const;

    Kernels& k_;
    Comm& comm_;
    AttnDims d_;
    RingPlan p_;
    std::vector<Runs> standing_;  // the placement without documents
    std::string name_;
    int me_;
    int64_t T_;
    double scale_;
    Table plain_, masked_;  // without and with first_key
    double imbalance_;
    bool has_documents_ = false;  // masked_ is cut to a batch's documents
    bool has_helper_ = false;     // someone works on queries of mine
    int slots_ = 1;               // halves of the double buffers; one is enough for a single step
    Layout forward_, backward_;
    bool bound_ = false;
    void* base_ = nullptr;
    Stream stream_;          // of the exchanges
    Event ready_, arrived_;  // what an exchange may read and write is ready; it is done
};

// --- buffers ------------------------------------------------------------------------------------

// Sizes for the table without documents, which sends most unless tokens move: then any rank may see
// all that another holds.
void RingAttention::lay_out() {
    const int64_t B = d_.B, H = d_.H, kv_width = 2 * d_.Hk * d_.D, q_width = H * d_.D;
    Extent most = extent_of(plain_, me_);
    has_helper_ = most.home_queries > 0;
    if (p_.by_work) {
        for (int x = 0; x < ranks(); ++x)
            if (x != me_) most.keys = std::max(most.keys, tokens(x));
        most.home_keys = T_;
        most.remote_steps = steps() - 1;
    }
    slots_ = most.remote_steps > 1 ? 2 : 1;
    const DType act = k_.precision().act, stat = k_.precision().stat;
    for (const bool back : {false, true}) {
        Layout& l = back ? backward_ : forward_;
        const int64_t in = back ? 2 : 1;  // q and dout, lse and delta travel in backward
        const int64_t kv_out = back ? most.keys * kv_width : 0;
        l.add("kv", act, {B, T_, kv_width});
        l.add("q", act, {B, has_helper_ ? T_ : 0, in * q_width});
        l.add("delta", stat, {B, H, back ? T_ : 0});
        for (const char* name : {"q_lse", "q_delta"})
            l.add(name, stat, {B, H, back && has_helper_ ? T_ : 0});
        l.add("q_result", stat, {B, T_, q_width});
        l.add("kv_result", stat, {B, back ? T_ : 0, kv_width});
        l.add("home_q", stat, {B, most.home_queries, q_width});
        l.add("home_lse", stat, {B, H, back ? 0 : most.home_queries});
        l.add("home_kv", stat, {B, back ? most.home_keys : 0, kv_width});
        for (int i = 0; i < slots_; ++i) {
            const auto n = std::to_string(i);
            l.add("block" + n, act,
                  {B, std::max(most.keys * kv_width, in * most.queries * q_width)});
            l.add("block_stats" + n, stat, {in, B, H, most.queries});
            l.add("block_first_key" + n, DType::i32, {B, most.queries});
            l.add("result" + n, stat, {B, std::max(kv_out, most.queries * q_width)});
        }
    }
}

Tensor RingAttention::buffer(const Layout& l, const std::string& what, const Shape& shape) const {
    const Layout::Slot& slot = l.at(what);
    CHECK(shape.numel() <= slot.shape.numel(), ": ", what, " holds ", slot.shape.str(), ", not ",
          shape.str());
    return Tensor(static_cast<char*>(base_) + slot.offset, slot.dtype, shape);
}

Queries RingAttention::fetched_queries(const Call& c, int step) const {
    const int64_t B = d_.B, H = d_.H, D = d_.D, in = c.back ? 2 : 1;
    const Work& w = c.table[size_t(step)][size_t(me_)];
    const int64_t n = w.q_rows();
    const Tensor block = buffer(c.buffers, "block", step, {B, n, in * H, D});
    const Tensor stats = buffer(c.buffers, "block_stats", step, {in, B * H * n});
    const Tensor result = buffer(c.buffers, "result", step, {B, n, H, D});
    Queries f;
    f.lo = w.q_lo;
    f.q = block.slice(2, 0, H);
    f.lse = stats.rows(0, 1).view({B, H, n});
    if (c.masked) f.first_key = buffer(c.buffers, "block_first_key", step, {B, n});
    if (!c.back) {
        f.o = result;
        return f;
    }
    f.dq = {k_, result, d_.Hk};
    f.dout = block.slice(2, H, H);
    f.delta = stats.rows(1, 1).view({B, H, n});
    return f;
}

Keys RingAttention::fetched_keys(const Call& c, int step) const {
    const Work& w = c.table[size_t(step)][size_t(me_)];
    const Shape shape{d_.B, w.k_rows(), 2 * d_.Hk, d_.D};
    Keys f{buffer(c.buffers, "block", step, shape), {}};
    if (c.back) f.dkv = {k_, buffer(c.buffers, "result", step, shape), d_.Hk, true};
    return f;
}

// --- what travels -------------------------------------------------------------------------------

// Is there any message at iteration t? All ranks know, so all skip the same exchanges.
bool RingAttention::anything_travels(const Call& c, int t) const {
    for (int x = 0; x < ranks(); ++x) {
        if (t + 1 < steps()) {
            const Work& next = c.table[size_t(t + 1)][size_t(x)];
            if (next.fetches_keys(x) || next.helps(x)) return true;
        }
        if (t >= 1 && t <= steps()) {
            const Work& last = c.table[size_t(t - 1)][size_t(x)];
            if (last.helps(x) || (c.back && last.fetches_keys(x))) return true;
        }
    }
    return false;
}

// Owners send the blocks that `step` works on. Rows of one sequence are dense, the batch is not.
void RingAttention::blocks_in(Stream& s, const Call& c, int step, List& sends, List& recvs) const {
    const auto each_sequence = [&](List& list, int peer, const Tensor& t) {
        for (int64_t b = 0; b < d_.B; ++b) list.push_back({peer, t.rows(b, 1)});
    };
    for (int x = 0; x < ranks(); ++x) {
        const Work& w = c.table[size_t(step)][size_t(x)];
        if (w.fetches_keys(x)) {
            for (const Span& span : w.keys) {
                if (w.pair.k == me_)
                    each_sequence(sends, x, c.keys.kv.slice(1, span.row, span.rows));
                if (x == me_)
                    each_sequence(recvs, w.pair.k,
                                  fetched_keys(c, step).kv.slice(1, span.at, span.rows));
            }
        }
        if (!w.helps(x)) continue;
        const int64_t n = w.q_rows(), in = c.back ? 2 : 1;
        if (w.pair.q == me_) {
            const Tensor packed = buffer(c.buffers, "q", {d_.B, T_, in * d_.H, d_.D});
            each_sequence(sends, x, packed.slice(1, w.q_lo, n));
            if (c.masked) each_sequence(sends, x, c.queries.first_key.slice(1, w.q_lo, n));
            if (c.back) {
                const std::pair<const char*, const Tensor&> stats[] = {
                    {"q_lse", c.queries.lse}, {"q_delta", c.queries.delta}};
                for (const auto& [name, all] : stats) {
                    const Tensor dense = buffer(c.buffers, name, {d_.B, d_.H, n});
                    copy_rows(k_, s, dense, all.slice(2, w.q_lo, n));
                    sends.push_back({x, dense});
                }
            }
        }
        if (x == me_) {
            const Queries q = fetched_queries(c, step);
            each_sequence(recvs, w.pair.q,
                          buffer(c.buffers, "block", step, {d_.B, n, in * d_.H, d_.D}));
            if (c.masked) each_sequence(recvs, w.pair.q, q.first_key);
            if (c.back) recvs.push_back({w.pair.q, q.lse});
            if (c.back) recvs.push_back({w.pair.q, q.delta});
        }
    }
}

// Workers send what `step` gave to those whose keys or queries they worked on.
void RingAttention::results_home(const Call& c, int step, List& sends, List& recvs) const {
    for (int x = 0; x < ranks(); ++x) {
        const Work& w = c.table[size_t(step)][size_t(x)];
        if (c.back && w.fetches_keys(x)) {
            const Shape shape{d_.B, w.k_rows(), 2 * d_.Hk, d_.D};
            if (x == me_) sends.push_back({w.pair.k, fetched_keys(c, step).dkv.tensor()});
            if (w.pair.k == me_) recvs.push_back({x, buffer(c.buffers, "home_kv", shape)});
        }
        if (!w.helps(x)) continue;
        if (x == me_) {
            const Queries q = fetched_queries(c, step);
            sends.push_back({w.pair.q, c.back ? q.dq.tensor() : q.o});
            if (!c.back) sends.push_back({w.pair.q, q.lse});
        }
        if (w.pair.q == me_) {
            const int64_t n = w.q_rows();
            recvs.push_back({x, buffer(c.buffers, "home_q", {d_.B, n, d_.H, d_.D})});
            if (!c.back) recvs.push_back({x, buffer(c.buffers, "home_lse", {d_.B * d_.H * n})});
        }
    }
}

// --- what is computed ---------------------------------------------------------------------------

// When results of the last step go home, a share of the local step is left to hide their way.
void RingAttention::compute(Stream& s, Call& c, int step, bool late) const {
    const Work& w = c.table[size_t(step)][size_t(me_)];
    const Share all{0, w.pieces.size(), 0, d_.B, 0, d_.Hk};
    const bool splits = step == 0 && anything_travels(c, steps());
    const Share mine = splits ? share_of(all, late) : all;
    if (mine.empty() || (late && !splits)) return;
    Queries fetched_q = w.helps(me_) ? fetched_queries(c, step) : Queries();
    Keys fetched_k = w.fetches_keys(me_) ? fetched_keys(c, step) : Keys();
    Queries& q = w.helps(me_) ? fetched_q : c.queries;
    Keys& keys = w.fetches_keys(me_) ? fetched_k : c.keys;
    if (w.helps(me_) && !c.back) k_.fill(s, q.lse, -std::numeric_limits<double>::infinity());
    const auto box = [&](int64_t row, int64_t rows) {
        return RowBox{
            {{{mine.batch, mine.batch_end}, {row, row + rows}, {mine.head, mine.head_end}}}};
    };
    for (size_t i = mine.piece; i < mine.piece_end; ++i) {
        const Piece& p = w.pieces[i];
        const int64_t q_row = p.q_row - q.lo, group = d_.H / d_.Hk;
        const int64_t k_row = w.fetches_keys(me_) ? w.in_block(p.k_row) : p.k_row;
        const auto half = [&](const Tensor& kv, int which) {
            return mine.of(kv, 2, 1, which * d_.Hk).slice(1, k_row, p.k_rows);
        };
        const auto rows = [&](const Tensor& t) { return t.slice(1, q_row, p.q_rows); };
        const auto queries = [&](const Tensor& t) { return mine.of(rows(t), 2, group); };
        const auto stats = [&](const Tensor& t) {
            return mine.of(t.slice(2, q_row, p.q_rows), 1, group);
        };
        const Tensor first_key = c.masked ? mine.sequences(rows(q.first_key)) : Tensor();
        if (c.back) {
            const bool add_q = q.dq.must_add(s, box(q_row, p.q_rows));
            const bool add_kv = keys.dkv.must_add(s, box(k_row, p.k_rows));
            k_.attention_backward(s, {.q = queries(q.q),
                                      .k = half(keys.kv, 0),
                                      .v = half(keys.kv, 1),
                                      .dout = queries(q.dout),
                                      .lse = stats(q.lse),
                                      .delta = stats(q.delta),
                                      .dq = queries(q.dq.tensor()),
                                      .dk = half(keys.dkv.tensor(), 0),
                                      .dv = half(keys.dkv.tensor(), 1),
                                      .first_key = first_key,
                                      .q0 = p.q0,
                                      .k0 = p.k0,
                                      .scale = scale_,
                                      .causal = p.causal,
                                      .add_q = add_q,
                                      .add_kv = add_kv});
        } else {
            k_.attention_forward(s, {.q = queries(q.q),
                                     .k = half(keys.kv, 0),
                                     .v = half(keys.kv, 1),
                                     .o = queries(q.o),
                                     .lse = stats(q.lse),
                                     .first_key = first_key,
                                     .q0 = p.q0,
                                     .k0 = p.k0,
                                     .scale = scale_,
                                     .causal = p.causal,
                                     .carry = true});
        }
    }
    if (c.back && w.helps(me_)) q.dq.clear_rest(s);
}

// Adds what came home of `step`; after the last one the sums go to the caller at once.
void RingAttention::collect(Stream& s, Call& c, int step) const {
    using Out = std::vector<Tensor>;
    const bool last = step + 1 == steps();
    const Out dq = last ? Out{c.given.dq} : Out{}, dkv = last ? Out{c.given.dk, c.given.dv} : Out{};
    for (int x = 0; x < ranks(); ++x) {
        const Work& w = c.table[size_t(step)][size_t(x)];
        if (c.back && w.fetches_keys(x) && w.pair.k == me_) {
            const Tensor home = buffer(c.buffers, "home_kv", {d_.B, w.k_rows(), 2 * d_.Hk, d_.D});
            for (int64_t b = 0; b < d_.B; ++b)
                for (const Span& span : w.keys)
                    c.keys.dkv.add(s, b, span.row, home.rows(b, 1).slice(1, span.at, span.rows),
                                   dkv);
        }
        if (!w.helps(x) || w.pair.q != me_) continue;
        const int64_t n = w.q_rows();
        const Tensor home = buffer(c.buffers, "home_q", {d_.B, n, d_.H, d_.D});
        for (int64_t b = 0; c.back && b < d_.B; ++b)
            c.queries.dq.add(s, b, w.q_lo, home.rows(b, 1), dq);
        if (c.back) continue;
        k_.attention_merge(s, c.queries.o.slice(1, w.q_lo, n), c.queries.lse.slice(2, w.q_lo, n),
                           home, buffer(c.buffers, "home_lse", {d_.B, d_.H, n}));
    }
}

void RingAttention::loop(Stream& s, Call& c) {
    Device& device = k_.device();
    bool in_flight = false;
    for (int t = 0; t < steps() + 2; ++t) {
        if (in_flight) device.wait(s, arrived_);
        if (t >= 2) collect(s, c, t - 2);
        in_flight = anything_travels(c, t);
        if (in_flight) {
            List sends, recvs;
            if (t + 1 < steps()) blocks_in(s, c, t + 1, sends, recvs);
            if (t >= 1 && t <= steps()) results_home(c, t - 1, sends, recvs);
            device.record(ready_, s);
            device.wait(stream_, ready_);
            comm_.exchange(stream_, sends, recvs);
            device.record(arrived_, stream_);
        }
        if (t < steps()) compute(s, c, t, false);
        if (t == steps()) compute(s, c, 0, true);
    }
}

// Packs what will be sent and names what both directions need.
Call RingAttention::start(Stream& s, bool back, const AttnGradIn& g) const {
    const bool masked = present(g.first_key);
    CHECK(masked || !p_.by_work || !has_documents_, ": tokens lie where the documents want them");
    const int64_t in = back ? 2 : 1;
    Call c{back, masked, masked ? masked_ : plain_, back ? backward_ : forward_, {}, {}, g};
    c.keys.kv = buffer(c.buffers, "kv", {d_.B, T_, 2 * d_.Hk, d_.D});
    copy_rows(k_, s, c.keys.kv.slice(2, 0, d_.Hk), g.k);
    copy_rows(k_, s, c.keys.kv.slice(2, d_.Hk, d_.Hk), g.v);
    if (has_helper_) {
        const Tensor packed = buffer(c.buffers, "q", {d_.B, T_, in * d_.H, d_.D});
        copy_rows(k_, s, packed.slice(2, 0, d_.H), g.q);
        if (back) copy_rows(k_, s, packed.slice(2, d_.H, d_.H), g.dout);
    }
    c.queries.q = g.q;
    c.queries.dout = g.dout;
    c.queries.first_key = g.first_key;
    c.queries.lse = g.lse;
    const Tensor result = buffer(c.buffers, "q_result", {d_.B, T_, d_.H, d_.D});
    if (back)
        c.queries.dq = {k_, result, d_.Hk};
    else
        c.queries.o = result;
    return c;
}

void RingAttention::forward(Stream& s, const AttnIn& in) {
    CHECK(bound_, ": not bound");
    Call c = start(s, false,
                   {.q = in.q, .k = in.k, .v = in.v, .lse = in.lse, .first_key = in.first_key});
    fill_rows(k_, s, c.queries.lse, -std::numeric_limits<double>::infinity());
    if (c.masked) fill_rows(k_, s, c.queries.o, 0);  // a query may see nothing
    loop(s, c);
    copy_rows(k_, s, in.o, c.queries.o);
}

void RingAttention::backward(Stream& s, const AttnGradIn& g) {
    CHECK(bound_, ": not bound");
    Call c = start(s, true, g);
    const Tensor dkv = buffer(c.buffers, "kv_result", {d_.B, T_, 2 * d_.Hk, d_.D});
    c.keys.dkv = {k_, dkv, d_.Hk, true};
    c.queries.delta = g.delta;
    if (!present(g.delta)) {
        c.queries.delta = buffer(c.buffers, "delta", {d_.B, d_.H, T_});
        if (T_ > 0) k_.attention_delta(s, c.queries.delta, g.dout, g.o);
    }
    loop(s, c);
    c.queries.dq.hand_over(s, std::vector{g.dq});
    c.keys.dkv.hand_over(s, std::vector{g.dk, g.dv});
}

}  // namespace

std::unique_ptr<SeqParallel> make_ring_attention(Kernels& k, Comm& ring, const AttnDims& d,
                                                 RingPlan plan, const std::string& name) {
    CHECK(int(plan.runs.size()) == ring.size(), ": plan for ", plan.runs.size(), " ranks");
    return std::make_unique<RingAttention>(k, ring, d, std::move(plan), name);
}

}  // namespace torus
