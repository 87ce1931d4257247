#!/usr/bin/env bash
# Do the tests notice a wrong program? Plants one fault at a time in a copy of the tree, builds, and
# runs the tests that must notice: a fault that survives is a hole in the tests.
#   scripts/mutations.sh [PATTERN]   only the faults whose name matches; default: all
#   scripts/mutations.sh --check     only whether each fault's old text is still in its file (a second)
# Exit code 0: all were noticed; 1: some survived (named at the end); 70: this script is out of date.
set -euo pipefail
cd "$(dirname "$0")/.."
pattern=${1:-.} only_check=no
[ "$pattern" != --check ] || pattern=. only_check=yes

if [ $only_check = no ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    tree=$work/tree
    mkdir "$tree"
    tar -c --exclude=./build --exclude=./.git . | tar -x -C "$tree"
    export CCACHE_BASEDIR=$tree
    cmake -S "$tree" -B "$work/build" -G Ninja -DTORUS_CUDA=OFF >/dev/null
fi

build() { cmake --build "$work/build" --target "$1" >"$work/log" 2>&1; }
# passes PROGRAM FILTER: true when all tests pass. For train_gpt the filter names tests of test/cli.
passes() {
    if [ "$1" = train_gpt ]; then
        timeout 600 python3 "$tree/test/cli/test_ranks.py" "$work/build/bin" $2 >"$work/log" 2>&1
    else
        timeout 300 "$work/build/bin/$1" "-tc=$2" >"$work/log" 2>&1
    fi
}

# Whether each part of a filter names a test: a comma inside a name makes two parts, of nothing.
names_tests() {
    local program=$1 part parts
    [ "$program" != train_gpt ] || return 0
    IFS=, read -ra parts <<<"$2"
    for part in "${parts[@]}"; do
        "$work/build/bin/$program" "-tc=$part" --count | grep -q 'filters: [1-9]' ||
            { echo "error: no test of $program is called '$part'" >&2; return 1; }
    done
}

survived=() stale=()
noticed=0
clean=()  # "program filter" pairs that passed without a fault

# fault NAME FILE PROGRAM FILTER: reads the old and the new text, separated by a line "----".
fault() {
    local name=$1 file=$2 program=$3 filter=$4 text old new
    text=$(cat; echo x)  # x: keeps the last newline
    text=${text%x}
    [[ $name =~ $pattern ]] || return 0
    old=${text%%$'\n'----$'\n'*}
    new=${text#*$'\n'----$'\n'}
    new=${new%$'\n'}
    if [ $only_check = yes ]; then
        [[ $(cat "$file") == *"$old"* ]] || stale+=("$name: $file")
        return
    fi
    if [[ " ${clean[*]-} " != *" $program/$filter "* ]]; then
        build "$program" || { tail -20 "$work/log" >&2; echo "error: $program does not build" >&2; exit 70; }
        names_tests "$program" "$filter" || exit 70
        passes "$program" "$filter" ||
            { tail -20 "$work/log" >&2; echo "error: $program fails without any fault" >&2; exit 70; }
        clean+=("$program/$filter")
    fi
    cp "$tree/$file" "$work/original"
    OLD=$old NEW=$new perl -0777 -i -pe '$n = s/\Q$ENV{OLD}\E/$ENV{NEW}/; END { exit !$n }' \
        "$tree/$file" || { echo "error: $name: $file has changed; update this script" >&2; exit 70; }
    if ! build "$program"; then
        tail -20 "$work/log" >&2
        echo "error: $name does not build; update this script" >&2
        exit 70
    fi
    if passes "$program" "$filter"; then
        echo "SURVIVED  $name"
        survived+=("$name")
    else
        echo "noticed   $name"
        noticed=$((noticed + 1))
    fi
    cp "$work/original" "$tree/$file"
}

modes='every mode equals one rank: selection*,bytes sent*,scores beyond*'

fault 'last hop of the ring skipped' comm/seq/ring.cpp test_comm "$modes" <<'END'
    if (mine.empty() || (late && !splits)) return;
----
    if (mine.empty() || (late && !splits) || (steps() > 1 && step == steps() - 1)) return;
END
fault 'K and V of two hops swapped' comm/seq/ring.cpp test_comm "$modes" <<'END'
                                  fetched_keys(c, step).kv.slice(1, span.at, span.rows));
----
                                  buffer(c.buffers, "block", step + 1,
                                         {d_.B, w.k_rows(), 2 * d_.Hk, d_.D})
                                      .slice(1, span.at, span.rows));
END
fault 'K and V swapped' comm/seq/ring.cpp test_comm "$modes" <<'END'
.k = half(keys.kv, 0),
                                     .v = half(keys.kv, 1),
----
.k = half(keys.kv, 1),
                                     .v = half(keys.kv, 0),
END
fault 'causal off by one' comm/seq/schedule.cpp test_comm "$modes" <<'END'
const int64_t end = std::min(keys.end(), q[run].end());
----
const int64_t end = std::min(keys.end(), q[run].end() - 1);
END
fault 'keys one position late' comm/seq/schedule.cpp test_comm "$modes" <<'END'
.k0 = begin,
----
.k0 = begin + 1,
END
fault 'local instead of global positions' comm/seq/schedule.cpp test_comm "$modes" <<'END'
.q0 = q[run].begin,
----
.q0 = q_row,
END
fault 'own tokens see all of each other' comm/seq/schedule.cpp test_comm "$modes" <<'END'
pieces.push_back({0, n, 0, 0, n, 0, true});
----
pieces.push_back({0, n, 0, 0, n, 0, false});
END
fault 'queries joined that see different keys' comm/seq/schedule.cpp test_comm 'schedule: every visible*' <<'END'
last.k_row != now.k_row || last.k_rows != now.k_rows)
----
last.k_row != now.k_row)
END
fault 'queries that see nothing keep what lay there' comm/seq/ring.cpp test_comm "$modes" <<'END'
    if (c.masked) fill_rows(k_, s, c.queries.o, 0);  // a query may see nothing
----
END
fault 'a helper gets the statistics of other rows' comm/seq/ring.cpp test_comm "$modes" <<'END'
all.slice(2, w.q_lo, n)
----
all.slice(2, 0, n)
END
fault 'documents lose their first key' comm/seq/schedule.cpp test_comm "$modes" <<'END'
const int64_t begin = std::max(keys.begin, first);
----
const int64_t begin = std::max(keys.begin, first + (first_key != nullptr));
END
fault 'whole blocks sent where documents need parts' comm/seq/schedule.cpp test_comm "$modes" <<'END'
first = std::min(first, int64_t(*std::min_element(row, row + q[run].count)));
----
first = 0 * row[0];
END
fault 'returned dK and dV counted twice' comm/seq/running_sum.cpp test_comm "$modes" <<'END'
            add_rows(*k_, s, to, rows_of(sum_, box).slice(2, head, heads), x);
----
            add_rows(*k_, s, to, rows_of(sum_, box).slice(2, head, heads), x),
                add_rows(*k_, s, to, to, x);
END
fault 'what came home last is lost' comm/seq/running_sum.cpp test_comm "$modes" <<'END'
    if (!out.empty()) owed_.take(box, [](const RowBox&) {});
----
END
fault 'returned dK and dV divided by the ranks' comm/seq/ring.cpp test_comm "$modes" <<'END'
            for (int64_t b = 0; b < d_.B; ++b)
                for (const Span& span : w.keys)
                    c.keys.dkv.add(
----
            k_.scale(s, home, 1.0 / ranks());
            for (int64_t b = 0; b < d_.B; ++b)
                for (const Span& span : w.keys)
                    c.keys.dkv.add(
END
fault 'results written over those of an earlier block' comm/seq/fresh_rows.cpp test_comm "$modes" <<'END'
if (fresh == box.count())
----
if (fresh > 0)
END
fault 'results of some heads written over all' comm/seq/fresh_rows.cpp test_comm "$modes" <<'END'
if (slab.count() > 0) left
----
if (slab.count() > 0 && axis != RowBox::head) left
END
fault 'results added to what lay there before' comm/seq/fresh_rows.cpp test_comm "$modes" <<'END'
    for (const RowBox& b : taken) clear(b);
----
END
fault 'sums of rows without results not cleared' comm/seq/running_sum.cpp test_comm "$modes" <<'END'
    clear_rest(s);
----
END
fault 'work counted as if there were no documents' comm/seq/balance.cpp test_comm 'balance*' <<'END'
std::max<int64_t>(i + 1 - first_key[b * S + i], 0);
----
i + 1;
END
fault 'a moved placement loses the rest of the cut' comm/seq/balance.cpp test_comm 'balance*' <<'END'
last ? count_tokens(standing[size_t(r)]) - (each - 1) * length : length;
----
length;
END
fault 'ulysses groups keep the tokens of the batch before' comm/seq/ulysses.cpp test_comm 'balance*' <<'END'
        place(first_key);
----
END
fault 'last piece of the local step forgotten' comm/seq/ring.cpp test_comm "$modes" <<'END'
        if (t == steps()) compute(s, c, 0, true);
----
END
fault 'heads between the early and the late share forgotten' comm/seq/schedule.cpp test_comm "$modes" <<'END'
    return cut(all.head, all.head_end, (all.head_end - all.head + 2) / 4);
----
    return cut(all.head, all.head_end, (all.head_end - all.head + 2) / 4 + !late);
END
fault 'an early share of everything' comm/seq/schedule.cpp test_comm "$modes" <<'END'
        (late ? begin : end) = end - held_back;
----
        if (late) begin = end - held_back;
END
fault 'helper and owner both take the late half' comm/seq/schedule.cpp test_comm "$modes" <<'END'
(run < q.size() / 2) != (part == Part::early_runs)) continue;
----
run < q.size() / 2) continue;
END
fault 'results of a helper dropped' comm/seq/ring.cpp test_comm "$modes" <<'END'
if (!w.helps(x) || w.pair.q != me_) continue;
----
if (!c.back || !w.helps(x) || w.pair.q != me_) continue;
END
fault 'helper works without the mask' comm/seq/ring.cpp test_comm "$modes" <<'END'
if (c.masked) each_sequence(recvs, w.pair.q, q.first_key);
----
if (c.masked) each_sequence(recvs, w.pair.q, Tensor(q.lse.data, DType::i32, q.first_key.shape));
END
fault 'stale results of a helper' comm/seq/ring.cpp test_comm "$modes" <<'END'
            const bool add_q = q.dq.must_add(s, box(q_row, p.q_rows));
----
            const bool add_q = q.dq.must_add(s, box(q_row, p.q_rows)) || w.helps(me_);
END
fault 'one buffer where two are needed' comm/seq/ring.cpp test_comm "$modes" <<'END'
    slots_ = most.remote_steps > 1 ? 2 : 1;
----
    slots_ = 1;
END
fault 'merge without the maximum' kernels/cpu/attention.cpp test_comm "$modes" <<'END'
const double max = std::max(double(l), double(l2));
----
const double max = 0;
END
fault 'kv gradients of one rank only' comm/seq/head_slice.cpp test_comm "$modes" <<'END'
for (size_t i = 1; i < owners.size(); ++i) {
----
for (size_t i = 1; i < owners.size() - 1; ++i) {
END
fault 'heads of the wrong rank' comm/seq/placement.cpp test_comm "$modes" <<'END'
const TokenRun mine = part_of(H, n, i);
----
const TokenRun mine = part_of(H, n, n - 1 - (n - 1 - i) / 2 * 2 + (n == 2 ? i - 1 : 0));
END
fault 'delta of the wrong group' comm/seq/head_slice.cpp test_comm "$modes" <<'END'
.delta = group_stats(stats[1], x)
----
.delta = group_stats(stats[1], h.groups[0])
END
fault 'every slice of heads has the keys of the first' comm/seq/ulysses.cpp test_comm "$modes" <<'END'
cut(i, kv_heads_, 2, {&in.k, &in.v});
----
cut(0, kv_heads_, 2, {&in.k, &in.v});
END
fault 'every slice of heads has the delta of the first' comm/seq/ulysses.cpp test_comm "$modes" <<'END'
cut(i, heads_, 1, {&g.lse, &g.delta});
----
cut(i, heads_, 1, {&g.lse}), cut(0, heads_, 1, {&g.delta});
END
fault 'the last slice of heads stays away' comm/seq/ulysses.cpp test_comm "$modes" <<'END'
        for (int i = 0; i < n; ++i) {
            device_.wait(s, arrived_[size_t(i)]);
            slices_[size_t(i)].finish(s, part(in, i));
----
        for (int i = 0; i < std::max(1, n - 1); ++i) {
            device_.wait(s, arrived_[size_t(i)]);
            slices_[size_t(i)].finish(s, part(in, i));
END
fault 'a token of each shard dropped' comm/seq/placement.cpp test_comm "$modes" <<'END'
    return {begin, end - begin};
----
    return {begin, end - begin - (n > 1 && i == n - 1 && end > begin)};
END
fault 'the last rank is not summed' comm/host_comm.cpp test_comm 'comm:*' <<'END'
for (size_t p = 1; p < parts.size(); ++p)
----
for (size_t p = 1; p + 1 < parts.size(); ++p)
END
fault 'sums in another order on each rank' comm/host_comm.cpp test_comm 'comm:*' <<'END'
    transfer(sends, recvs);
        reduce_segment(mine, parts, op);
----
    transfer(sends, recvs);
        std::rotate(parts.begin(), parts.begin() + rank(), parts.end());
        reduce_segment(mine, parts, op);
END
fault 'half types add step by step' comm/host_comm.cpp test_comm 'comm:*' <<'END'
v = combine(v, F::load(parts[p].as<Stored>()[i]), op);
----
v = F::load(F::store(combine(v, F::load(parts[p].as<Stored>()[i]), op)));
END
fault 'the handshake looks at keys only' comm/handshake.cpp test_comm 'comm:*' <<'END'
if (a[i] == b[i]) continue;
----
if (a[i].first == b[i].first) continue;
END
fault 'copies do not wait for the receiver' comm/peer_copy.cpp test_comm 'peer copy*' <<'END'
    device_->wait(s, to, to);  // the receiver's "ready"
----
END
fault 'a receiver does not wait for the copies' comm/peer_copy.cpp test_comm 'peer copy*' <<'END'
        device_->wait(s, peer, rank_);
----
END
fault 'copies aside are not waited for' comm/peer_copy.cpp test_comm 'peer copy*' <<'END'
for (const int peer : elsewhere) device_->wait(s, rank_, peer);
----
elsewhere.clear();
END
fault 'memory made anew is taken for the old' comm/peer_copy.cpp test_comm 'peer copy*' <<'END'
if (o.allocation.id == wanted.id) {
----
if (o.allocation.base == wanted.base) {
END
fault 'a mailbox runs over' comm/mailbox.cpp test_comm 'mailbox*' <<'END'
<= room_; });
----
<= room_ + 20; });
END
fault 'the watchdog names nobody' comm/watchdog.cpp test_comm 'processes:*' <<'END'
if (missing && (s.begun < furthest || silent > lifeless_ms)) missing->push_back(s.rank);
----
if (missing && silent > 100 * lifeless_ms) missing->push_back(s.rank);
END
fault 'orphans live on' comm/launch.cpp test_comm 'processes:*' <<'END'
    prctl(PR_SET_PDEATHSIG, SIGKILL);
----
    prctl(PR_SET_PDEATHSIG, 0);
END

training='every mode equals one rank: loss*,data parallelism*,fewer tokens*'

fault 'training: labels shifted inside the shard' engine/step.cpp test_engine "$training" <<'END'
out = std::copy_n(source->data() + b * o_.S + run.begin, run.count, out);
----
out = std::copy_n(source->data() + b * o_.S + run.begin -
                                      (source == &batch.targets && run.begin > 0),
                                  run.count, out);
END
fault 'training: local positions' engine/step.cpp test_engine "$training" <<'END'
out = std::copy_n(source->data() + b * o_.S + run.begin, run.count, out);
----
out = std::copy_n(source->data() + b * o_.S + (source == &batch.pos ? 0 : run.begin),
                                  run.count, out);
END
fault 'training: gradients multiplied by the ranks' engine/trainer.cpp train_gpt 'Ranks.test_every_mode' <<'END'
valid ? 1 / double(valid) : 0);
----
valid ? world_.size() / double(valid) : 0);
END
fault 'training: gradients divided by the ranks' engine/trainer.cpp train_gpt 'Ranks.test_every_mode' <<'END'
valid ? 1 / double(valid) : 0);
----
valid ? 1 / double(valid) / world_.size() : 0);
END
fault 'training: a norm weight not summed' engine/gradient_sum.cpp test_engine "$training" <<'END'
params_.gradients.rows(c.begin, c.end - c.begin)
----
params_.gradients.rows(c.begin, c.decay_end - c.begin)
END
fault 'training: a component summed too early' engine/step.cpp test_engine "$training" <<'END'
    if (micro_batches_ == 1 && !o_.record) sum_.add(s, c);
----
    if (!o_.record) sum_.add(s, c);
END
fault 'sum by exchange: the last rank left out' comm/exchange_sum.cpp test_comm 'comm: sums by*' <<'END'
i < P - 1; ++i) add(sum, i);
----
i < P - 2; ++i) add(sum, i);
END
fault 'sum by exchange: this rank first' comm/exchange_sum.cpp test_comm 'comm: sums by*' <<'END'
for (int i = 1; i < mine; ++i) add(to_me[0].data, i);
        if (mine > 0) add(sum, 0);
----
for (int i = 0; i < mine; ++i) add(sum, i);
END
fault 'training: the embedding summed before its gradient' engine/step.cpp test_engine "$training" <<'END'
    add_up(s, params_.head());
    run_backward(s);
----
    add_up(s, params_.head());
    add_up(s, params_.embed());
    run_backward(s);
END
fault 'training: the loss of one rank' engine/trainer.cpp train_gpt 'Ranks.test_every_mode' <<'END'
    world_.data().all_reduce(s, m.step->loss_sum());
----
END

fault 'verify-sp: the loss alone decides' engine/verify_sp.cpp test_engine 'verify-sp*' <<'END'
failed = !(loss <= bound && norm <= bound && worst <= bound);
----
failed = !(loss <= bound);
END
fault 'verify-sp: tensors are not looked at' engine/verify_sp.cpp test_engine 'verify-sp*' <<'END'
        if (!(d <= worst)) worst = d, at = i;
----
        if (i == 0) worst = d, at = i;
END
fault 'verify-sp: half of the batch alone' engine/verify_sp.cpp test_engine 'verify-sp*' <<'END'
run_step(*kernels, c, setup, o, batches, 0, 1);
----
run_step(*kernels, c, setup, o, batches, 0, 2);
END

fault 'optimizer: a skip keeps the loss scale' kernels/cpu/adamw.cpp test_engine 'an infinite gradient*' <<'END'
        if (rule.window > 0) scale = std::max(rule.lowest, scale / 2);
----
END
fault 'optimizer: a clipped gradient keeps its scale' kernels/cpu/adamw.cpp test_engine 'a loss scale changes no bit*' <<'END'
c[Control::coefficient] = clip / scale;
----
c[Control::coefficient] = clip < 1 ? clip : clip / scale;
END
fault 'optimizer: the scale does not reach the loss' engine/step.cpp test_engine 'gradients carry*' <<'END'
.loss_scale = params_.loss_scale()
----
.loss_scale = {}
END
fault 'optimizer: a resume starts with the first scale' engine/params.cpp test_engine 'a resume goes on*' <<'END'
if (n == without_scale || p.loss_scaling().window == 0) scale
----
scale
END
fault 'optimizer: moments rounded to nearest' kernels/cpu/adamw.cpp test_kernels 'small increments*' <<'END'
to[i] = float_to_bf16_stochastic(float(values[i]), word >> low);
----
to[i] = float_to_bf16_stochastic(float(values[i]), 0x8000u + 0 * (word >> low));
END
fault 'optimizer: the same random bits each step' kernels/cpu/adamw.cpp test_kernels 'adamw in every*' <<'END'
store(a, a.m, i, n, m, moments_stream(s.count), 0);
----
store(a, a.m, i, n, m, moments_stream(1), 0);
END
fault 'optimizer: the same random bits in each range' engine/optimizer.cpp test_engine 'random bits belong*' <<'END'
.offset = uint64_t(r.begin)
----
.offset = 0
END

if [ $only_check = yes ]; then
    for name in "${stale[@]+"${stale[@]}"}"; do
        echo "error: $name has changed; update scripts/mutations.sh" >&2
    done
    [ ${#stale[@]} = 0 ] || exit 70
    exit
fi
echo "$noticed noticed, ${#survived[@]} survived"
for name in "${survived[@]+"${survived[@]}"}"; do echo "  $name"; done
[ ${#survived[@]} = 0 ]
