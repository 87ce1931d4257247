// Attention by the definition, in fp64 on the GPU, for checking the fast kernels at lengths that
// would take the CPU minutes: one block per output row, plain loops. Beside the exact result each
// kernel gives the "plain" one, which rounds where a textbook 16-bit implementation rounds
// (probabilities, score gradients, outputs): the error of that one is the yardstick, since no exact
// answer can be asked of 16-bit operands. Rows can be sampled.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace reference {

template <class T>
struct View {  // (B,T,H,D), strides in elements
    const T* data;
    int64_t batch, row, head;
    __device__ double at(int b, int t, int h, int d) const {
        return double(float(data[b * batch + t * row + h * head + d]));
    }
};

template <class T>
struct Problem {
    View<T> q, k, v, dout;
    const int32_t* first_key;
    int64_t first_key_pitch, q0, k0;
    int B, Tq, Tk, H, Hk, D;
    bool causal;
    double scale;

    __device__ bool visible(int b, int i, int j) const {
        if (causal && k0 + j > q0 + i) return false;
        return !first_key || first_key[b * first_key_pitch + i] <= k0 + j;
    }
    __device__ double score(int b, int h, int i, int j) const {
        double s = 0;
        for (int d = 0; d < D; ++d) s += q.at(b, i, h, d) * k.at(b, j, h / (H / Hk), d);
        return s * scale;
    }
};

template <class T>
__device__ double round_to(double x) {
    return double(float(T(float(x))));
}

constexpr int threads = 256;  // of every kernel here but noise; D is at most this

__device__ inline double block_reduce(double x, bool maximum) {
    __shared__ double part[threads];
    __syncthreads();
    part[threadIdx.x] = x;
    __syncthreads();
    for (int n = threads / 2; n > 0; n /= 2) {
        if (int(threadIdx.x) < n) {
            const double y = part[threadIdx.x + n];
            part[threadIdx.x] = maximum ? fmax(part[threadIdx.x], y) : part[threadIdx.x] + y;
        }
        __syncthreads();
    }
    return part[0];
}

// The rows that are looked at: first, first + step, ... of every head.
struct Rows {
    int first, step, count;
    __device__ int at(int i) const { return first + i * step; }
};

// o (B*H, rows, D), lse (B*H, rows); scratch: Tk doubles per block.
template <class T>
__global__ void forward_rows(Problem<T> p, Rows rows, double* scratch, double* o, double* plain,
                             double* lse) {
    double* const s = scratch + int64_t(blockIdx.x) * p.Tk;
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.H * rows.count; item += gridDim.x) {
        const int bh = int(item / rows.count), b = bh / p.H, h = bh % p.H;
        const int i = rows.at(int(item % rows.count));
        double top = -INFINITY, sum = 0;
        for (int j = threadIdx.x; j < p.Tk; j += threads) {
            s[j] = p.visible(b, i, j) ? p.score(b, h, i, j) : -INFINITY;
            top = fmax(top, s[j]);
        }
        top = block_reduce(top, true);
        for (int j = threadIdx.x; j < p.Tk; j += threads) {
            s[j] = top == -INFINITY ? 0 : exp(s[j] - top);
            sum += s[j];
        }
        sum = block_reduce(sum, false);
        if (threadIdx.x == 0) lse[item] = sum > 0 ? top + log(sum) : -INFINITY;
        for (int d = threadIdx.x; d < p.D; d += threads) {
            double exact = 0, rough = 0;
            for (int j = 0; j < p.Tk; ++j) {
                if (s[j] == 0) continue;
                const double v = p.v.at(b, j, h / (p.H / p.Hk), d);
                exact += s[j] / sum * v, rough += round_to<T>(s[j] / sum) * v;
            }
            o[item * p.D + d] = exact, plain[item * p.D + d] = round_to<T>(rough);
        }
        __syncthreads();
    }
}

// dq (B*H, rows, D), from lse and delta (B,H,Tq) of the whole softmax.
template <class T>
__global__ void dq_rows(Problem<T> p, const float* lse, const float* delta, Rows rows, double* dq,
                        double* plain) {
    __shared__ double ds[threads];
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.H * rows.count; item += gridDim.x) {
        const int bh = int(item / rows.count), b = bh / p.H, h = bh % p.H, kv = h / (p.H / p.Hk);
        const int i = rows.at(int(item % rows.count)), d = threadIdx.x;
        const double l = lse[int64_t(bh) * p.Tq + i], dl = delta[int64_t(bh) * p.Tq + i];
        double exact = 0, rough = 0;
        for (int j0 = 0; j0 < p.Tk; j0 += threads) {
            const int j = j0 + threadIdx.x;
            double x = 0;
            if (j < p.Tk && p.visible(b, i, j)) {
                double dp = 0;
                for (int c = 0; c < p.D; ++c) dp += p.dout.at(b, i, h, c) * p.v.at(b, j, kv, c);
                x = exp(p.score(b, h, i, j) - l) * (dp - dl);
            }
            if (!__syncthreads_or(x != 0)) continue;
            ds[threadIdx.x] = x;
            __syncthreads();
            if (d < p.D)
                for (int jj = 0; jj < threads && j0 + jj < p.Tk; ++jj) {
                    const double k = p.k.at(b, j0 + jj, kv, d);
                    exact += ds[jj] * k, rough += round_to<T>(ds[jj]) * k;
                }
        }
        if (d < p.D) {
            dq[item * p.D + d] = exact * p.scale;
            plain[item * p.D + d] = round_to<T>(rough * p.scale);
        }
    }
}

// dk and dv: (B*Hk, rows, D).
template <class T>
__global__ void dkv_rows(Problem<T> p, const float* lse, const float* delta, Rows rows, double* dk,
                         double* dk_plain, double* dv, double* dv_plain) {
    __shared__ double ds[threads], pr[threads];
    const int G = p.H / p.Hk;
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.Hk * rows.count; item += gridDim.x) {
        const int bh = int(item / rows.count), b = bh / p.Hk, kv = bh % p.Hk, d = threadIdx.x;
        const int j = rows.at(int(item % rows.count));
        double k1 = 0, k2 = 0, v1 = 0, v2 = 0;
        for (int g = 0; g < G; ++g) {
            const int h = kv * G + g;
            for (int i0 = 0; i0 < p.Tq; i0 += threads) {
                const int i = i0 + threadIdx.x;
                double x = 0, y = 0;
                if (i < p.Tq && p.visible(b, i, j)) {
                    const int64_t at = (int64_t(b) * p.H + h) * p.Tq + i;
                    double dp = 0;
                    for (int c = 0; c < p.D; ++c) dp += p.dout.at(b, i, h, c) * p.v.at(b, j, kv, c);
                    y = exp(p.score(b, h, i, j) - lse[at]);
                    x = y * (dp - delta[at]);
                }
                if (!__syncthreads_or(y != 0)) continue;
                ds[threadIdx.x] = x, pr[threadIdx.x] = y;
                __syncthreads();
                if (d < p.D)
                    for (int ii = 0; ii < threads && i0 + ii < p.Tq; ++ii) {
                        const double q = p.q.at(b, i0 + ii, h, d), o = p.dout.at(b, i0 + ii, h, d);
                        k1 += ds[ii] * q, k2 += round_to<T>(ds[ii]) * q;
                        v1 += pr[ii] * o, v2 += round_to<T>(pr[ii]) * o;
                    }
            }
        }
        if (d < p.D) {
            const int64_t at = item * p.D + d;
            dk[at] = k1 * p.scale, dk_plain[at] = round_to<T>(k2 * p.scale);
            dv[at] = v1, dv_plain[at] = round_to<T>(v2);
        }
    }
}

// Nearly normal noise of standard deviation `sigma` in a (B,T,H,D) view, a hash of the index.
template <class T>
__global__ void noise(T* x, View<T> view, int Tn, int H, int D, int64_t n, uint32_t seed,
                      float sigma) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        float sum = 0;  // of four uniform numbers
        uint64_t z = (uint64_t(seed) << 40) + uint64_t(i) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        for (int k = 0; k < 4; ++k) sum += float((z >> (16 * k)) & 0xFFFF) / 65536.f - 0.5f;
        const int64_t h = i / D, t = h / H;
        x[t / Tn * view.batch + t % Tn * view.row + h % H * view.head + i % D] =
            T(sum * 1.7320508f * sigma);
    }
}

// The first of D numbers of every row t: level + rise * (how often 50 rows follow it).
template <class T>
__global__ void stairs(T* x, View<T> view, int Tn, int H, int64_t n, float level, float rise) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t t = i / H;
        x[t / Tn * view.batch + t % Tn * view.row + i % H * view.head] =
            T(level + rise * float((Tn - 1 - t % Tn) / 50));
    }
}

// --- comparing -----------------------------------------------------------------------------------
struct Difference {
    double size, error, yard;   // sums of squares: of the answer, of what is off, of plain's error
    double worst, worst_yard;   // the largest of the latter two
    unsigned long long broken;  // numbers that are not finite
};

__device__ inline void raise(double* to, double x) {  // x >= 0: its bits order as it does
    atomicMax(reinterpret_cast<unsigned long long*>(to),
              static_cast<unsigned long long>(__double_as_longlong(x)));
}

// got: (B,T,H,D); want, plain: (B*H, rows, D), `items` numbers; `offset`: what got started from.
template <class T>
__global__ void compare_rows(View<T> got, const double* want, const double* plain, int H, int D,
                             Rows rows, int64_t items, double offset, Difference* out) {
    Difference sum{};
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < items;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int d = int(i % D);
        const int64_t item = i / D, bh = item / rows.count;
        const double x = got.at(int(bh / H), rows.at(int(item % rows.count)), int(bh % H), d);
        const double w = want[i], e = fabs(x - offset - w), y = fabs(plain[i] - w);
        sum.broken += !isfinite(x);
        sum.size += w * w, sum.error += e * e, sum.yard += y * y;
        sum.worst = fmax(sum.worst, e), sum.worst_yard = fmax(sum.worst_yard, y);
    }
    atomicAdd(&out->size, sum.size), atomicAdd(&out->error, sum.error);
    atomicAdd(&out->yard, sum.yard), atomicAdd(&out->broken, sum.broken);
    raise(&out->worst, sum.worst), raise(&out->worst_yard, sum.worst_yard);
}

// Adds to `count` the numbers behind the D columns of each of H heads that no longer hold the bits
// of `held`.
template <class Bits>
__global__ void count_overwritten(const Bits* x, int64_t n, int64_t row, int64_t head, int H, int D,
                                  Bits held, unsigned long long* count) {
    unsigned long long found = 0;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t column = i % row;
        const bool behind = column / head >= H || column % head >= D;
        found += behind && x[i] != held;
    }
    if (found) atomicAdd(count, found);
}

}  // namespace reference
