/* SPDX-License-Identifier: MIT */
/*
 * scores[i][j] = queries[i] . keys[j] for keys of integers, by integers.
 *
 * A row of queries is rounded to 16 bits, e = [q * 32767 / max|q|]: this
 * changes a score by at most max|q| / 65534 * sum |k|, which is 2^-16 (1 +
 * 2^-15) max|q| sum |k|. Sums of products are exact then: VPMADDWD adds two
 * products of a 16-bit query and a key of at most 2^7, up to 2^23, and 256
 * such sums, a head_dim of 4096, still fit 32 bits. A row whose largest
 * element is infinite, a NaN or below 2^-100 takes f32 instead.
 *
 * i8: 32-bit sums over the whole row, then one conversion. Blocks: 32-bit
 * sums of 32 elements, which become f32 exactly up to 2^24 and with an error
 * of u beyond, times the block's scale. In 32 elements of a key and four
 * rows, i8 takes 18 instructions, q8_0 24 and q4_0 30, where f32 takes 24
 * and converts on top. The rest is as in dot_avx2.c, 4 x 2 accumulators.
 */
#include <float.h>

#include "kv_avx2.h"

enum { ROWS = 4, KEYS = 24 };

/* Four rows as integers; scale 0: the row is taken in f32. */
typedef struct int_rows {
    int16_t e[ROWS][QKV_DOT_BLOCK]; /* filled up to a multiple of 32 with 0 */
    float scale[ROWS];
} int_rows;

static float largest(const float *x, int64_t n)
{
    __m256i max = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t d = 0; d < n; d += LANES) {
        const __m256 part = n - d >= LANES ? _mm256_loadu_ps(x + d) : load_tail(x + d, n - d);
        max = _mm256_max_epi32(max, _mm256_and_si256(_mm256_castps_si256(part), magnitude));
    }
    /* As integers, so that a NaN is the largest. */
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

/* The 16-bit integers of one row, whose scale is returned. */
static float round_row(const float *x, int64_t n, int16_t *e)
{
    const float max = largest(x, n);
    const bool usable = max >= 0x1p-100f && max <= FLT_MAX;
    const __m256 inverse = _mm256_set1_ps(usable ? 32767.0f / max : 0.0f);
    for (int64_t d = 0; d < n; d += 2 * LANES) {
        const int64_t rest = n - d;
        const __m256 a = rest >= LANES ? _mm256_loadu_ps(x + d) : load_tail(x + d, rest);
        const __m256 b = rest >= 2 * LANES ? _mm256_loadu_ps(x + d + LANES)
                         : rest > LANES    ? load_tail(x + d + LANES, rest - LANES)
                                           : _mm256_setzero_ps();
        const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)),
                                                  _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
        _mm256_storeu_si256((__m256i *)(void *)(e + d), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    if (!usable)
        for (int64_t d = 0; d < n; d++)
            e[d] = 0;
    return usable ? max / 32767.0f : 0.0f;
}

/* The integers of 16 elements of a key as 16 bits, from element d on. */
QKV_INLINE __m256i load_16(const char *key, int64_t d, const int type)
{
    const char *block = kv_block(key, d, type);
    if (type == KV_I8)
        return _mm256_cvtepi8_epi16(load_128(key + d));
    if (type == KV_Q8_0)
        return _mm256_cvtepi8_epi16(load_128(block + 2 + d % QKV_KV_BLOCK));
    return _mm256_cvtepi8_epi16(d % QKV_KV_BLOCK ? nibbles(block, 1) : nibbles(block, 0));
}

QKV_INLINE __m256i row_16(const int16_t *e)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)e);
}

/* The last 1 to 15 elements of a row of i8. */
static QKV_NOINLINE __m256i load_part_16(const char *key, int64_t n)
{
    char copy[16] = {0};
    for (int64_t i = 0; i < n; i++)
        copy[i] = key[i];
    return _mm256_cvtepi8_epi16(load_128(copy));
}

/* acc[r * n_keys + k]: lane sums of i8 rows, without any scale. */
QKV_INLINE void sums_i8(const int_rows *rows, int row, const char *const *keys, int64_t head_dim,
                        const int n_rows, const int n_keys, __m256 acc[8])
{
    const int64_t whole = head_dim & -(int64_t)16;
    __m256i sums[8];
    const int16_t *e[4];
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        e[r] = rows->e[row + r];
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        __m256i key = _mm256_setzero_si256();
        if (whole < head_dim)
            key = load_part_16(keys[k] + whole, head_dim - whole);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            sums[r * n_keys + k] =
                whole < head_dim ? _mm256_madd_epi16(row_16(e[r] + whole), key) : key;
    }
    for (int64_t d = 0; d < whole; d += 16) {
        __m256i key[8];
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            key[k] = load_16(keys[k], d, KV_I8);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            QKV_UNROLL
            for (int k = 0; k < n_keys; k++)
                sums[r * n_keys + k] = _mm256_add_epi32(
                    sums[r * n_keys + k], _mm256_madd_epi16(key[k], row_16(rows->e[row + r] + d)));
        }
    }
    QKV_UNROLL
    for (int i = 0; i < n_rows * n_keys; i++)
        acc[i] = _mm256_cvtepi32_ps(sums[i]);
}

/* acc[r * n_keys + k]: lane sums of rows of blocks, times the blocks' scales. */
QKV_INLINE void sums_blocks(const int_rows *rows, int row, const char *const *keys,
                            int64_t head_dim, const int n_rows, const int n_keys, const int type,
                            __m256 acc[8])
{
    const int64_t bytes = type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES;
    QKV_UNROLL
    for (int i = 0; i < n_rows * n_keys; i++)
        acc[i] = _mm256_setzero_ps();
    int64_t at = 0;
    for (int64_t d = 0; d < head_dim; d += QKV_KV_BLOCK, at += bytes) {
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++) {
            const char *block = keys[k] + at;
            const __m256i k0 = load_16(block, 0, type), k1 = load_16(block, 16, type);
            const __m256 scale = block_scale(block);
            QKV_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const int16_t *e = rows->e[row + r] + d;
                const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(k0, row_16(e)),
                                                     _mm256_madd_epi16(k1, row_16(e + 16)));
                const int i = r * n_keys + k;
                acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[i]);
            }
        }
    }
}

QKV_INLINE const char *key_of(const qkv_dot_args *a, int64_t key)
{
    return a->keys_at ? a->keys_at[key] : (const char *)a->keys + key * a->keys_stride;
}

/* A score in f32, for a row that is not fit for integers. */
static QKV_NOINLINE float exact_score(const qkv_dot_args *a, int64_t row, int64_t key, int type)
{
    const float *query = a->queries + row * a->queries_stride;
    const char *k = key_of(a, key);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        const int64_t rest = a->head_dim - d;
        const __m256 q = rest >= LANES ? _mm256_loadu_ps(query + d) : load_tail(query + d, rest);
        __m256 value;
        if (type == KV_I8) {
            value = rest >= LANES ? load_8(k + d, type) : load_part_8(k + d, rest, type);
        } else {
            const char *block = kv_block(k, d, type);
            value = _mm256_mul_ps(block_8(block, d % QKV_KV_BLOCK, type), block_scale(block));
        }
        acc = _mm256_fmadd_ps(q, value, acc);
    }
    return hsum1(acc);
}

/* The scales of up to 8 keys of i8. */
QKV_INLINE __m256 key_scales(const qkv_dot_args *a, int64_t key, int64_t n)
{
    const float *at = a->key_scales + key * a->key_scales_stride;
    if (a->key_scales_stride == 1)
        return n < LANES ? load_tail(at, n) : _mm256_loadu_ps(at);
    float scales[LANES] = {0};
    for (int64_t k = 0; k < n && k < LANES; k++)
        scales[k] = at[k * a->key_scales_stride];
    return _mm256_loadu_ps(scales);
}

/* Up to 8 sums of one row, multiplied by the scales of the row and the keys. */
QKV_INLINE void store_8(const qkv_dot_args *a, float scale, int64_t row, int64_t key, int64_t n,
                        const int type, __m256 sums)
{
    sums = _mm256_mul_ps(sums, _mm256_set1_ps(scale));
    if (type == KV_I8)
        sums = _mm256_mul_ps(sums, key_scales(a, key, n));
    store_scores(a, row, key, n, sums);
}

/* 4 sums of each of two rows, likewise. */
QKV_INLINE void store_4_4(const qkv_dot_args *a, const float *scale, int64_t row, int64_t key,
                          const int type, __m256 sums)
{
    sums = _mm256_mul_ps(sums, _mm256_set_m128(_mm_set1_ps(scale[1]), _mm_set1_ps(scale[0])));
    if (type == KV_I8) {
        const __m256 keys = key_scales(a, key, 4);
        sums = _mm256_mul_ps(sums, _mm256_permute2f128_ps(keys, keys, 0));
    }
    store_scores_2(a, row, key, sums);
}

QKV_INLINE void store_1(const qkv_dot_args *a, float scale, int64_t row, int64_t key,
                        const int type, float sum)
{
    float *score = a->scores + row * a->scores_stride + key;
    sum *= scale;
    if (type == KV_I8)
        sum *= a->key_scales[key * a->key_scales_stride];
    *score = a->accumulate ? *score + sum : sum;
}

/* acc[r * n_keys + k]: the sums of some rows and keys, a lane's each. */
QKV_INLINE void lane_sums(const qkv_dot_args *a, const int_rows *rows, int row, int64_t key,
                          const int n_rows, const int n_keys, const int type, __m256 acc[8])
{
    const char *keys[8];
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        keys[k] = key_of(a, key + k);
    prefetch_keys(a, key, n_keys,
                  type == KV_I8 ? a->head_dim
                                : a->head_dim / QKV_KV_BLOCK *
                                      (type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES));
    if (type == KV_I8)
        sums_i8(rows, row, keys, a->head_dim, n_rows, n_keys, acc);
    else
        sums_blocks(rows, row, keys, a->head_dim, n_rows, n_keys, type, acc);
}

QKV_INLINE void sum_pairs(const qkv_dot_args *a, const int_rows *rows, int64_t key,
                          const int n_keys, const int type, float *pairs)
{
    __m256 acc[8];
    lane_sums(a, rows, 0, key, 4, n_keys, type, acc);
    store_pairs(pairs, acc, n_keys);
}

/* 4 rows against at most KEYS keys; see dot_avx2.c. */
QKV_INLINE void dot_4_rows(const qkv_dot_args *a, const int_rows *rows, int64_t first, int64_t key,
                           int64_t end, const int type)
{
    _Alignas(32) float pairs[KEYS * LANES];
    const int64_t n = end - key;
    int64_t j = 0;
    for (; j + 2 <= n; j += 2)
        sum_pairs(a, rows, key + j, 2, type, pairs + j * LANES);
    if (j < n)
        sum_pairs(a, rows, key + j, 1, type, pairs + j * LANES);
    clear_pairs(pairs, n);
    for (j = 0; j < n; j += LANES) {
        __m256 scores[4];
        scores_of_pairs(pairs + j * LANES, scores);
        QKV_UNROLL
        for (int r = 0; r < 4; r++)
            store_8(a, rows->scale[r], first + r, key + j, n - j, type, scores[r]);
    }
}

/* 1 or 2 rows of 'rows' against 8 or 4 keys at a time. */
QKV_INLINE void dot_few_rows(const qkv_dot_args *a, const int_rows *rows, int64_t first, int row,
                             int64_t key, int64_t end, const int n_rows, const int type)
{
    const int n_keys = 8 / n_rows;
    for (; key + n_keys <= end; key += n_keys) {
        __m256 acc[8], x[8];
        lane_sums(a, rows, row, key, n_rows, n_keys, type, acc);
        QKV_UNROLL
        for (int i = 0; i < 8; i++)
            x[i % 4 * 2 + i / 4] = acc[i];
        if (n_rows == 2)
            store_4_4(a, rows->scale + row, first + row, key, type, hsum8(x));
        else
            store_8(a, rows->scale[row], first + row, key, LANES, type, hsum8(x));
    }
}

/* One row, one key at a time. */
QKV_INLINE void dot_rest(const qkv_dot_args *a, const int_rows *rows, int64_t first, int row,
                         int64_t key, int64_t end, const int type)
{
    for (; key < end; key++) {
        __m256 acc[8];
        lane_sums(a, rows, row, key, 1, 1, type, acc);
        store_1(a, rows->scale[row], first + row, key, type, hsum1(acc[0]));
    }
}

/* The scores of a row that is not fit for integers, which gave 0 for it. */
static QKV_NOINLINE void dot_exact(const qkv_dot_args *a, int64_t row, int type)
{
    for (int64_t key = 0; key < a->kv_len; key++)
        store_1(a, 1.0f, row, key, type, exact_score(a, row, key, type));
}

typedef void int_step(const qkv_dot_args *a, const int_rows *rows, int64_t first, int row,
                      int64_t key, int64_t end);
typedef struct int_steps {
    int_step *four, *two, *one, *rest;
    int type;
} int_steps;

/* 'n' rows, up to 4, against the keys from 'key' to 'end'. */
static void dot_rows(const qkv_dot_args *a, const int_rows *rows, int64_t first, int n, int64_t key,
                     int64_t end, const int_steps *s)
{
    const int64_t keys = end - key;
    int row = 0;
    if (n == 4) {
        s->four(a, rows, first, 0, key, end);
        row = 4;
    }
    if (row + 2 <= n) {
        s->two(a, rows, first, row, key, end);
        s->rest(a, rows, first, row, end - keys % 4, end);
        s->rest(a, rows, first, row + 1, end - keys % 4, end);
        row += 2;
    }
    if (row < n) {
        s->one(a, rows, first, row, key, end);
        s->rest(a, rows, first, row, end - keys % 8, end);
    }
}

/* Four rows at a time go over all keys, 24 keys staying in the first-level
 * cache for three rows, which take two steps. */
static void dot(const qkv_dot_args *a, const int_steps *s)
{
    int_rows rows;
    for (int64_t first = 0; first < a->rows; first += ROWS) {
        const int n = a->rows - first < ROWS ? (int)(a->rows - first) : ROWS;
        for (int r = 0; r < n; r++)
            rows.scale[r] =
                round_row(a->queries + (first + r) * a->queries_stride, a->head_dim, rows.e[r]);
        for (int64_t key = 0; key < a->kv_len; key += KEYS)
            dot_rows(a, &rows, first, n, key, key + KEYS < a->kv_len ? key + KEYS : a->kv_len, s);
        for (int r = 0; r < n; r++)
            if (rows.scale[r] == 0.0f)
                dot_exact(a, first + r, s->type);
    }
}

#define STEP(name)                                                                                 \
    static QKV_NOINLINE void name(const qkv_dot_args *a, const int_rows *rows, int64_t first,      \
                                  int row, int64_t key, int64_t end)
#define DOT(t, type)                                                                               \
    STEP(dot_4_rows_##t)                                                                           \
    {                                                                                              \
        (void)row;                                                                                 \
        dot_4_rows(a, rows, first, key, end, type);                                                \
    }                                                                                              \
    STEP(dot_2_rows_##t)                                                                           \
    {                                                                                              \
        dot_few_rows(a, rows, first, row, key, end, 2, type);                                      \
    }                                                                                              \
    STEP(dot_1_row_##t)                                                                            \
    {                                                                                              \
        dot_few_rows(a, rows, first, row, key, end, 1, type);                                      \
    }                                                                                              \
    STEP(dot_rest_##t)                                                                             \
    {                                                                                              \
        dot_rest(a, rows, first, row, key, end, type);                                             \
    }                                                                                              \
    void qkv_dot_##t##_avx2(const qkv_dot_args *a)                                                 \
    {                                                                                              \
        static const int_steps steps = {dot_4_rows_##t, dot_2_rows_##t, dot_1_row_##t,             \
                                        dot_rest_##t, type};                                       \
        dot(a, &steps);                                                                            \
    }
DOT(i8, KV_I8)
DOT(q8_0, KV_Q8_0)
DOT(q4_0, KV_Q4_0)
