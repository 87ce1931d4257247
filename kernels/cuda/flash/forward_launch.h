// One launch of the attention forward with a given tile shape.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/cuda/flash/forward.cuh"
#include "kernels/cuda/flash/launch.h"
#include "kernels/kernels.h"

namespace torus::flash {

constexpr int64_t counter_bytes = 256;  // at the start of the workspace

template <class Tile>
void launch_forward(cudaStream_t stream, const Attn& a, void* workspace) {
    const int64_t B = a.q.dim(0), Tq = a.q.dim(1), H = a.q.dim(2), Tk = a.k.dim(1);
    const int64_t group = H / a.k.dim(2), m_tiles = (Tq + Tile::m - 1) / Tile::m;
    const int64_t l2_share = int64_t(32) << 20;  // of 50 MB or more: K and V of the heads at work
    const int64_t fit = std::max(int64_t(1), l2_share / (4 * Tk * Tile::d));
    ForwardParams p{};
    constexpr int panel = panel_columns(Tile::d);
    p.q = tile_map(a.q, 64, panel);
    if (!a.carry) p.o_map = tile_map(a.o, 64, panel);
    p.k = tile_map(a.k, Tile::n, panel);
    p.v = tile_map(a.v, Tile::n, panel);
    p.o = a.o.data, p.lse = a.lse.as<float>(), p.o_pitch = pitch_of(a.o);
    p.lse_rows = int32_t(a.lse.pitch(1));
    p.lse_heads = int32_t(a.lse.pitch(0) / std::max<int64_t>(a.lse.pitch(1), 1));
    p.mask = mask_of(a.first_key, a.q0, a.k0, Tq, Tk, a.causal);
    p.tiles = int32_t(B * H * m_tiles), p.m_tiles = int32_t(m_tiles);
    p.heads = int32_t(H), p.group = int32_t(group), p.all_heads = int32_t(B * H);
    p.section_heads = int32_t(std::min(B * H, fit * group));
    p.scale = float(a.scale), p.scale_log2 = float(a.scale * std::log2(std::exp(1.0)));
    p.carry = a.carry, p.head_dim = int32_t(a.q.dim(3));
    const int blocks = std::min(p.tiles, int32_t(multiprocessors()));
    if (blocks < p.tiles) p.counter = static_cast<int32_t*>(workspace);
    if (a.first_key) {
        int32_t* const order = static_cast<int32_t*>(workspace) + counter_bytes / 4;
        int32_t* const lengths = order + B * m_tiles;
        int32_t* const origins = lengths + B * m_tiles;
        count_keys_kernel<Tile><<<unsigned(B * m_tiles), 32, 0, stream>>>(
            p.mask, lengths, origins, p.m_tiles, static_cast<int32_t*>(workspace));
        order_kernel<<<order_blocks(B, m_tiles), 32 * order_warps, 0, stream>>>(order, lengths,
                                                                                p.m_tiles);
        p.order = order, p.lengths = lengths, p.origins = origins;
    } else if (p.counter) {
        cuda_check(cudaMemsetAsync(p.counter, 0, sizeof(int32_t), stream), "memset");
    }
    use_shared(forward_kernel<Tile>, Tile::shared_bytes);
    forward_kernel<Tile><<<blocks, Tile::threads, Tile::shared_bytes, stream>>>(p);
    cuda_check(cudaGetLastError(), "forward launch");
}

}  // namespace torus::flash
