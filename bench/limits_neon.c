/* SPDX-License-Identifier: MIT */
/*
 * Advanced SIMD limits. One step is 24 independent fmla on 4 lanes: cores
 * begin two to four a cycle with a latency of 4, which needs up to 16
 * chains; 24 and two operands fit the 32 registers.
 */
#include "limits.h"

#include <stdbool.h>

#if !defined(__ARM_NEON)
#error "compile this file with the flags of neon"
#endif
#include <arm_neon.h>

extern const bench_limits bench_limits_neon;

/* 1, read anew for each chain: chains that are known to be equal are merged into one. */
#define START vdupq_n_f32(bench_one)

static void fma_neon(int64_t steps)
{
    const float32x4_t one = vdupq_n_f32(bench_one), zero = vdupq_n_f32(bench_zero);
    float32x4_t a0 = START, a1 = START, a2 = START, a3 = START, a4 = START, a5 = START;
    float32x4_t a6 = START, a7 = START, a8 = START, a9 = START, a10 = START, a11 = START;
    float32x4_t a12 = START, a13 = START, a14 = START, a15 = START, a16 = START, a17 = START;
    float32x4_t a18 = START, a19 = START, a20 = START, a21 = START, a22 = START, a23 = START;
    for (int64_t i = 0; i < steps; i++) {
        a0 = vfmaq_f32(a0, one, zero);
        a1 = vfmaq_f32(a1, one, zero);
        a2 = vfmaq_f32(a2, one, zero);
        a3 = vfmaq_f32(a3, one, zero);
        a4 = vfmaq_f32(a4, one, zero);
        a5 = vfmaq_f32(a5, one, zero);
        a6 = vfmaq_f32(a6, one, zero);
        a7 = vfmaq_f32(a7, one, zero);
        a8 = vfmaq_f32(a8, one, zero);
        a9 = vfmaq_f32(a9, one, zero);
        a10 = vfmaq_f32(a10, one, zero);
        a11 = vfmaq_f32(a11, one, zero);
        a12 = vfmaq_f32(a12, one, zero);
        a13 = vfmaq_f32(a13, one, zero);
        a14 = vfmaq_f32(a14, one, zero);
        a15 = vfmaq_f32(a15, one, zero);
        a16 = vfmaq_f32(a16, one, zero);
        a17 = vfmaq_f32(a17, one, zero);
        a18 = vfmaq_f32(a18, one, zero);
        a19 = vfmaq_f32(a19, one, zero);
        a20 = vfmaq_f32(a20, one, zero);
        a21 = vfmaq_f32(a21, one, zero);
        a22 = vfmaq_f32(a22, one, zero);
        a23 = vfmaq_f32(a23, one, zero);
    }
    a0 = vaddq_f32(vaddq_f32(a0, a1), vaddq_f32(a2, a3));
    a4 = vaddq_f32(vaddq_f32(a4, a5), vaddq_f32(a6, a7));
    a8 = vaddq_f32(vaddq_f32(a8, a9), vaddq_f32(a10, a11));
    a12 = vaddq_f32(vaddq_f32(a12, a13), vaddq_f32(a14, a15));
    a16 = vaddq_f32(vaddq_f32(a16, a17), vaddq_f32(a18, a19));
    a20 = vaddq_f32(vaddq_f32(a20, a21), vaddq_f32(a22, a23));
    a0 = vaddq_f32(vaddq_f32(a0, a4), vaddq_f32(a8, a12));
    a0 = vaddq_f32(a0, vaddq_f32(a16, a20));
    bench_sink = vgetq_lane_f32(a0, 0);
}

/* 'streams' parts side by side, prefetched 'ahead' bytes; constants where inlined. */
BENCH_INLINE void read_streams(const char *data, int64_t bytes, int streams, int64_t ahead)
{
    const int64_t part = bytes / streams / 64 * 64;
    uint32x4_t x0 = vdupq_n_u32(0), x1 = x0, x2 = x0, x3 = x0;
    for (int64_t i = 0; i < part; i += 64) {
        for (int s = 0; s < streams; s++) {
            const uint32_t *p = (const uint32_t *)(const void *)(data + s * part + i);
            if (ahead)
                __builtin_prefetch((const char *)p + ahead);
            x0 = vorrq_u32(x0, vld1q_u32(p));
            x1 = vorrq_u32(x1, vld1q_u32(p + 4));
            x2 = vorrq_u32(x2, vld1q_u32(p + 8));
            x3 = vorrq_u32(x3, vld1q_u32(p + 12));
        }
    }
    for (int64_t i = streams * part; i < bytes; i += 16)
        x0 = vorrq_u32(x0, vld1q_u32((const uint32_t *)(const void *)(data + i)));
    x0 = vorrq_u32(vorrq_u32(x0, x1), vorrq_u32(x2, x3));
    bench_sink = (float)vgetq_lane_u32(x0, 0);
}

static void read_1(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 1, 0);
}

static void read_4(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 4, 0);
}

static void read_4_ahead(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 4, 1024);
}

static void read_8(const char *data, int64_t bytes)
{
    read_streams(data, bytes, 8, 0);
}

/* Reads 'from' and writes 'to' block by block. */
static void copy_cached(const char *from, int64_t from_bytes, char *to, int64_t to_bytes)
{
    const double step = (double)from_bytes / (double)to_bytes * BENCH_COPY_BLOCK;
    uint32x4_t x0 = vdupq_n_u32(0), x1 = x0;
    double read_to = 0.0;
    for (int64_t i = 0, j = 0; j < to_bytes;) {
        const bool last = to_bytes - j <= BENCH_COPY_BLOCK;
        read_to += step;
        const int64_t i_end = last ? from_bytes : (int64_t)read_to / 64 * 64;
        const int64_t j_end = last ? to_bytes : j + BENCH_COPY_BLOCK;
        for (; i < i_end; i += 64) {
            const uint32_t *p = (const uint32_t *)(const void *)(from + i);
            x0 = vorrq_u32(vorrq_u32(x0, vld1q_u32(p)), vld1q_u32(p + 8));
            x1 = vorrq_u32(vorrq_u32(x1, vld1q_u32(p + 4)), vld1q_u32(p + 12));
        }
        for (; j < j_end; j += 64) {
            uint32_t *p = (uint32_t *)(void *)(to + j);
            vst1q_u32(p, x0);
            vst1q_u32(p + 4, x1);
            vst1q_u32(p + 8, x0);
            vst1q_u32(p + 12, x1);
        }
    }
}

const bench_limits bench_limits_neon = {
    .fma_flops = INT64_C(24) * 4 * 2,
    .fma = fma_neon,
    .read = {read_1, read_4, read_4_ahead, read_8},
    .copy = {copy_cached},
};
