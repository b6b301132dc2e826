#!/bin/sh
# SPDX-License-Identifier: MIT
# Line and branch coverage of dispatch, drivers and the scalar kernels by the
# suite, and the lines that no test reaches, each of which needs its reason in
# uncovered.txt. Needs gcov.
#
# usage: tests/release/coverage.sh [BUILD]
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build-coverage}

# Foreign kernels take minutes to compile and are not what is measured.
[ -f "$build/build.ninja" ] ||
    meson setup "$build" -Db_coverage=true -Dsimde=none -Dbuildtype=debugoptimized \
        -Doptimization=1 >/dev/null
ninja -C "$build" tests/qkv-tests tests/test_threads >/dev/null
find "$build" -name '*.gcda' -delete
QKV_TEST_EFFORT=${QKV_TEST_EFFORT:-quick} "$build/tests/qkv-tests" >"$build/tests.log" 2>&1 && "$build/tests/test_threads" >/dev/null || {
    grep -E 'FAIL|CRASH|TIMEOUT|: ' "$build/tests.log" | tail -n 20
    echo 'coverage: a test fails'
    exit 1
}

# The library's objects alone: they are what the tests are linked with.
report=$build/coverage
rm -rf "$report" && mkdir -p "$report"
objects=$(find "$PWD/$build/dispatch" "$PWD/$build/kernels/libqkv_scalar.a.p" -name '*.gcda')
# Sources are found from the build folder. shellcheck disable=SC2086
(cd "$build" && gcov -b $objects >coverage/gcov.log 2>&1 && mv ./*.gcov coverage/)

python3 - "$report" tests/release/uncovered.txt <<'PYTHON'
import glob, os, re, sys

# FILE: text of the line, then on indented lines why no test reaches it
reasons, unused = {}, set()
for text in open(sys.argv[2]):
    match = re.match(r"([\w./]+): (.*)", text)
    if match:
        unused.add((match.group(1), " ".join(match.group(2).split())))
total = {"lines": [0, 0], "branches": [0, 0]}
missed = []
for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.c.gcov"))):
    lines, branches, name = [0, 0], [0, 0], os.path.basename(path)[:-5]
    for text in open(path, errors="replace"):
        match = re.match(r"\s*([-#=\d]+\*?):\s*(\d+):(.*)", text)
        if match and match.group(2) == "0" and match.group(3).startswith("Source:"):
            name = match.group(3)[7:]
        elif match and match.group(2) != "0" and not match.group(1).startswith("-"):
            hit = match.group(1)[0] not in "#="
            lines[0] += hit
            lines[1] += 1
            if not hit:
                place = (re.sub(r"^(\.\./)*", "", name), " ".join(match.group(3).split()))
                if place in unused:
                    reasons[place] = True
                else:
                    missed.append(f"{place[0]}:{match.group(2)}: {place[1]}")
        elif re.match(r"branch\s+\d+ (taken|never)", text):
            branches[0] += bool(re.search(r"taken [1-9]", text))
            branches[1] += 1
    for key, part in (("lines", lines), ("branches", branches)):
        total[key] = [a + b for a, b in zip(total[key], part)]
    print("%-40s lines %3d of %3d, branches %3d of %3d" % (name[-40:], *lines, *branches))
for key, (hit, every) in total.items():
    print(f"{key}: {100 * hit / max(every, 1):.1f} %")
print(f"not reached, for the reasons of uncovered.txt: {len(reasons)} lines")
print(f"not reached without a reason: {len(missed)} lines")
print("\n".join("  " + line for line in missed))
sys.exit(bool(missed) or not (total["lines"][0] >= 0.95 * total["lines"][1]
                              and total["branches"][0] >= 0.90 * total["branches"][1]))
PYTHON
