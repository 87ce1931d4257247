#!/usr/bin/env bash
# The numerical signature of this tree: ten steps of a tiny GPT-2 and a tiny Llama in fp64 with
# plain loops for the matrix products. Losses and gradient norms are rounded to six digits and
# hashed, so that the hash is the same on every machine. A commit that means to change no number
# leaves it as it is; one that changes it says so (CONTRIBUTING.md).
#   scripts/signature.sh [-v] [TRAIN_GPT]   default: build/release/bin/train_gpt; -v shows the numbers
set -euo pipefail
cd "$(dirname "$0")/.."

verbose=no
[ "${1:-}" = -v ] && { verbose=yes; shift; }
train_gpt=${1:-build/release/bin/train_gpt}
[ -x "$train_gpt" ] || { echo "error: $train_gpt is not there; build it: scripts/test.sh" >&2; exit 66; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Text that no other change can touch: the numbers up to 4000.
seq 1 4000 >"$work/numbers.txt"

for model in gpt2:d2x64 llama:d2x64; do
    "$train_gpt" --model "$model" --data "$work/numbers.txt" --tokenizer bytes \
        --cache-dir "$work/cache" --seq-length 48 --micro-batch-size 2 --global-batch-tokens 192 \
        --steps 10 --lr 5e-3 --warmup-steps 3 --seed 1 --device cpu --dtype fp64 --plain-matmul \
        --log-dir "$work/$model" >"$work/console" || { cat "$work/console" >&2; exit 70; }
done
numbers=$(python3 - "$work" <<'EOF'
import json, sys
for model in ("gpt2:d2x64", "llama:d2x64"):
    with open(f"{sys.argv[1]}/{model}/log.jsonl") as log:
        records = [json.loads(line) for line in log]
    assert len(records) == 10, f"{model}: {len(records)} records"
    for r in records:
        print(model, r["step"], "%.6g" % r["loss"], "%.6g" % r["grad_norm"])
EOF
)
[ $verbose = yes ] && echo "$numbers"
sha256sum <<<"$numbers" | cut -c1-12
