/* SPDX-License-Identifier: MIT */
/*
 * Rotary position embedding, with the bits of the scalar kernel: products and
 * sums are not fused. Halves: 4 loads, 6 operations, 2 stores for 8 pairs.
 * Neighbours: cosines and sines are spread over both lanes of a pair, and
 * VADDSUBPS subtracts in the first and adds in the second:
 * (a, b) * (c, c) -+ (b, a) * (s, s).
 */
#include "internal.h"

#include "isa_avx2.h"

QKV_INLINE __m256 rotate_neighbours(__m256 x, __m256 c, __m256 s)
{
    const __m256 swapped = _mm256_permute_ps(x, 0xb1);
    return _mm256_addsub_ps(_mm256_mul_ps(x, c), _mm256_mul_ps(swapped, s));
}

/* [0, 0, 1, 1, 2, 2, 3, 3] of four floats. */
QKV_INLINE __m256 twice(__m128 x)
{
    return _mm256_set_m128(_mm_unpackhi_ps(x, x), _mm_unpacklo_ps(x, x));
}

static void neighbours_of_row(const float *x, const float *cosines, const float *sines, float *y,
                              int64_t pairs)
{
    int64_t i = 0;
    for (; i + 4 <= pairs; i += 4)
        _mm256_storeu_ps(y + 2 * i, rotate_neighbours(_mm256_loadu_ps(x + 2 * i),
                                                      twice(_mm_loadu_ps(cosines + i)),
                                                      twice(_mm_loadu_ps(sines + i))));
    if (i < pairs) {
        const int64_t rest = pairs - i;
        const __m128 c = _mm256_castps256_ps128(load_tail(cosines + i, rest));
        const __m128 s = _mm256_castps256_ps128(load_tail(sines + i, rest));
        store_tail(y + 2 * i, 2 * rest,
                   rotate_neighbours(load_tail(x + 2 * i, 2 * rest), twice(c), twice(s)));
    }
}

static void halves_of_row(const float *x, const float *cosines, const float *sines, float *y,
                          int64_t pairs)
{
    int64_t i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + pairs + i);
        const __m256 c = _mm256_loadu_ps(cosines + i), s = _mm256_loadu_ps(sines + i);
        _mm256_storeu_ps(y + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(y + pairs + i, _mm256_add_ps(_mm256_mul_ps(a, s), _mm256_mul_ps(b, c)));
    }
    if (i < pairs) { /* masked stores are slow on some cores: only here */
        const int64_t rest = pairs - i;
        const __m256 a = load_tail(x + i, rest), b = load_tail(x + pairs + i, rest);
        const __m256 c = load_tail(cosines + i, rest), s = load_tail(sines + i, rest);
        store_tail(y + i, rest, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        store_tail(y + pairs + i, rest, _mm256_add_ps(_mm256_mul_ps(a, s), _mm256_mul_ps(b, c)));
    }
}

void qkv_rotary_f32_avx2(const float *x, const float *cosines, const float *sines, float *y,
                         int64_t pairs, bool neighbours)
{
    (neighbours ? neighbours_of_row : halves_of_row)(x, cosines, sines, y, pairs);
}
