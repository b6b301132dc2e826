/* SPDX-License-Identifier: MIT */
/*
 * Step 2, scores: scores[i][j] = queries[i] . keys[j], with the lanes along d.
 *
 * A block of 16 scores (4 rows x 4 keys, 2 x 8 or 1 x 16) has an accumulator
 * each, 16 of 32 registers; the sums across lanes are then made for all 16 at
 * once by a transposing tree of 15 additions, which yields the 16 scores in
 * one vector. Every score is formed alike, one chain over d and the same
 * tree, so that its bits do not depend on its place; a block that reaches
 * past the end repeats the last row or key and drops the result.
 *
 * |error| <= (ceil(n/16) + 4) u sum |q_d k_d|.
 *
 * By llvm-mca 19, cycles a step of 16 elements and the bound of the
 * multiply-adds:
 *
 *             skylake-avx512   sapphirerapids   znver4
 *   4 x 4       8.05 (8)        16.05 (16)     16.05 (16)
 *   2 x 8       9.04 (8)        16.05 (16)     16.05 (16)
 *   1 x 8       4.55 (4)         8.05  (8)      8.04  (8)
 *
 * and about 25 cycles for the tree: a third of the time at head_dim = 64.
 * One row is bound by its loads, two for two multiply-adds; from beyond the
 * first-level cache, by memory.
 */
#include "internal.h"

#include "isa_avx512.h"

enum { KEYS = LANES }; /* keys of one pass over the rows */

ALWAYS_INLINE const float *key_of(const qkv_dot_args *a, int64_t j)
{
    return a->keys_at ? a->keys_at[j] : a->keys + j * a->keys_stride;
}

/*
 * acc[r * keys + u]: 16 partial sums of queries[i + r] . keys[j + u]. A row
 * or key past the end is a copy of the last one.
 */
ALWAYS_INLINE void partial_sums(const qkv_dot_args *a, int64_t i, int64_t j, const int queries,
                                const int keys, __m512 *acc)
{
    const float *query[4], *key[8];
    UNROLL
    for (int r = 0; r < queries; r++)
        query[r] = a->queries + min_i64(i + r, a->rows - 1) * a->queries_stride;
    UNROLL
    for (int u = 0; u < keys; u++)
        key[u] = key_of(a, min_i64(j + u, a->kv_len - 1));
    UNROLL
    for (int u = 0; u < queries * keys; u++)
        acc[u] = _mm512_setzero_ps();

    int64_t d = 0;
    for (; d + LANES <= a->head_dim; d += LANES) {
        UNROLL
        for (int u = 0; u < keys; u++) {
            const __m512 k = _mm512_loadu_ps(key[u] + d);
            UNROLL
            for (int r = 0; r < queries; r++)
                acc[r * keys + u] =
                    _mm512_fmadd_ps(_mm512_loadu_ps(query[r] + d), k, acc[r * keys + u]);
        }
    }
    if (d < a->head_dim) {
        const __mmask16 tail = lanes_below(a->head_dim - d);
        UNROLL
        for (int u = 0; u < keys; u++) {
            const __m512 k = load_tail(key[u] + d, tail);
            UNROLL
            for (int r = 0; r < queries; r++)
                acc[r * keys + u] =
                    _mm512_fmadd_ps(load_tail(query[r] + d, tail), k, acc[r * keys + u]);
        }
    }
}

/* Stores the 16 scores of 'queries' rows from i and 16 / queries keys from j. */
ALWAYS_INLINE void store_scores(const qkv_dot_args *a, int64_t i, int64_t j, const int queries,
                                const __m512 *acc)
{
    const int keys = LANES / queries;
    const __m512 sums = transpose_sum(acc);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 exist = lanes_below(min_i64(keys, a->kv_len - j));
    UNROLL
    for (int r = 0; r < queries; r++) {
        if (i + r >= a->rows)
            return;
        float *scores = a->scores + (i + r) * a->scores_stride + j;
        const __m512i from = _mm512_add_epi32(lane, _mm512_set1_epi32(r * keys)); /* modulo 16 */
        __m512 row = _mm512_permutexvar_ps(from, sums);
        if (a->accumulate)
            row = _mm512_add_ps(load_tail(scores, exist), row);
        store_tail(scores, exist, row);
    }
}

/* The scores of the keys j .. j + 15 for some rows from i on. */
static void dot_1_row(const qkv_dot_args *a, int64_t i, int64_t j)
{
    __m512 acc[LANES];
    partial_sums(a, i, j, 1, 8, acc);
    partial_sums(a, i, j + 8, 1, 8, acc + 8);
    store_scores(a, i, j, 1, acc);
}

static void dot_2_rows(const qkv_dot_args *a, int64_t i, int64_t j)
{
    for (const int64_t end = min_i64(j + KEYS, a->kv_len); j < end; j += 8) {
        __m512 acc[LANES];
        partial_sums(a, i, j, 2, 8, acc);
        store_scores(a, i, j, 2, acc);
    }
}

static void dot_4_rows(const qkv_dot_args *a, int64_t i, int64_t j)
{
    for (const int64_t end = min_i64(j + KEYS, a->kv_len); j < end; j += 4) {
        __m512 acc[LANES];
        partial_sums(a, i, j, 4, 4, acc);
        store_scores(a, i, j, 4, acc);
    }
}

/* Keys outside, rows inside: 16 keys stay in the first-level cache meanwhile. */
void qkv_dot_f32_avx512(const qkv_dot_args *args)
{
    const qkv_dot_args *a = args;
    for (int64_t j = 0; j < a->kv_len; j += KEYS) {
        for (int64_t i = 0; i < a->rows; i += 4) {
            if (a->rows - i >= 3)
                dot_4_rows(a, i, j);
            else if (a->rows - i == 2)
                dot_2_rows(a, i, j);
            else
                dot_1_row(a, i, j);
        }
    }
}
