// Final norm, classifier, loss and the gradient, in chunks of rows: the logits of one chunk become
// their own gradient in place, and so does the chunk's normed input. Memory is that of one chunk
// however long the sequence is; llm.c fuses the two passes of the classifier, this also bounds it
// (as Liger-Kernel's fused linear cross entropy, Hsu et al. 2024, does).
//
// Dims: N rows, n rows of a chunk, C channels, V vocabulary, Vp V padded.
#include <algorithm>

#include "model/model.h"

namespace torus {

int64_t Head::chunk_rows(const ModelConfig& c, const Precision& p, int64_t N) {
    // Equal chunks of about 512 MB of logits, in whole tiles of the matrix units: with half of that
    // the three products of a 151,936-word head take 19% longer.
    const int64_t row_bytes = c.Vp() * size_of(p.act), most = int64_t(512) << 20, tile = 256;
    const int64_t chunks = N * row_bytes / most + 1, rows = (N + chunks - 1) / chunks;
    const int64_t whole = rows < tile ? most / row_bytes : (rows + tile - 1) / tile * tile;
    return std::clamp(whole, int64_t(1), std::max(N, int64_t(1)));
}

void Head::plan(Layout& layout, const ModelConfig& c, const Precision& p, int64_t N, Life life) {
    const int64_t n = chunk_rows(c, p, N);
    layout.add("head/normed", p.act, {n, c.C}, life);
    layout.add("head/mean", p.stat, {n}, life);
    layout.add("head/rstd", p.stat, {n}, life);
    layout.add("head/logits", p.act, {n, c.Vp()}, life);
}

void Head::run(Ctx& ctx, const Family& family, const TensorMap& w, const TensorMap& dw,
               const Arena& arena, const Io& io) {
    Kernels& k = ctx.k;
    Stream& s = ctx.stream;
    const ModelConfig& c = ctx.model;
    const char* name = c.tied ? "wte" : "head_w";
    const Tensor weight = w[name];  // (Vp,C)
    const int64_t N = io.x.dim(0), chunk = arena["head/logits"].dim(0);
    if (io.dx) k.fill(s, io.dx, 0);  // the norm's backward adds
    // A tied head adds to the embedding's gradient, to which the embedding's backward adds too.
    bool accumulate = c.tied || ctx.accumulate;
    if (io.dx && N == 0 && !accumulate) k.fill(s, dw[name], 0);

    for (int64_t begin = 0; begin < N; begin += chunk) {
        const int64_t n = std::min(chunk, N - begin);
        const Tensor x = io.x.rows(begin, n);                   // (n,C)
        const Tensor normed = arena["head/normed"].rows(0, n);  // (n,C)
        const Tensor mean = arena["head/mean"].rows(0, n);      // (n)
        const Tensor rstd = arena["head/rstd"].rows(0, n);      // (n)
        const Tensor logits = arena["head/logits"].rows(0, n);  // (n,Vp)
        const Tensor targets = io.targets.rows(begin, n);       // (n)

        family.final_norm(ctx, w, normed, mean, rstd, x);
        k.matmul_forward(s, logits, normed, weight, Tensor(), Tensor());
        if (io.logits) k.cast(s, io.logits.rows(begin, n), logits.slice(1, 0, c.V));
        const Tensor dlogits = io.dx ? logits : Tensor();
        k.classifier(s, io.loss.rows(begin, n), logits, dlogits, targets, c.V, io.dloss,
                     io.loss_scale);
        if (!io.dx) continue;

        k.matmul_backward_weight(s, dw[name], Tensor(), dlogits, normed, accumulate);
        accumulate = true;
        const Tensor dnormed = normed;
        k.matmul_backward_input(s, dnormed, dlogits, weight, false);
        family.final_norm_backward(ctx, w, dw, io.dx.rows(begin, n), dnormed, x, mean, rstd);
    }
}

}  // namespace torus
