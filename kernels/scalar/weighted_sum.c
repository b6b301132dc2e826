/* SPDX-License-Identifier: MIT */
/*
 * Step 4, weighted sum: out[i] = sum over j of weights[i][j] * values[j], of
 * one block of keys, values of every type. The block is summed on its own, then
 * added to what the blocks before it gave.
 *
 * The weight is multiplied by the scale of an i8 row first, so that the product
 * with an integer is one of two f32: |error| <= (n + 1) u sum |w v| for the block.
 */
#include "kv_scalar.h"

static inline float column_sum(const qkv_weighted_sum_args *a, int64_t row, int64_t d,
                               kv_element_fn *element)
{
    const float *weights = a->weights + row * a->weights_stride;
    float sum = 0.0f;
    for (int64_t j = 0; j < a->kv_len; j++) {
        const void *value =
            a->values_at ? a->values_at[j] : (const char *)a->values + j * a->values_stride;
        const float scale = a->value_scales ? a->value_scales[j * a->value_scales_stride] : 1.0f;
        if (a->skip_zero && weights[j] == 0.0f)
            continue; /* 0 * NaN is NaN, but a key of weight 0 has no say */
        sum += weights[j] * scale * element(value, d, 1.0f);
    }
    return sum;
}

static inline void weighted_sum(const qkv_weighted_sum_args *a, kv_element_fn *element)
{
    for (int64_t i = 0; i < a->rows; i++) {
        float *out = a->out + i * a->out_stride;
        for (int64_t d = 0; d < a->value_dim; d++) {
            const float sum = column_sum(a, i, d, element);
            out[d] = a->rescale ? out[d] * a->rescale[i] + sum : sum;
        }
    }
}

#define WEIGHTED_SUM(type)                                                                         \
    void qkv_weighted_sum_##type##_scalar(const qkv_weighted_sum_args *a)                          \
    {                                                                                              \
        weighted_sum(a, kv_##type);                                                                \
    }
WEIGHTED_SUM(f32)
KV_FORMATS(WEIGHTED_SUM)
