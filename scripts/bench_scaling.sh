#!/usr/bin/env bash
# Scaling over the GPUs of this machine: what the links carry, and training on 1, 2, 4, 8 GPUs.
#   scripts/bench_scaling.sh [--build DIR] [--out DIR] [--gpus LIST] [--device cpu|cuda] [--memory GIB]
#                            [--models LIST] [--lengths LIST] [--steps N] [--plan] [--quick]
#                            [links] [modes] [easycontext] [weak] [-- FLAG...]
# Parts, all when none is named:
#   links        GB/s of the exchanges, on every number of GPUs
#   modes        1.3B and four layers of Llama-2-7B, S 64K to 512K: one GPU, then data_parallel, ulysses,
#                zigzag_ring, dist_flash and usp:RINGxULYSSES on the most GPUs; the shortest S on fewer, too.
#                All as one GPU recomputes. Exposed ms: of one layer's attention, forward and backward.
#   easycontext  Llama-2-7B as in EasyContext's table (at 1M ulysses, too, which needs less memory), on the
#                most GPUs, with bf16 moments and no master weights
#   weak         124M and 1558M, data parallel, the same batch for each GPU
# Several GPUs are first compared with one (--verify-sp, bench_seq): what is wrong has no rate. A shape
# whose plan is above --memory (default: what is free, less 2 GiB) is left out, what fails is a row too.
# Results are lines of DIR/results.jsonl (build/scaling), where later ones replace those of the same row;
# scripts/plot_scaling.py makes tables and plots of them.
#   --models, --lengths  of modes: gpt3:1.3B,llama2:7b:d4 and 65536,131072,262144,524288
#   --steps              4 (weak: 20), of which the first quarter is not counted
#   --plan               only says what fits, which needs no GPU but --memory and --gpus
#   --quick              a trial with tiny models; with --device cpu one without GPUs
#   -- FLAG...           for train_gpt, such as -- --deterministic off; none that a part gives itself
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "error: $1" >&2; exit 64; }
build='' out=build/scaling gpus='' device=cuda memory='' models='' lengths='' steps='' plan=no quick=no
parts=() extra=()
while [ $# -gt 0 ]; do
    case "$1" in
        --build | --out | --gpus | --device | --memory | --models | --lengths | --steps)
            [ $# -gt 1 ] || usage "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift ;;
        --plan) plan=yes ;;
        --quick) quick=yes ;;
        links | modes | easycontext | weak) parts+=("$1") ;;
        --) extra=("${@:2}"); break ;;
        -h | --help) sed -n '2,26s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) usage "unknown argument '$1'; see --help" ;;
    esac
    shift
done
case $device in cpu | cuda) ;; *) usage "--device $device: give cpu or cuda" ;; esac
numbers='^[1-9][0-9]*(,[1-9][0-9]*)*$'
[[ -z $gpus || $gpus =~ $numbers ]] || usage "--gpus $gpus: give numbers such as 1,2,8"
[[ -z $lengths || $lengths =~ $numbers ]] || usage "--lengths $lengths: give numbers such as 65536,131072"
[[ -z $steps || $steps =~ ^([2-9]|[1-9][0-9]+)$ ]] || usage "--steps $steps: give 2 or more, the first is not counted"
[ ${#parts[@]} -gt 0 ] || parts=(links modes easycontext weak)

preset=cuda
[ $device = cuda ] || preset=release
: "${build:=build/$preset}"
bin=$build/bin
for program in train_gpt bench_seq bench_comm; do
    [ -x "$bin/$program" ] || {
        echo "error: $bin/$program is not there; build with: cmake --preset $preset && cmake --build --preset $preset" >&2
        exit 66
    }
done
if [ $device = cpu ]; then
    : "${gpus:=1,2,4}"
elif command -v nvidia-smi >/dev/null; then
    there=$(nvidia-smi -L | grep -c '^GPU')
    [ -n "$gpus" ] || for n in 1 2 4 8; do [ $n -gt "$there" ] || gpus+=${gpus:+,}$n; done
    : "${memory:=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | sort -n |
        awk 'NR == 1 { printf "%.1f", $1 / 1024 - 2 }')}"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
elif [ $plan = no ] || [ -z "$memory" ] || [ -z "$gpus" ]; then
    echo "error: no NVIDIA driver on this machine (nvidia-smi is not there); --device cpu --quick is a trial without GPUs" >&2
    exit 71
fi
[[ -z $memory || $memory =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage "--memory $memory: give GiB"
mapfile -t gpus < <(tr , '\n' <<<"$gpus" | sort -nu)
most=${gpus[-1]}
[ $device = cpu ] || [ $plan = yes ] || [ "$most" -le "$there" ] || usage "--gpus $most: this machine has $there"

# Shapes: MODEL:BxS for each GPU, MODE:S with one sequence.
weak=(gpt2:124M:64x1024 gpt2:1558M:16x1024)
easycontext=(data_parallel:65536 zigzag_ring:{65536,131072,262144,524288,716800,1048576} ulysses:1048576)
easycontext_model=llama2:7b less_state=(--moments bf16 --master-weights off)
tokens=(3000000 32000) common=(--device "$device" --timeout 1800) few=4 many=20
if [ $quick = yes ]; then
    : "${models:=llama:d2x256}" "${lengths:=64,128}"
    weak=(gpt2:d2x64:2x64) easycontext=(data_parallel:64 zigzag_ring:{64,128})
    easycontext_model=llama:d2x64 less_state=() tokens=(10000 256) few=3 many=3
    common+=(--tokenizer bytes)
fi
[ $device = cuda ] || common+=(--threads 1)
IFS=, read -ra models <<<"${models:-gpt3:1.3B,llama2:7b:d4}"
mapfile -t lengths < <(tr , '\n' <<<"${lengths:-65536,131072,262144,524288}" | sort -nu)

mkdir -p "$out" || exit 77
results=$out/results.jsonl
[ $plan = no ] || results=/dev/null
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

# Of what a program printed, the line that says why it failed.
reason() { grep -m 1 '^error' "$1" | sed 's/^error: //' || tail -1 "$1"; }

# KEY=VALUE...: a line of results.jsonl, and one for people. log=FILE stands for what it says of the steps
# after the first skip=N.
keep() {
    python3 - "$results" "$@" <<'PYTHON'
import json, re, statistics, sys
record = dict(word.split("=", 1) for word in sys.argv[2:])
for key, value in record.items():
    if re.fullmatch(r"-?[0-9]+", value):
        record[key] = int(value)
    elif re.fullmatch(r"-?[0-9.]+(e[-+]?[0-9]+)?", value):
        record[key] = float(value)
log, skip = record.pop("log", None), record.pop("skip", 0)
if log:
    steps = [s for s in map(json.loads, open(log)) if s.get("step", 0) > skip and "step_ms" in s]
    for key in ("tokens_per_s", "step_ms", "mfu", "peak_gib"):
        values = [s[key] for s in steps if s[key] is not None]
        record[key] = statistics.median(values) if values else None
with open(sys.argv[1], "a") as f:
    f.write(json.dumps(record) + "\n")
what = {"ok": lambda: f"{record['tokens_per_s']:.0f} tokens/s",
        "measured": lambda: ", ".join(f"{k} {v}" for k, v in list(record.items())[6:]),
        "planned": lambda: f"fits, {record['peak_gib']} GiB with recompute {record['recompute']}"}
text = what.get(record["status"], lambda: f"{record['status']}: {record['reason']}")()
where = " ".join(str(record[k]) for k in ("part", "model", "mode", "seq_length", "bytes") if k in record)
print(f"{where} on {record['gpus']}: {text}")
PYTHON
}

# PART MODEL MODE GPUS BATCH LENGTH RECOMPUTE...: trains with the first RECOMPUTE that fits, which is then
# in `fitted`. `state` and `steps_here` are flags and steps of the part.
measure() {
    local part=$1 model=$2 mode=$3 n=$4 batch=$5 length=$6 recompute need why='' shape flags verify=()
    local row=(part="$part" model="$model" mode="$mode" gpus="$n" seq_length="$length" batch="$batch")
    fitted=''
    [ "$n" = 1 ] || verify=(--verify-sp)
    for recompute in "${@:7}"; do
        flags=(--model "$model" --micro-batch-size "$batch" --seq-length "$length" --recompute "$recompute"
            --ranks "$n" --parallel-mode "${mode%:*}" "${common[@]}" "${state[@]}")
        if [[ $mode == *:* ]]; then
            shape=${mode#*:}
            flags+=(--ring "${shape%x*}" --ulysses "${shape#*x}")
        fi
        flags+=("${extra[@]}")
        "$bin/train_gpt" "${flags[@]}" --plan >"$temporary/plan" 2>&1 || { why=$(reason "$temporary/plan"); break; }
        need=$(awk '/device total/ && $(NF - 1) > most { most = $(NF - 1) }
                    END { printf "%.4g", most / 2 ^ 30 }' "$temporary/plan")
        why="needs $need GiB on a GPU with recompute $recompute, $memory are there"
        [ -z "$memory" ] || awk -v a="$need" -v b="$memory" 'BEGIN { exit !(a <= b) }' || continue
        if [ $plan = yes ]; then
            keep "${row[@]}" recompute="$recompute" peak_gib="$need" status=planned
            fitted=$recompute
            return
        fi
        rm -rf "$temporary/log"
        if timeout 3600 "$bin/train_gpt" "${flags[@]}" "${verify[@]}" --steps "$steps_here" --log-dir "$temporary/log" \
            --data "$temporary/tokens.bin" "${tune[@]}" </dev/null >"$temporary/out" 2>&1; then
            keep "${row[@]}" recompute="$recompute" log="$temporary/log/log.jsonl" skip=$(((steps_here + 3) / 4)) \
                error="$(sed -nE 's/^--verify-sp: .* by at most ([^ ]+) .*/\1/p' "$temporary/out")" status=ok
            fitted=$recompute
            return
        fi
        why=$(reason "$temporary/out")
        [[ $why == *"the plan needs"* ]] || { keep "${row[@]}" status=failed reason="$why"; return; }
    done
    keep "${row[@]}" status="left out" reason="$why"
}

# MODEL GPUS LENGTH MODE...: what attention alone takes and leaves exposed.
measure_attention() {
    local model=$1 n=$2 length=$3 modes mode H Hk C line
    modes=$(IFS=,; echo "${*:4}")
    read -r C H Hk <<<"$("$bin/train_gpt" --model "$model" --plan "${common[@]}" |
        sed -nE '1s|.*, C ([0-9]+), H ([0-9]+)/([0-9]+),.*|\1 \2 \3|p')"
    if ! timeout 3600 "$bin/bench_seq" --threads "$n" --device $device --mode "$modes" --seq "$length" --repeats 3 \
        --heads "$H" --kv-heads "$Hk" --head-dim $((C / H)) </dev/null >"$temporary/out" 2>&1; then
        for mode in "${@:4}"; do
            keep part=attention model="$model" gpus="$n" seq_length="$length" mode="$mode" status=failed \
                reason="$(reason "$temporary/out")"
        done
        return
    fi
    # mode dp 1 x ring R x ulysses U forward backward speed-up share exposed MB imbalance error
    while read -ra line; do
        [ "${line[0]}" != usp ] || line[0]=usp:${line[5]}x${line[8]}
        keep part=attention model="$model" gpus="$n" seq_length="$length" mode="${line[0]}" status=measured \
            forward_ms="${line[9]}" backward_ms="${line[10]}" exposed_ms="${line[13]}" speed_up="${line[11]}" \
            error="${line[16]}"
    done < <(grep ' dp 1 x ' "$temporary/out")
}

links() {
    local n name line fields i
    [ "$most" -gt 1 ] || keep part=links mode=exchanges gpus=1 status="left out" reason="one GPU has no links"
    for n in "${gpus[@]}"; do
        [ "$n" -gt 1 ] || continue
        if ! timeout 600 "$bin/bench_comm" --threads "$n" --device $device </dev/null >"$temporary/out" 2>&1; then
            keep part=links gpus="$n" status=failed reason="$(reason "$temporary/out")"
            continue
        fi
        read -ra name <<<"$(sed -n 2p "$temporary/out")"
        while read -ra line; do
            fields=(part=links mode=exchanges gpus="$n" status=measured unit=GB/s)
            for i in "${!name[@]}"; do fields+=("${name[i]}=${line[i]}"); done
            keep "${fields[@]}"
        done < <(tail -n +3 "$temporary/out")
    done
}

# Modes that share sequences, on N ranks.
sharing() {
    local ring
    echo ulysses zigzag_ring dist_flash
    for ((ring = 2; ring < $1; ++ring)); do
        [ $(($1 % ring)) != 0 ] || echo "usp:${ring}x$(($1 / ring))"
    done
}

modes() {
    local model length n mode shared recompute state=() steps_here=${steps:-$few}
    for model in "${models[@]}"; do
        for length in "${lengths[@]}"; do
            recompute=(attention_out full)
            for n in "${gpus[@]}"; do
                if [ "$n" = 1 ]; then
                    measure modes "$model" data_parallel 1 1 "$length" "${recompute[@]}"
                    [ -z "$fitted" ] || recompute=("$fitted")
                elif [ "$n" = "$most" ] || [ "$length" = "${lengths[0]}" ]; then
                    read -ra shared <<<"$(sharing "$n" | xargs)"
                    for mode in data_parallel "${shared[@]}"; do
                        measure modes "$model" "$mode" "$n" 1 "$length" "${recompute[@]}"
                    done
                    [ $plan = yes ] || measure_attention "$model" "$n" "$length" "${shared[@]}"
                fi
            done
        done
    done
}

easycontext() {
    local row state=("${less_state[@]}") steps_here=${steps:-$few}
    for row in "${easycontext[@]}"; do
        measure easycontext $easycontext_model "${row%:*}" "$most" 1 "${row#*:}" attention_out full
    done
}

weak() {
    local shape batch n state=() steps_here=${steps:-$many}
    for shape in "${weak[@]}"; do
        batch=${shape##*:}
        for n in "${gpus[@]}"; do
            measure weak "${shape%:*}" data_parallel "$n" "${batch%x*}" "${batch#*x}" none
        done
    done
}

tune=()
[ $device = cpu ] || tune=(--tune-matmul "$out/matmul_choices.txt")
[ $plan = yes ] || python3 scripts/random_tokens.py "$temporary/tokens.bin" "${tokens[@]}"
for part in "${parts[@]}"; do
    [ "$part" != links ] || [ $plan = no ] || continue
    $part
done
[ $plan = no ] || exit 0
python3 scripts/plot_scaling.py "$out" --text
python3 scripts/plot_scaling.py "$out" || true
