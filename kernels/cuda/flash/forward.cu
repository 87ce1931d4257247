// Launches of the Hopper attention forward: checks, parameters, and the table of tile shapes.
#include "kernels/cuda/flash/flash.h"
#include "kernels/cuda/flash/forward.cuh"
#include "kernels/cuda/flash/forward_launch.h"

namespace torus::flash {

namespace {

// Three warpgroups share keys and values at head dims to 64 where the queries' last tile matters
// little; measured at 64, see docs/flash_attention.md.
template <class T>
void launch(cudaStream_t stream, const Attn& a, void* workspace) {
    const int64_t D = a.q.dim(3);
    const bool many_keys = a.k.dim(1) >= 4096;
    if (D == 128) return launch_forward<ForwardTile<T, 128, 2>>(stream, a, workspace);
    if (D > 64) return launch_forward<ForwardTile<T, 96, 2>>(stream, a, workspace);
    if (D == 64)
        many_keys ? launch_forward<ForwardTile<T, 64, 3>>(stream, a, workspace)
                  : launch_forward<ForwardTile<T, 64, 2>>(stream, a, workspace);
    else
        many_keys ? launch_forward<ForwardTile<T, 64, 3, false>>(stream, a, workspace)
                  : launch_forward<ForwardTile<T, 64, 2, false>>(stream, a, workspace);
}

// Rows of lse are numbered through the heads of all batches.
bool lse_supported(const Tensor& lse) {
    const int64_t rows = std::max<int64_t>(lse.pitch(1), 1), limit = int64_t(1) << 31;
    return lse.dtype == DType::f32 && rows < limit &&
           (lse.dim(0) == 1 ||
            (lse.pitch(0) % rows == 0 && lse.dim(0) * (lse.pitch(0) / rows) < limit));
}

}  // namespace

bool forward_supported(const Attn& a) {
    return inputs_supported(a.q, a.k, a.v, a.scale) &&
           a.o.dtype == (a.carry ? DType::f32 : a.q.dtype) && rows_aligned(a.o, a.carry ? 8 : 16) &&
           lse_supported(a.lse) &&
           runs_here(
               reinterpret_cast<const void*>(&forward_kernel<ForwardTile<__nv_bfloat16, 64, 2>>));
}

int64_t forward_workspace_bytes(int64_t batch, int64_t queries) {
    return counter_bytes + batch * ((queries + 127) / 128) * 12;  // see count_keys_kernel
}

void forward(cudaStream_t stream, const Attn& a, void* workspace) {
    CHECK(forward_supported(a));
    a.q.dtype == DType::bf16 ? launch<__nv_bfloat16>(stream, a, workspace)
                             : launch<__half>(stream, a, workspace);
}

}  // namespace torus::flash
