#!/bin/sh
# SPDX-License-Identifier: MIT
# The Attention cases among the backend node tests of the Python package
# 'onnx', through the public C API of a shared library of this build.
#
#     tests/onnx/run.sh [LIBRARY] [CASE...]     default: build/dispatch/libqkv.so
#     tests/onnx/run.sh --install               only that
#
# Installs the package into a virtual environment of its own, once, in
# build-onnx/ (or the folder that ONNX_VENV names).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${ONNX_VENV:-$root/build-onnx}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import onnx, ml_dtypes' 2>/dev/null ||
    "$venv/bin/pip" install --quiet 'onnx>=1.23' ml_dtypes
[ "${1:-}" != --install ] || exit 0
exec "$venv/bin/python" "$here/run.py" "${@:-$root/build/dispatch/libqkv.so}"
