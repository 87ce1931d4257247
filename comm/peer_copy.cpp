#include "comm/peer_copy.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace torus {
namespace {

constexpr int64_t room = 64 << 10;  // bytes of one post: places of 2,600 messages between two ranks
// Streams for copies, the caller's among them. One already comes near the rate of a link; several
// let the copies to one peer go on while another peer is not ready.
constexpr int most_lanes = 4;
// Memory of a peer that stays open, whether it has been freed there or not. A run has one
// allocation; only tests and benches make many.
constexpr size_t most_open = 8;

struct Header {
    enum Kind : int32_t { places, done } kind;
    int32_t allocations;
    int64_t call, messages;
};

std::vector<Message> of_peer(std::span<const Message> all, int peer) {
    std::vector<Message> out;
    for (const Message& m : all)
        if (m.peer == peer && m.data.numel() > 0) out.push_back(m);
    return out;
}

template <class T>
void append(std::vector<char>& out, const T* values, size_t count) {
    const size_t at = out.size();
    out.resize(at + count * sizeof(T));
    if (count) std::memcpy(out.data() + at, values, count * sizeof(T));
}

}  // namespace

// Where a message is to be written.
struct PeerCopy::Piece {
    int64_t allocation;  // of those in the same post
    int64_t offset, bytes;
};

void agree_that_copies_work(Comm& host, const std::string& obstacle) {
    char mine[256] = "";
    obstacle.copy(mine, sizeof mine - 1);
    std::vector<char> all(sizeof mine * size_t(host.size()));
    Stream none;
    host.all_gather(none, Tensor(all.data(), DType::u8, {int64_t(all.size())}),
                    Tensor(mine, DType::u8, {sizeof mine}));
    for (size_t at = 0; at < all.size(); at += sizeof mine)
        require(all[at] == '\0', Exit::usage, "--exchange copy: ", &all[at],
                "; use --exchange nccl");
}

PeerCopy::PeerCopy(std::unique_ptr<Comm> host, std::unique_ptr<PeerDevice> device)
    : host_(std::move(host)),
      device_(std::move(device)),
      mailbox_(*host_, room),
      rank_(host_->rank()),
      size_(host_->size()),
      opened_(size_t(size_)) {
    agree_that_copies_work(
        *host_, mailbox_.works() ? "" : "the ranks cannot share memory (is /dev/shm full?)");
}

PeerCopy::~PeerCopy() {
    if (std::uncaught_exceptions() > 0) {  // others may never come here: leave it to the process
        mailbox_.stop();
        return;
    }
    try {
        device_->synchronize();
        for (int peer = 0; peer < size_; ++peer)
            for (const Opened& o : opened_[size_t(peer)]) device_->close(peer, o.base);
        device_->disconnect();
        Stream none;
        host_->barrier(none);
    } catch (const Error&) {
        mailbox_.stop();
    }
}

void PeerCopy::exchange(Stream& s, std::span<const Message> sends, std::span<const Message> recvs) {
    ++call_;
    try {
        run(s, sends, recvs);
    } catch (...) {
        mailbox_.stop();
        throw;
    }
}

// Every rank posts before it waits for a post, so nobody waits in a circle.
void PeerCopy::run(Stream& s, std::span<const Message> sends, std::span<const Message> recvs) {
    std::vector<std::vector<Message>> out, in;
    bool any = false;
    for (int peer = 0; peer < size_; ++peer) {
        out.push_back(peer == rank_ ? std::vector<Message>() : of_peer(sends, peer));
        in.push_back(peer == rank_ ? std::vector<Message>() : of_peer(recvs, peer));
        any = any || !out.back().empty() || !in.back().empty();
    }
    if (!any) return;

    device_->record(s, rank_);  // ready
    for (int peer = 0; peer < size_; ++peer)
        if (!in[size_t(peer)].empty()) post_places(peer, in[size_t(peer)]);

    // From the next rank on, so that not all write to the same one.
    int lane = 0;
    std::vector<int> elsewhere;  // peers whose copies are not on s
    for (int i = 1; i < size_; ++i) {
        const int peer = (rank_ + i) % size_;
        if (out[size_t(peer)].empty()) continue;
        if (lane == 0) {
            send(s, peer, out[size_t(peer)]);
        } else {
            Stream& aside = device_->lane(lane);
            device_->wait(aside, rank_, rank_);
            send(aside, peer, out[size_t(peer)]);
            elsewhere.push_back(peer);
        }
        lane = (lane + 1) % most_lanes;
    }
    for (const int peer : elsewhere) device_->wait(s, rank_, peer);

    for (int i = 1; i < size_; ++i) {
        const int peer = (rank_ + size_ - i) % size_;
        if (in[size_t(peer)].empty()) continue;
        Header h{};
        mailbox_.take(peer, &h, sizeof h);
        CHECK(h.kind == Header::done && h.call == call_, ": in exchange ", call_, " rank ", rank_,
              " waits for ", in[size_t(peer)].size(), " messages that rank ", peer,
              " does not send (its post is of exchange ", h.call, ")");
        device_->wait(s, peer, rank_);
    }
}

void PeerCopy::post_places(int to, std::span<const Message> recvs) {
    std::vector<PeerDevice::Allocation> allocations;
    std::vector<Piece> pieces;
    for (const Message& m : recvs) {
        char* const data = static_cast<char*>(m.data.data);
        auto at = std::find_if(allocations.begin(), allocations.end(),
                               [&](const auto& a) { return a.holds(data); });
        if (at == allocations.end()) at = allocations.insert(at, device_->allocation_of(data));
        const int64_t offset = data - at->base, bytes = m.data.bytes();
        CHECK(offset >= 0 && offset + bytes <= at->bytes, ": a message of ", bytes,
              " bytes leaves its allocation of ", at->bytes);
        pieces.push_back({at - allocations.begin(), offset, bytes});
    }
    const Header header{Header::places, int32_t(allocations.size()), call_, int64_t(pieces.size())};
    std::vector<char> post;
    append(post, &header, 1);
    append(post, allocations.data(), allocations.size());
    append(post, pieces.data(), pieces.size());
    CHECK(int64_t(post.size()) <= mailbox_.room(), ": ", pieces.size(),
          " messages from one rank to another in one exchange; --exchange nccl has no limit");
    mailbox_.post(to, post.data(), int64_t(post.size()));
}

// Where each of the messages goes, as an address here.
std::vector<char*> PeerCopy::take_places(int from, std::span<const Message> sends) {
    Header h{};
    mailbox_.take(from, &h, sizeof h);
    CHECK(h.kind == Header::places && h.call == call_, ": in exchange ", call_, " rank ", rank_,
          " sends ", sends.size(), " messages to rank ", from,
          ", which expects none (its post is of exchange ", h.call, ")");
    CHECK(h.messages == int64_t(sends.size()), ": rank ", rank_, " sends ", sends.size(),
          " messages to rank ", from, ", which expects ", h.messages);
    std::vector<PeerDevice::Allocation> allocations(static_cast<size_t>(h.allocations));
    mailbox_.take(from, allocations.data(), int64_t(allocations.size() * sizeof allocations[0]));
    std::vector<Piece> pieces(sends.size());
    mailbox_.take(from, pieces.data(), int64_t(pieces.size() * sizeof pieces[0]));
    std::vector<char*> bases, places;
    for (const auto& a : allocations) bases.push_back(opened(from, a));
    for (size_t i = 0; i < sends.size(); ++i) {
        CHECK(pieces[i].bytes == sends[i].data.bytes(), ": rank ", rank_, " sends ",
              sends[i].data.bytes(), " bytes (", sends[i].data.shape.str(), ") to rank ", from,
              ", which expects ", pieces[i].bytes);
        places.push_back(bases.at(size_t(pieces[i].allocation)) + pieces[i].offset);
    }
    return places;
}

char* PeerCopy::opened(int peer, const PeerDevice::Allocation& wanted) {
    auto& all = opened_[size_t(peer)];
    for (Opened& o : all)
        if (o.allocation.id == wanted.id) {
            o.last_call = call_;
            return o.base;
        }
    for (auto o = all.begin(); o != all.end();) {
        const PeerDevice::Allocation& a = o->allocation;
        const bool freed = a.base < wanted.base + wanted.bytes && wanted.base < a.base + a.bytes;
        if (freed)
            o = close(peer, o);
        else
            ++o;
    }
    const auto oldest = std::min_element(
        all.begin(), all.end(),
        [](const Opened& a, const Opened& b) { return a.last_call < b.last_call; });
    if (all.size() >= most_open && oldest->last_call < call_) close(peer, oldest);
    all.push_back({wanted, device_->open(peer, wanted), call_});
    return all.back().base;
}

std::vector<PeerCopy::Opened>::iterator PeerCopy::close(int peer, std::vector<Opened>::iterator o) {
    device_->synchronize();  // copies into it may be queued
    device_->close(peer, o->base);
    return opened_[size_t(peer)].erase(o);
}

void PeerCopy::send(Stream& s, int to, std::span<const Message> messages) {
    const std::vector<char*> places = take_places(to, messages);
    device_->wait(s, to, to);  // the receiver's "ready"
    for (size_t i = 0; i < messages.size(); ++i)
        device_->copy(s, places[i], messages[i].data.data, messages[i].data.bytes());
    device_->record(s, to);  // done
    const Header done{Header::done, 0, call_, 0};
    mailbox_.post(to, &done, sizeof done);
}

}  // namespace torus
