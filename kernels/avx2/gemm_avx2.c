/* SPDX-License-Identifier: MIT */
/*
 * One panel of y = x W + bias: y[i][c] = sum over k of x[i][k] * panel[k][c].
 *
 * The lanes run along the 16 columns of the panel. Registers: 6 rows x 2
 * vectors of accumulators, 2 of the panel, 1 broadcast from x. A step of k
 * has 12 multiply-adds and 8 loads: 6 cycles on two FMA ports, 4 on two
 * load ports.
 */
#include "internal.h"

#include "isa_avx2.h"

enum { PANEL = QKV_avx2_gemm_cols };

QKV_INLINE __m256 base_of(const qkv_gemm_args *a, const float *y, int64_t column, int64_t cols)
{
    const float *base = a->accumulate ? y : a->bias ? a->bias + column : NULL;
    if (!base || cols <= 0)
        return _mm256_setzero_ps();
    return cols >= LANES ? _mm256_loadu_ps(base) : load_tail(base, cols);
}

QKV_INLINE void store_row(const qkv_gemm_args *a, float *y, const __m256 acc[2])
{
    QKV_UNROLL
    for (int v = 0; v < 2; v++) {
        const int64_t cols = a->cols - v * LANES;
        if (cols <= 0)
            return;
        float *at = y + v * LANES;
        const __m256 sum = _mm256_add_ps(base_of(a, at, v * LANES, cols), acc[v]);
        if (cols >= LANES)
            _mm256_storeu_ps(at, sum);
        else
            store_tail(at, cols, sum);
    }
}

QKV_INLINE void multiply_rows(const qkv_gemm_args *a, int64_t row, const int n_rows)
{
    __m256 acc[6][2];
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();

    const float *x = a->x + row * a->x_stride;
    const float *panel = a->panel;
    for (int64_t k = 0; k < a->depth; k++, panel += PANEL) {
        const __m256 w0 = _mm256_loadu_ps(panel), w1 = _mm256_loadu_ps(panel + LANES);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            const __m256 xk = _mm256_broadcast_ss(x + r * a->x_stride + k);
            acc[r][0] = _mm256_fmadd_ps(xk, w0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(xk, w1, acc[r][1]);
        }
    }

    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        store_row(a, a->y + (row + r) * a->y_stride, acc[r]);
}

void qkv_gemm_f32_avx2(const qkv_gemm_args *a)
{
    int64_t i = 0;
    for (; i + 6 <= a->rows; i += 6)
        multiply_rows(a, i, 6);
    for (; i + 4 <= a->rows; i += 4)
        multiply_rows(a, i, 4);
    for (; i < a->rows; i++)
        multiply_rows(a, i, 1);
}
