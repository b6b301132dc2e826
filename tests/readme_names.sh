#!/bin/sh
# SPDX-License-Identifier: MIT
# Every test that tests/README.md names exists.
#
# usage: readme_names.sh README.md TESTS [TOOL_TESTS...]
set -eu
readme=$1
shift
names=$(mktemp)
trap 'rm -f "$names"' EXIT
for program; do
    "$program" --list 2>/dev/null | awk '
        /^[a-z0-9_]+: [0-9]+ test/ { suite = $1; sub(/:$/, "", suite); next }
        suite { name = $0; sub(/.* /, "", name); print suite "/" name }' >>"$names"
done

# `suite/test` in backquotes, with * for any text; paths have a dot.
missing=0 found=0
for name in $(grep -o '`[a-z0-9_*]*/[a-z0-9_*][a-z0-9_*]*`' "$readme" | tr -d '`' | sort -u); do
    pattern="^$(printf '%s' "$name" | sed 's/\*/.*/g')\$"
    if grep -q "$pattern" "$names"; then
        found=$((found + 1))
    else
        printf 'readme-names: no test is called %s\n' "$name"
        missing=1
    fi
done
printf 'readme-names: %d of the names are tests\n' "$found"
[ "$missing" -eq 0 ] && [ "$found" -gt 0 ]
