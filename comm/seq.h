// SeqParallel: an attention that owns its token placement, its collectives and its byte plan. Every
// mode gives the same loss and gradients; they differ in who holds which tokens and what travels.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "kernels/kernels.h"
#include "kernels/layout.h"

namespace torus {

// A run of consecutive global positions [begin, begin + count) that this rank holds, in the order
// held.
struct TokenRun {
    int64_t begin, count;
    int64_t end() const { return begin + count; }
    bool operator==(const TokenRun&) const = default;
};

// What a mode needs to know to place tokens and plan bytes. B sequences of S global tokens.
struct AttnDims {
    int64_t B, S, H, Hk, D;
};

// An optional tensor is absent only when default-constructed: a rank without tokens passes one of
// zero rows, so that all ranks agree on what is there.
struct AttnIn {
    Tensor q, k, v;    // act (B,T,H,D), (B,T,Hk,D) twice; (pitched); this rank's tokens
    Tensor o, lse;     // out: act (B,T,H,D), stat (B,H,T)
    Tensor first_key;  // optional i32 (B,T): global position of the first key each query may see
};

struct AttnGradIn {
    Tensor q, k, v, o, lse, dout, first_key;  // as in AttnIn; o and lse as forward left them
    Tensor dq, dk, dv;                        // out, act, (pitched)
    Tensor delta;  // optional stat (B,H,T): rowsum of dout * o, in place of o
};

struct SeqParallel {
    virtual ~SeqParallel() = default;
    // T = sum of the counts, which never changes. The runs may, with every set_documents.
    virtual std::vector<TokenRun> placement() const = 0;
    virtual void plan(Layout& device, Layout& pinned) const = 0;  // every extra byte, owner "seq/"
    virtual WorkspaceDims workspace() const = 0;                  // of its largest attention call
    virtual void bind(const Arena& device, const Arena& pinned) = 0;
    virtual void forward(Stream&, const AttnIn&) = 0;
    virtual void backward(Stream&, const AttnGradIn&) = 0;

    // The batch's first_key (B,S) on the host, the same on all ranks, or null when there is none:
    // transfers are then cut to the keys that some query sees, and modes that balance by placement
    // move tokens until the ranks have equal work. To be called before each batch, and before its
    // placement() is asked for, or never; without it everything that causality allows is sent.
    virtual void set_documents(const int32_t* /*first_key*/) {}
    // Most work of one rank over the mean, in pairs of query and key, for the batch set last.
    virtual double imbalance() const { return 1.0; }
};

// One rank, the whole sequence. `name` is the owner and prefix of its planned tensors.
std::unique_ptr<SeqParallel> make_local_attention(Kernels&, const AttnDims&,
                                                  const std::string& name = "seq");

// --- the modes --------------------------------------------------------------------------------

struct SeqMode {
    std::string name, alias;  // the alias is the name that other systems use
    bool ulysses, ring;       // which axes of the mesh it uses
    std::string summary;
};
const std::vector<SeqMode>& seq_modes();
const SeqMode& find_seq_mode(const std::string& name);  // throws Error(usage) with the known names

// What the flags ask for; 0 = not given.
struct ParallelRequest {
    std::string mode = "auto";  // --parallel-mode
    int world = 1;              // ranks of the job
    int sp = 0, ring = 0, ulysses = 0, tp = 0;
    int ranks_per_machine = 1 << 30;
};
struct ParallelChoice {
    std::string mode;
    MeshShape shape;
    std::string reason;  // one line, for the log
};
// Fills in mode and degrees, checks them against dims, and throws Error(usage) naming the flag and
// the nearest value that works. Touches no device and no other rank.
ParallelChoice choose_parallel(const ParallelRequest&, const AttnDims&);

// `mesh` must be of a shape that choose_parallel gave for this mode, and must outlive the result.
// head_slices: in Ulysses, parts of the heads whose exchanges and attention overlap; a divisor of
// Hk, 0 = chosen from the shape.
std::unique_ptr<SeqParallel> make_seq_parallel(const std::string& mode, Kernels&, Mesh& mesh,
                                               const AttnDims&, int head_slices = 0);

}  // namespace torus
