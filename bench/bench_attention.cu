// Our attention and cuDNN's in one process, alternating, on random data: TFLOP/s per shape.
//   bench_attention [--ms N] [--rounds N] [--json FILE] [--blocks single|pairs] [D:S ...]
// D:S times only the shapes of the table with that head dim and sequence length, or, when there is
// none, one of about 16384 tokens and 2048 channels, causal. --blocks forces our backward to go by
// single blocks, or by pairs where there are such kernels; else it goes as in training.
// Each figure is the better of N medians (2) of bursts of N ms (35), each after a pause of 80 ms:
// the pause lets every burst start from the same clock and temperature, hot the chip is slower.
// Backward includes the delta pass. FLOP are counted as usual: forward 4 B H S^2 D, halved when
// causal; backward 2.5 times that. Of packed documents (log-normal lengths, spread 1) only visible
// pairs count; their rate as a share of the causal one comes below the table. cuDNN is not asked
// for those.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "bench/documents.h"
#include "bench/help.h"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/flash/flash.h"

using namespace torus;

namespace {

struct Problem {
    int64_t D, S, B, H, Hk;
    bool causal;
    int64_t documents = 0;  // median length of packed documents; 0: one sequence
};

const Problem shapes[] = {
    {128, 1024, 16, 16, 16, true},       {128, 4096, 4, 16, 16, true},
    {128, 16384, 1, 16, 16, true},       {128, 16384, 1, 16, 16, false},
    {128, 65536, 1, 16, 16, true},       {128, 8192, 1, 32, 8, true},
    {128, 32768, 1, 32, 8, true},        {128, 262144, 1, 2, 1, true},
    {128, 524288, 1, 2, 1, true},        {64, 1024, 16, 32, 32, true},
    {64, 4096, 4, 32, 32, true},         {64, 16384, 1, 32, 32, true},
    {64, 16384, 1, 32, 32, false},       {64, 65536, 1, 32, 32, true},
    {64, 262144, 1, 2, 2, true},         {64, 524288, 1, 2, 2, true},
    {96, 1024, 16, 16, 16, true},        {96, 4096, 4, 16, 16, true},
    {96, 16384, 1, 16, 16, true},        {96, 16384, 1, 16, 16, false},
    {80, 1024, 16, 32, 32, true},        {80, 4096, 4, 32, 32, true},
    {80, 16384, 1, 32, 32, true},        {32, 4096, 4, 64, 64, true},
    {128, 65536, 1, 16, 16, true, 2048}, {64, 65536, 1, 32, 32, true, 2048},
};

struct Settings {
    double burst_ms = 35;
    int rounds = 2;
    flash::Blocks blocks = flash::Blocks::best;
    std::string json;
    std::vector<Problem> chosen;
};

// Bits of a hash: uniform noise, which attention finds as hard as any.
__global__ void noise(__nv_bfloat16* x, int64_t n, uint32_t seed) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        uint64_t z = (uint64_t(seed) << 40) + uint64_t(i) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        x[i] = __nv_bfloat16(float(z >> 40) * 0x1p-23f * 1.7320508f - 1.7320508f);
    }
}

class Burst {  // times repeated calls on one stream
public:
    Burst() {
        cuda::check(cudaEventCreate(&from_), "cudaEventCreate");
        cuda::check(cudaEventCreate(&to_), "cudaEventCreate");
    }
    ~Burst() { cudaEventDestroy(from_), cudaEventDestroy(to_); }
    double median_ms(cudaStream_t stream, const std::function<void()>& f, double budget_ms) {
        std::this_thread::sleep_for(std::chrono::milliseconds(80));
        std::vector<float> ms;
        double total = 0;
        while (ms.size() < 2 || (total < budget_ms && ms.size() < 1000)) {
            float t = 0;
            cuda::check(cudaEventRecord(from_, stream), "cudaEventRecord");
            f();
            cuda::check(cudaEventRecord(to_, stream), "cudaEventRecord");
            cuda::check(cudaEventSynchronize(to_), "attention");
            cuda::check(cudaEventElapsedTime(&t, from_, to_), "cudaEventElapsedTime");
            ms.push_back(t), total += t;
        }
        std::sort(ms.begin(), ms.end());
        return double(ms[ms.size() / 2 - (ms.size() % 2 == 0)]);
    }

private:
    cudaEvent_t from_, to_;
};

struct Row {
    Problem shape;
    double ours, cudnn, plain, deterministic, cudnn_backward;  // TFLOP/s; 0: not measured
};

class Bench {
public:
    explicit Bench(const Settings& s) : settings_(s), k_(make_cuda_kernels(DType::bf16, 0)) {
        stream_ = k_->device().make_stream();
        if (!cudnn_version().empty()) cudnn_ = cuda::make_cudnn_attention();
    }
    ~Bench() { k_->device().destroy(stream_); }
    std::string device() { return k_->device().name(); }

    Row time(const Problem& s) {
        const int64_t packed = (s.H + 2 * s.Hk) * s.D;
        std::vector<Buffer> memory;
        const auto take = [&](int64_t bytes) {
            memory.emplace_back(k_->device(), Memory::device, bytes);
            return static_cast<char*>(memory.back().data());
        };
        uint32_t seed = 1;
        const auto matrix = [&](int64_t columns) {
            const int64_t n = s.B * s.S * columns;
            char* const p = take(n * 2);
            noise<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(p), n, seed++);
            return p;
        };
        const auto heads = [&](char* base, int64_t at, int64_t H, int64_t row) {
            Tensor t(base + at * s.D * 2, DType::bf16, {s.B, s.S, H, s.D});
            t.stride = {s.S * row, row, s.D, 1};
            return t;
        };
        const auto statistic = [&] {
            return Tensor(take(s.B * s.H * s.S * 4), DType::f32, {s.B, s.H, s.S});
        };
        char *const qkv = matrix(packed), *const grads = matrix(packed);
        Tensor first_key;
        double pairs = double(s.B) * double(s.S) * double(s.S) / (s.causal ? 2 : 1);
        if (s.documents > 0) {
            const auto first = packed_documents(s.B, s.S, double(s.documents), 1);
            first_key = Tensor(take(s.B * s.S * 4), DType::i32, {s.B, s.S});
            k_->device().copy(stream_, first_key.data, first.data(), first_key.bytes());
            k_->device().synchronize(stream_);
            pairs = 0;
            for (int64_t i = 0; i < s.B * s.S; ++i) pairs += double(i % s.S - first[size_t(i)] + 1);
        }
        Attn a{.q = heads(qkv, 0, s.H, packed),
               .k = heads(qkv, s.H, s.Hk, packed),
               .v = heads(qkv, s.H + s.Hk, s.Hk, packed),
               .o = heads(matrix(s.H * s.D), 0, s.H, s.H * s.D),
               .lse = statistic(),
               .first_key = first_key,
               .scale = 1 / std::sqrt(double(s.D)),
               .causal = s.causal};
        const AttnGrad g{.q = a.q,
                         .k = a.k,
                         .v = a.v,
                         .dout = heads(matrix(s.H * s.D), 0, s.H, s.H * s.D),
                         .lse = a.lse,
                         .delta = statistic(),
                         .dq = heads(grads, 0, s.H, packed),
                         .dk = heads(grads, s.H, s.Hk, packed),
                         .dv = heads(grads, s.H + s.Hk, s.Hk, packed),
                         .first_key = first_key,
                         .scale = a.scale,
                         .causal = s.causal,
                         .o = a.o};
        require(flash::forward_supported(a) && flash::backward_supported(g), Exit::usage,
                "this benchmark is for Hopper GPUs, and head dims of 128 or a multiple of 8 up to "
                "96");
        const int64_t bytes =
            std::max({flash::forward_workspace_bytes(s.B, s.S),
                      flash::backward_workspace_bytes(s.B, s.H, s.Hk, s.S, s.S, s.D),
                      cuda::cudnn_workspace_bytes({s.B, s.S, s.S, s.H, s.Hk, s.D})});
        stream_.workspace = Tensor(take(bytes), DType::u8, {bytes});
        cuda::check(cudaDeviceSynchronize(), "noise");
        return measure(s, 4.0 * double(s.H * s.D) * pairs, a, g);
    }

private:
    // Forward first: the backwards use its o and lse. flop: of a forward.
    Row measure(const Problem& s, double flop, const Attn& a, const AttnGrad& g) {
        const auto handle = static_cast<cudaStream_t>(stream_.handle);
        void* const workspace = stream_.workspace.data;
        Row row{s, 0, 0, 0, 0, 0};
        const auto delta = [&] { k_->attention_delta(stream_, g.delta, g.dout, a.o); };
        struct Rival {
            double* rate;
            double work;
            std::function<void()> run;
        };
        std::vector<Rival> rivals = {
            {&row.ours, flop, [&] { flash::forward(handle, a, workspace); }},
            {&row.plain, 2.5 * flop,
             [&] {
                 delta();
                 flash::backward(handle, g, workspace, /*deterministic=*/false, settings_.blocks);
             }},
            {&row.deterministic, 2.5 * flop, [&] {
                 delta();
                 flash::backward(handle, g, workspace, /*deterministic=*/true, settings_.blocks);
             }}};
        if (cudnn_ && s.documents == 0) {
            rivals.push_back({&row.cudnn, flop, [&] { cudnn_->forward(stream_, a, workspace); }});
            rivals.push_back({&row.cudnn_backward, 2.5 * flop,
                              [&] { cudnn_->backward(stream_, g, workspace); }});
            std::swap(rivals[1], rivals[3]);  // ours, cudnn, deterministic, plain, cudnn
        }
        for (int round = 0; round < settings_.rounds; ++round)
            for (const Rival& r : rivals) {
                if (round == 0) r.run();  // cuDNN makes its plan
                const double ms = burst_.median_ms(handle, r.run, settings_.burst_ms);
                *r.rate = std::max(*r.rate, r.work / ms * 1e-9);
            }
        return row;
    }

    Settings settings_;
    std::unique_ptr<Kernels> k_;
    std::unique_ptr<cuda::CudnnAttention> cudnn_;
    Stream stream_;
    Burst burst_;
};

void print(const Row& r) {
    const auto ratio = [](double ours, double theirs) {
        char text[16] = "";
        if (theirs > 0) std::snprintf(text, sizeof text, " (%.2f)", ours / theirs);
        return std::string(text);
    };
    const auto measured = [](double rate) {
        return rate > 0 ? std::to_string(std::lround(rate)) : std::string("-");
    };
    const Problem& s = r.shape;
    const std::string mask = s.documents ? concat("documents of ", s.documents)
                                         : std::string(s.causal ? "causal" : "full");
    std::printf("| %ld | %ld x %ld | %ld/%ld | %s | %.0f%s | %s | %.0f%s | %.0f%s | %s |\n",
                long(s.D), long(s.S), long(s.B), long(s.H), long(s.Hk), mask.c_str(), r.ours,
                ratio(r.ours, r.cudnn).c_str(), measured(r.cudnn).c_str(), r.plain,
                ratio(r.plain, r.cudnn_backward).c_str(), r.deterministic,
                ratio(r.deterministic, r.cudnn_backward).c_str(),
                measured(r.cudnn_backward).c_str());
    std::fflush(stdout);
}

// Time of packed documents over that of as many visible pairs at the causal rate.
void print_documents(const std::vector<Row>& rows) {
    for (const Row& r : rows)
        for (const Row& whole : rows)
            if (r.shape.documents && !whole.shape.documents && whole.shape.causal &&
                r.shape.D == whole.shape.D && r.shape.S == whole.shape.S)
                std::printf(
                    "D %ld, S %ld, documents of %ld: forward %.2f, backward %.2f plain, "
                    "%.2f deterministic times what their pairs take at the causal rate\n",
                    long(r.shape.D), long(r.shape.S), long(r.shape.documents), whole.ours / r.ours,
                    whole.plain / r.plain, whole.deterministic / r.deterministic);
}

void write_json(const std::string& path, const std::string& device, const std::vector<Row>& rows) {
    std::FILE* const f = std::fopen(path.c_str(), "w");
    require(f, Exit::io, path, ": cannot be written");
    std::fprintf(f, "{\"device\": \"%s\", \"cudnn\": \"%s\", \"unit\": \"TFLOP/s\", \"rows\": [",
                 device.c_str(), cudnn_version().c_str());
    for (const Row& r : rows) {
        const Problem& s = r.shape;
        std::fprintf(f,
                     "%s\n  {\"head_dim\": %ld, \"tokens\": %ld, \"batch\": %ld, \"heads\": %ld, "
                     "\"kv_heads\": %ld, \"causal\": %s, \"documents\": %ld, \"forward\": %.1f, "
                     "\"cudnn_forward\": "
                     "%.1f, \"backward_plain\": %.1f, \"backward_deterministic\": %.1f, "
                     "\"cudnn_backward\": %.1f}",
                     &r == rows.data() ? "" : ",", long(s.D), long(s.S), long(s.B), long(s.H),
                     long(s.Hk), s.causal ? "true" : "false", long(s.documents), r.ours, r.cudnn,
                     r.plain, r.deterministic, r.cudnn_backward);
    }
    std::fprintf(f, "\n]}\n");
    require(std::fclose(f) == 0, Exit::io, path, ": was not written whole");
}

Settings parse(int argc, char** argv) {
    Settings s;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        long D = 0, S = 0;
        char rest = 0;
        if (std::sscanf(argv[i], "%ld:%ld%c", &D, &S, &rest) == 2) {
            require(D > 0 && S > 0, Exit::usage, word, ": no such shape");
            const size_t before = s.chosen.size();
            std::copy_if(std::begin(shapes), std::end(shapes), std::back_inserter(s.chosen),
                         [&](auto& p) { return p.D == D && p.S == S; });
            const int64_t B = std::max(16384 / S, 1l), H = std::max(2048 / D, 1l);
            if (s.chosen.size() == before) s.chosen.push_back({D, S, B, H, H, true});
            continue;
        }
        const std::string value = i + 1 < argc ? argv[++i] : "";
        const bool blocks = word == "--blocks" && (value == "single" || value == "pairs");
        require(
            blocks || ((word == "--ms" || word == "--rounds" || word == "--json") && value != ""),
            Exit::usage,
            "usage: bench_attention [--ms N] [--rounds N] [--json FILE] "
            "[--blocks single|pairs] [D:S ...]");
        if (word == "--ms") s.burst_ms = std::atof(value.c_str());
        if (word == "--rounds") s.rounds = std::max(1, std::atoi(value.c_str()));
        if (word == "--json") s.json = value;
        if (blocks) s.blocks = value == "pairs" ? flash::Blocks::pairs : flash::Blocks::single;
    }
    if (s.chosen.empty()) s.chosen.assign(std::begin(shapes), std::end(shapes));
    return s;
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    try {
        const Settings settings = parse(argc, argv);
        Bench bench(settings);
        const std::string version = cudnn_version();
        std::printf("%s, cuDNN %s, bf16, TFLOP/s (ratio to cuDNN)\n", bench.device().c_str(),
                    version.empty() ? "none" : version.c_str());
        std::printf(
            "| D | S x B | heads | mask | forward | cuDNN | backward plain | deterministic "
            "| cuDNN |\n|---|---|---|---|---|---|---|---|---|\n");
        std::vector<Row> rows;
        for (const Problem& s : settings.chosen) {
            rows.push_back(bench.time(s));
            print(rows.back());
        }
        print_documents(rows);
        if (!settings.json.empty()) write_json(settings.json, bench.device(), rows);
    } catch (const Error& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return int(e.code);
    }
    return 0;
}
