#!/usr/bin/env bash
# clang-tidy over the .cpp files, with the rules of .clang-tidy. A file is looked at again only when
# it, a header of the project, or the rules have changed since it was last found clean.
#   scripts/tidy.sh          every .cpp of the layers and programs
#   scripts/tidy.sh FILE...  these
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/release
cmake --preset release >/dev/null  # for compile_commands.json of today's files
mkdir -p build/tidy

files=("$@")
if [ $# = 0 ]; then
    mapfile -t files < <(find kernels comm model data engine ./*.cpp -name '*.cpp' -type f 2>/dev/null |
                         sed 's|^\./||' | sort)
fi
# Only what this configuration compiles: without MPI, for example, comm/mpi.cpp has no command.
mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -Fxf <(
    sed -n "s|.*\"file\": \"$PWD/\(.*\)\".*|\1|p" $build/compile_commands.json))
headers=$(find kernels comm model data engine -name '*.h' -print0 | sort -z |
          xargs -0 cat .clang-tidy | sha256sum)

check_one() {
    local file=$1 key
    key=build/tidy/$(cat "$file" - <<<"$headers $file" | sha256sum | cut -c1-24)
    [ -f "$key" ] && return 0
    if clang-tidy -p "$build" --quiet "$file" 2>/dev/null | sed "s|$PWD/||"; then
        touch "$key"
    else
        echo "$file" >>"$failed"
    fi
}
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT
export -f check_one
export build headers failed
printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -I{} bash -o pipefail -c 'check_one {}' ||
    { echo "error: clang-tidy did not get to the end" >&2; exit 70; }
if [ -s "$failed" ]; then
    echo "error: clang-tidy found something in $(sort "$failed" | tr '\n' ' ')" >&2
    exit 1
fi
echo "tidy: ${#files[@]} files are clean"
