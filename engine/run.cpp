// The four things a run can be.
#include "engine/run.h"

#include <cstdio>

#include "engine/trainer.h"
#include "engine/verify.h"
#include "kernels/text.h"

namespace torus {
namespace {

// Bytes of every rank of the layout that the flags ask for, without a device or another rank.
Exit print_plan(const Config& c) {
    const Setup setup = make_setup(c, 0);
    require(!setup.cuda || c.recompute != Recompute::automatic, Exit::usage,
            "--recompute auto: --plan uses no GPU, and so does not know how much fits; give none, ",
            "attention_out or full");
    const ModelConfig& m = setup.model;
    const int ranks = std::max(1, c.ranks);
    const ParallelChoice choice = choose_parallel(
        parallel_request(c, ranks, ranks),
        {.B = c.micro_batch_size, .S = c.seq_length, .H = m.H, .Hk = m.Hk, .D = m.D});
    std::printf("%s\n", setup.summary.c_str());
    if (ranks > 1) std::printf("%s\n", choice.reason.c_str());
    int64_t before = -1;
    for (int rank = 0; rank < ranks; ++rank) {
        Mesh mesh = make_plan_mesh(choice.shape, rank);
        Machine::Options o{.B = c.micro_batch_size,
                           .S = c.seq_length,
                           .document_mask = c.document_mask,
                           .sample_context = c.sample_every ? sample_context(c, m, 1) : 0,
                           .mesh = &mesh,
                           .mode = choice.mode};
        if (c.recompute == Recompute::automatic) {
            o.recompute = Recomputation::step(
                Machine::least_recompute(*setup.kernels, m, *setup.family, c, o, ranks), m.L);
            std::printf("recompute: %s, as little as fits\n", o.recompute.str(m.L).c_str());
        } else {
            o.recompute = c.recompute;
        }
        const Machine plan(*setup.kernels, m, *setup.family, c, o);
        if (plan.device_bytes() == before) continue;  // as the rank before it
        before = plan.device_bytes();
        std::printf("rank %d, micro-batch %lld x %lld tokens:\n%s", rank,
                    static_cast<long long>(c.micro_batch_size),
                    static_cast<long long>(c.seq_length), plan.table().c_str());
    }
    return Exit::ok;
}

Exit generate(const Config& c) {
    const Setup setup = make_setup(c, 0);
    require(setup.weights != nullptr, Exit::usage, "--generate: --model ", c.model,
            " has no weights; name a checkpoint's folder");
    require(setup.tokenizer != nullptr, Exit::usage, "--generate: needs --tokenizer");
    std::vector<int32_t> prompt = start_of_text(setup);
    setup.tokenizer->encode(c.generate, prompt);
    Machine m(*setup.kernels, setup.model, *setup.family, c,
              {.train = false,
               .step = false,
               .sample_context = sample_context(c, setup.model, int64_t(prompt.size()))});
    m.allocate();
    load_weights(m.params, m.kernels(), m.stream(), *setup.weights);
    const std::vector<int32_t> ids =
        m.sampler->generate(m.stream(), prompt, sample_options(c, setup, 0));
    std::printf("%s%s\n", printable(c.generate).c_str(), printable(text_of(setup, ids)).c_str());
    return Exit::ok;
}

Exit train(const Config& c) {
    die_with_parent();
    World world(launch_info());
    return Trainer(c, world).train();
}

}  // namespace

Exit run(const Config& c) {
    if (c.plan) return print_plan(c);
    if (!c.verify.empty()) return verify(c) ? Exit::ok : Exit::internal;
    if (!c.generate.empty()) return generate(c);
    return train(c);
}

}  // namespace torus
