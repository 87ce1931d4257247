#include "engine/eval.h"

#include <algorithm>

namespace torus {

double read_f64(Machine& m, Tensor scalar) {
    double value = 0;
    m.kernels().device().copy(m.stream(), &value, scalar.data, int64_t(sizeof value));
    m.kernels().device().synchronize(m.stream());
    return value;
}

EvalResult evaluate(Machine& m, World& world, const Loader& loader, int64_t B, int64_t batches) {
    const int64_t together = B * world.dp();
    const int64_t all = std::max<int64_t>(1, loader.sequences() / together);
    EvalResult result;
    Batch batch;
    m.step->begin(m.stream());
    for (int64_t i = 0; i < std::min(batches, all); ++i) {
        loader.read(i * together + world.dp_rank() * B, B, batch);
        m.step->forward(m.stream(), batch);
        if (world.mesh().sp->rank() == 0) result.tokens += batch.valid;  // the others hold the same
    }
    world.data().all_reduce(m.stream(), m.step->loss_sum());
    const double sum = read_f64(m, m.step->loss_sum());
    result.tokens = world.sum(result.tokens);
    result.loss = result.tokens ? sum / double(result.tokens) : 0;
    return result;
}

}  // namespace torus
