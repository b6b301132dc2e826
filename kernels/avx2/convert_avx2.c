/* SPDX-License-Identifier: MIT */
/*
 * Between f32 and the 16-bit types: f16 by F16C, bf16 by integer shifts.
 *
 * A vector takes one conversion and two memory accesses (f16), or one shift
 * (bf16 to f32), or six integer operations (f32 to bf16): the loops run at
 * the speed of the second-level cache.
 */
#include "internal.h"

#include <string.h>

#include "isa_avx2.h"

QKV_INLINE __m128i load_8(const uint16_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

QKV_INLINE void store_8(uint16_t *p, __m128i x)
{
    _mm_storeu_si128((__m128i *)(void *)p, x);
}

QKV_INLINE __m128i narrow_f16(__m256 x)
{
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

/* Adding 0x7fff, and one more where the kept part is odd, carries into it
 * exactly when rounding to nearest even goes up. */
QKV_INLINE __m128i narrow_bf16(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i high =
        _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                               _mm256_castsi256_ps(quiet), nan)),
                          16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

/* Tails go through a copy of one vector: AVX2 has no masked 16-bit access. */
QKV_INLINE void widen(const uint16_t *x, float *y, int64_t n, const bool bf16)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m128i narrow = load_8(x + i);
        _mm256_storeu_ps(y + i, bf16 ? widen_bf16(narrow) : _mm256_cvtph_ps(narrow));
    }
    if (i < n) {
        uint16_t copy[LANES] = {0};
        memcpy(copy, x + i, (size_t)(n - i) * sizeof *x);
        const __m128i narrow = load_8(copy);
        store_tail(y + i, n - i, bf16 ? widen_bf16(narrow) : _mm256_cvtph_ps(narrow));
    }
}

QKV_INLINE void narrow(const float *x, uint16_t *y, int64_t n, const bool bf16)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256 wide = _mm256_loadu_ps(x + i);
        store_8(y + i, bf16 ? narrow_bf16(wide) : narrow_f16(wide));
    }
    if (i < n) {
        uint16_t copy[LANES];
        const __m256 wide = load_tail(x + i, n - i);
        store_8(copy, bf16 ? narrow_bf16(wide) : narrow_f16(wide));
        memcpy(y + i, copy, (size_t)(n - i) * sizeof *y);
    }
}

void qkv_widen_f16_avx2(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, false);
}

void qkv_widen_bf16_avx2(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, true);
}

void qkv_narrow_f16_avx2(const float *x, uint16_t *y, int64_t n)
{
    narrow(x, y, n, false);
}

void qkv_narrow_bf16_avx2(const float *x, uint16_t *y, int64_t n)
{
    narrow(x, y, n, true);
}
