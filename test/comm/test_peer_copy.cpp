// exchange() by copies into other ranks' memory: the mailbox, and the protocol on a device of host
// memory whose streams are late at odd times (fake_device.h); threads, and processes under mpirun
// ("mpi:").
#include "comm/peer_copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/rng.h"
#include "test/comm/fake_device.h"
#include "test/comm/ranks.h"
#include "test/test.h"

namespace torus {
namespace {

void must(bool ok, const std::string& what) { require(ok, Exit::internal, what); }

uint64_t random_number(uint64_t seed, uint64_t stream, uint64_t i, uint64_t below) {
    return uint64_t(random_uniform(seed, stream, i) * double(below));
}

// Bytes of the messages that rank a sends to rank b in a call, empty ones too: any rank knows them.
std::vector<int64_t> sizes_of(int call, int a, int b, int P) {
    const uint64_t seed = uint64_t(call), pair = uint64_t(a * 100 + b);
    const bool neighbours = call % 5 == 1, nobody = call % 7 == 3;
    if (nobody || (neighbours && b != (a + 1) % P)) return {};
    if (!neighbours && random_number(seed, pair, 0, 10) < 4) return {};
    std::vector<int64_t> sizes(1 + random_number(seed, pair, 1, call % 11 == 5 ? 300 : 3));
    for (size_t i = 0; i < sizes.size(); ++i)
        sizes[i] = int64_t(random_number(seed, pair, 2 + 2 * i, 4)
                               ? random_number(seed, pair, 3 + 2 * i, sizes.size() > 3 ? 40 : 5000)
                               : 0);
    return sizes;
}

int64_t bytes_of(int call, int a, int b, int P) {
    int64_t sum = 0;
    for (const int64_t n : sizes_of(call, a, b, P)) sum += n;
    return sum;
}

char code(int call, int a, int b, size_t message, int64_t i) {
    return char(call * 7 + a * 31 + b * 17 + int(message) * 5 + int(i % 251));
}

constexpr int64_t arena_bytes = 1 << 18;

// One rank's messages of a call, in two allocations: sends in one, receives in the other.
struct Traffic {
    struct Part {
        char* data;
        int64_t bytes;
        int peer;
        size_t number;  // of the messages of the pair
    };
    std::vector<Part> out, in;
    static std::vector<Message> messages(const std::vector<Part>& parts) {
        std::vector<Message> list;
        for (const Part& p : parts) list.push_back({p.peer, Tensor(p.data, DType::u8, {p.bytes})});
        return list;
    }
};

Traffic make_traffic(int call, int me, int P, char* send_arena, char* recv_arena) {
    Traffic t;
    const auto lay_out = [&](char* arena, bool sends) {
        std::vector<Traffic::Part> parts;
        int64_t at = 64 * (call % 5);
        size_t most = 0;
        for (int peer = 0; peer < P; ++peer)
            most = std::max(most, sizes_of(call, sends ? me : peer, sends ? peer : me, P).size());
        // Message by message, so that those of the pairs are mixed in the list.
        for (size_t number = 0; number < most; ++number)
            for (int peer = 0; peer < P; ++peer) {
                const auto sizes = sizes_of(call, sends ? me : peer, sends ? peer : me, P);
                if (peer == me || number >= sizes.size()) continue;
                if (sizes[number] == 0 && (call + peer) % 2) continue;  // may be left out
                parts.push_back({arena + at, sizes[number], peer, number});
                at += sizes[number];
                must(at <= arena_bytes, "the test's arena is too small");
            }
        return parts;
    };
    t.out = lay_out(send_arena, true);
    t.in = lay_out(recv_arena, false);
    return t;
}

// Queued before and after each exchange: what is sent is written late and spoiled at once, what is
// received is looked at late and spoiled, too. Nothing but the streams' order keeps them apart.
void check_patterns(Comm& world, int calls) {
    const int P = world.size(), me = world.rank();
    auto device = std::make_unique<FakeDevice>(world, uint64_t(me));
    FakeDevice& d = *device;
    char* send_arena = d.allocate(arena_bytes);
    char* recv_arena = d.allocate(arena_bytes);
    std::vector<int64_t> ready(static_cast<size_t>(P), 0);
    std::vector<std::string> failures;
    {
        PeerCopy copies(world.split(0, me, "copies"), std::move(device));
        for (int call = 1; call <= calls; ++call) {
            for (int r = 0; r < P; ++r) {
                bool busy = false;
                for (int peer = 0; peer < P; ++peer)
                    busy = busy || (peer != r &&
                                    bytes_of(call, r, peer, P) + bytes_of(call, peer, r, P) > 0);
                ready[size_t(r)] += busy;
            }
            d.expected_ready = ready;
            const Traffic t = make_traffic(call, me, P, send_arena, recv_arena);
            d.later(d.stream(), [=] {
                for (const auto& p : t.out)
                    for (int64_t i = 0; i < p.bytes; ++i)
                        p.data[i] = code(call, me, p.peer, p.number, i);
            });
            copies.exchange(d.stream(), Traffic::messages(t.out), Traffic::messages(t.in));
            d.later(d.stream(), [=, &d] {
                std::memset(send_arena, 0x5a, 4096);
                for (const auto& p : t.out) std::memset(p.data, 0x5a, size_t(p.bytes));
                for (const auto& p : t.in)
                    for (int64_t i = 0; i < p.bytes; ++i) {
                        if (p.data[i] == code(call, p.peer, me, p.number, i)) continue;
                        d.fail(concat("call ", call, ": wrong byte ", i, " of message ", p.number,
                                      " from rank ", p.peer));
                        break;
                    }
                for (const auto& p : t.in) std::memset(p.data, 0xa5, size_t(p.bytes));
            });
            if (call % 8 == 0) {  // new memory, at the old address and elsewhere
                d.synchronize();
                recv_arena = d.allocate(arena_bytes, call % 16 ? recv_arena : nullptr);
            }
        }
        d.synchronize();
        failures = d.failures();
        must(P == 1 || d.opens > calls / 8, "memory that was made anew was not opened");
        must(d.opens - d.closes <= 8 * (P - 1), "memory of others stays open");
    }
    must(failures.empty(), failures.empty() ? "" : failures.front());
}

// What two ranks that do not agree are told.
std::string mismatch(const std::function<void(Comm&, PeerCopy&, FakeDevice&, char*)>& body) {
    try {
        run_ranks(2, [&](Comm& c) {
            auto device = std::make_unique<FakeDevice>(c, uint64_t(c.rank()));
            FakeDevice& d = *device;
            char* const arena = d.allocate(4096);
            PeerCopy copies(c.split(0, c.rank(), "copies"), std::move(device));
            body(c, copies, d, arena);
        });
    } catch (const Error& e) {
        EXPECT(e.code == Exit::internal);
        return e.what();
    }
    return "no error";
}

bool contains(const std::string& text, const std::string& part) {
    CAPTURE(text);
    EXPECT(text.find(part) != std::string::npos);
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("shared memory: what one rank writes the others see") {
    run_ranks(3, [](Comm& c) {
        SharedMemory memory(c, 3 * 4096);
        must(memory.shared(), "not shared");
        int* const numbers = static_cast<int*>(memory.data());
        must(numbers[1024 * c.rank()] == 0, "not zero");
        numbers[1024 * c.rank()] = c.rank() + 1;
        Stream s;
        c.barrier(s);
        for (int r = 0; r < 3; ++r) must(numbers[1024 * r] == r + 1, "another number");
    });
}

TEST_CASE("mailbox: any lengths, in order, round and round") {
    const auto byte = [](int from, int to, int64_t i) { return char(from * 5 + to + i * 3); };
    const auto talk = [&](Mailbox& box, int me, int P) {
        std::vector<int64_t> at(static_cast<size_t>(P), 0);
        for (uint64_t n = 0; n < 4000; ++n) {
            const int64_t bytes = int64_t(random_number(4, 0, n, 100)) + 1;
            std::vector<char> text(static_cast<size_t>(bytes));
            for (int to = 0; to < P; ++to) {
                if (to == me) continue;
                for (int64_t i = 0; i < bytes; ++i)
                    text[size_t(i)] = byte(me, to, at[size_t(me)] + i);
                box.post(to, text.data(), bytes);
            }
            at[size_t(me)] += bytes;
            for (int from = 0; from < P; ++from) {
                if (from == me) continue;
                const int64_t first = bytes / 3;  // a post may be taken in parts
                box.take(from, text.data(), first);
                box.take(from, text.data() + first, bytes - first);
                for (int64_t i = 0; i < bytes; ++i)
                    must(text[size_t(i)] == byte(from, me, at[size_t(from)] + i), "another byte");
                at[size_t(from)] += bytes;
            }
        }
    };
    for (const int P : {2, 4})
        run_ranks(P, [&](Comm& c) {
            Mailbox box(c, 100);
            must(box.works(), "no shared memory");
            try {
                talk(box, c.rank(), P);
            } catch (const Error&) {
                box.stop();
                throw;
            }
        });
}

TEST_CASE("mailbox: a post that is too long, and a rank that stops") {
    EXPECT_THROWS_AS(run_ranks(1,
                               [](Comm& c) {
                                   Mailbox box(c, 100);
                                   char text[101] = "";
                                   box.post(0, text, 101);
                               }),
                     Error);
    run_ranks(3, [](Comm& c) {
        Mailbox box(c, 100);
        Stream s;
        char text[80] = "here";
        if (c.rank() == 2) {
            box.post(0, text, 5);
            box.stop();  // what was posted before is still taken
            return c.barrier(s);
        }
        if (c.rank() == 0) {
            box.take(2, text, 5);
            must(std::string(text) == "here", "the last post");
        }
        try {
            if (c.rank() == 0) {
                box.take(1, text, 5);
            } else {
                for (int i = 0; i < 2; ++i) box.post(2, text, 80);  // nobody makes room
            }
            must(false, "no error");
        } catch (const Error& e) {
            must(e.code == Exit::peer, "exit code");
        }
        c.barrier(s);
    });
}

TEST_CASE("peer copy: random patterns over late streams") {
    for (const int P : {1, 2, 3, 4, 6}) run_ranks(P, [](Comm& c) { check_patterns(c, 170); });
}

TEST_CASE("mpi: peer copy between processes") {
    run_mpi([](Comm& c) { check_patterns(c, 170); });
}

TEST_CASE("peer copy: ranks that do not agree are told so") {
    using Part = Traffic::Part;
    const auto send = [](Comm& c, PeerCopy& copies, FakeDevice& d, char* arena,
                         const std::vector<int64_t>& out, const std::vector<int64_t>& in) {
        std::vector<Part> sends, recvs;
        for (const int64_t n : out) sends.push_back({arena, n, 1 - c.rank(), 0});
        for (const int64_t n : in) recvs.push_back({arena + 2048, n, 1 - c.rank(), 0});
        copies.exchange(d.stream(), Traffic::messages(sends), Traffic::messages(recvs));
    };
    // Rank 0's and rank 1's sends and receives of one call, or of two.
    const auto told = [&](const std::vector<std::vector<std::vector<int64_t>>>& calls) {
        return mismatch([&](Comm& c, PeerCopy& copies, FakeDevice& d, char* arena) {
            for (const auto& call : calls)
                send(c, copies, d, arena, call[size_t(2 * c.rank())],
                     call[size_t(2 * c.rank() + 1)]);
        });
    };
    EXPECT(told({{{8}, {4, 6}, {4, 0, 6}, {8}}}) == "no error");
    contains(told({{{8, 16}, {}, {}, {8, 12}}}),
             "rank 0 sends 16 bytes ((16)) to rank 1, which expects 12");
    contains(told({{{8}, {4, 6}, {10}, {8}}}),
             "rank 1 sends 1 messages to rank 0, which expects 2");
    contains(told({{{8}, {}, {}, {}}, {{}, {8}, {8}, {8}}}),
             "in exchange 1 rank 0 sends 1 messages to rank 1, which expects none");
    contains(told({{{}, {}, {}, {8}}, {{8}, {}, {}, {}}}), "its post is of exchange 1");
    contains(told({{{}, {8}, {}, {}}, {{}, {}, {}, {8}}, {{8}, {}, {}, {8}}}), "exchange 1");
}

TEST_CASE("peer copy: a message longer than its allocation, and more than a post holds") {
    contains(mismatch([](Comm& c, PeerCopy& copies, FakeDevice& d, char* arena) {
                 const Message m{1 - c.rank(), Tensor(arena + 4000, DType::u8, {97})};
                 copies.exchange(d.stream(), {&m, 1}, {&m, 1});
             }),
             "a message of 97 bytes leaves its allocation of 4096");
    contains(
        mismatch([](Comm& c, PeerCopy& copies, FakeDevice& d, char* arena) {
            const std::vector<Message> many(3000, {1 - c.rank(), Tensor(arena, DType::u8, {1})});
            copies.exchange(d.stream(), many, many);
        }),
        "3000 messages from one rank to another");
}

TEST_CASE("peer copy: where it cannot work all ranks say why") {
    try {
        run_ranks(3, [](Comm& c) {
            try {
                agree_that_copies_work(c, c.rank() ? concat("rank ", c.rank(), " has none") : "");
            } catch (const Error& e) {
                require(e.code == Exit::usage, Exit::internal, "exit code");
                throw;
            }
            must(false, "no error");
        });
        FAIL_TEST("no error");
    } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()), "--exchange copy: rank 1 has none; use --exchange nccl");
    }
}

}  // namespace torus
