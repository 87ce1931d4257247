// Token and position embedding. Backward adds rows in the order of tokens; threads share out
// columns, so two tokens with the same id never race and sums have one order.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"

namespace torus {

template <class T>
void CpuKernels<T>::embedding_forward(Stream&, Tensor out, Tensor ids, Tensor wte, Tensor pos,
                                      Tensor wpe) {
    expect_rank("embedding_forward", "wte", wte, type, 2);
    expect_rank("embedding_forward", "ids", ids, DType::i32, 1);
    const int64_t N = ids.dim(0), C = wte.dim(1);
    expect("embedding_forward", "out", out, type, {N, C});
    expect_indices("embedding_forward", "ids", ids, wte.dim(0));
    if (wpe) {
        expect("embedding_forward", "wpe", wpe, type, {wpe.dim(0), C});
        expect("embedding_forward", "pos", pos, DType::i32, {N});
        expect_indices("embedding_forward", "pos", pos, wpe.dim(0));
    }
    parallel_for(N, C, [&](int64_t n) {
        T* o = out.as<T>() + n * C;
        const T* token = wte.as<T>() + ids.as<int32_t>()[n] * C;
        if (!wpe) {
            std::copy(token, token + C, o);
            return;
        }
        const T* place = wpe.as<T>() + pos.as<int32_t>()[n] * C;
        for (int64_t c = 0; c < C; ++c) o[c] = token[c] + place[c];
    });
}

template <class T>
void CpuKernels<T>::embedding_backward(Stream&, Tensor dwte, Tensor dwpe, Tensor dout, Tensor ids,
                                       Tensor pos) {
    expect_rank("embedding_backward", "dwte", dwte, type, 2);
    expect_rank("embedding_backward", "ids", ids, DType::i32, 1);
    const int64_t N = ids.dim(0), C = dwte.dim(1);
    expect("embedding_backward", "dout", dout, type, {N, C});
    expect_indices("embedding_backward", "ids", ids, dwte.dim(0));
    if (dwpe) {
        expect("embedding_backward", "dwpe", dwpe, type, {dwpe.dim(0), C});
        expect("embedding_backward", "pos", pos, DType::i32, {N});
        expect_indices("embedding_backward", "pos", pos, dwpe.dim(0));
    }
    constexpr int64_t columns = 64;
    parallel_for((C + columns - 1) / columns, N * columns, [&](int64_t block) {
        const int64_t begin = block * columns, end = std::min(C, begin + columns);
        for (int64_t n = 0; n < N; ++n) {
            const T* d = dout.as<T>() + n * C;
            T* token = dwte.as<T>() + ids.as<int32_t>()[n] * C;
            for (int64_t c = begin; c < end; ++c) token[c] += d[c];
            if (!dwpe) continue;
            T* place = dwpe.as<T>() + pos.as<int32_t>()[n] * C;
            for (int64_t c = begin; c < end; ++c) place[c] += d[c];
        }
    });
}

INSTANTIATE(embedding_forward, (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor));
INSTANTIATE(embedding_backward, (Stream&, Tensor, Tensor, Tensor, Tensor, Tensor));

}  // namespace torus
