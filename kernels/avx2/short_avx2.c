/* SPDX-License-Identifier: MIT */
/*
 * Attention of few rows on few keys at once: what a call of each of the three
 * kernels would spend on its arguments, its remainders and the way through
 * memory is saved where there is little else to do.
 *
 * Rows go two by two. Registers: 8 accumulators for 2 rows x 4 keys (1 x 8), lanes
 * along head_dim, then 8 for 2 rows x 4 vectors of columns (1 x 8). Keys beyond the
 * last are the last once more, so that products have no remainder; their weights
 * are 0 and their values are not looked at.
 *
 * Model, cycles on two FMA ports: rows * keys * (head_dim + value_dim) / 16, about 12
 * for the lane sums of 4 products and 20 for a vector of exponentials; what
 * is left are two calls and chains that wait. Measured (Zen 3, 64 columns, hot, alone
 * on the core): 1 row and 16 keys 98 ns, 4 rows and 4 keys 161 ns, where the three
 * kernels take 190 and more than 400.
 */
#include "internal.h"

#include <float.h>

#include "isa_avx2.h"

enum { KEYS = QKV_SHORT_KEYS, ACCS = 8 };

/* acc[r * n_keys + k] = the products of queries[r] and keys[k], lane by lane. */
QKV_INLINE void products(const float *const queries[2], const float *const keys[ACCS],
                         int64_t head_dim, const int n_rows, const int n_keys, __m256 acc[ACCS])
{
    QKV_UNROLL
    for (int i = 0; i < ACCS; i++)
        acc[i] = _mm256_setzero_ps();
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) {
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++) {
            const __m256 key = _mm256_loadu_ps(keys[k] + d);
            QKV_UNROLL
            for (int r = 0; r < n_rows; r++)
                acc[r * n_keys + k] =
                    _mm256_fmadd_ps(key, _mm256_loadu_ps(queries[r] + d), acc[r * n_keys + k]);
        }
    }
    if (d == head_dim)
        return;
    const __m256i mask = tail_mask(head_dim - d);
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        const __m256 key = _mm256_maskload_ps(keys[k] + d, mask);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            acc[r * n_keys + k] =
                _mm256_fmadd_ps(key, _mm256_maskload_ps(queries[r] + d, mask), acc[r * n_keys + k]);
    }
}

/* The dot products of one or two rows, KEYS apart; what follows those of the last key, up to a
 * whole vector, means nothing. */
QKV_INLINE void dots(const qkv_short_args *a, int64_t row, const int n_rows, float *dots)
{
    const int n_keys = ACCS / n_rows;
    const float *const queries[2] = {a->queries[row], a->queries[row + n_rows - 1]};
    for (int64_t j = 0; j < a->kv_len; j += n_keys) {
        const float *keys[ACCS];
        __m256 acc[ACCS];
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k] = a->keys[j + k < a->kv_len ? j + k : a->kv_len - 1];
        products(queries, keys, a->head_dim, n_rows, n_keys, acc);
        _mm_store_ps(dots + j, hsum4(acc[0], acc[1], acc[2], acc[3]));
        _mm_store_ps(dots + j + (n_rows == 2 ? KEYS : 4), hsum4(acc[4], acc[5], acc[6], acc[7]));
    }
}

/* A row's dot products become its exponentials: of the keys before 'end', 0 for the
 * rest of the last vector. */
QKV_INLINE qkv_row_state softmax(float *x, int64_t kv_len, int64_t end, __m256 scale)
{
    const __m256 hidden = _mm256_set1_ps(-INFINITY);
    __m256 max = _mm256_set1_ps(-FLT_MAX), sum = _mm256_setzero_ps();
    for (int64_t j = 0; j < kv_len; j += LANES) {
        const __m256 t = _mm256_blendv_ps(hidden, _mm256_mul_ps(_mm256_load_ps(x + j), scale),
                                          _mm256_castsi256_ps(tail_mask(end - j)));
        _mm256_store_ps(x + j, t);
        max = max_ignoring_nan(t, max);
    }
    const qkv_row_state state = {.max = hmax(max)};
    max = _mm256_set1_ps(state.max);
    for (int64_t j = 0; j < kv_len; j += LANES) {
        const __m256 p = exp2_ps(_mm256_sub_ps(_mm256_load_ps(x + j), max));
        _mm256_store_ps(x + j, p);
        sum = _mm256_add_ps(sum, p);
    }
    return (qkv_row_state){.max = state.max, .sum = hsum(sum)};
}

/* 'n_vecs' vectors of columns from d on, the last of 'last' columns. */
QKV_INLINE void columns(const qkv_short_args *a, int64_t row, int64_t end, int64_t d, int64_t last,
                        const int n_rows, const int n_vecs, const float *weights,
                        const float *factors)
{
    __m256 acc[2][ACCS];
    const __m256i mask = tail_mask(last);
    QKV_UNROLL
    for (int i = 0; i < n_rows * n_vecs; i++)
        acc[i / n_vecs][i % n_vecs] = _mm256_setzero_ps();
    for (int64_t j = 0; j < end; j++) {
        const float *value = a->values[j] + d;
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++) {
            const __m256 x =
                n_vecs == 1 ? _mm256_maskload_ps(value, mask) : _mm256_loadu_ps(value + v * LANES);
            QKV_UNROLL
            for (int r = 0; r < n_rows; r++)
                acc[r][v] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(weights + r * KEYS + j), x, acc[r][v]);
        }
    }
    QKV_UNROLL
    for (int i = 0; i < n_rows * n_vecs; i++) {
        float *out = a->out[row + i / n_vecs] + d + i % n_vecs * LANES;
        const __m256 quotient =
            _mm256_mul_ps(acc[i / n_vecs][i % n_vecs], _mm256_broadcast_ss(factors + i / n_vecs));
        if (n_vecs == 1)
            _mm256_maskstore_ps(out, mask, quotient);
        else
            _mm256_storeu_ps(out, quotient);
    }
}

/* The weighted sums of one or two rows that see the keys before 'end'. */
QKV_INLINE void weighted_sums(const qkv_short_args *a, int64_t row, int64_t end, const int n_rows,
                              const float *weights, const float *factors)
{
    const int n_vecs = ACCS / n_rows;
    int64_t d = 0;
    for (; d + n_vecs * LANES <= a->value_dim; d += n_vecs * LANES)
        columns(a, row, end, d, LANES, n_rows, n_vecs, weights, factors);
    for (; d < a->value_dim; d += LANES) {
        const int64_t rest = a->value_dim - d;
        columns(a, row, end, d, rest < LANES ? rest : LANES, n_rows, 1, weights, factors);
    }
}

/* The exponentials of a row whose dot products stand in 'weights', and what the sums
 * are to be multiplied by: a sum of exponentials is from 1 to KEYS, or 0 in a row of
 * -infinity, whose output is 0. Returns where the keys end whose values count. */
QKV_INLINE int64_t weigh(const qkv_short_args *a, int64_t row, float *weights, float *factor)
{
    const int64_t end = a->ends ? a->ends[row] : a->kv_len;
    const qkv_row_state state = softmax(weights, a->kv_len, end, _mm256_set1_ps(a->scale_log2));
    a->states[row] = state;
    *factor = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
    return state.sum == 0.0f ? 0 : end;
}

static __attribute__((noinline)) void one_row(const qkv_short_args *a, int64_t row)
{
    _Alignas(32) float weights[KEYS];
    float factor;
    dots(a, row, 1, weights);
    const int64_t end = weigh(a, row, weights, &factor);
    weighted_sums(a, row, end, 1, weights, &factor);
}

/* Rows of the same position see the same keys; others are summed one by one. */
static __attribute__((noinline)) void two_rows(const qkv_short_args *a, int64_t row)
{
    _Alignas(32) float weights[2 * KEYS];
    float factors[2];
    dots(a, row, 2, weights);
    const int64_t end = weigh(a, row, weights, factors);
    const int64_t other = weigh(a, row + 1, weights + KEYS, factors + 1);
    if (end == other) {
        weighted_sums(a, row, end, 2, weights, factors);
        return;
    }
    weighted_sums(a, row, end, 1, weights, factors);
    weighted_sums(a, row + 1, other, 1, weights + KEYS, factors + 1);
}

void qkv_short_f32_avx2(const qkv_short_args *a)
{
    int64_t row = 0;
    for (; row + 2 <= a->rows; row += 2)
        two_rows(a, row);
    if (row < a->rows)
        one_row(a, row);
}
