// The outermost loop. One optimizer step reads all its micro-batches first (their valid targets are
// the loss's denominator), queues forward, backward and update, and prints the step before it:
// results come back one step late, so the host never waits inside a step.
#include "engine/trainer.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <random>

#include "engine/eval.h"
#include "engine/log.h"
#include "engine/schedule.h"
#include "engine/setup.h"
#include "engine/state.h"
#include "engine/stop_signal.h"
#include "engine/verify.h"

namespace torus {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::string> shards_of(const Config& c, const std::string& glob, const Setup& setup) {
    return setup.tokenizer ? prepare_data(glob, *setup.tokenizer, c.cache_dir) : expand_glob(glob);
}

std::unique_ptr<Loader> open_loader(const Config& c, const std::string& glob, const Setup& setup,
                                    bool shuffle) {
    require(!c.document_mask || (setup.tokenizer && setup.tokenizer->end_of_text() >= 0),
            Exit::usage,
            "--document-mask on: needs the end-of-text token; name the data's tokenizer ",
            "with --tokenizer");
    return std::make_unique<Loader>(
        LoaderConfig{.shards = shards_of(c, glob, setup),
                     .S = c.seq_length,
                     .vocab = setup.model.V,
                     .end_of_text = setup.tokenizer ? setup.tokenizer->end_of_text() : -1,
                     .document_mask = c.document_mask,
                     .shuffle = shuffle,
                     .seed = c.seed});
}

std::string new_run_id() {
    std::random_device random;
    std::ostringstream out;
    for (int i = 0; i < 4; ++i) out << std::hex << (random() & 0xffffu);
    return out.str();
}

int64_t sample_context(const Config& c, const ModelConfig& model, int64_t prompt) {
    const int64_t wanted = std::max<int64_t>(2, prompt + c.sample_tokens);
    return model.family == "gpt2" ? std::min(wanted, model.max_T) : wanted;
}

std::vector<int32_t> start_of_text(const Setup& setup) {
    const int32_t end = setup.tokenizer ? setup.tokenizer->end_of_text() : -1;
    return {end >= 0 ? end : 0};
}

std::string text_of(const Setup& setup, const std::vector<int32_t>& ids) {
    if (setup.tokenizer) return setup.tokenizer->decode(ids);
    std::string numbers;
    for (int32_t id : ids) numbers += std::to_string(id) + " ";
    return numbers;
}

// Peak bf16 tensor throughput of devices whose figure is known; 0 otherwise.
double peak_flops(const Device& device) {
    const std::string name = device.name();
    for (const char* hopper : {"H100", "H200", "GH200"})
        if (name.find(hopper) != std::string::npos) return 989.5e12;
    if (name.find("A100") != std::string::npos) return 312e12;
    return 0;
}

class Trainer {
public:
    explicit Trainer(const Config& c);
    Exit train();

private:
    void resume_or_start();
    void train_step(int64_t step);
    void report();                     // the pending step's record
    void between_steps(int64_t done);  // eval, sample, save
    void save(int64_t done, bool last);
    void eval(int64_t done);
    void sample(int64_t done);

    const Config& c_;
    Setup setup_;
    std::unique_ptr<Loader> loader_, val_loader_;
    std::unique_ptr<CheckpointStore> store_;
    std::unique_ptr<Machine> machine_;
    std::unique_ptr<Log> log_;
    std::string tokenizer_path_;
    CheckpointState state_;
    int64_t micro_batches_ = 1, saved_step_ = -1;
    std::vector<Batch> batches_;

    struct Pending {
        StepRecord record;
        int64_t valid = 0;
        int slot = 0;
    };
    std::unique_ptr<Pending> pending_;
    Event done_[2];
    Clock::time_point last_, first_;
    int64_t timed_steps_ = 0;
};

Trainer::Trainer(const Config& c) : c_(c), setup_(make_setup(c)) {
    std::printf("%s\n", setup_.summary.c_str());
    loader_ = open_loader(c, c.data, setup_, c.shuffle);
    std::printf("data: %lld tokens in %zu shards, %lld sequences of %lld an epoch\n",
                static_cast<long long>(loader_->tokens()), loader_->config().shards.size(),
                static_cast<long long>(loader_->sequences()), static_cast<long long>(c.seq_length));
    if (!c.val_data.empty()) val_loader_ = open_loader(c, c.val_data, setup_, false);
    if (!c.save_dir.empty()) {
        store_ = std::make_unique<CheckpointStore>(c.save_dir);
        if (setup_.tokenizer) {
            tokenizer_path_ = c.save_dir + "/tokenizer.json";
            setup_.tokenizer->save(tokenizer_path_);
        }
    }
    const int64_t B = c.micro_batch_size;
    if (c.global_batch_tokens) micro_batches_ = c.global_batch_tokens / (B * c.seq_length);
    batches_.resize(size_t(micro_batches_));
    machine_ = std::make_unique<Machine>(
        *setup_.kernels, setup_.model, *setup_.family, c,
        Machine::Options{
            .B = B,
            .S = c.seq_length,
            .recompute = c.recompute,
            .document_mask = c.document_mask,
            .sample_context = c.sample_every ? sample_context(c, setup_.model, 1) : 0});
    machine_->allocate();
    std::printf("memory: %s on the device, as planned (--plan shows the parts)\n",
                human_bytes(machine_->device_bytes()).c_str());
    for (Event& e : done_) e = setup_.kernels->device().make_event();
}

void Trainer::resume_or_start() {
    Machine& m = *machine_;
    const std::string found = store_ ? store_->newest() : "";
    state_ = {.run_id = new_run_id(), .config_toml = to_toml(c_)};
    state_.model_json = model_signature(setup_.model);
    state_.precision = name_of(setup_.kernels->precision().master);
    state_.data_fingerprint = loader_->fingerprint();
    require(!found.empty() || c_.resume != ResumeMode::must, Exit::missing_input, "--resume must: ",
            c_.save_dir.empty() ? std::string("no --save-dir given") : c_.save_dir,
            " holds no intact checkpoint; use --resume auto to start anew");
    if (found.empty()) {
        if (setup_.weights)
            load_weights(m.params, m.kernels(), m.stream(), *setup_.weights);
        else
            initialize(m.params, m.kernels(), m.stream(), c_.seed);
        setup_.weights.reset();
        return;
    }
    require(c_.resume != ResumeMode::never, Exit::mismatch, "--resume never: ", c_.save_dir,
            " already holds a run's checkpoints; choose another --save-dir or --resume auto");
    const CheckpointState old = verify_checkpoint(found);
    auto same = [&](const char* what, const std::string& theirs, const std::string& ours,
                    const char* next) {
        require(theirs == ours, Exit::mismatch, found, ": ", what, " is '", theirs,
                "', this run has '", ours, "'; ", next);
    };
    same("the model", old.model_json, state_.model_json,
         "resume with the same --model and --tokenizer");
    same("the precision", old.precision, state_.precision, "resume with the same --dtype");
    same("the data", old.data_fingerprint, state_.data_fingerprint,
         "to go on with other data, start a new --save-dir from these weights (--model FOLDER)");
    load_checkpoint(m, found);
    state_.step = old.step;
    state_.next_sequence = old.next_sequence;
    state_.run_id = old.run_id;
    saved_step_ = old.step;
    std::printf("resumed from %s\n", found.c_str());
}

void Trainer::train_step(int64_t step) {
    Machine& m = *machine_;
    Kernels& k = m.kernels();
    Stream& s = m.stream();
    const int64_t B = c_.micro_batch_size;
    int64_t valid = 0;
    for (Batch& b : batches_) {
        loader_->read(state_.next_sequence, B, b);
        state_.next_sequence += B;
        valid += b.valid;
    }
    const double lr = learning_rate(c_, step);
    k.fill(s, m.step->loss_sum(), 0);
    for (const Batch& b : batches_) m.step->forward_backward(s, b, valid ? 1 / double(valid) : 0);
    if (valid) m.optimizer->step(s, lr);  // nothing was learnt from no targets

    auto next = std::make_unique<Pending>();
    next->slot = int(step % 2);
    next->valid = valid;
    next->record = {.step = step + 1,
                    .steps = c_.steps,
                    .lr = lr,
                    .tokens = state_.next_sequence * c_.seq_length};
    double* out = m.readback().as<double>() + 5 * next->slot;
    k.device().copy(s, out, m.step->loss_sum().data, int64_t(sizeof(double)));
    k.device().copy(s, out + 1, m.params.control.data, int64_t(4 * sizeof(double)));
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
    const double* r = m.readback().as<double>() + 5 * pending_->slot;
    StepRecord& record = pending_->record;
    record.loss = pending_->valid ? r[0] / double(pending_->valid) : 0;
    record.grad_norm = pending_->valid ? r[1] : 0;
    record.update_skipped = !pending_->valid || r[2] == 0;
    record.skipped = int64_t(r[4]);
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    if (timed_steps_++ == 0) first_ = now;  // the first step warms caches up
    const double tokens = double(micro_batches_ * c_.micro_batch_size * c_.seq_length);
    record.step_ms = seconds * 1e3;
    record.tokens_per_s = tokens / seconds;
    if (const double peak = peak_flops(device))
        record.mfu = cost_of(setup_.model).flops_per_token(setup_.model, c_.seq_length) *
                     record.tokens_per_s / peak;
    record.peak_gib = double(device.peak(Memory::device)) / double(1 << 30);
    const double per_step = timed_steps_ > 1 ? std::chrono::duration<double>(now - first_).count() /
                                                   double(timed_steps_ - 1)
                                             : seconds;
    record.eta_s = per_step * double(c_.steps - record.step);
    log_->step(record);
    pending_.reset();
}

void Trainer::eval(int64_t done) {
    const EvalResult r = evaluate(*machine_, *val_loader_, c_.micro_batch_size, c_.eval_batches);
    log_->eval(done, r.loss, state_.next_sequence * c_.seq_length);
}

void Trainer::sample(int64_t done) {
    const std::vector<int32_t> ids = machine_->sampler->generate(
        machine_->stream(), start_of_text(setup_),
        {.tokens = c_.sample_tokens,
         .temperature = c_.temperature,
         .top_k = c_.top_k,
         .seed = c_.seed,
         .stream_id = uint64_t(done),
         .stop_token = setup_.tokenizer ? setup_.tokenizer->end_of_text() : -1});
    log_->sample(done, text_of(setup_, ids));
}

// A failed save in mid-run costs a warning and the next one tries again; the last one ends the run.
void Trainer::save(int64_t done, bool last) {
    if (!store_ || saved_step_ == done) return;
    try {
        store_->save(state_, checkpoint_files(*machine_, setup_.model, tokenizer_path_), c_.keep);
    } catch (const Error& e) {
        if (last || e.code != Exit::io) throw;
        log_->message(concat("warning: step ", done, " is not saved: ", e.what()));
        return;
    }
    saved_step_ = done;
    log_->message("saved " + c_.save_dir + "/" + CheckpointStore::folder_of(done));
}

void Trainer::between_steps(int64_t done) {
    const bool last = done == c_.steps || stop_requested();
    auto due = [&](int64_t every) { return every > 0 && (done % every == 0 || done == c_.steps); };
    const bool eval_due = val_loader_ && due(c_.eval_every), sample_due = due(c_.sample_every);
    const bool save_due = store_ && (due(c_.save_every) || last);
    if (!(eval_due || sample_due || save_due || last)) return;
    report();
    if (eval_due) eval(done);
    if (sample_due) sample(done);
    if (save_due) save(done, last);
    last_ = Clock::now();
    timed_steps_ = 0;  // the step times that follow do not count the pause
}

Exit Trainer::train() {
    resume_or_start();
    log_ = std::make_unique<Log>(c_.log_dir, state_.step);
    watch_signals();
    last_ = Clock::now();
    const int64_t begin = state_.step;
    if (begin >= c_.steps) log_->message(concat("nothing to do: ", begin, " steps are done"));
    for (int64_t step = begin; step < c_.steps; ++step) {
        train_step(step);
        if (step == begin) machine_->check_high_water();
        between_steps(step + 1);
        if (const int signal = stop_requested()) {
            log_->message(
                concat("stopped by signal ", signal, " after step ", step + 1,
                       store_ ? "; the same command resumes" : "; nothing saved: no --save-dir"));
            return Exit::preempted;
        }
    }
    return Exit::ok;
}

Exit print_plan(const Config& c) {
    const Setup setup = make_setup(c);
    const Machine m(*setup.kernels, setup.model, *setup.family, c,
                    {.B = c.micro_batch_size,
                     .S = c.seq_length,
                     .recompute = c.recompute,
                     .document_mask = c.document_mask,
                     .sample_context = c.sample_every ? sample_context(c, setup.model, 1) : 0});
    std::printf("%s\nmicro-batch %lld x %lld tokens\n%s", setup.summary.c_str(),
                static_cast<long long>(c.micro_batch_size), static_cast<long long>(c.seq_length),
                m.table().c_str());
    return Exit::ok;
}

Exit generate(const Config& c) {
    const Setup setup = make_setup(c);
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
        m.sampler->generate(m.stream(), prompt,
                            {.tokens = c.sample_tokens,
                             .temperature = c.temperature,
                             .top_k = c.top_k,
                             .seed = c.seed,
                             .stop_token = setup.tokenizer->end_of_text()});
    std::printf("%s%s\n", printable(c.generate).c_str(), printable(text_of(setup, ids)).c_str());
    return Exit::ok;
}

}  // namespace

Exit run(const Config& c) {
    if (c.plan) return print_plan(c);
    if (!c.verify.empty()) return verify(c) ? Exit::ok : Exit::internal;
    if (!c.generate.empty()) return generate(c);
    return Trainer(c).train();
}

}  // namespace torus
