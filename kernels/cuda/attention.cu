// Attention: checks, the choice of kernels (Hopper's in flash/, mma.sync for other GPUs and head
// dims, plain loops for fp32; cuDNN's when it was asked for), and the two small passes around them:
// delta = rowsum(dout * o) and the merge of two softmax parts.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/flash/flash.h"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
static __global__ void tile_keys_kernel(int32_t* least, int32_t* most, const int32_t* first_key,
                                        int64_t pitch, int64_t Tq, int64_t rows, int64_t tiles,
                                        int64_t count) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int32_t* keys = first_key + i / tiles * pitch;
    const int64_t begin = i % tiles * rows, end = min(begin + rows, Tq);
    int32_t low = keys[begin], high = low;
    for (int64_t t = begin + 1; t < end; ++t) {
        low = min(low, keys[t]);
        high = max(high, keys[t]);
    }
    least[i] = low;
    most[i] = high;
}

// Rows of a (B,T,H,D) tensor, each shared by 2^lane_bits <= 32 neighbouring threads. 32-bit
// divisions: 64-bit ones would cost as much as the memory accesses.
struct HeadRows {
    uint32_t T, H, rows;
    int64_t D;
    int lane_bits;
};
struct HeadRow {  // of a thread
    uint32_t row, lane, lanes;
    int64_t b, t, h;
    __device__ explicit HeadRow(const HeadRows& r) {
        const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        lanes = 1u << r.lane_bits;
        lane = threadIdx.x & (lanes - 1);
        row = uint32_t(thread >> r.lane_bits);
        const uint32_t bt = row / r.H, batch = bt / r.T;
        b = batch;
        t = bt - batch * r.T;
        h = row - bt * r.H;
    }
};

template <class T, class O, int W>
__global__ void __launch_bounds__(256)
    delta_kernel(const Heads<float> delta, const Heads<const T> dout, const Heads<const O> o,
                 const HeadRows r) {
    const HeadRow mine(r);
    const bool live = mine.row < r.rows;
    float sum = 0;
    if (live) {
        const T* d = dout.at(mine.b, mine.t, mine.h);
        const O* x = o.at(mine.b, mine.t, mine.h);
        for (int64_t c = mine.lane * W; c < r.D; c += mine.lanes * W) {
            const Vec<T, W> dv = load<W>(d + c);
            const Vec<O, W> xv = load<W>(x + c);
            for (int k = 0; k < W; ++k) sum += dv.get(k) * xv.get(k);
        }
    }
    for (uint32_t lane = mine.lanes / 2; lane > 0; lane /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (live && mine.lane == 0) *delta.at(mine.b, mine.t, mine.h) = sum;
}

template <int W>
__global__ void __launch_bounds__(256)
    merge_kernel(const Heads<float> o, const Heads<float> lse, const Heads<const float> o2,
                 const Heads<const float> lse2, const HeadRows r) {
    const HeadRow mine(r);
    const bool live = mine.row < r.rows;
    const float one = live ? *lse.at(mine.b, mine.t, mine.h) : -INFINITY;
    const float two = live ? *lse2.at(mine.b, mine.t, mine.h) : -INFINITY;
    const float top = fmaxf(one, two);
    const bool seen = top != -INFINITY;
    const float both = seen ? top + logf(expf(one - top) + expf(two - top)) : top;
    const float weight = seen ? expf(one - both) : 0.0f, weight2 = seen ? expf(two - both) : 0.0f;
    __syncwarp();  // all lanes of the row have read lse
    if (!live) return;
    if (mine.lane == 0) *lse.at(mine.b, mine.t, mine.h) = both;
    if (two == -INFINITY) return;
    for (int64_t c = mine.lane * W; c < r.D; c += mine.lanes * W) {
        float* p = o.at(mine.b, mine.t, mine.h) + c;
        Vec<float, W> x = load<W>(p);
        const Vec<float, W> y = load<W>(o2.at(mine.b, mine.t, mine.h) + c);
        // A part that weighs nothing may hold anything.
        for (int k = 0; k < W; ++k)
            x.v[k] = (weight > 0 ? weight * x.v[k] : 0.0f) + weight2 * y.v[k];
        store(p, x);
    }
}

// --- launchers -----------------------------------------------------------------------------------
static void check_heads(const char* name, const Tensor& t, DType dtype, int64_t B, int64_t T,
                        int64_t H, int64_t D) {
    CHECK(t && t.dtype == dtype && t.shape == Shape({B, T, H, D}), ": ", name, " is ",
          name_of(t.dtype), " ", t.shape.str(), ", expected ", name_of(dtype), " ",
          Shape({B, T, H, D}).str());
}

static void check_stats(const char* name, const Tensor& t, int64_t B, int64_t H, int64_t T) {
    CHECK(t && t.dtype == DType::f32 && t.shape == Shape({B, H, T}) && (T <= 1 || t.pitch(2) == 1),
          ": ", name, " is given ", name_of(t.dtype), " ", t.shape.str(), ", not f32 ",
          Shape({B, H, T}).str(), " with rows of one piece");
}

static bool vectorizable_heads(const Tensor& t, int64_t width) {
    bool ok = reinterpret_cast<uintptr_t>(t.data) % uintptr_t(width * size_of(t.dtype)) == 0;
    ok = ok && t.dim(3) % width == 0;
    for (int i = 0; i < 3; ++i) ok = ok && (t.dim(i) == 1 || t.pitch(i) % width == 0);
    return ok;
}

// What both directions share; `q` is q, k, v of either struct.
template <class Call>
static AttnShape shape_of(const char* name, const Call& a, DType act) {
    CHECK(a.q.rank() == 4 && a.k.rank() == 4, ": ", name, " of q ", a.q.shape.str(), " and k ",
          a.k.shape.str());
    AttnShape s{};
    s.B = a.q.dim(0);
    s.Tq = a.q.dim(1);
    s.H = a.q.dim(2);
    s.D = a.q.dim(3);
    s.Tk = a.k.dim(1);
    s.Hk = a.k.dim(2);
    check_heads(name, a.q, act, s.B, s.Tq, s.H, s.D);
    check_heads(name, a.k, act, s.B, s.Tk, s.Hk, s.D);
    check_heads(name, a.v, act, s.B, s.Tk, s.Hk, s.D);
    check_stats(name, a.lse, s.B, s.H, s.Tq);
    CHECK(s.D >= 1 && s.D <= 256, ": ", name, " with head dim ", s.D, ", at most 256");
    CHECK(s.Hk > 0 && s.H % s.Hk == 0, ": ", s.H, " heads over ", s.Hk, " key-value heads");
    CHECK(s.Tk < int64_t(1) << 31, ": ", name, " of ", s.Tk, " keys");
    if (a.first_key) {
        CHECK(a.first_key.dtype == DType::i32 && a.first_key.shape == Shape({s.B, s.Tq}), ": ",
              name, ": first_key is ", name_of(a.first_key.dtype), " ", a.first_key.shape.str());
        s.first_key = a.first_key.template as<int32_t>();
        s.first_key_pitch = a.first_key.pitch(0);
    }
    s.shift = a.q0 - a.k0;
    s.k0 = a.k0;
    s.causal = a.causal;
    s.scale = float(a.scale);
    const int64_t width = 16 / size_of(act);
    s.vectors = vectorizable_heads(a.q, width) && vectorizable_heads(a.k, width) &&
                vectorizable_heads(a.v, width);
    return s;
}

// Fills s.tile_keys for tiles of `rows` queries, in the stream's workspace.
static void find_tile_keys(Stream& stream, AttnShape& s, int64_t rows) {
    if (!s.first_key || s.Tq == 0) return;
    const int64_t tiles = divide_up(s.Tq, rows), count = s.B * tiles;
    int32_t* least = static_cast<int32_t*>(workspace(stream, count * 8, "attention"));
    launch("attention_tiles", stream, {.blocks = divide_up(count, 256)}, tile_keys_kernel, least,
           least + count, s.first_key, s.first_key_pitch, s.Tq, rows, tiles, count);
    s.tile_keys = {least, least + count, tiles};
}

void CudaKernels::use_cudnn_attention() { cudnn_ = make_cudnn_attention(); }

// Queries that do not start where the keys do are a key-value cache's (the engine refuses cuDNN for
// blocks of a ring): cuDNN would want a new plan for every length of the cache. It takes statistics
// dense only.
template <class Call>
static bool takes_cudnn(const std::shared_ptr<CudnnAttention>& cudnn, const Call& a) {
    return cudnn && a.q0 == a.k0 && a.lse.contiguous();
}

int64_t CudaKernels::attention_workspace(const WorkspaceDims& d) const {
    const int64_t tables = (d.rows / 16 + d.batch + 1) * 8;  // tiles of at least 16 queries
    const int64_t batch = std::max<int64_t>(d.batch, 1), queries = divide_up(d.rows, batch);
    const int64_t keys = std::max(d.keys, queries);
    const AttentionSizes sizes{batch, queries, keys, d.heads, d.kv_heads, d.head_dim};
    return std::max(
        {tables, flash::forward_workspace_bytes(batch, queries),
         flash::backward_workspace_bytes(batch, d.heads, d.kv_heads, queries, keys, d.head_dim),
         cudnn_ ? cudnn_workspace_bytes(sizes) : 0});
}

void CudaKernels::attention_forward(Stream& stream, const Attn& a) {
    const char* name = "attention_forward";
    AttnShape s = shape_of(name, a, precision_.act);
    check_heads(name, a.o, a.carry ? DType::f32 : precision_.act, s.B, s.Tq, s.H, s.D);
    if (s.B * s.H * s.Tq == 0) return;
    CHECK(stream.handle, ": ", name, " was queued without a stream");
    if (takes_cudnn(cudnn_, a)) {
        const Range range(name);
        const AttentionSizes sizes{s.B, s.Tq, s.Tk, s.H, s.Hk, s.D};
        cudnn_->forward(stream, a, workspace(stream, cudnn_workspace_bytes(sizes), name));
    } else if (hopper_attention_ && flash::forward_supported(a)) {
        const Range range(name);
        flash::forward(static_cast<cudaStream_t>(stream.handle), a,
                       workspace(stream, flash::forward_workspace_bytes(s.B, s.Tq), name));
    } else if (precision_.act == DType::f32) {
        attention_forward_fp32(stream, a, s);
    } else {
        find_tile_keys(stream, s, kRows);
        attention_forward_mma(stream, a, s);
    }
}

void CudaKernels::attention_backward(Stream& stream, const AttnGrad& a) {
    const char* name = "attention_backward";
    AttnShape s = shape_of(name, a, precision_.act);
    const bool adds = a.add_q || a.add_kv;
    const DType grad = adds || a.dq.dtype == DType::f32 ? DType::f32 : precision_.act;
    check_heads(name, a.dout, precision_.act, s.B, s.Tq, s.H, s.D);
    check_heads(name, a.dq, grad, s.B, s.Tq, s.H, s.D);
    check_heads(name, a.dk, grad, s.B, s.Tk, s.Hk, s.D);
    check_heads(name, a.dv, grad, s.B, s.Tk, s.Hk, s.D);
    check_stats(name, a.delta, s.B, s.H, s.Tq);
    s.vectors = s.vectors && vectorizable_heads(a.dout, 16 / size_of(precision_.act));
    if (s.B * s.H == 0) return;
    CHECK(stream.handle, ": ", name, " was queued without a stream");
    if (takes_cudnn(cudnn_, a)) {
        const Range range(name);
        const AttentionSizes sizes{s.B, s.Tq, s.Tk, s.H, s.Hk, s.D};
        cudnn_->backward(stream, a, workspace(stream, cudnn_workspace_bytes(sizes), name));
    } else if (hopper_attention_ && flash::backward_supported(a)) {
        const Range range(name);
        const int64_t bytes = flash::backward_workspace_bytes(s.B, s.H, s.Hk, s.Tq, s.Tk, s.D);
        flash::backward(static_cast<cudaStream_t>(stream.handle), a, workspace(stream, bytes, name),
                        deterministic_);
    } else if (precision_.act == DType::f32) {
        attention_backward_fp32(stream, a, s);
    } else {
        find_tile_keys(stream, s, attention_backward_rows(s.D));
        attention_backward_mma(stream, a, s);
    }
}

// The rows of `t`, a (B,T,H,D) tensor, in vectors of W.
static HeadRows head_rows(const Tensor& t, int W) {
    const int64_t rows = t.dim(0) * t.dim(1) * t.dim(2);
    CHECK(rows < int64_t(1) << 32, ": ", rows, " rows of heads");
    HeadRows r{uint32_t(t.dim(1)), uint32_t(t.dim(2)), uint32_t(rows), t.dim(3), 0};
    while (r.lane_bits < 5 && (int64_t(W) << r.lane_bits) < r.D) ++r.lane_bits;
    return r;
}
static int64_t blocks_of(const HeadRows& r) {
    return divide_up(int64_t(r.rows) << r.lane_bits, 256);
}

template <class T, class O, int W>
static void launch_delta(Stream& stream, const Tensor& delta, const Tensor& dout, const Tensor& o) {
    const HeadRows r = head_rows(dout, W);
    launch("attention_delta", stream, {.blocks = blocks_of(r)}, delta_kernel<T, O, W>,
           stats_of<float>(delta), heads_of<const T>(dout), heads_of<const O>(o), r);
}

void CudaKernels::attention_delta(Stream& stream, Tensor delta, Tensor dout, Tensor o) {
    const char* name = "attention_delta";
    CHECK(dout.rank() == 4, ": ", name, " of dout ", dout.shape.str());
    check_heads(name, dout, precision_.act, dout.dim(0), dout.dim(1), dout.dim(2), dout.dim(3));
    check_heads(name, o, o.dtype, dout.dim(0), dout.dim(1), dout.dim(2), dout.dim(3));
    CHECK(o.dtype == precision_.act || o.dtype == DType::f32, ": ", name, " with o in ",
          name_of(o.dtype));
    check_stats(name, delta, dout.dim(0), dout.dim(2), dout.dim(1));
    dispatch(precision_.act, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int W = vector_width<T>;
        const bool vectors = vectorizable_heads(dout, W) && vectorizable_heads(o, W);
        if (o.dtype == DType::f32)
            vectors ? launch_delta<T, float, W>(stream, delta, dout, o)
                    : launch_delta<T, float, 1>(stream, delta, dout, o);
        else
            vectors ? launch_delta<T, T, W>(stream, delta, dout, o)
                    : launch_delta<T, T, 1>(stream, delta, dout, o);
    });
}

void CudaKernels::attention_merge(Stream& stream, Tensor o, Tensor lse, Tensor o2, Tensor lse2) {
    const char* name = "attention_merge";
    CHECK(o.rank() == 4, ": ", name, " of o ", o.shape.str());
    const int64_t B = o.dim(0), T_ = o.dim(1), H = o.dim(2), D = o.dim(3);
    check_heads(name, o, DType::f32, B, T_, H, D);
    check_heads(name, o2, DType::f32, B, T_, H, D);
    check_stats(name, lse, B, H, T_);
    check_stats(name, lse2, B, H, T_);
    const auto run = [&](auto width) {
        constexpr int W = decltype(width)::value;
        const HeadRows r = head_rows(o, W);
        launch(name, stream, {.blocks = blocks_of(r)}, merge_kernel<W>, heads_of<float>(o),
               stats_of<float>(lse), heads_of<const float>(o2), stats_of<const float>(lse2), r);
    };
    if (vectorizable_heads(o, 4) && vectorizable_heads(o2, 4))
        run(std::integral_constant<int, 4>{});
    else
        run(std::integral_constant<int, 1>{});
}

}  // namespace torus::cuda

namespace torus {

void use_cudnn_attention(Kernels& kernels) {
    auto* cuda = dynamic_cast<cuda::CudaKernels*>(&kernels);
    require(cuda, Exit::usage, "--attention cudnn is for the GPU; leave it out with --device cpu");
    cuda->use_cudnn_attention();
}

}  // namespace torus
