/* SPDX-License-Identifier: MIT */
/*
 * out[i] = out[i] * rescale[i] + sum over j of weights[i][j] * values[j].
 *
 * The lanes run along value_dim. Registers: 4 rows x 2 vectors of
 * accumulators, or 1 row x 8 vectors; values are loaded once for all rows
 * of a block. A weight of 0 times a NaN or infinity is a NaN: rather than
 * test every weight, the result is tested, and a row that came out as NaN
 * is made again with the zeros skipped.
 */
#include "internal.h"

#include "isa_avx2.h"

QKV_INLINE __m256 load_part(const float *p, int64_t n)
{
    return n >= LANES ? _mm256_loadu_ps(p) : load_tail(p, n);
}

/* One vector of one row, skipping zero weights. */
static __m256 careful_sum(const qkv_weighted_sum_args *a, int64_t row, int64_t d)
{
    const float *weights = a->weights + row * a->weights_stride;
    __m256 acc = _mm256_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++)
        if (weights[j] != 0.0f)
            acc = _mm256_fmadd_ps(_mm256_set1_ps(weights[j]),
                                  load_part(a->values + j * a->values_stride + d, a->value_dim - d),
                                  acc);
    return acc;
}

QKV_INLINE void store_sum(const qkv_weighted_sum_args *a, int64_t row, int64_t d, __m256 acc)
{
    const int64_t rest = a->value_dim - d;
    float *out = a->out + row * a->out_stride + d;
    if (a->skip_zero && any_nan(acc))
        acc = careful_sum(a, row, d);
    if (a->rescale)
        acc = _mm256_fmadd_ps(load_part(out, rest), _mm256_set1_ps(a->rescale[row]), acc);
    if (rest >= LANES)
        _mm256_storeu_ps(out, acc);
    else
        store_tail(out, rest, acc);
}

/* n_rows rows from 'row' and n_vecs vectors from column d; with 'tail' the
 * one vector is a part. */
QKV_INLINE void sum_block(const qkv_weighted_sum_args *a, int64_t row, int64_t d, const int n_rows,
                          const int n_vecs, const bool tail)
{
    __m256 acc[4][8];
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        acc[r][v] = _mm256_setzero_ps();

    const __m256i mask = tail_mask(tail ? a->value_dim - d : LANES);
    const float *weights = a->weights + row * a->weights_stride;
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float *values = a->values + j * a->values_stride + d;
        __m256 value[8];
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            value[v] =
                tail ? _mm256_maskload_ps(values, mask) : _mm256_loadu_ps(values + v * LANES);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            const __m256 w = _mm256_broadcast_ss(weights + r * a->weights_stride + j);
            QKV_UNROLL
            for (int v = 0; v < n_vecs; v++)
                acc[r][v] = _mm256_fmadd_ps(w, value[v], acc[r][v]);
        }
    }

    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        store_sum(a, row + r, d + v * LANES, acc[r][v]);
}

void qkv_weighted_sum_f32_avx2(const qkv_weighted_sum_args *a)
{
    int64_t row = 0;
    for (; row + 4 <= a->rows; row += 4) {
        int64_t d = 0;
        for (; d + 2 * LANES <= a->value_dim; d += 2 * LANES)
            sum_block(a, row, d, 4, 2, false);
        for (; d + LANES <= a->value_dim; d += LANES)
            sum_block(a, row, d, 4, 1, false);
        if (d < a->value_dim)
            sum_block(a, row, d, 4, 1, true);
    }
    for (; row < a->rows; row++) {
        int64_t d = 0;
        for (; d + 8 * LANES <= a->value_dim; d += 8 * LANES)
            sum_block(a, row, d, 1, 8, false);
        for (; d + 2 * LANES <= a->value_dim; d += 2 * LANES)
            sum_block(a, row, d, 1, 2, false);
        for (; d + LANES <= a->value_dim; d += LANES)
            sum_block(a, row, d, 1, 1, false);
        if (d < a->value_dim)
            sum_block(a, row, d, 1, 1, true);
    }
}
