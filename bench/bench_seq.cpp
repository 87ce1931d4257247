// What sequence parallelism costs: for each mode the time of attention, forward and backward, on
// all ranks against the time of one rank on the whole sequence divided by the number of ranks; what
// of the difference is exchange that computing does not hide; and the bytes that a rank sends. The
// results are compared with one rank's first: a mode that is wrong has no rate.
//
//   bench_seq [--ranks N | --threads N | --play N] [--device cpu|cuda]
//   [--mode NAME[:RINGxULYSSES],...]
//   [--batch B] [--seq S] [--heads H] [--kv-heads Hk] [--head-dim D] [--repeats R] [--documents N]
//   [--head-slices N] [--exchange auto|nccl|copy]
//
// --mode: all without it; usp:2x4 is a ring of 2 groups that exchange heads among 4.
// --documents: sequences of packed documents of log-normal length, N tokens at the median.
// --head-slices: parts of the heads in Ulysses, whose exchanges and attention overlap; 0 = chosen.
// --exchange: what carries the messages between GPUs, NCCL's kernels or the copy engines;
// auto (the default): the latter where they work.
// --threads: the ranks are threads of this process, on a GPU each, and need no MPI.
// --play: the ranks share one GPU and compute in turn. What it shows of links is their absence: the
// time that a rank of N computes, which no exchange can undercut.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "bench/documents.h"
#include "bench/help.h"
#include "bench/ranks.h"
#include "comm/seq/balance.h"
#include "kernels/rng.h"

using namespace torus;

namespace {

// A communicator that can be told to send nothing, to time the computing alone. Its buffers then
// hold what came last: a GPU is faster on zeros, so that would be no comparison.
class SwitchedComm final : public Comm {
public:
    SwitchedComm(std::unique_ptr<Comm> real, const bool& silent)
        : Comm(real->rank(), real->size(), "switched"), real_(std::move(real)), silent_(silent) {}
    bool by_copy_engines() const override { return real_->by_copy_engines(); }

protected:
    void do_all_reduce(Stream& s, Tensor x, Reduce op) override { real_->all_reduce(s, x, op); }
    void do_all_gather(Stream& s, Tensor out, Tensor in) override { real_->all_gather(s, out, in); }
    void do_reduce_scatter(Stream& s, Tensor out, Tensor in, Reduce op) override {
        real_->reduce_scatter(s, out, in, op);
    }
    void do_broadcast(Stream& s, Tensor x, int root) override { real_->broadcast(s, x, root); }
    void do_exchange(Stream& s, std::span<const Message> sends,
                     std::span<const Message> recvs) override {
        if (!silent_) real_->exchange(s, sends, recvs);
    }
    void do_barrier(Stream& s) override { real_->barrier(s); }
    std::unique_ptr<Comm> do_split(int color, int key, const std::string& name) override {
        return real_->split(color, key, name);
    }

private:
    std::unique_ptr<Comm> real_;
    const bool& silent_;
};

struct ModeChoice {
    std::string name;
    int ring = 0, ulysses = 0;  // 0 = chosen
};

struct Settings {
    RankSettings ranks;
    std::vector<ModeChoice> modes;
    AttnDims d{1, 1024, 8, 8, 64};
    int repeats = 5, head_slices = 0;
    int64_t documents = 0;  // median length; 0 = one document
};

// NAME[:RINGxULYSSES],...
std::vector<ModeChoice> parse_modes(const std::string& list) {
    std::vector<ModeChoice> modes;
    for (size_t at = 0; at <= list.size();) {
        const size_t end = std::min(list.find(',', at), list.size());
        const std::string text = list.substr(at, end - at);
        const size_t colon = text.find(':'), x = text.find('x', std::min(colon, text.size()));
        ModeChoice choice{find_seq_mode(text.substr(0, colon)).name};
        if (colon != std::string::npos) {
            require(x != std::string::npos, Exit::usage, "--mode ", text, ": must be NAME or ",
                    "NAME:RINGxULYSSES");
            choice.ring = int(whole_number("--mode", text.substr(colon + 1, x - colon - 1)));
            choice.ulysses = int(whole_number("--mode", text.substr(x + 1)));
        }
        modes.push_back(choice);
        at = end + 1;
    }
    return modes;
}

Settings parse(int argc, char** argv) {
    Settings s;
    const std::map<std::string, int64_t*> numbers = {
        {"--batch", &s.d.B},     {"--seq", &s.d.S},      {"--heads", &s.d.H},
        {"--kv-heads", &s.d.Hk}, {"--head-dim", &s.d.D}, {"--documents", &s.documents}};
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        require(i + 1 < argc, Exit::usage, flag, ": needs a value");
        const std::string value = argv[++i];
        if (const auto it = numbers.find(flag); it != numbers.end()) {
            *it->second = whole_number(flag, value);
        } else if (parse_rank_flag(flag, value, s.ranks)) {
            continue;
        } else if (flag == "--mode") {
            s.modes = parse_modes(value);
        } else if (flag == "--repeats") {
            s.repeats = int(whole_number(flag, value));
        } else if (flag == "--head-slices") {
            s.head_slices = int(whole_number(flag, value));
        } else {
            fail(Exit::usage, flag, ": unknown; see the head of bench/bench_seq.cpp");
        }
    }
    if (s.modes.empty())
        for (const SeqMode& mode : seq_modes())
            if (mode.ring || mode.ulysses) s.modes.push_back({mode.name});
    return s;
}

// One attention with its memory: inputs that depend on global positions only, and outputs.
class Run {
public:
    // first_key (B,S), or empty.
    Run(Kernels& k, SeqParallel& seq, const AttnDims& d, const std::vector<int32_t>& first_key)
        : k_(k), seq_(seq), d_(d) {
        Layout pinned;
        if (!first_key.empty()) seq.set_documents(first_key.data());
        seq.plan(layout_, pinned);
        for (const TokenRun& r : seq.placement()) T_ += r.count;
        const DType act = k.precision().act, stat = k.precision().stat;
        layout_.add("run/qkv", act, {d.B, T_, d.H + 2 * d.Hk, d.D});
        layout_.add("run/dqkv", act, {d.B, T_, d.H + 2 * d.Hk, d.D});
        layout_.add("run/o", act, {d.B, T_, d.H, d.D});
        layout_.add("run/dout", act, {d.B, T_, d.H, d.D});
        layout_.add("run/lse", stat, {d.B, d.H, T_});
        layout_.add("run/first_key", DType::i32, {d.B, T_});
        layout_.add("run/sums", DType::f64, {4});
        layout_.add("run/workspace", DType::u8, {k.workspace_bytes(seq.workspace())});
        arena_ = Arena(k.device(), Memory::device, layout_);
        pinned_ = Arena(k.device(), Memory::pinned, pinned);
        seq.bind(arena_, pinned_);
        s_ = k.device().make_stream();
        s_.workspace = arena_["run/workspace"];
        fill("run/qkv", 1, d.H + 2 * d.Hk);
        fill("run/dout", 2, d.H);
        const auto heads = [&](const char* name, int64_t first, int64_t count) {
            return arena_[name].slice(2, first, count);
        };
        g_ = {.q = heads("run/qkv", 0, d.H),
              .k = heads("run/qkv", d.H, d.Hk),
              .v = heads("run/qkv", d.H + d.Hk, d.Hk),
              .o = arena_["run/o"],
              .lse = arena_["run/lse"],
              .dout = arena_["run/dout"],
              .first_key = first_key.empty() ? Tensor() : upload(first_key),
              .dq = heads("run/dqkv", 0, d.H),
              .dk = heads("run/dqkv", d.H, d.Hk),
              .dv = heads("run/dqkv", d.H + d.Hk, d.Hk),
              .delta = {}};
    }
    ~Run() { k_.device().destroy(s_); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    void forward() { seq_.forward(s_, {g_.q, g_.k, g_.v, g_.o, g_.lse, g_.first_key}); }
    void backward() { seq_.backward(s_, g_); }
    void wait() { k_.device().synchronize(s_); }

    // Squared norms of o, dq, dk, dv over my tokens.
    std::vector<double> squares() {
        const Tensor sums = arena_["run/sums"];
        const Tensor parts[] = {g_.o, g_.dq, g_.dk, g_.dv};
        for (int i = 0; i < 4; ++i) {
            const Tensor sum = sums.slice(0, i, 1);
            k_.fill(s_, sum, 0);
            // The op takes dense tensors: dout, which is as large, lends its memory.
            const Tensor& p = parts[i];
            const Tensor dense(arena_["run/dout"].data, p.dtype, p.shape);
            k_.cast(s_, dense, p);
            k_.sum_squares(s_, sum, dense, false);
        }
        std::vector<double> host(4);
        k_.device().copy(s_, host.data(), sums.data, sums.bytes());
        wait();
        fill("run/dout", 2, d_.H);
        return host;
    }

private:
    // My tokens of it.
    Tensor upload(const std::vector<int32_t>& first_key) {
        std::vector<int32_t> mine;
        for (int64_t b = 0; b < d_.B; ++b)
            for (const TokenRun& r : seq_.placement()) {
                const auto from = first_key.begin() + b * d_.S + r.begin;
                mine.insert(mine.end(), from, from + r.count);
            }
        const Tensor t = arena_["run/first_key"];
        k_.device().copy(s_, t.data, mine.data(), t.bytes());
        wait();
        return t;
    }

    // Values are a function of the global token, so that every placement has the same problem: a
    // table of random numbers, read over and over (a prime length, so that no two tokens agree).
    void fill(const char* name, uint64_t seed, int64_t heads) {
        std::vector<float> table(65521);
        for (size_t i = 0; i < table.size(); ++i)
            table[i] = float(2 * random_uniform(seed, 0, i) - 1);
        // In pieces, because on the host a long sequence would need twice its memory for each rank.
        const Tensor t = arena_[name], flat(t.data, t.dtype, {t.numel()});
        const int64_t piece = std::min<int64_t>(t.numel(), 1 << 24);
        const Buffer staging(k_.device(), Memory::device, 4 * piece);
        std::vector<float> values;
        int64_t done = 0;
        const auto flush = [&] {
            const int64_t n = int64_t(values.size());
            k_.device().copy(s_, staging.data(), values.data(), 4 * n);
            k_.cast(s_, flat.slice(0, done, n), Tensor(staging.data(), DType::f32, {n}));
            wait();
            done += n;
            values.clear();
        };
        for (int64_t b = 0; b < d_.B; ++b)
            for (const TokenRun& r : seq_.placement()) {
                size_t entry = size_t((b * d_.S + r.begin) * heads * d_.D) % table.size();
                for (int64_t i = 0; i < r.count * heads * d_.D; ++i) {
                    values.push_back(table[entry]);
                    entry = entry + 1 < table.size() ? entry + 1 : 0;
                    if (int64_t(values.size()) == piece) flush();
                }
            }
        if (!values.empty()) flush();
    }

    Kernels& k_;
    SeqParallel& seq_;
    AttnDims d_;
    Layout layout_;
    Arena arena_, pinned_;
    int64_t T_ = 0;
    Stream s_;
    AttnGradIn g_;
};

struct Times {
    double forward = 1e30, backward = 1e30;  // ms, of the slowest rank
    double both() const { return forward + backward; }
};

// The fastest of the repeats; in each, the slowest rank counts.
Times measure(Run& run, Comm& host, int repeats, bool in_turn) {
    Times best;
    const auto wait = [&] { run.wait(); };
    const auto time = [&](auto f) { return slowest_ms(host, f, wait, in_turn); };
    for (int i = 0; i <= repeats; ++i) {
        const double f = time([&] { run.forward(); }), b = time([&] { run.backward(); });
        if (i == 0) continue;  // warm-up
        best.forward = std::min(best.forward, f);
        best.backward = std::min(best.backward, b);
    }
    return best;
}

// GB/s of each rank sending to its neighbour while it receives from the other: the ceiling.
double exchange_rate(Kernels& k, Comm& device, Comm& host, int64_t bytes) {
    const Buffer memory(k.device(), Memory::device, 2 * bytes);
    const Tensor all(memory.data(), DType::u8, {2, bytes});
    Stream s = k.device().make_stream();
    double best = 1e30;
    for (int i = 0; i < 6; ++i) {
        const double ms = slowest_ms(
            host, [&] { device.shift(s, all.rows(1, 1), all.rows(0, 1)); },
            [&] { k.device().synchronize(s); });
        if (i > 0) best = std::min(best, ms);
    }
    k.device().destroy(s);
    return double(bytes) / best * 1e-6;
}

// Largest relative difference of the norms of o, dq, dk, dv from one rank's.
double compare(Run& run, Comm& host, const std::vector<double>& want) {
    std::vector<double> got = run.squares();
    Stream none;
    host.all_reduce(none, Tensor(got.data(), DType::f64, {4}));
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i)
        worst = std::max(worst, std::fabs(std::sqrt(got[i] / want[i]) - 1));
    return worst;
}

// Collective over the ranks.
void bench(const Settings& settings, Kernels& k, Comm& device, Comm& host) {
    const AttnDims& d = settings.d;
    const bool cuda = settings.ranks.device == "cuda", speaks = host.rank() == 0;
    const bool played = settings.ranks.played > 0;
    const int P = host.size();

    std::vector<int32_t> first_key;
    if (settings.documents > 0)
        first_key = packed_documents(d.B, d.S, double(settings.documents), 0);
    const auto alone = make_local_attention(k, d);
    Times one;
    std::vector<double> want;
    {
        Run run(k, *alone, d, first_key);
        one = measure(run, host, settings.repeats, played);
        want = run.squares();
    }
    const double rate = played ? 0 : exchange_rate(k, device, host, cuda ? 256 << 20 : 8 << 20);
    // 2 D per visible pair, head and product, 2 products forward, 5 backward.
    double pairs = double(d.B) * double(d.S) * double(d.S) / 2;
    if (settings.documents > 0) pairs = double(visible_sums(first_key.data(), d.B, d.S).back());
    const double flops = 14.0 * double(d.H * d.D) * pairs;
    if (speaks) {
        std::printf("%s\n",
                    concat(P, " x ", k.device().name(), ", ", name_of(k.precision().act), ": B ",
                           d.B, ", S ", d.S, ", H ", d.H, ", Hk ", d.Hk, ", D ", d.D,
                           settings.documents ? concat(", documents ", settings.documents) : "")
                        .c_str());
        std::printf("one rank: forward %.3f ms, backward %.3f ms, %.1f TFLOP/s\n", one.forward,
                    one.backward, flops / one.both() * 1e-9);
        if (played)
            std::printf("the ranks compute in turn; no exchange is timed\n\n");
        else
            std::printf("exchange with the neighbours%s: %.1f GB/s each way\n\n",
                        device.by_copy_engines() ? ", by the copy engines" : "", rate);
        std::printf("%-15s %-28s %9s %9s %8s %8s %10s %9s %9s %9s\n", "mode", "mesh", "fwd ms",
                    "bwd ms", "speed-up", "share", "exposed ms", "MB sent", "imbalance", "error");
    }
    for (const ModeChoice& mode : settings.modes) {
        const ParallelChoice choice = choose_parallel(
            {.mode = mode.name, .world = P, .sp = P, .ring = mode.ring, .ulysses = mode.ulysses},
            d);
        bool silent = false;
        Mesh mesh = make_mesh(device, choice.shape);
        for (auto* axis : {&mesh.ring, &mesh.ulysses})
            *axis = std::make_unique<SwitchedComm>(std::move(*axis), silent);
        const auto seq = make_seq_parallel(mode.name, k, mesh, d, settings.head_slices);
        Run run(k, *seq, d, first_key);
        const int real = played ? 0 : settings.repeats;  // and one to warm up
        Times t = measure(run, host, real, false);
        const double error = compare(run, host, want);
        const int64_t sent = (mesh.ring->bytes_sent() + mesh.ulysses->bytes_sent()) / (real + 1);
        silent = true;
        const Times c = measure(run, host, settings.repeats, played);
        if (played) t = c;
        char exposed[32] = "-";
        if (!played) std::snprintf(exposed, sizeof exposed, "%.3f", t.both() - c.both());
        if (speaks)
            std::printf("%-15s %-28s %9.3f %9.3f %8.2f %7.1f%% %10s %9.1f %9.2f %9.1e\n",
                        mode.name.c_str(), mesh.shape.str().c_str(), t.forward, t.backward,
                        one.both() / t.both(), 100 * one.both() / t.both() / P, exposed,
                        double(sent) * 1e-6, seq->imbalance(), error);
        require(error < (cuda ? 1e-3 : 1e-5), Exit::internal, mode.name, ": wrong result");
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    try {
        const Settings settings = parse(argc, argv);
        run_on_ranks(settings.ranks, argc, argv, [&](Kernels& k, Comm& device, Comm& host) {
            bench(settings, k, device, host);
        });
        return 0;
    } catch (const Error& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        exit_all_ranks(e.code);
    }
}
