/* SPDX-License-Identifier: MIT */
/*
 * From dot products to logits, and the hyperbolic tangent in it; what is done
 * and in which order is told in kernels/scalar/adjust.c.
 *
 * One body serves a row, whose numbers are the same in all lanes, and a tile,
 * whose every lane is a row of its own. A tile of another ISA may pass here
 * too: its width is an argument.
 *
 * Cost, operations a vector: scale 1, softcap 43 with one division, slope 2,
 * bias 4, range 5, maximum 1. Of a tile of 24 rows against a block of 128 keys
 * at head_dim 64, that is 2 % for the scale alone to 14 % with a softcap.
 */
#include "internal.h"

#include "isa_avx2.h"

/* ---------------------------------------------------------------- tanh */

/*
 * Both forms of constants.h, and the lanes' choice between them: |x| beyond 1
 * is clamped from the polynomial's view only by not being chosen. NaN fails
 * the comparison and so comes from the polynomial, as a NaN.
 */
QKV_INLINE __m256 tanh_ps(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f), sign_bit = _mm256_set1_ps(-0.0f);
    const __m256 magnitude = _mm256_andnot_ps(sign_bit, x);
    const __m256 z = _mm256_mul_ps(x, x);
    __m256 p = _mm256_set1_ps(QKV_TANH_C6);
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C5));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C4));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C3));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C2));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C1));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(QKV_TANH_C0));
    const __m256 small = _mm256_fmadd_ps(_mm256_mul_ps(p, z), x, x);

    const __m256 e = exp_ps(_mm256_mul_ps(magnitude, _mm256_set1_ps(-2.0f)));
    const __m256 rest = _mm256_div_ps(_mm256_add_ps(e, e), _mm256_add_ps(e, one));
    const __m256 large = _mm256_or_ps(_mm256_sub_ps(one, rest), _mm256_and_ps(sign_bit, x));
    return _mm256_blendv_ps(small, large, _mm256_cmp_ps(magnitude, one, _CMP_GT_OQ));
}

void qkv_tanh_f32_avx2(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(y + i, tanh_ps(_mm256_loadu_ps(x + i)));
    if (i < n)
        store_tail(y + i, n - i, tanh_ps(load_tail(x + i, n - i)));
}

/* -------------------------------------------------------------- the rules */

QKV_INLINE __m256 capped(__m256 t, float cap)
{
    return cap != 0.0f ? _mm256_mul_ps(_mm256_set1_ps(cap), tanh_ps(t)) : t;
}

QKV_INLINE __m256 biased(__m256 t, __m256 bias, __m256 bias_scale)
{
    const __m256 hidden = _mm256_set1_ps(-INFINITY);
    const __m256 half = _mm256_fmadd_ps(bias, bias_scale, t);
    return _mm256_blendv_ps(_mm256_add_ps(half, half), hidden,
                            _mm256_cmp_ps(bias, hidden, _CMP_EQ_OQ));
}

/* --------------------------------------------------------------------- row */

/* The logits at 'x', of which the first is key j; 'rest' of them, or all. */
QKV_INLINE void row_part(const qkv_row_adjust_args *a, int64_t j, int64_t rest, const bool tail)
{
    float *logits = a->logits + j;
    __m256 t = tail ? load_tail(logits, rest) : _mm256_loadu_ps(logits);
    t = capped(_mm256_mul_ps(t, _mm256_set1_ps(a->scale)), a->cap);
    if (a->slope != 0.0f) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256 key = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_set1_epi32((int)j), lane));
        const __m256 ahead = _mm256_sub_ps(key, _mm256_set1_ps(a->behind));
        t = _mm256_fmadd_ps(_mm256_set1_ps(a->slope), ahead, t);
    }
    if (a->bias)
        t = biased(t, tail ? load_tail(a->bias + j, rest) : _mm256_loadu_ps(a->bias + j),
                   _mm256_set1_ps(a->bias_scale));
    if (tail)
        store_tail(logits, rest, t);
    else
        _mm256_storeu_ps(logits, t);
}

void qkv_row_adjust_f32_avx2(const qkv_row_adjust_args *a)
{
    int64_t j = 0;
    for (; j + LANES <= a->n; j += LANES)
        row_part(a, j, LANES, false);
    if (j < a->n)
        row_part(a, j, a->n - j, true);
}

/* -------------------------------------------------------------------- tile */

/* All ones in the lanes of rows that key j is hidden from. */
QKV_INLINE __m256 out_of_range(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    const __m256i key = _mm256_set1_epi32((int)j);
    const __m256i end = _mm256_loadu_si256((const __m256i *)(const void *)(a->end + i));
    const __m256i before_end = _mm256_cmpgt_epi32(end, key);
    const __m256i all = _mm256_set1_epi32(-1);
    if (j < a->sinks)
        return _mm256_castsi256_ps(_mm256_andnot_si256(before_end, all));
    const __m256i begin = _mm256_loadu_si256((const __m256i *)(const void *)(a->begin + i));
    const __m256i seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(begin, key), before_end);
    return _mm256_castsi256_ps(_mm256_andnot_si256(seen, all));
}

/* All keys of the rows i .. i + 7; the options are constants once inlined. */
QKV_INLINE void tile_rows(const qkv_tile_adjust_args *a, int64_t i, const bool cap)
{
    const __m256 scale = _mm256_loadu_ps(a->scale + i);
    const __m256 bias_scale = _mm256_set1_ps(a->bias_scale);
    const __m256 zero = _mm256_setzero_ps();
    const __m256 slope = a->slope ? _mm256_loadu_ps(a->slope + i) : zero;
    const __m256 behind = a->slope ? _mm256_loadu_ps(a->behind + i) : zero;
    __m256 max = _mm256_loadu_ps(a->max + i);
    for (int64_t j = 0; j < a->kv_len; j++) {
        float *logits = a->logits + j * a->tile_rows + i;
        __m256 t = _mm256_mul_ps(_mm256_loadu_ps(logits), scale);
        if (cap)
            t = capped(t, a->cap);
        if (a->slope)
            t = _mm256_fmadd_ps(slope, _mm256_sub_ps(_mm256_set1_ps((float)j), behind), t);
        if (a->bias)
            t = biased(t, _mm256_loadu_ps(a->bias + j * a->tile_rows + i), bias_scale);
        if (a->end)
            t = _mm256_blendv_ps(t, _mm256_set1_ps(-INFINITY), out_of_range(a, i, j));
        _mm256_storeu_ps(logits, t);
        max = max_ignoring_nan(t, max);
    }
    _mm256_storeu_ps(a->max + i, max);
}

void qkv_tile_adjust_f32_avx2(const qkv_tile_adjust_args *a)
{
    for (int64_t i = 0; i < a->n_rows; i += LANES) {
        if (a->cap != 0.0f)
            tile_rows(a, i, true);
        else
            tile_rows(a, i, false);
    }
}
