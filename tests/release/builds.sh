#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds that are not the usual one, each of which somebody will make: with
# link-time optimisation and started on a processor without AVX, with a baseline
# above the lowest instruction set, without any instruction set, and with
# options that would break the numerics, which must be refused. In each the
# scalar files hold no fused operation.
#
# usage: tests/release/builds.sh
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

report() { printf 'builds: %-44s %s\n' "$1" "$2"; }

fail() {
    report "$1" 'FAILED'
    tail -n 20 "$work/log"
    failed=1
}

# build NAME OPTION...: the program of the tests that needs no framework.
build() {
    name=$1
    shift
    rm -rf "$work/build"
    if meson setup "$work/build" -Dsimde=none -Doptimization=1 -Ddebug=false "$@" >"$work/log" 2>&1 &&
        ninja -C "$work/build" tests/selfcheck >"$work/log" 2>&1; then
        return 0
    fi
    fail "$name"
    return 1
}

# runs NAME ISA COMMAND...: it chooses ISA and computes what the oracle computes.
runs() {
    name=$1 isa=$2
    shift 2
    if "$@" "$work/build/tests/selfcheck" --expect "$isa" --cases 12 --threads 4 >"$work/log" 2>&1; then
        report "$name" "$isa, right"
    else
        fail "$name"
    fi
}

not_fused() {
    if objdump -d "$work/build/kernels/libqkv_scalar.a" 2>/dev/null | grep -qiE 'vf[n]?m(add|sub)|fmadd'; then
        printf 'a fused operation in a scalar file\n' >"$work/log"
        fail "$1: scalar files"
    fi
}

for flag in -ffast-math -Ofast -ffinite-math-only; do
    if meson setup "$work/refused" -Dtests=disabled -Dc_args="$flag" >"$work/log" 2>&1; then
        fail "$flag is refused"
    else
        report "$flag" 'refused'
    fi
    rm -rf "$work/refused"
done

build 'no instruction set' -Disas= && runs 'no instruction set' scalar
if [ "$(uname -m)" = x86_64 ]; then
    for compiler in ${CC:-cc} clang; do
        command -v "$compiler" >/dev/null || continue
        CC=$compiler build "$compiler, link-time optimisation" -Db_lto=true &&
            runs "$compiler, link-time optimisation, without AVX" scalar \
                qemu-x86_64-static -cpu Nehalem
    done
    build 'x86-64-v3 everywhere' -Dc_args=-march=x86-64-v3 && not_fused 'x86-64-v3' &&
        runs 'x86-64-v3 everywhere' avx2
    # This machine need not be able to run it.
    build 'x86-64-v4 everywhere' -Dc_args=-march=x86-64-v4 && not_fused 'x86-64-v4' &&
        report 'x86-64-v4 everywhere' 'links'
fi
exit $failed
