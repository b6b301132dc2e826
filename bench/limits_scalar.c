/* SPDX-License-Identifier: MIT */
/*
 * Scalar limits. One step multiplies and adds in 13 chains, as a sum of
 * products does; with the two operands they fill 15 of 16 registers. (Chains
 * of multiplications beside chains of additions can be a third faster, but
 * settle at another speed in every run.) Compiled without vectorisation.
 */
#include "limits.h"

#include <stdbool.h>

extern const bench_limits bench_limits_scalar;

/* 1, read anew for each chain: chains that are known to be equal are merged into one. */
#define START bench_one

static void fma_scalar(int64_t steps)
{
    const float one = bench_one, zero = bench_zero;
    float a0 = START, a1 = START, a2 = START, a3 = START, a4 = START;
    float a5 = START, a6 = START, a7 = START, a8 = START, a9 = START;
    float a10 = START, a11 = START, a12 = START;
    for (int64_t i = 0; i < steps; i++) {
        a0 = a0 * one + zero;
        a1 = a1 * one + zero;
        a2 = a2 * one + zero;
        a3 = a3 * one + zero;
        a4 = a4 * one + zero;
        a5 = a5 * one + zero;
        a6 = a6 * one + zero;
        a7 = a7 * one + zero;
        a8 = a8 * one + zero;
        a9 = a9 * one + zero;
        a10 = a10 * one + zero;
        a11 = a11 * one + zero;
        a12 = a12 * one + zero;
    }
    bench_sink = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11 + a12;
}

/* 'streams' parts of the data side by side; a constant where it is inlined. */
BENCH_INLINE void read_streams(const char *data, int64_t bytes, int streams)
{
    const int64_t part = bytes / streams / 64 * 64;
    uint32_t x0 = 0, x1 = 0, x2 = 0, x3 = 0;
    for (int64_t i = 0; i < part; i += 16) {
        for (int s = 0; s < streams; s++) {
            const uint32_t *p = (const uint32_t *)(const void *)(data + s * part + i);
            x0 |= p[0];
            x1 |= p[1];
            x2 |= p[2];
            x3 |= p[3];
        }
    }
    for (int64_t i = streams * part; i < bytes; i += 4)
        x0 |= *(const uint32_t *)(const void *)(data + i);
    bench_sink = (float)(x0 | x1 | x2 | x3);
}

static void read_1(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 1);
}

static void read_2(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 2);
}

static void read_4(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 4);
}

static void read_8(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 8);
}

/* Reads 'from' and writes 'to' block by block. */
static void copy_cached(const char *from, int64_t from_bytes, char *to, int64_t to_bytes)
{
    const double step = (double)from_bytes / (double)to_bytes * BENCH_COPY_BLOCK;
    uint64_t x0 = 0, x1 = 0;
    double read_to = 0.0;
    for (int64_t i = 0, j = 0; j < to_bytes;) {
        const bool last = to_bytes - j <= BENCH_COPY_BLOCK;
        read_to += step;
        const int64_t i_end = last ? from_bytes : (int64_t)read_to / 64 * 64;
        const int64_t j_end = last ? to_bytes : j + BENCH_COPY_BLOCK;
        for (; i < i_end; i += 64) {
            const uint64_t *p = (const uint64_t *)(const void *)(from + i);
            x0 |= p[0] | p[2] | p[4] | p[6];
            x1 |= p[1] | p[3] | p[5] | p[7];
        }
        for (; j < j_end; j += 64) {
            uint64_t *p = (uint64_t *)(void *)(to + j);
            p[0] = p[2] = p[4] = p[6] = x0;
            p[1] = p[3] = p[5] = p[7] = x1;
        }
    }
}

const bench_limits bench_limits_scalar = {
    .fma_flops = INT64_C(13) * 2,
    .fma = fma_scalar,
    .read = {read_1, read_2, read_4, read_8},
    .copy = {copy_cached},
};
