/* SPDX-License-Identifier: MIT */
/*
 * AArch64 Advanced SIMD: the gate and the vocabulary of the kernels in this
 * folder. Included by them only, as their compile flags apply to it.
 *
 * With QKV_SIMDE defined the same sources compile on another architecture
 * through SIMDe's implementation of the intrinsics: that proves their logic
 * (bounds, tails, NaN handling), not their speed.
 *
 * Two facts about the instructions that decide how they are used here:
 *
 * - FMAX returns NaN if either operand is one; FMAXNM returns the number if
 *   one operand is a quiet NaN. Clamps use FMAX (a NaN must come through),
 *   running maxima FMAXNM (a NaN must be passed over; the exponential that
 *   follows brings it back).
 * - FMLA overwrites its addend. Horner's rule with constants therefore costs
 *   a register copy per step, while accumulators cost nothing.
 */
#ifndef QKV_ISA_NEON_H
#define QKV_ISA_NEON_H

#if defined(QKV_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>
/* SIMDe 0.7 rounds twice in the first and lacks the second. */
#undef vfmaq_laneq_f32
#define vfmaq_laneq_f32(acc, a, b, lane) vfmaq_f32((acc), (a), vdupq_laneq_f32((b), (lane)))
#undef vdivq_f32
#define vdivq_f32(a, b) ((a) / (b))
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "the neon kernels need AArch64, or QKV_SIMDE"
#endif

#include <stdint.h>

#include "../constants.h"

/*
 * For functions that are written once and instantiated with constants for
 * the sizes of their register block: only inlined do the arrays of
 * accumulators become registers.
 */
#define QKV_INLINE static inline __attribute__((always_inline))
#define QKV_UNROLL _Pragma("GCC unroll 32")
#define QKV_NOINLINE static __attribute__((noinline))

/* Below these, n = -127 and 2^n is taken as 0; see scale2(). */
#define QKV_NEON_EXP2_FLOOR (-127.0f)
#define QKV_NEON_EXP_FLOOR (-88.0f)

/* p[0 .. n-1] in the first lanes, 0 in the others; n is 1, 2 or 3. */
QKV_INLINE float32x4_t load_tail(const float *p, int64_t n)
{
    if (n == 1)
        return vld1q_lane_f32(p, vdupq_n_f32(0.0f), 0);
    const float32x4_t pair = vcombine_f32(vld1_f32(p), vdup_n_f32(0.0f));
    return n == 2 ? pair : vld1q_lane_f32(p + 2, pair, 2);
}

/* The first n lanes to p; n is 1, 2 or 3. */
QKV_INLINE void store_tail(float *p, float32x4_t v, int64_t n)
{
    if (n == 1) {
        vst1q_lane_f32(p, v, 0);
        return;
    }
    vst1_f32(p, vget_low_f32(v));
    if (n == 3)
        vst1q_lane_f32(p + 2, v, 2);
}

/* The same for n of 4 and more, which means the whole vector. */
QKV_INLINE float32x4_t load_upto4(const float *p, int64_t n)
{
    return n >= 4 ? vld1q_f32(p) : load_tail(p, n);
}

QKV_INLINE void store_upto4(float *p, float32x4_t v, int64_t n)
{
    if (n >= 4)
        vst1q_f32(p, v);
    else
        store_tail(p, v, n);
}

/* All bits set in the first n lanes. */
QKV_INLINE uint32x4_t first_lanes(int64_t n)
{
    static const int32_t lane[4] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(lane), vdupq_n_s32((int32_t)n));
}

/* v where mask is set, +0 elsewhere, whatever v holds there. */
QKV_INLINE float32x4_t keep(uint32x4_t mask, float32x4_t v)
{
    return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(v)));
}

/* (v0 + v1) + (v2 + v3) */
QKV_INLINE float hsum(float32x4_t v)
{
    const float32x4_t pairs = vpaddq_f32(v, v);
    return vgetq_lane_f32(vpaddq_f32(pairs, pairs), 0);
}

/* The hsum() of four vectors, bit for bit, in one. */
QKV_INLINE float32x4_t hsum4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d)
{
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

/* The largest lane; NaNs are passed over. */
QKV_INLINE float hmax(float32x4_t v)
{
    const float32x4_t pairs = vmaxnmq_f32(v, vextq_f32(v, v, 2));
    return vgetq_lane_f32(vmaxnmq_f32(pairs, vextq_f32(pairs, pairs, 1)), 0);
}

QKV_INLINE int has_nan(float32x4_t v)
{
    return vminvq_u32(vceqq_f32(v, v)) == 0;
}

/* acc + a * b[lane], rounded once. 'lane' is a constant after inlining. */
QKV_INLINE float32x4_t fma_lane(float32x4_t acc, float32x4_t a, float32x4_t b, int lane)
{
    switch (lane) {
    case 0:
        return vfmaq_laneq_f32(acc, a, b, 0);
    case 1:
        return vfmaq_laneq_f32(acc, a, b, 1);
    case 2:
        return vfmaq_laneq_f32(acc, a, b, 2);
    default:
        return vfmaq_laneq_f32(acc, a, b, 3);
    }
}

/* Turns four rows into four columns. */
QKV_INLINE void transpose4(float32x4_t v[4])
{
    const float32x4_t even01 = vtrn1q_f32(v[0], v[1]), odd01 = vtrn2q_f32(v[0], v[1]);
    const float32x4_t even23 = vtrn1q_f32(v[2], v[3]), odd23 = vtrn2q_f32(v[2], v[3]);
    v[0] = vcombine_f32(vget_low_f32(even01), vget_low_f32(even23));
    v[1] = vcombine_f32(vget_low_f32(odd01), vget_low_f32(odd23));
    v[2] = vcombine_f32(vget_high_f32(even01), vget_high_f32(even23));
    v[3] = vcombine_f32(vget_high_f32(odd01), vget_high_f32(odd23));
}

/*
 * 2^n * (1 + f * (c1 + f * tail)), where 'rounded' is n + QKV_ROUND_MAGIC, so
 * that its low bits hold n + 127: shifted up, they are 2^n, and for n = -127
 * they are 0. A result below 2^-126.5 is therefore 0; between there and
 * 2^-126 the multiplication yields a denormal, rounded once.
 *
 * The scale is applied by the last addition, s + s * e. What is left to
 * round before it is e = f * c1 + f^2 * tail, and since the error of the
 * second term is small against the step of the first, e does not decrease
 * where f increases: Horner's rule, which rounds c1 + f * tail before the
 * product with f, is not monotone. It takes as many instructions.
 */
QKV_INLINE float32x4_t scale2(float32x4_t rounded, float32x4_t e)
{
    const float32x4_t s = vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23));
    return vfmaq_f32(s, s, e);
}

/*
 * 2^t for t <= 0; exactly 1 at 0, 0 from -126.5 on, NaN for NaN. The
 * comparison with the floor comes first as -inf - round(-inf) is NaN. The
 * rounding is to nearest in every mode of the caller's, so that f stays
 * where the polynomial was fitted.
 */
QKV_INLINE float32x4_t exp2_f32x4(float32x4_t t)
{
    const float32x4_t magic = vdupq_n_f32(QKV_ROUND_MAGIC);
    t = vmaxq_f32(t, vdupq_n_f32(QKV_NEON_EXP2_FLOOR));
    const float32x4_t n = vrndnq_f32(t);
    const float32x4_t f = vsubq_f32(t, n);
    const float32x4_t rounded = vaddq_f32(n, magic);

    float32x4_t tail = vfmaq_f32(vdupq_n_f32(QKV_EXP2_C5), vdupq_n_f32(QKV_EXP2_C6), f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP2_C4), tail, f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP2_C3), tail, f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP2_C2), tail, f);
    const float32x4_t e = vfmaq_f32(vmulq_f32(vmulq_f32(f, f), tail), f, vdupq_n_f32(QKV_EXP2_C1));
    return scale2(rounded, e);
}

/*
 * e^x for x <= 0, likewise; 0 from -87.7 on. The reduced argument is f =
 * high + low with high = x - n * LN2_HI exact: the multiplication with n adds
 * at most 7 bits below those of x or LN2_HI, and the leading ones cancel.
 * Rounding the sum costs nothing in f^2 * tail but a quarter of an ulp of the
 * result in f itself, so there the two parts are added one by one.
 */
QKV_INLINE float32x4_t exp_f32x4(float32x4_t x)
{
    const float32x4_t magic = vdupq_n_f32(QKV_ROUND_MAGIC);
    x = vmaxq_f32(x, vdupq_n_f32(QKV_NEON_EXP_FLOOR));
    const float32x4_t n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(QKV_LOG2E)));
    const float32x4_t rounded = vaddq_f32(n, magic);
    const float32x4_t high = vfmaq_f32(x, n, vdupq_n_f32(-QKV_LN2_HI));
    const float32x4_t low = vmulq_f32(n, vdupq_n_f32(-QKV_LN2_LO));
    const float32x4_t f = vaddq_f32(high, low);

    float32x4_t tail = vfmaq_f32(vdupq_n_f32(QKV_EXP_C5), vdupq_n_f32(QKV_EXP_C6), f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP_C4), tail, f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP_C3), tail, f);
    tail = vfmaq_f32(vdupq_n_f32(QKV_EXP_C2), tail, f);
    /* QKV_EXP_C1 is 1. */
    const float32x4_t e = vaddq_f32(high, vfmaq_f32(low, vmulq_f32(f, tail), f));
    return scale2(rounded, e);
}

#endif
