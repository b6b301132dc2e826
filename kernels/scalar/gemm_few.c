/* SPDX-License-Identifier: MIT */
/*
 * Step 1, projection, for few rows: a product with weights where they lie,
 * sums[i][c] += sum over k of x[i][k] * w[k][c], or * w[c][k].
 */
#include "internal.h"

#include "kv_scalar.h"

static float weight_at(const qkv_gemm_few_args *a, int64_t k, int64_t c)
{
    const int64_t at = a->out_in ? c * a->w_stride + k : k * a->w_stride + c;
    switch (a->dtype) {
    case QKV_F16:
        return kv_f16(a->w, at, 1.0f);
    case QKV_BF16:
        return kv_bf16(a->w, at, 1.0f);
    default:
        return ((const float *)a->w)[at];
    }
}

void qkv_gemm_few_scalar(const qkv_gemm_few_args *a)
{
    for (int64_t i = 0; i < a->rows; i++) {
        const float *x = a->x + i * a->x_stride;
        float *sums = a->sums + i * a->sums_stride;
        for (int64_t c = 0; c < a->cols; c++) {
            const int64_t at = c / QKV_FEW_COLS * a->sums_block + c % QKV_FEW_COLS;
            float sum = a->begin ? 0.0f : sums[at];
            for (int64_t k = 0; k < a->depth; k++)
                sum += x[k] * weight_at(a, k, c);
            sums[at] = sum;
        }
    }
}
