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
# All symbols are bound before the first line of the program runs.
if echo 'int main(void) { return 0; }' | "$@" -static-pie -x c - -o "$work/probe" 2>/dev/null; then
    LD_BIND_NOW=1
    export LD_BIND_NOW
    variant 'static at any address' "$@" -DQKV_STATIC -O1 -fPIE -static-pie
    unset LD_BIND_NOW
fi
with="$shared"
variant 'shared, -O0' "$@" -O0
variant 'shared, -O3 -march=native' "$@" -O3 -march=native

# Library and program against the headers and the libc of musl.
if command -v musl-gcc >/dev/null && [ "$(uname -m)" = x86_64 ]; then
    mkdir "$work/musl"
    kernels=
    for isa in scalar avx2; do
        vector=$([ $isa = scalar ] || echo '-mavx2 -mfma -mf16c')
        for file in "$source"/kernels/$isa/*.c; do
            object=$work/musl/$isa-$(basename "$file" .c).o
            # shellcheck disable=SC2086 # a list of flags
            musl-gcc -std=c17 -O1 -ffp-contract=off $vector -I"$source/include" -I"$source/dispatch" \
                -c "$file" -o "$object"
            kernels="$kernels $object"
        done
    done
    with="$kernels $source/dispatch/*.c $source/kernels/drivers/*.c"
    variant 'musl, static' musl-gcc -O1 -ffp-contract=off -DQKV_STATIC -DQKV_WITH_scalar \
        -DQKV_WITH_avx2 -I"$source/dispatch" -static
fi

# The header in two files of one program, of old C and of C++, and no warning.
pedantic() {
    name=$1
    shift
    if "$@" -pedantic -Wall -Wextra -Werror -DQKV_STATIC -I"$source/include" -c \
        "$source/tests/linking/header.c" -o "$work/one.o" 2>"$work/log" &&
        "$@" -pedantic -Wall -Wextra -Werror -DQKV_STATIC -DSECOND -I"$source/include" -c \
            "$source/tests/linking/header.c" -o "$work/two.o" 2>>"$work/log" &&
        "$compiler" "$work/one.o" "$work/two.o" "$static" -lm -pthread -o "$work/program" \
            2>>"$work/log" && "$work/program"; then
        printf 'linking: %-28s right\n' "$name"
    else
        printf 'linking: %-28s FAILED\n' "$name"
        cat "$work/log"
        failed=1
    fi
}
compiler=$1
pedantic 'header, C11' "$@" -std=c11
compiler=${CXX:-c++}
if command -v "$compiler" >/dev/null; then
    pedantic 'header, C++11' "$compiler" -x c++ -std=c++11
    pedantic 'header, C++20' "$compiler" -x c++ -std=c++20
fi

# What pkg-config says is enough for a static program.
pc=$(dirname "$shared")/../meson-private
if command -v pkg-config >/dev/null && [ -f "$pc/qkv.pc" ]; then
    case " $(PKG_CONFIG_PATH=$pc pkg-config --static --libs qkv) " in
        *' -lm '*) printf 'linking: %-28s right\n' 'pkg-config --static' ;;
        *) printf 'linking: pkg-config --static lacks -lm\n' && failed=1 ;;
    esac
fi

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
