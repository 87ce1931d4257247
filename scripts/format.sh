#!/usr/bin/env bash
# clang-format over all C++ and CUDA sources, in place; with --check only reports and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(find kernels comm model data engine test bench ./*.cu ./*.cpp \
    \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -type f 2>/dev/null | sort)
case "${1:-}" in
    "") clang-format -i "${files[@]}" ;;
    --check)
        if ! complaints=$(clang-format --dry-run -Werror "${files[@]}" 2>&1); then
            grep 'error:' <<<"$complaints" | cut -d: -f1,2 | head -n 20
            echo "error: run scripts/format.sh" >&2
            exit 1
        fi
        echo "format: ${#files[@]} files are as clang-format leaves them" ;;
    *) echo "usage: scripts/format.sh [--check]" >&2; exit 64 ;;
esac
