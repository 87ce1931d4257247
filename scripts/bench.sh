#!/usr/bin/env bash
# What this machine's GPU does, in one run: each op's share of the measured ceilings, attention, and
# whole training steps on random tokens, beside PyTorch on the same shapes when it is installed.
#   scripts/bench.sh [--build DIR] [--steps N] [--no-torch] [ops] [attention] [training]
#                    [MODEL:BxT[:RECOMPUTE[:FLAG=VALUE]] ...]
# Without a part named, all three. A model such as gpt2:124M:64x1024, gpt3:1.3B:1x65536:attention_out or
# llama2:7b:2x4096:none:moments=bf16 replaces the table of training shapes. PyTorch keeps fp32 weights and
# moments, and checkpoints whole blocks where RECOMPUTE is given.
# Rates of one run are comparable, those of two runs differ by a few per cent: quote ratios.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/cuda steps=25 torch=auto parts=() shapes=()
while [ $# -gt 0 ]; do
    case "$1" in
        --build | --steps)
            [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 64; }
            [ "$1" = --build ] && build=$2 || steps=$2
            shift ;;
        --no-torch) torch=no ;;
        ops | attention | training) parts+=("$1") ;;
        *:*:*x*) shapes+=("$1") ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "error: unknown argument '$1'; see --help" >&2; exit 64 ;;
    esac
    shift
done
[[ "$steps" =~ ^[0-9]+$ ]] && [ "$steps" -gt 8 ] || { echo "error: --steps $steps: give 9 or more, the first eight are not counted" >&2; exit 64; }
[ ${#parts[@]} = 0 ] && { [ ${#shapes[@]} = 0 ] && parts=(ops attention training) || parts=(training); }
[ ${#shapes[@]} = 0 ] && shapes=(gpt2:124M:64x1024 gpt2:774M:16x1024 gpt2:1558M:16x1024
    qwen2.5:1.5b:32x1024 llama2:7b:2x4096:none:moments=bf16
    gpt2:124M:2x32768:attention_out gpt3:1.3B:1x65536:attention_out)
bin=$build/bin
[ -x "$bin/train_gpt" ] || { echo "error: $bin/train_gpt is not there; build with: cmake --preset cuda && cmake --build --preset cuda" >&2; exit 66; }
command -v nvidia-smi >/dev/null || { echo "error: no NVIDIA driver on this machine (nvidia-smi is not there)" >&2; exit 71; }
if [ $torch = auto ]; then
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null && torch=yes || torch=no
fi
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

# Median tokens/s of the steps after the first eight.
median() {
    python3 - "$1" <<'PYTHON'
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[1])]
rates = [r["tokens_per_s"] for r in records if "tokens_per_s" in r and r["step"] > 8]
last = [r for r in records if "tokens_per_s" in r][-1]
print(f"{statistics.median(rates):.0f} {100 * (last['mfu'] or 0):.1f} {last['peak_gib']:.1f}")
PYTHON
}

training() {
    python3 - "$temporary/tokens.bin" <<'PYTHON'
import array, random, sys
random.seed(1)
tokens = array.array("H", (random.randrange(32000) for _ in range(3_000_000)))
with open(sys.argv[1], "wb") as f:
    array.array("i", [20240520, 1, len(tokens)] + [0] * 253).tofile(f)
    tokens.tofile(f)
PYTHON
    printf '%-14s %9s %-14s %10s %6s %8s %12s %6s\n' model 'B x T' recompute tok/s MFU GiB torch ratio
    local shape
    for shape in "${shapes[@]}"; do
        local family size model batch recompute flag
        IFS=: read -r family size batch recompute flag <<<"$shape"
        model=$family:$size recompute=${recompute:-none}
        local arguments=(--model "$model" --data "$temporary/tokens.bin" --device cuda --steps "$steps"
            --micro-batch-size "${batch%x*}" --seq-length "${batch#*x}" --recompute "$recompute"
            --tune-matmul "$temporary/choices.txt" --log-dir "$temporary/$shape")
        [ -z "$flag" ] || arguments+=("--${flag%%=*}" "${flag#*=}")
        "$bin/train_gpt" "${arguments[@]}" >"$temporary/out" 2>&1 || { tail -1 "$temporary/out"; continue; }
        read -r rate mfu gib <<<"$(median "$temporary/$shape/log.jsonl")"
        local theirs=- ratio=-
        if [ $torch = yes ]; then
            local flags=(--model "$model" --batch "${batch%x*}" --seq "${batch#*x}")
            [ "$recompute" = none ] || flags+=(--recompute)
            theirs=$(python3 scripts/bench_torch.py "${flags[@]}" 2>"$temporary/torch" | awk '{print $4}')
            theirs=${theirs:-failed}
            [ "$theirs" = failed ] || ratio=$(awk "BEGIN {printf \"%.3f\", $rate / $theirs}")
        fi
        printf '%-14s %9s %-14s %10s %5s%% %8s %12s %6s\n' "$model" "$batch" "$recompute" "$rate" "$mfu" "$gib" "$theirs" "$ratio"
    done
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for part in "${parts[@]}"; do
    echo
    echo "== $part"
    case $part in
        ops) "$bin/bench_cuda_ops" ;;
        attention) "$bin/bench_attention" ;;
        training) training ;;
    esac
done
