// Schedules and pieces; pure functions.
#include "comm/seq/schedule.h"

#include <algorithm>

namespace torus {

Schedule ring_schedule(int P) {
    Schedule steps;
    for (int t = 0; t < P; ++t) {
        std::vector<Pair> ranks;
        for (int r = 0; r < P; ++r) ranks.push_back({r, (r - t + P) % P});
        steps.push_back(ranks);
    }
    return steps;
}

Schedule dist_flash_schedule(int P) {
    Schedule steps;
    for (int t = 0; t <= P / 2; ++t) {
        std::vector<Pair> ranks;
        for (int r = 0; r < P; ++r) {
            const bool shared = 2 * t == P;  // distances t and P - t are the same pairs
            if (r >= t) {
                ranks.push_back({r, r - t, shared ? Part::late_runs : Part::all});
            } else {
                ranks.push_back({r + P - t, r, shared ? Part::early_runs : Part::all});
            }
        }
        steps.push_back(ranks);
    }
    return steps;
}

std::vector<Piece> pieces_of(const Runs& q, const Runs& k, Part part, bool masked,
                             const int32_t* first_key, int64_t B, int64_t S) {
    std::vector<Piece> pieces;
    if (q == k && part == Part::all && !masked) {
        const int64_t n = count_tokens(q);
        if (n > 0) pieces.push_back({0, n, 0, 0, n, 0, true});
        return pieces;
    }
    int64_t q_row = 0;
    for (size_t run = 0; run < q.size(); q_row += q[run].count, ++run) {
        if (part != Part::all && (run < q.size() / 2) != (part == Part::early_runs)) continue;
        int64_t first = 0;  // the first key that any query of this run sees
        if (first_key) {
            first = S;
            for (int64_t b = 0; b < B; ++b) {
                const int32_t* row = first_key + b * S + q[run].begin;
                first = std::min(first, int64_t(*std::min_element(row, row + q[run].count)));
            }
        }
        const size_t before = pieces.size();
        int64_t k_row = 0;
        for (const TokenRun& keys : k) {
            const int64_t begin = std::max(keys.begin, first);
            const int64_t end = std::min(keys.end(), q[run].end());
            const int64_t row = k_row + begin - keys.begin;
            k_row += keys.count;
            if (begin >= end) continue;
            const bool causal = end - 1 > q[run].begin;
            Piece* last = pieces.size() == before ? nullptr : &pieces.back();
            const bool next_row = last && last->k_row + last->k_rows == row;
            const bool next_key = next_row && last->k0 + last->k_rows == begin;
            if (next_key || (next_row && !masked && !causal && !last->causal)) {
                last->k_rows += end - begin;
                last->causal = last->causal || causal;
            } else {
                pieces.push_back({.q_row = q_row,
                                  .q_rows = q[run].count,
                                  .q0 = q[run].begin,
                                  .k_row = row,
                                  .k_rows = end - begin,
                                  .k0 = begin,
                                  .causal = causal});
            }
        }
        // This run's only piece may go on from the one before it.
        if (masked || before == 0 || pieces.size() != before + 1) continue;
        Piece &last = pieces[before - 1], &now = pieces[before];
        if (last.causal || now.causal || last.q_row + last.q_rows != now.q_row ||
            last.k_row != now.k_row || last.k_rows != now.k_rows)
            continue;
        last.q_rows += now.q_rows;
        pieces.pop_back();
    }
    return pieces;
}

double visible_pairs(const Piece& p, const int32_t* first_key, int64_t B, int64_t S) {
    double sum = 0;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t i = p.q0; i < p.q0 + p.q_rows; ++i) {
            const int64_t first = first_key ? std::max<int64_t>(first_key[b * S + i], p.k0) : p.k0;
            const int64_t end = p.causal ? std::min(p.k0 + p.k_rows, i + 1) : p.k0 + p.k_rows;
            sum += double(std::max<int64_t>(end - first, 0));
        }
    return sum;
}

namespace {

// The union of the pieces' rows of keys.
std::vector<Span> key_spans(const std::vector<Piece>& pieces) {
    std::vector<Span> all, spans;
    for (const Piece& p : pieces) all.push_back({p.k_row, p.k_rows, 0});
    std::sort(all.begin(), all.end(), [](const Span& a, const Span& b) { return a.row < b.row; });
    for (const Span& s : all) {
        Span* last = spans.empty() ? nullptr : &spans.back();
        if (last && s.row <= last->row + last->rows) {
            last->rows = std::max(last->rows, s.row + s.rows - last->row);
        } else {
            spans.push_back({s.row, s.rows, last ? last->at + last->rows : 0});
        }
    }
    return spans;
}

}  // namespace

int64_t Work::in_block(int64_t k_row) const {
    for (const Span& s : keys)
        if (k_row >= s.row && k_row < s.row + s.rows) return s.at + k_row - s.row;
    fail(Exit::internal, "row ", k_row, " does not travel");
}

Table make_table(const RingPlan& plan, bool masked, const int32_t* first_key, int64_t B,
                 int64_t S) {
    Table table;
    for (const auto& step : plan.schedule) {
        std::vector<Work> ranks;
        for (const Pair& pair : step) {
            Work w;
            w.pair = pair;
            if (pair)
                w.pieces = pieces_of(plan.runs[size_t(pair.q)], plan.runs[size_t(pair.k)],
                                     pair.part, masked, first_key, B, S);
            w.keys = key_spans(w.pieces);
            if (w) w.q_lo = w.pieces[0].q_row;
            for (const Piece& p : w.pieces) {
                w.q_hi = std::max(w.q_hi, p.q_row + p.q_rows);
            }
            ranks.push_back(std::move(w));
        }
        table.push_back(std::move(ranks));
    }
    return table;
}

Extent extent_of(const Table& table, int rank) {
    Extent most;
    for (const auto& step : table) {
        const Work& mine = step[size_t(rank)];
        if (mine.fetches_keys(rank)) most.keys = std::max(most.keys, mine.k_rows());
        if (mine.helps(rank)) most.queries = std::max(most.queries, mine.q_rows());
        most.remote_steps += mine.fetches_keys(rank) || mine.helps(rank);
        int fetched = 0, helped = 0;
        for (int x = 0; x < int(step.size()); ++x) {
            const Work& w = step[size_t(x)];
            if (w.fetches_keys(x) && w.pair.k == rank) {
                most.home_keys = std::max(most.home_keys, w.k_rows());
                ++fetched;
            }
            if (w.helps(x) && w.pair.q == rank) {
                most.home_queries = std::max(most.home_queries, w.q_rows());
                ++helped;
            }
        }
        CHECK(fetched <= 1 && helped <= 1, ": one buffer receives what comes home in a step");
    }
    return most;
}

double imbalance_of(const Table& table, const int32_t* first_key, int64_t B, int64_t S) {
    std::vector<double> work(table[0].size(), 0.0);
    for (const auto& step : table)
        for (size_t r = 0; r < step.size(); ++r)
            for (const Piece& p : step[r].pieces) work[r] += visible_pairs(p, first_key, B, S);
    double most = 0, sum = 0;
    for (double w : work) {
        most = std::max(most, w);
        sum += w;
    }
    return sum > 0 ? most * double(work.size()) / sum : 1.0;
}

Share share_of(Share all, bool late) {
    const auto cut = [&](auto& begin, auto& end, auto held_back) {
        (late ? begin : end) = end - held_back;
        return all;
    };
    if (all.piece_end - all.piece > 1) return cut(all.piece, all.piece_end, size_t(1));
    if (all.batch_end - all.batch > 1) return cut(all.batch, all.batch_end, int64_t(1));
    return cut(all.head, all.head_end, (all.head_end - all.head + 2) / 4);
}

}  // namespace torus
