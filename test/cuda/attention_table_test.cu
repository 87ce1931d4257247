// Tables of attention shapes in bf16 and fp16 against the definition in fp64 on the GPU, through
// Kernels: lengths around the tiles' edges and up to a million tokens, all head dims, grouped
// heads, all masks, blocks of keys, scaled scores; the Hopper kernels, the backward by single
// blocks and by pairs, the mma.sync ones and cuDNN's. An output may be at most twice, a gradient
// three times as far off (rms over the tensor) as a textbook 16-bit implementation, its largest
// error twice that, lse 1e-5; memory between rows, and between heads, must survive.
#include "kernels/cuda/cudnn_attention.h"
#include "test/cuda/attention_check.cuh"

using namespace torus;
using namespace torus::test;

namespace {

Verdict check(Gpu& gpu, const Case& c, bool backward = true) {
    return gpu.k->precision().act == DType::f16 ? Check<__half>(gpu, c).run(backward)
                                                : Check<__nv_bfloat16>(gpu, c).run(backward);
}

void expect_all(const std::vector<Case>& cases, bool hopper = true, bool only_bf16 = false) {
    Gpu bf16(DType::bf16, 256), f16(DType::f16, 256);
    int64_t n = 0;
    for (Gpu* gpu : {&bf16, &f16})
        dynamic_cast<cuda::CudaKernels&>(*gpu->k).use_hopper_attention(hopper);
    for (const Case& c : cases) {
        Gpu& gpu = n++ % 2 && !only_bf16 ? f16 : bf16;
        const Verdict v = check(gpu, c);
        INFO(name_of(gpu.k->precision().act) << " " << c.str() << ":" << v.text);
        EXPECT(v.ok);
    }
}

struct Heads {
    int64_t H, Hk;
};
constexpr Heads head_table[] = {{1, 1}, {4, 4}, {8, 1}, {12, 3}, {8, 8}};
// To 128 all on the Hopper kernels: of whole tiles, of the least and the most room behind the head.
constexpr int64_t dim_table[] = {8, 32, 40, 64, 72, 80, 88, 96, 128, 192, 256};

}  // namespace

TEST_CASE("attention table: lengths, head dims, grouped heads") {
    std::vector<Case> cases;
    for (int64_t D : dim_table)
        for (int64_t T : {1, 63, 64, 65, 97, 129, 200, 1025, 4096, 16384})
            for (bool causal : {true, false}) {
                const size_t n = cases.size() / 2 + size_t(D / 32);
                const Heads h = head_table[n % (T > 2000 ? 3 : 5)];
                cases.push_back({.B = T > 2000 || n % 2 ? 1 : 3,
                                 .Tq = T,
                                 .Tk = T,
                                 .H = h.H,
                                 .Hk = h.Hk,
                                 .D = D,
                                 .causal = causal,
                                 .rows = T > 2000 ? 32 : 256});
            }
    expect_all(cases);
}

TEST_CASE("attention table: masks, offsets, blocks of keys, scaled scores") {
    std::vector<Case> cases;
    for (int64_t D : dim_table)
        for (size_t n = 0; n < 5; ++n) {
            const auto [H, Hk] = head_table[n];
            if (n < 4) {
                const Masks masks[] = {Masks::documents, Masks::window, Masks::random,
                                       Masks::empty};
                cases.push_back({2, 611, 611, H, Hk, D, true, 0, 0, masks[n]});
                cases.push_back({3, 355, 477, H, Hk, D, false, 0, 10, masks[n]});
                cases.push_back({1, 377, 377, H, Hk, D, n % 2 == 0, 0, 0, masks[3 - n], true});
            }
            cases.push_back({1, 300, 700, H, Hk, D, true, 400, 0});
            cases.push_back({1, 300, 700, H, Hk, D, true, 100, 333, Masks::none, n % 2 == 0});
            cases.push_back({1, 700, 300, H, Hk, D, false});
            cases.push_back({1, 100, 200, H, Hk, D, true, 0, 1000});  // no key visible
            cases.push_back({1, 500, 600, H, Hk, D, n % 2 == 0, 100, 0, Masks::none, n > 2, 5, 3});
        }
    for (int64_t D : {40, 64, 96})  // sums in fixed point
        for (Masks masks : {Masks::none, Masks::documents, Masks::random})
            cases.push_back({1, 130, 33000, 2, 1, D, true, 32870, 0, masks});
    expect_all(cases);
}

// The forward's maxima: rows whose scores jump from one key tile to the next or inside of one, rows
// whose scores all lie far below 0, rows that see their first key late or never.
TEST_CASE("attention table: scores that jump") {
    std::vector<Case> cases;
    for (int64_t D : {32, 64, 80, 96, 128, 192})
        for (auto [level, rise] : {std::pair{0.f, 6.f},
                                   {0.f, 40.f},
                                   {0.f, -40.f},
                                   {-500.f, 0.f},
                                   {-500.f, 40.f},
                                   {300.f, 1.f}})
            for (Masks masks : {Masks::none, Masks::documents, Masks::random}) {
                Case c{2, 611, 611, 4, 2, D, true, 0, 0, masks};
                c.level = level, c.rise = rise;
                cases.push_back(c);
                c.Tq = 300, c.causal = false, c.parts = true;
                cases.push_back(c);
            }
    expect_all(cases);
    expect_all(cases, /*hopper=*/true, /*only_bf16=*/true);
}

// Hopper's forward numbers the rows of lse through all batches. Room of a whole row leaves that
// possible, other room does not: then the mma.sync kernels take over.
TEST_CASE("attention table: batches of lse apart") {
    Gpu gpu(DType::bf16, 256);
    for (int64_t D : {64, 96, 128})
        for (int64_t room : {7, 200}) {
            Case c{3, 200, 200, 4, 2, D};
            c.lse_room = room;
            const Verdict v = check(gpu, c, /*backward=*/false);
            INFO(c.str() << ":" << v.text);
            EXPECT(v.ok);
        }
}

TEST_CASE("attention table: mma.sync kernels where Hopper's are the rule") {
    std::vector<Case> cases;
    for (int64_t D : {8, 32, 64, 80, 96, 128})
        for (int64_t T : {1, 65, 200, 1025})
            for (bool causal : {true, false})
                for (Masks masks : {Masks::none, Masks::documents})
                    cases.push_back({3, T, T, 12, 3, D, causal, 0, 0, masks, false, 1, 1, 256});
    expect_all(cases, /*hopper=*/false);
}

// Documents so long that units of work begin where they do.
TEST_CASE("attention table: long documents") {
    std::vector<Case> cases;
    for (int64_t D : {40, 64, 96, 128})
        for (auto [H, Hk] : {Heads{2, 2}, Heads{8, 2}}) {
            cases.push_back({.B = 2, .Tq = 4333, .Tk = 4333, .H = H, .Hk = Hk, .D = D});
            cases.push_back({.B = 1, .Tq = 8200, .Tk = 8200, .H = H, .Hk = Hk, .D = D});
            cases.push_back({1, 4101, 4101, H, Hk, D, false});
            cases.push_back({1, 3000, 5000, H, Hk, D, true, 2000, 0});
            cases.push_back({1, 5000, 3000, H, Hk, D, true, 0, 700});
            cases.push_back({2, 4333, 4333, H, Hk, D, true, 0, 0, Masks::none, true});
        }
    for (Case& c : cases) c.masks = Masks::long_documents, c.rows = 64;
    expect_all(cases);
    expect_all(cases, /*hopper=*/true, /*only_bf16=*/true);
}

// Few and short: compute-sanitizer has time for these.
TEST_CASE("attention table: small shapes") {
    std::vector<Case> cases;
    for (int64_t D : {40, 64, 80, 128})
        for (int64_t T : {1, 65, 200}) {
            cases.push_back({2, T, T, 4, 2, D});
            cases.push_back({1, T, T + 64, 4, 1, D, false, 0, 0, Masks::documents});
            if (T > 1) cases.push_back({1, T, T, 2, 2, D, true, 0, 0, Masks::window, true});
        }
    for (int64_t D : {64, 128})
        cases.push_back({1, 1200, 1200, 2, 1, D, true, 0, 0, Masks::long_documents});
    expect_all(cases);
}

// What only pairs of blocks can get wrong: a key tile without a partner, few query tiles, more
// units than pairs, several heads in a unit (the case of 26 batches) or one.
TEST_CASE("attention table: pairs of blocks") {
    std::vector<Case> cases;
    for (int64_t Tk : {100, 129, 200, 300, 520})
        for (int64_t Tq : {1, 65, 200}) {
            cases.push_back({1, Tq, Tk, 2, 2, 128, false});
            cases.push_back({2, Tq, Tk, 8, 2, 128, true, Tk - Tq, 0});
            cases.push_back({1, Tq, Tk, 2, 1, 128, true, 50, 0, Masks::random, true});
        }
    for (Masks masks : {Masks::documents, Masks::window, Masks::random, Masks::empty}) {
        cases.push_back({2, 611, 611, 4, 1, 128, true, 0, 0, masks});
        cases.push_back({1, 377, 377, 3, 3, 128, false, 0, 0, masks, true});
        cases.push_back({26, 150, 300, 8, 4, 128, false, 0, 0, masks});
    }
    cases.push_back({1, 100, 200, 2, 1, 128, true, 0, 1000});  // no key visible
    cases.push_back({26, 300, 300, 8, 4, 128, true, 0, 0, Masks::none, false, 5, 3});
    cases.push_back({1, 2600, 2600, 8, 1, 128});
    cases.push_back({1, 300, 65536, 2, 1, 128, false});  // rounded sums at their longest
    for (Masks masks : {Masks::none, Masks::documents, Masks::random})  // sums in fixed point
        cases.push_back({1, 130, 66000, 2, 1, 128, true, 65870, 0, masks});
    expect_all(cases, /*hopper=*/true, /*only_bf16=*/true);
}

TEST_CASE("attention table: 65,536 batches x heads") {
    std::vector<Case> cases;
    for (int64_t D : {64, 80})
        for (bool causal : {true, false}) {
            cases.push_back({4096, 5, 5, 16, 4, D, causal});
            cases.push_back({65536, 2, 3, 1, 1, D, causal});
        }
    expect_all(cases);
}

TEST_CASE("attention: cuDNN's kernels") {
    std::vector<Case> cases = {{2, 256, 256, 4, 4, 64},         {1, 1024, 1024, 8, 2, 128},
                               {1, 384, 512, 4, 1, 128, false}, {3, 128, 128, 1, 1, 32},
                               {1, 200, 200, 12, 3, 80},        {1, 1025, 1025, 2, 2, 128},
                               {3, 97, 97, 4, 1, 96, false}};
    Gpu bf16(DType::bf16, 256), f16(DType::f16, 256), f32(DType::f32, 256);
    if (!cudnn_attention_refusal(128, 64).empty()) {
        MESSAGE(cudnn_attention_refusal(128, 64));
        EXPECT_THROWS_AS(use_cudnn_attention(*bf16.k), Error);
        return;
    }
    for (Gpu* gpu : {&bf16, &f16, &f32}) use_cudnn_attention(*gpu->k);
    int64_t n = 0;
    for (Case& c : cases) {
        c.apart = false;  // as attention's outputs are
        Gpu& gpu = n++ % 2 ? f16 : bf16;
        const std::string refusal = cudnn_attention_refusal(c.Tk, c.D);
        const Verdict v = check(gpu, c, refusal.empty());
        INFO(c.str() << ":" << v.text);
        EXPECT(v.ok);
        if (!refusal.empty()) EXPECT_THROWS_AS(check(gpu, c), Error);
    }
    // A key-value cache takes our kernels; what cuDNN cannot do is refused.
    const Verdict cache = check(bf16, {1, 1, 300, 4, 2, 64, true, 299}, false);
    INFO(cache.text);
    EXPECT(cache.ok);
    const auto refused = [&](Case c) {
        c.apart = false;
        try {
            check(bf16, c);
        } catch (const Error& e) {
            return e.code == Exit::usage && std::string(e.what()).find("--attention") == 0;
        }
        return false;
    };
    EXPECT(refused({1, 128, 128, 2, 2, 64, true, 0, 0, Masks::documents}));
    EXPECT(refused({1, 128, 128, 2, 2, 64, true, 0, 0, Masks::none, true}));
    EXPECT(refused({1, 128, 128, 2, 2, 256}));
    EXPECT(refused({1, 1, 1, 2, 2, 64}));
    const DeviceValue x(f32, DType::f32, {1, 128, 1, 64}, constant_values(128 * 64, 0)),
        lse(f32, DType::f32, {1, 1, 128});
    const Attn single{.q = x.tensor(),
                      .k = x.tensor(),
                      .v = x.tensor(),
                      .o = x.tensor(),
                      .lse = lse.tensor(),
                      .first_key = {},
                      .scale = 1};
    EXPECT_THROWS_AS(f32.k->attention_forward(f32.stream, single), Error);
}

// 2.3 billion elements a tensor. The window makes the backward cheap at that length.
TEST_CASE("attention of a million tokens" * doctest::skip()) {
    Gpu gpu(DType::bf16, 256);
    Case c{.B = 1, .Tq = 1 << 20, .Tk = 1 << 20, .H = 17, .Hk = 17, .D = 128, .rows = 128};
    c.last = true;
    for (Masks masks : {Masks::none, Masks::window}) {
        c.masks = masks;
        const Verdict v = check(gpu, c, masks == Masks::window);
        INFO(c.str() << ":" << v.text);
        EXPECT(v.ok);
    }
}
