// Tensor views, Layout, Arena and the CPU device.
#include <thread>

#include "kernels/kernels.h"
#include "kernels/layout.h"
#include "kernels/rng.h"
#include "test/test.h"

using namespace torus;

TEST_CASE("layout: tensors alive at the same time never share memory") {
    uint64_t at = 0;
    const auto below = [&](uint32_t n) { return random_bits(42, 0, at++) % n; };
    for (int round = 0; round < 200; ++round) {
        Layout layout;
        const int count = 1 + int(below(40));
        int64_t everything = 0;
        for (int i = 0; i < count; ++i) {
            Life life;
            if (below(4) != 0) {
                life.first = int(below(20));
                life.last = life.first + int(below(8));
            }
            layout.add(concat("t/", i), below(2) ? DType::f32 : DType::bf16,
                       {int64_t(below(5)) * 100, int64_t(below(30))}, life);
            everything += layout.slots().back().bytes;
        }
        const int64_t total = layout.bytes();
        std::vector<int64_t> live(30);  // bytes alive in each phase
        for (const auto& s : layout.slots()) {
            const Layout::Slot& a = layout.at(s.name);
            REQUIRE_TRUE((a.offset >= 0 && a.offset % Layout::alignment == 0));
            REQUIRE_TRUE(a.offset + a.bytes <= total);
            REQUIRE_TRUE(a.bytes >= a.shape.numel() * size_of(a.dtype));
            for (int p = 0; p < 30; ++p)
                if (a.life.first <= p && p <= a.life.last) live[size_t(p)] += a.bytes;
            for (const auto& other : layout.slots()) {
                const Layout::Slot& b = layout.at(other.name);
                if (a.name == b.name || !a.life.meets(b.life)) continue;
                const bool apart = a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset;
                REQUIRE_TRUE(apart);
            }
        }
        // Not below what is alive at once, not above no sharing at all.
        for (int64_t bytes : live) REQUIRE_TRUE(bytes <= total);
        REQUIRE_TRUE(total <= everything);
    }
}

TEST_CASE("layout shares memory, sums by owner and refuses double and unknown names") {
    Layout l;
    l.add("acts/a", DType::f32, {1000}, {0, 1});
    l.add("acts/b", DType::f32, {1000}, {2, 3});
    l.add("weights/w", DType::bf16, {100});
    EXPECT_EQ(l.bytes(), 4096 + 256);
    EXPECT_EQ(l.at("acts/a").offset, l.at("acts/b").offset);
    const auto owners = l.bytes_by_owner();
    EXPECT_EQ(owners.at("acts"), 2 * 4096);
    EXPECT_EQ(owners.at("weights"), 256);
    EXPECT_THROWS_AS(l.add("acts/a", DType::f32, {1}), Error);
    EXPECT_THROWS_AS(l.at("acts/c"), Error);
    Layout all;
    all.add_all("rank0/", l);
    EXPECT(all.has("rank0/acts/b"));
    EXPECT_EQ(all.bytes(), l.bytes());
    l.add("acts/empty", DType::f32, {0, 5});
    EXPECT_EQ(l.bytes(), 4096 + 256);
}

TEST_CASE("arena gives the tensors of its layout, and device memory is counted") {
    const auto k = make_cpu_kernels(DType::f32);
    Device& d = k->device();
    {
        Layout l;
        l.add("a", DType::f32, {3, 5});
        l.add("b", DType::i32, {7});
        Arena arena(d, Memory::device, l);
        EXPECT_EQ(arena.bytes(), 512);
        EXPECT_EQ(d.allocated(Memory::device), 512);
        EXPECT_EQ(arena["a"].shape, Shape({3, 5}));
        EXPECT(reinterpret_cast<uintptr_t>(arena["a"].data) % 256 == 0);
        EXPECT(static_cast<char*>(arena["b"].data) - static_cast<char*>(arena["a"].data) == 256);
        EXPECT_THROWS_AS(arena["c"], Error);
    }
    EXPECT_EQ(d.allocated(Memory::device), 0);
    EXPECT_EQ(d.peak(Memory::device), 512);
    d.freeze();
    EXPECT_THROWS_AS(Buffer(d, Memory::host, 100), Error);
    d.thaw();
    EXPECT_EQ(Buffer(d, Memory::host, 100).bytes(), 100);
}

TEST_CASE("running out of memory is an error with its exit code, and is not counted") {
    const auto k = make_cpu_kernels(DType::f32);
    Device& d = k->device();
    for (int64_t bytes : {int64_t(1) << 60, INT64_MAX}) {
        try {
            Buffer b(d, Memory::device, bytes);
            FAIL_TEST("allocated " << bytes << " bytes");
        } catch (const Error& e) {
            EXPECT(e.code == Exit::out_of_memory);
        }
    }
    EXPECT_EQ(d.allocated(Memory::device), 0);
    EXPECT(d.total_bytes() > d.free_bytes());
    EXPECT(d.free_bytes() > 0);
    EXPECT(d.name().substr(0, 5) == "CPU (");
}

TEST_CASE("device: copies, bytes and events") {
    const auto k = make_cpu_kernels(DType::f32);
    Device& d = k->device();
    Stream s = d.make_stream();
    Buffer a(d, Memory::host, 1000), b(d, Memory::device, 1000);
    d.set_bytes(s, a.data(), 7, 1000);
    d.set_bytes(s, b.data(), 9, 1000);
    d.copy(s, b.data(), a.data(), 999);
    d.synchronize(s);
    EXPECT_EQ(int(static_cast<uint8_t*>(b.data())[998]), 7);
    EXPECT_EQ(int(static_cast<uint8_t*>(b.data())[999]), 9);
    Event from = d.make_event(), to = d.make_event();
    d.record(from, s);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    d.record(to, s);
    d.wait(s, to);
    d.synchronize(to);
    EXPECT(d.elapsed_ms(from, to) >= 5);
    EXPECT(d.elapsed_ms(from, to) < 5000);
    d.destroy(from);
    d.destroy(to);
    EXPECT_THROWS_AS(d.record(from, s), Error);
    d.destroy(s);
}

TEST_CASE("tensor views") {
    float data[24] = {};
    const Tensor t(data, DType::f32, {2, 3, 4});
    EXPECT_EQ(t.slice(1, 1, 2).data, static_cast<void*>(data + 4));
    EXPECT(!t.slice(1, 1, 2).contiguous());
    EXPECT(t.rows(1, 1).contiguous());
    EXPECT_EQ(t.view({6, 4}).pitch(0), 4);
    EXPECT_EQ(t.dim(-1), 4);
    EXPECT_THROWS_AS(t.slice(1, 2, 2), Error);
    EXPECT_THROWS_AS(t.view({5, 5}), Error);
    EXPECT_THROWS_AS(t.slice(1, 1, 2).view({16}), Error);
    EXPECT_THROWS_AS(t.as<double>(), Error);
    EXPECT(!Tensor());
}

TEST_CASE("only fp32 and fp64 run on the CPU") {
    EXPECT_THROWS_AS(make_cpu_kernels(DType::bf16), Error);
    EXPECT(make_cpu_kernels(DType::f64)->precision().master == DType::f64);
}
