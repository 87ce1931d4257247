#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test through ctest.
#   scripts/test.sh             release build, CPU
#   scripts/test.sh --sanitize  AddressSanitizer and UndefinedBehaviorSanitizer instead
#   scripts/test.sh --cuda      with the CUDA backend instead; its tests skip where there is no GPU
#   scripts/test.sh --all       all of them (CUDA where nvcc exists), and the tests that take long
set -euo pipefail
cd "$(dirname "$0")/.."

presets=() long=()
for option in "$@"; do
    case "$option" in
        --sanitize) presets+=(debug) ;;
        --cuda) presets+=(cuda) ;;
        --all)
            presets=(release debug) long=(-C Long)
            if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
                presets+=(cuda)
            fi ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "error: unknown option '$option'; allowed: --sanitize --cuda --all" >&2; exit 64 ;;
    esac
done
[ ${#presets[@]} = 0 ] && presets=(release)

# CMake looks for nvcc on the PATH only; NVIDIA's packages put it here.
[ -x /usr/local/cuda/bin/nvcc ] && PATH="$PATH:/usr/local/cuda/bin"

scripts/install_dependencies.sh
for preset in "${presets[@]}"; do
    echo "== $preset: configure and build"
    cmake --preset "$preset" | grep -vE '^-- (The|Detecting|Check|Found|Looking|Performing|Configuring|Generating)'
    cmake --build --preset "$preset" -- --quiet
    echo "== $preset: test"
    ctest --preset "$preset" "${long[@]}"
    long=()  # once, in the fastest build
done
