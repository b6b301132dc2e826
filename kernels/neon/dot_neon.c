/* SPDX-License-Identifier: MIT */
/*
 * scores[i][j] = queries[i] . keys[j].
 *
 * The lanes run along head_dim. Every score has one accumulator, summed
 * across its lanes in the same order at the end, so its bits do not depend
 * on its place. What hides the latency is the number of scores in a block:
 *
 *     rows    keys   accumulators   loads for
 *     4       4      16             8 for 16 multiply-adds
 *     3       4      12             7 for 12
 *     2       8      16             10 for 16
 *     1       8      8              9 for 8: bound by the loads
 *
 * Registers: accumulators, one a query, 2 or more for keys. Keys are the
 * outer loop, so that a key is fetched once for all queries.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *     4 of head_dim    bound          neoverse-n1   neoverse-v2   apple-m1
 *     4 x 4            8 / 4 / 5.3    8.0 / 8.0     4.0 / 4.0     8.1 / 8.1
 *     2 x 8            8 / 4 / 5.3    8.0 / 8.0     4.0 / 4.0     8.1 / 8.6
 *     1 x 8            4.5 / 3 / 4.5  4.5 / 6.4     3.0 / 3.0     5.5 / 8.6
 *
 * apple-m1 is held by that model's latency; the latency that is measured on
 * the chip, 4 cycles, lets 16 accumulators fill its ports.
 */
#include "internal.h"

#include "isa_neon.h"

enum { ACCS = 16 };

QKV_INLINE const float *key_of(const qkv_dot_args *a, int64_t j)
{
    return a->keys_at ? a->keys_at[j] : (const void *)((const char *)a->keys + j * a->keys_stride);
}

QKV_INLINE void dot_block(const qkv_dot_args *a, int64_t first_row, int64_t first_key, int rows,
                          int keys)
{
    const float *query[4], *key[8];
    float32x4_t acc[ACCS];
    QKV_UNROLL
    for (int i = 0; i < rows; i++)
        query[i] = a->queries + (first_row + i) * a->queries_stride;
    QKV_UNROLL
    for (int j = 0; j < keys; j++)
        key[j] = key_of(a, first_key + j);
    QKV_UNROLL
    for (int i = 0; i < rows * keys; i++)
        acc[i] = vdupq_n_f32(0.0f);

    int64_t d = 0;
    for (; d + 4 <= a->head_dim; d += 4) {
        float32x4_t q[4];
        QKV_UNROLL
        for (int i = 0; i < rows; i++)
            q[i] = vld1q_f32(query[i] + d);
        QKV_UNROLL
        for (int j = 0; j < keys; j++) {
            const float32x4_t k = vld1q_f32(key[j] + d);
            QKV_UNROLL
            for (int i = 0; i < rows; i++)
                acc[i * keys + j] = vfmaq_f32(acc[i * keys + j], q[i], k);
        }
    }
    if (d < a->head_dim) {
        QKV_UNROLL
        for (int j = 0; j < keys; j++) {
            const float32x4_t k = load_tail(key[j] + d, a->head_dim - d);
            QKV_UNROLL
            for (int i = 0; i < rows; i++) {
                const float32x4_t q = load_tail(query[i] + d, a->head_dim - d);
                acc[i * keys + j] = vfmaq_f32(acc[i * keys + j], q, k);
            }
        }
    }

    QKV_UNROLL
    for (int i = 0; i < rows; i++) {
        float *scores = a->scores + (first_row + i) * a->scores_stride + first_key;
        const float32x4_t *sum = acc + i * keys;
        int j = 0;
        for (; j + 4 <= keys; j += 4) {
            const float32x4_t four = hsum4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
            vst1q_f32(scores + j, a->accumulate ? vaddq_f32(vld1q_f32(scores + j), four) : four);
        }
        for (; j < keys; j++)
            scores[j] = a->accumulate ? scores[j] + hsum(sum[j]) : hsum(sum[j]);
    }
}

/*
 * All rows for some keys, 8, 4 or 1. A block of 8 is taken in two where 3 or 4
 * rows already give enough accumulators.
 */
QKV_INLINE void dot_keys(const qkv_dot_args *a, int64_t j, int keys)
{
    const int part = keys < 4 ? keys : 4;
    int64_t i = 0;
    for (; i + 4 <= a->rows; i += 4)
        for (int k = 0; k < keys; k += part)
            dot_block(a, i, j + k, 4, part);
    switch (a->rows - i) {
    case 3:
        for (int k = 0; k < keys; k += part)
            dot_block(a, i, j + k, 3, part);
        break;
    case 2:
        dot_block(a, i, j, 2, keys);
        break;
    case 1:
        dot_block(a, i, j, 1, keys);
        break;
    default:
        break;
    }
}

void qkv_dot_f32_neon(const qkv_dot_args *a)
{
    int64_t j = 0;
    for (; j + 8 <= a->kv_len; j += 8)
        dot_keys(a, j, 8);
    if (j + 4 <= a->kv_len) {
        dot_keys(a, j, 4);
        j += 4;
    }
    for (; j < a->kv_len; j++)
        dot_keys(a, j, 1);
}
