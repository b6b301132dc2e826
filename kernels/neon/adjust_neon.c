/* SPDX-License-Identifier: MIT */
/*
 * From dot products to logits, and the hyperbolic tangent in it; what is done
 * and in which order is told in kernels/scalar/adjust.c. A row's numbers are
 * the same in all lanes; in a tile every lane is a row of its own.
 */
#include "internal.h"

#include <math.h>

#include "isa_neon.h"

/* ---------------------------------------------------------------- tanh */

/* Both forms of constants.h, and the lanes' choice; NaN takes the polynomial. */
QKV_INLINE float32x4_t tanh_f32x4(float32x4_t x)
{
    const float32x4_t one = vdupq_n_f32(1.0f), magnitude = vabsq_f32(x), z = vmulq_f32(x, x);
    float32x4_t p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C5), vdupq_n_f32(QKV_TANH_C6), z);
    p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C4), p, z);
    p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C3), p, z);
    p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C2), p, z);
    p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C1), p, z);
    p = vfmaq_f32(vdupq_n_f32(QKV_TANH_C0), p, z);
    const float32x4_t small = vfmaq_f32(x, vmulq_f32(p, z), x);

    const float32x4_t e = exp_f32x4(vmulq_n_f32(magnitude, -2.0f));
    const float32x4_t large = vsubq_f32(one, vdivq_f32(vaddq_f32(e, e), vaddq_f32(e, one)));
    const uint32x4_t sign = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x80000000));
    const float32x4_t signed_large =
        vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(large), sign));
    return vbslq_f32(vcgtq_f32(magnitude, one), signed_large, small);
}

void qkv_tanh_f32_neon(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4)
        store_upto4(y + i, tanh_f32x4(load_upto4(x + i, n - i)), n - i);
}

/* -------------------------------------------------------------- the rules */

QKV_INLINE float32x4_t capped(float32x4_t t, float cap)
{
    return cap != 0.0f ? vmulq_n_f32(tanh_f32x4(t), cap) : t;
}

QKV_INLINE float32x4_t biased(float32x4_t t, float32x4_t bias, float bias_scale)
{
    const float32x4_t hidden = vdupq_n_f32(-INFINITY), half = vfmaq_n_f32(t, bias, bias_scale);
    return vbslq_f32(vceqq_f32(bias, hidden), hidden, vaddq_f32(half, half));
}

/* --------------------------------------------------------------------- row */

void qkv_row_adjust_f32_neon(const qkv_row_adjust_args *a)
{
    static const float lanes[4] = {0.0f, 1.0f, 2.0f, 3.0f};
    const float32x4_t lane = vld1q_f32(lanes), behind = vdupq_n_f32(a->behind);
    for (int64_t j = 0; j < a->n; j += 4) {
        const int64_t rest = a->n - j;
        float32x4_t t = vmulq_n_f32(load_upto4(a->logits + j, rest), a->scale);
        t = capped(t, a->cap);
        if (a->slope != 0.0f) {
            const float32x4_t key = vaddq_f32(vdupq_n_f32((float)j), lane);
            t = vfmaq_n_f32(t, vsubq_f32(key, behind), a->slope);
        }
        if (a->bias)
            t = biased(t, load_upto4(a->bias + j, rest), a->bias_scale);
        store_upto4(a->logits + j, t, rest);
    }
}

/* -------------------------------------------------------------------- tile */

/* All bits set for the rows i .. i + 3 that see key j. */
QKV_INLINE uint32x4_t in_range(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    const int32x4_t key = vdupq_n_s32((int32_t)j);
    const uint32x4_t before_end = vcltq_s32(key, vld1q_s32(a->end + i));
    return j < a->sinks ? before_end
                        : vandq_u32(before_end, vcleq_s32(vld1q_s32(a->begin + i), key));
}

/* All keys of the rows i .. i + 3. */
static void adjust_four_rows(const qkv_tile_adjust_args *a, int64_t i)
{
    const float32x4_t zero = vdupq_n_f32(0.0f), scale = vld1q_f32(a->scale + i);
    const float32x4_t slope = a->slope ? vld1q_f32(a->slope + i) : zero;
    const float32x4_t behind = a->slope ? vld1q_f32(a->behind + i) : zero;
    float32x4_t max = vld1q_f32(a->max + i);
    for (int64_t j = 0; j < a->kv_len; j++) {
        float *logits = a->logits + j * a->tile_rows + i;
        float32x4_t t = capped(vmulq_f32(vld1q_f32(logits), scale), a->cap);
        if (a->slope)
            t = vfmaq_f32(t, slope, vsubq_f32(vdupq_n_f32((float)j), behind));
        if (a->bias)
            t = biased(t, vld1q_f32(a->bias + j * a->tile_rows + i), a->bias_scale);
        if (a->end)
            t = vbslq_f32(in_range(a, i, j), t, vdupq_n_f32(-INFINITY));
        vst1q_f32(logits, t);
        max = vmaxnmq_f32(max, t);
    }
    vst1q_f32(a->max + i, max);
}

void qkv_tile_adjust_f32_neon(const qkv_tile_adjust_args *a)
{
    for (int64_t i = 0; i < a->n_rows; i += 4)
        adjust_four_rows(a, i);
}
