// Ranks to coordinates and groups.
#include "comm/mesh.h"

#include <functional>

namespace torus {
namespace {

using MakeGroup =
    std::function<std::unique_ptr<Comm>(const char* name, int color, int key, int size)>;

// A group's color is what its ranks have in common: their other coordinates.
Mesh cut(const MeshShape& n, int rank, const MakeGroup& group) {
    Mesh m;
    m.shape = n;
    m.tp_rank = rank % n.tp;
    m.ulysses_rank = rank / n.tp % n.ulysses;
    m.ring_rank = rank / n.tp / n.ulysses % n.ring;
    m.dp_rank = rank / n.tp / n.ulysses / n.ring;
    const auto index = [&](int dp, int ring, int ulysses, int tp) {
        return ((dp * n.ring + ring) * n.ulysses + ulysses) * n.tp + tp;
    };
    const int d = m.dp_rank, r = m.ring_rank, u = m.ulysses_rank, t = m.tp_rank;
    m.dp = group("dp", index(0, r, u, t), d, n.dp);
    m.ring = group("ring", index(d, 0, u, t), r, n.ring);
    m.ulysses = group("ulysses", index(d, r, 0, t), u, n.ulysses);
    m.tp = group("tp", index(d, r, u, 0), t, n.tp);
    m.sp = group("sp", index(d, 0, 0, t), r * n.ulysses + u, n.sp());
    return m;
}

}  // namespace

std::string MeshShape::str() const {
    std::string s = concat("dp ", dp, " x ring ", ring, " x ulysses ", ulysses);
    if (tp > 1) s += concat(" x tp ", tp);
    return s;
}

Mesh make_mesh(Comm& world, const MeshShape& shape) {
    require(shape.size() == world.size(), Exit::usage, "the mesh ", shape.str(), " has ",
            shape.size(), " ranks, the job has ", world.size(), "; start --ranks ", shape.size());
    return cut(shape, world.rank(), [&](const char* name, int color, int key, int size) {
        auto comm = world.split(color, key, name);
        CHECK(comm->size() == size && comm->rank() == key, ": group ", name);
        return comm;
    });
}

Mesh make_plan_mesh(const MeshShape& shape, int rank) {
    return cut(shape, rank,
               [&](const char*, int, int key, int size) { return make_plan_comm(key, size); });
}

}  // namespace torus
