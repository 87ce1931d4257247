// Device memory, streams and events over the CUDA runtime, the reasons why a GPU cannot be used,
// and the host side of common.cuh. Allocations are plain cudaMalloc and cudaMallocHost: a run makes
// a handful of them, so a pool would only hide their sizes.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    const Exit code = error == cudaErrorMemoryAllocation ? Exit::out_of_memory : Exit::internal;
    fail(code, "CUDA: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

// --- common.cuh ----------------------------------------------------------------------------------
Matrix as_matrix(const Tensor& t, const char* name) {
    CHECK(t.rank() >= 1, ": ", name, " has no dimensions");
    const int last = t.rank() - 1;
    Matrix m{t.data, 1, t.dim(last), 0, t.dtype};
    for (int i = last - 1; i >= 0; --i) {  // from the innermost row dimension outwards
        if (t.dim(i) == 1) continue;
        if (m.rows == 1) m.pitch = t.pitch(i);
        CHECK(t.pitch(i) == m.pitch * m.rows, ": rows of ", name, " ", t.shape.str(),
              " do not share one pitch");
        m.rows *= t.dim(i);
    }
    if (m.rows <= 1) m.pitch = m.cols;
    return m;
}

bool vectorizable(const Matrix& m) {
    const int64_t width = 16 / size_of(m.dtype);
    return aligned16(m.data) && m.cols % width == 0 && m.pitch % width == 0;
}

void expect(const Tensor& t, const char* name, DType dtype, int64_t numel) {
    CHECK(t, ": ", name, " is absent");
    CHECK(t.dtype == dtype && t.numel() == numel && t.contiguous(), ": ", name, " is ",
          name_of(t.dtype), " ", t.shape.str(), t.contiguous() ? "" : " with a pitch",
          ", expected ", numel, " contiguous elements of ", name_of(dtype));
}

void* workspace(const Stream& stream, int64_t bytes, const char* op) {
    CHECK(stream.workspace.bytes() >= bytes, ": ", op, " needs ", bytes,
          " bytes of workspace, the stream has ", stream.workspace.bytes());
    CHECK(aligned16(stream.workspace.data), ": workspace is not aligned to 16 bytes");
    return stream.workspace.data;
}

static nvtxDomainHandle_t nvtx_domain() {
    static const nvtxDomainHandle_t domain = nvtxDomainCreateA("torus");
    return domain;
}

Range::Range(const char* name) {
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    nvtxDomainRangePushEx(nvtx_domain(), &event);
}

Range::~Range() { nvtxDomainRangePop(nvtx_domain()); }

static void allow_shared(const char* op, const void* kernel, int64_t bytes) {
    if (bytes > 32 << 10)  // with the kernel's static shared memory, 48 KB need no leave
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
              op);
}

int resident_blocks(const void* kernel, dim3 threads, int64_t shared) {
    int blocks = 0;
    allow_shared("resident_blocks", kernel, shared);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(threads.x * threads.y),
                                                        size_t(shared)),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(blocks, 1);
}

cudaLaunchConfig_t prepare(const char* op, const Stream& stream, const Grid& grid,
                           const void* kernel) {
    CHECK(stream.handle, ": ", op, " was queued without a stream");
    CHECK(grid.blocks > 0 && grid.blocks < int64_t(1) << 31, ": ", op, " needs ", grid.blocks,
          " blocks");
    allow_shared(op, kernel, grid.shared);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(grid.blocks));
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = size_t(grid.shared);
    config.stream = static_cast<cudaStream_t>(stream.handle);
    return config;
}

static int attribute(cudaDeviceAttr which) {
    int index = 0, value = 0;
    check(cudaGetDevice(&index), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    return value;
}
int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
int64_t shared_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// --- memory --------------------------------------------------------------------------------------
static cudaStream_t handle(const Stream& s) {
    CHECK(s.handle, ": no stream");
    return static_cast<cudaStream_t>(s.handle);
}
static cudaEvent_t handle(const Event& e) {
    CHECK(e.handle, ": no event");
    return static_cast<cudaEvent_t>(e.handle);
}

CudaDevice::CudaDevice(int index) : index_(index) {
    use();
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    name_ = properties.name;
}

void CudaDevice::use() const { check(cudaSetDevice(index_), "cudaSetDevice"); }

int64_t CudaDevice::total_bytes() const {
    use();
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return int64_t(total);
}

int64_t CudaDevice::free_bytes() const {
    use();
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return int64_t(free);
}

void* CudaDevice::allocate(Memory memory, int64_t bytes) {
    CHECK(bytes >= 0);
    if (bytes == 0) return nullptr;
    use();
    count(memory, bytes);  // first: it throws when allocation is frozen
    void* p = nullptr;
    if (memory == Memory::host) {
        p = std::aligned_alloc(256, size_t(divide_up(bytes, 256) * 256));
    } else {
        const cudaError_t error = memory == Memory::device ? cudaMalloc(&p, size_t(bytes))
                                                           : cudaMallocHost(&p, size_t(bytes));
        if (error != cudaSuccess) {
            cudaGetLastError();  // an allocation that fails is not a broken device
            p = nullptr;
            if (error != cudaErrorMemoryAllocation) check(error, "allocation");
        }
    }
    if (p) return p;
    count(memory, -bytes);
    if (memory == Memory::device)
        fail(Exit::out_of_memory, name_, ": ", bytes, " bytes of device memory asked for, ",
             free_bytes(), " of ", total_bytes(),
             " are free; lower --micro-batch-size or --seq-length, or see --plan");
    fail(Exit::out_of_memory, bytes, " bytes of ", memory == Memory::pinned ? "pinned " : "",
         "host memory asked for, which the host does not give; lower --offload or see --plan");
}

void CudaDevice::release(Memory memory, void* p, int64_t bytes) noexcept {
    if (!p) return;
    if (memory == Memory::host)
        std::free(p);
    else if (memory == Memory::device)
        cudaFree(p);
    else
        cudaFreeHost(p);
    count(memory, -bytes);
}

// --- streams and events --------------------------------------------------------------------------
Stream CudaDevice::make_stream(bool high_priority) {
    use();
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                       high_priority ? greatest : least),
          "cudaStreamCreate");
    return {.handle = stream, .workspace = {}};
}

void CudaDevice::destroy(Stream& s) noexcept {
    if (s.handle) cudaStreamDestroy(static_cast<cudaStream_t>(s.handle));
    s = {};
}

Event CudaDevice::make_event() {
    use();
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    return {event};
}

void CudaDevice::destroy(Event& e) noexcept {
    if (e.handle) cudaEventDestroy(static_cast<cudaEvent_t>(e.handle));
    e = {};
}

void CudaDevice::record(Event& e, Stream& s) {
    check(cudaEventRecord(handle(e), handle(s)), "cudaEventRecord");
}

void CudaDevice::wait(Stream& s, Event& e) {
    check(cudaStreamWaitEvent(handle(s), handle(e), 0), "cudaStreamWaitEvent");
}

void CudaDevice::synchronize(Event& e) {
    check(cudaEventSynchronize(handle(e)), "cudaEventSynchronize");
}

double CudaDevice::elapsed_ms(Event& from, Event& to) {
    float ms = 0;
    check(cudaEventSynchronize(handle(to)), "cudaEventSynchronize");
    check(cudaEventElapsedTime(&ms, handle(from), handle(to)), "cudaEventElapsedTime");
    return ms;
}

void CudaDevice::copy(Stream& s, void* dst, const void* src, int64_t bytes) {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyDefault, handle(s)),
          "cudaMemcpyAsync");
}

void CudaDevice::set_bytes(Stream& s, void* dst, uint8_t value, int64_t bytes) {
    if (bytes == 0) return;
    cudaPointerAttributes where{};
    check(cudaPointerGetAttributes(&where, dst), "cudaPointerGetAttributes");
    if (where.type == cudaMemoryTypeDevice || where.type == cudaMemoryTypeManaged) {
        check(cudaMemsetAsync(dst, value, size_t(bytes), handle(s)), "cudaMemsetAsync");
    } else {  // host memory has no asynchronous form: wait for its earlier users
        synchronize(s);
        std::memset(dst, value, size_t(bytes));
    }
}

void CudaDevice::synchronize(Stream& s) {
    check(cudaStreamSynchronize(handle(s)), "a kernel or copy queued before");
}

// --- the backend's entry -------------------------------------------------------------------------
static __global__ void probe_kernel() {}

static std::string version(int v) { return concat(v / 1000, ".", v % 1000 / 10); }

// Why device `index` cannot run this binary; empty when it can.
static std::string device_reason(int index) {
    cudaDeviceProp p{};
    if (const cudaError_t e = cudaGetDeviceProperties(&p, index); e != cudaSuccess)
        return concat("GPU ", index, " cannot be opened: ", cudaGetErrorString(e));
    if (p.major < 8)
        return concat("GPU ", index, " (", p.name, ") has compute capability ", p.major, ".",
                      p.minor, "; 8.0 or later is needed");
    cudaFuncAttributes attributes{};
    cudaSetDevice(index);
    if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
        cudaGetLastError();
        return concat("this binary has no code for GPU ", index, " (", p.name,
                      ", compute capability ", p.major, ".", p.minor,
                      "); rebuild with -DTORUS_CUDA_ARCHITECTURES=", p.major, p.minor);
    }
    return {};
}

}  // namespace torus::cuda

namespace torus {

std::string cuda_unavailable_reason() {
    int driver = 0, runtime = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return "no NVIDIA driver was found on this machine";
    cudaRuntimeGetVersion(&runtime);
    if (driver / 1000 < runtime / 1000)
        return concat("the NVIDIA driver supports CUDA ", cuda::version(driver),
                      ", this program needs ", runtime / 1000, ".0 or later: update the driver");
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return concat("no GPU can be used: ", cudaGetErrorString(error));
    }
    if (count == 0) return "the NVIDIA driver reports no GPU";
    std::string reason;
    for (int i = 0; i < count; ++i) {
        reason = cuda::device_reason(i);
        if (reason.empty()) break;
    }
    return reason;
}

std::unique_ptr<Kernels> make_cuda_kernels(DType dtype, int index) {
    const std::string reason = cuda_unavailable_reason();
    require(reason.empty(), Exit::usage, "--device cuda: ", reason);
    int count = 0;
    cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    require(index >= 0 && index < count, Exit::usage, "--device cuda: GPU ", index,
            " was asked for, this machine has ", count, ": start fewer ranks here");
    const std::string of_index = cuda::device_reason(index);
    require(of_index.empty(), Exit::usage, "--device cuda: ", of_index);
    require(dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32, Exit::usage,
            "--dtype ", name_of(dtype), " does not run on the GPU; use bf16, fp16 or fp32, or",
            " --device cpu");
    return std::make_unique<cuda::CudaKernels>(dtype, index);
}

}  // namespace torus
