// The modes, one line each, and the choice of mode and degrees from the flags.
#include <algorithm>
#include <numeric>

#include "comm/seq/balance.h"
#include "comm/seq/ring.h"
#include "comm/seq/ulysses.h"

namespace torus {
namespace {

using PlaceTokens = std::vector<Runs> (*)(int64_t S, int P);
using PairRanks = Schedule (*)(int P);

struct Entry {
    SeqMode mode;           // name, alias, ulysses, ring, summary
    PlaceTokens placement;  // null: each rank (of the Ulysses group) sees the whole sequence
    PairRanks schedule;
    bool by_work = false;  // tokens move with the documents of a batch
};

const std::vector<Entry>& entries() {
    static const std::vector<Entry> all = {
        {{"data_parallel", "dp", false, false, "whole sequences per rank"}, nullptr, nullptr},
        {{"ulysses", "ulysses_attn", true, false, "all-to-all: all tokens of some heads"},
         nullptr,
         nullptr},
        {{"ring", "ring_attn", false, true, "ring over contiguous shards"},
         contiguous_placement,
         ring_schedule},
        {{"zigzag_ring", "zigzag_ring_attn", false, true,
          "ring, work balanced by placement, per batch when there are documents"},
         zigzag_placement,
         ring_schedule,
         true},
        {{"dist_flash", "dist_flash_attn", false, true, "ring, causal work balanced by helpers"},
         halved_placement,
         dist_flash_schedule},
        {{"usp", "usp_attn", true, true, "ulysses groups around zigzag_ring"},
         zigzag_placement,
         ring_schedule,
         true},
        {{"usp_ring", "usp_ring_attn", true, true, "ulysses groups around ring"},
         contiguous_placement,
         ring_schedule},
        {{"usp_dist_flash", "usp_dist_flash_attn", true, true, "ulysses groups around dist_flash"},
         halved_placement,
         dist_flash_schedule},
    };
    return all;
}

const Entry& find_entry(const std::string& name) {
    std::string known;
    for (const Entry& e : entries()) {
        if (e.mode.name == name || e.mode.alias == name) return e;
        known += (known.empty() ? "" : ", ") + e.mode.name;
    }
    fail(Exit::usage, "--parallel-mode ", name, ": unknown; the modes are ", known);
}

// "2 or 4": the divisors of n next to x.
std::string nearest_divisors(int n, int x) {
    int below = 0, above = 0;
    for (int d = 1; d <= n; ++d) {
        if (n % d != 0) continue;
        if (d <= x) below = d;
        if (d >= x && !above) above = d;
    }
    if (!above || above == below) return std::to_string(below);
    return below ? concat(below, " or ", above) : std::to_string(above);
}

void require_degree(const char* flag, int value) {
    require(value >= 0, Exit::usage, flag, " ", value, ": must be 1 or more");
}

int ranks_on_machine(const ParallelRequest& ask) {
    return std::min(ask.ranks_per_machine, ask.world);
}

// The largest Ulysses degree that divides sp, stays within a machine, and cuts no kv head.
int best_ulysses(const ParallelRequest& ask, int sp, const AttnDims& d) {
    int best = 1;
    for (int u = 1; u <= sp; ++u)
        if (sp % u == 0 && d.Hk % u == 0 && ranks_on_machine(ask) % u == 0) best = u;
    return best;
}

// A sequence up to this long is left whole unless --sp says otherwise.
constexpr int64_t tokens_of_one_rank = 32768;

// --parallel-mode auto. Measured on two GPUs of one machine (docs/performance.md), attention alone:
// ulysses 1.94 times one GPU, dist_flash 1.81, zigzag_ring 1.80, ring 1.23. Between machines a
// ring's transfers hide behind attention better than an all-to-all's.
void choose_mode(const ParallelRequest& ask, const AttnDims& d, int sp, ParallelChoice& out) {
    if (ask.ulysses > 1 && (ask.ring > 1 || sp > ask.ulysses)) {
        out.mode = "usp";
        out.reason = "--ulysses leaves ring ranks over";
    } else if (ask.ulysses > 1) {
        out.mode = "ulysses";
        out.reason = "--ulysses is the whole group";
    } else if (ask.ring > 1) {
        out.mode = sp > ask.ring ? "usp" : "zigzag_ring";
        out.reason = "--ring is given";
    } else if (sp == 1) {
        out.mode = "data_parallel";
        out.reason = concat(d.S, " tokens are left whole");
    } else if (const int u = best_ulysses(ask, sp, d); u == sp) {
        out.mode = "ulysses";
        out.reason = concat("measured fastest within a machine, and ", sp, " ranks divide ", d.Hk,
                            " kv heads");
    } else if (const bool one_machine = ranks_on_machine(ask) % sp == 0; !one_machine && u > 1) {
        out.mode = "usp";
        out.reason = "all-to-all within a machine, ring between machines";
    } else {
        out.mode = "zigzag_ring";
        out.reason = one_machine
                         ? concat(sp, " ranks do not divide ", d.Hk, " kv heads")
                         : concat("no group of ranks of a machine divides ", d.Hk, " kv heads");
    }
}

int default_sp(const ParallelRequest& ask, const AttnDims& d, int ranks) {
    if (ask.sp) return ask.sp;
    if (ask.ring && ask.ulysses) return ask.ring * ask.ulysses;
    if (ask.mode == "auto" && (ask.ring || ask.ulysses)) return ask.ring + ask.ulysses;
    if (ask.mode == "auto") {
        for (int sp = 1; sp < ranks; ++sp)
            if (ranks % sp == 0 && d.S <= tokens_of_one_rank * sp) return sp;
        return ranks;
    }
    const SeqMode& mode = find_seq_mode(ask.mode);
    return mode.ring || mode.ulysses ? ranks : 1;
}

void check_dims(const AttnDims& d) {
    require(d.B >= 1, Exit::usage, "--micro-batch-size ", d.B, ": must be 1 or more");
    require(d.S >= 1, Exit::usage, "--seq-length ", d.S, ": must be 1 or more");
    require(d.H >= 1 && d.Hk >= 1 && d.D >= 1, Exit::usage, "--model: ", d.H, " heads, ", d.Hk,
            " kv heads, head dim ", d.D, ": all must be 1 or more");
    if (d.H % d.Hk == 0) return;
    fail(Exit::usage, "--model: ", d.Hk, " kv heads do not divide ", d.H,
         " heads; nearest: ", nearest_divisors(int(d.H), int(d.Hk)), " kv heads");
}

}  // namespace

const std::vector<SeqMode>& seq_modes() {
    static const std::vector<SeqMode> modes = [] {
        std::vector<SeqMode> list;
        for (const Entry& e : entries()) list.push_back(e.mode);
        return list;
    }();
    return modes;
}

const SeqMode& find_seq_mode(const std::string& name) { return find_entry(name).mode; }

ParallelChoice choose_parallel(const ParallelRequest& ask, const AttnDims& d) {
    check_dims(d);
    require_degree("--sp", ask.sp);
    require_degree("--ring", ask.ring);
    require_degree("--ulysses", ask.ulysses);
    require(ask.tp == 0 || ask.tp == 1, Exit::usage, "--tp ", ask.tp,
            ": tensor parallelism is not available; use --sp ", ask.tp);
    const int sp = default_sp(ask, d, ask.world);
    require(ask.world % sp == 0, Exit::usage, "--sp ", sp, ": does not divide the ", ask.world,
            " ranks; nearest: ", nearest_divisors(ask.world, sp));

    ParallelChoice out;
    if (ask.mode == "auto") {
        choose_mode(ask, d, sp, out);
    } else {
        out.mode = find_seq_mode(ask.mode).name;
        out.reason = "as asked";
    }
    const SeqMode& mode = find_seq_mode(out.mode);
    require(sp == 1 || mode.ring || mode.ulysses, Exit::usage, "--sp ", sp, ": ", mode.name,
            " keeps sequences whole; leave --sp out or choose another --parallel-mode");
    require(ask.ring <= 1 || mode.ring, Exit::usage, "--ring ", ask.ring, ": ", mode.name,
            " has no ring; use --parallel-mode usp");
    require(ask.ulysses <= 1 || mode.ulysses, Exit::usage, "--ulysses ", ask.ulysses, ": ",
            mode.name, " has no all-to-all; use --parallel-mode usp");
    int ulysses = 1;
    if (mode.ulysses)
        ulysses = ask.ulysses ? ask.ulysses
                  : ask.ring  ? std::max(1, sp / ask.ring)
                  : mode.ring ? best_ulysses(ask, sp, d)
                              : sp;
    require(sp % ulysses == 0, Exit::usage, "--ulysses ", ulysses, ": does not divide --sp ", sp,
            "; nearest: ", nearest_divisors(sp, ulysses));
    const int ring = sp / ulysses;
    require(ring == 1 || mode.ring, Exit::usage, "--ulysses ", ulysses, ": ", mode.name,
            " needs all ", sp, " ranks of --sp; use --ulysses ", sp, " or --parallel-mode usp");
    require(ask.ring == 0 || ask.ring == ring, Exit::usage, "--ring ", ask.ring, ": --sp ", sp,
            " over --ulysses ", ulysses, " leaves ", ring, "; use --ring ", ring);
    out.shape = {.dp = ask.world / sp, .ring = ring, .ulysses = ulysses, .tp = 1};
    out.reason = concat(out.mode, " on ", out.shape.str(), ": ", out.reason);
    return out;
}

std::unique_ptr<SeqParallel> make_seq_parallel(const std::string& name, Kernels& k, Mesh& mesh,
                                               const AttnDims& d, int head_slices) {
    check_dims(d);
    const Entry& e = find_entry(name);
    require((mesh.shape.ring == 1 || e.mode.ring) && (mesh.shape.ulysses == 1 || e.mode.ulysses),
            Exit::usage, "--parallel-mode ", name, ": does not run on ", mesh.shape.str());
    const MakeInner inner = [&](const AttnDims& dims, const std::string& owner) {
        if (mesh.shape.ring == 1) return make_local_attention(k, dims, owner);
        RingPlan plan{e.placement(dims.S, mesh.shape.ring), e.schedule(mesh.shape.ring), e.by_work};
        return make_ring_attention(k, *mesh.ring, dims, std::move(plan), owner);
    };
    if (mesh.shape.ulysses == 1) return inner(d, "seq");
    std::vector<Runs> standing{{{0, d.S}}};
    if (mesh.shape.ring > 1) standing = e.placement(d.S, mesh.shape.ring);
    const auto tokens = [=, by_work = e.by_work,
                         group = size_t(mesh.ring_rank)](const int32_t* first_key) {
        return (by_work ? balanced_placement(standing, first_key, d.B, d.S) : standing)[group];
    };
    return make_ulysses_attention(k, *mesh.ulysses, d, tokens, inner, head_slices);
}

}  // namespace torus
