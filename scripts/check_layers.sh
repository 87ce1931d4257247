#!/usr/bin/env bash
# The architecture's rules that a script can hold (docs/architecture.md):
#   * includes go one way: kernels < {comm, model, data} < engine < the programs at the root
#   * each third-party library is known to one place
#   * files of at most 500 lines, host functions of at most 100, no notes left in the code,
#     no environment variables but the launchers' (comm/launch.cpp)
#   * in CUDA code a loop that is all of a branch stands in braces: of `if constexpr (...) for (...)
#     {... UNROLL for (...) ...}`, when discarded, nvcc 13.0 also drops all that follows, from the
#     next unrolled loop on, without a word
#   scripts/check_layers.sh              checks this project
#   scripts/check_layers.sh --self-test  plants one violation of each kind and expects to be caught
# Function lengths rely on clang-format: a body opens at the end of a line and closes in the column
# where its signature began.
set -uo pipefail
me=$(realpath "$0")

max_file_lines=500
max_function_lines=100

# Layer -> the folders whose headers it may include.
declare -A may_include=(
    [kernels]="kernels"
    [comm]="kernels comm"
    [model]="kernels model"
    [data]="kernels data"
    [engine]="kernels comm model data engine"
    [programs]="kernels comm model data engine"
    [bench]="kernels comm model data engine bench"
    [test]="kernels comm model data engine test"
)
# Header (extended regex) and the files that may include it (extended regex). JSON stays in .cpp
# files and in two headers that only .cpp files include, so that nvcc never meets it.
third_party=(
    'mpi\.h'                      'comm/mpi[a-z_]*\.cpp'
    'nccl\.h'                     'comm/nccl[a-z_]*\.cpp'
    'cublas.*'                    'kernels/cuda/matmul.*'
    'cudnn.*'                     'kernels/cuda/cudnn_graph\.h'
    '(openblas/)?cblas.*'         'kernels/cpu/(matmul|device)\.cpp'
    'omp\.h'                      '(kernels/cpu|test|bench)/.*|engine/setup\.cpp'
    'cuda_runtime.*|cuda\.h|cuda_profiler_api.*|cuda_bf16.*|cuda_fp16.*|nvtx3/.*'  '(kernels/cuda/|comm/(nccl|cuda_)|test/cuda/|bench/).*'
    'nlohmann/.*'                 '[a-z/_]*\.cpp|(model/strict_json|data/json)\.h'
    'model/strict_json\.h|data/json\.h'  '[a-z/_]*\.cpp'
    'CLI/.*|toml\+\+/.*'          'engine/config[a-z_]*\.cpp|prepare_data\.cpp'
    'pcre2.*'                     '(data|test/data)/[a-z_]*\.cpp'
    'zlib\.h'                     'engine/checkpoint[a-z_]*\.cpp'
    'doctest/.*'                  'test/.*'
)

problems=0
report() { echo "$1"; problems=$((problems + 1)); }

sources() {  # every C++ and CUDA file of the tree in $PWD
    find kernels comm model data engine test bench -type f \
        \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null
    find . -maxdepth 1 -type f \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' \) -printf '%f\n'
}

check_includes() {
    local file line header layer folder i
    while IFS=: read -r file line header; do
        for ((i = 0; i < ${#third_party[@]}; i += 2)); do
            [[ $header =~ ^(${third_party[i]})$ ]] || continue
            [[ $file =~ ^(${third_party[i + 1]})$ ]] ||
                report "$file:$line: $header is included outside its place: ${third_party[i + 1]}"
        done
        layer=${file%%/*}
        [ "$layer" = "$file" ] && layer=programs
        folder=${header%%/*}
        [ "$folder" = "$header" ] || [ -z "${may_include[$folder]:-}" ] ||
            [[ " ${may_include[$layer]} " == *" $folder "* ]] ||
            report "$file:$line: $layer must not include $header"
    done < <(sources | xargs -r grep -nHE '^[[:space:]]*#[[:space:]]*include' |
             sed -E 's/^([^:]+):([0-9]+):[^<"]*[<"]([^>"]+)[>"].*/\1:\2:\3/')
}

check_lengths() {
    local count file line
    while read -r count file; do
        [ "$file" = total ] || [ "$count" -le $max_file_lines ] ||
            report "$file: $count lines; at most $max_file_lines"
    done < <({ sources; find scripts -type f \( -name '*.sh' -o -name '*.py' \) 2>/dev/null; } |
             xargs -r wc -l)
    while read -r line; do report "$line"; done < <(sources | xargs -r awk -v max=$max_function_lines '
        FNR == 1 { at[0] = at[4] = 0 }
        /^[ ]*(#|\/\/|$)/ { next }
        {
            match($0, /^ */); column = RLENGTH
            if (column != 0 && column != 4) next
            text = substr($0, column + 1)
            if (text ~ /^}/) {
                if (at[column] && !type[column] && FNR - at[column] + 1 > max)
                    printf "%s:%d: function of %d lines; at most %d\n", FILENAME, at[column],
                           FNR - at[column] + 1, max
                at[column] = 0
                if (column == 0) at[4] = 0  # fields of a struct that has ended
            } else if (text !~ /^(public|private|protected)?:/) {
                # Inside a function the statements of column 4 are no signatures.
                if (column == 4 && at[0] && !type[0]) next
                at[column] = FNR
                type[column] = text ~ /^(namespace|class|struct|union|enum|extern "C"|template <.*> (class|struct))/ ||
                               text ~ /__global__|__device__/
            }
        }')
}

check_words() {
    local match mark='TO''DO|FIX''ME|X''XX'
    while read -r match; do report "$match: note left in the code"; done < <(
        { sources; find scripts cmake CMakeLists.txt -type f 2>/dev/null; } |
            xargs -r grep -nHE "\b($mark)\b" | cut -d: -f1,2)
    while read -r match; do report "$match: environment variables are not an interface here"; done < <(
        sources | grep -vE '^(comm/launch\.cpp|test/)' |
            xargs -r grep -nHE '\b(secure_)?(get|set|put|unset)env[[:space:]]*\(' | cut -d: -f1,2)
}

check_branches() {
    local line
    while read -r line; do
        report "$line: a loop that is all of a branch needs braces"
    done < <(sources | grep -E '\.cuh?$' | xargs -r awk '
        BEGIN {
            loop = "(UNROLL|_Pragma|#pragma unroll|for \\(|while \\()"
            branch = "(if constexpr \\(.*\\)|else)"
        }
        FNR == 1 { before = "" }
        $0 ~ branch " (if \\(.*\\) )?" loop || ($0 ~ "^ *" loop && before ~ branch "$") {
            print FILENAME ":" FNR
        }
        { before = $0 }')
}

self_test() {
    local failures=0 tree
    tree=$(mktemp -d)
    plant() {  # plant NAME FILE expected(0 clean, 1 caught), text on stdin
        rm -rf "${tree:?}"/*
        mkdir -p "$tree/$(dirname "$2")"
        cat >"$tree/$2"
        "$me" "$tree" >/dev/null
        if [ $? != "$3" ]; then
            echo "self-test: '$1' gave the wrong answer" >&2
            failures=$((failures + 1))
        fi
    }
    lines() { for ((i = 0; i < $1; ++i)); do echo "    int x$i = 0;"; done; }
    plant "engine may include comm" engine/a.cpp 0 <<<'#include "comm/comm.h"'
    plant "kernels include model" kernels/a.h 1 <<<'#include "model/model.h"'
    plant "comm includes data" comm/seq/a.cpp 1 <<<'#include "data/data.h"'
    plant "model includes engine" model/a.cpp 1 <<<'  #  include <engine/config.h>'
    plant "MPI in its place" comm/mpi.cpp 0 <<<'#include <mpi.h>'
    plant "MPI elsewhere" engine/a.cpp 1 <<<'#include <mpi.h>'
    plant "NCCL elsewhere" kernels/cuda/a.cu 1 <<<'#include <nccl.h>'
    plant "cuBLASLt elsewhere" kernels/cuda/norm.cu 1 <<<'#include <cublasLt.h>'
    plant "cuDNN elsewhere" kernels/cuda/attention.cu 1 <<<'#include <cudnn.h>'
    plant "json in CUDA code" train_gpt.cu 1 <<<'#include <nlohmann/json.hpp>'
    plant "json behind a header in CUDA code" kernels/cuda/a.cu 1 <<<'#include "data/json.h"'
    plant "CLI11 in a header" engine/config.h 1 <<<'#include "CLI/CLI.hpp"'
    plant "long file" model/a.cpp 1 < <(for ((i = 0; i <= max_file_lines; ++i)); do echo; done)
    plant "function of 100 lines" model/a.cpp 0 < <(echo 'void f() {'; lines 98; echo '}')
    plant "function of 101 lines" model/a.cpp 1 < <(echo 'void f() {'; lines 99; echo '}')
    plant "member function of 101 lines" model/a.cpp 1 < <(
        echo 'struct A {'; echo '    void f() {'; lines 99 | sed 's/^/    /'; echo '    }'; echo '};')
    plant "long struct of short functions" model/a.cpp 0 < <(
        echo 'struct A {'; for ((i = 0; i < 60; ++i)); do
            echo "    void f$i() {"; echo '        return;'; echo '    }'; done; echo '};')
    plant "fields, then short functions" model/a.cpp 0 < <(
        echo 'struct A {'; echo '    int a;'; echo '};'; for ((i = 0; i < 60; ++i)); do
            echo "void f$i() {"; echo '    return;'; echo '}'; done
        echo 'void g() {'; echo '    for (;;) {'; echo '    }'; echo '}')
    plant "long CUDA kernel" kernels/cuda/a.cu 0 < <(
        echo '__global__ void f() {'; lines 150; echo '}')
    plant "loop behind if constexpr" kernels/cuda/a.cuh 1 <<<'    if constexpr (N > 1) UNROLL for (;;) {}'
    plant "loop without a pragma" kernels/cuda/a.cuh 1 <<<'    if constexpr (N > 1) for (;;) {}'
    plant "loop behind else" bench/a.cu 1 < <(echo '    else'; echo '        UNROLL for (;;) {}')
    plant "loop in braces" kernels/cuda/a.cu 0 < <(
        echo '    if constexpr (N > 1) {'; echo '        UNROLL for (;;) {}'; echo '    }')
    plant "note in the code" data/a.cpp 1 <<<"// TO""DO: later"
    plant "environment variable" engine/a.cpp 1 <<<'auto* p = std::getenv("TORUS_X");'
    rm -rf "$tree"
    [ $failures = 0 ] && echo "check_layers: the self-test passed"
    return $failures
}

case "${1:-}" in
    --self-test) self_test; exit ;;
    -*) echo "usage: scripts/check_layers.sh [--self-test | FOLDER]" >&2; exit 64 ;;
esac
cd "${1:-$(dirname "$me")/..}" || exit 66
check_includes
check_lengths
check_words
check_branches
if [ $problems != 0 ]; then
    echo "check_layers: $problems problems"
    exit 1
fi
echo "check_layers: $(sources | wc -l) files keep the rules"
