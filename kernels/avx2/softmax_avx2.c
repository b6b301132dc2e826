/* SPDX-License-Identifier: MIT */
/*
 * Fused scale and softmax of a row, and of one block of a row (online).
 *
 * Three passes over memory: the maximum, the exponentials with their sum,
 * the division; the online step leaves the division to whoever ends the
 * row. Two independent accumulators a pass cover the latency of max and
 * add; the exponential has 12 operations a vector and bounds the second
 * pass, which out-of-order execution overlaps across vectors.
 */
#include "internal.h"

#include <float.h>

#include "isa_avx2.h"

/* The largest scale * x, at least 'max'. NaN is passed over. */
QKV_INLINE float row_max(const float *x, int64_t n, __m256 scale, float max)
{
    __m256 m0 = _mm256_set1_ps(max), m1 = m0;
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        m0 = max_ignoring_nan(_mm256_mul_ps(_mm256_loadu_ps(x + j), scale), m0);
        m1 = max_ignoring_nan(_mm256_mul_ps(_mm256_loadu_ps(x + j + LANES), scale), m1);
    }
    for (; j < n; j += LANES) {
        const int64_t rest = n - j < LANES ? n - j : LANES;
        const __m256 t = _mm256_mul_ps(load_tail(x + j, rest), scale);
        const __m256 mask = _mm256_castsi256_ps(tail_mask(rest));
        m0 = max_ignoring_nan(_mm256_blendv_ps(m0, t, mask), m0);
    }
    return hmax(_mm256_max_ps(m0, m1));
}

/* y = exp(scale * x - max), base e or base 2; returns the sum. */
QKV_INLINE float row_exp(const float *x, float *y, int64_t n, __m256 scale, float max,
                         const bool base2)
{
    const __m256 m = _mm256_set1_ps(max);
    __m256 sum0 = _mm256_setzero_ps(), sum1 = sum0;
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        const __m256 t0 = _mm256_sub_ps(_mm256_mul_ps(_mm256_loadu_ps(x + j), scale), m);
        const __m256 t1 = _mm256_sub_ps(_mm256_mul_ps(_mm256_loadu_ps(x + j + LANES), scale), m);
        const __m256 p0 = base2 ? exp2_ps(t0) : exp_ps(t0);
        const __m256 p1 = base2 ? exp2_ps(t1) : exp_ps(t1);
        _mm256_storeu_ps(y + j, p0);
        _mm256_storeu_ps(y + j + LANES, p1);
        sum0 = _mm256_add_ps(sum0, p0);
        sum1 = _mm256_add_ps(sum1, p1);
    }
    for (; j < n; j += LANES) {
        const int64_t rest = n - j < LANES ? n - j : LANES;
        const __m256 mask = _mm256_castsi256_ps(tail_mask(rest));
        const __m256 t = _mm256_sub_ps(_mm256_mul_ps(load_tail(x + j, rest), scale), m);
        const __m256 p = _mm256_and_ps(base2 ? exp2_ps(t) : exp_ps(t), mask);
        store_tail(y + j, rest, p);
        sum0 = _mm256_add_ps(sum0, p);
    }
    return hsum(_mm256_add_ps(sum0, sum1));
}

QKV_INLINE void row_multiply(float *y, int64_t n, float factor)
{
    const __m256 f = _mm256_set1_ps(factor);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        _mm256_storeu_ps(y + j, _mm256_mul_ps(_mm256_loadu_ps(y + j), f));
    if (j < n)
        store_tail(y + j, n - j, _mm256_mul_ps(load_tail(y + j, n - j), f));
}

qkv_row_state qkv_scale_softmax_f32_avx2(const float *scores, float *weights, int64_t n,
                                         float scale)
{
    const __m256 s = _mm256_set1_ps(scale);
    const float max = row_max(scores, n, s, -FLT_MAX);

    /* In f64: after one block that is large, f32 would lose a part of each of
     * the many small ones, which adds up. */
    double total = 0.0;
    for (int64_t j = 0; j < n; j += QKV_KEY_BLOCK) {
        const int64_t block = n - j < QKV_KEY_BLOCK ? n - j : QKV_KEY_BLOCK;
        total += (double)row_exp(scores + j, weights + j, block, s, max, false);
    }
    const float sum = (float)total;
    if (sum == 0.0f)
        return (qkv_row_state){.max = -INFINITY, .sum = 0.0f}; /* the weights are 0 already */

    row_multiply(weights, n, 1.0f / sum);
    return (qkv_row_state){.max = max, .sum = sum};
}

float qkv_softmax_step_f32_avx2(float *scores, int64_t n, float scale_log2, qkv_row_state *state)
{
    const __m256 s = _mm256_set1_ps(scale_log2);
    const float max = row_max(scores, n, s, state->max);
    const float sum = row_exp(scores, scores, n, s, max, true);
    const float rescale = _mm256_cvtss_f32(exp2_ps(_mm256_set1_ps(state->max - max)));
    state->sum = state->sum * rescale + sum;
    state->max = max;
    return rescale;
}
