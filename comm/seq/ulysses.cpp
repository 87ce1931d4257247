// The heads go in slices. All slices are packed and sent at once; while attention works on one, the
// next ones are on their way, and the results of those before go home: what attention does not hide
// is the way out of the first slice and the way home of the last.
#include "comm/seq/ulysses.h"

#include "comm/seq/head_slice.h"
#include "comm/seq/tensors.h"

namespace torus {
namespace {

constexpr int64_t least_message = int64_t(4) << 20;  // bytes; smaller ones gain less than they cost

// Attention of few heads is slower, and so is what runs beside kernels that move messages.
int most_slices(const Comm& comm) { return comm.by_copy_engines() ? 4 : 2; }

// As many slices as leave every rank whole kv heads in each.
int choose_slices(const AttnDims& d, const Comm& comm, DType act) {
    const int ranks = comm.size();
    const int64_t tokens = d.B * d.S / ranks;
    for (int n = most_slices(comm); n > 1; --n) {
        const int64_t heads = (d.H + 2 * d.Hk) / (n * ranks);
        if (d.Hk % (n * ranks) == 0 && tokens * heads * d.D * size_of(act) >= least_message)
            return n;
    }
    return 1;
}

class UlyssesAttention final : public SeqParallel {
public:
    UlyssesAttention(Kernels& k, Comm& comm, const AttnDims& d, GroupTokens tokens,
                     const MakeInner& make_inner, int slices)
        : device_(k.device()), comm_(comm), tokens_(std::move(tokens)) {
        if (slices == 0) slices = choose_slices(d, comm, k.precision().act);
        CHECK(d.Hk % slices == 0, ": ", slices, " slices of ", d.Hk, " kv heads");
        const AttnDims part{d.B, d.S, d.H / slices, d.Hk / slices, d.D};
        for (int i = 0; i < slices; ++i)
            slices_.emplace_back(k, comm, part, i, tokens_(nullptr), make_inner);
        heads_ = part.H, kv_heads_ = part.Hk;
        place(nullptr);
    }
    ~UlyssesAttention() override {
        if (arrived_.empty()) return;
        device_.destroy(stream_);
        device_.destroy(ready_);
        device_.destroy(leaving_);
        for (Event& e : arrived_) device_.destroy(e);
    }

    std::vector<TokenRun> placement() const override { return placement_; }

    void plan(Layout& device, Layout& pinned) const override {
        for (const HeadSlice& slice : slices_) slice.plan(device, pinned);
    }
    WorkspaceDims workspace() const override { return slices_[0].workspace(); }

    void bind(const Arena& device, const Arena& pinned) override {
        CHECK(arrived_.empty(), ": bound twice");
        for (HeadSlice& slice : slices_) slice.bind(device, pinned);
        stream_ = device_.make_stream(/*high_priority=*/true);
        ready_ = device_.make_event();
        leaving_ = device_.make_event();
        for (size_t i = 0; i < slices_.size(); ++i) arrived_.push_back(device_.make_event());
    }

    void set_documents(const int32_t* first_key) override {
        place(first_key);
        for (HeadSlice& slice : slices_) slice.set_documents(first_key);
    }
    double imbalance() const override { return slices_[0].imbalance(); }

    void forward(Stream& s, const AttnIn& in) override { run(s, in); }
    void backward(Stream& s, const AttnGradIn& g) override { run(s, g); }

private:
    void place(const int32_t* first_key) {
        const Runs group = tokens_(first_key);
        const TokenRun mine = part_of(count_tokens(group), comm_.size(), comm_.rank());
        placement_ = sub_runs(group, mine.begin, mine.count);
    }

    // The heads of slice i of tensors whose heads are dimension `axis`; absent ones stay so.
    void cut(int i, int64_t heads, int axis, std::initializer_list<Tensor*> tensors) const {
        for (Tensor* t : tensors)
            if (present(*t)) *t = t->slice(axis, i * heads, heads);
    }
    AttnIn part(AttnIn in, int i) const {
        cut(i, heads_, 2, {&in.q, &in.o});
        cut(i, kv_heads_, 2, {&in.k, &in.v});
        cut(i, heads_, 1, {&in.lse});
        return in;
    }
    AttnGradIn part(AttnGradIn g, int i) const {
        cut(i, heads_, 2, {&g.q, &g.o, &g.dout, &g.dq});
        cut(i, kv_heads_, 2, {&g.k, &g.v, &g.dk, &g.dv});
        cut(i, heads_, 1, {&g.lse, &g.delta});
        return g;
    }

    // Sends what the stream's work so far has made.
    void exchange(Stream& s, int i, const Messages& m) {
        device_.record(ready_, s);
        device_.wait(stream_, ready_);
        device_.record(leaving_, stream_);
        comm_.exchange(stream_, m.sends, m.recvs);
        device_.record(arrived_[size_t(i)], stream_);
    }

    template <class In>
    void run(Stream& s, const In& in) {
        const int n = int(slices_.size());
        for (int i = 0; i < n; ++i) exchange(s, i, slices_[size_t(i)].begin(s, part(in, i)));
        for (int i = 0; i < n; ++i) {
            device_.wait(s, arrived_[size_t(i)]);
            exchange(s, i, slices_[size_t(i)].attend(s, part(in, i)));
            // The exchange gets its multiprocessors before the next attention takes them all.
            device_.wait(s, leaving_);
        }
        for (int i = 0; i < n; ++i) {
            device_.wait(s, arrived_[size_t(i)]);
            slices_[size_t(i)].finish(s, part(in, i));
        }
    }

    Device& device_;
    Comm& comm_;
    GroupTokens tokens_;
    int64_t heads_ = 0, kv_heads_ = 0;  // of a slice
    std::vector<HeadSlice> slices_;
    Runs placement_;
    Stream stream_;               // of the exchanges
    Event ready_, leaving_;       // the last exchange may start, and starts
    std::vector<Event> arrived_;  // by slice
};

}  // namespace

std::unique_ptr<SeqParallel> make_ulysses_attention(Kernels& k, Comm& ulysses, const AttnDims& d,
                                                    GroupTokens tokens, const MakeInner& make_inner,
                                                    int slices) {
    return std::make_unique<UlyssesAttention>(k, ulysses, d, std::move(tokens), make_inner, slices);
}

}  // namespace torus
