/* SPDX-License-Identifier: MIT */
/*
 * AVX-512 limits. One step is 24 independent vfmadd on 16 lanes: two a
 * cycle with a latency of 4 need 8 chains; more cost nothing and hide the
 * loop's own instructions.
 */
#include "limits.h"

#include <stdbool.h>

#if !defined(__AVX512F__)
#error "compile this file with the flags of avx512"
#endif
#include <immintrin.h>

extern const bench_limits bench_limits_avx512;

/* 1, read anew for each chain: chains that are known to be equal are merged into one. */
#define START _mm512_set1_ps(bench_one)

static void fma_avx512(int64_t steps)
{
    const __m512 one = _mm512_set1_ps(bench_one), zero = _mm512_set1_ps(bench_zero);
    __m512 a0 = START, a1 = START, a2 = START, a3 = START, a4 = START, a5 = START;
    __m512 a6 = START, a7 = START, a8 = START, a9 = START, a10 = START, a11 = START;
    __m512 a12 = START, a13 = START, a14 = START, a15 = START, a16 = START, a17 = START;
    __m512 a18 = START, a19 = START, a20 = START, a21 = START, a22 = START, a23 = START;
    for (int64_t i = 0; i < steps; i++) {
        a0 = _mm512_fmadd_ps(a0, one, zero);
        a1 = _mm512_fmadd_ps(a1, one, zero);
        a2 = _mm512_fmadd_ps(a2, one, zero);
        a3 = _mm512_fmadd_ps(a3, one, zero);
        a4 = _mm512_fmadd_ps(a4, one, zero);
        a5 = _mm512_fmadd_ps(a5, one, zero);
        a6 = _mm512_fmadd_ps(a6, one, zero);
        a7 = _mm512_fmadd_ps(a7, one, zero);
        a8 = _mm512_fmadd_ps(a8, one, zero);
        a9 = _mm512_fmadd_ps(a9, one, zero);
        a10 = _mm512_fmadd_ps(a10, one, zero);
        a11 = _mm512_fmadd_ps(a11, one, zero);
        a12 = _mm512_fmadd_ps(a12, one, zero);
        a13 = _mm512_fmadd_ps(a13, one, zero);
        a14 = _mm512_fmadd_ps(a14, one, zero);
        a15 = _mm512_fmadd_ps(a15, one, zero);
        a16 = _mm512_fmadd_ps(a16, one, zero);
        a17 = _mm512_fmadd_ps(a17, one, zero);
        a18 = _mm512_fmadd_ps(a18, one, zero);
        a19 = _mm512_fmadd_ps(a19, one, zero);
        a20 = _mm512_fmadd_ps(a20, one, zero);
        a21 = _mm512_fmadd_ps(a21, one, zero);
        a22 = _mm512_fmadd_ps(a22, one, zero);
        a23 = _mm512_fmadd_ps(a23, one, zero);
    }
    a0 = _mm512_add_ps(_mm512_add_ps(a0, a1), _mm512_add_ps(a2, a3));
    a4 = _mm512_add_ps(_mm512_add_ps(a4, a5), _mm512_add_ps(a6, a7));
    a8 = _mm512_add_ps(_mm512_add_ps(a8, a9), _mm512_add_ps(a10, a11));
    a12 = _mm512_add_ps(_mm512_add_ps(a12, a13), _mm512_add_ps(a14, a15));
    a16 = _mm512_add_ps(_mm512_add_ps(a16, a17), _mm512_add_ps(a18, a19));
    a20 = _mm512_add_ps(_mm512_add_ps(a20, a21), _mm512_add_ps(a22, a23));
    a0 = _mm512_add_ps(_mm512_add_ps(a0, a4), _mm512_add_ps(a8, a12));
    a0 = _mm512_add_ps(a0, _mm512_add_ps(a16, a20));
    bench_sink = _mm512_cvtss_f32(a0);
}

/* 'streams' parts side by side, prefetched 'ahead' bytes; constants where inlined. */
BENCH_INLINE void read_streams(const char *data, int64_t bytes, int streams, int64_t ahead)
{
    const int64_t part = bytes / streams / 256 * 256;
    __m512i x0 = _mm512_setzero_si512(), x1 = x0, x2 = x0, x3 = x0;
    for (int64_t i = 0; i < part; i += 256) {
        for (int s = 0; s < streams; s++) {
            const char *p = data + s * part + i;
            for (int line = 0; ahead && line < 256; line += 64)
                _mm_prefetch(p + ahead + line, _MM_HINT_T0);
            x0 = _mm512_or_si512(x0, _mm512_load_si512(p));
            x1 = _mm512_or_si512(x1, _mm512_load_si512(p + 64));
            x2 = _mm512_or_si512(x2, _mm512_load_si512(p + 128));
            x3 = _mm512_or_si512(x3, _mm512_load_si512(p + 192));
        }
    }
    for (int64_t i = streams * part; i < bytes; i += 64)
        x0 = _mm512_or_si512(x0, _mm512_load_si512(data + i));
    x0 = _mm512_or_si512(_mm512_or_si512(x0, x1), _mm512_or_si512(x2, x3));
    bench_sink = (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(x0));
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
    __m512i x = _mm512_setzero_si512();
    double read_to = 0.0;
    for (int64_t i = 0, j = 0; j < to_bytes;) {
        const bool last = to_bytes - j <= BENCH_COPY_BLOCK;
        read_to += step;
        const int64_t i_end = last ? from_bytes : (int64_t)read_to / 64 * 64;
        const int64_t j_end = last ? to_bytes : j + BENCH_COPY_BLOCK;
        for (; i < i_end; i += 64) {
            x = _mm512_or_si512(x, _mm512_load_si512(from + i));
        }
        for (; j < j_end; j += 64) {
            if (past)
                _mm512_stream_si512((__m512i *)(void *)(to + j), x);
            else
                _mm512_store_si512(to + j, x);
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

const bench_limits bench_limits_avx512 = {
    .fma_flops = INT64_C(24) * 16 * 2,
    .fma = fma_avx512,
    .read = {read_1, read_4, read_4_ahead, read_8},
    .copy = {copy_cached, copy_past},
};
