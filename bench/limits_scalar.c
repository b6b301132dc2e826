/* SPDX-License-Identifier: MIT */
/*
 * Scalar limits. One step is 6 multiplications and 6 additions that wait
 * for nothing but their own predecessors: with a latency of 3 or 4 cycles
 * and 2 to 4 of them begun in a cycle, 12 chains keep the units busy, and
 * they fit 16 registers. Compiled without vectorisation.
 */
#include "limits.h"

extern const bench_limits bench_limits_scalar;

static void fma_scalar(int64_t steps)
{
    const float one = bench_one, zero = bench_zero;
    float m0 = one, m1 = one, m2 = one, m3 = one, m4 = one, m5 = one;
    float a0 = zero, a1 = zero, a2 = zero, a3 = zero, a4 = zero, a5 = zero;
    for (int64_t i = 0; i < steps; i++) {
        m0 *= one, a0 += zero;
        m1 *= one, a1 += zero;
        m2 *= one, a2 += zero;
        m3 *= one, a3 += zero;
        m4 *= one, a4 += zero;
        m5 *= one, a5 += zero;
    }
    bench_sink = m0 + m1 + m2 + m3 + m4 + m5 + a0 + a1 + a2 + a3 + a4 + a5;
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

const bench_limits bench_limits_scalar = {
    .fma_flops = 12,
    .fma = fma_scalar,
    .read = {read_1, read_2, read_4, read_8},
};
