/* SPDX-License-Identifier: MIT */
/*
 * One panel of y = x W + bias: the product of product_neon.h for 6 rows and a
 * panel of 16 columns, 24 accumulators. A step of 4 in depth has 22 loads for
 * 96 multiply-adds. 6 x 16 rather than 8 x 12, which needs 20 loads: 16
 * divides the usual head sizes, so that no panel is filled up with zeros.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *     4 of depth   bound          neoverse-n1   neoverse-v2   apple-m1
 *     6 x 16       48 / 24 / 32   49.0 / 48.0   24.3 / 24.0   32.0 / 32.0
 *     4 x 16       32 / 16 / 21.3 32.0 / 32.0   16.0 / 16.0   21.4 / 21.4
 */
#include "internal.h"

#include "product_neon.h"

enum { COLS = QKV_neon_gemm_cols, VECTORS = COLS / 4, ROWS = 6 };

/* y = what is there, or the bias, or 0, + the sum. */
QKV_INLINE void finish_row(const qkv_gemm_args *a, float *y, const float32x4_t *acc)
{
    const float *before = a->accumulate ? y : a->bias;
    QKV_UNROLL
    for (int v = 0; v < VECTORS; v++) {
        const int64_t left = a->cols - 4 * v;
        if (left <= 0)
            return;
        const float32x4_t base = before ? load_upto4(before + 4 * v, left) : vdupq_n_f32(0.0f);
        store_upto4(y + 4 * v, vaddq_f32(base, acc[v]), left);
    }
}

QKV_INLINE void gemm_rows(const qkv_gemm_args *a, int64_t first, int rows)
{
    float32x4_t acc[ROWS * VECTORS];
    product(a->x + first * a->x_stride, a->x_stride, a->panel, COLS, a->depth, rows, VECTORS, acc);
    QKV_UNROLL
    for (int i = 0; i < rows; i++)
        finish_row(a, a->y + (first + i) * a->y_stride, acc + i * VECTORS);
}

void qkv_gemm_f32_neon(const qkv_gemm_args *a)
{
    int64_t i = 0;
    for (; i + ROWS <= a->rows; i += ROWS)
        gemm_rows(a, i, ROWS);
    switch (a->rows - i) {
    case 5:
        gemm_rows(a, i, 5);
        break;
    case 4:
        gemm_rows(a, i, 4);
        break;
    case 3:
        gemm_rows(a, i, 3);
        break;
    case 2:
        gemm_rows(a, i, 2);
        break;
    case 1:
        gemm_rows(a, i, 1);
        break;
    default:
        break;
    }
}
