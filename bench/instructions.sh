#!/bin/sh
# SPDX-License-Identifier: MIT
# Instructions that three small attentions take with AVX2, counted by callgrind,
# beside those recorded in instructions.txt. Time is noisy; this is not. The
# count depends on the compiler, so a difference is only printed.
#
#     bench/instructions.sh BUILD/bench/qkv-bench            compare
#     bench/instructions.sh BUILD/bench/qkv-bench --record   write instructions.txt
set -eu

bench=$1
record=$(dirname "$0")/instructions.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The instructions of qkv_attention() alone, callees included, over one call.
count() {
    QKV_ISA=avx2 valgrind --tool=callgrind --callgrind-out-file="$work/out" \
        --toggle-collect=qkv_attention "$bench" --isa avx2 --kernel qkv_attention \
        --shape "$1" --once >/dev/null 2>"$work/log" || {
        cat "$work/log" >&2
        exit 1
    }
    awk '/^(totals|summary):/ { n = $2 } END { print n }' "$work/out"
}

if [ "${2:-}" = --record ]; then
    : >"$record.new"
    for shape in 1,1,1,16,64,64 2,1,96,96,64,64c 4,1,1,200,64,64; do
        printf '%s %s\n' "$shape" "$(count "$shape")" >>"$record.new"
    done
    mv "$record.new" "$record"
    cat "$record"
    exit 0
fi

printf '%-18s %12s %12s %8s\n' shape recorded now change
while read -r shape before; do
    now=$(count "$shape")
    awk -v s="$shape" -v b="$before" -v n="$now" \
        'BEGIN { printf "%-18s %12d %12d %+7.2f %%\n", s, b, n, 100 * (n - b) / b }'
done <"$record"
