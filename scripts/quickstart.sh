#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a small trained GPT and a sample of what it writes.
#   scripts/quickstart.sh [--corpus NAME] [--steps N]
# NAME: austen (default; from a Debian package, no internet beyond apt), docs (needs nothing),
#       tinyshakespeare, tinystories, fineweb-edu (from the internet, by checksum)
# Takes about 5 minutes of training on 2 CPU cores; with nvcc and a GPU it trains GPT-2 124M there.
set -euo pipefail
cd "$(dirname "$0")/.."

corpus=austen steps=
while [ $# -gt 0 ]; do
    case "$1" in
        --corpus | --steps)
            [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 64; }
            [ "$1" = --corpus ] && corpus=$2 || steps=$2
            shift 2 ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "error: unknown option '$1'; allowed: --corpus NAME, --steps N" >&2; exit 64 ;;
    esac
done
case "$corpus" in
    austen | docs | tinyshakespeare | tinystories | fineweb-edu) ;;
    *) echo "error: --corpus $corpus: choose austen, docs, tinyshakespeare, tinystories or" \
            "fineweb-edu" >&2; exit 64 ;;
esac
[[ "$steps" =~ ^([1-9][0-9]*)?$ ]] || { echo "error: --steps $steps: give a whole number" >&2; exit 64; }

stage() { printf '\n== [%d s] %s\n' "$SECONDS" "$*"; }

stage "installing what is missing"
scripts/install_dependencies.sh --minimal

[ -x /usr/local/cuda/bin/nvcc ] && PATH="$PATH:/usr/local/cuda/bin"
preset=release device=cpu
if command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    preset=cuda device=cuda
fi
stage "building for $device"
cmake --preset $preset | sed -n '/Torus is built with/,/^-- /p' | grep -v '^-- C'
cmake --build --preset $preset --target train_gpt prepare_data
bin=build/$preset/bin

run=runs/quickstart-$corpus-$device
stage "corpus: $corpus"
python3 scripts/get_corpus.py "$corpus" "$run/corpus" || {
    status=$?
    [ "$corpus" = austen ] || exit $status
    corpus=docs run=runs/quickstart-docs-$device
    stage "corpus: this project's own documentation instead"
    python3 scripts/get_corpus.py docs "$run/corpus"
}

tokens=$run/corpus tokenizer=()  # fineweb-edu comes as tokens
if [ "$corpus" != fineweb-edu ]; then
    vocabulary=4096
    [ "$corpus" = docs ] && vocabulary=512
    stage "training a vocabulary of $vocabulary tokens, then tokenizing"
    tokens=$run/tokens tokenizer=(--tokenizer "$run/tokenizer.json")
    rm -rf "$tokens"
    $bin/prepare_data train-bpe --input "$run/corpus/train/*" --vocab-size $vocabulary --output "$run"
    for part in train val; do
        $bin/prepare_data tokenize --input "$run/corpus/$part/*" "${tokenizer[@]}" \
            --output "$tokens/$part"
    done
fi

if [ $device = cuda ]; then
    shape=(--model gpt2:124M --seq-length 1024 --micro-batch-size 16 --lr 6e-4) default_steps=400
else
    shape=(--model gpt2:d4x192 --seq-length 128 --micro-batch-size 16 --lr 2e-3) default_steps=1200
fi
[ "$corpus" = docs ] && default_steps=200  # a small text is soon learnt by heart
: "${steps:=$default_steps}"
every=$(((steps + 11) / 12))
stage "training: $steps steps on $device"
$bin/train_gpt "${shape[@]}" --data "$tokens/train/*.bin" --val-data "$tokens/val/*.bin" \
    "${tokenizer[@]}" --steps "$steps" --warmup-steps $((steps / 20)) --eval-every $every \
    --device $device --save-dir "$run/steps-$steps" --log-dir "$run/steps-$steps"

expected=docs/quickstart/$corpus-$device.jsonl
compare=()
if [ -f "$expected" ] && [ "$steps" = $default_steps ]; then
    compare=(--reference "$expected")
fi
stage "the loss on the held-out tenth${compare:+, beside the expected one}"
python3 scripts/plot_run.py "$run/steps-$steps" --text --field val_loss "${compare[@]}"

if [ "$corpus" != fineweb-edu ]; then  # whose vocabulary is not here
    stage "a sample"
    $bin/train_gpt --model "$run/steps-$steps" --generate "It was" --temperature 0.7 \
        --sample-tokens 120 --device $device
fi
printf '\n[%d s] weights, log and tokenizer are in %s; more of it: train_gpt --help\n' \
    "$SECONDS" "$run/steps-$steps"
