/* SPDX-License-Identifier: MIT */
/*
 * Attention of few rows on few keys at once, as one reads it in the formula:
 *
 *     out_i = sum over j of softmax_j(scale * query_i . key_j) * value_j
 *
 * As everywhere the weights are divided by their sum last, when the values are
 * summed: then sums of equal values, and of denormal ones, lose nothing on the way.
 */
#include "internal.h"

#include <float.h>

#include "exp_scalar.h"

static float dot(const float *x, const float *y, int64_t n)
{
    float sum = 0.0f;
    for (int64_t d = 0; d < n; d++)
        sum += x[d] * y[d];
    return sum;
}

/* The exponentials of the keys before 'end', and the row's maximum and sum. */
static qkv_row_state weights_of(const qkv_short_args *a, int64_t row, int64_t end, float *weights)
{
    qkv_row_state state = {.max = -FLT_MAX, .sum = 0.0f};
    for (int64_t j = 0; j < end; j++) {
        weights[j] = dot(a->queries[row], a->keys[j], a->head_dim) * a->scale_log2;
        if (weights[j] > state.max) /* a NaN is met by the exponential */
            state.max = weights[j];
    }
    for (int64_t j = 0; j < end; j++) {
        weights[j] = qkv_exp2_scalar(weights[j] - state.max);
        state.sum += weights[j];
    }
    return state;
}

void qkv_short_f32_scalar(const qkv_short_args *a)
{
    for (int64_t i = 0; i < a->rows; i++) {
        float weights[QKV_SHORT_KEYS];
        const int64_t end = a->ends ? a->ends[i] : a->kv_len;
        const qkv_row_state state = weights_of(a, i, end, weights);
        a->states[i] = state;
        for (int64_t d = 0; d < a->value_dim; d++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < end; j++)
                sum += weights[j] * a->values[j][d];
            a->out[i][d] = state.sum == 0.0f ? 0.0f : sum / state.sum;
        }
    }
}
