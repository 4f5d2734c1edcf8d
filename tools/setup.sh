#!/bin/sh
# setup.sh [demo|fuzz] - everything that building and testing need: Debian packages, a Python venv in .venv with pinned packages.
# With `demo` also what the demo needs, its text; with `fuzz` clang and libFuzzer.
# Does only what is missing, so that it is quick the second time; safe to interrupt and to run again.
set -eu
cd "$(dirname "$0")/.."
want=${1:-}
log=build/setup.log

packages='gcc libc6-dev make cmake ninja-build pkg-config python3 python3-venv ca-certificates
          libjansson-dev libyaml-dev libxxhash-dev libcmocka-dev'
[ "$want" != fuzz ] || packages="$packages clang libclang-rt-dev"

mkdir -p build
exec 9>build/setup.lock
flock 9 # two makes at once take turns

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# quietly WHAT COMMAND...: one line here, the command's output in the log, the log's end here if it fails.
quietly() {
    what=$1
    shift
    printf 'setup: %s\n' "$what"
    printf '\n== %s: %s: %s\n' "$(date '+%F %T')" "$what" "$*" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null 9>&-; then
        tail -n 20 "$log" >&2
        fail "$what: failed; the whole log is in $log"
    fi
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo "$@"
    fi
}

updated=
apt_update() {
    [ -n "$updated" ] || as_root apt-get -q -o DPkg::Lock::Timeout=300 update
    updated=yes
}

apt_install() {
    apt_update &&
        as_root dpkg --configure -a &&
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
}

# --- Debian packages ---------------------------------------------------------------------------------------------
missing=
if command -v dpkg-query >/dev/null; then
    for package in $packages; do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=
        [ "$status" = installed ] || missing="$missing $package"
    done
else
    printf 'setup: no Debian here: gcc, cmake, ninja, pkg-config, Python 3.11, jansson, libyaml, xxhash, cmocka must be there\n'
fi
if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        fail "as root, once: apt-get install$missing (there is no sudo here); then run this again"
    # shellcheck disable=SC2086 # a list of words
    quietly "installing$missing" apt_install $missing
fi

# --- Python ------------------------------------------------------------------------------------------------------
find_python() {
    for candidate in "${PYTHON:-python3}" /usr/bin/python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}

# A venv that was being changed when something stopped it is made anew.
if [ -e .venv/unfinished ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python) || fail "no Python 3.11 or later that can make a venv; name one: PYTHON=/path/to/python3"
    rm -rf .venv
    mkdir .venv
    touch .venv/unfinished
    quietly "making .venv with $("$python" --version)" "$python" -m venv .venv
fi

# pip_install NAME ARGUMENTS...: unless the files in ARGUMENTS are as they were the last time.
pip_install() {
    name=$1
    shift
    version=$(cat requirements*.txt | cksum)
    [ "$(cat ".venv/installed-$name" 2>/dev/null)" != "$version" ] || return 0
    touch .venv/unfinished
    quietly "installing the Python packages of requirements-$name.txt" \
        .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"
    printf '%s\n' "$version" >".venv/installed-$name"
}
pip_install dev -r requirements-dev.txt -c requirements-lock.txt
! command -v nvcc >/dev/null || pip_install cuda -r requirements-cuda.txt --no-deps
[ "$want" != demo ] || pip_install demo -r requirements-demo.txt --no-deps
rm -f .venv/unfinished

# --- the demo's text ---------------------------------------------------------------------------------------------
# The Debian package is unpacked, not installed: it would bring a dictionary server along.
unpack_jargon() {
    here=demo/out/dictd.partial
    rm -rf "$here" demo/out/dictd
    mkdir -p "$here"
    (cd "$here" && apt-get -q download dict-jargon) ||
        { apt_update && (cd "$here" && apt-get -q download dict-jargon); } || return 1
    dpkg-deb -x "$here"/dict-jargon_*.deb "$here" && mv "$here/usr/share/dictd" demo/out/dictd && rm -rf "$here"
}
if [ "$want" = demo ] && [ ! -r demo/out/dictd/jargon.index ]; then
    command -v apt-get >/dev/null ||
        fail "no apt-get here: put jargon.dict.dz and jargon.index of Debian's dict-jargon into demo/out/dictd"
    quietly "fetching the Jargon File (Debian's dict-jargon)" unpack_jargon
fi
