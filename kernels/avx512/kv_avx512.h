/* SPDX-License-Identifier: MIT */
/*
 * Elements of keys and values as vectors of f32, for the AVX-512 kernels that
 * read them where they lie. 'type' is a constant after inlining, so that each
 * kernel is compiled for each type by itself.
 *
 * What a step of 32 elements takes of the two ports for vectors, which is what the
 * kernels are bound by: f32 nothing, bf16 2, f16 and i8 4, e5m2 and q4_0 8, e4m3
 * and q8_0 9. (On Sapphire Rapids a conversion from f16 takes both ports.)
 */
#ifndef QKV_KV_AVX512_H
#define QKV_KV_AVX512_H

#include <string.h>

#include "internal.h"
#include "isa_avx512.h"

enum { STEP = 2 * LANES /* elements that are widened together */ };

enum kv_type { KV_F32, KV_F16, KV_BF16, KV_I8, KV_E4M3, KV_E5M2, KV_Q8_0, KV_Q4_0 };

/* What the values of load_step() have to be multiplied by: a power of two. */
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
    return (int64_t)((uint64_t)n / QKV_KV_BLOCK) *
           (type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES);
}

/* Asks for some bytes from p + begin on, which need not exist. */
ALWAYS_INLINE void prefetch(const void *p, int64_t begin, int64_t bytes)
{
    for (int64_t b = begin; b < begin + bytes; b += 64)
        QKV_PREFETCH((const void *)((uintptr_t)p + (uintptr_t)b));
}

ALWAYS_INLINE __m128i load_128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

ALWAYS_INLINE __m256i load_256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* n < 64 bytes and zeros after them. */
ALWAYS_INLINE void copy_upto_64(const char *from, int64_t n, char *to)
{
#ifdef QKV_SIMDE
    memset(to, 0, 64);
    memcpy(to, from, (size_t)n);
#else
    _mm512_store_si512(to, _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, from));
#endif
}

ALWAYS_INLINE __m512 integers(__m128i bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* The f16 with which a block begins, as f32 in all lanes. */
ALWAYS_INLINE __m512 block_scale(const char *block)
{
    int16_t half;
    memcpy(&half, block, sizeof half);
    return _mm512_cvtph_ps(_mm256_set1_epi16(half));
}

/* A block of 32 elements of a row, from element d on. */
ALWAYS_INLINE void widen_block(const char *row, int64_t d, const int type, __m512 x[2])
{
    const char *block = row + row_bytes(d, type);
    __m512 factor = block_scale(block);
    block += 2;
    if (type == KV_Q8_0) {
        x[0] = _mm512_mul_ps(integers(load_128(block)), factor);
        x[1] = _mm512_mul_ps(integers(load_128(block + 16)), factor);
        return;
    }
    /* vpermps looks at the lowest 4 bits of an index only */
    const __m512 levels = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i bytes = _mm512_cvtepu8_epi32(load_128(block));
    factor = _mm512_mul_ps(factor, levels);
    x[0] = _mm512_permutexvar_ps(bytes, factor);
    x[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), factor);
}

/* 16 of e5m2, which is the upper half of an f16. Half a vector at a time is faster here. */
ALWAYS_INLINE __m512 widen_e5m2(__m128i bytes)
{
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}

/*
 * 32 of e4m3, which has the fields of an f16, but for an exponent that lacks its
 * highest bit: moved there it is an f16 of 2^-8 times the value, subnormals included.
 * Only the NaN, all ones, has to be made one: 1 added to its lowest bit carries into
 * the missing one.
 */
ALWAYS_INLINE void widen_e4m3(__m256i bytes, __m512 x[2])
{
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7); /* s s eeee mmm 0 */
    const __m512i next = _mm512_add_epi16(wide, _mm512_set1_epi16(0x80));
    /* wide ^ (next & 0x4000) */
    const __m512i half = _mm512_ternarylogic_epi32(wide, next, _mm512_set1_epi16(0x4000), 0x78);
    x[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    x[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

/* 32 elements from p on, in units of kv_unit(), as two vectors: of bf16 those of even
 * places and those of odd ones, for which a pair need not be taken apart. */
ALWAYS_INLINE void widen_step(const char *p, const int type, __m512 x[2])
{
    if (type == KV_F16) {
        x[0] = _mm512_cvtph_ps(load_256(p));
        x[1] = _mm512_cvtph_ps(load_256(p + 32));
    } else if (type == KV_BF16) {
        const __m512i pairs = _mm512_loadu_si512(p);
        x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        x[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
    } else if (type == KV_I8) {
        x[0] = integers(load_128(p));
        x[1] = integers(load_128(p + 16));
    } else if (type == KV_E4M3) {
        widen_e4m3(load_256(p), x);
    } else if (type == KV_E5M2) {
        x[0] = widen_e5m2(load_128(p));
        x[1] = widen_e5m2(load_128(p + 16));
    } else {
        x[0] = _mm512_loadu_ps(p);
        x[1] = _mm512_loadu_ps(p + 64);
    }
}

/* The same of the elements of a row from d on, of which n exist; the others are 0 and
 * not read. Rows of blocks have whole steps only. */
ALWAYS_INLINE void load_step(const char *row, int64_t d, int64_t n, const int type, __m512 x[2])
{
    if (is_block(type)) {
        widen_block(row, d, type, x);
        return;
    }
    const char *p = row + d * kv_size(type);
    if (n >= STEP) {
        widen_step(p, type, x);
    } else if (type == KV_F32) {
        x[0] = load_tail((const float *)(const void *)p, lanes_below(n));
        x[1] = load_tail((const float *)(const void *)p + LANES, lanes_below(n - LANES));
    } else {
        _Alignas(64) char copy[64];
        copy_upto_64(p, n * kv_size(type), copy);
        widen_step(copy, type, x);
    }
}

#endif
