// Host side of the flash kernels, shared by forward and backward: what tensors they accept, tensor
// maps for TMA, and facts about the device.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "kernels/cuda/flash/params.h"
#include "kernels/tensor.h"

namespace torus::flash {

inline void cuda_check(cudaError_t e, const char* what) {
    if (e != cudaSuccess)
        fail(Exit::internal, "flash attention: ", what, ": ", cudaGetErrorString(e));
}

inline int multiprocessors() {
    int device = 0, count = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
               "multiprocessor count");
    return count;
}

// Whether `kernel` has code for this GPU: made for compute capability 9.0, and not assembled by the
// driver from the empty body that other architectures get.
inline bool runs_here(const void* kernel) {
    int device = 0, major = 0, minor = 0;
    cudaFuncAttributes a{};
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    if (!known || major != 9 || minor != 0) return false;
    if (cudaFuncGetAttributes(&a, kernel) != cudaSuccess) return cudaGetLastError(), false;
    return a.ptxVersion >= 90;
}

// A (B,T,H,D) tensor whose every row of a head starts at a multiple of `bytes`.
inline bool rows_aligned(const Tensor& t, int64_t bytes) {
    bool ok = reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
    for (int i = 0; i < 3; ++i)
        ok = ok && (t.dim(i) == 1 || t.pitch(i) * size_of(t.dtype) % bytes == 0);
    return ok;
}

inline Pitch pitch_of(const Tensor& t) { return {t.pitch(0), t.pitch(1), t.pitch(2)}; }
// Of a (B,H,T) tensor.
inline Pitch stats_pitch(const Tensor& t) { return {t.pitch(0), 1, t.pitch(1)}; }

// Boxes of `rows` rows of one head, zeros past the end: all panels of 64 columns when those divide
// the head dim, else one panel, which the end of the head cuts off; one_panel: one in any case.
inline CUtensorMap tile_map(const Tensor& t, int rows, int panel = 64, bool one_panel = false) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    CHECK(found != nullptr);
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    const cuuint64_t size = cuuint64_t(size_of(t.dtype)), D = cuuint64_t(t.dim(3));
    const cuuint64_t width = D % 64 ? D : 64, panels = D / width;
    const cuuint64_t dims[5] = {width, cuuint64_t(t.dim(1)), panels, cuuint64_t(t.dim(2)),
                                cuuint64_t(t.dim(0))};
    auto stride = [&](int i) {  // a dimension of one element may carry any pitch
        return t.dim(i) == 1 ? size * D : cuuint64_t(t.pitch(i)) * size;
    };
    const cuuint64_t strides[4] = {stride(1), 128, stride(2), stride(0)};
    const cuuint32_t box[5] = {cuuint32_t(panel), cuuint32_t(rows),
                               one_panel ? 1 : cuuint32_t(panels), 1, 1};
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult r = encode(
        &map,
        t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        5, t.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        panel == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
        : panel == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                      : CU_TENSOR_MAP_SWIZZLE_32B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(r == CUDA_SUCCESS, ": cuTensorMapEncodeTiled returned ", int(r), " for shape ",
          t.shape.str());
    return map;
}

inline Mask mask_of(const Tensor& first_key, int64_t q0, int64_t k0, int64_t queries, int64_t keys,
                    bool causal) {
    const int64_t far = int64_t(1) << 29;
    const int64_t shift = q0 - k0 < -far ? -far : q0 - k0 > far ? far : q0 - k0;
    return {first_key ? first_key.as<int32_t>() : nullptr,
            first_key ? first_key.pitch(0) : 0,
            k0,
            int32_t(shift),
            int32_t(queries),
            int32_t(keys),
            causal};
}

// Head dims run in tiles of 64, 96 or 128 columns. Those behind the head dim read as zeros and are
// never written.
inline bool head_dim_supported(int64_t D) { return D > 0 && D % 8 == 0 && (D <= 96 || D == 128); }
inline int64_t tile_columns(int64_t D) { return D <= 64 ? 64 : D <= 96 ? 96 : 128; }

// q, k, v and what has the shape of q: types, head dim and sizes that the kernels are built for.
inline bool inputs_supported(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
    const int64_t limit = int64_t(1) << 29;
    return (q.dtype == DType::bf16 || q.dtype == DType::f16) && k.dtype == q.dtype &&
           v.dtype == q.dtype && head_dim_supported(q.dim(3)) && q.dim(1) > 0 && k.dim(1) > 0 &&
           q.dim(1) < limit && k.dim(1) < limit && q.dim(2) % k.dim(2) == 0 &&
           q.dim(0) * q.dim(2) * ((q.dim(1) + 63) / 64) < (int64_t(1) << 31) &&
           rows_aligned(q, 16) && rows_aligned(k, 16) && rows_aligned(v, 16) && scale > 0;
}

template <class Kernel>
void use_shared(Kernel* kernel, int bytes) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory size");
}

}  // namespace torus::flash
