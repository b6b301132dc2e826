/* SPDX-License-Identifier: MIT */
/* The command line of qkv-bench. */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "internal.h"
#include "prefill.h"
#include "shapes.h"

enum { BENCH_SHAPES_MAX = 64, BENCH_ENTRIES_MAX = 64 };

typedef struct bench_options {
    bench_shape shapes[BENCH_SHAPES_MAX];
    int n_shapes;
    bool isas[QKV_ISA_COUNT];        /* chosen by name, or all usable ones */
    bool isas_named;                 /* chosen by name */
    bool entries[BENCH_ENTRIES_MAX]; /* chosen by name */
    bool entries_named;              /* false: all of them */
    int threads, rounds;
    int32_t dtype;
    double seconds;
    bool cold, cpu_clock, alone, json, list, once;
    const bench_table *table; /* NULL: none */
    const char *rows;         /* of the table: those whose names contain it; NULL: all */
} bench_options;

/*
 * Reads the command line. Answers --help and --version itself, and ends the
 * program with status 2 and one line on stderr where something is wrong.
 */
void bench_options_read(bench_options *options, int argc, char **argv);

/* One line on stderr, and the end of the program with status 2. */
_Noreturn void bench_refuse(const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;

#endif
