// Ranks compare with rank 0: it broadcasts its facts as one text, the others look for the first
// difference, and the lowest rank that has one tells everybody.
#include "comm/handshake.h"

#include <algorithm>

namespace torus {
namespace {

// Collective: the text of rank `root`, on every rank.
std::string broadcast_text(Comm& host, std::string text, int root) {
    Stream none;
    int64_t length = int64_t(text.size());
    host.broadcast(none, Tensor(&length, DType::i64, {1}), root);
    text.resize(size_t(length));
    host.broadcast(none, Tensor(text.data(), DType::u8, {length}), root);
    return text;
}

// Keys and values may hold any byte: each is written as its length, a blank, and the bytes.
std::string pack(const Facts& facts) {
    std::string text;
    for (const auto& [key, value] : facts)
        text += concat(key.size(), ' ', key, value.size(), ' ', value);
    return text;
}

Facts unpack(const std::string& text) {
    Facts facts;
    size_t at = 0;
    const auto next = [&] {
        const size_t blank = text.find(' ', at);
        CHECK(blank != std::string::npos);
        const size_t length = std::stoull(text.substr(at, blank - at));
        CHECK(length <= text.size() - blank - 1);
        at = blank + 1 + length;
        return text.substr(blank + 1, length);
    };
    while (at < text.size()) {
        std::string key = next();
        facts.emplace_back(std::move(key), next());
    }
    return facts;
}

std::string first_difference(const Facts& a, const Facts& b, int b_rank) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (a[i] == b[i]) continue;
        if (a[i].first != b[i].first)
            return concat("rank 0 has ", a[i].first, " where rank ", b_rank, " has ", b[i].first);
        return concat(a[i].first, " is ", a[i].second, " on rank 0 but ", b[i].second, " on rank ",
                      b_rank);
    }
    if (a.size() == b.size()) return {};
    const bool more = a.size() > b.size();
    return concat(more ? a[b.size()].first : b[a.size()].first, " is there only on rank ",
                  more ? 0 : b_rank);
}

}  // namespace

void handshake(Comm& host, const Facts& facts) {
    const Facts zero = unpack(broadcast_text(host, pack(facts), 0));
    std::string difference = first_difference(zero, facts, host.rank());
    int32_t teller = difference.empty() ? host.size() : host.rank();
    Stream none;
    host.all_reduce(none, Tensor(&teller, DType::i32, {1}), Reduce::min);
    if (teller == host.size()) return;
    difference = broadcast_text(host, difference, teller);
    fail(Exit::mismatch, "ranks disagree: ", difference,
         "; start all ranks with the same program, flags and files");
}

}  // namespace torus
