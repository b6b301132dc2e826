#!/bin/sh
# SPDX-License-Identifier: MIT
# Compiles and runs the program that the README prints, so that what a reader
# pastes works: readme_program.sh README.md INCLUDE_DIR LIBRARY COMPILER...
set -eu
readme=$1 include=$2 library=$3
shift 3
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

sed -n '/^```c$/,/^```$/p' "$readme" | sed '/^```/d' >"$folder/program.c"
"$@" -std=c17 -Wall -Wextra -Werror -I"$include" "$folder/program.c" "$library" -lm -o "$folder/program"
"$folder/program" | tee "$folder/output"
# Every row of values has 5 in column 5, so the output must have it too.
grep -q '^success on .*: out\[0\]\[5\] = 5\.000$' "$folder/output"
