/* SPDX-License-Identifier: MIT */
/*
 * SIMDe in place of the instructions, and what it lacks. For tests only: it
 * shows on any x86-64 with AVX2 and FMA that the kernels compute the right
 * thing, not how fast, and its rounding is the hardware's only where it maps
 * to AVX2 or to the functions below.
 *
 * SIMDe 0.7 has no masked load and store of this size or of narrow elements, no
 * vreduceps and vrangeps, few conversions and widenings of this size; the masked loads
 * of 0.8 read all lanes, and vscalefps flushes denormals. These are written out here,
 * lane by lane.
 */
#ifndef QKV_SIMDE_AVX512_H
#define QKV_SIMDE_AVX512_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* Has no alias where the compiler brings no x86 headers. */
#define __mmask16 simde__mmask16

static inline __m512 simde_qkv_maskz_loadu_ps(__mmask16 mask, const void *p)
{
    float lanes[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            lanes[i] = ((const float *)p)[i];
    return simde_mm512_loadu_ps(lanes);
}

static inline void simde_qkv_mask_storeu_ps(void *p, __mmask16 mask, __m512 x)
{
    float lanes[16];
    simde_mm512_storeu_ps(lanes, x);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            ((float *)p)[i] = lanes[i];
}

/* Elements of 8 and 16 bits, of which there are 16. */
static inline __m128i simde_qkv_maskz_loadu_epi8(__mmask16 mask, const void *p)
{
    int8_t lanes[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            lanes[i] = ((const int8_t *)p)[i];
    return simde_mm_loadu_si128((const simde__m128i *)(const void *)lanes);
}

static inline __m256i simde_qkv_maskz_loadu_epi16(__mmask16 mask, const void *p)
{
    char lanes[32] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy(lanes + 2 * i, (const char *)p + 2 * i, 2);
    return simde_mm256_loadu_si256((const simde__m256i *)(const void *)lanes);
}

static inline void simde_qkv_mask_storeu_epi8(void *p, __mmask16 mask, __m128i x)
{
    int8_t lanes[16];
    simde_mm_storeu_si128((simde__m128i *)(void *)lanes, x);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            ((int8_t *)p)[i] = lanes[i];
}

static inline void simde_qkv_mask_storeu_epi16(void *p, __mmask16 mask, __m256i x)
{
    char lanes[32];
    simde_mm256_storeu_si256((simde__m256i *)(void *)lanes, x);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy((char *)p + 2 * i, lanes + 2 * i, 2);
}

/* x minus the nearest integer, or the one below; +0 for an infinity. */
static inline __m512 simde_qkv_reduce_ps(__m512 x, int control)
{
    const bool below = (control & 3) == SIMDE_MM_FROUND_TO_NEG_INF;
    float lanes[16];
    simde_mm512_storeu_ps(lanes, x);
    for (int i = 0; i < 16; i++)
        lanes[i] = isinf(lanes[i]) ? 0.0f : lanes[i] - (below ? floorf(lanes[i]) : rintf(lanes[i]));
    return simde_mm512_loadu_ps(lanes);
}

/* x * 2^floor(n), rounded once. */
static inline __m512 simde_qkv_scalef_ps(__m512 x, __m512 n)
{
    float lanes[16], exponents[16];
    simde_mm512_storeu_ps(lanes, x);
    simde_mm512_storeu_ps(exponents, n);
    for (int i = 0; i < 16; i++) {
        const float e = exponents[i];
        if (e != e)
            lanes[i] = e;
        else
            lanes[i] = ldexpf(lanes[i], e < -400.0f ? -400 : e > 400.0f ? 400 : (int)floorf(e));
    }
    return simde_mm512_loadu_ps(lanes);
}

static inline __m512d simde_qkv_cvtps_pd(__m256 x)
{
    float lanes[8];
    double wide[8];
    simde_mm256_storeu_ps(lanes, x);
    for (int i = 0; i < 8; i++)
        wide[i] = (double)lanes[i];
    return simde_mm512_loadu_pd(wide);
}

static inline __m512 simde_qkv_cvtph_ps(__m256i x)
{
    float lanes[16];
    simde_mm256_storeu_ps(lanes, simde_mm256_cvtph_ps(simde_mm256_castsi256_si128(x)));
    simde_mm256_storeu_ps(lanes + 8, simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(x, 1)));
    return simde_mm512_loadu_ps(lanes);
}

static inline __m512i simde_qkv_cvtepu16_epi32(__m256i x)
{
    uint16_t narrow[16];
    uint32_t lanes[16];
    simde_mm256_storeu_si256((simde__m256i *)(void *)narrow, x);
    for (int i = 0; i < 16; i++)
        lanes[i] = narrow[i];
    return simde_mm512_loadu_si512(lanes);
}

static inline __m512i simde_qkv_cvtepu8_epi32(__m128i x)
{
    uint8_t narrow[16];
    uint32_t lanes[16];
    simde_mm_storeu_si128((simde__m128i *)(void *)narrow, x);
    for (int i = 0; i < 16; i++)
        lanes[i] = narrow[i];
    return simde_mm512_loadu_si512(lanes);
}

static inline __m512i simde_qkv_cvtepi8_epi32(__m128i x)
{
    int8_t narrow[16];
    int32_t lanes[16];
    simde_mm_storeu_si128((simde__m128i *)(void *)narrow, x);
    for (int i = 0; i < 16; i++)
        lanes[i] = narrow[i];
    return simde_mm512_loadu_si512(lanes);
}

static inline __m512 simde_qkv_cvtepi32_ps(__m512i x)
{
    int32_t integers[16];
    float lanes[16];
    simde_mm512_storeu_si512(integers, x);
    for (int i = 0; i < 16; i++)
        lanes[i] = (float)integers[i];
    return simde_mm512_loadu_ps(lanes);
}

static inline __m256i simde_qkv_cvtps_ph(__m512 x)
{
    float lanes[16];
    simde_mm512_storeu_ps(lanes, x);
    return simde_mm256_set_m128i(simde_mm256_cvtps_ph(simde_mm256_loadu_ps(lanes + 8), 0),
                                 simde_mm256_cvtps_ph(simde_mm256_loadu_ps(lanes), 0));
}

/* In the default rounding mode; nothing beyond 32 bits is converted. */
static inline __m512i simde_qkv_cvtps_epi32(__m512 x)
{
    float lanes[16];
    int32_t integers[16];
    simde_mm512_storeu_ps(lanes, x);
    for (int i = 0; i < 16; i++)
        integers[i] = (int32_t)rintf(lanes[i]);
    return simde_mm512_loadu_si512(integers);
}

static inline __m512i simde_qkv_cvttps_epi32(__m512 x)
{
    float lanes[16];
    int32_t integers[16];
    simde_mm512_storeu_ps(lanes, x);
    for (int i = 0; i < 16; i++)
        integers[i] = (int32_t)lanes[i];
    return simde_mm512_loadu_si512(integers);
}

/* The low bytes. */
static inline __m128i simde_qkv_cvtepi32_epi8(__m512i x)
{
    int32_t integers[16];
    int8_t narrow[16];
    simde_mm512_storeu_si512(integers, x);
    for (int i = 0; i < 16; i++)
        narrow[i] = (int8_t)integers[i];
    return simde_mm_loadu_si128((const simde__m128i *)(const void *)narrow);
}

/* The smaller magnitude, as the control 10 has it; b where a is a NaN. */
static inline __m512 simde_qkv_range_ps(__m512 a, __m512 b)
{
    float x[16], y[16];
    simde_mm512_storeu_ps(x, a);
    simde_mm512_storeu_ps(y, b);
    for (int i = 0; i < 16; i++)
        x[i] = fabsf(x[i]) < fabsf(y[i]) ? fabsf(x[i]) : fabsf(y[i]);
    return simde_mm512_loadu_ps(x);
}

static inline __m128 simde_qkv_maskz_div_ps(int mask, __m128 a, __m128 b)
{
    float x[4], y[4];
    simde_mm_storeu_ps(x, a);
    simde_mm_storeu_ps(y, b);
    for (int i = 0; i < 4; i++)
        x[i] = mask >> i & 1 ? x[i] / y[i] : 0.0f;
    return simde_mm_loadu_ps(x);
}

#ifndef __FMA__ /* SIMDe would round the product, too */
static inline __m512 simde_qkv_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
    float x[16], y[16], z[16];
    simde_mm512_storeu_ps(x, a);
    simde_mm512_storeu_ps(y, b);
    simde_mm512_storeu_ps(z, c);
    for (int i = 0; i < 16; i++)
        z[i] = fmaf(x[i], y[i], z[i]);
    return simde_mm512_loadu_ps(z);
}

#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#define _mm512_fmadd_ps(a, b, c) simde_qkv_fmadd_ps(a, b, c)
#define _mm512_fnmadd_ps(a, b, c)                                                                  \
    simde_qkv_fmadd_ps(simde_mm512_sub_ps(simde_mm512_setzero_ps(), a), b, c)
#endif

/* SIMDe has no rounding of an instruction's own; tests run it in this one. */
#undef _mm512_fmadd_round_ps
#define _mm512_fmadd_round_ps(a, b, c, rounding) _mm512_fmadd_ps(a, b, c)

#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_reduce_ps
#undef _mm512_scalef_round_ps
#undef _mm512_maskz_scalef_round_ps
#undef _mm512_cvtps_pd
#undef _mm512_shuffle_f32x4
#undef _mm512_cvtph_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi32_ps
#undef _mm_maskz_loadu_epi8
#undef _mm256_maskz_loadu_epi16
#undef _mm_mask_storeu_epi8
#undef _mm256_mask_storeu_epi16
#undef _mm512_cvtps_ph
#undef _mm512_cvtps_epi32
#undef _mm512_cvttps_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_range_ps
#undef _mm_maskz_div_ps
#define _mm_maskz_loadu_epi8(mask, p) simde_qkv_maskz_loadu_epi8(mask, p)
#define _mm256_maskz_loadu_epi16(mask, p) simde_qkv_maskz_loadu_epi16(mask, p)
#define _mm_mask_storeu_epi8(p, mask, x) simde_qkv_mask_storeu_epi8(p, mask, x)
#define _mm256_mask_storeu_epi16(p, mask, x) simde_qkv_mask_storeu_epi16(p, mask, x)
#define _mm512_cvtps_ph(x, rounding) simde_qkv_cvtps_ph(x)
#define _mm512_cvtps_epi32(x) simde_qkv_cvtps_epi32(x)
#define _mm512_cvttps_epi32(x) simde_qkv_cvttps_epi32(x)
#define _mm512_cvtepi32_epi8(x) simde_qkv_cvtepi32_epi8(x)
#define _mm512_range_ps(a, b, control) simde_qkv_range_ps(a, b)
#define _mm_maskz_div_ps(mask, a, b) simde_qkv_maskz_div_ps(mask, a, b)
#define _mm512_cvtph_ps(x) simde_qkv_cvtph_ps(x)
#define _mm512_cvtepu16_epi32(x) simde_qkv_cvtepu16_epi32(x)
#define _mm512_cvtepu8_epi32(x) simde_qkv_cvtepu8_epi32(x)
#define _mm512_cvtepi8_epi32(x) simde_qkv_cvtepi8_epi32(x)
#define _mm512_cvtepi32_ps(x) simde_qkv_cvtepi32_ps(x)
#define _mm512_maskz_loadu_ps(mask, p) simde_qkv_maskz_loadu_ps(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) simde_qkv_mask_storeu_ps(p, mask, x)
#define _mm512_reduce_ps(x, control) simde_qkv_reduce_ps(x, control)
#define _mm512_scalef_round_ps(x, n, rounding) simde_qkv_scalef_ps(x, n)
#define _mm512_maskz_scalef_round_ps(mask, x, n, rounding)                                         \
    _mm512_maskz_mov_ps(mask, simde_qkv_scalef_ps(x, n))
#define _mm512_cvtps_pd(x) simde_qkv_cvtps_pd(x)
#define _mm512_shuffle_f32x4(a, b, imm) simde_mm512_shuffle_f32x4(a, b, imm) /* no alias in 0.7 */

#endif
