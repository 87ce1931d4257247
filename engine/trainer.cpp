#include "engine/trainer.h"

#include <random>

#include "engine/eval.h"
#include "engine/precision.h"
#include "engine/schedule.h"
#include "engine/state.h"
#include "engine/stop_signal.h"
#include "engine/verify_sp.h"

namespace torus {
namespace {

std::string new_run_id() {
    std::random_device random;
    std::ostringstream out;
    for (int i = 0; i < 4; ++i) out << std::hex << (random() & 0xffffu);
    return out.str();
}

// Updates skipped in a row after which a run ends: enough for the loss scale to go from its highest
// to its lowest (24 times half), and six more.
constexpr int64_t most_skips = 30;

// Peak bf16 tensor throughput of devices whose figure is known; 0 otherwise.
double peak_flops(const Device& device) {
    const std::string name = device.name();
    for (const char* hopper : {"H100", "H200", "GH200"})
        if (name.find(hopper) != std::string::npos) return 989.5e12;
    if (name.find("A100") != std::string::npos) return 312e12;
    return 0;
}

// Sequences of one optimizer step over all ranks, and micro-batches of one rank.
int64_t step_sequences(const Config& c, const World& world) {
    const int64_t micro = c.micro_batch_size * world.choice().shape.dp;
    return c.global_batch_tokens ? c.global_batch_tokens / c.seq_length : micro;
}

int64_t micro_batches(const Config& c, const World& world) {
    const int64_t together = c.micro_batch_size * world.choice().shape.dp;
    const int64_t all = step_sequences(c, world);
    require(all % together == 0, Exit::usage, "--global-batch-tokens ", c.global_batch_tokens,
            ": not a multiple of --micro-batch-size ", c.micro_batch_size, " x --seq-length ",
            c.seq_length, " x ", world.choice().shape.dp,
            " data-parallel ranks; the nearest that works: ",
            std::max<int64_t>(1, all / together) * together * c.seq_length);
    return all / together;
}

// A graph has no ranges for a profiler, and with several ranks sums of gradients could not begin
// before its end.
bool uses_graph(const Config& c, const Setup& setup, const World& world) {
    if (c.cuda_graph != CudaGraph::automatic) return c.cuda_graph == CudaGraph::on;
    return setup.cuda && world.size() == 1 && c.profile_steps.empty();
}

// How a training run uses its machine.
Machine::Options training_options(const Config& c, const Setup& setup, World& world) {
    Machine::Options o{.B = c.micro_batch_size,
                       .S = c.seq_length,
                       .document_mask = c.document_mask,
                       .sample_context = c.sample_every ? sample_context(c, setup.model, 1) : 0,
                       .mesh = &world.mesh(),
                       .mode = world.choice().mode,
                       .all = world.size() > 1 ? &world.data() : nullptr,
                       .sum_by_exchange = sums_by_exchange(c, world),
                       .record = uses_graph(c, setup, world)};
    if (c.recompute != Recompute::automatic) {
        o.recompute = c.recompute;
        return o;
    }
    // Attention that runs again takes all the ranks that share a sequence: one choice for all.
    const ModelConfig& m = setup.model;
    const int64_t mine = Machine::least_recompute(*setup.kernels, m, *setup.family, c, o,
                                                  setup.cuda ? 1 : world.local_size());
    o.recompute = Recomputation::step(world.most(mine), m.L);
    world.say("recompute: ", o.recompute.str(m.L), ", as little as fits");
    return o;
}

}  // namespace

Trainer::Trainer(const Config& c, World& world)
    : c_(c), world_(world), setup_(make_setup(c, world.local_rank())) {
    const ModelConfig& m = setup_.model;
    world.connect(setup_.kernels->device(), setup_.cuda, c.exchange);
    world.arrange(choose_parallel(
        parallel_request(c, world),
        {.B = c.micro_batch_size, .S = c.seq_length, .H = m.H, .Hk = m.Hk, .D = m.D}));
    world.say(setup_.summary);
    if (!c.tune_matmul.empty()) {  // a file per rank: all of them time and write
        setup_.kernels->tune_matmul(world.first() ? c.tune_matmul
                                                  : concat(c.tune_matmul, ".", world.rank()));
        world.say("matmul: algorithms from ", c.tune_matmul,
                  "; products that it lacks are timed in the first step, a few seconds each");
    }
    const bool copies = world.mesh().shape.sp() > 1 && world.data().by_copy_engines();
    if (world.size() > 1)
        world.say(world.choice().reason, copies ? "; copy engines carry the messages" : "");
    if (!world.first()) world.barrier();  // rank 0 tokenizes text, the others find it done
    loader_ = open_loader(c, c.data, setup_, c.shuffle);
    if (!c.val_data.empty()) val_loader_ = open_loader(c, c.val_data, setup_, false);
    if (world.first()) world.barrier();
    world.say("data: ", loader_->tokens(), " tokens in ", loader_->config().shards.size(),
              " shards, ", loader_->sequences(), " sequences of ", c.seq_length, " an epoch");
    world.agree({{"the model", model_signature(m)},
                 {"the precision", name_of(setup_.kernels->precision().act)},
                 {"the data", loader_->fingerprint()},
                 {"the configuration", to_toml(c)}});
    batches_.resize(size_t(micro_batches(c, world)));
    if (c.verify_sp) verify_sp(c, setup_, world);
    open_store();
    machine_ = std::make_unique<Machine>(*setup_.kernels, m, *setup_.family, c,
                                         training_options(c, setup_, world));
    machine_->allocate();
    world.say("memory: ", human_bytes(machine_->device_bytes()),
              " on the device, as planned (--plan shows the parts)");
    for (Event* e : {&begin_[0], &begin_[1], &done_[0], &done_[1]})
        *e = setup_.kernels->device().make_event();
}

Trainer::~Trainer() {
    for (Event* e : {&begin_[0], &begin_[1], &done_[0], &done_[1]})
        setup_.kernels->device().destroy(*e);
}

void Trainer::open_store() {
    if (c_.save_dir.empty() || !world_.first()) return;
    store_ = std::make_unique<CheckpointStore>(c_.save_dir);
    if (!setup_.tokenizer) return;
    tokenizer_path_ = c_.save_dir + "/tokenizer.json";
    setup_.tokenizer->save(tokenizer_path_);
}

void Trainer::check_resumable(const CheckpointState& old, const std::string& folder) const {
    auto same = [&](const char* what, const std::string& theirs, const std::string& ours,
                    const char* next) {
        require(theirs == ours, Exit::mismatch, folder, ": ", what, " is '", theirs,
                "', this run has '", ours, "'; ", next);
    };
    same("the model", old.model_json, state_.model_json,
         "resume with the same --model and --tokenizer");
    same("the optimizer's state", old.precision, state_.precision,
         "resume with the same --dtype, --moments and --master-weights");
    same("the data", old.data_fingerprint, state_.data_fingerprint,
         "to go on with other data, start a new --save-dir from these weights (--model FOLDER)");
}

// Rank 0 chooses the checkpoint; all ranks load that one or all stop.
void Trainer::resume_or_start() {
    Machine& m = *machine_;
    const std::string found = world_.from_first(store_ ? store_->newest() : "");
    state_ = {.run_id = new_run_id(), .config_toml = to_toml(c_)};
    state_.model_json = model_signature(setup_.model);
    state_.precision = state_types(run_precision(c_, setup_.kernels->precision()));
    state_.data_fingerprint = loader_->fingerprint();
    require(!found.empty() || c_.resume != ResumeMode::must, Exit::missing_input,
            "--resume must: ", c_.save_dir,
            " holds no checkpoint; use --resume auto to start anew");
    if (found.empty()) {
        start_weights(m, setup_, c_.seed);
        setup_.weights.reset();
        return;
    }
    require(c_.resume != ResumeMode::never, Exit::mismatch, "--resume never: ", c_.save_dir,
            " already holds a run's checkpoints; choose another --save-dir or --resume auto");
    const CheckpointState old = verify_checkpoint(found);
    check_resumable(old, found);
    load_checkpoint(m, found);
    state_.step = old.step;
    state_.next_sequence = old.next_sequence;
    state_.run_id = old.run_id;
    saved_step_ = old.step;
    world_.say("resumed from ", found);
}

// Sequence n of the run goes to the same step for every number of ranks.
int64_t Trainer::read_batches() {
    const ProfileRange data(setup_.kernels->device(), "data");
    const int64_t B = c_.micro_batch_size, together = B * world_.dp();
    int64_t first = state_.next_sequence + world_.dp_rank() * B, valid = 0;
    for (Batch& b : batches_) {
        loader_->read(first, B, b);
        first += together;
        valid += b.valid;
    }
    state_.next_sequence += step_sequences(c_, world_);
    // The ranks that share sequences have counted the same targets.
    return world_.size() > 1 ? world_.sum(world_.mesh().sp->rank() == 0 ? valid : 0) : valid;
}

void Trainer::train_step(int64_t step) {
    Machine& m = *machine_;
    Kernels& k = m.kernels();
    Stream& s = m.stream();
    const ProfileRange range(k.device(), "step", step + 1);
    k.device().record(begin_[step % 2], s);
    const int64_t valid = read_batches();
    const double lr = learning_rate(c_, step);
    m.step->begin(s, int64_t(batches_.size()));
    double imbalance = 0;
    for (const Batch& b : batches_) {
        m.step->forward_backward(s, b, valid ? 1 / double(valid) : 0);
        imbalance += m.step->imbalance() / double(batches_.size());
    }
    world_.data().all_reduce(s, m.step->loss_sum());
    if (valid) {  // nothing is learnt from no targets
        const ProfileRange optimizer(k.device(), "optimizer");
        m.optimizer->step(s, lr);
    }

    auto next = std::make_unique<Pending>();
    next->slot = int(step % 2);
    next->valid = valid;
    next->record = {.step = step + 1,
                    .steps = c_.steps,
                    .lr = lr,
                    .tokens = state_.next_sequence * c_.seq_length};
    if (c_.document_mask && world_.choice().shape.sp() > 1) next->record.imbalance = imbalance;
    double* out = m.readback().rows(next->slot, 1).as<double>();
    k.device().copy(s, out, m.step->loss_sum().data, int64_t(sizeof(double)));
    k.device().copy(s, out + 1, m.params.control.data, m.params.control.bytes());
    k.device().record(done_[next->slot], s);
    report();
    pending_ = std::move(next);
    state_.step = step + 1;
}

void Trainer::report() {
    if (!pending_) return;
    Machine& m = *machine_;
    Device& device = m.kernels().device();
    device.synchronize(done_[pending_->slot]);
    const double* loss = m.readback().rows(pending_->slot, 1).as<double>();
    const double* control = loss + 1;
    StepRecord& record = pending_->record;
    record.loss = pending_->valid ? *loss / double(pending_->valid) : 0;
    record.grad_norm = pending_->valid ? control[Control::norm] : 0;
    record.update_skipped = !pending_->valid || control[Control::coefficient] == 0;
    record.skipped = int64_t(control[Control::skipped]);
    record.loss_scale = control[Control::loss_scale];
    record.step_ms = device.elapsed_ms(begin_[pending_->slot], done_[pending_->slot]);
    record.tokens_per_s = double(step_sequences(c_, world_) * c_.seq_length) / record.step_ms * 1e3;
    if (const double peak = peak_flops(device) * world_.size(); peak > 0)
        record.mfu = cost_of(setup_.model).flops_per_token(setup_.model, c_.seq_length) *
                     record.tokens_per_s / peak;
    record.peak_gib = double(device.peak(Memory::device)) / double(1 << 30);
    if (timed_steps_++ > 0) timed_ms_ += record.step_ms;  // the first step warms caches up
    const double per_step =
        timed_steps_ > 1 ? timed_ms_ / double(timed_steps_ - 1) : record.step_ms;
    record.eta_s = per_step * 1e-3 * double(c_.steps - record.step);
    if (log_) log_->step(record);
    require(control[Control::skipped_now] < most_skips, Exit::internal, "step ", record.step,
            ": the gradients of the last ", most_skips,
            " updates were not finite, so nothing was learnt in them; lower --lr or raise "
            "--warmup-steps, and start from an earlier checkpoint or from good weights");
    pending_.reset();
}

void Trainer::eval(int64_t done) {
    const EvalResult r =
        evaluate(*machine_, world_, *val_loader_, c_.micro_batch_size, c_.eval_batches);
    if (log_) log_->eval(done, r.loss, state_.next_sequence * c_.seq_length);
}

void Trainer::sample(int64_t done) {
    if (!log_) return;  // rank 0 has all the weights and needs nobody
    const std::vector<int32_t> ids = machine_->sampler->generate(
        machine_->stream(), start_of_text(setup_), sample_options(c_, setup_, uint64_t(done)));
    log_->sample(done, text_of(setup_, ids));
}

// A failed save in mid-run costs a warning and the next one tries again; the last one ends the run.
void Trainer::save(int64_t done, bool last) {
    if (saved_step_ == done) return;
    saved_step_ = done;
    if (!store_) return;
    try {
        store_->save(state_, checkpoint_files(*machine_, setup_.model, tokenizer_path_), c_.keep);
    } catch (const Error& e) {
        if (last || e.code != Exit::io) throw;
        saved_step_ = -1;
        log_->message(concat("warning: step ", done, " is not saved: ", e.what()));
        return;
    }
    log_->message("saved " + c_.save_dir + "/" + CheckpointStore::folder_of(done));
}

void Trainer::between_steps(int64_t done, bool last) {
    auto due = [&](int64_t every) { return every > 0 && (done % every == 0 || done == c_.steps); };
    const bool eval_due = val_loader_ && due(c_.eval_every), sample_due = due(c_.sample_every);
    const bool save_due = !c_.save_dir.empty() && (due(c_.save_every) || last);
    if (!(eval_due || sample_due || save_due || last)) return;
    report();
    auto phase = [&](const char* what) {
        world_.allow(c_.timeout, concat(what, " after step ", done));
    };
    if (eval_due) phase("evaluation"), eval(done);
    if (sample_due) phase("sample"), sample(done);
    if (save_due) phase("save"), save(done, last);
    if (world_.size() > 1) world_.barrier();
}

Exit Trainer::train() {
    world_.allow(c_.timeout, "loading");
    resume_or_start();
    if (world_.first()) log_ = std::make_unique<Log>(c_.log_dir, state_.step);
    watch_signals();
    const int64_t begin = state_.step;
    if (begin >= c_.steps) world_.say("nothing to do: ", begin, " steps are done");
    const StepRange profiled = profiled_steps(c_);
    require(profiled.first == 0 || profiled.first > begin, Exit::usage,
            "--profile-steps: ", c_.profile_steps, " begins before step ", begin + 1,
            ", with which this run goes on; ", "give steps from there to ", c_.steps);
    for (int64_t step = begin; step < c_.steps; ++step) {
        world_.allow(c_.timeout, concat("step ", step + 1));
        if (step + 1 == profiled.first) setup_.kernels->device().start_profiler();
        train_step(step);
        if (step + 1 == profiled.last) setup_.kernels->device().stop_profiler();
        if (step == begin) machine_->check_high_water();
        // A signal to any rank stops all of them after the same step. Asked for once: one that
        // comes while this rank waits for the others' answers is for the next step.
        const bool stop = world_.any(stop_requested());
        between_steps(step + 1, stop || step + 1 == c_.steps);
        if (!stop) continue;
        world_.say(
            "stopped by a signal after step ", step + 1,
            c_.save_dir.empty() ? "; nothing saved: no --save-dir" : "; the same command resumes");
        return Exit::preempted;
    }
    return Exit::ok;
}

}  // namespace torus
