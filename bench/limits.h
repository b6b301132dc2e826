/* SPDX-License-Identifier: MIT */
/*
 * What the machine can do at best with one ISA: multiply-adds from
 * registers, and loads that nothing waits for. Each ISA has a file
 * limits_<isa>.c, compiled with that ISA's flags; only the functions of an
 * ISA that the library reports as supported may be called.
 */
#ifndef BENCH_LIMITS_H
#define BENCH_LIMITS_H

#include <stdint.h>

/* Ways to read the same memory, or to copy it; which one is fastest depends on where it lies. */
enum { BENCH_READS = 4, BENCH_COPIES = 2 };

typedef struct bench_limits {
    int64_t fma_flops; /* of one step of fma() */
    void (*fma)(int64_t steps);
    /* 'data' is aligned to 64 bytes and 'bytes' a multiple of 64. */
    void (*read[BENCH_READS])(const char *data, int64_t bytes);
    /* Reads all of 'from' and writes all of 'to', which is not larger, side by
     * side; aligned alike. The second way goes past the caches; NULL where the
     * ISA has no such stores. */
    void (*copy[BENCH_COPIES])(const char *from, int64_t from_bytes, char *to, int64_t to_bytes);
} bench_limits;

/* What a copy writes at a time; before that it reads as large a part of its input. */
enum { BENCH_COPY_BLOCK = 1024 };

/* The limits of an ISA of isas.def; NULL where it is not compiled in. */
const bench_limits *bench_limits_of(int isa);

/* The number of streams must be a constant by the time code is generated. */
#if defined(__GNUC__)
#define BENCH_INLINE static inline __attribute__((always_inline))
#else
#define BENCH_INLINE static inline
#endif

/* Results go here so that no compiler finds them unused. */
extern volatile float bench_sink;

/* 1 and 0, but no compiler knows. */
extern volatile float bench_one, bench_zero;

#endif
