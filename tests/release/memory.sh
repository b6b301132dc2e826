#!/bin/sh
# SPDX-License-Identifier: MIT
# Reads of memory that nothing has written. Valgrind watches the checks of the
# AVX2 kernels, whose outputs count as uninitialised until they are written
# (tests/harness.c); it does not know AVX-512, nor modes of rounding.
# MemorySanitizer watches the fuzz targets, whose scratch memory and unseen rows
# count as uninitialised, on fixed random inputs.
#
# usage: tests/release/memory.sh [BUILD [RUNS]]
#
# BUILD is a build folder with tests (build), RUNS the inputs a fuzz target (500).
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build} runs=${2:-500}
failed=0

# Valgrind's exit code makes a test fail in which it finds something.
if command -v valgrind >/dev/null; then
    printf 'memory: the kernels, under Valgrind\n'
    log=$(mktemp)
    QKV_TEST_EFFORT=quick valgrind -q --trace-children=yes --error-exitcode=9 \
        --suppressions=tests/release/valgrind.supp \
        "$build/tests/qkv-tests" --filter '*/avx2' >"$log" 2>&1 || failed=1
    grep -E '^==|FAIL|Synthesis' "$log" || failed=1
    ! grep -q '^==' "$log" || failed=1
    rm "$log"
else
    printf 'memory: no valgrind here\n'
    failed=1
fi

msan=build-memory
[ -f "$msan/build.ninja" ] ||
    CC=${CLANG:-clang} meson setup "$msan" -Dfuzz=true -Dtests=disabled -Disas=avx2,neon \
        -Dbuildtype=debugoptimized -Doptimization=1 -Ddefault_library=static -Db_sanitize=memory \
        -Db_lundef=false >/dev/null
for target in attention options convert kv_append; do
    ninja -C "$msan" "tests/fuzz/fuzz_$target" >/dev/null
    rm -rf "$msan/corpus" && mkdir "$msan/corpus" # new inputs are left there
    printf 'memory: %s inputs of %s, under MemorySanitizer\n' "$runs" "$target"
    "$msan/tests/fuzz/fuzz_$target" -runs="$runs" -seed=1 -len_control=0 -max_len=4096 \
        -artifact_prefix="$msan/$target-" "$msan/corpus" "tests/fuzz/corpus/$target" >"$msan/$target.log" 2>&1 || {
        grep -A 12 -E '^==.*(WARNING|ERROR)' "$msan/$target.log" || tail -n 20 "$msan/$target.log"
        failed=1
    }
done
exit $failed
