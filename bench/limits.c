/* SPDX-License-Identifier: MIT */
#include "limits.h"

#include "internal.h"

volatile float bench_sink, bench_one = 1.0f, bench_zero = 0.0f;

/* The build passes BENCH_ISAS: one ISA(name) for each that is compiled in. */
#define ISA(name) extern const bench_limits bench_limits_##name;
BENCH_ISAS
#undef ISA

static const bench_limits *const all[QKV_ISA_COUNT] = {
#define ISA(name) [QKV_ISA_##name] = &bench_limits_##name,
    BENCH_ISAS
#undef ISA
};

const bench_limits *bench_limits_of(int isa)
{
    return isa >= 0 && isa < QKV_ISA_COUNT ? all[isa] : NULL;
}
