// Launches of the Hopper attention backward: checks, scratch memory, a few kernels in a row.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/flash/backward_pairs.cuh"
#include "kernels/cuda/flash/backward_passes.cuh"
#include "kernels/cuda/flash/flash.h"
#include "kernels/cuda/flash/launch.h"

namespace torus::flash {

namespace {

constexpr int64_t query_rows(int64_t columns) { return columns == 64 ? 128 : 64; }
constexpr int64_t key_rows = 128, most_chunks = 64;
// The sums of dq take twice the bytes of q; larger calls go through them in several rounds of
// heads.
constexpr int64_t sums_limit = int64_t(2) << 30;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The statistics of M query rows, of the larger kind; the scratch memory serves both.
constexpr int64_t stats_bytes(int64_t M) { return 24 * M + 16; }
template <int M>
constexpr bool stats_fit = sizeof(RowStats<M, true>) == stats_bytes(M) &&
                           sizeof(RowStats<M, false>) <= stats_bytes(M);
static_assert(stats_fit<64> && stats_fit<128>);

// How a call is cut into units of work, and where its scratch memory lies (offsets in bytes).
// D: the tile's columns; with_cuts: units may begin where documents do.
struct Plan {
    int64_t m_tiles, key_units, cuts, parts, section_heads;
    int64_t stats, sums, maxima, list, order, pieces, flags, partial, total;

    Plan(int64_t B, int64_t H, int64_t Hk, int64_t Tq, int64_t Tk, int64_t D, int64_t cluster,
         bool with_cuts) {
        const int64_t M = query_rows(D), group = H / Hk, unit_keys = key_rows * cluster;
        cuts = with_cuts ? most_cuts(Tq, unit_keys) : 0;
        m_tiles = ceil_div(Tq, M), key_units = ceil_div(Tk, unit_keys) + cuts;
        // The blocks at work walk over the queries in step when their walks are short; all heads of
        // a group in one unit would spread them over more of q, dout and dq than the cache holds.
        const int64_t bytes = Tq * D * 8;  // q, dout and the sums of one query head
        const int64_t blocks = ceil_div(Tk, unit_keys) * cluster;  // of a head
        const bool split = group * bytes > (int64_t(16) << 20) || B * Hk * blocks < 400;
        parts = split ? group : 1;
        const int64_t fit = (int64_t(32) << 20) / (group / parts * bytes);
        section_heads = std::clamp(std::max(fit, ceil_div(264, blocks)), int64_t(1), B * Hk);
        int64_t at = 256;  // the counter
        auto take = [&](int64_t size) {
            const int64_t here = at;
            at += ceil_div(size, 256) * 256;
            return here;
        };
        const int64_t tiles = B * H * m_tiles;
        stats = take(tiles * stats_bytes(M)), sums = take(tiles * M * D * 4);
        maxima = take(B * Hk * most_chunks * 8);
        list = take(B * key_units * int64_t(sizeof(KeyUnit))), order = take(B * key_units * 8);
        pieces = take(B * (cuts + 2) * int64_t(sizeof(Piece)));
        flags = take(B * Hk * key_units * 16);
        partial = take(parts > 1 ? B * Hk * ceil_div(Tk, 8) * 8 * D * 8 : 0);
        total = at;
    }
};

// How many batches, or else heads of one batch, go in one round.
struct Round {
    int64_t batches, kv_heads;

    Round(int64_t batch, int64_t kv_heads_all, int64_t group, int64_t queries, int64_t D) {
        const int64_t bytes = group * ceil_div(queries, 128) * 128 * D * 4;  // of one kv head
        const int64_t fit = std::max(int64_t(1), sums_limit / bytes);
        batches = std::clamp(fit / kv_heads_all, int64_t(1), batch);
        kv_heads = std::min(fit, kv_heads_all);
    }
};

// The main kernel, of blocks or of clusters of blocks.
template <class Tile>
class MainKernel {
public:
    explicit MainKernel(cudaStream_t stream) {
        use_shared(kernel(), Tile::shared_bytes);
        cluster_.id = cudaLaunchAttributeClusterDimension;
        cluster_.val.clusterDim.x = Tile::cluster;
        cluster_.val.clusterDim.y = cluster_.val.clusterDim.z = 1;
        config_.blockDim = dim3(Tile::threads), config_.dynamicSmemBytes = Tile::shared_bytes;
        config_.stream = stream;
        if (Tile::cluster > 1) config_.attrs = &cluster_, config_.numAttrs = 1;
    }
    // How many units the GPU works on at a time. No cluster may be kept from starting, since others
    // wait for flags that its first unit sets.
    int at_once() {
        if (Tile::cluster == 1) return multiprocessors();
        static const int count = clusters_at_once();  // GPUs of one kind
        return count;
    }
    void launch(const BackwardParams& p, int clusters) {
        config_.gridDim = dim3(unsigned(clusters * Tile::cluster));
        cuda_check(cudaLaunchKernelEx(&config_, kernel(), p), "backward launch");
    }

private:
    int clusters_at_once() {
        cudaFuncAttributes a{};
        cuda_check(cudaFuncGetAttributes(&a, kernel()), "attributes of the backward");
        CHECK(a.sharedSizeBytes % 1024 == 0, ": tiles would not start at multiples of 1024 bytes");
        int count = 0;
        config_.gridDim = dim3(unsigned(Tile::cluster * multiprocessors()));
        cuda_check(cudaOccupancyMaxActiveClusters(&count, kernel(), &config_), "clusters at once");
        CHECK(count > 0, ": no room for a cluster");
        return count;
    }
    static auto kernel() {
        if constexpr (Tile::cluster == 1)
            return &backward_kernel<Tile>;
        else
            return &pair_kernel<Tile>;
    }
    cudaLaunchAttribute cluster_{};
    cudaLaunchConfig_t config_{};
};

template <class Tile>
void launch(cudaStream_t stream, const AttnGrad& a, void* workspace) {
    using T = typename Tile::Element;
    using Single = typename Tile::Single;  // the passes are the same for pairs
    constexpr int M = Tile::m, D = Tile::d, panel = Tile::panel, cluster = Tile::cluster;
    constexpr bool one_panel = cluster > 1;  // at a time, the halves go different ways
    const int64_t B = a.q.dim(0), Tq = a.q.dim(1), H = a.q.dim(2), Tk = a.k.dim(1), Hk = a.k.dim(2);
    const Plan at(B, H, Hk, Tq, Tk, D, cluster, Tile::cuts && a.first_key);
    char* const base = static_cast<char*>(workspace);
    BackwardParams p{};
    p.q = tile_map(a.q, M, panel, one_panel), p.dout = tile_map(a.dout, M, panel, one_panel);
    p.k = tile_map(a.k, Tile::n, Tile::k_panel, one_panel), p.v = tile_map(a.v, Tile::n, panel);
    p.dq = a.dq.data, p.dk = a.dk.data, p.dv = a.dv.data;
    p.dq_pitch = pitch_of(a.dq), p.dk_pitch = pitch_of(a.dk), p.dv_pitch = pitch_of(a.dv);
    p.lse = a.lse.as<float>(), p.delta = a.delta.as<float>();
    p.lse_pitch = stats_pitch(a.lse), p.delta_pitch = stats_pitch(a.delta);
    p.k_pitch = pitch_of(a.k), p.v_pitch = pitch_of(a.v), p.dout_pitch = pitch_of(a.dout);
    p.k_data = a.k.data, p.v_data = a.v.data, p.dout_data = a.dout.data;
    p.mask = mask_of(a.first_key, a.q0, a.k0, Tq, Tk, a.causal);
    p.stats = base + at.stats, p.sums = base + at.sums;
    p.maxima = reinterpret_cast<float2*>(base + at.maxima);
    if (a.first_key) {
        p.list = reinterpret_cast<KeyUnit*>(base + at.list);
        p.order = reinterpret_cast<int32_t*>(base + at.order);
        p.lengths = p.order + B * at.key_units;
        if (at.cuts > 0) p.pieces = reinterpret_cast<Piece*>(base + at.pieces);
    }
    p.chunks = int32_t(std::min(most_chunks, ceil_div(Tk, 512)));
    p.partial = reinterpret_cast<float2*>(base + at.partial);
    p.flags = reinterpret_cast<int32_t*>(base + at.flags);
    p.m_tiles = int32_t(at.m_tiles), p.key_units = int32_t(at.key_units);
    p.cuts = int32_t(at.cuts), p.units = int32_t(B * Hk * at.key_units * at.parts);
    p.parts = int32_t(at.parts), p.part_heads = int32_t(H / Hk / at.parts);
    p.heads = int32_t(H), p.kv_heads = int32_t(Hk), p.group = int32_t(H / Hk);
    p.batches = int32_t(B), p.section_heads = int32_t(at.section_heads);
    p.scale = float(a.scale), p.scale_log2 = float(a.scale * std::log2(std::exp(1.0)));
    p.wide = a.dq.dtype == DType::f32, p.add_q = a.add_q, p.add_kv = a.add_kv;
    p.head_dim = int32_t(a.q.dim(3));
    MainKernel<Tile> kernel(stream);
    const int clusters = std::min(p.units, kernel.at_once());
    if (clusters < p.units) p.counter = static_cast<int32_t*>(workspace);

    const unsigned tiles = unsigned(B * H * at.m_tiles);
    if (Tile::sum != Sum::plain)
        measure_kernel<T, D, Tile::exact>
            <<<dim3(unsigned(p.chunks), unsigned(B * Hk)), pass_threads, 0, stream>>>(p);
    prepare_kernel<Single><<<tiles, pass_threads, 0, stream>>>(p);
    if (a.first_key) {
        if (p.pieces)
            cut_kernel<<<unsigned(B), cut_threads, 0, stream>>>(p.mask, p.pieces, p.cuts,
                                                                Tile::unit_keys);
        find_kernel<M, typename Tile::Stats>
            <<<unsigned(B * at.key_units), 32, 0, stream>>>(p, Tile::unit_keys);
        order_kernel<<<order_blocks(B, at.key_units), 32 * order_warps, 0, stream>>>(
            p.order, p.lengths, p.key_units);
    }
    kernel.launch(p, clusters);
    finish_kernel<Single><<<tiles, pass_threads, 0, stream>>>(p);
    cuda_check(cudaGetLastError(), "backward launch");
}

// Rounding adds an error of about 2.4e-3 of dq at this length and twice as much at twice the length
// (random data, no mask: the worst case; docs/flash_attention.md); 16-bit arithmetic as a whole
// has 2.9e-3. Pairs of blocks add half as often: 3.4e-3 at twice the length.
constexpr int64_t longest_rounded = 32768;

template <class T, int D, bool Exact>
void launch_sum(cudaStream_t stream, const AttnGrad& a, void* workspace, bool deterministic) {
    if (!deterministic) return launch<BackwardTile<T, D, Sum::plain, Exact>>(stream, a, workspace);
    if constexpr (D < 128 || std::is_same_v<T, __nv_bfloat16>)  // fp16 D 128 would spill registers
        if (a.k.dim(1) <= longest_rounded)
            return launch<BackwardTile<T, D, Sum::rounded, Exact>>(stream, a, workspace);
    launch<BackwardTile<T, D, Sum::fixed, Exact>>(stream, a, workspace);
}

template <class T>
void launch_any(cudaStream_t stream, const AttnGrad& a, void* workspace, bool deterministic) {
    const int64_t D = a.q.dim(3);
    const auto run = D == 128  ? launch_sum<T, 128, true>
                     : D > 64  ? launch_sum<T, 96, false>
                     : D == 64 ? launch_sum<T, 64, true>
                               : launch_sum<T, 64, false>;
    run(stream, a, workspace, deterministic);
}

// Whether there is a kernel by pairs of blocks for it, with keys for both.
bool has_pairs(const AttnGrad& a) {
    return a.q.dtype == DType::bf16 && a.q.dim(3) == 128 && a.k.dim(1) > key_rows;
}
// From how many keys on pairs are used: with fewer, the query tiles that they walk over in vain
// under a causal mask weigh more than what they save.
constexpr int64_t pairs_from = 4096;
bool worth_pairs(const AttnGrad& a) { return has_pairs(a) && a.k.dim(1) >= pairs_from; }

void launch_pairs(cudaStream_t stream, const AttnGrad& a, void* workspace, bool deterministic) {
    using T = __nv_bfloat16;  // fp16 would spill registers
    if (!deterministic) return launch<PairTile<T, Sum::plain>>(stream, a, workspace);
    if (a.k.dim(1) <= 2 * longest_rounded)
        return launch<PairTile<T, Sum::rounded>>(stream, a, workspace);
    launch<PairTile<T, Sum::fixed>>(stream, a, workspace);
}

}  // namespace

bool backward_supported(const AttnGrad& a) {
    const bool wide = a.add_q || a.add_kv || a.dq.dtype == DType::f32;
    const DType out = wide ? DType::f32 : a.q.dtype;
    const int64_t align = wide ? 8 : 16;
    return inputs_supported(a.q, a.k, a.v, a.scale) && a.dout.dtype == a.q.dtype &&
           rows_aligned(a.dout, 16) && a.dq.dtype == out && a.dk.dtype == out &&
           a.dv.dtype == out && rows_aligned(a.dq, align) && rows_aligned(a.dk, align) &&
           rows_aligned(a.dv, align) && a.lse.dtype == DType::f32 && a.delta.dtype == DType::f32 &&
           a.q.dim(0) * a.k.dim(2) < 65536 &&
           runs_here(reinterpret_cast<const void*>(
               &backward_kernel<BackwardTile<__nv_bfloat16, 64, Sum::plain>>));
}

int64_t backward_workspace_bytes(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                                 int64_t keys, int64_t head_dim) {
    if (!head_dim_supported(head_dim)) return 0;
    const int64_t group = heads / kv_heads, D = tile_columns(head_dim);
    const Round round(batch, kv_heads, group, queries, D);
    const auto bytes = [&](int64_t cluster) {
        return Plan(round.batches, round.kv_heads * group, round.kv_heads, queries, keys, D,
                    cluster, true)
            .total;
    };
    return D == 128 ? std::max(bytes(1), bytes(2)) : bytes(1);
}

void backward(cudaStream_t stream, const AttnGrad& a, void* workspace, bool deterministic,
              Blocks blocks) {
    CHECK(backward_supported(a));
    const bool pairs =
        blocks == Blocks::best ? worth_pairs(a) : blocks == Blocks::pairs && has_pairs(a);
    const int64_t B = a.q.dim(0), H = a.q.dim(2), Hk = a.k.dim(2), group = H / Hk;
    const Round round(B, Hk, group, a.q.dim(1), tile_columns(a.q.dim(3)));
    for (int64_t b = 0; b < B; b += round.batches)
        for (int64_t h = 0; h < Hk; h += round.kv_heads) {
            const int64_t batches = std::min(round.batches, B - b);
            const int64_t kv_heads = std::min(round.kv_heads, Hk - h);
            AttnGrad part = a;
            for (Tensor* t : {&part.q, &part.dout, &part.dq})
                *t = t->slice(0, b, batches).slice(2, h * group, kv_heads * group);
            for (Tensor* t : {&part.k, &part.v, &part.dk, &part.dv})
                *t = t->slice(0, b, batches).slice(2, h, kv_heads);
            for (Tensor* t : {&part.lse, &part.delta})
                *t = t->slice(0, b, batches).slice(1, h * group, kv_heads * group);
            if (part.first_key) part.first_key = part.first_key.slice(0, b, batches);
            if (pairs)
                launch_pairs(stream, part, workspace, deterministic);
            else
                a.q.dtype == DType::bf16
                    ? launch_any<__nv_bfloat16>(stream, part, workspace, deterministic)
                    : launch_any<__half>(stream, part, workspace, deterministic);
        }
}

}  // namespace torus::flash
