#!/usr/bin/env bash
# Profiles steps of a training run on a GPU; docs/profiling.md says how to read the results.
#   scripts/profile.sh MODE [OPTIONS] [-- FLAGS OF train_gpt]
# MODE
#   timeline   Nsight Systems: when each part of a step ran, on the host and on the GPU
#   times      Nsight Compute: the time of every kernel of the steps, summed by name (a table)
#   kernels    Nsight Compute: all counters of chosen kernels, to see what limits each
# OPTIONS
#   --steps A:B       steps to record; the run ends after step B unless --steps says otherwise [3:3]
#   --kernel REGEX    times, kernels: only kernels whose name without its arguments matches
#   --range NAME      times, kernels: only inside this range: forward, backward, head, optimizer,
#                     data, or an op as in kernels/kernels.h, such as layernorm_backward
#   --count N         kernels: at most N of them, since each runs some 40 times over [8]
#   --sections LIST   kernels: Nsight Compute's sections, with commas, instead of its set "full"
#   --out NAME        reports are NAME.nsys-rep, NAME.ncu-rep, NAME.csv, NAME.source.csv, NAME.txt
#                     [build/profile/MODE]
#   --program FILE    [build/cuda/bin/train_gpt]
# Example: the attention backward of the third step of a 124M model, on shards of tokens
#   scripts/profile.sh kernels --kernel backward_kernel --count 1 -- \
#       --model gpt2:124M --data 'shards/*.bin' --micro-batch-size 64
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

die() {  # die CODE MESSAGE
    echo "error: $2" >&2
    exit "$1"
}
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; }

mode=${1:-}
case "$mode" in
    timeline | times | kernels) shift ;;
    -h | --help) usage; exit 0 ;;
    *) die 64 "'$mode' is no mode; give timeline, times or kernels, or see --help" ;;
esac

steps=3:3 kernel="" range="" count=8 sections="" out=$root/build/profile/$mode
program=$root/build/cuda/bin/train_gpt
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        --steps | --kernel | --range | --count | --sections | --out | --program)
            [ $# -ge 2 ] || die 64 "$1: the value is missing"
            declare "${1#--}=$2"
            shift 2 ;;
        *) die 64 "unknown option '$1'; flags of train_gpt come after --, or see --help" ;;
    esac
done
[[ $steps =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] ||
    die 64 "--steps: '$steps' is not a range of steps; give A:B, such as 3:3"
[[ $count =~ ^[1-9][0-9]*$ ]] || die 64 "--count: '$count' is not a number of kernels"
[[ $mode != timeline || -z $kernel$range ]] ||
    die 64 "--kernel and --range choose kernels for Nsight Compute; leave them out with timeline"

tool=ncu name="Nsight Compute"
[ "$mode" = timeline ] && tool=nsys name="Nsight Systems"
# Installers of the toolkit leave the profilers off the PATH.
PATH=$PATH:/usr/local/cuda/bin
command -v $tool >/dev/null ||
    die 66 "$tool ($name) is not on the PATH; it comes with the CUDA toolkit, or alone from NVIDIA"
[ -x "$program" ] ||
    die 66 "$program is not there; build it: cmake --preset cuda && cmake --build --preset cuda"
mkdir -p "$(dirname "$out")"

run=("$program" "$@" --device cuda --profile-steps "$steps")
[[ " $* " == *" --steps"[\ =]* ]] || run+=(--steps "${steps#*:}")

if [ "$mode" = timeline ]; then
    nsys profile --trace=cuda,nvtx,cublas --sample=none --cpuctxsw=none \
        --capture-range=cudaProfilerApi --capture-range-end=stop \
        --force-overwrite=true --output="$out" "${run[@]}"
    nsys stats --force-export=true --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum "$out.nsys-rep" |
        tee "$out.txt"
    exit
fi

# The clocks stay as training has them; by default ncu would lock them to the base clock.
profile=(ncu --profile-from-start off --nvtx --clock-control none --target-processes all)
[ -z "$kernel" ] || profile+=(--kernel-name-base function --kernel-name "regex:$kernel")
[ -z "$range" ] || profile+=(--nvtx-include "torus@$range/")

if [ "$mode" = times ]; then
    # One counter is one pass: nothing is replayed, and the caches are as the step leaves them.
    "${profile[@]}" --metrics gpu__time_duration.sum --cache-control none \
        --csv --page raw --print-units base --log-file "$out.csv" "${run[@]}"
    "$root/scripts/kernel_times.py" "$out.csv" | tee "$out.txt"
    exit
fi

chosen=(--set full)
if [ -n "$sections" ]; then
    chosen=()
    for section in ${sections//,/ }; do chosen+=(--section "$section"); done
fi
"${profile[@]}" "${chosen[@]}" --launch-count "$count" --force-overwrite --export "$out" "${run[@]}"
# The tables of the sections, why warps waited, which only the long print has, and in which lines.
ncu --import "$out.ncu-rep" --page source --csv >"$out.source.csv"
{
    ncu --import "$out.ncu-rep" --page details
    ncu --import "$out.ncu-rep" --page details --print-details all |
        awk '/^  [^ ].*, Context/ { print }
             /Table Name : Warp State/ { table = 1; rules = 0 }
             table { print; if (/^ *----/ && ++rules == 3) table = 0 }'
    [[ -n $sections && ,$sections, != *,SourceCounters,* ]] ||
        "$root/scripts/kernel_stalls.py" "$out.source.csv"
} | tee "$out.txt"
