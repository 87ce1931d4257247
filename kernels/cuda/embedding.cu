// Embedding lookup and its gradient. The gradient adds many rows of dout into each row of the
// table; to give the same bits every run it first makes, per table row, the list of its uses in
// increasing order (a stable counting sort: integer atomics only count), then one warp per table
// row adds them. Table rows with many uses (a frequent byte, a padded position) go to whole blocks
// in a second kernel, so that no warp has more than kShort rows to add.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
template <class T>
struct EmbeddingForwardOp {
    static constexpr int width = vector_width<T>;
    T* out;
    const int32_t *ids, *pos;
    const T *wte, *wpe;
    int64_t C;
    template <int W>
    __device__ void run(int64_t row, int64_t col) const {
        Vec<T, W> x = load<W>(wte + int64_t(ids[row]) * C + col);
        if (wpe) {
            const Vec<T, W> p = load<W>(wpe + int64_t(pos[row]) * C + col);
            for (int k = 0; k < W; ++k) x.set(k, x.get(k) + p.get(k));
        }
        store(out + row * C + col, x);
    }
};

constexpr int kShort = 32;       // uses of a table row that one warp adds
constexpr int kChunks = 128;     // at most, of the rows of dout; each is placed by one warp
constexpr int kChunkRows = 512;  // at least

// The uses of each table row, in the stream's workspace.
struct Uses {
    int32_t* cursor;     // (chunks, V): uses in a chunk; then where the chunk's first one goes
    int32_t* start;      // (V + 1): first entry of a table row in `order`
    int32_t* order;      // (N): rows of dout, by table row, then increasing
    int32_t* long_rows;  // (V): table rows with more than kShort uses, in any order
    int32_t* long_count;
    int64_t N, V, chunk_rows, chunks;
};

static __global__ void count_uses_kernel(const Uses u, const int32_t* ids) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < u.N) atomicAdd(&u.cursor[row / u.chunk_rows * u.V + ids[row]], 1);
}

// Per table row: counts of the chunks -> exclusive sums over chunks; the total goes to start[v].
static __global__ void sum_chunks_kernel(const Uses u) {
    const int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (v >= u.V) return;
    int32_t total = 0;
    for (int64_t c = 0; c < u.chunks; c += 8) {
        int32_t count[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) count[k] = c + k < u.chunks ? u.cursor[(c + k) * u.V + v] : 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (c + k < u.chunks) u.cursor[(c + k) * u.V + v] = total;
            total += count[k];
        }
    }
    u.start[v] = total;
    if (total > kShort) u.long_rows[atomicAdd(u.long_count, 1)] = int32_t(v);
}

// start[] : counts -> exclusive sums, by one block; a thread owns a run of table rows.
static __global__ void __launch_bounds__(1024) sum_starts_kernel(const Uses u) {
    __shared__ int32_t warps[32];
    const int64_t each = (u.V + blockDim.x - 1) / blockDim.x;
    const int64_t first = min(threadIdx.x * each, u.V), last = min(first + each, u.V);
    int32_t mine = 0;
    for (int64_t v = first; v < last; ++v) mine += u.start[v];
    int32_t inclusive = mine;
    for (int d = 1; d < 32; d *= 2) {
        const int32_t left = __shfl_up_sync(0xffffffffu, inclusive, d);
        if (int(threadIdx.x % 32) >= d) inclusive += left;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = inclusive;
    __syncthreads();
    int32_t running = inclusive - mine;
    for (int w = 0; w < int(threadIdx.x / 32); ++w) running += warps[w];
    for (int64_t v = first; v < last; ++v) {
        const int32_t count = u.start[v];
        u.start[v] = running;
        running += count;
    }
    if (threadIdx.x == blockDim.x - 1) u.start[u.V] = running;
}

// One warp walks a chunk in order, 32 rows at a time; equal ids are ranked by lane.
static __global__ void __launch_bounds__(32) place_uses_kernel(const Uses u, const int32_t* ids) {
    int32_t* cursor = u.cursor + blockIdx.x * u.V;
    const int64_t first = blockIdx.x * u.chunk_rows, last = min(first + u.chunk_rows, u.N);
    const unsigned lane = threadIdx.x;
    for (int64_t base = first; base < last; base += 32) {
        const int64_t row = base + lane;
        const int32_t id = row < last ? ids[row] : -1;
        const unsigned same = __match_any_sync(0xffffffffu, id);
        const unsigned leader = __ffs(int(same)) - 1;
        int32_t at = 0;
        if (lane == leader && id >= 0) {
            at = u.start[id] + cursor[id];
            cursor[id] += __popc(same);
        }
        at = __shfl_sync(0xffffffffu, at, int(leader));
        if (id >= 0) u.order[at + __popc(same & ((1u << lane) - 1))] = int32_t(row);
        __syncwarp();
    }
}

// Adds rows order[first], order[first + stride], ... of dout at this lane's columns.
template <class T, int W>
__device__ __forceinline__ void add_rows(float (&sum)[W], const T* dout, const int32_t* order,
                                         int64_t first, int64_t last, int64_t stride, int64_t C,
                                         int64_t col) {
#pragma unroll 4
    for (int64_t i = first; i < last; i += stride) {
        const Vec<T, W> d = load<W>(dout + int64_t(order[i]) * C + col);
        for (int k = 0; k < W; ++k) sum[k] += d.get(k);
    }
}

template <int W>
__device__ __forceinline__ void add_to(float* p, const float (&sum)[W]) {
    Vec<float, W> v = load<W>(p);
    for (int k = 0; k < W; ++k) v.v[k] += sum[k];
    store(p, v);
}

// One warp: one table row, 32 * W columns.
template <class T, int W>
__global__ void __launch_bounds__(256)
    embedding_short_kernel(const Uses u, float* dtable, const T* dout, int64_t C, int64_t slices) {
    const int64_t item = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
    const int64_t v = item / slices, col = (item % slices * 32 + threadIdx.x % 32) * W;
    if (v >= u.V || col >= C) return;
    const int64_t first = u.start[v], last = u.start[v + 1];
    if (first == last || last - first > kShort) return;
    float sum[W] = {};
    add_rows<T, W>(sum, dout, u.order, first, last, 1, C, col);
    add_to<W>(dtable + v * C + col, sum);
}

// One block: 32 warps share the uses of one table row at 32 * W columns, and add up in order.
template <class T, int W>
__global__ void __launch_bounds__(1024)
    embedding_long_kernel(const Uses u, float* dtable, const T* dout, int64_t C, int64_t slices) {
    __shared__ float parts[32][32 * W];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t items = *u.long_count * slices;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t v = u.long_rows[item / slices], col = (item % slices * 32 + lane) * W;
        float sum[W] = {};
        if (col < C)
            add_rows<T, W>(sum, dout, u.order, u.start[v] + warp, u.start[v + 1], 32, C, col);
        for (int k = 0; k < W; ++k) parts[warp][k * 32 + lane] = sum[k];
        __syncthreads();
        if (warp == 0 && col < C) {
            for (int w = 1; w < 32; ++w)
                for (int k = 0; k < W; ++k) sum[k] += parts[w][k * 32 + lane];
            add_to<W>(dtable + v * C + col, sum);
        }
        __syncthreads();
    }
}

// --- launchers -----------------------------------------------------------------------------------
void CudaKernels::embedding_forward(Stream& stream, Tensor out, Tensor ids, Tensor wte, Tensor pos,
                                    Tensor wpe) {
    const int64_t N = ids.numel(), C = wte.dim(-1);
    expect(ids, "embedding_forward: ids", DType::i32, N);
    expect(wte, "embedding_forward: wte", precision_.act, wte.numel());
    expect(out, "embedding_forward: out", precision_.act, N * C);
    if (wpe) {
        expect(wpe, "embedding_forward: wpe", precision_.act, wpe.numel());
        expect(pos, "embedding_forward: pos", DType::i32, N);
    }
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        map_rows("embedding_forward", stream,
                 EmbeddingForwardOp<T>{static_cast<T*>(out.data), ids.as<int32_t>(),
                                       wpe ? pos.as<int32_t>() : nullptr,
                                       static_cast<const T*>(wte.data),
                                       static_cast<const T*>(wpe.data), C},
                 N, C,
                 C % vector_width<T> == 0 && aligned16(out.data) && aligned16(wte.data) &&
                     aligned16(wpe.data));
    });
}

// Ints of workspace besides the cursors, and the number of chunks that the rest has room for.
static int64_t fixed_ints(int64_t N, int64_t V) { return N + 2 * V + 2; }
static int64_t chunks_for(int64_t N, int64_t V, int64_t ints) {
    const int64_t room = (ints - fixed_ints(N, V)) / std::max<int64_t>(V, 1);
    return std::min({divide_up(N, kChunkRows), int64_t(kChunks), room});
}

int64_t embedding_workspace(const WorkspaceDims& d) {
    const int64_t V = std::max(d.vocab, d.rows);  // the position table may be the longer one
    const int64_t chunks = std::min<int64_t>(divide_up(d.rows, kChunkRows), kChunks);
    return (fixed_ints(d.rows, V) + std::max(chunks * d.vocab, V)) * 4;
}

static Uses find_uses(Stream& stream, const int32_t* ids, int64_t N, int64_t V) {
    const char* name = "embedding_backward";
    const int64_t ints = stream.workspace.bytes() / 4, chunks = chunks_for(N, V, ints);
    CHECK(chunks > 0, ": ", name, " of ", N, " rows into ", V, " needs ",
          (fixed_ints(N, V) + V) * 4, " bytes of workspace, the stream has ", ints * 4);
    int32_t* p = static_cast<int32_t*>(workspace(stream, ints * 4, name));
    Uses u{};
    u.N = N;
    u.V = V;
    u.chunk_rows = divide_up(N, chunks);
    u.chunks = divide_up(N, u.chunk_rows);
    u.long_count = p;
    u.cursor = p + 1;
    u.start = u.cursor + u.chunks * V;
    u.long_rows = u.start + V + 1;
    u.order = u.long_rows + V;
    check(cudaMemsetAsync(p, 0, size_t(u.chunks * V + 1) * 4,
                          static_cast<cudaStream_t>(stream.handle)),
          name);
    launch(name, stream, {.blocks = divide_up(N, 256)}, count_uses_kernel, u, ids);
    launch(name, stream, {.blocks = divide_up(V, 256)}, sum_chunks_kernel, u);
    launch(name, stream, {.blocks = 1, .threads = 1024}, sum_starts_kernel, u);
    launch(name, stream, {.blocks = u.chunks, .threads = 32}, place_uses_kernel, u, ids);
    return u;
}

template <class T, int W>
static void add_uses(Stream& stream, const Uses& u, float* dtable, const T* dout, int64_t C) {
    const char* name = "embedding_backward";
    const int64_t slices = divide_up(C, 32 * W);
    launch(name, stream, {.blocks = divide_up(u.V * slices, 8)}, embedding_short_kernel<T, W>, u,
           dtable, dout, C, slices);
    launch(name, stream, {.blocks = 2 * multiprocessors(), .threads = 1024},
           embedding_long_kernel<T, W>, u, dtable, dout, C, slices);
}

void CudaKernels::embedding_backward(Stream& stream, Tensor dwte, Tensor dwpe, Tensor dout,
                                     Tensor ids, Tensor pos) {
    const int64_t N = ids.numel(), C = dwte.dim(-1);
    expect(ids, "embedding_backward: ids", DType::i32, N);
    expect(dwte, "embedding_backward: dwte", DType::f32, dwte.numel());
    expect(dout, "embedding_backward: dout", precision_.act, N * C);
    if (N == 0) return;
    CHECK(stream.handle);
    const auto one = [&](const Tensor& dtable, const Tensor& index) {
        const Uses u = find_uses(stream, index.as<int32_t>(), N, dtable.dim(0));
        dispatch(precision_.act, [&](auto type) {
            using T = typename decltype(type)::type;
            const T* d = static_cast<const T*>(dout.data);
            if (C % vector_width<T> == 0 && aligned16(d) && aligned16(dtable.data))
                add_uses<T, vector_width<T>>(stream, u, dtable.as<float>(), d, C);
            else
                add_uses<T, 1>(stream, u, dtable.as<float>(), d, C);
        });
    };
    one(dwte, ids);
    if (!dwpe) return;
    expect(dwpe, "embedding_backward: dwpe", DType::f32, dwpe.dim(0) * C);
    expect(pos, "embedding_backward: pos", DType::i32, N);
    one(dwpe, pos);
}

}  // namespace torus::cuda
