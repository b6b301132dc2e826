/* SPDX-License-Identifier: MIT */
/*
 * A product of up to 16 rows with weights in place:
 * sums[i][c] += sum over k of x[i][k] * w[k][c], 16 rows of weights at a time.
 *
 * The lanes run along the columns. Sums are loaded, take up to 16 terms and are stored
 * again: up to 8 rows x 2 vectors or 16 rows x 1, for 8 cycles a step of depth on 10 or
 * 17 loads, elements of x copied so that all rows' lie together. Weights are read once,
 * and side by side over thousands of columns: streams that the hardware prefetches
 * (to ask for them ahead costs 5 % with 1 row and gains nothing with 16; narrower runs of
 * columns take half as long again). More rows than 8 in two passes are slower: 16
 * rows of weights that lie 16 KiB apart do not stay in a set of 12 ways until the second.
 *
 * Each sum is one chain over the depth, as in gemm_avx512.c. 4096 x 4096 on an Emerald
 * Rapids, in ms: 1 row 2.6, as fast as memory is read, 8 rows 3.5, 16 rows 5.9.
 */
#include "internal.h"

#include <string.h>

#include "isa_avx512.h"

enum { ROWS = QKV_avx512_few_rows, DEPTH = QKV_avx512_few_depth };

/* n elements from p on as f32, zeros in the other lanes. */
ALWAYS_INLINE __m512 load_wide(const char *p, int64_t n, const int32_t dtype)
{
    if (dtype == QKV_F32)
        return load_tail((const float *)(const void *)p, lanes_below(n));
    __m256i half;
    if (n >= LANES) {
        half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    } else {
        int16_t copy[LANES] = {0};
        memcpy(copy, p, n > 0 ? (size_t)n * sizeof *copy : 0);
        half = _mm256_loadu_si256((const __m256i *)(const void *)copy);
    }
    if (dtype == QKV_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The rows and some columns, of which 'cols' exist. */
typedef struct few_part {
    const float *x; /* [DEPTH][ROWS] */
    const char *w;
    float *sums;
    int64_t w_bytes, sums_stride, sums_block; /* w_bytes: from a row of weights to the next */
    int64_t rows, cols, depth;
    bool begin;
} few_part;

/* 'rows' may be more than there are: the others' sums are not stored. */
ALWAYS_INLINE void add_part(const few_part *p, const int rows, const int vecs, const bool full,
                            const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    __m512 acc[ROWS * 2];
    UNROLL
    for (int u = 0; u < rows * vecs; u++) {
        const int r = u / vecs, v = u % vecs;
        acc[u] = _mm512_setzero_ps();
        if (!p->begin && r < p->rows)
            acc[u] = load_tail(p->sums + r * p->sums_stride + v * p->sums_block,
                               lanes_below(full ? LANES : p->cols - v * LANES));
    }
    const char *w = p->w;
    for (int64_t k = 0; k < p->depth; k++, w += p->w_bytes) {
        __m512 x[2];
        UNROLL
        for (int v = 0; v < vecs; v++)
            x[v] = load_wide(w + v * LANES * size, full ? LANES : p->cols - v * LANES, dtype);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 xk = _mm512_set1_ps(p->x[k * ROWS + r]);
            UNROLL
            for (int v = 0; v < vecs; v++)
                acc[r * vecs + v] = _mm512_fmadd_ps(xk, x[v], acc[r * vecs + v]);
        }
    }
    UNROLL
    for (int u = 0; u < rows * vecs; u++) {
        const int r = u / vecs, v = u % vecs;
        if (r < p->rows)
            store_tail(p->sums + r * p->sums_stride + v * p->sums_block,
                       lanes_below(full ? LANES : p->cols - v * LANES), acc[u]);
    }
}

ALWAYS_INLINE void add_columns(few_part p, const int rows, const int vecs, const int32_t dtype)
{
    const int64_t step = vecs * LANES, size = dtype == QKV_F32 ? 4 : 2;
    for (; p.cols >= step; p.cols -= step, p.w += step * size, p.sums += vecs * p.sums_block)
        add_part(&p, rows, vecs, true, dtype);
    if (p.cols > 0)
        add_part(&p, rows, vecs, false, dtype);
}

ALWAYS_INLINE void in_out(const qkv_gemm_few_args *a, const int32_t dtype)
{
    _Alignas(64) float x[DEPTH * ROWS] = {0};
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t k = 0; k < a->depth; k++)
            x[k * ROWS + i] = a->x[i * a->x_stride + k];
    const few_part p = {.x = x,
                        .w = a->w,
                        .sums = a->sums,
                        .w_bytes = a->w_stride * (dtype == QKV_F32 ? 4 : 2),
                        .sums_stride = a->sums_stride,
                        .sums_block = a->sums_block,
                        .rows = a->rows,
                        .cols = a->cols,
                        .depth = a->depth,
                        .begin = a->begin};
    if (a->rows > 12)
        add_columns(p, 16, 1, dtype);
    else if (a->rows > 8)
        add_columns(p, 12, 1, dtype);
    else if (a->rows > 6)
        add_columns(p, 8, 2, dtype);
    else if (a->rows > 4)
        add_columns(p, 6, 2, dtype);
    else if (a->rows > 2)
        add_columns(p, 4, 2, dtype);
    else if (a->rows == 2)
        add_columns(p, 2, 2, dtype);
    else
        add_columns(p, 1, 2, dtype);
}

/* ------------------------------------------------ weights stored [out][in] */

/*
 * The lanes run along columns here too, so that a sum takes its terms in order: 16 x
 * 16 weights are transposed in registers, 64 shuffles for 1 KiB that takes twice as
 * long to come from memory.
 */

/* w[k]: the weights of 16 columns at depth 'from' + k; rows of weights that do not
 * exist are the last one again. */
ALWAYS_INLINE void load_block(const qkv_gemm_few_args *a, int64_t column, int64_t from, int64_t n,
                              const int32_t dtype, __m512 w[LANES])
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    UNROLL
    for (int c = 0; c < LANES; c++) {
        const int64_t at = min_i64(column + c, a->cols - 1);
        const char *row = (const char *)a->w + (at * a->w_stride + from) * size;
        w[c] = load_wide(row, n, dtype);
    }
    transpose_16x16(w);
}

ALWAYS_INLINE void add_block(const qkv_gemm_few_args *a, int64_t i, int64_t from, int64_t n,
                             const int rows, const __m512 w[LANES], __m512 acc[ROWS])
{
    UNROLL
    for (int k = 0; k < LANES; k++) {
        if (k >= n)
            return;
        UNROLL
        for (int r = 0; r < rows; r++)
            acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(a->x[(i + r) * a->x_stride + from + k]), w[k],
                                     acc[r]);
    }
}

/* Up to 4 rows and 16 columns. */
ALWAYS_INLINE void out_in_rows(const qkv_gemm_few_args *a, int64_t i, int64_t column, int64_t from,
                               int64_t n, const int rows, bool begin, const __m512 w[LANES])
{
    const __mmask16 exist = lanes_below(a->cols - column);
    __m512 acc[ROWS];
    float *sums = a->sums + i * a->sums_stride + column / LANES * a->sums_block;
    UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = begin ? _mm512_setzero_ps() : load_tail(sums + r * a->sums_stride, exist);
    add_block(a, i, from, n, rows, w, acc);
    UNROLL
    for (int r = 0; r < rows; r++)
        store_tail(sums + r * a->sums_stride, exist, acc[r]);
}

ALWAYS_INLINE void out_in(const qkv_gemm_few_args *a, const int32_t dtype)
{
    for (int64_t column = 0; column < a->cols; column += LANES)
        for (int64_t k = 0; k < a->depth; k += LANES) {
            const int64_t n = min_i64(a->depth - k, LANES);
            const bool begin = a->begin && k == 0;
            __m512 w[LANES];
            load_block(a, column, k, n, dtype, w);
            int64_t i = 0;
            for (; i + 8 <= a->rows; i += 8)
                out_in_rows(a, i, column, k, n, 8, begin, w);
            for (; i + 4 <= a->rows; i += 4)
                out_in_rows(a, i, column, k, n, 4, begin, w);
            for (; i + 2 <= a->rows; i += 2)
                out_in_rows(a, i, column, k, n, 2, begin, w);
            if (i < a->rows)
                out_in_rows(a, i, column, k, n, 1, begin, w);
        }
}

ALWAYS_INLINE void multiply_of(const qkv_gemm_few_args *a, const int32_t dtype)
{
    if (a->out_in)
        out_in(a, dtype);
    else
        in_out(a, dtype);
}

void qkv_gemm_few_avx512(const qkv_gemm_few_args *args)
{
    const qkv_gemm_few_args a = *args; /* a copy that no store can alias */
    if (a.dtype == QKV_F32)
        multiply_of(&a, QKV_F32);
    else if (a.dtype == QKV_F16)
        multiply_of(&a, QKV_F16);
    else
        multiply_of(&a, QKV_BF16);
}
