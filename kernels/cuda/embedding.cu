// Embedding lookup and its gradient. The gradient adds many rows of dout into each row of the
// table; to give the same bits every run it first makes, for each table row that is used, the list
// of its uses in increasing order (a stable counting sort: integer atomics only count, and choose
// where a list lies), then one warp per list and slice of columns adds them. Table rows with many
// uses (a frequent byte, a padded position) go to whole blocks in a second kernel, so that no warp
// has more than kShort rows to add.
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
            x = Vec<T, W>::of([&](int k) { return x.get(k) + p.get(k); });
        }
        store(out + row * C + col, x);
    }
};

constexpr int kShort = 128;   // uses of a table row that one warp adds
constexpr int kChunks = 128;  // at most, of the rows of dout; each is placed by one block
constexpr int kTile = 512;    // rows that such a block places at a time
constexpr int kRunThreads = 256;

struct Run {  // a table row and its uses: order[first, first + count)
    int32_t row, first, count;
};

// The uses of each table row, in the stream's workspace.
struct Uses {
    int32_t* counters;   // {entries of order given out, runs, long runs}
    int32_t* cursor;     // (chunks, V): uses in a chunk; then those in the chunks before it
    int32_t* start;      // (V): first entry of a used table row in `order`
    int32_t* order;      // (N): rows of dout, by table row, then increasing
    Run* runs;           // one for each used table row, in any order
    int32_t* long_runs;  // which of them have more than kShort uses, in any order
    int64_t N, V, chunk_rows, chunks;
};

static __global__ void count_uses_kernel(const Uses u, const int32_t* ids) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < u.N) atomicAdd(&u.cursor[row / u.chunk_rows * u.V + ids[row]], 1);
}

// Sum over the threads before this one; `total` becomes that of the block.
static __device__ int32_t sum_before(int32_t mine, int32_t& total) {
    __shared__ int32_t warps[kRunThreads / 32];
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    int32_t sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        const int32_t left = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += left;
    }
    __syncthreads();  // of an earlier call all have read `warps`
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int32_t before = sum - mine;
    total = 0;
    for (int w = 0; w < kRunThreads / 32; ++w) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    return before;
}

// Per table row: counts of the chunks -> sums over the chunks before; and its run.
static __global__ void __launch_bounds__(kRunThreads) make_runs_kernel(const Uses u) {
    constexpr int fetched = 16;
    __shared__ int32_t bases[2];
    const int64_t v = int64_t(blockIdx.x) * kRunThreads + threadIdx.x;
    int32_t uses = 0;
    for (int64_t c = 0; v < u.V && c < u.chunks; c += fetched) {
        int32_t count[fetched];
#pragma unroll
        for (int k = 0; k < fetched; ++k)
            count[k] = c + k < u.chunks ? u.cursor[(c + k) * u.V + v] : 0;
#pragma unroll
        for (int k = 0; k < fetched; ++k) {
            if (c + k < u.chunks) u.cursor[(c + k) * u.V + v] = uses;
            uses += count[k];
        }
    }
    int32_t all_uses = 0, all_runs = 0;
    const int32_t entry = sum_before(uses, all_uses), run = sum_before(uses > 0, all_runs);
    if (threadIdx.x == 0) {
        bases[0] = atomicAdd(&u.counters[0], all_uses);
        bases[1] = atomicAdd(&u.counters[1], all_runs);
    }
    __syncthreads();
    if (uses == 0) return;
    u.start[v] = bases[0] + entry;
    u.runs[bases[1] + run] = {int32_t(v), bases[0] + entry, uses};
    if (uses > kShort) u.long_runs[atomicAdd(&u.counters[2], 1)] = bases[1] + run;
}

// One block walks a chunk in order, a tile at a time; a row's place among equal ids of its tile is
// counted.
static __global__ void __launch_bounds__(kTile)
    place_uses_kernel(const Uses u, const int32_t* ids) {
    __shared__ int32_t tile[kTile];
    int32_t* const cursor = u.cursor + blockIdx.x * u.V;
    const int64_t begin = blockIdx.x * u.chunk_rows, end = min(begin + u.chunk_rows, u.N);
    const int thread = int(threadIdx.x);
    for (int64_t base = begin; base < end; base += kTile) {
        const int64_t row = base + thread;
        const int32_t id = row < end ? ids[row] : -1;
        tile[thread] = id;
        __syncthreads();  // also: the last tile's cursors are written
        int before = 0, equal = 0;
#pragma unroll 16
        for (int i = 0; i < kTile; ++i) {
            equal += tile[i] == id;
            before += tile[i] == id && i < thread;
        }
        if (id >= 0) u.order[u.start[id] + cursor[id] + before] = int32_t(row);
        __syncthreads();
        if (id >= 0 && before == equal - 1) cursor[id] += equal;
    }
}

// Adds rows order[first], order[first + stride], ... of dout at this lane's columns.
template <class T, int W>
__device__ __forceinline__ void add_rows(float (&sum)[W], const T* dout, const int32_t* order,
                                         int64_t first, int64_t last, int64_t stride, int64_t C,
                                         int64_t col) {
#pragma unroll 8
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

// A warp adds one run at 32 * W columns at a time.
template <class T, int W>
__global__ void __launch_bounds__(256)
    embedding_short_kernel(const Uses u, float* dtable, const T* dout, int64_t C, int64_t slices) {
    const int64_t warps = int64_t(gridDim.x) * 8, items = u.counters[1] * slices;
    for (int64_t item = int64_t(blockIdx.x) * 8 + threadIdx.x / 32; item < items; item += warps) {
        const uint32_t index = uint32_t(item) / uint32_t(slices);
        const Run run = u.runs[index];
        const int64_t col = ((item - index * slices) * 32 + threadIdx.x % 32) * W;
        if (run.count > kShort || col >= C) continue;
        float sum[W] = {};
        add_rows<T, W>(sum, dout, u.order, run.first, run.first + run.count, 1, C, col);
        add_to<W>(dtable + run.row * C + col, sum);
    }
}

// A block: 32 warps share the uses of one run at 32 * W columns, and add up in order.
template <class T, int W>
__global__ void __launch_bounds__(1024)
    embedding_long_kernel(const Uses u, float* dtable, const T* dout, int64_t C, int64_t slices) {
    __shared__ float parts[32][32 * W];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t items = u.counters[2] * slices;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Run run = u.runs[u.long_runs[item / slices]];
        const int64_t col = (item % slices * 32 + lane) * W;
        float sum[W] = {};
        if (col < C)
            add_rows<T, W>(sum, dout, u.order, run.first + warp, run.first + run.count, 32, C, col);
        for (int k = 0; k < W; ++k) parts[warp][k * 32 + lane] = sum[k];
        __syncthreads();
        if (warp == 0 && col < C) {
            for (int w = 1; w < 32; ++w)
                for (int k = 0; k < W; ++k) sum[k] += parts[w][k * 32 + lane];
            add_to<W>(dtable + run.row * C + col, sum);
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
static int64_t fixed_ints(int64_t N, int64_t V) {
    return 3 + V + N + 3 * std::min(N, V) + N / kShort;
}
static int64_t chunks_for(int64_t N, int64_t V, int64_t ints) {
    const int64_t room = (ints - fixed_ints(N, V)) / std::max<int64_t>(V, 1);
    return std::min({divide_up(N, kTile), int64_t(kChunks), room});
}

int64_t embedding_workspace(const WorkspaceDims& d) {
    const int64_t V = std::max(d.vocab, d.rows);  // the position table may be the longer one
    const int64_t chunks = std::min<int64_t>(divide_up(d.rows, kTile), kChunks);
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
    u.counters = p;
    u.cursor = u.counters + 3;
    u.start = u.cursor + u.chunks * V;
    u.order = u.start + V;
    u.runs = reinterpret_cast<Run*>(u.order + N);
    u.long_runs = reinterpret_cast<int32_t*>(u.runs + std::min(N, V));
    check(cudaMemsetAsync(p, 0, size_t(u.chunks * V + 3) * 4,
                          static_cast<cudaStream_t>(stream.handle)),
          name);
    launch(name, stream, {.blocks = divide_up(N, 256)}, count_uses_kernel, u, ids);
    launch(name, stream, {.blocks = divide_up(V, kRunThreads), .threads = kRunThreads},
           make_runs_kernel, u);
    launch(name, stream, {.blocks = u.chunks, .threads = kTile}, place_uses_kernel, u, ids);
    return u;
}

template <class T, int W>
static void add_uses(Stream& stream, const Uses& u, float* dtable, const T* dout, int64_t C) {
    const char* name = "embedding_backward";
    const int64_t slices = divide_up(C, 32 * W);
    CHECK(std::min(u.N, u.V) * slices < int64_t(1) << 32, ": ", name, " of ", u.N, " rows of ", C);
    const auto short_kernel = embedding_short_kernel<T, W>;
    const int64_t blocks = resident_blocks(short_kernel, 256, 0) * int64_t(multiprocessors());
    launch(name, stream, {.blocks = std::min(blocks, divide_up(u.N * slices, 8))}, short_kernel, u,
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
