// Device memory, streams and events over the CUDA runtime, the reasons why a GPU cannot be used,
// and the host side of common.cuh. Allocations are plain cudaMalloc and cudaMallocHost: a run makes
// a handful of them, so a pool would only hide their sizes.
#include <cuda_profiler_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda_kernels.h"

namespace torus::cuda {

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    const bool memory = error == cudaErrorMemoryAllocation;
    fail(memory ? Exit::out_of_memory : Exit::internal, "CUDA: ", what, ": ",
         cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
         memory ? "; the driver needs some memory besides the plan: lower --micro-batch-size" : "");
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

void push_range(const char* name, int64_t number) {
    if (!nvtx_domain()) return;  // no profiler is attached
    char numbered[64];
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    if (number >= 0) {
        std::snprintf(numbered, sizeof numbered, "%s %lld", name, static_cast<long long>(number));
        event.message.ascii = numbered;
    }
    nvtxDomainRangePushEx(nvtx_domain(), &event);
}

void pop_range() {
    if (nvtx_domain()) nvtxDomainRangePop(nvtx_domain());
}

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
int multiprocessors() {
    return std::min(attribute(cudaDevAttrMultiProcessorCount), most_multiprocessors);
}
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

// A recording is an instantiated CUDA graph.
void CudaDevice::begin_recording(Stream& s) {
    check(cudaStreamBeginCapture(handle(s), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
}

Recording CudaDevice::end_recording(Stream& s) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t recording = nullptr;
    check(cudaStreamEndCapture(handle(s), &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&recording, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
    return {recording};
}

void CudaDevice::replay(Stream& s, const Recording& recording) {
    CHECK(recording.handle, ": no recording");
    check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording.handle), handle(s)),
          "cudaGraphLaunch");
}

void CudaDevice::destroy(Recording& recording) noexcept {
    if (recording.handle) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(recording.handle));
    recording = {};
}

void CudaDevice::synchronize(Stream& s) {
    check(cudaStreamSynchronize(handle(s)), "a kernel or copy queued before");
}

// --- profilers -----------------------------------------------------------------------------------
void CudaDevice::push_range(const char* name, int64_t number) { cuda::push_range(name, number); }
void CudaDevice::pop_range() { cuda::pop_range(); }

void CudaDevice::start_profiler() {
    use();
    check(cudaDeviceSynchronize(), "work queued before the profiler's start");
    check(cudaProfilerStart(), "cudaProfilerStart");
}

void CudaDevice::stop_profiler() {
    use();
    check(cudaDeviceSynchronize(), "work queued before the profiler's stop");
    check(cudaProfilerStop(), "cudaProfilerStop");
}

// --- planning without a GPU ----------------------------------------------------------------------
// Streams and events without a handle, with which nothing can be queued.
class PlannedDevice final : public Device {
public:
    std::string name() const override { return "a GPU (planned, none is used)"; }
    int64_t total_bytes() const override { return 0; }
    int64_t free_bytes() const override { return 0; }
    void* allocate(Memory, int64_t) override { refuse(); }
    void release(Memory, void*, int64_t) noexcept override {}
    Stream make_stream(bool) override { return {}; }
    using Device::destroy;
    void destroy(Stream&) noexcept override {}
    Event make_event() override { return {}; }
    void destroy(Event&) noexcept override {}
    void record(Event&, Stream&) override { refuse(); }
    void wait(Stream&, Event&) override { refuse(); }
    double elapsed_ms(Event&, Event&) override { refuse(); }
    void copy(Stream&, void*, const void*, int64_t) override { refuse(); }
    void set_bytes(Stream&, void*, uint8_t, int64_t) override { refuse(); }
    void synchronize(Stream&) override { refuse(); }
    void synchronize(Event&) override { refuse(); }

private:
    [[noreturn]] static void refuse() {
        fail(Exit::internal, "a plan was asked to run: it has no GPU");
    }
};

// --- the backend's entry -------------------------------------------------------------------------
static __global__ void probe_kernel() {}

static std::string version(int v) { return concat(v / 1000, ".", v % 1000 / 10); }

static void check_dtype(DType dtype) {
    require(dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32, Exit::usage,
            "--dtype ", name_of(dtype), " does not run on the GPU; use bf16, fp16 or fp32, or",
            " --device cpu");
}

// What keeps device `index` from running this binary; empty when nothing does.
static std::string device_reason(int index) {
    cudaDeviceProp p{};
    if (const cudaError_t e = cudaGetDeviceProperties(&p, index); e != cudaSuccess)
        return concat("GPU ", index, " cannot be opened: ", cudaGetErrorString(e));
    if (p.major < 8)
        return concat("GPU ", index, " (", p.name, ") has compute capability ", p.major, ".",
                      p.minor, ", 8.0 or later is needed");
    cudaFuncAttributes attributes{};
    cudaError_t e = cudaSetDevice(index);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, probe_kernel);
    cudaGetLastError();
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction)
        return concat("this program has no code for GPU ", index, " (", p.name,
                      ", compute capability ", p.major, ".", p.minor,
                      "), build it with -DTORUS_CUDA_ARCHITECTURES=", p.major, p.minor);
    if (e != cudaSuccess)  // taken by another program: its memory or the whole of it
        return concat("GPU ", index, " (", p.name, ") cannot be used now: ", cudaGetErrorString(e));
    return {};
}

// GPUs of this machine; `reason` says why there are none.
static int count_devices(std::string& reason) {
    int driver = 0, runtime = 0, count = 0;
    cudaRuntimeGetVersion(&runtime);
    const std::string needed = concat("CUDA ", runtime / 1000, ".0 or later");
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        reason =
            concat("no NVIDIA driver was found on this machine, one for ", needed, " is needed");
        return 0;
    }
    if (driver / 1000 < runtime / 1000) {
        reason = concat("the NVIDIA driver is for CUDA ", version(driver), ", one for ", needed,
                        " is needed: update the driver");
        return 0;
    }
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error != cudaSuccess || count == 0) {
        reason = concat("the NVIDIA driver gives this program no GPU: ",
                        cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
        return 0;
    }
    return count;
}

}  // namespace torus::cuda

namespace torus {

std::string cuda_unavailable_reason() {
    std::string reason;
    const int count = cuda::count_devices(reason);
    for (int i = 0; i < count; ++i) {
        reason = cuda::device_reason(i);
        if (reason.empty()) break;
    }
    return reason;
}

std::unique_ptr<Kernels> make_cuda_kernels(DType dtype, int index) {
    cuda::check_dtype(dtype);
    std::string reason;
    const int count = cuda::count_devices(reason);
    if (count > 0)
        reason = index < count
                     ? cuda::device_reason(index)
                     : concat("GPU ", index, " was asked for, this program sees ", count,
                              ": start at most ", count, count == 1 ? " rank" : " ranks", " here");
    require(reason.empty(), Exit::no_device, "--device cuda: ", reason, "; or use --device cpu");
    CHECK(index >= 0);
    return std::make_unique<cuda::CudaKernels>(dtype, std::make_unique<cuda::CudaDevice>(index));
}

std::unique_ptr<Kernels> make_cuda_planner(DType dtype) {
    cuda::check_dtype(dtype);
    return std::make_unique<cuda::CudaKernels>(dtype, std::make_unique<cuda::PlannedDevice>());
}

}  // namespace torus
