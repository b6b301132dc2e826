#!/bin/sh
# SPDX-License-Identifier: MIT
# Starts real programs on processors that this machine is not, under QEMU's
# user-mode emulator, and sees the right ISA chosen and its results within
# their bounds. x86-64: Nehalem knows no AVX and faults on every AVX
# instruction, Haswell has AVX2 and FMA. AArch64: from plain Armv8.0 to
# everything that QEMU knows. For AVX-512, which QEMU lacks, there is
# avx512-bochs.sh.
#
# usage: cpu-models.sh BUILD [BUILD_AARCH64]
#
# BUILD is a native x86-64 build folder with tests, BUILD_AARCH64 one that was
# set up with the cross file of aarch64-sysroot.sh; either may be -, for none.
set -eu
build=${1:?usage: cpu-models.sh BUILD [BUILD_AARCH64]}
arm=${2:--}
failed=0

# model EMULATOR CPU ISA PROGRAM...
model() {
    emulator=$1 cpu=$2 isa=$3
    shift 3
    if out=$("$emulator" -cpu "$cpu" "$@" --expect "$isa" --cases 12 --threads 4 --fork 2>&1); then
        out=$(printf "%s\n" "$out" | grep -v "TCG doesn.t support")
        printf 'cpu-models: %-12s %s\n' "$cpu" "${out#selfcheck: }"
    else
        printf 'cpu-models: %-12s FAILED: %s\n' "$cpu" "$out"
        failed=1
    fi
}

# tool CPU ISA: the command-line tool, too, starts and says what it would use.
tool() {
    if qemu-x86_64-static -cpu "$1" "$build/bench/tool/qkv" info 2>/dev/null | grep -q "$2.*selected"; then
        printf 'cpu-models: %-12s qkv info selects %s\n' "$1" "$2"
    else
        printf 'cpu-models: %-12s qkv info does not select %s\n' "$1" "$2"
        failed=1
    fi
}

if [ "$build" != - ]; then
    model qemu-x86_64-static Nehalem scalar "$build/tests/selfcheck"
    model qemu-x86_64-static Haswell avx2 "$build/tests/selfcheck"
    tool Nehalem scalar
    tool Haswell avx2
fi
if [ "$arm" != - ]; then
    for cpu in cortex-a53 cortex-a76 neoverse-n1 a64fx max; do
        model qemu-aarch64-static "$cpu" neon "$arm/tests/selfcheck"
    done
fi
exit $failed
