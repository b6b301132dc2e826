/* SPDX-License-Identifier: MIT */
/*
 * Step 4, weighted sum of one block: out[i] = sum over j of
 * weights[i][j] * values[j], with the lanes along value_dim.
 *
 * Each load of a value serves all rows. Accumulators are rows x vectors: 1 x
 * 8, 2 x 8, 3 x 4 to 6 x 4, 7 x 3, 8 x 3; with the values and one broadcast
 * weight at most 29 of 32 registers. Every output is one chain over the keys,
 * so that its bits do not depend on the shape of its block. What the widest
 * block leaves over takes 4, 2 or 1 vectors; the last is masked.
 *
 * With skip_zero nothing is skipped at first: only 0 * NaN and 0 * inf could
 * tell, and they give NaN. An output that comes out NaN is made again without
 * the keys of weight 0.
 *
 * |error| <= kv_len u sum |w_j v_j|, and 2 u for joining what came before.
 *
 * By llvm-mca 19, cycles a key and the bound of the multiply-adds:
 *
 *            skylake-avx512   sapphirerapids   znver4
 *   8 x 3     12.05 (12)       24.05 (24)     31.1 (24)
 *   4 x 4      8.05  (8)       16.05 (16)     20.0 (16)
 *   2 x 8      9.05  (8)       16.05 (16)     17.1 (16)
 *   1 x 8      4.55  (4)        8.05  (8)      8.6  (8)
 *
 * (What these models overcharge is said in tile_avx512.c.) One row is bound
 * by its loads, and outside the cache by memory.
 */
#include "internal.h"

#include "isa_avx512.h"

enum { ACC_MAX = 24 }; /* accumulators of the largest register block */

ALWAYS_INLINE const float *value_of(const qkv_weighted_sum_args *a, int64_t j)
{
    return a->values_at ? a->values_at[j] : a->values + j * a->values_stride;
}

/* One column of vectors for one row again, without the keys of weight 0. */
static __attribute__((noinline)) __m512 sum_of_nonzero(const qkv_weighted_sum_args *a, int64_t i,
                                                       int64_t d, __mmask16 columns)
{
    const float *weights = a->weights + i * a->weights_stride;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (weights[j] == 0.0f)
            continue;
        const __m512 value = load_tail(value_of(a, j) + d, columns);
        sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), value, sum);
    }
    return sum;
}

/* Adds the sum of a block to the columns from d on of row i. */
static void store_sum(const qkv_weighted_sum_args *a, int64_t i, int64_t d, __m512 sum)
{
    const __mmask16 columns = lanes_below(a->value_dim - d);
    float *out = a->out + i * a->out_stride + d;
    if (a->skip_zero) {
        const __mmask16 nan = nan_lanes(sum, sum);
        if (nan) /* the other lanes keep theirs: no column's bits depend on another's values */
            sum = _mm512_mask_blend_ps(nan, sum, sum_of_nonzero(a, i, d, columns));
    }
    if (a->rescale)
        sum = _mm512_fmadd_ps(load_tail(out, columns), _mm512_set1_ps(a->rescale[i]), sum);
    store_tail(out, columns, sum);
}

/*
 * All rows, 'vecs' vectors of columns from d on, the last of them cut off at
 * value_dim unless 'full'. The sums go through memory to the epilogue, which
 * keeps its code out of the 30 instances of this.
 */
ALWAYS_INLINE void sum_columns(const qkv_weighted_sum_args *a, int64_t d, const int rows,
                               const int vecs, const bool full)
{
    const __mmask16 last = lanes_below(a->value_dim - d - (vecs - 1) * LANES);
    __m512 acc[ACC_MAX];
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        acc[u] = _mm512_setzero_ps();

    for (int64_t j = 0; j < a->kv_len; j++) {
        const float *value = value_of(a, j) + d;
        __m512 x[8];
        UNROLL
        for (int v = 0; v < vecs; v++)
            x[v] = full || v < vecs - 1 ? _mm512_loadu_ps(value + v * LANES)
                                        : load_tail(value + v * LANES, last);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 w = _mm512_set1_ps(a->weights[r * a->weights_stride + j]);
            UNROLL
            for (int v = 0; v < vecs; v++)
                acc[r * vecs + v] = _mm512_fmadd_ps(w, x[v], acc[r * vecs + v]);
        }
    }

    float sums[ACC_MAX * LANES];
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        _mm512_storeu_ps(sums + u * LANES, acc[u]);
    for (int u = 0; u < rows * vecs; u++)
        store_sum(a, u / vecs, d + u % vecs * LANES, _mm512_loadu_ps(sums + u * LANES));
}

/* All columns of 'rows' rows: 'vecs' vectors at a time, then 4, 2, 1. */
ALWAYS_INLINE void sum_rows(const qkv_weighted_sum_args *a, const int rows, const int vecs)
{
    int64_t d = 0;
    for (; a->value_dim - d >= vecs * LANES; d += vecs * LANES)
        sum_columns(a, d, rows, vecs, true);
    if (vecs > 4 && a->value_dim - d >= 4 * LANES) {
        sum_columns(a, d, rows, 4, true);
        d += 4 * LANES;
    }
    for (; a->value_dim - d > LANES; d += 2 * LANES)
        sum_columns(a, d, rows, 2, false);
    if (d < a->value_dim)
        sum_columns(a, d, rows, 1, false);
}

void qkv_weighted_sum_f32_avx512(const qkv_weighted_sum_args *args)
{
    switch (args->rows) {
    case 1:
        sum_rows(args, 1, 8);
        break;
    case 2:
        sum_rows(args, 2, 8);
        break;
    case 3:
        sum_rows(args, 3, 4);
        break;
    case 4:
        sum_rows(args, 4, 4);
        break;
    case 5:
        sum_rows(args, 5, 4);
        break;
    case 6:
        sum_rows(args, 6, 4);
        break;
    case 7:
        sum_rows(args, 7, 3);
        break;
    case 8:
        sum_rows(args, 8, 3);
        break;
    default:
        break;
    }
}
