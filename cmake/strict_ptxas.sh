#!/usr/bin/env bash
# Compiles, and fails where ptxas says what a flash attention kernel must never have: wgmma
# instructions that it serializes (messages C75xx, which do not fail a build by themselves) or, where
# -warn-spills asks for it, registers spilled to local memory.
#   strict_ptxas.sh COMMAND...      a compiler launcher, see CMakeLists.txt
set -uo pipefail
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
"$@" 2>"$messages"
status=$?
cat "$messages" >&2
if [ $status = 0 ] && grep -qE '\(C75[0-9]{2}\)|Registers are spilled' "$messages"; then
    echo "error: ptxas serialized wgmma or spilled registers, see above" >&2
    exit 1
fi
exit $status
