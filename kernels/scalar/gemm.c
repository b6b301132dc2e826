/* SPDX-License-Identifier: MIT */
/*
 * Step 1, projection: one panel of y = x W + bias,
 * y[i][c] = sum over k of x[i][k] * panel[k][c].
 */
#include "internal.h"

void qkv_gemm_f32_scalar(const qkv_gemm_args *a)
{
    enum { PANEL = QKV_scalar_gemm_cols };

    for (int64_t i = 0; i < a->rows; i++) {
        const float *x = a->x + i * a->x_stride;
        float *y = a->y + i * a->y_stride;
        for (int64_t c = 0; c < a->cols; c++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < a->depth; k++)
                sum += x[k] * a->panel[k * PANEL + c];
            const float before = a->accumulate ? y[c] : a->bias ? a->bias[c] : 0.0f;
            y[c] = before + sum;
        }
    }
}
