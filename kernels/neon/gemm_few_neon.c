/* SPDX-License-Identifier: MIT */
/*
 * A product of up to 6 rows with weights in place:
 * sums[i][c] += sum over k of x[i][k] * w[k][c], 8 rows of weights at a time.
 *
 * The lanes run along 16 columns, 4 accumulators a row: 24 of the 32 registers,
 * 4 for weights, 1 for x. 16 columns of one row take 32 multiply-adds, 32 loads of
 * weights and 8 of x; 512 bytes of weights take longer to come from memory, so
 * that reading 8 rows side by side as 8 streams is what counts.
 */
#include "internal.h"

#include <stdbool.h>
#include <string.h>

#include "isa_neon.h"

enum { VECTORS = 4, COLS = 4 * VECTORS, DEPTH = QKV_neon_few_depth };

_Static_assert((int)COLS == (int)QKV_FEW_COLS, "a step is a block of the sums");

/* The columns of a step: 'w' is of a type, rows 'stride' elements apart. */
typedef struct few_step {
    const float *x;
    const char *w;
    float *sums;
    int64_t x_stride, stride, sums_stride, depth;
    bool begin;
} few_step;

QKV_INLINE float32x4_t load_wide(const char *p, const int32_t dtype)
{
    if (dtype == QKV_F32)
        return vld1q_f32((const float *)(const void *)p);
    const uint16x4_t x = vld1_u16((const uint16_t *)(const void *)p);
    return dtype == QKV_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(x))
                            : vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16));
}

QKV_INLINE void multiply_columns(const few_step *s, const int rows, const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    float32x4_t acc[QKV_neon_few_rows * VECTORS];
    QKV_UNROLL
    for (int i = 0; i < rows * VECTORS; i++) {
        const float *sums = s->sums + i / VECTORS * s->sums_stride + i % VECTORS * 4;
        acc[i] = s->begin ? vdupq_n_f32(0.0f) : vld1q_f32(sums);
    }
    const char *w = s->w;
    for (int64_t k = 0; k < s->depth; k++, w += s->stride * size) {
        float32x4_t wide[VECTORS];
        QKV_UNROLL
        for (int v = 0; v < VECTORS; v++)
            wide[v] = load_wide(w + 4 * v * size, dtype);
        QKV_UNROLL
        for (int i = 0; i < rows * VECTORS; i++) {
            const float xk = s->x[i / VECTORS * s->x_stride + k];
            acc[i] = vfmaq_n_f32(acc[i], wide[i % VECTORS], xk);
        }
    }
    QKV_UNROLL
    for (int i = 0; i < rows * VECTORS; i++)
        vst1q_f32(s->sums + i / VECTORS * s->sums_stride + i % VECTORS * 4, acc[i]);
}

/* The last columns, fewer than COLS: through copies that have all of them. */
QKV_INLINE void multiply_tail(const few_step *s, int64_t cols, const int rows, const int32_t dtype)
{
    const size_t size = dtype == QKV_F32 ? 4 : 2;
    float w[DEPTH * COLS], sums[QKV_neon_few_rows * COLS] = {0};
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
        multiply_columns(&s, rows, dtype);
        s.w += COLS * size;
        s.sums += a->sums_block;
    }
    if (left > 0)
        multiply_tail(&s, left, rows, dtype);
}

/* ------------------------------------------------ weights stored [out][in] */

/*
 * The lanes run along columns here too, so that a sum takes its terms in order: 4
 * x 4 weights are transposed in registers. Two blocks of 4 columns, so that two
 * chains of multiply-adds run side by side.
 */
enum { BLOCK = 4, BLOCKS = 2 };

/* 4 rows of weights from 'k' on, the last one again for those that do not exist. */
QKV_INLINE void load_block(const qkv_gemm_few_args *a, int64_t column, int64_t k, int64_t n,
                           const int32_t dtype, float32x4_t w[BLOCK])
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
    transpose4(w);
}

/* n <= 4 terms more for 4 columns. */
QKV_INLINE void add_block(const qkv_gemm_few_args *a, int64_t column, int64_t k, int64_t n,
                          const int rows, const int32_t dtype, float32x4_t acc[QKV_neon_few_rows])
{
    float32x4_t w[BLOCK];
    load_block(a, column, k, n, dtype, w);
    QKV_UNROLL
    for (int i = 0; i < BLOCK; i++) {
        if (i >= n)
            break;
        QKV_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r] = vfmaq_n_f32(acc[r], w[i], a->x[r * a->x_stride + k + i]);
    }
}

QKV_INLINE float *sums_at(const qkv_gemm_few_args *a, int64_t row, int64_t column)
{
    return a->sums + row * a->sums_stride + column / COLS * a->sums_block + column % COLS;
}

QKV_INLINE void multiply_out_in(const qkv_gemm_few_args *a, int64_t column, const int rows,
                                const int32_t dtype)
{
    float32x4_t acc[BLOCKS][QKV_neon_few_rows];
    QKV_UNROLL
    for (int i = 0; i < BLOCKS * rows; i++) {
        const int64_t c = column + i / rows * BLOCK, left = a->cols - c;
        const float *sums = sums_at(a, i % rows, c);
        acc[i / rows][i % rows] =
            a->begin || left <= 0 ? vdupq_n_f32(0.0f) : load_upto4(sums, left);
    }
    int64_t k = 0;
    for (; k + BLOCK <= a->depth; k += BLOCK) {
        QKV_UNROLL
        for (int b = 0; b < BLOCKS; b++)
            add_block(a, column + b * BLOCK, k, BLOCK, rows, dtype, acc[b]);
    }
    for (int b = 0; b < BLOCKS && k < a->depth; b++)
        add_block(a, column + b * BLOCK, k, a->depth - k, rows, dtype, acc[b]);
    QKV_UNROLL
    for (int i = 0; i < BLOCKS * rows; i++) {
        const int64_t c = column + i / rows * BLOCK, left = a->cols - c;
        if (left > 0)
            store_upto4(sums_at(a, i % rows, c), acc[i / rows][i % rows], left);
    }
}

QKV_INLINE void multiply_of(const qkv_gemm_few_args *a, const int rows, const int32_t dtype)
{
    if (!a->out_in)
        multiply_rows(a, rows, dtype);
    else
        for (int64_t c = 0; c < a->cols; c += BLOCKS * BLOCK)
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

void qkv_gemm_few_neon(const qkv_gemm_few_args *a)
{
    if (a->dtype == QKV_F32)
        multiply(a, QKV_F32);
    else if (a->dtype == QKV_F16)
        multiply(a, QKV_F16);
    else
        multiply(a, QKV_BF16);
}
