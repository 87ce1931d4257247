// Ring attention and its relatives: one loop over a step table (schedule.h), for any placement of
// tokens and any pairing of ranks. Blocks travel straight from their owner to the rank that works
// on them, and results straight back:
//
//   iteration t   1. results of step t-2 that came back are added up here
//                 2. one exchange starts: results of step t-1 go home, blocks of step t+1 come in
//                 3. step t is computed, while the exchange runs
//
// What comes in is K and V (in the activations' type, Hk heads, only the rows that some query of
// mine sees) or, for a helper, the queries of another rank. What goes home is dK and dV, or o and
// lse, or dQ: always in the precision of statistics, so the error does not grow with P. The first
// results for a row write over its sum, the others add (fresh_rows.h).
// The classic ring passes K and V on from neighbour to neighbour; each rank receives as many bytes,
// but must also carry the rows that only later ranks need.
#pragma once
#include "comm/seq/schedule.h"

namespace torus {

// `name` is the owner and prefix of the planned tensors.
std::unique_ptr<SeqParallel> make_ring_attention(Kernels&, Comm& ring, const AttnDims&, RingPlan,
                                                 const std::string& name = "seq");

}  // namespace torus
