// The norm of each tensor's gradient is compared, too, because before training loss and whole norm
// hardly depend on attention. With llama:d2x64, random weights and one message of each exchange
// lost on one of three ranks (test/engine/verify_sp.cpp) the loss was off by 3e-4 to 2e-3, the
// whole norm by 5e-3 to 6e-2, the worst tensor's by 3e-2 to 2e-1; bf16's bound is 8e-3.
#include "engine/verify_sp.h"

#include <algorithm>
#include <cmath>
#include <iomanip>

#include "engine/eval.h"
#include "engine/precision.h"
#include "engine/state.h"
#include "kernels/rng.h"

namespace torus {
namespace {

// Tokens of the check: about 256 a rank, but of a sequence no more than the run has on a rank, so
// that rank 0 alone needs no more memory than the run. Shared sequences are cut unevenly: their
// length divides by no mode's parts.
int64_t short_length(int64_t seq_length, int64_t sp) {
    if (sp == 1) return std::min<int64_t>(seq_length, 256);
    const int64_t most = std::max(seq_length / sp, std::min<int64_t>(seq_length, 64));
    const int64_t S = std::min(most, 257 * sp - 1);
    return S > 1 && S % (2 * sp) == 0 ? S - 1 : S;
}

// B sequences of random tokens. The later in a sequence the more targets are ignored, so that ranks
// count differently many; documents begin anywhere.
Batch short_batch(const Config& c, const ModelConfig& model, int64_t S, uint64_t stream) {
    Batch b;
    b.B = c.micro_batch_size, b.T = S;
    int32_t document = 0;
    for (int64_t i = 0; i < b.B * S; ++i) {
        const int64_t t = i % S;
        const auto draw = [&](uint64_t what, int64_t below) {
            return int32_t(random_bits(c.seed, 4 * stream + what, uint64_t(i)) % uint64_t(below));
        };
        const bool counts = t == 0 || draw(0, 2 * S) >= t;
        b.valid += counts;
        b.ids.push_back(draw(1, model.V));
        b.targets.push_back(counts ? draw(2, model.V) : -100);
        b.pos.push_back(int32_t(t));
        if (t == 0 || (c.document_mask && draw(3, 80) == 0)) document = int32_t(t);
        b.first_key.push_back(document);
    }
    return b;
}

struct Numbers {
    double loss = 0, norm = 0;
    std::vector<double> tensors;     // norm of each one's gradient, times the loss scale
    std::vector<std::string> names;  // of the tensors
};

// One optimizer step of micro-batches `first`, first + stride, ... of `batches` on this rank.
Numbers run_step(Kernels& k, const Config& c, const Setup& setup, const Machine::Options& o,
                 const std::vector<Batch>& batches, int64_t first, int64_t stride) {
    Machine m(k, setup.model, *setup.family, c, o);
    Numbers out;
    for (const Component& part : m.params.components())
        for (const Param& p : part.params) out.names.push_back(concat(part.name, " ", p.spec.name));
    out.tensors.resize(out.names.size());
    const Buffer memory(k.device(), Memory::device, int64_t(sizeof(double) * out.names.size()));
    const Tensor squares(memory.data(), DType::f64, {int64_t(out.names.size())});
    m.allocate();
    Stream& s = m.stream();
    start_weights(m, setup, c.seed);

    double valid = 0;
    for (const Batch& b : batches) valid += double(b.valid);
    m.step->begin(s, (int64_t(batches.size()) - first + stride - 1) / stride);
    for (int64_t i = first; i < int64_t(batches.size()); i += stride)
        m.step->forward_backward(s, batches[size_t(i)], 1 / valid);
    if (o.all) o.all->all_reduce(s, m.step->loss_sum());
    m.optimizer->step(s, c.lr);
    int64_t i = 0;
    for (const Component& part : m.params.components())
        for (const Param& p : part.params)
            k.sum_squares(s, squares.rows(i++, 1), m.params.part(m.params.gradients, p), false);
    k.device().copy(s, out.tensors.data(), squares.data, squares.bytes());
    out.loss = read_f64(m, m.step->loss_sum()) / valid;
    out.norm = read_f64(m, m.params.control.rows(Control::norm, 1));
    for (double& x : out.tensors) x = std::sqrt(x);
    return out;
}

// fp64 and fp32 differ by the order of sums alone; the bounds are those of --verify. In 16-bit
// types each result is rounded anew, which a norm or a mean over many averages: four rounding
// units.
double bound_of(DType dtype) {
    switch (dtype) {
        case DType::f64: return 1e-10;
        case DType::f32: return 1e-5;
        case DType::bf16: return 4 * 0x1p-9;
        default: return 4 * 0x1p-12;
    }
}

double difference(double a, double b, double least) {
    return std::fabs(a - b) / std::max(std::fabs(b), least);
}

// `failed`: some difference is beyond the bound, or not a number.
std::string compare(const Numbers& ranks, const Numbers& one, double bound, bool& failed) {
    const double loss = difference(ranks.loss, one.loss, 1e-300);
    const double norm = difference(ranks.norm, one.norm, 1e-300);
    double all = 0, worst = 0;
    for (double x : one.tensors) all += x * x;
    size_t at = 0;
    for (size_t i = 0; i < one.tensors.size(); ++i) {
        // A gradient that is zero but for rounding has no relative difference.
        const double d = difference(ranks.tensors[i], one.tensors[i], 1e-6 * std::sqrt(all));
        if (!(d <= worst)) worst = d, at = i;
    }
    failed = !(loss <= bound && norm <= bound && worst <= bound);
    std::ostringstream out;
    out.precision(3);
    const auto pair = [&](double a, double b) {
        return concat(std::setprecision(8), a, " and ", b);
    };
    out << "loss " << pair(ranks.loss, one.loss) << " alone (differ by " << loss
        << "), gradient norm " << pair(ranks.norm, one.norm) << " (" << norm
        << "), a tensor's gradient norm by at most " << worst << " (" << one.names[at]
        << "), allowed " << bound;
    return out.str();
}

}  // namespace

void verify_sp(const Config& config, const Setup& setup, World& world) {
    require(world.size() > 1, Exit::usage,
            "--verify-sp: compares ranks with one alone, and this run has one; give --ranks N or "
            "leave it out");
    const MeshShape& mesh = world.mesh().shape;
    const DType dtype = setup.kernels->precision().act;
    Config c = config;
    // In fp16 a scale that overflows nowhere here: a skipped step could not be compared.
    if (dtype == DType::f16 && run_loss_scale(c, dtype).window > 0) c.loss_scale = "1024";
    const int64_t S = short_length(c.seq_length, mesh.sp());
    const bool accumulates = c.global_batch_tokens > c.micro_batch_size * c.seq_length * mesh.dp;
    std::vector<Batch> batches;
    for (int i = 0; i < mesh.dp * (accumulates ? 2 : 1); ++i)
        batches.push_back(short_batch(c, setup.model, S, uint64_t(i)));

    const std::string what =
        concat("--verify-sp: ", world.choice().mode, " on ", mesh.str(), ", ", batches.size(),
               " micro-batches of ", c.micro_batch_size, " x ", S, " tokens, ", name_of(dtype));
    world.allow(c.timeout, "--verify-sp");
    const auto kernels = make_backend(c, dtype, setup.cuda, world.local_rank());
    Recomputation recompute = c.recompute;
    if (c.recompute == Recompute::automatic)  // what the run itself may mix
        recompute = {Recompute::attention_out, (setup.model.L + 1) / 2};
    Machine::Options o{.B = c.micro_batch_size,
                       .S = S,
                       .recompute = recompute,
                       .document_mask = c.document_mask,
                       .mesh = &world.mesh(),
                       .mode = world.choice().mode,
                       .all = &world.data(),
                       .sum_by_exchange = sums_by_exchange(c, world)};
    const Numbers ranks = run_step(*kernels, c, setup, o, batches, world.dp_rank(), world.dp());
    bool failed = false;
    std::string result;
    if (world.first()) {
        o.mesh = nullptr, o.all = nullptr;
        const Numbers one = run_step(*kernels, c, setup, o, batches, 0, 1);
        result = compare(ranks, one, bound_of(dtype), failed);
    }
    result = world.from_first(result);
    if (world.any(failed))
        fail(Exit::internal, what, ": ", result,
             "; the ranks do not compute what one does: take another --parallel-mode, and see "
             "whether the machine passes scripts/test.sh");
    world.say(what, ": ", result);
    world.allow(c.timeout, "laying out memory");
}

}  // namespace torus
