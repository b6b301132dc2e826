/* SPDX-License-Identifier: MIT */
/*
 * A product of up to 6 rows with 8 rows of weights in place:
 * sums[i][c] += sum over k of x[i][k] * w[k][c].
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

enum { VECTORS = 4, COLS = 4 * VECTORS, DEPTH = QKV_FEW_DEPTH };

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
    float32x4_t acc[QKV_FEW_ROWS * VECTORS];
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
    float w[DEPTH * COLS], sums[QKV_FEW_ROWS * COLS] = {0};
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
        s.sums += COLS;
    }
    if (left > 0)
        multiply_tail(&s, left, rows, dtype);
}

QKV_INLINE void multiply(const qkv_gemm_few_args *a, const int32_t dtype)
{
    switch (a->rows) {
    case 1:
        multiply_rows(a, 1, dtype);
        break;
    case 2:
        multiply_rows(a, 2, dtype);
        break;
    case 3:
        multiply_rows(a, 3, dtype);
        break;
    case 4:
        multiply_rows(a, 4, dtype);
        break;
    case 5:
        multiply_rows(a, 5, dtype);
        break;
    default:
        multiply_rows(a, 6, dtype);
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
