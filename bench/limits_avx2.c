/* SPDX-License-Identifier: MIT */
/*
 * AVX2 limits. One step is 12 independent vfmadd on 8 lanes: two a cycle
 * with a latency of 4 or 5 need 8 to 10 chains; 12 and two operands fit the
 * 16 registers.
 */
#include "limits.h"

#include <stdbool.h>

#if !defined(__AVX2__) || !defined(__FMA__)
#error "compile this file with the flags of avx2"
#endif
#include <immintrin.h>

extern const bench_limits bench_limits_avx2;

/* 1, read anew for each chain: chains that are known to be equal are merged into one. */
#define START _mm256_set1_ps(bench_one)

static void fma_avx2(int64_t steps)
{
    const __m256 one = _mm256_set1_ps(bench_one), zero = _mm256_set1_ps(bench_zero);
    __m256 a0 = START, a1 = START, a2 = START, a3 = START, a4 = START, a5 = START;
    __m256 a6 = START, a7 = START, a8 = START, a9 = START, a10 = START, a11 = START;
    for (int64_t i = 0; i < steps; i++) {
        a0 = _mm256_fmadd_ps(a0, one, zero);
        a1 = _mm256_fmadd_ps(a1, one, zero);
        a2 = _mm256_fmadd_ps(a2, one, zero);
        a3 = _mm256_fmadd_ps(a3, one, zero);
        a4 = _mm256_fmadd_ps(a4, one, zero);
        a5 = _mm256_fmadd_ps(a5, one, zero);
        a6 = _mm256_fmadd_ps(a6, one, zero);
        a7 = _mm256_fmadd_ps(a7, one, zero);
        a8 = _mm256_fmadd_ps(a8, one, zero);
        a9 = _mm256_fmadd_ps(a9, one, zero);
        a10 = _mm256_fmadd_ps(a10, one, zero);
        a11 = _mm256_fmadd_ps(a11, one, zero);
    }
    a0 = _mm256_add_ps(_mm256_add_ps(a0, a1), _mm256_add_ps(a2, a3));
    a4 = _mm256_add_ps(_mm256_add_ps(a4, a5), _mm256_add_ps(a6, a7));
    a8 = _mm256_add_ps(_mm256_add_ps(a8, a9), _mm256_add_ps(a10, a11));
    bench_sink = _mm256_cvtss_f32(_mm256_add_ps(_mm256_add_ps(a0, a4), a8));
}

/* 'streams' parts side by side, prefetched 'ahead' bytes; constants where inlined. */
BENCH_INLINE void read_streams(const char *data, int64_t bytes, int streams, int64_t ahead)
{
    const int64_t part = bytes / streams / 128 * 128;
    __m256 x0 = _mm256_setzero_ps(), x1 = x0, x2 = x0, x3 = x0;
    for (int64_t i = 0; i < part; i += 128) {
        for (int s = 0; s < streams; s++) {
            const char *p = data + s * part + i;
            if (ahead) {
                _mm_prefetch(p + ahead, _MM_HINT_T0);
                _mm_prefetch(p + ahead + 64, _MM_HINT_T0);
            }
            x0 = _mm256_or_ps(x0, _mm256_load_ps((const float *)(const void *)p));
            x1 = _mm256_or_ps(x1, _mm256_load_ps((const float *)(const void *)(p + 32)));
            x2 = _mm256_or_ps(x2, _mm256_load_ps((const float *)(const void *)(p + 64)));
            x3 = _mm256_or_ps(x3, _mm256_load_ps((const float *)(const void *)(p + 96)));
        }
    }
    for (int64_t i = streams * part; i < bytes; i += 32)
        x0 = _mm256_or_ps(x0, _mm256_load_ps((const float *)(const void *)(data + i)));
    bench_sink = _mm256_cvtss_f32(_mm256_or_ps(_mm256_or_ps(x0, x1), _mm256_or_ps(x2, x3)));
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

/* Reads 'from' and writes 'to' block by block; 'past' the caches, a constant where inlined. */
BENCH_INLINE void copy_blocks(const char *from, int64_t from_bytes, char *to, int64_t to_bytes,
                              bool past)
{
    const double step = (double)from_bytes / (double)to_bytes * BENCH_COPY_BLOCK;
    __m256i x0 = _mm256_setzero_si256(), x1 = x0;
    double read_to = 0.0;
    for (int64_t i = 0, j = 0; j < to_bytes;) {
        const bool last = to_bytes - j <= BENCH_COPY_BLOCK;
        read_to += step;
        const int64_t i_end = last ? from_bytes : (int64_t)read_to / 64 * 64;
        const int64_t j_end = last ? to_bytes : j + BENCH_COPY_BLOCK;
        for (; i < i_end; i += 64) {
            const __m256i *p = (const __m256i *)(const void *)(from + i);
            x0 = _mm256_or_si256(x0, _mm256_load_si256(p));
            x1 = _mm256_or_si256(x1, _mm256_load_si256(p + 1));
        }
        for (; j < j_end; j += 64) {
            __m256i *p = (__m256i *)(void *)(to + j);
            if (past) {
                _mm256_stream_si256(p, x0);
                _mm256_stream_si256(p + 1, x1);
            } else {
                _mm256_store_si256(p, x0);
                _mm256_store_si256(p + 1, x1);
            }
        }
    }
    if (past)
        _mm_sfence();
}

static void copy_cached(const char *from, int64_t from_bytes, char *to, int64_t to_bytes)
{
    copy_blocks(from, from_bytes, to, to_bytes, false);
}

static void copy_past(const char *from, int64_t from_bytes, char *to, int64_t to_bytes)
{
    copy_blocks(from, from_bytes, to, to_bytes, true);
}

const bench_limits bench_limits_avx2 = {
    .fma_flops = INT64_C(12) * 8 * 2,
    .fma = fma_avx2,
    .read = {read_1, read_4, read_4_ahead, read_8},
    .copy = {copy_cached, copy_past},
};
