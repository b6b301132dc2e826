/* SPDX-License-Identifier: MIT */
/*
 * Scale, maximum, exponentials and their sum, along one row: a whole row with
 * the natural exponential, or one block of a row in base 2.
 *
 * Two passes (three for a whole row, the last one divides), four vectors at
 * a time with an accumulator each. Lanes past the end of a row are 0 when
 * they are loaded and are kept out of the maximum and the sum by a mask.
 *
 * A NaN is passed over by the maximum, and comes back as exp(NaN - max). The
 * weights are multiplied by the rounded reciprocal of the sum: 1.5 ulp in
 * place of 0.5 for a division each, which would take as long as the
 * exponential does.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *                              neoverse-n1   neoverse-v2   apple-m1
 *     whole row, 16 elements   48.1 / 57.5   24.1 / 28.6   53.2 / 42.2
 *     block, 16 elements       40.1 / 48.0   20.1 / 43.0   36.2 / 75.0
 *
 * That is the exponential pass. Where clang's figures are twice gcc's, it is
 * the model's latency for the base register of a store with write-back.
 */
#include "internal.h"

#include <float.h>
#include <math.h>

#include "isa_neon.h"

enum { UNROLL = 4 };

QKV_INLINE float32x4_t max4(const float32x4_t v[UNROLL])
{
    return vmaxnmq_f32(vmaxnmq_f32(v[0], v[1]), vmaxnmq_f32(v[2], v[3]));
}

QKV_INLINE float32x4_t sum4(const float32x4_t v[UNROLL])
{
    return vaddq_f32(vaddq_f32(v[0], v[1]), vaddq_f32(v[2], v[3]));
}

/*
 * max(start, the largest of scale * x), NaNs passed over. The products are
 * stored to x with 'store', for the pass that follows.
 */
QKV_INLINE float scaled_max(const float *x, float *scaled, int64_t n, float scale, float start,
                            bool store)
{
    float32x4_t max[UNROLL];
    QKV_UNROLL
    for (int u = 0; u < UNROLL; u++)
        max[u] = vdupq_n_f32(start);

    int64_t i = 0;
    for (; i + 4 * UNROLL <= n; i += 4 * UNROLL) {
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++) {
            const float32x4_t t = vmulq_n_f32(vld1q_f32(x + i + 4 * u), scale);
            if (store)
                vst1q_f32(scaled + i + 4 * u, t);
            max[u] = vmaxnmq_f32(max[u], t);
        }
    }
    for (; i < n; i += 4) {
        const int64_t left = n - i;
        const float32x4_t t = vmulq_n_f32(load_upto4(x + i, left), scale);
        if (store)
            store_upto4(scaled + i, t, left);
        /* The lanes past the end must not count as 0. */
        max[0] = vmaxnmq_f32(max[0], vbslq_f32(first_lanes(left), t, max[0]));
    }
    return hmax(max4(max));
}

/* y = exp(scale * x - max), natural or of base 2; returns the sum of y. */
QKV_INLINE float32x4_t weight(float32x4_t x, float scale, float max, bool base2)
{
    return base2 ? exp2_f32x4(vsubq_f32(x, vdupq_n_f32(max)))
                 : exp_f32x4(vsubq_f32(vmulq_n_f32(x, scale), vdupq_n_f32(max)));
}

QKV_INLINE float weights_and_sum(const float *x, float *y, int64_t n, float scale, float max,
                                 bool base2)
{
    float32x4_t sum[UNROLL];
    QKV_UNROLL
    for (int u = 0; u < UNROLL; u++)
        sum[u] = vdupq_n_f32(0.0f);

    int64_t i = 0;
    for (; i + 4 * UNROLL <= n; i += 4 * UNROLL) {
        float32x4_t w[UNROLL];
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++)
            w[u] = weight(vld1q_f32(x + i + 4 * u), scale, max, base2);
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++) {
            vst1q_f32(y + i + 4 * u, w[u]);
            sum[u] = vaddq_f32(sum[u], w[u]);
        }
    }
    for (; i < n; i += 4) {
        const int64_t left = n - i;
        const float32x4_t w = weight(load_upto4(x + i, left), scale, max, base2);
        store_upto4(y + i, w, left);
        sum[0] = vaddq_f32(sum[0], keep(first_lanes(left), w));
    }
    return hsum(sum4(sum));
}

static void multiply(float *x, int64_t n, float factor)
{
    int64_t i = 0;
    for (; i + 4 * UNROLL <= n; i += 4 * UNROLL)
        QKV_UNROLL
    for (int u = 0; u < UNROLL; u++)
        vst1q_f32(x + i + 4 * u, vmulq_n_f32(vld1q_f32(x + i + 4 * u), factor));
    for (; i < n; i += 4)
        store_upto4(x + i, vmulq_n_f32(load_upto4(x + i, n - i), factor), n - i);
}

qkv_row_state qkv_scale_softmax_f32_neon(const float *scores, float *weights, int64_t n,
                                         float scale)
{
    const float max = scaled_max(scores, NULL, n, scale, -FLT_MAX, false);

    /* In f64: after one block that is large, f32 would lose a part of each of
     * the many small ones, which adds up. */
    double total = 0.0;
    for (int64_t i = 0; i < n; i += QKV_KEY_BLOCK) {
        const int64_t block = n - i < QKV_KEY_BLOCK ? n - i : QKV_KEY_BLOCK;
        total += (double)weights_and_sum(scores + i, weights + i, block, scale, max, false);
    }
    const float sum = (float)total;
    if (sum == 0.0f)
        return (qkv_row_state){.max = -INFINITY, .sum = 0.0f}; /* the weights are 0 already */

    multiply(weights, n, 1.0f / sum);
    return (qkv_row_state){.max = max, .sum = sum};
}

float qkv_softmax_step_f32_neon(float *scores, int64_t n, float scale_log2, qkv_row_state *state)
{
    const float max = scaled_max(scores, scores, n, scale_log2, state->max, true);
    const float sum = weights_and_sum(scores, scores, n, 1.0f, max, true);
    const float rescale = vgetq_lane_f32(exp2_f32x4(vdupq_n_f32(state->max - max)), 0);
    state->sum = state->sum * rescale + sum;
    state->max = max;
    return rescale;
}
