// Our Hopper attention against the definition (in fp64, on the GPU) and against the clock.
//   bench_attention check          many shapes and masks; exit 1 when one is wrong
//   bench_attention small          the small ones among them, for compute-sanitizer
//   bench_attention repeat [runs]  the same bits in every run?
//   bench_attention time [ms]      TFLOP/s per shape: medians of bursts of `ms`, each after a pause
// The pause lets every figure start from the same clock and temperature: hot, the chip is slower.
// FLOP are counted as usual: forward 4 B H Tq Tk D, halved when causal; backward 2.5 times that.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/attention_cases.cuh"

using namespace torus;
using namespace attention_cases;

namespace {

int check(bool small) {
    std::vector<Case> cases;
    for (int64_t D : {64, 128}) {
        cases.push_back({1, 128, 128, 1, 1, D, false});
        cases.push_back({1, 256, 256, 2, 2, D, true});
        for (int64_t T : {1, 63, 64, 65, 97, 129, 200, 1025})
            cases.push_back({T > 200 ? 1 : 3, T, T, 4, T % 2 ? 2 : 4, D, T != 200});
        cases.push_back({2, 1000, 1000, 12, 3, D, true});
        cases.push_back({1, 1000, 1000, 12, 3, D, false});
        cases.push_back({1, 700, 300, 8, 1, D, false});
        cases.push_back({1, 300, 700, 4, 4, D, true, 400, 0});
        cases.push_back({1, 300, 700, 4, 4, D, true, 100, 333});
        cases.push_back({1, 300, 700, 4, 4, D, true, 0, 1000});  // no key visible
        for (Masks k : {Masks::documents, Masks::window, Masks::random, Masks::empty}) {
            cases.push_back({2, 1111, 1111, 4, 2, D, true, 0, 0, k});
            cases.push_back({2, 555, 777, 4, 2, D, false, 0, 10, k});
        }
        cases.push_back({2, 800, 900, 4, 2, D, true, 100, 0, Masks::none, true});
        cases.push_back({2, 800, 800, 4, 2, D, true, 0, 0, Masks::documents, true});
        cases.push_back({1, 500, 600, 4, 2, D, false, 0, 0, Masks::none, true, false, 5, 3});
        cases.push_back({1, 500, 600, 4, 2, D, true, 100, 0, Masks::none, false, false, 5, 3});
        cases.push_back({2, 777, 777, 4, 2, D, true, 0, 0, Masks::none, false, true});
        cases.push_back(
            {1, 16384, 16384, 2, 1, D, true, 0, 0, Masks::none, false, false, 1, 1, 331});
    }
    int bad = 0;
    uint32_t seed = 1;
    if (small) std::erase_if(cases, [](const Case& c) { return c.Tq * c.Tk > 300 * 700; });
    for (const Case& c : cases)
        bad +=
            !(c.half ? check_case<__half>(c, seed += 7) : check_case<__nv_bfloat16>(c, seed += 7));
    std::printf("%d of %zu cases wrong\n", bad, cases.size());
    return bad > 0;
}

// FNV-1a over the bytes of the outputs.
uint64_t hash_of(const std::vector<Tensor>& all) {
    uint64_t h = 14695981039346656037ull;
    for (const Tensor& t : all)
        for (uint8_t x : download<uint8_t>(t.data, t.bytes())) h = (h ^ x) * 1099511628211ull;
    return h;
}

// Forward and deterministic backward many times on the same input, other work in between.
int repeat(int runs) {
    using E = __nv_bfloat16;
    int bad = 0;
    for (int64_t D : {64, 128})
        for (int64_t Hk : {8, 2}) {
            Case c{1, 3000, 3000, 8, Hk, D};
            Scratch m;
            Inputs<E> in(c, m, 5);
            Attn a;
            a.q = in.q, a.k = in.k, a.v = in.v, a.scale = in.problem.scale;
            a.lse = Tensor(m.take<float>(c.H * c.Tq), DType::f32, {1, c.H, c.Tq});
            auto output = [&](int64_t H) {
                return tensor(m.take<E>(c.Tq * H * D), DType::bf16, 1, c.Tq, H, D, H * D);
            };
            a.o = output(c.H);
            AttnGrad g;
            g.q = a.q, g.k = a.k, g.v = a.v, g.scale = a.scale, g.lse = a.lse, g.dout = in.dout;
            g.delta = Tensor(m.take<float>(c.H * c.Tq, 0), DType::f32, {1, c.H, c.Tq});
            g.dq = output(c.H), g.dk = output(Hk), g.dv = output(Hk);
            void* workspace =
                m.take<char>(std::max(flash::forward_workspace_bytes(),
                                      flash::backward_workspace_bytes(1, c.H, Hk, c.Tq, c.Tk, D)));
            float* noise = m.take<float>(1 << 20);
            uint64_t first = 0;
            int differ = 0;
            for (int i = 0; i < runs; ++i) {
                reference::noise<float><<<1 + i % 60, 256>>>(noise, 1 << 20, uint32_t(i), 1);
                flash::forward(nullptr, a, workspace);
                flash::backward(nullptr, g, workspace, true);
                const uint64_t h = hash_of({a.o, a.lse, g.dq, g.dk, g.dv});
                if (i == 0) first = h;
                differ += h != first;
            }
            std::printf("D%ld H8/%ld: %d of %d runs differ\n", long(D), long(Hk), differ, runs);
            bad += differ;
        }
    return bad > 0;
}

// --- timing -------------------------------------------------------------------------------------
double median_ms(const std::function<void()>& f, double budget_ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cudaEvent_t a, b;
    CU(cudaEventCreate(&a));
    CU(cudaEventCreate(&b));
    std::vector<float> ms;
    f();
    double total = 0;
    while (total < budget_ms || ms.size() < 5) {
        float t = 0;
        CU(cudaEventRecord(a));
        f();
        CU(cudaEventRecord(b));
        CU(cudaEventSynchronize(b));
        CU(cudaEventElapsedTime(&t, a, b));
        ms.push_back(t), total += t;
    }
    CU(cudaEventDestroy(a));
    CU(cudaEventDestroy(b));
    std::sort(ms.begin(), ms.end());
    return double(ms[ms.size() / 2]);
}

struct Shape {
    int64_t D, S, B, H, Hk;
    bool causal;
};

const std::vector<Shape>& shapes() {
    static const std::vector<Shape> all = {
        {128, 1024, 16, 16, 16, true}, {128, 4096, 4, 16, 16, true},
        {128, 16384, 1, 16, 16, true}, {128, 16384, 1, 16, 16, false},
        {128, 65536, 1, 16, 16, true}, {128, 8192, 1, 32, 8, true},
        {128, 32768, 1, 32, 8, true},  {128, 262144, 1, 2, 1, true},
        {64, 1024, 16, 32, 32, true},  {64, 4096, 4, 32, 32, true},
        {64, 16384, 1, 32, 32, true},  {64, 16384, 1, 32, 32, false},
        {64, 65536, 1, 32, 32, true},  {64, 262144, 1, 2, 2, true},
    };
    return all;
}

// delta = rowsum(dout * o), as fast as memory allows: part of what a backward costs its caller.
__global__ void quick_delta(const __nv_bfloat16* dout, int64_t dout_row, const __nv_bfloat16* o,
                            float* delta, int T, int H, int D) {
    const int64_t at = blockIdx.x * int64_t(blockDim.x / 8) + threadIdx.x / 8;  // (b, t, h)
    const int64_t bt = at / H;
    const int h = int(at % H);
    float sum = 0;
    for (int d = int(threadIdx.x % 8) * 8; d < D; d += 64) {
        const uint4 x = *reinterpret_cast<const uint4*>(dout + bt * dout_row + h * D + d);
        const uint4 y = *reinterpret_cast<const uint4*>(o + at * D + d);
        const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
        for (int i = 0; i < 4; ++i)
            sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16) +
                   __uint_as_float(a[i] & 0xFFFF0000u) * __uint_as_float(b[i] & 0xFFFF0000u);
    }
    for (int n = 4; n > 0; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
    if (threadIdx.x % 8 == 0) delta[(bt / T * H + h) * T + bt % T] = sum;
}

void time_all(double budget) {
    using E = __nv_bfloat16;
    for (const Shape& s : shapes()) {
        Case c{s.B, s.S, s.S, s.H, s.Hk, s.D, s.causal};
        Scratch m;
        Inputs<E> in(c, m, 1);
        const double flop =
            4.0 * double(s.B * s.H) * double(s.S) * double(s.S) * double(s.D) / (s.causal ? 2 : 1);
        const double cap = s.S > 100000 ? budget / 4 : budget;
        std::printf("D%-3ld S%-6ld B%-2ld H%ld/%ld %-6s", long(s.D), long(s.S), long(s.B),
                    long(s.H), long(s.Hk), s.causal ? "causal" : "full");
        auto show = [&](const char* name, double work, const std::function<void()>& f) {
            std::printf("  %s %.1f", name, work / median_ms(f, cap) * 1e-9);
            std::fflush(stdout);
        };
        Attn a;
        a.q = in.q, a.k = in.k, a.v = in.v, a.scale = in.problem.scale, a.causal = c.causal;
        a.lse = Tensor(m.take<float>(c.B * c.H * c.Tq), DType::f32, {c.B, c.H, c.Tq});
        a.o =
            tensor(m.take<E>(c.B * c.Tq * c.H * c.D), DType::bf16, c.B, c.Tq, c.H, c.D, c.H * c.D);
        void* workspace = m.take<char>(flash::forward_workspace_bytes());
        show("fwd", flop, [&] { flash::forward(nullptr, a, workspace); });
        {
            AttnGrad g;
            g.q = a.q, g.k = a.k, g.v = a.v, g.scale = a.scale, g.causal = a.causal, g.lse = a.lse;
            g.dout = in.dout;
            g.delta = Tensor(m.take<float>(c.B * c.H * c.Tq), DType::f32, {c.B, c.H, c.Tq});
            auto like = [&](const Tensor& t) {
                return tensor(m.take<E>(t.numel()), DType::bf16, t.dim(0), t.dim(1), t.dim(2),
                              t.dim(3), t.dim(2) * t.dim(3));
            };
            g.dq = like(a.q), g.dk = like(a.k), g.dv = like(a.v);
            void* scratch =
                m.take<char>(flash::backward_workspace_bytes(c.B, c.H, c.Hk, c.Tq, c.Tk, c.D));
            for (bool exact : {false, true})
                show(exact ? "bwd deterministic" : "bwd", 2.5 * flop, [&] {
                    quick_delta<<<unsigned(c.B * c.Tq * c.H / 32), 256>>>(
                        static_cast<const E*>(g.dout.data), g.dout.pitch(1),
                        static_cast<const E*>(a.o.data), g.delta.as<float>(), int(c.Tq), int(c.H),
                        int(c.D));
                    flash::backward(nullptr, g, scratch, exact);
                });
        }
        std::printf("\n");
        CU(cudaDeviceSynchronize());
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "check";
    try {
        if (mode == "check" || mode == "small") return check(mode == "small");
        if (mode == "repeat") return repeat(argc > 2 ? std::atoi(argv[2]) : 250);
        time_all(argc > 2 ? std::atof(argv[2]) : 60);
    } catch (const std::exception& e) {
        std::printf("FAIL %s\n", e.what());
        return 1;
    }
    return 0;
}
