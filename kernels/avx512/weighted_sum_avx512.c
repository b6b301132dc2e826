/* SPDX-License-Identifier: MIT */
/*
 * Step 4, weighted sum of one block: out[i] = sum over j of
 * weights[i][j] * values[j], values in any type, with the lanes along
 * value_dim.
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
#include "kv_avx512.h"

enum { ACC_MAX = 24 /* accumulators of the largest register block */, AHEAD = LANES /* keys */ };

ALWAYS_INLINE const char *value_of(const qkv_weighted_sum_args *a, int64_t j)
{
    return a->values_at ? a->values_at[j] : (const char *)a->values + j * a->values_stride;
}

/* Asks for some bytes of value j, which need not exist: where it would be. What
 * follows the block is likely to be needed next. */
ALWAYS_INLINE void prefetch_value(const qkv_weighted_sum_args *a, int64_t j, int64_t begin,
                                  int64_t bytes)
{
    uintptr_t value = (uintptr_t)a->values + (uintptr_t)j * (uintptr_t)a->values_stride;
    if (a->values_at && j >= a->kv_len + a->ahead)
        return;
    if (a->values_at)
        value = (uintptr_t)a->values_at[j];
    prefetch((const char *)(value + (uintptr_t)begin), bytes);
}

/* One column of vectors for one row again, without the keys of weight 0. */
static __m512 sum_of_nonzero(const qkv_weighted_sum_args *a, int64_t i, int64_t d, int type)
{
    const float *weights = a->weights + i * a->weights_stride;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (weights[j] == 0.0f)
            continue;
        const __m512 value = load_upto_16(value_of(a, j), d, a->value_dim - d, type);
        sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), value, sum);
    }
    return sum;
}

/* Adds the sum of a block to the columns from d on of row i. */
static __attribute__((noinline)) void store_sum(const qkv_weighted_sum_args *a, int64_t i,
                                                int64_t d, __m512 sum, int type)
{
    const __mmask16 columns = lanes_below(a->value_dim - d);
    float *out = a->out + i * a->out_stride + d;
    if (a->skip_zero) {
        const __mmask16 nan = nan_lanes(sum, sum);
        if (nan) /* the other lanes keep theirs: no column's bits depend on another's values */
            sum = _mm512_mask_blend_ps(nan, sum, sum_of_nonzero(a, i, d, type));
    }
    if (kv_unit(type) != 1.0f)
        sum = _mm512_mul_ps(sum, _mm512_set1_ps(kv_unit(type)));
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
                               const int vecs, const bool full, const int type)
{
    const int64_t last = d + (vecs - 1) * LANES;
    __m512 acc[ACC_MAX];
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        acc[u] = _mm512_setzero_ps();

    for (int64_t j = 0; j < a->kv_len; j++) {
        const char *value = value_of(a, j);
        __m512 x[8];
        prefetch_value(a, j + AHEAD, row_bytes(d, type), row_bytes(vecs * LANES, type));
        UNROLL
        for (int v = 0; v < vecs; v++)
            x[v] = full || v < vecs - 1 ? load_16(value, d + v * LANES, type)
                                        : load_upto_16(value, last, a->value_dim - last, type);
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
        store_sum(a, u / vecs, d + u % vecs * LANES, _mm512_loadu_ps(sums + u * LANES), type);
}

/* All columns of 'rows' rows: 'vecs' vectors at a time, then 4, 2, 1. */
ALWAYS_INLINE void sum_rows(const qkv_weighted_sum_args *a, const int rows, const int vecs,
                            const int type)
{
    int64_t d = 0;
    for (; a->value_dim - d >= vecs * LANES; d += vecs * LANES)
        sum_columns(a, d, rows, vecs, true, type);
    if (vecs > 4 && a->value_dim - d >= 4 * LANES) {
        sum_columns(a, d, rows, 4, true, type);
        d += 4 * LANES;
    }
    for (; a->value_dim - d > LANES; d += 2 * LANES)
        sum_columns(a, d, rows, 2, false, type);
    if (d < a->value_dim)
        sum_columns(a, d, rows, 1, false, type);
}

void qkv_weighted_sum_f32_avx512(const qkv_weighted_sum_args *a)
{
    switch (a->rows) {
    case 1:
        sum_rows(a, 1, 8, KV_F32);
        break;
    case 2:
        sum_rows(a, 2, 8, KV_F32);
        break;
    case 3:
        sum_rows(a, 3, 4, KV_F32);
        break;
    case 4:
        sum_rows(a, 4, 4, KV_F32);
        break;
    case 5:
        sum_rows(a, 5, 4, KV_F32);
        break;
    case 6:
        sum_rows(a, 6, 4, KV_F32);
        break;
    case 7:
        sum_rows(a, 7, 3, KV_F32);
        break;
    case 8:
        sum_rows(a, 8, 3, KV_F32);
        break;
    default:
        break;
    }
}

/* weights * the scales of the keys; a weight of 0 stays 0 whatever the scale is. */
static void scale_weights(const qkv_weighted_sum_args *a, float *scaled)
{
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->kv_len; j++) {
            const float w = a->weights[i * a->weights_stride + j];
            scaled[i * QKV_KEY_BLOCK + j] =
                w == 0.0f ? 0.0f : w * a->value_scales[j * a->value_scales_stride];
        }
}

/* Rows of a cache: 8, 4, 2 or 1 at a time, as fewer instances of more types. */
typedef void sum_step(const qkv_weighted_sum_args *a);
typedef struct sum_steps {
    sum_step *eight, *four, *two, *one;
} sum_steps;

static void sum_cache(const qkv_weighted_sum_args *args, const sum_steps *s)
{
    float scaled[QKV_ROWS_MAX * QKV_KEY_BLOCK];
    qkv_weighted_sum_args a = *args;
    if (a.value_scales) {
        scale_weights(args, scaled);
        a.weights = scaled;
        a.weights_stride = QKV_KEY_BLOCK;
    }
    for (int64_t left = args->rows; left > 0; left -= a.rows) {
        a.rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        (a.rows == 8 ? s->eight : a.rows == 4 ? s->four : a.rows == 2 ? s->two : s->one)(&a);
        a.weights += a.rows * a.weights_stride;
        a.out += a.rows * a.out_stride;
        if (a.rescale)
            a.rescale += a.rows;
    }
}

#define SUM_ROWS(t, rows, vecs, type)                                                              \
    static void sum_##rows##_rows_##t(const qkv_weighted_sum_args *a)                              \
    {                                                                                              \
        sum_rows(a, rows, vecs, type);                                                             \
    }
#define WEIGHTED_SUM(t, type)                                                                      \
    SUM_ROWS(t, 8, 3, type)                                                                        \
    SUM_ROWS(t, 4, 4, type)                                                                        \
    SUM_ROWS(t, 2, 8, type)                                                                        \
    SUM_ROWS(t, 1, 8, type)                                                                        \
    void qkv_weighted_sum_##t##_avx512(const qkv_weighted_sum_args *a)                             \
    {                                                                                              \
        static const sum_steps steps = {sum_8_rows_##t, sum_4_rows_##t, sum_2_rows_##t,            \
                                        sum_1_rows_##t};                                           \
        sum_cache(a, &steps);                                                                      \
    }
WEIGHTED_SUM(f16, KV_F16)
WEIGHTED_SUM(bf16, KV_BF16)
WEIGHTED_SUM(i8, KV_I8)
WEIGHTED_SUM(f8_e4m3, KV_E4M3)
WEIGHTED_SUM(f8_e5m2, KV_E5M2)
WEIGHTED_SUM(q8_0, KV_Q8_0)
WEIGHTED_SUM(q4_0, KV_Q4_0)
