/* SPDX-License-Identifier: MIT */
/*
 * Between f32 and the 16-bit types: f16 by conversion, bf16 by integer shifts.
 *
 * A vector of 16 takes one conversion (2 operations for the ports) from or to f16,
 * an extension and a shift from bf16, 6 operations and half of 2 to bf16: all are as
 * fast as the second-level cache.
 */
#include "internal.h"

#include "isa_avx512.h"

/* ------------------------------------------------------------------- widen */

ALWAYS_INLINE __m512 widen_bf16(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

ALWAYS_INLINE void widen(const uint16_t *x, float *y, int64_t n, const bool bf16)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256i narrow = _mm256_loadu_si256((const __m256i *)(const void *)(x + i));
        _mm512_storeu_ps(y + i, bf16 ? widen_bf16(narrow) : _mm512_cvtph_ps(narrow));
    }
    if (i < n) {
        const __mmask16 mask = lanes_below(n - i);
        const __m256i narrow = _mm256_maskz_loadu_epi16(mask, x + i);
        store_tail(y + i, mask, bf16 ? widen_bf16(narrow) : _mm512_cvtph_ps(narrow));
    }
}

void qkv_widen_f16_avx512(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, false);
}

void qkv_widen_bf16_avx512(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, true);
}

/* ------------------------------------------------------------------ narrow */

void qkv_narrow_f16_avx512(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_si256((__m256i *)(void *)(y + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    if (i < n) {
        const __mmask16 mask = lanes_below(n - i);
        _mm256_mask_storeu_epi16(
            y + i, mask, _mm512_cvtps_ph(load_tail(x + i, mask), _MM_FROUND_TO_NEAREST_INT));
    }
}

/*
 * The upper half of a binary32, rounded, in the lower half of each lane. Adding
 * 0x7fff, and one more where the kept part is odd, carries into it exactly when
 * rounding to nearest even goes up.
 */
ALWAYS_INLINE __m512i round_bf16(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan_lanes(x, x), quiet), 16);
}

/* The lower halves of a's lanes, then of b's; the upper ones are 0. */
ALWAYS_INLINE __m512i pack_halves(__m512i a, __m512i b)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(order, _mm512_packus_epi32(a, b));
}

void qkv_narrow_bf16_avx512(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        _mm512_storeu_si512(y + i, pack_halves(round_bf16(_mm512_loadu_ps(x + i)),
                                               round_bf16(_mm512_loadu_ps(x + i + LANES))));
    for (; i < n; i += LANES) {
        const __mmask16 mask = lanes_below(n - i);
        const __m512i high = round_bf16(load_tail(x + i, mask));
        _mm256_mask_storeu_epi16(y + i, mask, _mm512_castsi512_si256(pack_halves(high, high)));
    }
}
