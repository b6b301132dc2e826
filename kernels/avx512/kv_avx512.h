/* SPDX-License-Identifier: MIT */
/*
 * Elements of keys and values as vectors of f32, for the AVX-512 kernels that
 * read them where they lie. 'type' is a constant after inlining, so that each
 * kernel is compiled for each type by itself.
 *
 * A vector of 16 takes, loads included: f32 and f16 1 instruction, bf16, i8
 * and e5m2 2 or 3, q8_0 3, e4m3 7.
 */
#ifndef QKV_KV_AVX512_H
#define QKV_KV_AVX512_H

#include <string.h>

#include "internal.h"
#include "isa_avx512.h"

enum kv_type { KV_F32, KV_F16, KV_BF16, KV_I8, KV_E4M3, KV_E5M2, KV_Q8_0, KV_Q4_0 };

/* What the values of load_16() have to be multiplied by: a power of two. */
ALWAYS_INLINE float kv_unit(const int type)
{
    return type == KV_E4M3 ? 256.0f : 1.0f;
}

ALWAYS_INLINE bool is_block(const int type)
{
    return type == KV_Q8_0 || type == KV_Q4_0;
}

/* Bytes of an element; blocks are not asked. */
ALWAYS_INLINE int64_t kv_size(const int type)
{
    return type == KV_F32 ? 4 : type == KV_F16 || type == KV_BF16 ? 2 : 1;
}

/* Bytes of n elements of a row, from a multiple of a block on. */
ALWAYS_INLINE int64_t row_bytes(int64_t n, const int type)
{
    if (!is_block(type))
        return n * kv_size(type);
    return n / QKV_KV_BLOCK * (type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES);
}

/* Asks for the bytes from p on, which need not exist. */
ALWAYS_INLINE void prefetch(const char *p, int64_t bytes)
{
    for (int64_t b = 0; b < bytes; b += 64)
        QKV_PREFETCH((const char *)((uintptr_t)p + (uintptr_t)b));
}

ALWAYS_INLINE __m128i load_128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

ALWAYS_INLINE __m256i load_256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

ALWAYS_INLINE __m512 integers(__m128i bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/*
 * An e4m3 has the fields of an f16, but for an exponent that lacks its highest
 * bit: moved there it is an f16 of 2^-8 times the value, subnormals included.
 * Only the NaN, all ones, has to be made one.
 */
ALWAYS_INLINE __m512 widen_e4m3(__m128i bytes)
{
    const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7); /* s s eeee mmm 0 */
    const __m256i half = _mm256_and_si256(x, _mm256_set1_epi16((short)0xbfff));
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x3fff));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x3f00));
    return _mm512_cvtph_ps(_mm256_or_si256(half, nan));
}

/* 16 elements from p on, of a type without blocks, in units of kv_unit(). */
ALWAYS_INLINE __m512 widen_16(const void *p, const int type)
{
    switch (type) {
    case KV_F16:
        return _mm512_cvtph_ps(load_256(p));
    case KV_BF16:
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
    case KV_I8:
        return integers(load_128(p));
    case KV_E4M3:
        return widen_e4m3(load_128(p));
    case KV_E5M2: /* the upper half of an f16 */
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_128(p)), 8));
    default:
        return _mm512_loadu_ps(p);
    }
}

/* 16 elements of a row of blocks, from element d on, a multiple of 16. */
ALWAYS_INLINE __m512 widen_block(const char *row, int64_t d, const int type)
{
    const int64_t bytes = type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES;
    const char *block = row + d / QKV_KV_BLOCK * bytes;
    const bool high = d % QKV_KV_BLOCK != 0;
    int16_t half;
    memcpy(&half, block, sizeof half);
    const __m512 scale = _mm512_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16(half))));
    if (type == KV_Q8_0)
        return _mm512_mul_ps(integers(load_128(block + 2 + d % QKV_KV_BLOCK)), scale);
    const __m128i x = load_128(block + 2);
    const __m128i nibbles = _mm_and_si128(high ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
    return _mm512_mul_ps(integers(_mm_sub_epi8(nibbles, _mm_set1_epi8(8))), scale);
}

/* The 16 elements of a row from element d on. */
ALWAYS_INLINE __m512 load_16(const char *row, int64_t d, const int type)
{
    return is_block(type) ? widen_block(row, d, type) : widen_16(row + d * kv_size(type), type);
}

/* Those below n, the other lanes 0; nothing else is read. Rows of blocks have
 * whole vectors only. */
ALWAYS_INLINE __m512 load_upto_16(const char *row, int64_t d, int64_t n, const int type)
{
    if (n >= LANES || is_block(type))
        return load_16(row, d, type);
    const char *p = row + d * kv_size(type);
    if (type == KV_F32)
        return load_tail((const float *)(const void *)p, lanes_below(n));
#ifdef QKV_SIMDE
    char copy[32] = {0};
    memcpy(copy, p, (size_t)(n * kv_size(type)));
    return widen_16(copy, type);
#else
    _Alignas(32) char copy[32];
    if (kv_size(type) == 2)
        _mm256_store_si256((__m256i *)(void *)copy, _mm256_maskz_loadu_epi16(lanes_below(n), p));
    else
        _mm_store_si128((__m128i *)(void *)copy, _mm_maskz_loadu_epi8(lanes_below(n), p));
    return widen_16(copy, type);
#endif
}

#endif
