/* SPDX-License-Identifier: MIT */
/*
 * Step 2, scores: scores[i][j] = sum over d of queries[i][d] * keys[j][d].
 *
 * The sum is taken in the order of d, each product rounded and each sum
 * rounded: |error| <= n * u * sum |q_d k_d| to first order.
 */
#include "internal.h"

void qkv_dot_f32_scalar(const qkv_dot_args *a)
{
    for (int64_t i = 0; i < a->rows; i++) {
        const float *query = a->queries + i * a->queries_stride;
        float *scores = a->scores + i * a->scores_stride;
        for (int64_t j = 0; j < a->kv_len; j++) {
            const float *key = a->keys_at ? a->keys_at[j] : a->keys + j * a->keys_stride;
            float sum = 0.0f;
            for (int64_t d = 0; d < a->head_dim; d++)
                sum += query[d] * key[d];
            scores[j] = a->accumulate ? scores[j] + sum : sum;
        }
    }
}
