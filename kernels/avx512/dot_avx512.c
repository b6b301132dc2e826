/* SPDX-License-Identifier: MIT */
/*
 * Step 2, scores: scores[i][j] = queries[i] . keys[j], keys in any type, with
 * the lanes along d. A key's vector is widened once for up to four queries.
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
 * 4 x 4 of other types takes 20 cycles for f16, bf16, i8 and e4m3 and 24 for
 * q8_0 (sapphirerapids; znver4 16, 18, 16, 20 and 23), and all of them
 * about 25 cycles for the tree: a third of the time at head_dim = 64.
 * One row is bound by its loads, two for two multiply-adds; from beyond the
 * first-level cache, by memory.
 */
#include "kv_avx512.h"

enum { KEYS = LANES /* of one pass over the rows */, AHEAD = LANES /* to be asked for */ };

ALWAYS_INLINE const char *key_of(const qkv_dot_args *a, int64_t j)
{
    return a->keys_at ? a->keys_at[j] : (const char *)a->keys + j * a->keys_stride;
}

/* Asks for n keys that the first rows, which take them first, will need after some others:
 * the keys of a long cache are neither in the first two levels nor all in one stream. */
ALWAYS_INLINE void prefetch_keys(const qkv_dot_args *a, int64_t i, int64_t j, int64_t n,
                                 const int type)
{
    if (i > 0)
        return;
    for (int64_t k = j + AHEAD; k < min_i64(j + AHEAD + n, a->kv_len); k++)
        prefetch(key_of(a, k), row_bytes(a->head_dim, type));
}

/*
 * acc[r * keys + u]: 16 partial sums of queries[i + r] . keys[j + u]. A row
 * or key past the end is a copy of the last one.
 */
ALWAYS_INLINE void partial_sums(const qkv_dot_args *a, int64_t i, int64_t j, const int queries,
                                const int keys, const int type, __m512 *acc)
{
    const float *query[4];
    const char *key[8];
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
            const __m512 k = load_16(key[u], d, type);
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
            const __m512 k = load_upto_16(key[u], d, a->head_dim - d, type);
            UNROLL
            for (int r = 0; r < queries; r++)
                acc[r * keys + u] =
                    _mm512_fmadd_ps(load_tail(query[r] + d, tail), k, acc[r * keys + u]);
        }
    }
}

/* Stores the 16 scores of 'queries' rows from i and 16 / queries keys from j. */
ALWAYS_INLINE void store_scores(const qkv_dot_args *a, int64_t i, int64_t j, const int queries,
                                const int type, const __m512 *acc)
{
    const int keys = LANES / queries;
    float scales[LANES];
    for (int u = 0; u < keys && type == KV_I8; u++)
        scales[u] = a->key_scales[min_i64(j + u, a->kv_len - 1) * a->key_scales_stride];
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
        if (kv_unit(type) != 1.0f)
            row = _mm512_mul_ps(row, _mm512_set1_ps(kv_unit(type)));
        if (type == KV_I8)
            row = _mm512_mul_ps(row, load_tail(scales, exist));
        if (a->accumulate)
            row = _mm512_add_ps(load_tail(scores, exist), row);
        store_tail(scores, exist, row);
    }
}

/* The scores of the keys j .. j + 15 for some rows from i on. */
ALWAYS_INLINE void dot_1_row(const qkv_dot_args *a, int64_t i, int64_t j, const int type)
{
    __m512 acc[LANES];
    prefetch_keys(a, i, j, LANES, type);
    partial_sums(a, i, j, 1, 8, type, acc);
    partial_sums(a, i, j + 8, 1, 8, type, acc + 8);
    store_scores(a, i, j, 1, type, acc);
}

ALWAYS_INLINE void dot_rows(const qkv_dot_args *a, int64_t i, int64_t j, const int rows,
                            const int type)
{
    for (const int64_t end = min_i64(j + KEYS, a->kv_len); j < end; j += LANES / rows) {
        __m512 acc[LANES];
        prefetch_keys(a, i, j, LANES / rows, type);
        partial_sums(a, i, j, rows, LANES / rows, type, acc);
        store_scores(a, i, j, rows, type, acc);
    }
}

typedef void dot_step(const qkv_dot_args *a, int64_t i, int64_t j);
typedef struct dot_steps {
    dot_step *four, *two, *one;
} dot_steps;

/* Keys outside, rows inside: 16 keys stay in the first-level cache meanwhile. */
static void dot(const qkv_dot_args *a, const dot_steps *s)
{
    for (int64_t j = 0; j < a->kv_len; j += KEYS)
        for (int64_t i = 0; i < a->rows; i += 4)
            (a->rows - i >= 3 ? s->four : a->rows - i == 2 ? s->two : s->one)(a, i, j);
}

/* The functions of a type. */
#define DOT(t, type)                                                                               \
    static void dot_4_rows_##t(const qkv_dot_args *a, int64_t i, int64_t j)                        \
    {                                                                                              \
        dot_rows(a, i, j, 4, type);                                                                \
    }                                                                                              \
    static void dot_2_rows_##t(const qkv_dot_args *a, int64_t i, int64_t j)                        \
    {                                                                                              \
        dot_rows(a, i, j, 2, type);                                                                \
    }                                                                                              \
    static void dot_1_row_##t(const qkv_dot_args *a, int64_t i, int64_t j)                         \
    {                                                                                              \
        dot_1_row(a, i, j, type);                                                                  \
    }                                                                                              \
    void qkv_dot_##t##_avx512(const qkv_dot_args *a)                                               \
    {                                                                                              \
        static const dot_steps steps = {dot_4_rows_##t, dot_2_rows_##t, dot_1_row_##t};            \
        dot(a, &steps);                                                                            \
    }
DOT(f32, KV_F32)
DOT(f16, KV_F16)
DOT(bf16, KV_BF16)
DOT(i8, KV_I8)
DOT(f8_e4m3, KV_E4M3)
DOT(f8_e5m2, KV_E5M2)
DOT(q8_0, KV_Q8_0)
DOT(q4_0, KV_Q4_0)
