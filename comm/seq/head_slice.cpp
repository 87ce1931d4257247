// One message per sequence and rank carries q, k and v together: the receiver needs no unpacking,
// because the kernels take q, k and v with a pitch. On the way back it is the sender who needs no
// packing. The softmax statistics follow (1/D of the bytes), and in backward the sums of dout * o,
// so that o itself stays where it is.
#include "comm/seq/head_slice.h"

#include <algorithm>

#include "comm/seq/tensors.h"

namespace torus {

namespace {

void each_sequence(std::vector<Message>& list, int peer, const Tensor& t) {
    for (int64_t b = 0; b < t.dim(0); ++b) list.push_back({peer, t.rows(b, 1)});
}

}  // namespace

HeadShare::HeadShare(std::vector<HeadGroup> of_rank) : groups(std::move(of_rank)) {
    if (groups.empty()) return;
    q = groups.front().q;
    k = groups.front().k;
    queries = groups.back().q + groups.back().queries - q;
    keys = groups.back().k + groups.back().keys - k;
}

HeadSlice::HeadSlice(Kernels& k, Comm& comm, const AttnDims& d, int number, const Runs& tokens,
                     const MakeInner& make_inner)
    : k_(k),
      comm_(comm),
      d_(d),
      me_(comm.rank()),
      name_(concat("seq/ulysses", number)),
      Tg_(count_tokens(tokens)) {
    for (int u = 0; u < comm.size(); ++u) {
        heads_.emplace_back(head_groups(d.H, d.Hk, comm.size(), u));
        rows_.push_back(part_of(Tg_, comm.size(), u));
    }
    for (const HeadGroup& g : mine().groups)
        inner_.push_back(make_inner({d.B, d.S, g.queries, g.keys, d.D},
                                    concat("seq/heads", number * d.H + g.q)));
    lay_out();
}

void HeadSlice::plan(Layout& device, Layout& pinned) const {
    device.add(name_, DType::u8, {std::max(forward_.bytes(), backward_.bytes())});
    for (const auto& inner : inner_) inner->plan(device, pinned);
}

WorkspaceDims HeadSlice::workspace() const {
    // A rank without heads makes no call; the least that kernels can size is then as good.
    WorkspaceDims all{
        .rows = d_.B, .heads = 1, .kv_heads = 1, .head_dim = d_.D, .batch = d_.B, .keys = 1};
    for (const auto& inner : inner_) {
        const WorkspaceDims one = inner->workspace();
        all.rows = std::max(all.rows, one.rows);
        all.heads = std::max(all.heads, one.heads);
        all.kv_heads = std::max(all.kv_heads, one.kv_heads);
        all.keys = std::max(all.keys, one.keys);
    }
    return all;
}

void HeadSlice::bind(const Arena& device, const Arena& pinned) {
    base_ = device[name_].data;
    for (const auto& inner : inner_) inner->bind(device, pinned);
}

void HeadSlice::set_documents(const int32_t* first_key) {
    for (const auto& inner : inner_) inner->set_documents(first_key);
}

double HeadSlice::imbalance() const {
    const double heads = double((d_.H + comm_.size() - 1) / comm_.size()) * comm_.size();
    return heads / double(d_.H) * (inner_.empty() ? 1.0 : inner_[0]->imbalance());
}

// Phases: 0 tokens to heads, 1 attention, 2 heads to tokens.
void HeadSlice::lay_out() {
    const DType act = k_.precision().act, stat = k_.precision().stat;
    const int64_t B = d_.B, D = d_.D;
    for (const bool back : {false, true}) {
        Layout& l = back ? backward_ : forward_;
        const int64_t per_query = back ? 2 : 1;  // q, and dout
        const auto width = [&](const HeadShare& h) { return per_query * h.queries + 2 * h.keys; };
        const auto width_back = [&](const HeadShare& h) {
            return back ? h.queries + 2 * h.keys : h.queries;
        };
        l.add("heads", act, {B, Tg_, width(mine()), D}, {0, 1});
        l.add("first_key", DType::i32, {B, Tg_}, {0, 1});
        l.add("lse", stat, {B * mine().queries * Tg_}, {0, 2});
        if (back) l.add("delta", stat, {B * mine().queries * Tg_}, {0, 1});
        if (back) l.add("my_delta", stat, {B, d_.H, T()}, {0, 0});
        l.add("results", act, {B, Tg_, width_back(mine()), D}, {1, 2});
        if (back) l.add("sums", stat, {2, B, T(), 1, D}, {2, 2});
        for (int u = 0; u < ranks(); ++u) {
            if (u == me_) continue;
            const auto n = std::to_string(u);
            const HeadShare& h = heads_[size_t(u)];
            l.add("out" + n, act, {B, T(), width(h), D}, {0, 0});
            l.add("back" + n, act, {B, T(), width_back(h), D}, {2, 2});
            const int64_t stats = B * mine().queries * rows_[size_t(u)].count;
            l.add("stats" + n, stat, {per_query, stats}, back ? Life{0, 0} : Life{2, 2});
        }
    }
}

// What turns my tokens of all heads into all tokens of my heads. per_query: q, or q and dout.
Messages HeadSlice::tokens_to_heads(Stream& s, const Layout& l,
                                    const std::vector<Tensor>& per_query, const Tensor& k,
                                    const Tensor& v, const Tensor& first_key) const {
    Messages m;
    const Tensor heads = buffer(l, "heads");
    for (int u = 0; u < ranks(); ++u) {
        const HeadShare& h = heads_[size_t(u)];
        const Tensor to = u == me_ ? rows_of(heads, 1, me_) : buffer(l, "out" + std::to_string(u));
        int64_t at = 0;
        const auto pack = [&](const Tensor& t, int64_t first, int64_t count) {
            copy_rows(k_, s, to.slice(2, at, count), t.slice(2, first, count));
            at += count;
        };
        for (const Tensor& t : per_query) pack(t, h.q, h.queries);
        pack(k, h.k, h.keys);
        pack(v, h.k, h.keys);
        if (u != me_) each_sequence(m.sends, u, to);
        if (u != me_) each_sequence(m.recvs, u, rows_of(heads, 1, u));
    }
    if (!present(first_key)) return m;
    const Tensor all = buffer(l, "first_key");
    copy_rows(k_, s, rows_of(all, 1, me_), first_key);
    for (int u = 0; u < ranks(); ++u) {
        if (u == me_) continue;
        if (heads_[size_t(u)].queries > 0) each_sequence(m.sends, u, first_key);
        if (mine().queries > 0) each_sequence(m.recvs, u, rows_of(all, 1, u));
    }
    return m;
}

// The other way, for the results of my heads.
Messages HeadSlice::heads_to_tokens(const Tensor& heads, const Layout& l) const {
    Messages m;
    for (int u = 0; u < ranks(); ++u) {
        if (u == me_) continue;
        each_sequence(m.sends, u, rows_of(heads, 1, u));
        each_sequence(m.recvs, u, buffer(l, "back" + std::to_string(u)));
    }
    return m;
}

// What came back from rank u for my tokens: (B,T,its heads,D).
Tensor HeadSlice::returned(const Tensor& heads, const Layout& l, int u) const {
    return u == me_ ? rows_of(heads, 1, me_) : buffer(l, "back" + std::to_string(u));
}

Messages HeadSlice::begin(Stream& s, const AttnIn& in) const {
    return tokens_to_heads(s, forward_, {in.q}, in.k, in.v, in.first_key);
}

Messages HeadSlice::attend(Stream& s, const AttnIn& in) const {
    const Layout& l = forward_;
    const Tensor heads = buffer(l, "heads"), o = buffer(l, "results"), lse = buffer(l, "lse");
    const HeadShare& h = mine();
    for (size_t i = 0; i < inner_.size(); ++i) {
        const HeadGroup& g = h.groups[i];
        const int64_t k = h.queries + g.k - h.k;
        inner_[i]->forward(
            s, {.q = heads.slice(2, g.q - h.q, g.queries),
                .k = heads.slice(2, k, g.keys),
                .v = heads.slice(2, k + h.keys, g.keys),
                .o = o.slice(2, g.q - h.q, g.queries),
                .lse = group_stats(lse, g),
                .first_key = present(in.first_key) ? buffer(l, "first_key") : Tensor()});
    }

    Messages m = heads_to_tokens(o, l);
    for (int u = 0; u < ranks(); ++u) {
        for (const HeadGroup& g : h.groups) {
            const Tensor part = rows_of(group_stats(lse, g), 2, u);
            if (u == me_) {
                copy_rows(k_, s, in.lse.slice(1, g.q, g.queries), part);
                continue;
            }
            const int64_t rows = rows_[size_t(u)].count;
            const Tensor packed = buffer(l, "stats" + std::to_string(u))
                                      .slice(1, (g.q - h.q) * d_.B * rows, g.queries * d_.B * rows)
                                      .view({d_.B, g.queries, rows});
            copy_rows(k_, s, packed, part);
            each_sequence(m.sends, u, packed);
        }
        if (u == me_) continue;
        for (const HeadGroup& g : heads_[size_t(u)].groups)
            each_sequence(m.recvs, u, in.lse.slice(1, g.q, g.queries));
    }
    return m;
}

void HeadSlice::finish(Stream& s, const AttnIn& in) const {
    const Tensor o = buffer(forward_, "results");
    for (int u = 0; u < ranks(); ++u)
        copy_rows(k_, s, in.o.slice(2, heads_[size_t(u)].q, heads_[size_t(u)].queries),
                  returned(o, forward_, u));
}

// What comes of lse (which = 0) and delta (1) from rank u for a group of my heads.
Tensor HeadSlice::staged_stats(int u, int which, const HeadGroup& g) const {
    const int64_t rows = rows_[size_t(u)].count;
    return buffer(backward_, "stats" + std::to_string(u))
        .rows(which, 1)
        .slice(1, (g.q - mine().q) * d_.B * rows, g.queries * d_.B * rows)
        .view({d_.B, g.queries, rows});
}

Tensor HeadSlice::delta_of(const AttnGradIn& g) const {
    return present(g.delta) ? g.delta : buffer(backward_, "my_delta");
}

Messages HeadSlice::begin(Stream& s, const AttnGradIn& g) const {
    const Tensor delta = delta_of(g);
    if (!present(g.delta) && T() > 0) k_.attention_delta(s, delta, g.dout, g.o);
    Messages m = tokens_to_heads(s, backward_, {g.q, g.dout}, g.k, g.v, g.first_key);
    // lse and delta: whole rows of mine leave as they are; what comes in is dealt out afterwards.
    for (const int which : {0, 1})
        for (int u = 0; u < ranks(); ++u) {
            if (u == me_) continue;
            for (const HeadGroup& x : heads_[size_t(u)].groups)
                each_sequence(m.sends, u, (which ? delta : g.lse).slice(1, x.q, x.queries));
            for (const HeadGroup& x : mine().groups)
                each_sequence(m.recvs, u, staged_stats(u, which, x));
        }
    return m;
}

Messages HeadSlice::attend(Stream& s, const AttnGradIn& g) const {
    const Layout& l = backward_;
    const HeadShare& h = mine();
    const Tensor stats[] = {buffer(l, "lse"), buffer(l, "delta")};
    const Tensor given[] = {g.lse, delta_of(g)};
    for (const int which : {0, 1})
        for (int u = 0; u < ranks(); ++u)
            for (const HeadGroup& x : h.groups)
                copy_rows(
                    k_, s, rows_of(group_stats(stats[which], x), 2, u),
                    u == me_ ? given[which].slice(1, x.q, x.queries) : staged_stats(u, which, x));

    const Tensor heads = buffer(l, "heads"), d = buffer(l, "results");
    for (size_t i = 0; i < inner_.size(); ++i) {
        const HeadGroup& x = h.groups[i];
        const int64_t q = x.q - h.q, k = 2 * h.queries + x.k - h.k, dk = h.queries + x.k - h.k;
        inner_[i]->backward(s,
                            {.q = heads.slice(2, q, x.queries),
                             .k = heads.slice(2, k, x.keys),
                             .v = heads.slice(2, k + h.keys, x.keys),
                             .o = {},
                             .lse = group_stats(stats[0], x),
                             .dout = heads.slice(2, h.queries + q, x.queries),
                             .first_key = present(g.first_key) ? buffer(l, "first_key") : Tensor(),
                             .dq = d.slice(2, q, x.queries),
                             .dk = d.slice(2, dk, x.keys),
                             .dv = d.slice(2, dk + h.keys, x.keys),
                             .delta = group_stats(stats[1], x)});
    }

    return heads_to_tokens(d, l);
}

void HeadSlice::finish(Stream& s, const AttnGradIn& g) const {
    const Tensor d = buffer(backward_, "results");
    for (int u = 0; u < ranks(); ++u) {
        const HeadShare& x = heads_[size_t(u)];
        copy_rows(k_, s, g.dq.slice(2, x.q, x.queries),
                  returned(d, backward_, u).slice(2, 0, x.queries));
    }
    sum_over_ranks(s, d, g.dk, false);
    sum_over_ranks(s, d, g.dv, true);
}

// out (B,T,Hk,D) = what the ranks found for each kv head, in rank order.
void HeadSlice::sum_over_ranks(Stream& s, const Tensor& dheads, const Tensor& out,
                               bool values) const {
    if (T() == 0) return;
    const Tensor sums = buffer(backward_, "sums");
    const Shape shape{d_.B, T(), 1, d_.D};
    const Tensor sum = sums.rows(0, 1).view(shape), next = sums.rows(1, 1).view(shape);
    const auto owners_of = [&](int64_t head) {
        std::vector<int> owners;
        for (int u = 0; u < ranks(); ++u)
            if (heads_[size_t(u)].has_key(head)) owners.push_back(u);
        return owners;
    };
    const auto found_by = [&](int u, int64_t head, int64_t count) {
        const HeadShare& h = heads_[size_t(u)];
        const int64_t at = h.queries + (values ? h.keys : 0) + head - h.k;
        return returned(dheads, backward_, u).slice(2, at, count);
    };
    for (int64_t head = 0, count = 1; head < d_.Hk; head += count, count = 1) {
        const std::vector<int> owners = owners_of(head);
        if (owners.size() == 1) {
            while (head + count < d_.Hk && owners_of(head + count) == owners) ++count;
            k_.cast(s, out.slice(2, head, count), found_by(owners[0], head, count));
            continue;
        }
        k_.cast(s, sum, found_by(owners[0], head, 1));
        for (size_t i = 1; i < owners.size(); ++i) {
            k_.cast(s, next, found_by(owners[i], head, 1));
            k_.add(s, sum, sum, next);
        }
        k_.cast(s, out.slice(2, head, 1), sum);
    }
}

}  // namespace torus
