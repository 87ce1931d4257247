// Sampling with a key-value cache gives what running the whole text again would give.
#include <algorithm>

#include "test/engine/tiny.h"

using namespace torus;
using namespace torus::test;

namespace {

// The most likely next token by a whole forward pass without cache.
int32_t next_without_cache(const ModelConfig& model, const std::vector<int32_t>& text) {
    const int64_t S = int64_t(text.size());
    TinyMachine t(model, {.B = 1, .S = S, .logits = true});
    Batch b = random_batch(model, 1, S, 1);
    b.ids = text;
    t.machine->step->forward_backward(t.machine->stream(), b, 1, t.machine->logits());
    const double* last = t.machine->logits().as<double>() + (S - 1) * model.V;
    return int32_t(std::max_element(last, last + model.V) - last);
}

}  // namespace

TEST_CASE("greedy text equals the text without a cache") {
    for (const TinyModel& m : tiny_models()) {
        INFO(m.name);
        const int64_t context = 20;
        TinyMachine t(m.config, {.train = false, .step = false, .sample_context = context});
        std::vector<int32_t> text = {3, 14, 15, 9, 2};
        const std::vector<int32_t> ours = t.machine->sampler->generate(
            t.machine->stream(), text, {.tokens = 8, .temperature = 0});
        REQUIRE_TRUE(ours.size() == 8);
        for (int32_t id : ours) {
            EXPECT_EQ(id, next_without_cache(m.config, text));
            text.push_back(id);
        }
    }
}

TEST_CASE("a prompt longer than one chunk, and the context's end") {
    ModelConfig m = tiny_config("gpt2");
    m.max_T = 100;
    TinyMachine t(m, {.train = false, .step = false, .sample_context = 100});
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < 97; ++i) prompt.push_back(i % 61);
    const std::vector<int32_t> ours =
        t.machine->sampler->generate(t.machine->stream(), prompt, {.tokens = 50, .temperature = 0});
    EXPECT_EQ(ours.size(), size_t(4));  // 97 + 3 positions, and the token after the last
    EXPECT_EQ(ours[0], next_without_cache(m, prompt));
}

TEST_CASE("sampling is a function of the seed; top-k 1 is greedy; a stop token stops") {
    const ModelConfig m = tiny_config("llama");
    TinyMachine t(m, {.train = false, .step = false, .sample_context = 32});
    auto text = [&](SampleOptions o) {
        o.tokens = 16;
        return t.machine->sampler->generate(t.machine->stream(), {1, 2, 3}, o);
    };
    const auto a = text({.temperature = 1, .seed = 1});
    EXPECT(a == text({.temperature = 1, .seed = 1}));
    EXPECT(a != text({.temperature = 1, .seed = 2}));
    const auto greedy = text({.temperature = 0});
    EXPECT(greedy == text({.temperature = 1, .top_k = 1, .seed = 5}));
    const auto stopped = text({.temperature = 0, .stop_token = greedy[0]});
    EXPECT(stopped.empty());
}
