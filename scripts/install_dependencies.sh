#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that Torus needs; only those that are missing.
#   scripts/install_dependencies.sh            to build, test, check and plot
#   scripts/install_dependencies.sh --minimal  to build and run only
# Works as root or through sudo. Optional packages that the distribution lacks are skipped.
set -euo pipefail

required=(g++ cmake ninja-build nlohmann-json3-dev libcli11-dev libtomlplusplus-dev libpcre2-dev
          zlib1g-dev python3)
optional=(ccache libopenblas-dev libopenmpi-dev openmpi-bin ca-certificates)

case "${1:-}" in
    "")
        required+=(doctest-dev)
        optional+=(git clang-format clang-tidy python3-numpy python3-matplotlib) ;;
    --minimal) ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option '$1'; allowed: --minimal" >&2; exit 64 ;;
esac

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "error: no apt here; install what these Debian packages hold, then run cmake:" >&2
    echo "  ${required[*]}" >&2
    echo "  optional: ${optional[*]}" >&2
    exit 66
fi

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
known() { [ -n "$(apt-cache show --no-all-versions "$1" 2>/dev/null)" ]; }

missing=()
for package in "${required[@]}" "${optional[@]}"; do
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then
    echo "dependencies: all installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "error: missing packages and neither root nor sudo; ask an administrator for:" >&2
        echo "  apt-get install ${missing[*]}" >&2
        exit 77
    fi
    as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {  # runs apt-get quietly; returns its status
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@" \
        >"$log" 2>&1
}
refreshed=no
refresh() {
    echo "dependencies: apt-get update"
    refreshed=yes
    apt update || { tail -n 5 "$log" >&2; echo "warning: apt-get update failed" >&2; }
}

for package in "${missing[@]}"; do
    known "$package" || { refresh; break; }
done
wanted=()
for package in "${missing[@]}"; do
    if known "$package"; then
        wanted+=("$package")
    elif [[ " ${optional[*]} " == *" $package "* ]]; then
        echo "dependencies: this distribution has no $package; going on without it"
    else
        echo "error: this distribution has no package $package, which Torus needs;" \
             "Debian 12 and later have all of them" >&2
        exit 66
    fi
done
[ ${#wanted[@]} = 0 ] && exit 0

echo "dependencies: installing ${wanted[*]}"
if ! apt install -y --no-install-recommends "${wanted[@]}"; then
    # The lists may be older than the mirror: refresh them once and try again.
    [ $refreshed = no ] && refresh
    if ! apt install -y --no-install-recommends "${wanted[@]}"; then
        tail -n 15 "$log" >&2
        echo "error: apt-get install failed (its last lines are above)" >&2
        exit 74
    fi
fi
echo "dependencies: done"
