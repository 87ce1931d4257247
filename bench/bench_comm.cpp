// What the links between ranks carry: GB/s that leave each rank, and as many that come to it, for
// the exchanges that training makes. A buffer is M bytes on each of P ranks; counted is
//   exchange        M: all of it to the next rank of a ring, as much from the one before
//   all-to-all      M (P-1)/P: a part to every other rank
//   all-gather      M (P-1)/P: the parts of the other ranks (NCCL's "bus bandwidth")
//   reduce-scatter  the same
//   all-reduce      2 M (P-1)/P: a reduce-scatter and an all-gather
//   peer-copy       M, written by a plain copy into the next rank's memory: direct where NCCL has
//                   turned peer access on, else through the host; with --threads only, where a
//                   rank may know an address of another one's
// Elements are fp32. Each result is checked first: what is wrong has no rate. A time is one call
// and the wait for it on the slowest rank, the median of the repeats, so small buffers show
// latency.
//
//   bench_comm [--ranks N | --threads N] [--device cpu|cuda] [--bytes M] [--repeats R]
//   [--exchange auto|nccl|copy]
//
// --bytes: one size, in place of the table's; cut to equal parts. --ranks: processes of mpirun;
// --threads: threads of this process. Either has a GPU per rank. --exchange: what carries exchange
// and all-to-all between GPUs; the others are NCCL's.
#include <algorithm>
#include <functional>

#include "bench/help.h"
#include "bench/ranks.h"

using namespace torus;

namespace {

struct Settings {
    RankSettings ranks;
    int64_t bytes = 0;  // 0 = several sizes
    int repeats = 10;
};

Settings parse(int argc, char** argv) {
    Settings s;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        require(i + 1 < argc, Exit::usage, flag, ": needs a value");
        const std::string value = argv[++i];
        if (parse_rank_flag(flag, value, s.ranks)) continue;
        const int64_t number = whole_number(flag, value);
        require(number > 0 && number < int64_t(1) << 40, Exit::usage, flag, " ", value,
                ": must be from 1 to 2^40");
        if (flag == "--bytes")
            s.bytes = number;
        else if (flag == "--repeats")
            s.repeats = int(std::min<int64_t>(number, 1 << 20));
        else
            fail(Exit::usage, flag, ": unknown; see the head of bench/bench_comm.cpp");
    }
    return s;
}

// Element i of rank r's buffer. Sums over ranks are exact in fp32.
float element(int64_t r, int64_t i) { return float((i + 31 * r) % 251); }

struct Op {
    const char* name;
    double sent;      // bytes that leave a rank, of the buffer's
    int64_t results;  // elements at the start of `out` that the call writes
    std::function<void()> call;
    std::function<float(int64_t)> want;  // element i of the result
};

// The buffers of one rank and what is done with them.
class Links {
public:
    Links(Kernels& k, Comm& device, Comm& host, int64_t elements)
        : k_(k.device()),
          device_(device),
          host_(host),
          n_(elements),
          in_memory_(k_, Memory::device, 4 * n_),
          out_memory_(k_, Memory::device, 4 * n_),
          in_(in_memory_.data(), DType::f32, {n_}),
          out_(out_memory_.data(), DType::f32, {n_}),
          values_(size_t(n_)),
          s_(k_.make_stream()) {
        for (int64_t i = 0; i < n_; ++i) values_[size_t(i)] = element(host_.rank(), i);
        k_.copy(s_, in_.data, values_.data(), in_.bytes());
        wait();
    }
    ~Links() { k_.destroy(s_); }
    Links(const Links&) = delete;
    Links& operator=(const Links&) = delete;

    // `neighbour`: the address of the next rank's `out`, or null.
    std::vector<Op> ops(void* neighbour) {
        const int64_t P = host_.size(), r = host_.rank(), before = (r + P - 1) % P, part = n_ / P;
        const double others = double(P - 1) / double(P);
        const auto sum = [P](int64_t i) {
            float x = 0;
            for (int64_t q = 0; q < P; ++q) x += element(q, i);
            return x;
        };
        const Tensor in_part = in_.slice(0, 0, part), out_part = out_.slice(0, 0, part);
        const auto from_before = [before](int64_t i) { return element(before, i); };
        std::vector<Op> list = {
            {"exchange", 1, n_, [this] { device_.shift(s_, out_, in_); }, from_before},
            {"all-to-all", others, n_,
             [this, counts = std::vector<int64_t>(size_t(P), part)] {
                 device_.all_to_all(s_, out_, counts, in_, counts);
             },
             [r, part](int64_t i) { return element(i / part, r * part + i % part); }},
            {"all-gather", others, n_, [=, this] { device_.all_gather(s_, out_, in_part); },
             [part](int64_t i) { return element(i / part, i % part); }},
            {"reduce-scatter", others, part,
             [=, this] { device_.reduce_scatter(s_, out_part, in_); },
             [=](int64_t i) { return sum(r * part + i); }},
            {"all-reduce", 2 * others, n_, [this] { device_.all_reduce(s_, out_); }, sum}};
        if (neighbour)
            list.push_back({"peer-copy", 1, n_,
                            [=, this] { k_.copy(s_, neighbour, in_.data, in_.bytes()); },
                            from_before});
        return list;
    }

    void check(const Op& op) {
        time(op);
        k_.copy(s_, values_.data(), out_.data, 4 * op.results);
        wait();
        for (int64_t i = 0; i < op.results; ++i)
            require(values_[size_t(i)] == op.want(i), Exit::internal, op.name, " of ", 4 * n_,
                    " bytes: wrong result at element ", i, ": ", values_[size_t(i)], ", not ",
                    op.want(i));
        Stream none;
        host_.barrier(none);  // before anyone writes to another one's `out` again
    }

    double rate(const Op& op, int repeats) {
        std::vector<double> ms;
        for (int i = 0; i < repeats; ++i) ms.push_back(time(op));
        std::nth_element(ms.begin(), ms.begin() + repeats / 2, ms.end());
        return op.sent * double(4 * n_) / ms[size_t(repeats / 2)] * 1e-6;
    }

    // Where the next rank's `out` lies.
    void* neighbour() {
        const int P = host_.size();
        std::vector<int64_t> all(static_cast<size_t>(P));
        int64_t mine = reinterpret_cast<int64_t>(out_.data);
        Stream none;
        host_.all_gather(none, Tensor(all.data(), DType::i64, {P}), Tensor(&mine, DType::i64, {1}));
        return reinterpret_cast<void*>(all[size_t((host_.rank() + 1) % P)]);
    }

private:
    double time(const Op& op) {
        k_.copy(s_, out_.data, in_.data, in_.bytes());  // all-reduce starts from it
        return slowest_ms(host_, op.call, [&] { wait(); });
    }
    void wait() { k_.synchronize(s_); }

    Device& k_;
    Comm &device_, &host_;
    int64_t n_;
    Buffer in_memory_, out_memory_;
    Tensor in_, out_;
    std::vector<float> values_;  // on the host
    Stream s_;
};

// Collective over the ranks.
void bench(const Settings& settings, Kernels& k, Comm& device, Comm& host) {
    const int P = host.size();
    const bool speaks = host.rank() == 0, cuda = settings.ranks.device == "cuda";
    require(settings.ranks.played == 0, Exit::usage, "--play: ranks on one GPU have no links");
    require(P > 1, Exit::usage, "one rank has no links; give --ranks N or --threads N, 2 or more");
    std::vector<int64_t> sizes = {int64_t(1) << 16, 1 << 20, 16 << 20};
    if (cuda) sizes = {1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30};
    if (settings.bytes) sizes = {settings.bytes};
    if (speaks)
        std::printf("%d x %s, fp32: GB/s each way and rank%s\n", P, k.device().name().c_str(),
                    device.by_copy_engines() ? ", exchange copy" : "");
    for (const int64_t bytes : sizes) {
        const int64_t elements = bytes / 4 / P * P;
        require(elements > 0, Exit::usage, "--bytes ", bytes, ": give ", 4 * P,
                " or more, an element for each rank");
        Links links(k, device, host, elements);
        const auto ops = links.ops(settings.ranks.threads > 0 ? links.neighbour() : nullptr);
        if (speaks && bytes == sizes.front()) {
            std::printf("%12s", "bytes");
            for (const Op& op : ops) std::printf(" %14s", op.name);
            std::printf("\n");
        }
        if (speaks) std::printf("%12lld", static_cast<long long>(4 * elements));
        for (const Op& op : ops) {
            links.check(op);
            const double rate = links.rate(op, settings.repeats);
            if (speaks) std::printf(" %14.3f", rate);
        }
        if (speaks) std::printf("\n");
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    try {
        const Settings settings = parse(argc, argv);
        run_on_ranks(settings.ranks, argc, argv, [&](Kernels& k, Comm& device, Comm& host) {
            bench(settings, k, device, host);
        });
        return 0;
    } catch (const Error& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        exit_all_ranks(e.code);
    }
}
