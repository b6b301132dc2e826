/* SPDX-License-Identifier: MIT */
/*
 * Rotary position embedding, with the bits of the scalar kernel: products and
 * sums are not fused. Halves: 4 loads, 6 operations, 2 stores for 16 pairs.
 * Neighbours: cosines and sines are spread over both lanes of a pair; the sum is
 * made in all lanes and replaced by the difference in the first of each pair:
 * (a, b) * (c, c) -+ (b, a) * (s, s). For 8 pairs 3 loads, 3 permutations, 4
 * operations, 1 store.
 */
#include "internal.h"

#include "isa_avx512.h"

enum { PAIRS = LANES / 2, FIRSTS = 0x5555 };

/* [0, 0, 1, 1, ...] of the lanes 0..7. */
ALWAYS_INLINE __m512 twice(__m512 x)
{
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(lanes, x);
}

ALWAYS_INLINE __m512 rotate_neighbours(__m512 x, __m512 cosines, __m512 sines)
{
    const __m512 swapped = _mm512_shuffle_ps(x, x, 0xb1);
    const __m512 a = _mm512_mul_ps(x, twice(cosines));
    const __m512 b = _mm512_mul_ps(swapped, twice(sines));
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), FIRSTS, a, b);
}

static void neighbours_of_row(const float *x, const float *cosines, const float *sines, float *y,
                              int64_t pairs)
{
    int64_t i = 0;
    for (; i + PAIRS <= pairs; i += PAIRS) {
        const __m512 c = _mm512_castps256_ps512(_mm256_loadu_ps(cosines + i));
        const __m512 s = _mm512_castps256_ps512(_mm256_loadu_ps(sines + i));
        _mm512_storeu_ps(y + 2 * i, rotate_neighbours(_mm512_loadu_ps(x + 2 * i), c, s));
    }
    if (i < pairs) {
        const __mmask16 some = lanes_below(pairs - i), both = lanes_below(2 * (pairs - i));
        const __m512 c = load_tail(cosines + i, some), s = load_tail(sines + i, some);
        store_tail(y + 2 * i, both, rotate_neighbours(load_tail(x + 2 * i, both), c, s));
    }
}

static void halves_of_row(const float *x, const float *cosines, const float *sines, float *y,
                          int64_t pairs)
{
    int64_t i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + pairs + i);
        const __m512 c = _mm512_loadu_ps(cosines + i), s = _mm512_loadu_ps(sines + i);
        _mm512_storeu_ps(y + i, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)));
        _mm512_storeu_ps(y + pairs + i, _mm512_add_ps(_mm512_mul_ps(a, s), _mm512_mul_ps(b, c)));
    }
    if (i < pairs) {
        const __mmask16 mask = lanes_below(pairs - i);
        const __m512 a = load_tail(x + i, mask), b = load_tail(x + pairs + i, mask);
        const __m512 c = load_tail(cosines + i, mask), s = load_tail(sines + i, mask);
        store_tail(y + i, mask, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)));
        store_tail(y + pairs + i, mask, _mm512_add_ps(_mm512_mul_ps(a, s), _mm512_mul_ps(b, c)));
    }
}

void qkv_rotary_f32_avx512(const float *x, const float *cosines, const float *sines, float *y,
                           int64_t pairs, bool neighbours)
{
    (neighbours ? neighbours_of_row : halves_of_row)(x, cosines, sines, y, pairs);
}
