// One slice of the heads in Ulysses: every rank has some tokens of all of them, then all tokens of
// some of them, and attention's results go the way back. Forward and backward are three calls each,
// with an exchange of the messages they return between them, so that the exchanges of one slice can
// run beside the attention of another.
//
// Names: U ranks; rank u has heads_[u] and, of the group's Tg tokens, rows_[u]. Heads are counted
// within the slice.
#pragma once
#include "comm/seq/ulysses.h"

namespace torus {

struct Messages {
    std::vector<Message> sends, recvs;
};

// The heads that one rank computes: queries [q, q + queries), keys and values [k, k + keys).
struct HeadShare {
    explicit HeadShare(std::vector<HeadGroup> of_rank);
    std::vector<HeadGroup> groups;
    int64_t q = 0, queries = 0, k = 0, keys = 0;
    bool has_key(int64_t head) const { return head >= k && head < k + keys; }
};

class HeadSlice {
public:
    // d: of the slice. number: of the slice among its equals. tokens: of the group.
    HeadSlice(Kernels&, Comm&, const AttnDims& d, int number, const Runs& tokens, const MakeInner&);

    void plan(Layout& device, Layout& pinned) const;
    WorkspaceDims workspace() const;
    void bind(const Arena& device, const Arena& pinned);
    void set_documents(const int32_t* first_key);
    double imbalance() const;

    // Packs, and names what goes to the ranks that have the heads; attention, and what goes back;
    // unpacks. All queue on the stream.
    Messages begin(Stream&, const AttnIn&) const;
    Messages attend(Stream&, const AttnIn&) const;
    void finish(Stream&, const AttnIn&) const;
    Messages begin(Stream&, const AttnGradIn&) const;
    Messages attend(Stream&, const AttnGradIn&) const;
    void finish(Stream&, const AttnGradIn&) const;

private:
    int ranks() const { return comm_.size(); }
    const HeadShare& mine() const { return heads_[size_t(me_)]; }
    int64_t T() const { return rows_[size_t(me_)].count; }

    void lay_out();
    Tensor buffer(const Layout& l, const std::string& what) const { return l.tensor(what, base_); }
    // Tokens of rank u among the group's rows of `t`, which are its dimension `axis`.
    Tensor rows_of(const Tensor& t, int axis, int u) const {
        return t.slice(axis, rows_[size_t(u)].begin, rows_[size_t(u)].count);
    }
    // Statistics (B,queries,Tg) of a group of my heads; the groups lie one after the other.
    Tensor group_stats(const Tensor& all, const HeadGroup& g) const {
        return all.slice(0, (g.q - mine().q) * d_.B * Tg_, g.queries * d_.B * Tg_)
            .view({d_.B, g.queries, Tg_});
    }
    Tensor staged_stats(int u, int which, const HeadGroup& g) const;
    Tensor delta_of(const AttnGradIn&) const;

    Messages tokens_to_heads(Stream& s, const Layout& l, const std::vector<Tensor>& per_query,
                             const Tensor& k, const Tensor& v, const Tensor& first_key) const;
    Messages heads_to_tokens(const Tensor& heads, const Layout& l) const;
    Tensor returned(const Tensor& heads, const Layout& l, int u) const;
    void sum_over_ranks(Stream& s, const Tensor& dheads, const Tensor& out, bool values) const;

    Kernels& k_;
    Comm& comm_;
    AttnDims d_;
    int me_;
    std::string name_;
    int64_t Tg_;
    std::vector<HeadShare> heads_;
    std::vector<TokenRun> rows_;
    std::vector<std::unique_ptr<SeqParallel>> inner_;  // one per group of my heads
    Layout forward_, backward_;
    void* base_ = nullptr;
};

}  // namespace torus
