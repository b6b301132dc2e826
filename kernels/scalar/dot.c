/* SPDX-License-Identifier: MIT */
/*
 * Step 2, scores: scores[i][j] = sum over d of queries[i][d] * keys[j][d], keys
 * of every type.
 *
 * The sum is taken in the order of d, each product rounded and each sum
 * rounded: |error| <= n * u * sum |q_d k_d| to first order. The scale of an i8
 * row multiplies its sum, once, which rounds once more.
 */
#include "kv_scalar.h"

static inline void dot(const qkv_dot_args *a, kv_element_fn *element)
{
    for (int64_t i = 0; i < a->rows; i++) {
        const float *query = a->queries + i * a->queries_stride;
        float *scores = a->scores + i * a->scores_stride;
        for (int64_t j = 0; j < a->kv_len; j++) {
            const void *key =
                a->keys_at ? a->keys_at[j] : (const char *)a->keys + j * a->keys_stride;
            float sum = 0.0f;
            for (int64_t d = 0; d < a->head_dim; d++)
                sum += query[d] * element(key, d, 1.0f);
            if (a->key_scales)
                sum *= a->key_scales[j * a->key_scales_stride];
            scores[j] = a->accumulate ? scores[j] + sum : sum;
        }
    }
}

#define DOT(type)                                                                                  \
    void qkv_dot_##type##_scalar(const qkv_dot_args *a)                                            \
    {                                                                                              \
        dot(a, kv_##type);                                                                         \
    }
DOT(f32)
KV_FORMATS(DOT)
