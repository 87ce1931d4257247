// Attention by the definition, in fp64 on the GPU, for checking the fast kernels: one block per
// output row, plain loops. Beside the exact result each kernel gives the "plain" one, which rounds
// where a textbook 16-bit implementation rounds (probabilities, score gradients, outputs): the
// error of that one is the yardstick, since no exact answer can be asked of 16-bit operands.
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

__device__ inline double block_reduce(double x, bool maximum) {
    __shared__ double part[128];
    __syncthreads();
    part[threadIdx.x] = x;
    __syncthreads();
    for (int n = 64; n > 0; n /= 2) {
        if (int(threadIdx.x) < n) {
            const double y = part[threadIdx.x + n];
            part[threadIdx.x] = maximum ? fmax(part[threadIdx.x], y) : part[threadIdx.x] + y;
        }
        __syncthreads();
    }
    return part[0];
}

// Rows first, first + step, ... of every head; o (B*H, rows, D), lse (B*H, rows); scratch: Tk
// doubles per block. 128 threads.
template <class T>
__global__ void forward_rows(Problem<T> p, int first, int step, int rows, double* scratch,
                             double* o, double* plain, double* lse) {
    double* const s = scratch + int64_t(blockIdx.x) * p.Tk;
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.H * rows; item += gridDim.x) {
        const int bh = int(item / rows), b = bh / p.H, h = bh % p.H;
        const int i = first + int(item % rows) * step;
        double top = -INFINITY, sum = 0;
        for (int j = threadIdx.x; j < p.Tk; j += 128) {
            s[j] = p.visible(b, i, j) ? p.score(b, h, i, j) : -INFINITY;
            top = fmax(top, s[j]);
        }
        top = block_reduce(top, true);
        for (int j = threadIdx.x; j < p.Tk; j += 128) {
            s[j] = top == -INFINITY ? 0 : exp(s[j] - top);
            sum += s[j];
        }
        sum = block_reduce(sum, false);
        if (threadIdx.x == 0) lse[item] = sum > 0 ? top + log(sum) : -INFINITY;
        for (int d = threadIdx.x; d < p.D; d += 128) {
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

// dq of sampled rows, from lse and delta (B,H,Tq) of the whole softmax.
template <class T>
__global__ void dq_rows(Problem<T> p, const float* lse, const float* delta, int first, int step,
                        int rows, double* dq, double* plain) {
    __shared__ double ds[128];
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.H * rows; item += gridDim.x) {
        const int bh = int(item / rows), b = bh / p.H, h = bh % p.H, kv = h / (p.H / p.Hk);
        const int i = first + int(item % rows) * step, d = threadIdx.x;
        const double l = lse[int64_t(bh) * p.Tq + i], dl = delta[int64_t(bh) * p.Tq + i];
        double exact = 0, rough = 0;
        for (int j0 = 0; j0 < p.Tk; j0 += 128) {
            const int j = j0 + threadIdx.x;
            double x = 0;
            if (j < p.Tk && p.visible(b, i, j)) {
                double dp = 0;
                for (int c = 0; c < p.D; ++c) dp += p.dout.at(b, i, h, c) * p.v.at(b, j, kv, c);
                x = exp(p.score(b, h, i, j) - l) * (dp - dl);
            }
            __syncthreads();
            ds[threadIdx.x] = x;
            __syncthreads();
            if (d < p.D)
                for (int jj = 0; jj < 128 && j0 + jj < p.Tk; ++jj) {
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

// dk and dv of sampled key rows: (B*Hk, rows, D).
template <class T>
__global__ void dkv_rows(Problem<T> p, const float* lse, const float* delta, int first, int step,
                         int rows, double* dk, double* dk_plain, double* dv, double* dv_plain) {
    __shared__ double ds[128], pr[128];
    const int G = p.H / p.Hk;
    for (int64_t item = blockIdx.x; item < int64_t(p.B) * p.Hk * rows; item += gridDim.x) {
        const int bh = int(item / rows), b = bh / p.Hk, kv = bh % p.Hk, d = threadIdx.x;
        const int j = first + int(item % rows) * step;
        double k1 = 0, k2 = 0, v1 = 0, v2 = 0;
        for (int g = 0; g < G; ++g) {
            const int h = kv * G + g;
            for (int i0 = 0; i0 < p.Tq; i0 += 128) {
                const int i = i0 + threadIdx.x;
                double x = 0, y = 0;
                if (i < p.Tq && p.visible(b, i, j)) {
                    const int64_t at = (int64_t(b) * p.H + h) * p.Tq + i;
                    double dp = 0;
                    for (int c = 0; c < p.D; ++c) dp += p.dout.at(b, i, h, c) * p.v.at(b, j, kv, c);
                    y = exp(p.score(b, h, i, j) - lse[at]);
                    x = y * (dp - delta[at]);
                }
                __syncthreads();
                ds[threadIdx.x] = x, pr[threadIdx.x] = y;
                __syncthreads();
                if (d < p.D)
                    for (int ii = 0; ii < 128 && i0 + ii < p.Tq; ++ii) {
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

// delta (B,H,Tq) = rowsum(dout * o) from exact o (B*H,Tq,D).
template <class T>
__global__ void delta_rows(Problem<T> p, const double* o, float* delta) {
    const int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (at >= int64_t(p.B) * p.H * p.Tq) return;
    const int bh = int(at / p.Tq), i = int(at % p.Tq);
    double sum = 0;
    for (int d = 0; d < p.D; ++d) sum += p.dout.at(bh / p.H, i, bh % p.H, d) * o[at * p.D + d];
    delta[at] = float(sum);
}

// Uniform noise with variance `sigma`^2, a hash of the index.
template <class T>
__global__ void noise(T* x, int64_t n, uint32_t seed, float sigma) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        float sum = 0;  // of four uniform numbers: near enough to normal
        uint64_t z = (uint64_t(seed) << 40) + uint64_t(i) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        for (int k = 0; k < 4; ++k) sum += float((z >> (16 * k)) & 0xFFFF) / 65536.f - 0.5f;
        x[i] = T(sum * 1.7320508f * sigma);
    }
}

}  // namespace reference
