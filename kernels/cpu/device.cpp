// Host memory behind the Device interface: "device" and "pinned" memory are plain host memory,
// streams run at once, events are readings of a steady clock.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/loops.h"
#ifdef TORUS_HAVE_BLAS
#include <cblas.h>
#endif

namespace torus {
namespace {

using Clock = std::chrono::steady_clock;

// A line of /proc/meminfo, in bytes; 0 where there is no such file.
int64_t memory_info(const std::string& key) {
    std::ifstream file("/proc/meminfo");
    for (std::string word; file >> word;)
        if (word == key + ":") {
            int64_t kib = 0;
            file >> kib;
            return kib * 1024;
        }
    return 0;
}

}  // namespace

std::string CpuDevice::name() const {
    const int n = max_threads();
    return concat("CPU (", n, n == 1 ? " thread)" : " threads)");
}

int64_t CpuDevice::total_bytes() const { return memory_info("MemTotal"); }
int64_t CpuDevice::free_bytes() const { return memory_info("MemAvailable"); }

void* CpuDevice::allocate(Memory memory, int64_t bytes) {
    constexpr size_t alignment = 256;
    CHECK(bytes > 0, ": allocation of ", bytes, " bytes");
    count(memory, bytes);
    // The system may grant more than there is and kill the process when the memory is used.
    const int64_t available = free_bytes();
    void* p = nullptr;
    if (available == 0 || bytes <= available)  // aligned_alloc wants a multiple of the alignment
        p = std::aligned_alloc(alignment, ((size_t(bytes) - 1) / alignment + 1) * alignment);
    if (!p) {
        count(memory, -bytes);
        fail(Exit::out_of_memory, "host memory: ", bytes, " bytes asked for, ", available,
             " available; use a smaller model, --micro-batch-size or --seq-length");
    }
    return p;
}

void CpuDevice::release(Memory memory, void* p, int64_t bytes) noexcept {
    if (!p) return;
    std::free(p);
    count(memory, -bytes);
}

Stream CpuDevice::make_stream(bool) { return {}; }
void CpuDevice::destroy(Stream& s) noexcept { s = {}; }

Event CpuDevice::make_event() { return {new Clock::time_point(Clock::now())}; }
void CpuDevice::destroy(Event& e) noexcept {
    delete static_cast<Clock::time_point*>(e.handle);
    e.handle = nullptr;
}
void CpuDevice::record(Event& e, Stream&) {
    CHECK(e.handle, ": event was not made");
    *static_cast<Clock::time_point*>(e.handle) = Clock::now();
}
void CpuDevice::wait(Stream&, Event&) {}  // the work before the event is done already
double CpuDevice::elapsed_ms(Event& from, Event& to) {
    CHECK(from.handle && to.handle, ": event was not made");
    return std::chrono::duration<double, std::milli>(*static_cast<Clock::time_point*>(to.handle) -
                                                     *static_cast<Clock::time_point*>(from.handle))
        .count();
}

void CpuDevice::copy(Stream&, void* dst, const void* src, int64_t bytes) {
    CHECK(bytes >= 0, ": copy of ", bytes, " bytes");
    if (bytes) std::memmove(dst, src, size_t(bytes));
}
void CpuDevice::set_bytes(Stream&, void* dst, uint8_t value, int64_t bytes) {
    CHECK(bytes >= 0, ": clearing of ", bytes, " bytes");
    if (bytes) std::memset(dst, value, size_t(bytes));
}
void CpuDevice::synchronize(Stream&) {}
void CpuDevice::synchronize(Event&) {}

namespace {

void expect_layout(const char* op, const char* name, const Tensor& t, DType type, bool pitched) {
    CHECK(t.dtype == type, ": ", op, ": ", name, " is ", name_of(t.dtype), ", must be ",
          name_of(type));
    CHECK(t || t.numel() == 0, ": ", op, ": ", name, " has no memory");
    const int last = t.rank() - 1;
    CHECK(pitched ? last < 0 || t.dim(last) <= 1 || t.pitch(last) == 1 : t.contiguous(), ": ", op,
          ": ", name, " ", t.shape.str(),
          pitched ? " must have dense rows" : " must be contiguous");
}

}  // namespace

void expect(const char* op, const char* name, const Tensor& t, DType type, const Shape& shape,
            bool pitched) {
    CHECK(t || t.rank() > 0, ": ", op, ": ", name, " is absent, must be ", name_of(type), " ",
          shape.str());
    CHECK(t.shape == shape, ": ", op, ": ", name, " is ", t.shape.str(), ", must be ", shape.str());
    expect_layout(op, name, t, type, pitched);
}

void expect_rank(const char* op, const char* name, const Tensor& t, DType type, int rank,
                 bool pitched) {
    CHECK(t || t.rank() > 0, ": ", op, ": ", name, " is absent, must be ", name_of(type),
          " of rank ", rank);
    CHECK(t.rank() == rank, ": ", op, ": ", name, " is ", t.shape.str(), ", must have rank ", rank);
    expect_layout(op, name, t, type, pitched);
}

void expect_indices(const char* op, const char* name, const Tensor& t, int64_t limit) {
    const int32_t* index = t.as<int32_t>();
    for (int64_t i = 0; i < t.numel(); ++i)
        CHECK(index[i] >= 0 && index[i] < limit, ": ", op, ": ", name, "[", i, "] is ", index[i],
              ", must be in [0, ", limit, ")");
}

template <class T>
CpuKernels<T>::CpuKernels(CpuOptions options)
    : options_(options), precision_(precision_of(dtype_of<T>)) {
#ifdef TORUS_HAVE_BLAS
    // Matrix products are cut into tiles here, one thread each (matmul.cpp): the library's own
    // threads would contend with OpenMP's and make the bits depend on their number.
    openblas_set_num_threads(1);
#endif
}

template CpuKernels<float>::CpuKernels(CpuOptions);
template CpuKernels<double>::CpuKernels(CpuOptions);

std::unique_ptr<Kernels> make_cpu_kernels(DType dtype, CpuOptions options) {
    if (dtype == DType::f32) return std::make_unique<CpuKernels<float>>(options);
    if (dtype == DType::f64) return std::make_unique<CpuKernels<double>>(options);
    fail(Exit::usage, "--dtype ", name_of(dtype),
         ": the CPU computes in fp32 or fp64; use one of these");
}

}  // namespace torus
