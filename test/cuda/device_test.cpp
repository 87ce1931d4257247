// The device itself: memory accounting and its errors, copies, events, and how a backend that
// cannot be made says so.
#include <vector>

#include "test/cuda/gpu.h"
#include "test/kernels/harness.h"
#include "test/test.h"

using namespace torus;
using namespace torus::test;

namespace {

Exit code_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        INFO(e.what());
        EXPECT(std::string(e.what()).find('\n') == std::string::npos);
        return e.code;
    }
    return Exit::ok;
}

}  // namespace

TEST_CASE("out of memory is exit code 71, and the device works afterwards") {
    Gpu gpu(DType::bf16);
    Device& d = gpu.k->device();
    const int64_t before = d.allocated(Memory::device);
    EXPECT(code_of([&] { d.allocate(Memory::device, d.total_bytes() * 2); }) ==
           Exit::out_of_memory);
    EXPECT(d.allocated(Memory::device) == before);
    const Buffer b(d, Memory::device, 1 << 20);
    d.set_bytes(gpu.stream, b.data(), 1, b.bytes());
    d.synchronize(gpu.stream);
}

TEST_CASE("allocation is counted, and refused once the plan is laid") {
    Gpu gpu(DType::bf16);
    Device& d = gpu.k->device();
    for (Memory m : {Memory::host, Memory::pinned, Memory::device}) {
        const int64_t before = d.allocated(m);
        {
            const Buffer b(d, m, 1000);
            EXPECT(d.allocated(m) == before + 1000);
            EXPECT(reinterpret_cast<uintptr_t>(b.data()) % 256 == 0);
        }
        EXPECT(d.allocated(m) == before);
        EXPECT(d.peak(m) >= before + 1000);
    }
    d.freeze();
    EXPECT(code_of([&] { d.allocate(Memory::device, 1); }) == Exit::internal);
    d.thaw();
    EXPECT(d.free_bytes() > 0);
    EXPECT(d.free_bytes() <= d.total_bytes());
}

TEST_CASE("copies in all directions, across streams ordered by an event") {
    Gpu gpu(DType::bf16);
    Device& d = gpu.k->device();
    Stream other = d.make_stream(true);
    Event filled = d.make_event(), done = d.make_event();
    constexpr int64_t n = 1 << 20;
    const Buffer device(d, Memory::device, n), second(d, Memory::device, n),
        pinned(d, Memory::pinned, n);
    d.record(done, gpu.stream);
    d.set_bytes(gpu.stream, device.data(), 7, n);
    d.record(filled, gpu.stream);
    d.wait(other, filled);
    d.copy(other, second.data(), device.data(), n);
    d.copy(other, pinned.data(), second.data(), n);
    d.synchronize(other);
    EXPECT(static_cast<const uint8_t*>(pinned.data())[n - 1] == 7);
    EXPECT(d.elapsed_ms(done, filled) >= 0);
    d.synchronize(filled);
    std::vector<uint8_t> host(n, 0);
    d.set_bytes(gpu.stream, host.data(), 9, n);
    EXPECT(host[0] == 9);
    d.destroy(filled);
    d.destroy(done);
    d.destroy(other);
    EXPECT(other.handle == nullptr);
}

TEST_CASE("impossible requests are usage errors") {
    EXPECT(code_of([] { make_cuda_kernels(DType::f64, 0); }) == Exit::usage);
    EXPECT(code_of([] { make_cuda_kernels(DType::bf16, 1000); }) == Exit::no_device);
    const auto cpu = make_cpu_kernels(DType::f32);
    EXPECT(code_of([&] { cpu->tune_matmul("never_written"); }) == Exit::usage);
}

TEST_CASE("an op without a stream or with too little workspace is refused") {
    Gpu gpu(DType::bf16, 16);
    DeviceValue x(gpu, DType::bf16, {4}, {1, 2, 3, 4}), out(gpu, DType::f64, {1});
    Stream none;
    EXPECT(code_of([&] { gpu.k->scale(none, x.tensor(), 2); }) == Exit::internal);
    EXPECT(code_of([&] { gpu.k->sum(gpu.stream, out.tensor(), x.tensor(), false); }) ==
           Exit::internal);
}
