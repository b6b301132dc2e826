/* SPDX-License-Identifier: MIT */
/*
 * Step 4, weighted sum: out[i] = sum over j of weights[i][j] * values[j], of
 * one block of keys. The block is summed on its own, then added to what the
 * blocks before it gave.
 */
#include "internal.h"

static float column_sum(const qkv_weighted_sum_args *a, int64_t row, int64_t d)
{
    const float *weights = a->weights + row * a->weights_stride;
    float sum = 0.0f;
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float *value = a->values_at ? a->values_at[j] : a->values + j * a->values_stride;
        if (a->skip_zero && weights[j] == 0.0f)
            continue; /* 0 * NaN is NaN, but a key of weight 0 has no say */
        sum += weights[j] * value[d];
    }
    return sum;
}

void qkv_weighted_sum_f32_scalar(const qkv_weighted_sum_args *a)
{
    for (int64_t i = 0; i < a->rows; i++) {
        float *out = a->out + i * a->out_stride;
        for (int64_t d = 0; d < a->value_dim; d++) {
            const float sum = column_sum(a, i, d);
            out[d] = a->rescale ? out[d] * a->rescale[i] + sum : sum;
        }
    }
}
