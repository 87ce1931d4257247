// What the flash kernels are given: plain structs that travel as kernel parameters, and the rule
// that turns the mask "first_key[i] <= j, j <= i when causal" into ranges of local key numbers.
#pragma once
#include <cuda.h>
#include <vector_types.h>

#include <cstdint>
#include <type_traits>

namespace torus::flash {

// Strides of a (B,T,H,D) tensor, in elements.
struct Pitch {
    int64_t batch, row, head;
};

// Query row i sees the local keys [low, high): high from the causal rule, low from first_key.
struct Mask {
    const int32_t* first_key;  // (B,Tq) or null, global positions
    int64_t first_key_pitch;   // elements from one batch to the next
    int64_t k0;                // global position of key 0
    int32_t shift;             // q0 - k0, cut to a range in which sums with row numbers fit
    int32_t queries, keys;     // Tq, Tk
    bool causal;

    __host__ __device__ int high(int row) const {
        const int end = row + shift + 1;
        return !causal || end > keys ? keys : end < 0 ? 0 : end;
    }
    // The first row from which on rows see this key by the causal rule.
    __device__ int seen_from(int key) const { return causal ? key - shift : 0; }
    __device__ int32_t first(int batch, int row) const {  // global position
        return first_key ? __ldg(first_key + batch * first_key_pitch + row) : INT32_MIN;
    }
    __device__ int local(int32_t first) const {
        const int64_t key = int64_t(first) - k0;
        return key < 0 ? 0 : key > keys ? keys : int(key);
    }
    __device__ int low(int batch, int row) const { return local(first(batch, row)); }
};

struct ForwardParams {
    CUtensorMap q, k, v, o_map;  // o_map: not with carry
    void* o;                     // (B,Tq,H,D), T, or float with carry
    float* lse;                  // (B,H,Tq), contiguous along Tq
    Pitch o_pitch;
    Mask mask;
    int32_t* counter;  // tiles handed out beyond the first of each block; null when there are none
    // With first_key, else null: (B, m_tiles) query tiles, the longest first, and of each the key
    // tiles that it sees and the first key, where they begin.
    const int32_t *order, *lengths, *origins;
    int32_t tiles, m_tiles;
    int32_t heads, group;   // H, H / Hk
    int32_t section_heads;  // heads whose K and V share the L2 cache
    int32_t all_heads;      // B * H
    float scale, scale_log2;
    bool carry;
    int32_t head_dim;             // columns that exist; the tile may be wider
    int32_t lse_heads, lse_rows;  // of a batch and of a head, in memory

    __device__ float* lse_at(int batch, int head, int row) const {
        return lse + int64_t(batch * lse_heads + head) * lse_rows + row;
    }
};

// How the sum over key tiles that makes dq is formed in memory.
enum class Sum {
    plain,    // fp32, in the order in which the blocks come: the last bits differ from run to run
    rounded,  // fp32, each addend first rounded to the row's unit: additions are exact, in any
              // order
    fixed     // 32-bit integers in units of the row: exact, finer by 2^6, slower
};

// What the backward subtracts from the scores of M query rows and from dP, rows that see nothing
// and rows past the end having probabilities of 0: numbers for its threads to load,
template <int M>
struct Subtrahends {
    float lse2[M];   // lse * log2(e), or +inf
    float delta[M];  // rowsum(dout * o)
};
// or columns that go through the products with Q and dout. Eight bf16 numbers a row: -lse / scale
// (or -1e30) as a sum of three, -delta as a sum of three, 0, 0.
template <int M>
struct SubtrahendColumns {
    uint4 columns[M];
};
// What the backward reads of M query rows, one contiguous block per (batch, head, query tile).
template <int M, bool Columns>
struct RowStats : std::conditional_t<Columns, SubtrahendColumns<M>, Subtrahends<M>> {
    int32_t low_min, low_max, unused[2];
    int32_t low[M];   // first visible local key
    float factor[M];  // unit of dq, see Sum and backward_passes.cuh

    // Where the bounds of `low` lie, and `low` and what follows it.
    static constexpr uint32_t bounds_at = M * (Columns ? 16 : 8), low_at = bounds_at + 16,
                              factor_at = low_at + 4 * M;
};

// A piece of the keys, up to the next one: its first key, and the number of its first unit of work.
// See documents.cuh.
struct Piece {
    int32_t first, unit;
};

// The keys [first, end) of one unit of work and the query tiles [begin, stop) that see any of them.
struct KeyUnit {
    int32_t first, end, begin, stop;
};

struct BackwardParams {
    CUtensorMap q, k, v, dout;
    void *dq, *dk, *dv;  // T, or float with `wide`
    Pitch dq_pitch, dk_pitch, dv_pitch;
    const float *lse, *delta;  // (B,H,Tq), contiguous along Tq
    Pitch lse_pitch, delta_pitch;
    Pitch k_pitch, v_pitch, dout_pitch;
    const void *k_data, *v_data, *dout_data;
    Mask mask;
    // scratch
    int32_t* counter;  // units handed out beyond the first of each block
    void* stats;       // RowStats<M> (B*H, m_tiles)
    void* sums;        // dq, float or fixed point (B*H, m_tiles, M*D), in the accumulators' order
    float2*
        maxima;  // (B*Hk, chunks): largest |k|, largest squared norm of a row of v; unless plain
    // With first_key, else null: the units of each batch, their order, the longest first, and their
    // lengths in query tiles, each (B, key_units); the pieces of the keys (B, cuts + 2), null when
    // there are no cuts. The last piece begins behind the last key.
    KeyUnit* list;
    int32_t *order, *lengths;
    Piece* pieces;
    float2* partial;  // with parts: dk, dv so far (B*Hk, ceil(Tk/8), 2, 8*D), see for_partial
    int32_t* flags;   // with parts: (B*Hk, key_units, 4) parts that are done, per warpgroup
    int32_t chunks;
    int32_t m_tiles, key_units, cuts, units;  // key_units, cuts: of a head
    int32_t heads, kv_heads, group, batches;
    int32_t parts,
        part_heads;         // the query heads of a group go in `parts` units, one after the other
    int32_t section_heads;  // kv heads at work at the same time; their queries share the L2 cache
    float scale, scale_log2;
    bool wide, add_q, add_kv;  // added to what is there, or written over it
    int32_t head_dim;          // columns that exist; the tile may be wider
};

}  // namespace torus::flash
