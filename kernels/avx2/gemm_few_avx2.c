/* SPDX-License-Identifier: MIT */
/*
 * A product of up to 6 rows with weights in place:
 * sums[i][c] += sum over k of x[i][k] * w[k][c], 8 rows of weights at a time.
 *
 * The lanes run along 16 columns; sums are loaded, take the 8 terms and are
 * stored again, 2 accumulators a row. 16 columns of one row take 16 multiply-adds,
 * 16 loads of weights, 8 broadcasts, 2 loads and 2 stores of sums: 13 cycles on two
 * load ports, while the 512 bytes of weights take some 80 to come from memory. So
 * what counts is how memory is read: 8 rows of weights side by side, each for
 * thousands of columns, are 8 streams that the hardware prefetches. Measured
 * with rows of 4096 columns on a Zen 3, as parts of the fastest pure read: 0.9
 * with 1 row, 0.8 with 4; 0.4 with panels that are packed first.
 */
#include "internal.h"

#include <string.h>

#include "isa_avx2.h"

enum { COLS = 2 * LANES, DEPTH = QKV_avx2_few_depth };

_Static_assert((int)COLS == (int)QKV_FEW_COLS, "a step is a block of the sums");

/* The columns of a step: 'w' is of a type, rows 'stride' elements apart. */
typedef struct few_step {
    const float *x;
    const char *w;
    float *sums;
    int64_t x_stride, stride, sums_stride, depth;
    bool begin;
} few_step;

QKV_INLINE void multiply_columns(const few_step *s, const int rows, const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    __m256 acc[QKV_avx2_few_rows][2];
    QKV_UNROLL
    for (int r = 0; r < rows; r++) {
        const float *sums = s->sums + r * s->sums_stride;
        acc[r][0] = s->begin ? _mm256_setzero_ps() : _mm256_loadu_ps(sums);
        acc[r][1] = s->begin ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + LANES);
    }
    const char *w = s->w;
    for (int64_t k = 0; k < s->depth; k++, w += s->stride * size) {
        const __m256 w0 = load_wide(w, dtype), w1 = load_wide(w + LANES * size, dtype);
        QKV_UNROLL
        for (int r = 0; r < rows; r++) {
            const __m256 xk = _mm256_broadcast_ss(s->x + r * s->x_stride + k);
            acc[r][0] = _mm256_fmadd_ps(xk, w0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(xk, w1, acc[r][1]);
        }
    }
    QKV_UNROLL
    for (int r = 0; r < rows; r++) {
        float *sums = s->sums + r * s->sums_stride;
        _mm256_storeu_ps(sums, acc[r][0]);
        _mm256_storeu_ps(sums + LANES, acc[r][1]);
    }
}

/* The last columns, fewer than COLS: through copies that have all of them. */
QKV_INLINE void multiply_tail(const few_step *s, int64_t cols, const int rows, const int32_t dtype)
{
    const size_t size = dtype == QKV_F32 ? 4 : 2;
    float w[DEPTH * COLS], sums[QKV_avx2_few_rows * COLS] = {0};
    memset(w, 0, sizeof w);
    for (int64_t k = 0; k < s->depth; k++)
        memcpy((char *)w + (size_t)k * COLS * size, s->w + (size_t)(k * s->stride) * size,
               (size_t)cols * size);
    for (int r = 0; r < rows && !s->begin; r++)
        memcpy(sums + r * COLS, s->sums + r * s->sums_stride, (size_t)cols * sizeof *sums);
    few_step copy = *s;
    copy.w = (const char *)w;
    copy.stride = COLS;
    copy.sums = sums;
    copy.sums_stride = COLS;
    multiply_columns(&copy, rows, dtype);
    for (int r = 0; r < rows; r++)
        memcpy(s->sums + r * s->sums_stride, sums + r * COLS, (size_t)cols * sizeof *sums);
}

QKV_INLINE void multiply_rows(const qkv_gemm_few_args *a, const int rows, const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    few_step s = {.x = a->x,
                  .w = a->w,
                  .sums = a->sums,
                  .x_stride = a->x_stride,
                  .stride = a->w_stride,
                  .sums_stride = a->sums_stride,
                  .depth = a->depth,
                  .begin = a->begin};
    int64_t left = a->cols;
    for (; left >= COLS; left -= COLS) {
        if (s.depth == DEPTH) { /* a constant, so that the steps are unrolled */
            few_step whole = s;
            whole.depth = DEPTH;
            multiply_columns(&whole, rows, dtype);
        } else {
            multiply_columns(&s, rows, dtype);
        }
        s.w += COLS * size;
        s.sums += a->sums_block;
    }
    if (left > 0)
        multiply_tail(&s, left, rows, dtype);
}

/* ------------------------------------------------ weights stored [out][in] */

/*
 * The lanes run along columns here too, so that a sum takes its terms in order: 8
 * x 8 weights are transposed in registers, 24 shuffles or 12 cycles for 256 bytes
 * that take some 40 to come from memory. 8 columns are 8 streams, and 8 lines of
 * one set of the first-level cache where rows are a multiple of 4 KiB apart: a
 * step takes two blocks in depth, all of each line of f32, before it goes. With
 * 16 columns at a time 1 row took 1.35 times as long.
 */
enum { BLOCK = LANES };

/* 8 rows of weights from 'k' on, the last one again for those that do not exist. */
QKV_INLINE void load_block(const qkv_gemm_few_args *a, int64_t column, int64_t k, int64_t n,
                           const int32_t dtype, __m256 w[BLOCK])
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    QKV_UNROLL
    for (int c = 0; c < BLOCK; c++) {
        const int64_t at = column + c < a->cols ? column + c : a->cols - 1;
        const char *from = (const char *)a->w + (at * a->w_stride + k) * size;
        char copy[BLOCK * sizeof(float)] = {0};
        if (n < BLOCK) {
            memcpy(copy, from, (size_t)(n * size));
            from = copy;
        }
        w[c] = load_wide(from, dtype);
    }
    transpose8(w);
}

/* n terms more for 8 columns, at most 'blocks' of 8. */
QKV_INLINE void add_blocks(const qkv_gemm_few_args *a, int64_t column, int64_t k, int64_t n,
                           const int blocks, const int rows, const int32_t dtype,
                           __m256 acc[QKV_avx2_few_rows])
{
    __m256 w[2][BLOCK];
    QKV_UNROLL
    for (int b = 0; b < blocks; b++)
        load_block(a, column, k + b * BLOCK, n - b * BLOCK, dtype, w[b]);
    QKV_UNROLL
    for (int i = 0; i < blocks * BLOCK; i++) {
        if (i >= n)
            break;
        QKV_UNROLL
        for (int r = 0; r < rows; r++) {
            const __m256 xk = _mm256_broadcast_ss(a->x + r * a->x_stride + k + i);
            acc[r] = _mm256_fmadd_ps(xk, w[i / BLOCK][i % BLOCK], acc[r]);
        }
    }
}

QKV_INLINE float *sums_at(const qkv_gemm_few_args *a, int64_t row, int64_t column)
{
    return a->sums + row * a->sums_stride + column / COLS * a->sums_block + column % COLS;
}

QKV_INLINE void multiply_out_in(const qkv_gemm_few_args *a, int64_t column, const int rows,
                                const int32_t dtype)
{
    const int64_t left = a->cols - column;
    __m256 acc[QKV_avx2_few_rows];
    QKV_UNROLL
    for (int r = 0; r < rows; r++) {
        const float *sums = sums_at(a, r, column);
        acc[r] = a->begin        ? _mm256_setzero_ps()
                 : left >= BLOCK ? _mm256_loadu_ps(sums)
                                 : load_tail(sums, left);
    }
    int64_t k = 0;
    for (; k + 2 * BLOCK <= a->depth; k += 2 * BLOCK)
        add_blocks(a, column, k, 2 * BLOCK, 2, rows, dtype, acc);
    for (; k < a->depth; k += BLOCK)
        add_blocks(a, column, k, a->depth - k, 1, rows, dtype, acc);
    QKV_UNROLL
    for (int r = 0; r < rows; r++) {
        float *sums = sums_at(a, r, column);
        if (left >= BLOCK)
            _mm256_storeu_ps(sums, acc[r]);
        else
            store_tail(sums, left, acc[r]);
    }
}

QKV_INLINE void multiply_of(const qkv_gemm_few_args *a, const int rows, const int32_t dtype)
{
    if (!a->out_in)
        multiply_rows(a, rows, dtype);
    else
        for (int64_t c = 0; c < a->cols; c += BLOCK)
            multiply_out_in(a, c, rows, dtype);
}

QKV_INLINE void multiply(const qkv_gemm_few_args *a, const int32_t dtype)
{
    switch (a->rows) {
    case 1:
        multiply_of(a, 1, dtype);
        break;
    case 2:
        multiply_of(a, 2, dtype);
        break;
    case 3:
        multiply_of(a, 3, dtype);
        break;
    case 4:
        multiply_of(a, 4, dtype);
        break;
    case 5:
        multiply_of(a, 5, dtype);
        break;
    default:
        multiply_of(a, 6, dtype);
        break;
    }
}

void qkv_gemm_few_avx2(const qkv_gemm_few_args *args)
{
    const qkv_gemm_few_args a = *args; /* a copy that no store can alias */
    if (a.dtype == QKV_F32)
        multiply(&a, QKV_F32);
    else if (a.dtype == QKV_F16)
        multiply(&a, QKV_F16);
    else
        multiply(&a, QKV_BF16);
}
