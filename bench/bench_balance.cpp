// How evenly the modes of the ring family share the work of packed documents, counted, not timed:
// documents of log-normal length (spread 1) fill sequences of S tokens; per median length and
// number of ranks, the mean over 10 batches of
//   imbalance  most visible (query, key) of one rank over the mean of the ranks, of ring,
//              dist_flash, zigzag_ring with the placement it has without documents, and as it is
//   waits      the same of the time until all ranks are done, when ranks wait for each other as the
//              loop of comm/seq/ring.h makes them and messages take no time; zigzag before and
//              after
//   sent       keys that travel, over all steps and ranks, in S; zigzag before and after
//
//   bench_balance [BATCH [S]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench/documents.h"
#include "bench/help.h"
#include "comm/seq/balance.h"
#include "comm/seq/schedule.h"

using namespace torus;

namespace {

struct Batch {
    const int32_t* first_key;
    int64_t B, S;
};

// A step's exchange ends for a rank when all that it exchanges with have come to it; the step after
// the next may then begin.
double with_waits(const Table& table, const Batch& b) {
    const int P = int(table[0].size()), steps = int(table.size());
    std::vector<double> done(size_t(P), 0), arrived(size_t(P), 0);
    double total = 0;
    for (int t = 0; t < steps + 2; ++t) {
        std::vector<double> start(size_t(P), 0);
        for (size_t r = 0; r < start.size(); ++r) start[r] = std::max(done[r], arrived[r]);
        arrived = start;
        for (const int step : {t + 1, t - 1})
            for (int r = 0; step >= 0 && step < steps && r < P; ++r) {
                const Work& w = table[size_t(step)][size_t(r)];
                if (!w.fetches_keys(r)) continue;
                for (const auto& [a, c] : {std::pair(r, w.pair.k), std::pair(w.pair.k, r)})
                    arrived[size_t(a)] = std::max(arrived[size_t(a)], start[size_t(c)]);
            }
        for (size_t r = 0; r < start.size(); ++r) {
            done[r] = start[r];
            if (t >= steps) continue;
            for (const Piece& p : table[size_t(t)][r].pieces) {
                const double pairs = visible_pairs(p, b.first_key, b.B, b.S);
                done[r] += pairs;
                total += pairs;
            }
        }
    }
    return *std::max_element(done.begin(), done.end()) * P / total;
}

double keys_sent(const Table& table) {
    int64_t rows = 0;
    for (const auto& step : table)
        for (size_t r = 0; r < step.size(); ++r)
            if (step[r].fetches_keys(int(r))) rows += step[r].k_rows();
    return double(rows);
}

void row(double median, int P, int64_t B, int64_t S) {
    constexpr int batches = 10;
    double sum[8] = {};
    for (uint64_t seed = 0; seed < batches; ++seed) {
        const auto first = packed_documents(B, S, median, seed);
        const auto table = [&](const std::vector<Runs>& runs, const Schedule& schedule) {
            return make_table({runs, schedule}, true, first.data(), B, S);
        };
        const auto zigzag = zigzag_placement(S, P);
        const auto moved = balanced_placement(zigzag, first.data(), B, S);
        const Table ring = table(contiguous_placement(S, P), ring_schedule(P));
        const Table flash = table(halved_placement(S, P), dist_flash_schedule(P));
        const Table before = table(zigzag, ring_schedule(P));
        const Table after = table(moved, ring_schedule(P));
        const Batch b{first.data(), B, S};
        int i = 0;
        for (const Table* t : {&ring, &flash, &before, &after})
            sum[i++] += imbalance_of(*t, first.data(), B, S) / batches;
        for (const Table* t : {&before, &after}) sum[i++] += with_waits(*t, b) / batches;
        for (const Table* t : {&before, &after}) sum[i++] += keys_sent(*t) / double(S) / batches;
    }
    std::printf("%8.0f %3d   %5.2f %5.2f %5.2f %5.2f   %5.2f %5.2f   %6.2f %6.2f\n", median, P,
                sum[0], sum[1], sum[2], sum[3], sum[4], sum[5], sum[6], sum[7]);
}

}  // namespace

int main(int argc, char** argv) {
    if (printed_help(argc, argv)) return 0;
    const int64_t B = argc > 1 ? std::atoll(argv[1]) : 1,
                  S = argc > 2 ? std::atoll(argv[2]) : 65536;
    if (B < 1 || S < 1) {
        std::fprintf(stderr, "error: bench_balance [BATCH [S]]: numbers of 1 or more\n");
        return 64;
    }
    std::printf("B %lld, S %lld\n", static_cast<long long>(B), static_cast<long long>(S));
    std::printf("%8s %3s   %-23s   %-11s   %s\n", "", "", "imbalance", "waits", "sent");
    std::printf("%8s %3s   %5s %5s %5s %5s   %5s %5s   %6s %6s\n", "median", "P", "ring", "flash",
                "zig", "now", "zig", "now", "zig", "now");
    for (const double median : {500.0, 2000.0, 8000.0, 30000.0})
        for (const int P : {2, 4, 8, 16}) row(median, P, B, S);
    return 0;
}
