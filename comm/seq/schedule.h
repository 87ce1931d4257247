// The step tables of the ring family. A pair is the queries of one rank against the keys of
// another (or the same); a schedule says which rank works on which pair at which step. One loop
// (ring.cpp) runs any of them; `ring` and `zigzag_ring` share a table and differ in placement.
#pragma once
#include "comm/seq/placement.h"

namespace torus {

enum class Part : uint8_t { all, early_runs, late_runs };  // of the queries' runs, by halves

struct Pair {
    int q = -1, k = -1;  // the ranks that own the queries and the keys; -1: no work
    Part part = Part::all;
    explicit operator bool() const { return q >= 0; }
    bool operator==(const Pair&) const = default;
};
using Schedule = std::vector<std::vector<Pair>>;  // [step][rank]; the rank owns q or k or both

// Step t: the own queries against the keys of the rank t places before (mod P). Liu et al.,
// "Ring Attention with Blockwise Transformers", 2023.
Schedule ring_schedule(int P);
// Causal only: floor(P/2) + 1 steps. Rank r >= t works as in a ring; a rank r < t, which would have
// no keys left, helps rank r + P - t: it applies that rank's queries to its own keys. For odd P all
// ranks are busy in all steps. For even P both have the same pair in the last step: the helper
// takes the early half of its queries, so all ranks are busy here, too (in Li et al.,
// "DistFlashAttn", COLM 2024, the helpers rest).
Schedule dist_flash_schedule(int P);

// A rectangle of a pair: consecutive rows of queries against consecutive rows of keys. Query row i
// sees key row j if j + k0 <= i + q0, when causal, and j + k0 is not before the query's first key.
struct Piece {
    int64_t q_row, q_rows, q0;  // rows within the owner's tokens
    int64_t k_row, k_rows, k0;
    bool causal;  // false: every query comes after every key
};
// All visible (query, key) of the pair, once, in as few pieces as can be. Without a mask only the
// order of rows matters, not their positions: a rank's own tokens are one piece, and so are runs of
// queries, or of keys, that see the same. With `first_key` (B,S) the keys before the first that any
// query of a run may see are left out.
std::vector<Piece> pieces_of(const Runs& q, const Runs& k, Part part, bool masked,
                             const int32_t* first_key, int64_t B, int64_t S);

// Number of visible (query, key) in a piece made for this `first_key`, or without, over the batch.
double visible_pairs(const Piece&, const int32_t* first_key, int64_t B, int64_t S);

// Rows of the owner's keys that travel, and where they lie in the block that arrives.
struct Span {
    int64_t row, rows, at;
    bool operator==(const Span&) const = default;
};

// One rank's work at one step.
struct Work {
    Pair pair;
    std::vector<Piece> pieces;   // empty: nothing to see, so nothing travels
    std::vector<Span> keys;      // the rows of keys that the pieces touch, and no others; ascending
    int64_t q_lo = 0, q_hi = 0;  // the rows of queries: whole runs
    explicit operator bool() const { return !pieces.empty(); }
    bool fetches_keys(int worker) const { return !pieces.empty() && pair.k != worker; }
    bool helps(int worker) const { return !pieces.empty() && pair.q != worker; }
    int64_t k_rows() const { return keys.empty() ? 0 : keys.back().at + keys.back().rows; }
    int64_t in_block(int64_t k_row) const;  // the row of a key in the block that travels
    int64_t q_rows() const { return q_hi - q_lo; }
};
using Table = std::vector<std::vector<Work>>;  // [step][rank]

// A share of a step's work: pieces, sequences and kv heads, from one to before the other.
struct Share {
    size_t piece, piece_end;
    int64_t batch, batch_end, head, head_end;
    bool operator==(const Share&) const = default;
    bool empty() const { return piece == piece_end || batch == batch_end || head == head_end; }
    Tensor sequences(const Tensor& t) const { return t.rows(batch, batch_end - batch); }
    // Of a tensor whose dimension `axis` has n heads for each kv head, from `first` on.
    Tensor of(const Tensor& t, int axis, int64_t n, int64_t first = 0) const {
        return sequences(t).slice(axis, first + n * head, n * (head_end - head));
    }
};
// Cuts it in two: the last piece is for late, or, when there is one only, the last sequence, or of
// one sequence a quarter of its heads. One head is not cut, and nothing is late.
Share share_of(Share all, bool late);

struct RingPlan {
    std::vector<Runs> runs;  // of each rank of the ring
    Schedule schedule;
    bool by_work = false;  // tokens move with the documents of a batch (balance.h)
};
Table make_table(const RingPlan&, bool masked, const int32_t* first_key, int64_t B, int64_t S);

// The most rows that a rank has of something in any step of a table: keys and queries that it
// fetches, results for its own that come home.
struct Extent {
    int64_t keys = 0, queries = 0, home_keys = 0, home_queries = 0;
    int remote_steps = 0;  // those in which it fetches
};
Extent extent_of(const Table&, int rank);

// Most visible pairs of one rank over the mean.
double imbalance_of(const Table&, const int32_t* first_key, int64_t B, int64_t S);

}  // namespace torus
