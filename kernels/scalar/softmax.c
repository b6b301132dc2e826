/* SPDX-License-Identifier: MIT */
/*
 * Step 3, fused scale and softmax: of a whole row, and of one block of a
 * row whose other blocks come before or after (online softmax: Milakov and
 * Gimelshein, "Online normalizer calculation for softmax", 2018).
 *
 * Subtracting the maximum leaves the weights unchanged in exact arithmetic
 * and keeps every exponential in [0, 1]. A maximum of -inf (nothing visible)
 * is replaced by the lowest finite number: then -inf minus it is -inf again,
 * whose exponential is 0, where -inf - -inf would be NaN.
 */
#include "internal.h"

#include <float.h>
#include <math.h>

#include "exp_scalar.h"

/* The larger of the two; a NaN in x is passed over, exp() meets it later. */
static float max_ignoring_nan(float max, float x)
{
    return x > max ? x : max;
}

/* In f64: one large and many small terms would lose the small ones in f32. */
static float sum_of(const float *x, int64_t n)
{
    double sum = 0.0;
    for (int64_t j = 0; j < n; j++)
        sum += (double)x[j];
    return (float)sum;
}

qkv_row_state qkv_scale_softmax_f32_scalar(const float *scores, float *weights, int64_t n,
                                           float scale)
{
    float max = -FLT_MAX;
    for (int64_t j = 0; j < n; j++)
        max = max_ignoring_nan(max, scores[j] * scale);

    for (int64_t j = 0; j < n; j++)
        weights[j] = qkv_exp_scalar(scores[j] * scale - max);

    const float sum = sum_of(weights, n);
    if (sum == 0.0f)
        return (qkv_row_state){.max = -INFINITY, .sum = 0.0f}; /* the weights are 0 already */

    for (int64_t j = 0; j < n; j++)
        weights[j] /= sum;
    return (qkv_row_state){.max = max, .sum = sum};
}

float qkv_softmax_step_f32_scalar(float *scores, int64_t n, float scale_log2, qkv_row_state *state)
{
    float max = state->max;
    for (int64_t j = 0; j < n; j++) {
        scores[j] *= scale_log2;
        max = max_ignoring_nan(max, scores[j]);
    }

    float sum = 0.0f;
    for (int64_t j = 0; j < n; j++) {
        scores[j] = qkv_exp2_scalar(scores[j] - max);
        sum += scores[j];
    }

    const float rescale = qkv_exp2_scalar(state->max - max);
    state->sum = state->sum * rescale + sum;
    state->max = max;
    return rescale;
}
