// The PTX instructions of the Hopper kernels, one short wrapper each: mbarriers, the tensor memory
// accelerator (TMA), named barriers, register budgets, packing and the fast exponential.
// Shared memory is addressed by its 32-bit window address throughout. Facts are from the PTX ISA
// (sm_90a); the wrappers are only ever instantiated inside kernels guarded by TORUS_SM90A.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TORUS_SM90A 1
#endif
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

namespace torus::flash {

DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A copy that the compiler does not see through: what is computed from it is computed again in
// every turn of a loop instead of being kept in registers across it.
DEVICE uint32_t opaque(uint32_t x) {
    uint32_t y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE uint32_t thread_number() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Bits [begin, begin + count), begin up to 32.
DEVICE uint32_t bit_range(int begin, int count) {
    uint32_t x;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(x) : "r"(begin), "r"(count));
    return x;
}

// Read anew at every use, not kept in a register.
DEVICE uint32_t block_count() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
    return x;
}

// --- mbarriers: a phase ends when the expected arrivals and bytes are in ------------------------
DEVICE void barrier_init(uint64_t* b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}
DEVICE void barrier_expect(uint64_t* b, uint32_t bytes) {  // one arrival, and bytes to come by TMA
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}
DEVICE void barrier_arrive(uint64_t* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Returns once the phase of this parity has ended; on a fresh barrier parity 1 returns at once.
DEVICE void barrier_wait(uint64_t* b, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nL_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(
            shared_address(b)),
        "r"(parity)
        : "memory");
}
// Makes freshly initialised barriers visible to TMA; a __syncthreads must follow.
DEVICE void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::
                     : "memory");
}

// --- TMA ----------------------------------------------------------------------------------------
constexpr uint64_t keep_in_l2 = 0x14F0000000000000ull;    // L2 policy evict_last
constexpr uint64_t pass_through = 0x12F0000000000000ull;  // L2 policy evict_first

DEVICE void tma_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void tma_load(uint32_t to, const CUtensorMap* map, uint64_t* b, int row, int head, int batch,
                     uint64_t policy, int column = 0, int panel = 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(shared_address(b)), "r"(column), "r"(row), "r"(panel), "r"(head), "r"(batch),
        "l"(policy)
        : "memory");
}
DEVICE void tma_store(const CUtensorMap* map, uint32_t from, int row, int head, int batch,
                      int column = 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
        "[%1];" ::"l"(map),
        "r"(from), "r"(column), "r"(row), "r"(0), "r"(head), "r"(batch)
        : "memory");
}
DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint64_t* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(b))
        : "memory");
}
DEVICE void bulk_add_s32(void* to, uint32_t from, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}
DEVICE void bulk_add_f32(void* to, uint32_t from, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}
// An addition that nobody waits for.
DEVICE void red_add(float4* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
                 "f"(b), "f"(c), "f"(d)
                 : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Before a barrier, by every thread whose plain shared stores wgmma or TMA will read.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- clusters of two blocks ---------------------------------------------------------------------
DEVICE uint32_t cluster_rank() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}
DEVICE uint32_t cluster_count() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(x));
    return x;
}
// What lies at `address` in the block of this rank.
DEVICE uint32_t address_in(uint32_t rank, uint32_t address) {
    uint32_t y;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
    return y;
}
// All threads of both blocks that have not returned, whichever way their warps are split.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Orders nothing but what the thread has waited for: a release at the scope of the cluster would
// wait for all of the thread's additions to memory.
DEVICE void barrier_arrive_in(uint32_t rank, uint64_t* b) {
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, shared_address(b)))
        : "memory");
}
// One of the panels of 64 columns, to the same place and barrier of both blocks.
DEVICE void tma_load_both(uint32_t to, const CUtensorMap* map, uint64_t* b, int row, int head,
                          int batch, uint64_t policy, int panel) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
            to),
        "l"(map), "r"(shared_address(b)), "r"(0), "r"(row), "r"(panel), "r"(head), "r"(batch),
        "h"(uint16_t(3)), "l"(policy)
        : "memory");
}
// To shared memory of either block (`to` and `b` by address_in), which `b` there counts.
DEVICE void bulk_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(b)
        : "memory");
}
DEVICE void send_word(uint32_t to, int32_t x, uint32_t b) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(to),
        "r"(x), "r"(b)
        : "memory");
}

// --- warpgroups ---------------------------------------------------------------------------------
template <int R>
DEVICE void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R>
DEVICE void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}
template <int Threads>
DEVICE void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
template <int Id, int Threads>
DEVICE void named_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
template <int Threads>
DEVICE void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps uses of x on their side of this line: wgmma writes registers behind the compiler's back.
template <int N>
DEVICE void pin(float (&x)[N]) {
    UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// --- flags in global memory, between blocks ----------------------------------------------------
DEVICE void flag_wait(const int32_t* flag, int32_t value) {
    int32_t seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    while (seen < value);
}
DEVICE void flag_set(int32_t* flag, int32_t value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// --- arithmetic ---------------------------------------------------------------------------------
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <class T>
DEVICE uint32_t pack(float low, float high);
template <>
DEVICE uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <>
DEVICE uint32_t pack<__half>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <class T>
DEVICE float2 unpack(uint32_t x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
    else
        return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
DEVICE void store_matrix(uint32_t to, const uint32_t* r) {  // four 8x8 tiles
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
DEVICE void store_matrix_transposed(uint32_t to, const uint32_t* r) {  // four 8x8 tiles, transposed
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
DEVICE void store_shared(uint32_t to, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
DEVICE float2 load_shared_f2(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}
DEVICE int2 load_shared_i2(uint32_t from) {
    int2 v;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

}  // namespace torus::flash
