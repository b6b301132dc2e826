#!/bin/sh
# SPDX-License-Identifier: MIT
# Fuzzes each target for SECONDS (15), with the address and undefined-behaviour
# sanitizers, from the seeds in corpus/, two at a time. A target stops at its first
# finding, whose input is left in BUILD (build-fuzz). FUZZ_SEED (1) chooses the
# path; 0 takes another each time.
#
# usage: tests/fuzz/run.sh [SECONDS [TARGET...]]
set -eu
cd "$(dirname "$0")/../.."
build=${BUILD:-build-fuzz}
seconds=${1:-15}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- attention convert kv_append npy options

# Kernels that cannot run here take minutes to compile for a fuzzer.
isas=avx2,neon
grep -qs avx512f /proc/cpuinfo && isas=$isas,avx512

if [ ! -f "$build/build.ninja" ]; then
    CC=${CC:-clang} meson setup "$build" -Dfuzz=true -Dtests=disabled -Disas="$isas" -Dbuildtype=debugoptimized -Doptimization=1 \
        -Ddefault_library=static -Db_sanitize=address,undefined -Db_lundef=false >/dev/null
fi
if ! ninja -C "$build" $(for target; do printf ' tests/fuzz/fuzz_%s' "$target"; done) \
    >"$build/compile.log" 2>&1; then
    tail -n 40 "$build/compile.log"
    printf 'fuzz: the targets could not be built\n'
    exit 1
fi

# fuzz TARGET: its last lines, and status 1, if it finds something.
fuzz() {
    target=$1
    mkdir -p "$build/corpus/$target"
    if UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        "$build/tests/fuzz/fuzz_$target" -seed="${FUZZ_SEED:-1}" -max_total_time="$seconds" \
        -max_len=4096 -len_control=0 -timeout=300 -rss_limit_mb=2048 \
        -artifact_prefix="$build/$target-" -print_final_stats=1 \
        "$build/corpus/$target" "tests/fuzz/corpus/$target" >"$build/$target.log" 2>&1; then
        printf 'fuzz: %s for %s s\n%s\n' "$target" "$seconds" \
            "$(grep -E 'number_of_executed_units|new_units_added' "$build/$target.log" |
                sed 's/^stat::/  /')"
    else
        printf 'fuzz: %s found something\n%s\n' "$target" "$(tail -n 40 "$build/$target.log")"
        return 1
    fi
}

found=0
while [ $# -gt 0 ]; do
    fuzz "$1" &
    first=$! second=
    if [ $# -gt 1 ]; then
        fuzz "$2" &
        second=$!
        shift
    fi
    shift
    wait "$first" || found=1
    [ -z "$second" ] || wait "$second" || found=1
done
exit $found
