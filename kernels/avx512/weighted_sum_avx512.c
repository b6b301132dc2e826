/* SPDX-License-Identifier: MIT */
/*
 * Step 4, weighted sum of one block: out[i] = sum over j of
 * weights[i][j] * values[j], values in any type, with the lanes along
 * value_dim.
 *
 * Each load of a value serves up to 8 rows, 32 columns at a time: the elements
 * that are widened together. Accumulators are 16 or 8 of 32 registers: 8 rows x 2
 * vectors, 4 x 4, 2 x 8, 1 x 8. Other numbers of rows are made of these, 3 of 4 and 7
 * of 8 with a row that does not exist, as another pass over the values would cost
 * more. Every output is one chain over the keys, so that its bits do not depend on the
 * shape of its block.
 *
 * With skip_zero nothing is skipped at first: only 0 * NaN and 0 * inf could
 * tell, and they give NaN. An output that comes out NaN is made again without
 * the keys of weight 0.
 *
 * |error| <= kv_len u sum |w_j v_j|, and 2 u for joining what came before.
 *
 * Cycles a key of 128 elements, 4 rows, in the second-level cache (Emerald Rapids,
 * best of many; multiply-adds alone would take 16, and what they and the widening
 * take of the two ports is in brackets): f32 21 (16), bf16 21 (20), f16 26 (24), i8
 * 27 (24), e5m2 34 (32), q4_0 35 (32), q8_0 37 (34), e4m3 38 (34). f32 reads 512 bytes
 * for it.
 */
#include "kv_avx512.h"

enum { ROWS_MAX = 8, STEPS_MAX = 4, AHEAD = LANES /* keys */ };

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
    prefetch((const char *)value, begin, bytes);
}

/* 32 columns of one row again, without the keys of weight 0. */
static __attribute__((noinline)) void sum_of_nonzero(const qkv_weighted_sum_args *a, int64_t i,
                                                     int64_t d, int type, __m512 sum[2])
{
    const float *weights = a->weights + i * a->weights_stride;
    sum[0] = sum[1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++) {
        if (weights[j] == 0.0f)
            continue;
        __m512 x[2];
        load_step(value_of(a, j), d, a->value_dim - d, type, x);
        sum[0] = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), x[0], sum[0]);
        sum[1] = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), x[1], sum[1]);
    }
}

/* Adds the sums of a block to the columns from d on of row i. */
ALWAYS_INLINE void store_sums(const qkv_weighted_sum_args *a, int64_t i, int64_t d, int type,
                              __m512 sum[2])
{
    if (a->skip_zero && nan_lanes(sum[0], sum[1])) {
        /* the other lanes keep theirs: no column's bits depend on another's values */
        __m512 again[2];
        sum_of_nonzero(a, i, d, type, again);
        for (int v = 0; v < 2; v++)
            sum[v] = _mm512_mask_blend_ps(nan_lanes(sum[v], sum[v]), sum[v], again[v]);
    }
    if (type == KV_BF16)
        zip(sum);
    UNROLL
    for (int v = 0; v < 2; v++) {
        const __mmask16 columns = lanes_below(a->value_dim - d - v * LANES);
        float *out = a->out + i * a->out_stride + d + v * LANES;
        if (kv_unit(type) != 1.0f)
            sum[v] = _mm512_mul_ps(sum[v], _mm512_set1_ps(kv_unit(type)));
        if (a->rescale)
            sum[v] =
                _mm512_fmadd_ps(load_tail(out, columns), _mm512_set1_ps(a->rescale[i]), sum[v]);
        store_tail(out, columns, sum[v]);
    }
}

/*
 * Some rows, 'steps' times 32 columns from d on, the last of them cut off at
 * value_dim unless 'full'. Of rows that do not exist the last is taken, and dropped.
 */
ALWAYS_INLINE void sum_columns(const qkv_weighted_sum_args *a, int64_t d, const int rows,
                               const int steps, const bool full, const int type)
{
    const float *weights[ROWS_MAX];
    __m512 acc[ROWS_MAX * 2 * STEPS_MAX];
    UNROLL
    for (int r = 0; r < rows; r++)
        weights[r] = a->weights + min_i64(r, a->rows - 1) * a->weights_stride;
    UNROLL
    for (int u = 0; u < rows * steps * 2; u++)
        acc[u] = _mm512_setzero_ps();

    for (int64_t j = 0; j < a->kv_len; j++) {
        const char *value = value_of(a, j);
        prefetch_value(a, j + AHEAD, row_bytes(d, type), row_bytes(steps * STEP, type));
        __m512 x[2 * STEPS_MAX];
        UNROLL
        for (int s = 0; s < steps; s++)
            load_step(value, d + s * STEP,
                      full || s < steps - 1 ? STEP : a->value_dim - d - s * STEP, type, x + 2 * s);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 w = _mm512_set1_ps(weights[r][j]);
            UNROLL
            for (int v = 0; v < 2 * steps; v++)
                acc[r * 2 * steps + v] = _mm512_fmadd_ps(w, x[v], acc[r * 2 * steps + v]);
        }
    }

    UNROLL
    for (int r = 0; r < rows; r++) {
        if (r >= a->rows)
            return;
        UNROLL
        for (int s = 0; s < steps; s++)
            store_sums(a, r, d + s * STEP, type, acc + (r * steps + s) * 2);
    }
}

/* All columns of 'rows' rows: 'steps' times 32 at a time, then 32. */
ALWAYS_INLINE void sum_rows(const qkv_weighted_sum_args *a, const int rows, const int steps,
                            const int type)
{
    int64_t d = 0;
    for (; a->value_dim - d >= steps * STEP; d += steps * STEP)
        sum_columns(a, d, rows, steps, true, type);
    for (; a->value_dim - d >= STEP && steps > 1; d += STEP)
        sum_columns(a, d, rows, 1, true, type);
    if (d < a->value_dim)
        sum_columns(a, d, rows, 1, false, type);
}

/* weights * the scales of the keys; a weight of 0 stays 0 whatever the scale is. */
static void scale_weights(const qkv_weighted_sum_args *a, float *scaled)
{
    for (int64_t j = 0; j < a->kv_len; j += LANES) {
        const int64_t n = min_i64(a->kv_len - j, LANES);
        const __m512 scales =
            load_strided(a->value_scales + j * a->value_scales_stride, a->value_scales_stride, n);
        for (int64_t i = 0; i < a->rows; i++) {
            const __m512 w = load_tail(a->weights + i * a->weights_stride + j, lanes_below(n));
            const __mmask16 some = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_NEQ_UQ);
            _mm512_storeu_ps(scaled + i * QKV_KEY_BLOCK + j, _mm512_maskz_mul_ps(some, w, scales));
        }
    }
}

typedef void sum_step(const qkv_weighted_sum_args *a);
typedef struct sum_steps {
    sum_step *eight, *four, *two, *one;
} sum_steps;

/* How many of the rows that are left go together: one that does not exist costs less than
 * another pass over the values. */
static int64_t rows_together(int64_t left)
{
    return left >= 7 ? 8 : left >= 3 ? 4 : left;
}

static void sum_blocks(const qkv_weighted_sum_args *args, const sum_steps *s)
{
    float scaled[QKV_ROWS_MAX * QKV_KEY_BLOCK];
    qkv_weighted_sum_args a = *args;
    if (a.value_scales) {
        scale_weights(args, scaled);
        a.weights = scaled;
        a.weights_stride = QKV_KEY_BLOCK;
    }
    while (a.rows > 0) {
        const int64_t n = rows_together(a.rows);
        (n == 8 ? s->eight : n == 4 ? s->four : n == 2 ? s->two : s->one)(&a);
        a.rows -= n;
        a.weights += n * a.weights_stride;
        a.out += n * a.out_stride;
        if (a.rescale)
            a.rescale += n;
    }
}

#define SUM_ROWS(t, rows, steps, type)                                                             \
    static void sum_##rows##_rows_##t(const qkv_weighted_sum_args *a)                              \
    {                                                                                              \
        sum_rows(a, rows, steps, type);                                                            \
    }
#define WEIGHTED_SUM(t, type)                                                                      \
    SUM_ROWS(t, 8, 1, type)                                                                        \
    SUM_ROWS(t, 4, 2, type)                                                                        \
    SUM_ROWS(t, 2, 4, type)                                                                        \
    SUM_ROWS(t, 1, 4, type)                                                                        \
    void qkv_weighted_sum_##t##_avx512(const qkv_weighted_sum_args *a)                             \
    {                                                                                              \
        static const sum_steps steps = {sum_8_rows_##t, sum_4_rows_##t, sum_2_rows_##t,            \
                                        sum_1_rows_##t};                                           \
        sum_blocks(a, &steps);                                                                     \
    }
WEIGHTED_SUM(f32, KV_F32)
WEIGHTED_SUM(f16, KV_F16)
WEIGHTED_SUM(bf16, KV_BF16)
WEIGHTED_SUM(i8, KV_I8)
WEIGHTED_SUM(f8_e4m3, KV_E4M3)
WEIGHTED_SUM(f8_e5m2, KV_E5M2)
WEIGHTED_SUM(q8_0, KV_Q8_0)
WEIGHTED_SUM(q4_0, KV_Q4_0)
