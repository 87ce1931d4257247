// Mesh: the world as a grid with named axes dp x ring x ulysses x tp. The last axis varies fastest:
// Ulysses ranks, which exchange the most, are neighbours (one machine), ring ranks lie further
// apart. "sp" is ring x ulysses: the ranks that share one batch of sequences.
#pragma once
#include "comm/comm.h"

namespace torus {

struct MeshShape {
    int dp = 1, ring = 1, ulysses = 1, tp = 1;
    int sp() const { return ring * ulysses; }
    int size() const { return dp * ring * ulysses * tp; }
    std::string str() const;  // "dp 2 x ring 2 x ulysses 4"
};

struct Mesh {
    MeshShape shape;
    int dp_rank = 0, ring_rank = 0, ulysses_rank = 0, tp_rank = 0;
    std::unique_ptr<Comm> dp, ring, ulysses, tp;  // the ranks that differ only along this axis
    std::unique_ptr<Comm> sp;                     // rank = ring_rank * shape.ulysses + ulysses_rank
};

// Collective over `world`. Throws Error(usage) when the shape's size is not the world's.
Mesh make_mesh(Comm& world, const MeshShape& shape);
// The mesh as rank `rank` would see it, without any transport: for planning.
Mesh make_plan_mesh(const MeshShape& shape, int rank);

}  // namespace torus
