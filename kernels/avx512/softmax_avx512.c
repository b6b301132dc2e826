/* SPDX-License-Identifier: MIT */
/*
 * Step 3, fused scale and softmax, along the row: three passes over a whole
 * row (maximum, exponentials and their sum, division by it), two over a block
 * of an online softmax. The subject is in the scalar version.
 *
 * scale * x is rounded by itself in both passes, so that the largest gives
 * exactly 0 and the exponential 1. A NaN is passed over by the maximum and
 * makes the sum NaN, and with it the whole row.
 *
 * Error of a sum, in units of u = 2^-24: of 256 terms a lane of an
 * accumulator adds at most 7 (6 u, the first is exact), 2 u join the four
 * accumulators, and then a whole row goes on in f64. With 1 u each for
 * rounding the sum, its inverse and the product, and 1.8 u for the exponential
 * above and those below, a weight is within 14.6 u, whatever the length.
 *
 * Registers: 4 vectors under way and 4 sums, 9 or 13 constants. By llvm-mca 19,
 * cycles for 64 elements and what the ports alone would take:
 *
 *                      skylake-avx512   sapphirerapids   znver4
 *   exponentials, e       45.5 (42)        53.6 (52)    55.0 (48)
 *   exponentials, 2       30.1 (28)        36.6 (36)    33.3 (28)
 *
 * The other passes are bound by loads and stores.
 */
#include "internal.h"

#include "isa_avx512.h"

#include <float.h>
#include <math.h>

enum {
    UNROLLED = 4,
    STEP = UNROLLED * LANES,
    SUM_BLOCK = 256 /* terms of a row that are summed in f32 before f64 takes over */
};

/* The largest scale * x[j] and of 'max', NaN passed over. */
ALWAYS_INLINE float scaled_max(const float *x, int64_t n, float scale, float max)
{
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 start = _mm512_set1_ps(max);
    __m512 m[UNROLLED] = {start, start, start, start};
    int64_t j = 0;
    for (; j + STEP <= n; j += STEP) {
        UNROLL
        for (int v = 0; v < UNROLLED; v++)
            m[v] =
                max_ignoring_nan(m[v], _mm512_mul_ps(_mm512_loadu_ps(x + j + v * LANES), factor));
    }
    for (; j < n; j += LANES) {
        const __mmask16 lanes = lanes_below(n - j);
        const __m512 t = _mm512_mul_ps(load_tail(x + j, lanes), factor);
        m[0] = max_ignoring_nan(m[0], _mm512_mask_blend_ps(lanes, start, t));
    }
    return hmax(_mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3])));
}

/*
 * y = e^(scale * x - max), or with 'base2' 2^ of it, 0 below 2^-126, in place or not. Lane i
 * of the result is the sum of the y[j] with j = i modulo 16: of n <=
 * 512 elements, at most 11 are added in turn, then four such sums in pairs.
 */
ALWAYS_INLINE __m512 exponentials(const float *x, float *y, int64_t n, float scale, float max,
                                  const bool base2)
{
    const __m512 factor = _mm512_set1_ps(scale), m = _mm512_set1_ps(max);
    const __m512 zero = _mm512_setzero_ps();
    __m512 sum[UNROLLED] = {zero, zero, zero, zero};
    int64_t j = 0;
    for (; j + STEP <= n; j += STEP) {
        UNROLL
        for (int v = 0; v < UNROLLED; v++) {
            const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(x + j + v * LANES), factor);
            const __m512 t = _mm512_sub_ps(s, m);
            const __m512 p = base2 ? vexp2_of(t, true) : vexp(t);
            _mm512_storeu_ps(y + j + v * LANES, p);
            sum[v] = _mm512_add_ps(sum[v], p);
        }
    }
    for (; j < n; j += LANES) {
        const __mmask16 lanes = lanes_below(n - j);
        const __m512 s = _mm512_mul_ps(load_tail(x + j, lanes), factor);
        /* 0 in the other lanes: there 0 - m may be too large, and raise flags. */
        const __m512 t = _mm512_maskz_mov_ps(lanes, _mm512_sub_ps(s, m));
        const __m512 p = _mm512_maskz_mov_ps(lanes, base2 ? vexp2_of(t, true) : vexp(t));
        store_tail(y + j, lanes, p);
        sum[0] = _mm512_add_ps(sum[0], p);
    }
    return _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
}

/* The lanes of x added to those of a sum in f64. */
ALWAYS_INLINE __m512d add_widened(__m512d sum, __m512 x)
{
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(upper_half(x));
    return _mm512_add_pd(sum, _mm512_add_pd(low, high));
}

ALWAYS_INLINE double hsum_f64(__m512d x)
{
    const __m256d x4 = _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
    const __m128d x2 = _mm_add_pd(_mm256_castpd256_pd128(x4), _mm256_extractf128_pd(x4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(x2, _mm_unpackhi_pd(x2, x2)));
}

ALWAYS_INLINE void multiply(float *x, int64_t n, float factor)
{
    const __m512 f = _mm512_set1_ps(factor);
    int64_t j = 0;
    for (; j + STEP <= n; j += STEP) {
        UNROLL
        for (int v = 0; v < UNROLLED; v++)
            _mm512_storeu_ps(x + j + v * LANES,
                             _mm512_mul_ps(_mm512_loadu_ps(x + j + v * LANES), f));
    }
    for (; j < n; j += LANES) {
        const __mmask16 lanes = lanes_below(n - j);
        store_tail(x + j, lanes, _mm512_mul_ps(load_tail(x + j, lanes), f));
    }
}

qkv_row_state qkv_scale_softmax_f32_avx512(const float *scores, float *weights, int64_t n,
                                           float scale)
{
    const float max = scaled_max(scores, n, scale, -FLT_MAX);

    __m512d lanes = _mm512_setzero_pd();
    for (int64_t j = 0; j < n; j += SUM_BLOCK)
        lanes = add_widened(lanes, exponentials(scores + j, weights + j, min_i64(n - j, SUM_BLOCK),
                                                scale, max, false));

    const float sum = (float)hsum_f64(lanes);
    if (sum == 0.0f)
        return (qkv_row_state){.max = -INFINITY, .sum = 0.0f}; /* the weights are 0 already */
    multiply(weights, n, 1.0f / sum);
    return (qkv_row_state){.max = max, .sum = sum};
}

float qkv_softmax_step_f32_avx512(float *scores, int64_t n, float scale_log2, qkv_row_state *state)
{
    const float max = scaled_max(scores, n, scale_log2, state->max);
    const float sum = hsum(exponentials(scores, scores, n, scale_log2, max, true));
    const __m512 fall = _mm512_set1_ps(state->max - max);
    const float rescale = _mm_cvtss_f32(_mm512_castps512_ps128(vexp2(fall)));
    state->sum = state->sum * rescale + sum;
    state->max = max;
    return rescale;
}
