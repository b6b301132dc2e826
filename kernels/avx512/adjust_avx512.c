/* SPDX-License-Identifier: MIT */
/*
 * From dot products to logits, and the hyperbolic tangent in it; what is done
 * and in which order is told in kernels/scalar/adjust.c.
 *
 * One body serves a row, whose numbers are the same in all lanes, and a tile,
 * whose every lane is a row of its own. A tile of another ISA may pass here
 * too: its width is an argument, and lanes beyond it are masked.
 *
 * Operations for the two ports of a vector of 16: scale 1, softcap 12, slope 2, bias 3,
 * range 3, maximum 1; where a logit is beyond its cap in any lane 25 more, with a division
 * beside them. Keys go by 4, as a maximum waits 4 cycles for the one before it. A tile of
 * 48 rows and 160 keys takes 0.54 us for the scale alone, 1.7 with a softcap, 5.5 where
 * every vector has a logit beyond it (Emerald Rapids; the AVX2 kernel 1.8, 8.8, 9.7).
 */
#include "internal.h"

#include "isa_avx512.h"

#include <math.h>

/* ---------------------------------------------------------------- tanh */

/* The form of constants.h for |x| > 1: 1 - 2 e^-2|x| / (1 + e^-2|x|), with the sign of x. */
ALWAYS_INLINE __m512 tanh_beyond_1(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign_bit = _mm512_set1_ps(-0.0f);
    const __m512 magnitude = _mm512_andnot_ps(sign_bit, x);
    const __m512 e = vexp(_mm512_mul_ps(magnitude, _mm512_set1_ps(-2.0f)));
    const __m512 rest = _mm512_div_ps(_mm512_add_ps(e, e), _mm512_add_ps(e, one));
    return _mm512_or_ps(_mm512_sub_ps(one, rest), _mm512_and_ps(sign_bit, x));
}

/*
 * The polynomial serves |x| <= 1, and a NaN. Logits are seldom beyond a softcap: the
 * other form is left out where no lane wants it.
 */
ALWAYS_INLINE __m512 vtanh(__m512 x)
{
    const __m512 z = _mm512_mul_ps(x, x);
    __m512 p = _mm512_set1_ps(QKV_TANH_C6);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C5));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C4));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C3));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C2));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C1));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(QKV_TANH_C0));
    const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
    const __m512 magnitude = _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x);
    const __mmask16 beyond = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1.0f), _CMP_GT_OQ);
    return beyond ? _mm512_mask_mov_ps(small, beyond, tanh_beyond_1(x)) : small;
}

void qkv_tanh_f32_avx512(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = lanes_below(n - i);
        store_tail(y + i, lanes, vtanh(load_tail(x + i, lanes)));
    }
}

/* -------------------------------------------------------------- the rules */

ALWAYS_INLINE __m512 capped(__m512 t, float cap)
{
    return _mm512_mul_ps(_mm512_set1_ps(cap), vtanh(t));
}

ALWAYS_INLINE __m512 biased(__m512 t, __m512 bias, __m512 bias_scale)
{
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    const __m512 half = _mm512_fmadd_ps(bias, bias_scale, t);
    return _mm512_mask_mov_ps(_mm512_add_ps(half, half),
                              _mm512_cmp_ps_mask(bias, hidden, _CMP_EQ_OQ), hidden);
}

/* --------------------------------------------------------------------- row */

void qkv_row_adjust_f32_avx512(const qkv_row_adjust_args *args)
{
    const qkv_row_adjust_args copy = *args, *a = &copy; /* which no store of a logit changes */
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t j = 0; j < a->n; j += LANES) {
        const __mmask16 lanes = lanes_below(a->n - j);
        __m512 t = _mm512_mul_ps(load_tail(a->logits + j, lanes), _mm512_set1_ps(a->scale));
        if (a->cap != 0.0f)
            t = capped(t, a->cap);
        if (a->slope != 0.0f) {
            const __m512 key =
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_set1_epi32((int)j), lane));
            const __m512 ahead = _mm512_sub_ps(key, _mm512_set1_ps(a->behind));
            t = _mm512_fmadd_ps(_mm512_set1_ps(a->slope), ahead, t);
        }
        if (a->bias)
            t = biased(t, load_tail(a->bias + j, lanes), _mm512_set1_ps(a->bias_scale));
        store_tail(a->logits + j, lanes, t);
    }
}

/* -------------------------------------------------------------------- tile */

/* What is the same for all keys of the rows i .. i + 15. */
typedef struct tile_lanes {
    int64_t i;
    __mmask16 lanes;
    __m512 scale, slope, behind;
    __m512i begin, end;
} tile_lanes;

ALWAYS_INLINE __m512i load_integers(const int32_t *p, __mmask16 lanes)
{
    return _mm512_castps_si512(load_tail((const float *)(const void *)p, lanes));
}

/* The rows that see key j. */
ALWAYS_INLINE __mmask16 rows_that_see(const qkv_tile_adjust_args *a, const tile_lanes *r, int64_t j)
{
    const __m512i key = _mm512_set1_epi32((int)j);
    const __mmask16 before_end = _mm512_cmpgt_epi32_mask(r->end, key);
    const __mmask16 before_begin = j < a->sinks ? 0 : _mm512_cmpgt_epi32_mask(r->begin, key);
    return (__mmask16)(before_end & ~before_begin);
}

/* Key j; 'cap' and 'more' than that are constants once inlined. */
ALWAYS_INLINE __m512 tile_logits(const qkv_tile_adjust_args *a, const tile_lanes *r, int64_t j,
                                 const bool cap, const bool more)
{
    const int64_t at = j * a->tile_rows + r->i;
    __m512 t = _mm512_mul_ps(load_tail(a->logits + at, r->lanes), r->scale);
    if (cap)
        t = capped(t, a->cap);
    if (more && a->slope)
        t = _mm512_fmadd_ps(r->slope, _mm512_sub_ps(_mm512_set1_ps((float)j), r->behind), t);
    if (more && a->bias)
        t = biased(t, load_tail(a->bias + at, r->lanes), _mm512_set1_ps(a->bias_scale));
    if (more && a->end)
        t = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), rows_that_see(a, r, j), t);
    store_tail(a->logits + at, r->lanes, t);
    return t;
}

enum { KEYS = 4 };

ALWAYS_INLINE void tile_rows(const qkv_tile_adjust_args *a, int64_t i, const bool cap,
                             const bool more)
{
    tile_lanes r = {.i = i, .lanes = lanes_below(a->tile_rows - i)};
    r.scale = load_tail(a->scale + i, r.lanes);
    r.slope = a->slope ? load_tail(a->slope + i, r.lanes) : _mm512_setzero_ps();
    r.behind = a->slope ? load_tail(a->behind + i, r.lanes) : _mm512_setzero_ps();
    r.begin = a->end ? load_integers(a->begin + i, r.lanes) : _mm512_setzero_si512();
    r.end = a->end ? load_integers(a->end + i, r.lanes) : _mm512_setzero_si512();

    __m512 max[KEYS];
    UNROLL
    for (int u = 0; u < KEYS; u++)
        max[u] = load_tail(a->max + i, r.lanes);
    int64_t j = 0;
    for (; j + KEYS <= a->kv_len; j += KEYS) {
        UNROLL
        for (int u = 0; u < KEYS; u++)
            max[u] = max_ignoring_nan(max[u], tile_logits(a, &r, j + u, cap, more));
    }
    for (; j < a->kv_len; j++)
        max[0] = max_ignoring_nan(max[0], tile_logits(a, &r, j, cap, more));
    const __m512 all = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
    store_tail(a->max + i, r.lanes, all);
}

void qkv_tile_adjust_f32_avx512(const qkv_tile_adjust_args *args)
{
    const qkv_tile_adjust_args copy = *args, *a = &copy; /* which no store of a logit changes */
    const bool more = a->slope || a->bias || a->end;
    for (int64_t i = 0; i < a->n_rows; i += LANES) {
        if (a->cap != 0.0f)
            tile_rows(a, i, true, true);
        else if (more)
            tile_rows(a, i, false, true);
        else
            tile_rows(a, i, false, false);
    }
}
