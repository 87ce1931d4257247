#!/usr/bin/env bash
# What this machine's GPU does, in one run: each op's share of the measured ceilings, attention, and
# whole training steps on random tokens, beside PyTorch on the same shapes when it is installed.
#   scripts/bench.sh [--build DIR] [--steps N] [--no-torch] [--ranks N] [ops] [attention] [training]
#                    [--choices FILE] [MODEL:BxT[:RECOMPUTE[:FLAG=VALUE]] ...]
# Without a part named, all three. A model such as gpt2:124M:64x1024, gpt3:1.3B:1x65536:attention_out or
# llama2:7b:2x4096:none:moments=bf16 replaces the table of training shapes. PyTorch keeps fp32 weights and
# moments, and checkpoints whole blocks where RECOMPUTE is given.
# --ranks N trains each shape (gpt3:1.3B:1x65536:attention_out) with one GPU, then with N that share each
# sequence: ours in every mode, PyTorch with Ulysses and with its ring, which keeps attention's output
# where attention_out is given. Ratios are to our one GPU and to PyTorch on N.
# --steps: 25, or with --ranks 6; the first third is not counted, at most 8 steps.
# --choices: a file that keeps the timed matmul algorithms for the next run (a few seconds for each product).
# Rates of one run are comparable, those of two runs differ by a few per cent: quote ratios.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/cuda steps='' ranks='' choices='' torch=auto parts=() shapes=()
while [ $# -gt 0 ]; do
    case "$1" in
        --build | --steps | --ranks | --choices)
            [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 64; }
            printf -v "${1#--}" %s "$2"
            shift ;;
        --no-torch) torch=no ;;
        ops | attention | training) parts+=("$1") ;;
        *:*:*x*) shapes+=("$1") ;;
        -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "error: unknown argument '$1'; see --help" >&2; exit 64 ;;
    esac
    shift
done
[[ "${ranks:=1}" =~ ^[1-9][0-9]*$ ]] || { echo "error: --ranks $ranks: give 2 or more" >&2; exit 64; }
if [ "$ranks" = 1 ]; then
    default=(gpt2:124M:64x1024 gpt2:774M:16x1024 gpt2:1558M:16x1024
        qwen2.5:1.5b:32x1024 llama2:7b:2x4096:none:moments=bf16
        gpt2:124M:2x32768:attention_out gpt3:1.3B:1x65536:attention_out)
else
    default=(gpt3:1.3B:1x65536:attention_out)
fi
[ -n "$steps" ] || { [ "$ranks" = 1 ] && steps=25 || steps=6; }
[[ "$steps" =~ ^([3-9]|[1-9][0-9]+)$ ]] || { echo "error: --steps $steps: give 3 or more, the first third is not counted" >&2; exit 64; }
skip=$((steps / 3 < 8 ? steps / 3 : 8))
[ ${#parts[@]} -gt 0 ] || { [ ${#shapes[@]} = 0 ] && [ "$ranks" = 1 ] && parts=(ops attention training) || parts=(training); }
[ ${#shapes[@]} -gt 0 ] || shapes=("${default[@]}")
bin=$build/bin
[ -x "$bin/train_gpt" ] || { echo "error: $bin/train_gpt is not there; build with: cmake --preset cuda && cmake --build --preset cuda" >&2; exit 66; }
command -v nvidia-smi >/dev/null || { echo "error: no NVIDIA driver on this machine (nvidia-smi is not there)" >&2; exit 71; }
if [ $torch = auto ]; then
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null && torch=yes || torch=no
fi
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

# Of a log: median tokens/s of the steps that count, GiB, MFU.
summary() {
    python3 - "$1" "$skip" <<'PYTHON'
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[1])]
records = [r for r in records if "tokens_per_s" in r]
rate = statistics.median(r["tokens_per_s"] for r in records if r["step"] > int(sys.argv[2]))
print(f"{rate:.0f} {records[-1]['peak_gib']:.1f} {100 * (records[-1]['mfu'] or 0):.1f}")
PYTHON
}

# The flags of a shape, for both programs.
read_shape() {
    local family size flag
    IFS=: read -r family size batch recompute flag <<<"$1"
    model=$family:$size recompute=${recompute:-none}
    our_flags=(--model "$model" --data "$temporary/tokens.bin" --device cuda --steps "$steps"
        --micro-batch-size "${batch%x*}" --seq-length "${batch#*x}" --recompute "$recompute"
        --tune-matmul "${choices:-$temporary/choices.txt}")
    [ -z "$flag" ] || our_flags+=("--${flag%%=*}" "${flag#*=}")
    torch_flags=(--model "$model" --batch "${batch%x*}" --seq "${batch#*x}" --steps "$steps"
        --skip "$skip")
}

reason() { grep -m 1 '^error' "$1" >&2 || tail -1 "$1" >&2; }

# Both print tokens/s and GiB, or "failed", and then on stderr why. $1 of ours: a name for its log.
ours() {
    local log=$temporary/$1
    if "$bin/train_gpt" "${our_flags[@]}" --log-dir "$log" "${@:2}" >"$temporary/out" 2>&1; then
        summary "$log/log.jsonl"
    else
        echo failed - -
        reason "$temporary/out"
    fi
}
theirs() {
    local line='s|.*: ([0-9]+) tok/s .* ms ([0-9.]+) GiB.*|\1 \2|p'
    timeout 300 python3 scripts/bench_torch.py "${torch_flags[@]}" "$@" >"$temporary/out" 2>"$temporary/errors" || {
        echo failed - >"$temporary/out"
        line=p
        reason "$temporary/errors"
    }
    sed -nE "$line" "$temporary/out"
}

ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (a + 0 > 0 && b + 0 > 0) printf "%.3f", a / b; else printf "-" }'; }

training() {
    printf '%-14s %9s %-14s %10s %6s %8s %12s %6s\n' model 'B x T' recompute tok/s MFU GiB torch ratio
    local shape model batch recompute our_flags torch_flags rate gib mfu peer
    for shape in "${shapes[@]}"; do
        read_shape "$shape"
        read -r rate gib mfu <<<"$(ours "$shape")"
        printf '%-14s %9s %-14s %10s %5s%% %8s' "$model" "$batch" "$recompute" "$rate" "$mfu" "$gib"
        peer=-
        [ "$recompute" = none ] || torch_flags+=(--recompute)
        [ $torch = no ] || read -r peer _ <<<"$(theirs)"
        printf ' %12s %6s\n' "$peer" "$(ratio "$rate" "$peer")"
    done
}

# name, tokens/s, GiB
row() {
    printf '%-16s %10s %9s %8s %10s %8s\n' "$1" "$2" "$(ratio "$2" "$one")" "$3" "$(ratio "$2" "$torch_ulysses")" "$(ratio "$2" "$torch_ring")"
}

training_on_ranks() {
    local shape model batch recompute our_flags torch_flags one torch_ulysses torch_ring rate gib mode
    for shape in "${shapes[@]}"; do
        read_shape "$shape"
        one='' torch_ulysses='' torch_ring=''
        printf '%s %s, recompute %s, %s steps\n' "$model" "$batch" "$recompute" "$steps"
        printf '%-16s %10s %9s %8s %10s %8s\n' "on $ranks GPUs" tok/s speed-up GiB /t.ulysses /t.ring
        read -r one gib _ <<<"$(ours "$shape")"
        row 'one GPU' "$one" "$gib"
        case $recompute in
            attention_out) torch_flags+=(--recompute attention_out) ;;
            full) torch_flags+=(--recompute) ;;
        esac
        torch_flags+=(--ranks "$ranks")
        if [ $torch = yes ]; then
            read -r torch_ulysses gib <<<"$(theirs --seq-parallel ulysses)"
            row 'torch ulysses' "$torch_ulysses" "$gib"
            read -r torch_ring gib <<<"$(theirs --seq-parallel ring)"
            row 'torch ring' "$torch_ring" "$gib"
        fi
        for mode in ulysses zigzag_ring dist_flash ring; do
            read -r rate gib _ <<<"$(ours "$shape-$mode" --ranks "$ranks" --parallel-mode $mode)"
            row "$mode" "$rate" "$gib"
        done
    done
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for part in "${parts[@]}"; do
    echo
    echo "== $part"
    case $part in
        ops) "$bin/bench_cuda_ops" ;;
        attention) "$bin/bench_attention" ;;
        training)
            python3 scripts/random_tokens.py "$temporary/tokens.bin" 3000000 32000
            if [ "$ranks" = 1 ]; then training; else training_on_ranks; fi ;;
    esac
done
