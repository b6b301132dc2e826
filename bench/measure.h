/* SPDX-License-Identifier: MIT */
/* One case and its limits, measured together. */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include <math.h>

#include "cases.h"

/* What is not counted or not known. */
#define BENCH_NONE ((double)NAN)

typedef struct bench_result {
    const char *kernel, *shape, *isa, *dtype;
    int threads, rounds;
    bool alone; /* only samples with the core alone */
    double median_ns, min_ns;
    double gflops, gbps, gelems; /* a second, from the median */
    const char *limit;           /* "fma", "read", "copy", or "none" */
    double limit_rate;           /* GFLOP/s or GB/s, measured in the same rounds */
    double fraction;             /* of the limit that was reached, 1 is all of it */
    double max_error;            /* absolute, against f64 */
    /* Of all threads over one, and that of the limit; 'fraction' is the former's
     * of the latter. NaN where it was not asked for. */
    double speedup, speedup_limit;
} bench_result;

/* 0.2 seconds of work, so that the clock frequency has settled. */
void bench_warm_up(int isa, double seconds);

/* Makes, measures and destroys a case; false where the shape does not suit it. */
typedef struct bench_order {
    const bench_entry *entry;
    const bench_shape *shape;
    int isa, threads, rounds;
    int32_t dtype;
    double seconds;
    bool cold, by_fma; /* by_fma: multiply-adds are the limit, whatever else is */
    bool speedup;      /* how much faster the threads are than one */
} bench_order;
/* "f32", "f16", ..., "q4_0" */
const char *bench_dtype_name(int32_t dtype);

bool bench_measure_case(const bench_order *order, bench_result *result);

/* Runs a case once and measures nothing. */
bool bench_run_case(const bench_order *order);

#endif
