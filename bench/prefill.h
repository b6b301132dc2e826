/* SPDX-License-Identifier: MIT */
/* The table of prefill shapes and the fraction of its limit that each is to reach. */
#ifndef BENCH_PREFILL_H
#define BENCH_PREFILL_H

#include <stdbool.h>

typedef struct bench_prefill {
    const char *name;   /* as printed */
    const char *shape;  /* for bench_shape_parse() */
    const char *kernel; /* of bench_entry_at() */
    double avx512, avx2;
} bench_prefill;

/* The rows one after the other; NULL past the last. */
const bench_prefill *bench_prefill_at(int index);

/* The figure to reach with an ISA, or BENCH_NONE where none was set. */
double bench_prefill_bar(const bench_prefill *row, int isa);

#endif
