/* SPDX-License-Identifier: MIT */
/*
 * Step 2, scores: scores[i][j] = queries[i] . keys[j], keys in any type, with
 * the lanes along d. A key's vector is widened once for up to four queries.
 *
 * A block of 16 scores (4 rows x 4 keys, 2 x 8 or 1 x 16) has an accumulator
 * each, 16 of 32 registers; the sums across lanes are then made for all 16 at
 * once by a transposing tree of 15 additions, which yields the 16 scores in
 * one vector. Four such blocks are put in order together, so that 16 scores of
 * a row are stored at once. Every score is formed alike, one chain over d and
 * the same tree, so that its bits do not depend on its place; a block that
 * reaches past the end repeats the last key and drops the result.
 *
 * The queries are copied first, up to 8 rows of 512 elements: cache lines of
 * their own, zeros behind the last element, which need no mask, and the order
 * of elements in which a type's keys are widened most cheaply.
 *
 * |error| <= (ceil(n/16) + 4) u sum |q_d k_d|, and u times as much again for
 * each 512 elements after the first.
 *
 * Cycles a key of 128 elements, 4 rows, in the second-level cache (Emerald Rapids,
 * best of many; in brackets what the two ports need for multiply-adds, widening and
 * the tree, of which the multiply-adds are 16 and the tree 6): f32 27 (22), bf16 30
 * (26), f16 35 (30), i8 35 (30), e5m2 41 (38), q4_0 44 (38), q8_0 45 (40), e4m3 46 (40).
 * To find the scales of a block's keys beforehand, rather than in the loop, takes 3
 * cycles more; to ask for the values during the dot product and for the next keys
 * during the sum makes both slower.
 */
#include "kv_avx512.h"

#include "internal.h"

enum {
    KEYS = LANES, /* of one pass over the rows */
    ROWS = 8,     /* whose queries are copied at a time */
    CHUNK = 512,  /* elements of a query that are copied at a time */
    RUN = 256     /* keys that these rows go through together */
};

/* Some rows, copied, against 16 keys. */
typedef struct dot_part {
    const float *query;       /* [ROWS][CHUNK] */
    const void *const *key;   /* [KEYS] */
    const void *const *ahead; /* [KEYS]: to be asked for meanwhile */
    int64_t first, n; /* the elements of a key: of the copied ones the first, and how many */
} dot_part;

/* One step along d for all keys and queries. */
ALWAYS_INLINE void add_step(const dot_part *p, const char *const *key, const int queries,
                            const int keys, int64_t d, int64_t n, const int type, __m512 *acc)
{
    UNROLL
    for (int u = 0; u < keys; u++) {
        __m512 k[2];
        load_step(key[u], p->first + d, n, type, k);
        UNROLL
        for (int r = 0; r < queries; r++) {
            const float *query = p->query + r * CHUNK + d;
            __m512 *sum = &acc[r * keys + u];
            *sum = _mm512_fmadd_ps(_mm512_load_ps(query), k[0], *sum);
            *sum = _mm512_fmadd_ps(_mm512_load_ps(query + LANES), k[1], *sum);
        }
    }
}

/* acc[r * keys + u]: 16 partial sums of query r and key from + u. */
ALWAYS_INLINE void partial_sums(const dot_part *p, const int queries, const int keys, int64_t from,
                                const int type, __m512 *acc)
{
    const char *key[8];
    UNROLL
    for (int u = 0; u < keys; u++)
        key[u] = p->key[from + u];
    UNROLL
    for (int u = 0; u < queries * keys; u++)
        acc[u] = _mm512_setzero_ps();

    int64_t d = 0;
    for (; d + STEP <= p->n; d += STEP) {
        UNROLL
        for (int u = 0; u < keys; u++)
            prefetch(p->ahead[from + u], row_bytes(p->first + d, type), row_bytes(STEP, type));
        add_step(p, key, queries, keys, d, STEP, type, acc);
    }
    if (d < p->n)
        add_step(p, key, queries, keys, d, p->n - d, type, acc);
}

/* 128-bit lane i of x[j] becomes lane j of x[i]. */
ALWAYS_INLINE void transpose_lanes(__m512 x[4])
{
    const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const __m512 d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

/* scores[r]: the 16 scores of query r. */
ALWAYS_INLINE void scores_of(const dot_part *p, const int queries, const int type, __m512 *scores)
{
    __m512 acc[LANES];
    if (queries == 1) {
        partial_sums(p, 1, 8, 0, type, acc);
        partial_sums(p, 1, 8, 8, type, acc + 8);
        scores[0] = transpose_sum(acc);
    } else if (queries == 2) {
        __m512 sums[2];
        for (int g = 0; g < 2; g++) {
            partial_sums(p, 2, 8, 8 * g, type, acc);
            sums[g] = transpose_sum(acc);
        }
        scores[0] = _mm512_shuffle_f32x4(sums[0], sums[1], 0x44);
        scores[1] = _mm512_shuffle_f32x4(sums[0], sums[1], 0xee);
    } else {
        for (int g = 0; g < 4; g++) {
            partial_sums(p, 4, 4, 4 * g, type, acc);
            scores[g] = transpose_sum(acc);
        }
        transpose_lanes(scores);
    }
}

typedef void dot_scores(const dot_part *p, __m512 *scores);
typedef struct dot_type {
    dot_scores *four, *two, *one;
    int type;
} dot_type;

/* Rows i .. of at most ROWS, elements from p->first on, as they are multiplied: bf16 in pairs. */
static void copy_queries(const qkv_dot_args *a, int64_t i, const dot_part *p, int type, float *copy)
{
    const int64_t rows = min_i64(a->rows - i, ROWS);
    if (rows % 4 == 3) /* four take part */
        memset(copy + rows * CHUNK, 0, CHUNK * sizeof *copy);
    for (int64_t r = 0; r < rows; r++) {
        const float *query = a->queries + (i + r) * a->queries_stride + p->first;
        for (int64_t d = 0; d < p->n; d += STEP) {
            __m512 q0 = load_tail(query + d, lanes_below(p->n - d));
            __m512 q1 = load_tail(query + d + LANES, lanes_below(p->n - d - LANES));
            if (type == KV_BF16) {
                const __m512 even = unzip(q0, q1, 0);
                q1 = unzip(q0, q1, 1);
                q0 = even;
            }
            _mm512_store_ps(copy + r * CHUNK + d, q0);
            _mm512_store_ps(copy + r * CHUNK + d + LANES, q1);
        }
    }
}

/* Joins the scores of row i and keys from j on to what is there. */
static void store_scores(const qkv_dot_args *a, int64_t i, int64_t j, bool more, int type,
                         __m512 scales, __m512 scores)
{
    const __mmask16 exist = lanes_below(a->kv_len - j);
    float *to = a->scores + i * a->scores_stride + j;
    if (type == KV_E4M3)
        scores = _mm512_mul_ps(scores, _mm512_set1_ps(kv_unit(type)));
    if (type == KV_I8)
        scores = _mm512_mul_ps(scores, scales);
    if (more)
        scores = _mm512_add_ps(load_tail(to, exist), scores);
    store_tail(to, exist, scores);
}

/* Where the keys j .. j + 15 lie, the last one repeated; 'keys' if they are not listed yet. */
static const void *const *list_keys(const qkv_dot_args *a, int64_t j, const void **keys)
{
    if (a->keys_at && j + KEYS <= a->kv_len)
        return a->keys_at + j;
    for (int64_t u = 0; u < KEYS; u++) {
        const int64_t k = min_i64(j + u, a->kv_len - 1);
        keys[u] = a->keys_at ? a->keys_at[k] : (const char *)a->keys + k * a->keys_stride;
    }
    return keys;
}

/*
 * Rows i .. i + 7 against the keys begin .. end - 1. While 16 keys are used the next
 * are asked for.
 */
static void dot_run(const qkv_dot_args *a, int64_t i, int64_t begin, int64_t end, dot_part *p,
                    const dot_type *t, const float *copy)
{
    const void *lists[2][KEYS];
    const int64_t rows = min_i64(a->rows - i, ROWS);
    const void *const *next = list_keys(a, begin, lists[0]);
    for (int64_t j = begin; j < end; j += KEYS) {
        const __m512 scales = a->key_scales ? load_strided(a->key_scales + j * a->key_scales_stride,
                                                           a->key_scales_stride, a->kv_len - j)
                                            : _mm512_setzero_ps();
        p->key = next;
        if (j + KEYS < a->kv_len)
            next = list_keys(a, j + KEYS, lists[(j - begin) / KEYS % 2 == 0]);
        p->ahead = next;
        for (int64_t r = 0; r < rows; r += 4) {
            __m512 scores[4];
            const int64_t n = min_i64(rows - r, 4);
            p->query = copy + r * CHUNK;
            (n > 2 ? t->four : n == 2 ? t->two : t->one)(p, scores);
            for (int64_t s = 0; s < n; s++)
                store_scores(a, i + r + s, j, a->accumulate || p->first > 0, t->type, scales,
                             scores[s]);
            p->ahead = p->key; /* of other rows the others are on their way */
        }
    }
}

static void dot(const qkv_dot_args *a, const dot_type *t)
{
    _Alignas(64) float copy[ROWS * CHUNK];
    for (int64_t first = 0; first < a->head_dim || first == 0; first += CHUNK) {
        dot_part p = {.first = first, .n = min_i64(a->head_dim - first, CHUNK)};
        for (int64_t j = 0; j < a->kv_len; j += RUN)
            for (int64_t i = 0; i < a->rows; i += ROWS) {
                copy_queries(a, i, &p, t->type, copy);
                dot_run(a, i, j, min_i64(j + RUN, a->kv_len), &p, t, copy);
            }
    }
}

/* The functions of a type. */
#define DOT(t, type)                                                                               \
    static void four_##t(const dot_part *p, __m512 *scores)                                        \
    {                                                                                              \
        scores_of(p, 4, type, scores);                                                             \
    }                                                                                              \
    static void two_##t(const dot_part *p, __m512 *scores)                                         \
    {                                                                                              \
        scores_of(p, 2, type, scores);                                                             \
    }                                                                                              \
    static void one_##t(const dot_part *p, __m512 *scores)                                         \
    {                                                                                              \
        scores_of(p, 1, type, scores);                                                             \
    }                                                                                              \
    void qkv_dot_##t##_avx512(const qkv_dot_args *a)                                               \
    {                                                                                              \
        static const dot_type functions = {four_##t, two_##t, one_##t, type};                      \
        dot(a, &functions);                                                                        \
    }
DOT(f32, KV_F32)
DOT(f16, KV_F16)
DOT(bf16, KV_BF16)
DOT(i8, KV_I8)
DOT(f8_e4m3, KV_E4M3)
DOT(f8_e5m2, KV_E5M2)
DOT(q8_0, KV_Q8_0)
DOT(q4_0, KV_Q4_0)
