#!/bin/sh
# SPDX-License-Identifier: MIT
# The first calls of a process from 16 threads at once, and calls on all of
# them after that, under the thread sanitizer. Kernels share nothing, so the
# scalar ones stand for all.
#
# usage: tests/race.sh [SECONDS]
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
${CC:-clang} -std=c17 -O1 -g -fsanitize=thread -ffp-contract=off -D_GNU_SOURCE -DQKV_STATIC \
    -Iinclude -Idispatch -Itests dispatch/*.c kernels/drivers/*.c kernels/scalar/*.c \
    tests/selfcheck.c tests/oracle/oracle.c -lm -pthread -o "$work/selfcheck"
for _ in 1 2 3; do
    TSAN_OPTIONS=halt_on_error=1 "$work/selfcheck" --threads 16 --cases 2 --seconds "${1:-2}"
done
