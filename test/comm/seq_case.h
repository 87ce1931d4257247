// One case of the equivalence grid: attention of a mode on P ranks against plain loops in fp64.
#pragma once
#include <string>
#include <vector>

#include "comm/seq.h"

namespace torus {

enum class Documents : uint8_t {
    none,
    at_edges,     // documents end at 0, at every shard edge and at S-1; the mode is told
    scattered,    // other ends per sequence, a window, queries that see nothing; the mode is told
    unannounced,  // at_edges, but the mode only gets the tensor
};

// q, k, v, dout and what attention makes of them, over the whole sequence: (B,S,H|Hk,D), (B,H,S).
struct WholeAttention {
    AttnDims d;
    std::vector<int32_t> first_key;  // (B,S), or empty
    std::vector<double> q, k, v, dout;
    std::vector<double> o, lse, dq, dk, dv;
};
// Random inputs; results by the definition of softmax attention and its derivative. `sharpness`
// multiplies the queries; the inputs are rounded to `inputs` first.
WholeAttention make_whole(const AttnDims& d, Documents documents, int P, double sharpness = 1,
                          DType inputs = DType::f64);
// The same with a given first_key, or none when that is empty.
WholeAttention make_whole(const AttnDims& d, std::vector<int32_t> first_key, double sharpness = 1,
                          DType inputs = DType::f64);

struct SeqCase {
    std::string mode;
    MeshShape shape;
    bool announce = true;              // call set_documents
    const int32_t* earlier = nullptr;  // and before with the first_key of another batch
    int head_slices = 0;               // see make_seq_parallel
};

// What one rank found for its tokens.
struct RankResult {
    std::vector<TokenRun> runs;
    std::vector<double> o, lse, dq, dk, dv;  // (B,T,...), (B,H,T)
    int64_t bytes_sent = 0;
    double imbalance = 1;
};
// Collective over `world`: forward and backward of one rank, twice; the second, with delta in place
// of o, must give the same bits. Memory is poisoned with NaN before, and nothing may be allocated
// meanwhile. `world` moves the kind of memory that the kernels use. With a mesh of c.shape given,
// its communicators are used again.
RankResult run_rank(Comm& world, const SeqCase& c, const WholeAttention& whole, Kernels& k);
RankResult run_rank(Mesh&, const SeqCase& c, const WholeAttention& whole, Kernels& k);
RankResult run_rank(Comm& world, const SeqCase& c, const WholeAttention& whole,
                    DType dtype = DType::f64);  // on the CPU

// Largest |a - b| / (1 + |b|) over o, lse, dq, dk, dv of the rank's tokens.
double largest_error(const RankResult& r, const WholeAttention& whole);
// Relative L2 error of dq, dk and dv of the rank's tokens, squared sums {error, norm}.
struct SquareSums {
    double error = 0, norm = 0;
};
SquareSums gradient_error(const RankResult& r, const WholeAttention& whole);

// The case on threads: checks that the ranks hold every token once and returns the largest error.
double run_case(const SeqCase& c, const WholeAttention& whole);

// The meshes of P ranks on which a mode is tested.
std::vector<MeshShape> shapes_for(const SeqMode& mode, int P);
// The numbers of head slices with which a mesh is tested: 1, and the least other divisor of Hk.
std::vector<int> slices_for(const MeshShape&, int64_t Hk);

}  // namespace torus
