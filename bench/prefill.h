/* SPDX-License-Identifier: MIT */
/* Tables of shapes and the fraction of its limit that each is to reach. */
#ifndef BENCH_PREFILL_H
#define BENCH_PREFILL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct bench_prefill {
    const char *name;   /* as printed */
    const char *shape;  /* for bench_shape_parse() */
    const char *kernel; /* of bench_entry_at() */
    double avx512, avx2;
    int32_t dtype; /* or as the command line says, where the table has no types */
} bench_prefill;

typedef struct bench_table {
    const char *name;
    const bench_prefill *rows;
    int count;
    bool dtypes;        /* rows have types of their own */
    const char *by_fma; /* the row whose figure is a fraction of the multiply-adds alone */
} bench_table;

/* "prefill" or "decode"; NULL for any other name. */
const bench_table *bench_table_named(const char *name);

/* What several threads are to reach of the speed-up that the limit allows: 1.9 of 2. */
#define BENCH_SPEEDUP_BAR 0.95

/* The figure to reach with an ISA, or BENCH_NONE where none was set. */
double bench_prefill_bar(const bench_prefill *row, int isa);

#endif
