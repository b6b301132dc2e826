#!/bin/sh
# SPDX-License-Identifier: MIT
# What the objects of the static library define and ask for:
#
# - no weak or indirect definition: of two equal names the linker could take the
#   one that was compiled for the higher instruction set;
# - an instruction set's files define nothing but kernels with its suffix;
# - no state but the table in use;
# - memory, threads and the environment only where the header says so, and beside
#   them nothing but a few functions of <string.h> and <math.h>.
#
# usage: symbols.sh STATIC_LIBRARY [NM]
set -eu
library=$1 nm=${2:-nm}
command -v "$nm" >/dev/null || { echo "symbols: $nm was not found" && exit 77; }
"$nm" -A "$library" 2>/dev/null | awk '
    function fault(text) { printf "symbols: %s: %s %s\n", member, text, name; faults++ }
    BEGIN {
        split("memcpy memset memmove memcmp bcmp strcmp exp2 expf log nearbyint nearbyintf sqrt tanh fma", plain)
        for (i in plain) allowed[plain[i]] = 1
    }
    {
        n = split($1, part, ":")
        member = part[n] ~ /^[0-9a-f]*$/ ? part[n - 1] : part[n]
        type = $(NF - 1)
        name = $NF
        sub(/@.*/, "", name)
        seen++
    }
    type ~ /^[WVvui]$/ && name !~ /^_/ { fault("a weak or indirect symbol,") }
    type ~ /^[TDBRGS]$/ && name !~ /^qkv_/ { fault("a name without the prefix,") }
    type ~ /^[TDBRGS]$/ && match(member, /_(avx2|avx512|neon)\.c/) {
        suffix = substr(member, RSTART, RLENGTH - 2)
        if (substr(name, length(name) - length(suffix) + 1) != suffix) fault("defines")
        kernels++
    }
    type ~ /^[BbC]$/ && member !~ /^table\.c/ { fault("state,") }
    type == "U" && name !~ /^(qkv_|__|_GLOBAL_)/ && !(name in allowed) {
        if (name ~ /^(calloc|free|pthread_.*)$/ && member ~ /^api_parallel\.c/) next
        if (name == "getenv" && member ~ /^table\.c/) next
        fault("asks for")
    }
    END {
        printf "symbols: %d names, %d of kernels of an instruction set, %d faults\n", seen, kernels, faults
        exit faults > 0 || seen == 0
    }
'
