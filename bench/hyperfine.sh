#!/bin/sh
# SPDX-License-Identifier: MIT
# Whole processes of the qkv tool beside each other, one for each ISA that
# runs here: reading the files, attention, writing the result.
#
#     bench/hyperfine.sh BUILD/bench/tool/qkv [HEADS KV_HEADS Q_LEN KV_LEN HEAD_DIM [REPEAT]]
set -eu

tool=$1
shift
heads=${1:-8} kv_heads=${2:-2} q_len=${3:-512} kv_len=${4:-512} head_dim=${5:-64} repeat=${6:-20}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Normal numbers as .npy files of [heads][rows][head_dim] f32.
write_npy() {
    python3 - "$@" <<'END'
import array, random, sys
path, seed, *shape = sys.argv[1:]
shape = tuple(map(int, shape))
random.seed(int(seed))
n = shape[0] * shape[1] * shape[2]
data = array.array("f", (random.gauss(0, 1) for _ in range(n)))
if sys.byteorder == "big":
    data.byteswap()
head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
head += " " * (-(len(head) + 11) % 64) + "\n"
with open(path, "wb") as file:
    file.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
    data.tofile(file)
END
}

write_npy "$work/q.npy" 1 "$heads" "$q_len" "$head_dim"
write_npy "$work/k.npy" 2 "$kv_heads" "$kv_len" "$head_dim"
write_npy "$work/v.npy" 3 "$kv_heads" "$kv_len" "$head_dim"

set --
for isa in scalar avx2 avx512 neon; do
    command="$tool attend $work/q.npy $work/k.npy $work/v.npy -o $work/o.npy --isa $isa"
    # An ISA that is not here is refused.
    if $command --repeat 1 >/dev/null 2>&1; then
        set -- "$@" --command-name "$isa" "$command --repeat $repeat"
    fi
done
if [ $# -eq 0 ]; then
    echo "hyperfine.sh: '$tool attend' does not run" >&2
    exit 1
fi
hyperfine --warmup 1 --shell none "$@"
