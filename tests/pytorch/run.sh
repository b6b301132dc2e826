#!/bin/sh
# SPDX-License-Identifier: MIT
# qkv_attention() beside PyTorch, through the public C API of a shared library
# of this build.
#
#     tests/pytorch/run.sh [LIBRARY [CASES [SEED]]]   default: build/dispatch/libqkv.so
#     tests/pytorch/run.sh --install                  only that
#
# Installs PyTorch, which is large, into a virtual environment of its own, once,
# in build-pytorch/ (or the folder that PYTORCH_VENV names).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${PYTORCH_VENV:-$root/build-pytorch}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import numpy, torch.nn.attention.flex_attention' 2>/dev/null ||
    "$venv/bin/pip" install --quiet 'torch>=2.6' numpy
[ "${1:-}" != --install ] || exit 0
exec "$venv/bin/python" "$here/run.py" "${@:-$root/build/dispatch/libqkv.so}"
