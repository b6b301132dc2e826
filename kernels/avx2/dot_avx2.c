/* SPDX-License-Identifier: MIT */
/*
 * scores[i][j] = queries[i] . keys[j], keys in any type of one element each.
 *
 * The lanes run along head_dim. Registers: 12 accumulators for 4 queries x 3
 * keys (or 8, for 2 x 4 and 1 x 8), the keys' vectors and one of a query. In
 * the first a key's vector is loaded and widened once for four queries: 12
 * multiply-adds on 4 loads of queries and 3 of keys, 6 cycles a step where
 * two multiply-adds start a cycle, for 19 instructions; conversions run on
 * ports that multiply-adds leave free. 4 x 2 takes 14 for 8 multiply-adds,
 * and was a tenth slower with another thread on the same core.
 *
 * Every score has one accumulator and the same tree across its lanes, ((0+4)+(2+6))
 * + ((1+5)+(3+7)), so its bits do not depend on its place. What happens between two
 * triples of keys is not hidden under multiply-adds: instructions are what a core
 * shared by two threads runs out of. Four rows' accumulators are therefore only
 * brought down to pairs there, and 8 keys' pairs become scores at once; score by
 * score, a call on 128 columns took a tenth longer. Keys run in the outer loop,
 * 24 at a time: each is fetched once and served from the first-level cache to
 * further queries.
 */
#include "kv_avx2.h"

enum { KEYS = 24, ACCS = 12, LISTED = 480 /* keys, a multiple of KEYS */ };

/* Where the vectors of some rows and keys begin. */
typedef struct places {
    const float *queries[4];
    const char *keys[8];
} places;

/* acc[r * n_keys + k] = queries[r] * keys[k] for the 'rest' elements from d on. */
QKV_INLINE void multiply_part(const places *p, int64_t d, int64_t rest, const int n_rows,
                              const int n_keys, const int type, __m256 acc[ACCS])
{
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        const __m256 key = load_part_8(p->keys[k] + d * kv_size(type), rest, type);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            acc[r * n_keys + k] = _mm256_mul_ps(load_tail(p->queries[r] + d, rest), key);
    }
}

/*
 * acc[r * n_keys + k] = the lane sums of queries[r] . keys[k]. A part of a
 * vector at the end comes first, when no accumulator is in a register yet.
 */
QKV_INLINE void lane_sums(const places *p, int64_t head_dim, const int n_rows, const int n_keys,
                          const int type, __m256 acc[ACCS])
{
    const int64_t whole = head_dim & -(int64_t)LANES;
    if (whole < head_dim)
        multiply_part(p, whole, head_dim - whole, n_rows, n_keys, type, acc);
    else
        QKV_UNROLL
    for (int i = 0; i < n_rows * n_keys; i++)
        acc[i] = _mm256_setzero_ps();

    for (int64_t d = 0; d < whole; d += LANES) {
        __m256 keys[8];
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k] = load_8(p->keys[k] + d * kv_size(type), type);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            __m256 query = _mm256_loadu_ps(p->queries[r] + d);
            QKV_IN_REGISTER(query); /* GCC would load it once a key */
            QKV_UNROLL
            for (int k = 0; k < n_keys; k++)
                acc[r * n_keys + k] = _mm256_fmadd_ps(query, keys[k], acc[r * n_keys + k]);
        }
    }
}

QKV_INLINE places places_of(const qkv_dot_args *a, int64_t row, int64_t key, const int n_rows,
                            const int n_keys)
{
    places p;
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        p.queries[r] = a->queries + (row + r) * a->queries_stride;
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        p.keys[k] = a->keys_at[key + k];
    return p;
}

QKV_INLINE bool has_factor(const int type)
{
    return kv_unit(type) != 1.0f;
}

/* Scores in the unit of the type. */
QKV_INLINE __m256 with_factor(__m256 sums, const int type)
{
    return has_factor(type) ? _mm256_mul_ps(sums, _mm256_set1_ps(kv_unit(type))) : sums;
}

QKV_INLINE void store_1(const qkv_dot_args *a, int64_t row, int64_t key, const int type, float sum)
{
    float *score = a->scores + row * a->scores_stride + key;
    if (has_factor(type))
        sum *= kv_unit(type);
    *score = a->accumulate ? *score + sum : sum;
}

/* 4 rows against n_keys keys: their lane sums, each key's down to a vector. */
QKV_INLINE void sum_pairs(const qkv_dot_args *a, places *p, int64_t key, const int n_keys,
                          const int type, float *pairs)
{
    __m256 acc[ACCS];
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        p->keys[k] = a->keys_at[key + k];
    prefetch_keys(a, key, n_keys, a->head_dim * kv_size(type));
    lane_sums(p, a->head_dim, 4, n_keys, type, acc);
    store_pairs(pairs, acc, n_keys);
}

/* 4 rows, 3 keys at a time, and the last ones one by one. */
QKV_INLINE void dot_4_rows(const qkv_dot_args *a, int64_t row, int64_t key, int64_t end,
                           const int type)
{
    _Alignas(32) float pairs[KEYS * LANES];
    places p = places_of(a, row, key, 4, 1);
    for (int64_t n; key < end; key += n) {
        int64_t j = 0;
        n = end - key < KEYS ? end - key : KEYS;
        for (; j + 3 <= n; j += 3)
            sum_pairs(a, &p, key + j, 3, type, pairs + j * LANES);
        for (; j < n; j++)
            sum_pairs(a, &p, key + j, 1, type, pairs + j * LANES);
        clear_pairs(pairs, n);
        for (j = 0; j < n; j += LANES) {
            __m256 scores[4];
            scores_of_pairs(pairs + j * LANES, scores);
            QKV_UNROLL
            for (int r = 0; r < 4; r++)
                store_scores(a, row + r, key + j, n - j, with_factor(scores[r], type));
        }
    }
}

/* 1 or 2 rows against 8 or 4 keys at a time. */
QKV_INLINE void dot_few_rows(const qkv_dot_args *a, int64_t row, int64_t key, int64_t end,
                             const int n_rows, const int type)
{
    const int n_keys = 8 / n_rows;
    for (; key + n_keys <= end; key += n_keys) {
        __m256 acc[ACCS], x[8];
        const places p = places_of(a, row, key, n_rows, n_keys);
        prefetch_keys(a, key, n_keys, a->head_dim * kv_size(type));
        lane_sums(&p, a->head_dim, n_rows, n_keys, type, acc);
        QKV_UNROLL
        for (int i = 0; i < 8; i++)
            x[i % 4 * 2 + i / 4] = acc[i];
        const __m256 sums = with_factor(hsum8(x), type);
        if (n_rows == 2)
            store_scores_2(a, row, key, sums);
        else
            store_scores(a, row, key, LANES, sums);
    }
}

/* One row, one key at a time. */
QKV_INLINE void dot_rest(const qkv_dot_args *a, int64_t row, int64_t key, int64_t end,
                         const int type)
{
    for (; key < end; key++) {
        __m256 acc[ACCS];
        const places p = places_of(a, row, key, 1, 1);
        lane_sums(&p, a->head_dim, 1, 1, type, acc);
        store_1(a, row, key, type, hsum1(acc[0]));
    }
}

/*
 * The functions of a type, each by itself: inlined into one, GCC runs out of
 * registers.
 */
#define DOT_STEPS(t, type)                                                                         \
    static QKV_NOINLINE void dot_4_rows_##t(const qkv_dot_args *a, int64_t row, int64_t key,       \
                                            int64_t end)                                           \
    {                                                                                              \
        dot_4_rows(a, row, key, end, type);                                                        \
    }                                                                                              \
    static QKV_NOINLINE void dot_2_rows_##t(const qkv_dot_args *a, int64_t row, int64_t key,       \
                                            int64_t end)                                           \
    {                                                                                              \
        dot_few_rows(a, row, key, end, 2, type);                                                   \
    }                                                                                              \
    static QKV_NOINLINE void dot_1_row_##t(const qkv_dot_args *a, int64_t row, int64_t key,        \
                                           int64_t end)                                            \
    {                                                                                              \
        dot_few_rows(a, row, key, end, 1, type);                                                   \
    }                                                                                              \
    static QKV_NOINLINE void dot_rest_##t(const qkv_dot_args *a, int64_t row, int64_t key,         \
                                          int64_t end)                                             \
    {                                                                                              \
        dot_rest(a, row, key, end, type);                                                          \
    }                                                                                              \
    static const dot_steps steps_##t = {dot_4_rows_##t, dot_2_rows_##t, dot_1_row_##t,             \
                                        dot_rest_##t};
#define DOT(name, t, type)                                                                         \
    DOT_STEPS(t, type)                                                                             \
    void name(const qkv_dot_args *a)                                                               \
    {                                                                                              \
        dot(a, &steps_##t);                                                                        \
    }

typedef void dot_step(const qkv_dot_args *a, int64_t row, int64_t key, int64_t end);
typedef struct dot_steps {
    dot_step *four, *two, *one, *rest;
} dot_steps;

/* All rows against the keys from 'key' to 'end'. */
static void dot_keys(const qkv_dot_args *a, int64_t key, int64_t end, const dot_steps *steps)
{
    const int64_t n = end - key;
    int64_t row = 0;
    for (; row + 4 <= a->rows; row += 4)
        steps->four(a, row, key, end);
    if (row + 2 <= a->rows) {
        steps->two(a, row, key, end);
        for (int64_t r = row; n % 4 && r < row + 2; r++)
            steps->rest(a, r, end - n % 4, end);
        row += 2;
    }
    if (row < a->rows) {
        steps->one(a, row, key, end);
        steps->rest(a, row, end - n % 8, end);
    }
}

static void dot_listed(const qkv_dot_args *a, const dot_steps *steps)
{
    const bool one_step = a->rows <= 2 || a->rows == 4;
    const int64_t block = one_step ? a->kv_len : KEYS;
    for (int64_t key = 0; key < a->kv_len; key += block)
        dot_keys(a, key, key + block < a->kv_len ? key + block : a->kv_len, steps);
}

/* Keys that lie 'keys_stride' apart are listed first, some at a time. */
static void dot(const qkv_dot_args *a, const dot_steps *steps)
{
    const void *keys[LISTED + 7];
    if (a->keys_at) {
        dot_listed(a, steps);
        return;
    }
    qkv_dot_args b = *a;
    b.keys_at = keys;
    for (int64_t key = 0; key < a->kv_len; key += LISTED, b.scores += LISTED) {
        b.kv_len = a->kv_len - key < LISTED ? a->kv_len - key : LISTED;
        list_rows((const char *)a->keys + key * a->keys_stride, a->keys_stride, b.kv_len, keys);
        dot_listed(&b, steps);
    }
}

DOT(qkv_dot_f32_avx2, f32, KV_F32)
DOT(qkv_dot_f16_avx2, f16, KV_F16)
DOT(qkv_dot_bf16_avx2, bf16, KV_BF16)
DOT(qkv_dot_f8_e5m2_avx2, e5m2, KV_E5M2)
DOT_STEPS(half, KV_HALF)

enum { HALVES = 8192 }; /* of keys on their way, in half of the first-level cache */

void qkv_dot_f8_e4m3_avx2(const qkv_dot_args *a)
{
    _Alignas(32) uint16_t halves[HALVES];
    const void *keys[HALVES / 16 + 7];
    const int64_t stride = (a->head_dim + 15) / 16 * 16, fit = HALVES / (stride + (stride == 0));
    const int64_t block = fit >= KEYS ? fit / KEYS * KEYS : fit;
    qkv_dot_args b = *a;
    b.keys_at = NULL;
    b.scattered = false;
    b.keys = halves;
    b.keys_stride = stride * (int64_t)sizeof *halves;
    for (int64_t key = 0; key < a->kv_len; key += block, b.scores += block) {
        b.kv_len = a->kv_len - key < block ? a->kv_len - key : block;
        if (!a->keys_at)
            list_rows((const char *)a->keys + key * a->keys_stride, a->keys_stride, b.kv_len, keys);
        halves_of_e4m3(a->keys_at ? a->keys_at + key : keys, b.kv_len, 0, a->head_dim, halves,
                       stride);
        dot(&b, &steps_half);
    }
}
