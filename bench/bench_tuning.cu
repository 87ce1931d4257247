// Whether a file of --tune-matmul still holds the best algorithms: each of its products is searched
// again, and then runs in turns with the library's first choice, the file's and the new one.
//   bench_tuning FILE
// Milliseconds of one call, TFLOP/s of the file's choice and its time over the least of the three,
// at the clock that a training step has: each figure is the mean of three bursts of 60 ms that
// follow 40 ms of the same. Takes about five seconds a product; operands are random.
#include <algorithm>
#include <cstdio>

#include "bench/help.h"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/matmul_choices.h"
#include "kernels/cuda/matmul_search.h"
#include "kernels/kernels.h"

using namespace torus;
using namespace torus::cuda;

namespace {

// Numbers in [-1, 1) from a hash of their index.
template <class T>
__global__ void fill_random(T* out, int64_t count, uint32_t seed) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * blockDim.x) {
        uint32_t x = uint32_t(i) * 2654435761u + seed;
        x = (x ^ x >> 16) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        out[i] = convert<T>(float(x >> 8) * 0x1p-23f - 1.0f);
    }
}

class Bench {
public:
    Bench() : kernels_(make_cuda_kernels(DType::bf16, 0)) {
        check(cublasLtCreate(&handle_), "cublasLtCreate");
        stream_ = static_cast<cudaStream_t>((queue_ = kernels_->device().make_stream()).handle);
        check(cudaEventCreate(&from_), "cudaEventCreate");
        check(cudaEventCreate(&to_), "cudaEventCreate");
        check(cudaMalloc(&workspace_, kMatmulWorkspace), "cudaMalloc");
    }
    ~Bench() {
        cudaFree(workspace_);
        cudaEventDestroy(from_), cudaEventDestroy(to_);
        kernels_->device().destroy(queue_);
        cublasLtDestroy(handle_);
    }
    Bench(const Bench&) = delete;

    std::string device() const { return kernels_->device().name(); }

    struct Times {
        double first, kept, searched;
        double least() const { return std::min({first, kept, searched}); }
    };
    // False when the product cannot run here.
    bool compare(const ProductKey& key, const Algorithm& kept, Times& times) {
        std::vector<void*> memory;
        Product p = product_of(key);
        const auto operand = [&](const void* like, DType type, int64_t count) {
            return allocate(memory, like, type, count);
        };
        p.a = operand(p.a, p.in, p.lda * (p.trans_a ? p.m : p.k));
        p.b = operand(p.b, p.in, p.ldb * (p.trans_b ? p.k : p.n));
        p.d = operand(p.d, p.out, p.ldd * p.n);
        // A gradient adds to itself, a residual comes from elsewhere.
        p.c = p.beta != 0 && p.out != DType::f32 ? operand(p.c, p.out, p.ldc * p.n) : p.d;
        if (p.bias) p.bias = operand(p.bias, p.out, p.m);
        if (p.aux) p.aux = operand(p.aux, p.out, p.m * p.n);
        const bool done = compare(p, kept, times);
        for (void* m : memory) cudaFree(m);
        return done;
    }

private:
    void* allocate(std::vector<void*>& memory, const void* like, DType type, int64_t count) {
        const int64_t offset = reinterpret_cast<intptr_t>(like) % 256;
        void* base = nullptr;
        check(cudaMalloc(&base, size_t(count * size_of(type) + offset)), "cudaMalloc");
        memory.push_back(base);
        char* const data = static_cast<char*>(base) + offset;
        dispatch(type, [&](auto t) {
            using T = typename decltype(t)::type;
            fill_random<<<4 * multiprocessors(), 256, 0, stream_>>>(reinterpret_cast<T*>(data),
                                                                    count, uint32_t(memory.size()));
        });
        return data;
    }

    bool compare(const Product& p, const Algorithm& kept, Times& times) {
        Plan plan(p);
        const std::vector<Algorithm> proposed = proposals(handle_, plan, p);
        if (proposed.empty() || !usable(handle_, plan, kept)) return false;
        const float alpha = 1;
        const auto run = [&](const Algorithm& algo) {
            return cublasLtMatmul(handle_, plan.desc, &alpha, p.a, plan.a, p.b, plan.b, &p.beta,
                                  p.c, plan.c, p.d, plan.d, &algo, workspace_, kMatmulWorkspace,
                                  stream_) == CUBLAS_STATUS_SUCCESS;
        };
        const Choice searched = find_fastest(handle_, stream_, p, plan, proposed, run);
        const Algorithm* algorithms[] = {&proposed[0], &kept, &searched.algo};
        double* const ms[] = {&times.first, &times.kept, &times.searched};
        times = {};
        for (int round = 0; round < 3; ++round)
            for (int i = 0; i < 3; ++i) *ms[i] += sustained(run, *algorithms[i]) / 3;
        return true;
    }

    template <class Run>
    double sustained(const Run& run, const Algorithm& algo) {
        const auto burst = [&](int calls) {
            check(cudaEventRecord(from_, stream_), "cudaEventRecord");
            for (int i = 0; i < calls; ++i) CHECK(run(algo), ": cuBLASLt refuses an algorithm");
            check(cudaEventRecord(to_, stream_), "cudaEventRecord");
            check(cudaEventSynchronize(to_), "matmul");
            float ms = 0;
            check(cudaEventElapsedTime(&ms, from_, to_), "cudaEventElapsedTime");
            return double(ms) / calls;
        };
        const double once = burst(3);
        burst(std::max(3, int(40 / once)));
        return burst(std::max(3, int(60 / once)));
    }

    std::unique_ptr<Kernels> kernels_;
    Stream queue_;
    cudaStream_t stream_ = nullptr;
    cublasLtHandle_t handle_ = nullptr;
    cudaEvent_t from_ = nullptr, to_ = nullptr;
    void* workspace_ = nullptr;
};

int run(const std::string& file) {
    Bench bench;
    const auto choices = read_choices(file, bench.device());
    require(choices && !choices->empty(), Exit::usage, file,
            ": no products of this GPU and cuBLASLt ", cublasLtGetVersion(),
            "; train_gpt --tune-matmul ", file, " writes them");
    std::printf("%s, cuBLASLt %zu\n%-7s %-22s %9s %9s %9s %9s %10s\n", bench.device().c_str(),
                cublasLtGetVersion(), "out", "m, n, k", "first ms", "file ms", "search ms",
                "TFLOP/s", "over best");
    double worst = 1, kept = 0, least = 0, first = 0;
    for (const auto& [key, choice] : *choices) {
        const Product p = product_of(key);
        const std::string shape = concat(p.m, ", ", p.n, ", ", p.k);
        Bench::Times t{};
        if (!bench.compare(key, choice.algo, t)) {
            std::printf("%-7s %-22s cannot run here\n", name_of(p.out), shape.c_str());
            continue;
        }
        const double flop = 2.0 * double(p.m) * double(p.n) * double(p.k);
        std::printf("%-7s %-22s %9.4f %9.4f %9.4f %9.0f %10.3f\n", name_of(p.out), shape.c_str(),
                    t.first, t.kept, t.searched, flop / t.kept / 1e9, t.kept / t.least());
        std::fflush(stdout);
        worst = std::max(worst, t.kept / t.least());
        kept += t.kept, least += t.least(), first += t.first;
    }
    std::printf(
        "the file's choices over the best: %.3f at worst, %.3f in sum; the library's first "
        "choices: %.3f in sum\n",
        worst, kept / least, first / least);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    if (!only_words(argc, argv)) return int(Exit::usage);
    if (argc != 2) {
        std::fprintf(stderr, "error: bench_tuning FILE: one file, of train_gpt --tune-matmul\n");
        return int(Exit::usage);
    }
    try {
        return run(argv[1]);
    } catch (const Error& e) {
        std::fprintf(stderr, "bench_tuning: %s\n", e.what());
        return int(e.code);
    }
}
