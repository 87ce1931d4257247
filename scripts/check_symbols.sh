#!/usr/bin/env bash
# No function of the project may be defined twice. The layers are static libraries, so the linker
# would quietly take the first of two and drop the other: siblings that cannot see each other's
# headers could each define torus::f() and one of them would run the other's.
#   scripts/check_symbols.sh [BUILD]   default: build/release
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}

libraries=("$build"/libtorus_*.a)
[ -f "${libraries[0]}" ] || { echo "error: no libraries in $build; build it: scripts/test.sh" >&2; exit 66; }
twice=$(nm --defined-only --extern-only "${libraries[@]}" |
        awk '$2 == "T" || $2 == "D" || $2 == "B" { print $3 }' | sort | uniq -d | c++filt)
if [ -n "$twice" ]; then
    printf 'error: defined more than once:\n%s\n' "$twice" >&2
    exit 1
fi
echo "check_symbols: every function of ${#libraries[@]} libraries is defined once"
