/* SPDX-License-Identifier: MIT */
/*
 * The avx512 bundle: AVX-512 F, BW, DQ, VL and CD on top of AVX2, FMA and
 * F16C (every server core since Skylake-SP, every Zen since the fourth). It
 * is compiled, gated and detected as a whole: this gate, the flags in
 * kernels/meson.build and the mask in dispatch/cpu.c change together.
 *
 * Below it are the few words that the kernels of this folder are written in.
 * Static inline only. With QKV_SIMDE defined everything runs through SIMDe's
 * emulation instead, to test the logic on any x86-64 with AVX2.
 */
#ifndef QKV_ISA_AVX512_H
#define QKV_ISA_AVX512_H

#ifdef QKV_SIMDE
#include "simde_avx512.h"
#else
#if !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&                    \
      defined(__AVX512VL__) && defined(__AVX512CD__) && defined(__AVX2__) && defined(__FMA__) &&   \
      defined(__F16C__))
#error "compile with the flags of 'avx512' in kernels/meson.build"
#endif
#include <immintrin.h>
#endif

#include <stdbool.h>
#include <stdint.h>

#include "../constants.h"

enum { LANES = 16 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/*
 * Unrolls the next loop completely; its bounds are constants once everything
 * is inlined. An array of vectors lives in registers only if every loop over
 * it is unrolled before the compilers split arrays into scalars: GCC does so
 * for its own pragma, clang only for a full unrolling, not for a count.
 */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

ALWAYS_INLINE int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The mask of the lanes below n, for any n. */
ALWAYS_INLINE __mmask16 lanes_below(int64_t n)
{
    const int count = n >= LANES ? LANES : n > 0 ? (int)n : 0;
    return (__mmask16)((1u << count) - 1u);
}

/* The elements of p in the lanes of the mask, 0 in the others; nothing else is read. */
ALWAYS_INLINE __m512 load_tail(const float *p, __mmask16 mask)
{
    return _mm512_maskz_loadu_ps(mask, p);
}

/* Up to 16 of n elements, 'stride' apart; 0 in the lanes of those that do not exist. */
static inline __m512 load_apart(const float *p, int64_t stride, int64_t n)
{
    float x[LANES] = {0};
    for (int64_t i = 0; i < min_i64(n, LANES); i++)
        x[i] = p[i * stride];
    return _mm512_loadu_ps(x);
}

ALWAYS_INLINE __m512 load_strided(const float *p, int64_t stride, int64_t n)
{
    return stride == 1 ? load_tail(p, lanes_below(n)) : load_apart(p, stride, n);
}

/* Writes the lanes of the mask and nothing else. */
ALWAYS_INLINE void store_tail(float *p, __mmask16 mask, __m512 x)
{
    _mm512_mask_storeu_ps(p, mask, x);
}

/* vmaxps returns its second operand if either is NaN: a NaN in x is passed over. */
ALWAYS_INLINE __m512 max_ignoring_nan(__m512 max, __m512 x)
{
    return _mm512_max_ps(x, max);
}

/* The lanes in which a or b is NaN. */
ALWAYS_INLINE __mmask16 nan_lanes(__m512 a, __m512 b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}

/* Lanes 8..15 as a half vector. (vextractf64x4, as SIMDe lacks f32x8: they do the same.) */
ALWAYS_INLINE __m256 upper_half(__m512 x)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}

/*
 * The sum of all lanes, halving: lane i + lane i + 8, then + 4, + 2, + 1.
 * transpose_sum() adds in the same order.
 */
ALWAYS_INLINE float hsum(__m512 x)
{
    const __m256 x8 = _mm256_add_ps(_mm512_castps512_ps256(x), upper_half(x));
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    const __m128 x1 = _mm_add_ss(x2, _mm_movehdup_ps(x2));
    return _mm_cvtss_f32(x1);
}

/* The largest of all lanes, none of which is NaN. */
ALWAYS_INLINE float hmax(__m512 x)
{
    const __m256 x8 = _mm256_max_ps(_mm512_castps512_ps256(x), upper_half(x));
    const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    const __m128 x1 = _mm_max_ss(x2, _mm_movehdup_ps(x2));
    return _mm_cvtss_f32(x1);
}

/*
 * x 2^floor(n), rounded to nearest in every mode of the caller's: rounded upward no
 * power would be 0, not even that of -FLT_MAX, with which a row without a key ends.
 */
ALWAYS_INLINE __m512 scale_by_power(__m512 x, __m512 n)
{
    return _mm512_scalef_round_ps(x, n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/*
 * The same, and 0 where t, whose power of two is made, is below -126: weights that are
 * denormals take Intel's cores a hundred times as long to multiply. NaN stays NaN.
 */
ALWAYS_INLINE __m512 scale_by_normal_power(__m512 x, __m512 n, __m512 t)
{
    const __mmask16 normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_round_ps(normal, x, n,
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/*
 * 2^t, t <= 0. vreduceps gives f = t - round(t), and 0 for -inf; so t - f is
 * the integer n, or -inf. vscalefps multiplies by 2^n with one rounding,
 * into the denormals and down to 0 for any n however low, so that t needs no
 * clamp. A NaN goes through all of them.
 *
 * 10 operations for the ports: reduce, subtract, 6 FMA, scale (2). Reducing
 * by vrndscaleps takes one more and makes a NaN of -inf. At most 0.80 ulp.
 */
ALWAYS_INLINE __m512 vexp2_of(__m512 t, const bool normal)
{
    const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 n = _mm512_sub_ps(t, f);
    __m512 p = _mm512_set1_ps(QKV_EXP2_C6);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_C5));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return normal ? scale_by_normal_power(p, n, t) : scale_by_power(p, n);
}

ALWAYS_INLINE __m512 vexp2(__m512 t)
{
    return vexp2_of(t, false);
}

/*
 * e^x, x <= 0: n = round(x log2(e)), high = x - n HI exactly, f = high - n LO.
 * The polynomial is 1 + (high + (f^2 r - n LO)): as n LO joins the small
 * f^2 r, f's own rounding hardly matters and the function is monotone, which
 * Horner's rule down to the 1 is not. At most 0.87 ulp.
 *
 * Here -inf must be clamped, as -inf + n HI would be NaN; the clamp lets a
 * NaN in x pass. Rounding by the magic number takes 2 operations where a
 * product and vrndscaleps take 3; it is to nearest in every mode of the
 * caller's, or f would leave the polynomial's interval. 16 operations in all.
 */
ALWAYS_INLINE __m512 vexp(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(QKV_ROUND_MAGIC);
    const __m512 low = _mm512_set1_ps(-QKV_LN2_LO);
    x = _mm512_max_ps(_mm512_set1_ps(QKV_EXP_MIN), x);
    const __m512 n =
        _mm512_sub_ps(_mm512_fmadd_round_ps(x, _mm512_set1_ps(QKV_LOG2E), magic,
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                      magic);
    const __m512 high = _mm512_fnmadd_ps(n, _mm512_set1_ps(QKV_LN2_HI), x);
    const __m512 f = _mm512_fmadd_ps(n, low, high);
    __m512 r = _mm512_set1_ps(QKV_EXP_C6);
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(QKV_EXP_C5));
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(QKV_EXP_C4));
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(QKV_EXP_C3));
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(QKV_EXP_C2));
    const __m512 rest = _mm512_fmadd_ps(_mm512_mul_ps(f, f), r, _mm512_mul_ps(n, low));
    return scale_by_power(_mm512_add_ps(_mm512_add_ps(high, rest), _mm512_set1_ps(1.0f)), n);
}

/* Every second element of a and b, from element 'first' on. */
ALWAYS_INLINE __m512 unzip(__m512 a, __m512 b, const int first)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(first)), b);
}

/* And back: x[0] becomes the even elements, x[1] the odd ones. */
ALWAYS_INLINE void zip(__m512 x[2])
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 first = _mm512_permutex2var_ps(x[0], low, x[1]);
    x[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
    x[0] = first;
}

/* Halves, quarters, ... of a and b added crosswise: the steps of transpose_sum(). */
ALWAYS_INLINE __m512 add_halves(__m512 a, __m512 b)
{
    /* [a0+a2 a1+a3 b2+b0 b3+b1], in groups of 4 lanes */
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

ALWAYS_INLINE __m512 add_quarters(__m512 a, __m512 b)
{
    /* [a0+a1 b1+b0 a2+a3 b3+b2], in groups of 4 lanes */
    const __m512i swap =
        _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a, b), _mm512_permutex2var_ps(a, swap, b));
}

ALWAYS_INLINE __m512 add_pairs(__m512 a, __m512 b)
{
    /* within each group of 4: [a0+a2 a1+a3 b2+b0 b3+b1] */
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}

ALWAYS_INLINE __m512 add_singles(__m512 a, __m512 b)
{
    /* within each group of 4: [a0+a1 b1+b0 a2+a3 b3+b2] */
    const __m512i swap =
        _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permutex2var_ps(a, swap, b));
}

/*
 * Lane i of the result is the sum of all lanes of x[i], each added in the
 * order of hsum(): 15 blends, 15 shuffles and 15 additions for 16 sums,
 * where hsum() alone takes 7 instructions a sum.
 */
ALWAYS_INLINE __m512 transpose_sum(const __m512 x[LANES])
{
    __m512 half[8], quarter[4], pair[2];
    /* Lane 8a + 4b + 2c + d is taken from x by the steps in the order a, b, c, d. */
    UNROLL
    for (int i = 0; i < 8; i++)
        half[i] = add_halves(x[i], x[i + 8]);
    UNROLL
    for (int i = 0; i < 4; i++)
        quarter[i] = add_quarters(half[i], half[i + 4]);
    UNROLL
    for (int i = 0; i < 2; i++)
        pair[i] = add_pairs(quarter[i], quarter[i + 2]);
    return add_singles(pair[0], pair[1]);
}

/* x[i][j] becomes x[j][i]: 64 shuffles in four steps. */
ALWAYS_INLINE void transpose_16x16(__m512 x[LANES])
{
    __m512 t[LANES];
    UNROLL
    for (int i = 0; i < LANES; i += 2) { /* pairs of rows */
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    UNROLL
    for (int i = 0; i < LANES; i += 4) { /* x[i + c]: column c of each 4x4, of rows i..i+3 */
        x[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        x[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        x[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        x[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL
    for (int c = 0; c < 4; c++) { /* then the 4x4 of groups of 4 lanes */
        const __m512 low01 = _mm512_shuffle_f32x4(x[c], x[c + 4], 0x44);
        const __m512 high01 = _mm512_shuffle_f32x4(x[c], x[c + 4], 0xee);
        const __m512 low23 = _mm512_shuffle_f32x4(x[c + 8], x[c + 12], 0x44);
        const __m512 high23 = _mm512_shuffle_f32x4(x[c + 8], x[c + 12], 0xee);
        x[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        x[c + 4] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        x[c + 8] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        x[c + 12] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
}

#endif
