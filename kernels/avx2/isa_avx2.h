/* SPDX-License-Identifier: MIT */
/*
 * The vocabulary of the AVX2 kernels: AVX2 + FMA + F16C, 16 registers of 8
 * lanes. Included by files of this folder only.
 */
#ifndef QKV_ISA_AVX2_H
#define QKV_ISA_AVX2_H

#ifdef QKV_SIMDE /* the same kernels on a foreign host, for tests */
#include "simde_avx2.h"
#else
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this file is compiled with -mavx2 -mfma -mf16c, and only this folder's files are"
#endif
#include <immintrin.h>
#endif

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include <qkv/qkv.h>

#include "../constants.h"

/* Forces the small bodies that are templates by their constant arguments. */
#define QKV_INLINE static inline __attribute__((always_inline))

/* Unrolls a loop whose bounds are constants after inlining, whatever its
 * size: only then do arrays of accumulators live in registers. */
#ifdef __clang__
#if __has_feature(address_sanitizer)
#define QKV_UNROLL /* each step would be checked by itself: minutes to compile */
#else              /* a count is left to a pass that comes too late */
#define QKV_UNROLL _Pragma("clang loop unroll(full)")
#endif
#else
#define QKV_UNROLL _Pragma("GCC unroll 16")
#endif

enum { LANES = 8 };

/* All ones in the first n lanes, 0 <= n <= 8. */
QKV_INLINE __m256i tail_mask(int64_t n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}

/* The first n floats at p, the other lanes 0; nothing else is touched. */
QKV_INLINE __m256 load_tail(const float *p, int64_t n)
{
    return _mm256_maskload_ps(p, tail_mask(n));
}

QKV_INLINE void store_tail(float *p, int64_t n, __m256 x)
{
    _mm256_maskstore_ps(p, tail_mask(n), x);
}

/* The first n floats at p, the other lanes 'fill'. */
QKV_INLINE __m256 load_tail_or(const float *p, int64_t n, __m256 fill)
{
    const __m256i mask = tail_mask(n);
    return _mm256_blendv_ps(fill, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}

/* The row ahead need not exist: an address, not a pointer into an array. */
QKV_INLINE void prefetch(const float *from, int64_t ahead)
{
    const uintptr_t address = (uintptr_t)from + (uintptr_t)ahead * sizeof *from;
    _mm_prefetch((const char *)address, _MM_HINT_T0);
}

/* The same in bytes, and to the second-level cache: for what is needed much later. */
QKV_INLINE void prefetch_far(const void *from, int64_t ahead)
{
    _mm_prefetch((const char *)((uintptr_t)from + (uintptr_t)ahead), _MM_HINT_T1);
}

/* 8 bf16 as f32. */
QKV_INLINE __m256 widen_bf16(__m128i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* 8 elements of a type, QKV_F32, QKV_F16 or QKV_BF16, as f32. */
QKV_INLINE __m256 load_wide(const char *p, const int32_t dtype)
{
    const __m128i *halves = (const __m128i *)(const void *)p;
    if (dtype == QKV_F32)
        return _mm256_loadu_ps((const float *)(const void *)p);
    return dtype == QKV_F16 ? _mm256_cvtph_ps(_mm_loadu_si128(halves))
                            : widen_bf16(_mm_loadu_si128(halves));
}

/* The sums across the lanes of a, b, c and d; each is added up in the same
 * order, ((0+1)+(2+3)) + ((4+5)+(6+7)), whatever its place. */
QKV_INLINE __m128 hsum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

QKV_INLINE float hsum(__m256 a)
{
    return _mm_cvtss_f32(hsum4(a, a, a, a));
}

QKV_INLINE float hmax(__m256 a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}

/* max, where a NaN in x is passed over: MAXPS returns its second operand if
 * either is a NaN. */
QKV_INLINE __m256 max_ignoring_nan(__m256 x, __m256 max)
{
    return _mm256_max_ps(x, max);
}

QKV_INLINE bool any_nan(__m256 x)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
}

/*
 * p * 2^n, where 'shifted' is n + QKV_ROUND_MAGIC and -127 <= n <= 0: the
 * biased exponent n + 127 stands in the low bits, and -127 gives a factor
 * of 0. With p >= 2^-0.5 the product is a denormal only below 2^-126.
 */
QKV_INLINE __m256 scale2(__m256 p, __m256 shifted)
{
    const __m256i factor = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(factor));
}

/*
 * t <= 0 as n + f with |f| <= 1/2: returns f, and n ready for scale2. Clamped to
 * -127 first, where 2^t is 0; NaN stays NaN, in f (MAXPS returns the second
 * operand, t, if that is a NaN).
 *
 * ROUNDPS rounds to nearest in every mode of the caller's, where adding the
 * magic number would follow the mode and leave the interval that polynomials are
 * fitted on. It takes an instruction less than rounding by addition and
 * subtraction; the magic number then only places n.
 */
QKV_INLINE __m256 split2(__m256 t, __m256 *shifted)
{
    t = _mm256_max_ps(_mm256_set1_ps(-127.0f), t);
    const __m256 n = _mm256_round_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *shifted = _mm256_add_ps(n, _mm256_set1_ps(QKV_ROUND_MAGIC));
    return _mm256_sub_ps(t, n);
}

/* 2^t for t <= 0; NaN stays NaN. */
QKV_INLINE __m256 exp2_ps(__m256 t)
{
    __m256 shifted;
    const __m256 f = split2(t, &shifted);
    __m256 p = _mm256_set1_ps(QKV_EXP2_C6);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QKV_EXP2_C5));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QKV_EXP2_C4));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QKV_EXP2_C3));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QKV_EXP2_C2));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QKV_EXP2_C1));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    return scale2(p, shifted);
}

/*
 * e^x for x <= 0; NaN stays NaN. -88.03 is -127 * ln(2), rounded down.
 *
 * f = high - n * LO; high is exact. Adding n * LO to the small f^2 * r, not
 * to f where it would be rounded first, keeps the result within 0.87 ulp, and
 * as f^2 * r errs by less than one step of f changes, it is monotone.
 */
QKV_INLINE __m256 exp_ps(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(QKV_ROUND_MAGIC);
    const __m256 low = _mm256_set1_ps(-QKV_LN2_LO16);
    x = _mm256_max_ps(_mm256_set1_ps(-88.03f), x);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(QKV_LOG2E)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 shifted = _mm256_add_ps(n, magic);
    const __m256 high = _mm256_fnmadd_ps(n, _mm256_set1_ps(QKV_LN2_HI16), x);
    const __m256 f = _mm256_fmadd_ps(n, low, high);
    __m256 r = _mm256_set1_ps(QKV_EXP_C6);
    r = _mm256_fmadd_ps(r, f, _mm256_set1_ps(QKV_EXP_C5));
    r = _mm256_fmadd_ps(r, f, _mm256_set1_ps(QKV_EXP_C4));
    r = _mm256_fmadd_ps(r, f, _mm256_set1_ps(QKV_EXP_C3));
    r = _mm256_fmadd_ps(r, f, _mm256_set1_ps(QKV_EXP_C2));
    const __m256 rest = _mm256_fmadd_ps(_mm256_mul_ps(f, f), r, _mm256_mul_ps(n, low));
    return scale2(_mm256_add_ps(_mm256_set1_ps(1.0f), _mm256_add_ps(high, rest)), shifted);
}

/* Transposes an 8 x 8 block held in registers. */
QKV_INLINE void transpose8(__m256 r[8])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

#endif
