/* SPDX-License-Identifier: MIT */
/* What is printed: a table for people, JSON for programs, progress on a terminal. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "measure.h"

const char *bench_cpu_name(void);

void bench_print_head(const char *dtype, int threads, int rounds, bool cpu_clock);
void bench_print_row(const bench_result *result);

/*
 * One object on one line. 'bar' is the fraction that the prefill table asks
 * for, or BENCH_NONE: then the object has no such key.
 */
void bench_print_json(const bench_result *result, double bar);

void bench_print_prefill_head(void);
void bench_print_prefill_row(const bench_result *result, double bar);

/* The same table for several threads beside one. */
void bench_print_speedup_head(int threads);
void bench_print_speedup_row(const bench_result *result, double bar);

/* Only where stderr is a terminal; erased before a row is printed. */
void bench_progress(int done, int all, const char *what);
void bench_progress_erase(void);

#endif
