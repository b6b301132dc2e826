#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the release library in two folders, from two copies of the source in
# folders of other names, and compares the results byte by byte.
#
# usage: tests/release/reproducible.sh
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for name in one another/folder; do
    mkdir -p "$work/$name/source"
    git ls-files -z --cached --others --exclude-standard -- . ':!tests' |
        xargs -0 cp --parents -t "$work/$name/source"
    meson setup "$work/$name/build" "$work/$name/source" -Dtests=disabled >/dev/null
    ninja -C "$work/$name/build" >/dev/null
done

status=0
for file in libqkv.a $(cd "$work/one/build/dispatch" && echo libqkv.so.*.*.*); do
    [ -f "$work/one/build/dispatch/$file" ] || continue # a folder of objects
    if cmp "$work/one/build/dispatch/$file" "$work/another/folder/build/dispatch/$file"; then
        printf 'reproducible: %s %s\n' "$(sha256sum <"$work/one/build/dispatch/$file" | cut -c1-16)" \
            "$file"
    else
        status=1
    fi
done
exit $status
