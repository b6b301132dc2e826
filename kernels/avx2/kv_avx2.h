/* SPDX-License-Identifier: MIT */
/*
 * Elements of keys and values as vectors of f32, for the AVX2 kernels that
 * read them where they lie. 'type' is a constant after inlining, so that each
 * kernel is compiled for each type by itself.
 *
 * A vector of 8 takes, loads included: f32 1 instruction, f16 1 (VCVTPH2PS),
 * bf16 and i8 2 (widen, shift or convert), e5m2 2 (an e5m2 is the upper half
 * of an f16), e4m3 6.
 */
#ifndef QKV_KV_AVX2_H
#define QKV_KV_AVX2_H

#include <string.h>

#include "internal.h"
#include "isa_avx2.h"

#define QKV_NOINLINE __attribute__((noinline))

enum kv_type { KV_F32, KV_F16, KV_BF16, KV_I8, KV_E4M3, KV_E5M2 };

QKV_INLINE int64_t kv_size(const int type)
{
    return type == KV_F32 ? 4 : type == KV_F16 || type == KV_BF16 ? 2 : 1;
}

/* Keeps the compiler from folding a load into each of its uses. */
#ifdef QKV_SIMDE
#define QKV_IN_REGISTER(x) (void)(x)
#else
#define QKV_IN_REGISTER(x) __asm__("" : "+x"(x))
#endif

/* What the values of load_8() have to be multiplied by: a power of two. */
QKV_INLINE float kv_unit(const int type)
{
    return type == KV_E4M3 ? 256.0f : 1.0f;
}

QKV_INLINE __m128i load_128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

QKV_INLINE __m128i load_64(const void *p)
{
    return _mm_loadl_epi64((const __m128i *)p);
}

/*
 * An e4m3 has the fields of an f16, but for an exponent that lacks its highest
 * bit: moved there it is an f16 of 2^-8 times the value, subnormals included.
 * Only the NaN, all ones, has to be made one.
 */
QKV_INLINE __m256 widen_e4m3(__m128i bytes)
{
    const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7); /* s s eeee mmm 0000000 */
    const __m128i half = _mm_and_si128(x, _mm_set1_epi16((short)0xbfff));
    const __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x3fff));
    const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x3f00));
    return _mm256_cvtph_ps(_mm_or_si128(half, nan));
}

/* 8 elements from p on, in units of kv_unit(). */
QKV_INLINE __m256 load_8(const char *p, const int type)
{
    switch (type) {
    case KV_F16:
        return _mm256_cvtph_ps(load_128(p));
    case KV_BF16:
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
    case KV_I8:
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p)));
    case KV_E4M3:
        return widen_e4m3(load_64(p));
    case KV_E5M2:
        return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_64(p)));
    default:
        return _mm256_loadu_ps((const float *)(const void *)p);
    }
}

/*
 * The first n of 8 elements from p on, 0 < n < 8, the other lanes 0. AVX2 has
 * masked loads for 32 bits only; narrower elements go through a copy.
 */
static QKV_NOINLINE __m256 load_part_8(const char *p, int64_t n, int type)
{
    char copy[16] = {0};
    if (type == KV_F32)
        return load_tail((const float *)(const void *)p, n);
    for (int64_t i = 0; i < n * kv_size(type); i++)
        copy[i] = p[i];
    return load_8(copy, type);
}

#endif
