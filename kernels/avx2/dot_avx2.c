/* SPDX-License-Identifier: MIT */
/*
 * scores[i][j] = queries[i] . keys[j].
 *
 * The lanes run along head_dim. Registers: 2 queries x 4 keys of
 * accumulators, one query and the keys' vectors in flight; 6 loads for 8
 * multiply-adds, so the two load ports keep up with the two FMA ports.
 * Every score has one accumulator, summed across the lanes in the same
 * order, so its bits do not depend on its neighbours. Keys run in the outer
 * loop: each is fetched once and served from the first-level cache to the
 * other query pairs.
 */
#include "internal.h"

#include "isa_avx2.h"

/* acc[r][k] = the lane sums of queries[r] . keys[k]. */
QKV_INLINE void dot_block(const float *queries, int64_t queries_stride, const float *keys,
                          int64_t keys_stride, int64_t head_dim, const int n_rows, const int n_keys,
                          __m256 acc[2][4])
{
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        acc[r][k] = _mm256_setzero_ps();

    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) {
        __m256 q[2];
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            q[r] = _mm256_loadu_ps(queries + r * queries_stride + d);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++) {
            const __m256 key = _mm256_loadu_ps(keys + k * keys_stride + d);
            QKV_UNROLL
            for (int r = 0; r < n_rows; r++)
                acc[r][k] = _mm256_fmadd_ps(q[r], key, acc[r][k]);
        }
    }
    if (d < head_dim) {
        const int64_t rest = head_dim - d;
        __m256 q[2];
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            q[r] = load_tail(queries + r * queries_stride + d, rest);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++) {
            const __m256 key = load_tail(keys + k * keys_stride + d, rest);
            QKV_UNROLL
            for (int r = 0; r < n_rows; r++)
                acc[r][k] = _mm256_fmadd_ps(q[r], key, acc[r][k]);
        }
    }
}

QKV_INLINE void dot_rows(const qkv_dot_args *a, int64_t row, int64_t key, const int n_rows,
                         const int n_keys)
{
    __m256 acc[2][4];
    dot_block(a->queries + row * a->queries_stride, a->queries_stride,
              a->keys + key * a->keys_stride, a->keys_stride, a->head_dim, n_rows, n_keys, acc);
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        float *scores = a->scores + (row + r) * a->scores_stride + key;
        if (n_keys == 4) {
            __m128 sums = hsum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
            if (a->accumulate)
                sums = _mm_add_ps(_mm_loadu_ps(scores), sums);
            _mm_storeu_ps(scores, sums);
        } else {
            const float sum = hsum(acc[r][0]);
            *scores = a->accumulate ? *scores + sum : sum;
        }
    }
}

void qkv_dot_f32_avx2(const qkv_dot_args *a)
{
    int64_t j = 0;
    for (; j + 4 <= a->kv_len; j += 4) {
        int64_t i = 0;
        for (; i + 2 <= a->rows; i += 2)
            dot_rows(a, i, j, 2, 4);
        if (i < a->rows)
            dot_rows(a, i, j, 1, 4);
    }
    for (; j < a->kv_len; j++) {
        int64_t i = 0;
        for (; i + 2 <= a->rows; i += 2)
            dot_rows(a, i, j, 2, 1);
        if (i < a->rows)
            dot_rows(a, i, j, 1, 1);
    }
}
