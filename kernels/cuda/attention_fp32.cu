// Attention in fp32, the exact mode: plain arithmetic, one warp per query (forward, dq) or per key
// (dk, dv). Lanes take 32 keys at a time for the scores, then 32 columns at a time for the sums, so
// no product is ever stored.
#include "kernels/cuda/attention.cuh"

namespace torus::cuda {

// --- kernels -------------------------------------------------------------------------------------
constexpr int kColumns = 256 / 32;  // columns of a lane at the largest head dim

__device__ __forceinline__ float dot(const float* a, const float* b, int64_t D) {
    float sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += a[d] * b[d];
    return sum;
}

// A row of D floats to this warp's shared memory.
__device__ __forceinline__ void keep_row(float* kept, const float* row, int64_t D) {
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) kept[d] = row[d];
    __syncwarp();
}

// sum[i] += weight of lane j * row j, over the 32 lanes; row(j) is only read where the weight of
// lane j is not 0.
template <class Row>
__device__ __forceinline__ void add_weighted(float (&sum)[kColumns], float weight, int64_t D,
                                             Row row) {
    for (int j = 0; j < 32; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
        if (w == 0) continue;
        const float* x = row(j);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int64_t d = threadIdx.x % 32 + 32 * i;
            if (d < D) sum[i] += w * x[d];
        }
    }
}

static __global__ void __launch_bounds__(32 * kWarps)
    attention_forward_fp32_kernel(const ForwardArgs<float> a) {
    __shared__ float rows[kWarps][256];
    const AttnShape& s = a.s;
    const int lane = threadIdx.x % 32;
    const int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.B * s.H * s.Tq) return;
    const int64_t row = item % s.Tq, h = item / s.Tq % s.H, b = item / s.Tq / s.H;
    const int64_t hk = h / (s.H / s.Hk);
    float* const q = rows[threadIdx.x / 32];
    keep_row(q, a.q.at(b, row, h), s.D);
    float m = -INFINITY, l = 0, o[kColumns] = {};
    const int first = s.first(b, row), end = s.last(row) + 1;
    for (int base = first; base < end; base += 32) {
        const int key = base + lane;
        const float score = key < end ? s.scale * dot(q, a.k.at(b, key, hk), s.D) : -INFINITY;
        const float top = fmaxf(m, warp_max(score));
        const float p = expf(score - top), shrink = expf(m - top);
        l = l * shrink + warp_sum(p);
        for (float& x : o) x *= shrink;
        add_weighted(o, p, s.D, [&](int j) { return a.v.at(b, base + j, hk); });
        m = top;
    }
    float* const lse = a.lse.at(b, row, h);
    float mine = l > 0 ? m + logf(l) : -INFINITY;
    float weight = l > 0 ? 1 / l : 0.0f, earlier = 0;
    if (a.carry) {
        const float old = *lse, top = fmaxf(old, mine);
        if (top == -INFINITY) return;
        const float both = top + logf(expf(old - top) + expf(mine - top));
        earlier = expf(old - both);
        weight *= expf(mine - both);
        mine = both;
    }
    __syncwarp();
    if (lane == 0) *lse = mine;
    for (int i = 0; i < kColumns; ++i) {
        const int64_t d = lane + 32 * i;
        if (d >= s.D) continue;
        float* p = a.o.at(b, row, h) + d;
        *p = a.carry && earlier > 0 ? earlier * *p + weight * o[i] : weight * o[i];
    }
}

__device__ __forceinline__ void store_row(const Heads<float>& out, bool add, int64_t b, int64_t t,
                                          int64_t h, int64_t D, const float (&x)[kColumns]) {
    for (int i = 0; i < kColumns; ++i) {
        const int64_t d = threadIdx.x % 32 + 32 * i;
        if (d >= D) continue;
        float* p = out.at(b, t, h) + d;
        *p = add ? *p + x[i] : x[i];
    }
}

static __global__ void __launch_bounds__(32 * kWarps)
    attention_queries_fp32_kernel(const BackwardArgs<float> a) {
    __shared__ float rows[kWarps][2][256];
    const AttnShape& s = a.s;
    const int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.B * s.H * s.Tq) return;
    const int64_t row = item % s.Tq, h = item / s.Tq % s.H, b = item / s.Tq / s.H;
    const int64_t hk = h / (s.H / s.Hk);
    float *const q = rows[threadIdx.x / 32][0], *const dout = rows[threadIdx.x / 32][1];
    keep_row(q, a.q.at(b, row, h), s.D);
    keep_row(dout, a.dout.at(b, row, h), s.D);
    const float lse = *a.lse.at(b, row, h), delta = *a.delta.at(b, row, h);
    const int first = s.first(b, row), end = s.last(row) + 1;
    float dq[kColumns] = {};
    for (int base = first; base < end; base += 32) {
        const int key = base + threadIdx.x % 32;
        float ds = 0;
        if (key < end) {
            const float p = expf(s.scale * dot(q, a.k.at(b, key, hk), s.D) - lse);
            ds = s.scale * p * (dot(dout, a.v.at(b, key, hk), s.D) - delta);
        }
        add_weighted(dq, ds, s.D, [&](int j) { return a.k.at(b, base + j, hk); });
    }
    store_row(a.dq, a.add_q, b, row, h, s.D, dq);
}

static __global__ void __launch_bounds__(32 * kWarps)
    attention_keys_fp32_kernel(const BackwardArgs<float> a) {
    __shared__ float rows[kWarps][2][256];
    const AttnShape& s = a.s;
    const int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (item >= s.B * s.Hk * s.Tk) return;
    const int64_t key = item % s.Tk, hk = item / s.Tk % s.Hk, b = item / s.Tk / s.Hk;
    const int64_t group = s.H / s.Hk;
    float *const k = rows[threadIdx.x / 32][0], *const v = rows[threadIdx.x / 32][1];
    keep_row(k, a.k.at(b, key, hk), s.D);
    keep_row(v, a.v.at(b, key, hk), s.D);
    float dk[kColumns] = {}, dv[kColumns] = {};
    for (int64_t h = hk * group; h < (hk + 1) * group; ++h) {
        for (int64_t base = s.causal ? max(key - s.shift, int64_t(0)) : 0; base < s.Tq;
             base += 32) {
            const int64_t row = base + threadIdx.x % 32;
            float p = 0, ds = 0;
            if (row < s.Tq && s.first(b, row) <= key) {
                p = expf(s.scale * dot(k, a.q.at(b, row, h), s.D) - *a.lse.at(b, row, h));
                ds = s.scale * p * (dot(v, a.dout.at(b, row, h), s.D) - *a.delta.at(b, row, h));
            }
            add_weighted(dv, p, s.D, [&](int j) { return a.dout.at(b, base + j, h); });
            add_weighted(dk, ds, s.D, [&](int j) { return a.q.at(b, base + j, h); });
        }
    }
    store_row(a.dk, a.add_kv, b, key, hk, s.D, dk);
    store_row(a.dv, a.add_kv, b, key, hk, s.D, dv);
}

// --- launchers -----------------------------------------------------------------------------------
void attention_forward_fp32(Stream& stream, const Attn& a, const AttnShape& s) {
    const ForwardArgs<float> args{s,
                                  heads_of<const float>(a.q),
                                  heads_of<const float>(a.k),
                                  heads_of<const float>(a.v),
                                  heads_of<float>(a.o),
                                  heads_of<float>(a.o),
                                  stats_of<float>(a.lse),
                                  a.carry};
    launch("attention_forward", stream,
           {.blocks = divide_up(s.B * s.H * s.Tq, kWarps), .threads = 32 * kWarps},
           attention_forward_fp32_kernel, args);
}

void attention_backward_fp32(Stream& stream, const AttnGrad& a, const AttnShape& s) {
    const BackwardArgs<float> args{s,
                                   heads_of<const float>(a.q),
                                   heads_of<const float>(a.k),
                                   heads_of<const float>(a.v),
                                   heads_of<const float>(a.dout),
                                   stats_of<const float>(a.lse),
                                   stats_of<const float>(a.delta),
                                   heads_of<float>(a.dq),
                                   heads_of<float>(a.dk),
                                   heads_of<float>(a.dv),
                                   heads_of<float>(a.dq),
                                   heads_of<float>(a.dk),
                                   heads_of<float>(a.dv),
                                   true,
                                   a.add_q,
                                   a.add_kv};
    launch("attention_backward", stream,
           {.blocks = divide_up(s.B * s.Hk * s.Tk, kWarps), .threads = 32 * kWarps},
           attention_keys_fp32_kernel, args);
    launch("attention_backward", stream,
           {.blocks = divide_up(s.B * s.H * s.Tq, kWarps), .threads = 32 * kWarps},
           attention_queries_fp32_kernel, args);
}

}  // namespace torus::cuda
