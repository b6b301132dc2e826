/* SPDX-License-Identifier: MIT */
/*
 * out[i] = out[i] * rescale[i] + sum over j of weights[i][j] * values[j].
 *
 * The lanes run along value_dim. A row's weights are loaded four keys at a
 * time and used lane by lane, so that a step of four keys costs one load a
 * row beside the values, each of which serves all rows of the block:
 *
 *     rows   columns   accumulators   loads for
 *     4      16        16             20 for 64 multiply-adds
 *     3      16        12             19 for 48
 *     2      32        16             34 for 64
 *     1      64        16             65 for 64: bound by the loads
 *
 * More than 4 rows are taken 4 by 4: 16 columns of a block of values stay in
 * the first-level cache, and at 4 rows the loads are no longer what limits.
 *
 * 'skip_zero' costs a sum over the accumulators: only a NaN in it (a weight
 * of 0 times NaN or infinity, or a NaN that belongs there) leads to the
 * careful loop. Infinities of both signs give a false alarm, which costs time
 * alone.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *     4 keys         bound             neoverse-n1   neoverse-v2   apple-m1
 *     4 rows x 16    32 / 16 / 21.3    32.0 / 32.0   16.0 / 16.0   21.4 / 21.4
 *     3 rows x 16    24 / 12 / 16      24.0 / 24.0   12.0 / 12.0   16.0 / 16.0
 *     2 rows x 32    32 / 16 / 21.3    32.0 / 32.0   16.0 / 16.0   21.4 / 21.4
 *     1 row x 64     32.5 / 21.7 / -    32.5 / 32.5   21.7 / 21.7   32.5 / 24.0
 */
#include "internal.h"

#include "isa_neon.h"

enum { ROWS = 4, ACCS = 24 };

QKV_INLINE const float *value_of(const qkv_weighted_sum_args *a, int64_t j)
{
    return a->values_at ? a->values_at[j]
                        : (const void *)((const char *)a->values + j * a->values_stride);
}

/* out = out * rescale + sum, or sum alone, for n columns from d on. */
QKV_INLINE void finish(const qkv_weighted_sum_args *a, int64_t row, int64_t d, float32x4_t sum,
                       int64_t n)
{
    float *out = a->out + row * a->out_stride + d;
    if (a->rescale)
        sum = vfmaq_n_f32(sum, load_upto4(out, n), a->rescale[row]);
    store_upto4(out, sum, n);
}

/*
 * The sum of n <= 4 columns from d on where the plain sum is not a NaN; where
 * it is, the sum without the keys of weight 0. Both are made here, so that
 * the lanes that need no care keep the bits that they have without it.
 */
QKV_INLINE float32x4_t sum_of_nonzero(const qkv_weighted_sum_args *a, int64_t row, int64_t d,
                                      int64_t n)
{
    const float *weights = a->weights + row * a->weights_stride;
    float32x4_t plain = vdupq_n_f32(0.0f), careful = plain;
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float32x4_t v = load_upto4(value_of(a, j) + d, n);
        plain = vfmaq_n_f32(plain, v, weights[j]);
        if (weights[j] != 0.0f)
            careful = vfmaq_n_f32(careful, v, weights[j]);
    }
    return vbslq_f32(vceqq_f32(plain, plain), plain, careful);
}

QKV_NOINLINE void careful_columns(const qkv_weighted_sum_args *a, int64_t first, int64_t rows,
                                  int64_t d, int64_t columns)
{
    for (int64_t i = first; i < first + rows; i++)
        for (int64_t c = 0; c < columns; c += 4)
            finish(a, i, d + c, sum_of_nonzero(a, i, d + c, columns - c), columns - c);
}

/*
 * 'vectors' vectors of columns from d on, for 'rows' rows from 'first' on. A
 * vector has 'width' columns: 4, or fewer in the last one of a row.
 */
QKV_INLINE void columns(const qkv_weighted_sum_args *a, int64_t first, int64_t d, int rows,
                        int vectors, int width)
{
    const float *weights[ROWS];
    float32x4_t acc[ACCS];
    QKV_UNROLL
    for (int i = 0; i < rows; i++)
        weights[i] = a->weights + (first + i) * a->weights_stride;
    QKV_UNROLL
    for (int i = 0; i < rows * vectors; i++)
        acc[i] = vdupq_n_f32(0.0f);

    int64_t j = 0;
    for (; j + 4 <= a->kv_len; j += 4) {
        float32x4_t w[ROWS];
        QKV_UNROLL
        for (int i = 0; i < rows; i++)
            w[i] = vld1q_f32(weights[i] + j);
        QKV_UNROLL
        for (int lane = 0; lane < 4; lane++) {
            const float *values = value_of(a, j + lane) + d;
            QKV_UNROLL
            for (int v = 0; v < vectors; v++) {
                const float32x4_t value = load_upto4(values + 4 * v, width);
                QKV_UNROLL
                for (int i = 0; i < rows; i++)
                    acc[i * vectors + v] = fma_lane(acc[i * vectors + v], value, w[i], lane);
            }
        }
    }
    for (; j < a->kv_len; j++) {
        const float *values = value_of(a, j) + d;
        QKV_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float32x4_t value = load_upto4(values + 4 * v, width);
            QKV_UNROLL
            for (int i = 0; i < rows; i++)
                acc[i * vectors + v] = vfmaq_n_f32(acc[i * vectors + v], value, weights[i][j]);
        }
    }

    if (a->skip_zero) {
        float32x4_t all = acc[0];
        QKV_UNROLL
        for (int i = 1; i < rows * vectors; i++)
            all = vaddq_f32(all, acc[i]);
        if (has_nan(all)) {
            careful_columns(a, first, rows, d, 4 * (vectors - 1) + width);
            return;
        }
    }
    QKV_UNROLL
    for (int i = 0; i < rows; i++)
        QKV_UNROLL
    for (int v = 0; v < vectors; v++)
        finish(a, first + i, d + 4 * v, acc[i * vectors + v], width);
}

/* All columns of some rows, 'vectors' vectors at a time. */
QKV_INLINE void weighted_rows(const qkv_weighted_sum_args *a, int64_t first, int rows, int vectors)
{
    int64_t d = 0;
    for (; d + 4 * vectors <= a->value_dim; d += 4 * vectors)
        columns(a, first, d, rows, vectors, 4);
    if (vectors > 4)
        for (; d + 16 <= a->value_dim; d += 16)
            columns(a, first, d, rows, 4, 4);
    for (; d + 4 <= a->value_dim; d += 4)
        columns(a, first, d, rows, 1, 4);
    switch (a->value_dim - d) {
    case 3:
        columns(a, first, d, rows, 1, 3);
        break;
    case 2:
        columns(a, first, d, rows, 1, 2);
        break;
    case 1:
        columns(a, first, d, rows, 1, 1);
        break;
    default:
        break;
    }
}

void qkv_weighted_sum_f32_neon(const qkv_weighted_sum_args *a)
{
    int64_t i = 0;
    for (; i + 4 <= a->rows; i += 4)
        weighted_rows(a, i, 4, 4);
    switch (a->rows - i) {
    case 3:
        weighted_rows(a, i, 3, 4);
        break;
    case 2:
        weighted_rows(a, i, 2, 8);
        break;
    case 1:
        weighted_rows(a, i, 1, 16);
        break;
    default:
        break;
    }
}
