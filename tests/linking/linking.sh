#!/bin/sh
# SPDX-License-Identifier: MIT
# Links a program with the library in each way that a user may, and runs it:
# the static and the shared library, consumers at -O0, at -O3 -march=native and
# with link-time optimisation, fully static, opened at run time twice and as
# two copies in one process. Each run makes its first calls from 16 threads and
# forks after first use. The library's own needs are listed: nothing but libc
# and libm.
#
# usage: linking.sh SOURCE_DIR STATIC_LIBRARY SHARED_LIBRARY COMPILER...
set -eu
source=$1 static=$2 shared=$3
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

program="$source/tests/selfcheck.c $source/tests/oracle/oracle.c"
flags="-std=c17 -D_GNU_SOURCE -I$source/include -I$source/tests"

# variant NAME FLAG...: a program linked so computes what the oracle computes.
variant() {
    name=$1
    shift
    # shellcheck disable=SC2086 # lists of words
    if "$@" $flags $program -o "$work/program" $with -lm -pthread 2>"$work/log" &&
        LD_LIBRARY_PATH=$(dirname "$shared") "$work/program" --threads 16 --fork --cases 6 \
            >"$work/out" 2>&1; then
        printf 'linking: %-28s %s\n' "$name" "$(sed 's/^selfcheck: //; s/;.*//' "$work/out")"
    else
        printf 'linking: %-28s FAILED\n' "$name"
        cat "$work/log" "$work/out" 2>/dev/null || true
        failed=1
    fi
}

with="$static"
variant 'static, -O0' "$@" -DQKV_STATIC -O0
variant 'static, -O3 -march=native' "$@" -DQKV_STATIC -O3 -march=native
variant 'static, -O2 -flto' "$@" -DQKV_STATIC -O2 -flto
if echo 'int main(void) { return 0; }' | "$@" -static -x c - -o "$work/probe" 2>/dev/null; then
    variant 'fully static' "$@" -DQKV_STATIC -O1 -static
fi
with="$shared"
variant 'shared, -O0' "$@" -O0
variant 'shared, -O3 -march=native' "$@" -O3 -march=native

cp "$shared" "$work/copy.so"
if "$@" -std=c17 -D_GNU_SOURCE -I"$source/include" "$source/tests/linking/loaded.c" \
    -o "$work/loaded" -ldl && "$work/loaded" "$shared" "$work/copy.so"; then
    printf 'linking: %-28s right\n' 'opened twice, and two copies'
else
    printf 'linking: opened at run time: FAILED\n'
    failed=1
fi

if command -v readelf >/dev/null; then
    needs=$(readelf -d "$shared" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libm|ld-linux.*|libc\.musl.*)\.so' || true)
    printf 'linking: needs %s beside libc and libm\n' "${needs:-nothing}"
    [ -z "$needs" ] || failed=1
    public=$(readelf -W --dyn-syms "$shared" |
        awk '$5 == "GLOBAL" && $7 != "UND" && $8 !~ /^qkv_/ { print $8 }')
    [ -z "$public" ] || { printf 'linking: exports %s\n' "$public" && failed=1; }
fi
exit $failed
