/* SPDX-License-Identifier: MIT */
/*
 * The fused attention tile: 24 query rows along the lanes of 3 vectors.
 *
 * Keys and values are broadcast element by element, so keys need no packing
 * and neither maximum, sum nor rescaling ever crosses lanes.
 *
 *   logits   4 keys x 3 vectors of accumulators (12), 3 of the query tile,
 *            1 broadcast: all 16 registers. A step of head_dim has 12
 *            multiply-adds and 7 loads: 6 cycles on two FMA ports, 3.5 on
 *            two load ports.
 *   softmax  the running maximum is taken while the logits are stored; the
 *            pass over them then costs about 14 operations a vector.
 *   values   4 columns x 3 vectors of accumulators over all keys of the
 *            block, from packed panels: the same 12 to 7.
 *
 * With fewer rows, 2 vectors keep 4 keys or columns (8 chains of 4 cycles'
 * latency fill two ports), 1 vector takes 8.
 *
 * Model, cycles a vector of rows and key on two FMA ports:
 * (head_dim + value_dim) / 2 + 7, and (head_dim + 2 value_dim) / key_block
 * for loading and storing what stays.
 */
#include "internal.h"

#include "isa_avx2.h"

enum {
    TILE = QKV_avx2_tile_rows,
    VECS = TILE / LANES,
    PANEL = QKV_avx2_value_panel,
    WIDE = 8,  /* keys or columns where one vector holds all rows */
    STEPS = 8, /* that a loop is unrolled by */
    AHEAD = 8  /* keys that packing prefetches ahead */
};

/* ------------------------------------------------------- in and out */

void qkv_tile_load_f32_avx2(const float *const *rows, int64_t n_rows, int64_t head_dim, float *tile)
{
    for (int64_t i = 0; i < n_rows; i += LANES) {
        const int64_t here = n_rows - i < LANES ? n_rows - i : LANES;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const int64_t dims = head_dim - d < LANES ? head_dim - d : LANES;
            __m256 block[LANES];
            QKV_UNROLL
            for (int r = 0; r < LANES; r++) {
                if (r >= here)
                    block[r] = _mm256_setzero_ps();
                else if (dims == LANES)
                    block[r] = _mm256_loadu_ps(rows[i + r] + d);
                else
                    block[r] = load_tail(rows[i + r] + d, dims);
            }
            transpose8(block);
            for (int c = 0; c < dims; c++)
                _mm256_storeu_ps(tile + (d + c) * TILE + i, block[c]);
        }
    }
}

void qkv_tile_store_f32_avx2(const float *out, const float *sum, int64_t n_rows, int64_t value_dim,
                             float *const *rows)
{
    const __m256 zero = _mm256_setzero_ps();
    for (int64_t i = 0; i < n_rows; i += LANES) {
        const int64_t here = n_rows - i < LANES ? n_rows - i : LANES;
        __m256 total = load_tail(sum + i, here);
        const __m256 some = _mm256_cmp_ps(total, zero, _CMP_NEQ_UQ);
        /* No division by 0, which would raise the caller's exception flags. Not a
         * blend: clang knows that only 'some' lanes matter and drops it. */
        total = _mm256_or_ps(total, _mm256_andnot_ps(some, _mm256_set1_ps(1.0f)));
        for (int64_t d = 0; d < value_dim; d += LANES) {
            const int64_t dims = value_dim - d < LANES ? value_dim - d : LANES;
            __m256 block[LANES];
            QKV_UNROLL
            for (int c = 0; c < LANES; c++)
                block[c] =
                    c < dims
                        ? _mm256_and_ps(
                              _mm256_div_ps(_mm256_loadu_ps(out + (d + c) * TILE + i), total), some)
                        : zero;
            transpose8(block);
            for (int r = 0; r < here; r++) {
                if (dims == LANES)
                    _mm256_storeu_ps(rows[i + r] + d, block[r]);
                else
                    store_tail(rows[i + r] + d, dims, block[r]);
            }
        }
    }
}

/* Four keys of two panels: every cache line is read and written once, where
 * panel by panel the rows of a power-of-two stride would evict each other. */
QKV_INLINE void pack_4_keys(const float *values, int64_t stride, float *panel, int64_t panel_size)
{
    const __m256 v0 = _mm256_loadu_ps(values), v1 = _mm256_loadu_ps(values + stride);
    const __m256 v2 = _mm256_loadu_ps(values + 2 * stride);
    const __m256 v3 = _mm256_loadu_ps(values + 3 * stride);
    _mm256_storeu_ps(panel, _mm256_permute2f128_ps(v0, v1, 0x20));
    _mm256_storeu_ps(panel + LANES, _mm256_permute2f128_ps(v2, v3, 0x20));
    _mm256_storeu_ps(panel + panel_size, _mm256_permute2f128_ps(v0, v1, 0x31));
    _mm256_storeu_ps(panel + panel_size + LANES, _mm256_permute2f128_ps(v2, v3, 0x31));
}

void qkv_tile_pack_f32_avx2(const float *values, int64_t values_stride, int64_t kv_len,
                            int64_t value_dim, float *packed)
{
    const int64_t panel_size = kv_len * PANEL;
    const int64_t pairs_dim = value_dim / (2 * PANEL) * (2 * PANEL);
    int64_t first = 0;
    for (; first + 4 <= kv_len; first += 4)
        for (int64_t d = 0; d < pairs_dim; d += 2 * PANEL) {
            if (d % 16 == 0)
                for (int k = 0; k < 4; k++)
                    prefetch(values + (first + k) * values_stride + d, AHEAD * values_stride);
            pack_4_keys(values + first * values_stride + d, values_stride,
                        packed + d * kv_len + first * PANEL, panel_size);
        }

    for (int64_t d = 0; d < value_dim; d += PANEL) {
        const int64_t rest = value_dim - d < PANEL ? value_dim - d : PANEL;
        const __m128i mask = _mm256_castsi256_si128(tail_mask(rest));
        for (int64_t j = d < pairs_dim ? first : 0; j < kv_len; j++)
            _mm_storeu_ps(packed + d * kv_len + j * PANEL,
                          _mm_maskload_ps(values + j * values_stride + d, mask));
    }
}

/* ------------------------------------------------------------ logits */

/* All ones in the lanes whose rows see key j. */
QKV_INLINE __m256 visible(const qkv_tile_step_args *a, int v, int64_t j)
{
    const __m256i begin = _mm256_loadu_si256((const __m256i *)(const void *)(a->begin + v * LANES));
    const __m256i end = _mm256_loadu_si256((const __m256i *)(const void *)(a->end + v * LANES));
    const __m256i key = _mm256_set1_epi32((int)j);
    return _mm256_castsi256_ps(
        _mm256_andnot_si256(_mm256_cmpgt_epi32(begin, key), _mm256_cmpgt_epi32(end, key)));
}

/* Dimension 'd' after where 'keys' and 'query' stand, for n_keys keys. */
QKV_INLINE void logits_dim(const float *const keys[WIDE], const float *query, const int d,
                           const int n_keys, const int n_vecs, __m256 acc[WIDE][VECS])
{
    __m256 q[VECS];
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        q[v] = _mm256_loadu_ps(query + d * TILE + v * LANES);
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        const __m256 kd = _mm256_broadcast_ss(keys[k] + d);
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[k][v] = accumulate(kd, q[v], acc[k][v]);
    }
    QKV_IN_ORDER();
}

/*
 * Logits of n_keys keys from j on; max[v] moves on. Every key has its own
 * pointer, which spares an address computation a load; unrolled by STEPS, as
 * the front end is the limit where another thread uses half of it.
 */
QKV_INLINE void logits_block(const qkv_tile_step_args *a, int64_t j, const int n_keys,
                             const int n_vecs, __m256 max[VECS])
{
    const float *keys[WIDE];
    __m256 acc[WIDE][VECS];
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        keys[k] = a->keys + (j + k) * a->keys_stride;
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[k][v] = _mm256_setzero_ps();
    }

    const float *query = a->query, *end = query + a->head_dim * TILE;
    for (; query + STEPS * TILE <= end; query += STEPS * TILE) {
        QKV_UNROLL
        for (int d = 0; d < STEPS; d++)
            logits_dim(keys, query, d, n_keys, n_vecs, acc);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k] += STEPS;
    }
    for (; query < end; query += TILE) {
        logits_dim(keys, query, 0, n_keys, n_vecs, acc);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k]++;
    }

    const __m256 scale = _mm256_set1_ps(a->scale_log2);
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++) {
            __m256 t = _mm256_mul_ps(acc[k][v], scale);
            if (a->end)
                t = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), t, visible(a, v, j + k));
            _mm256_storeu_ps(a->logits + (j + k) * TILE + v * LANES, t);
            max[v] = max_ignoring_nan(t, max[v]);
        }
    }
}

QKV_INLINE void tile_logits(const qkv_tile_step_args *a, const int n_vecs, __m256 max[VECS])
{
    const int step = n_vecs == 1 ? WIDE : 4;
    int64_t j = 0;
    for (; j + step <= a->kv_len; j += step)
        logits_block(a, j, step, n_vecs, max);
    if (step > 4 && j + 4 <= a->kv_len) {
        logits_block(a, j, 4, n_vecs, max);
        j += 4;
    }
    for (; j < a->kv_len; j++)
        logits_block(a, j, 1, n_vecs, max);
}

/* ----------------------------------------------------------- softmax */

/* Logits become exponentials, the running maximum and sum of one vector of
 * rows move on; returns the factor for what was summed before. */
QKV_INLINE __m256 softmax_vec(const qkv_tile_step_args *a, int v, __m256 max)
{
    const __m256 before = _mm256_loadu_ps(a->max + v * LANES);
    const __m256 rescale = exp2_ps(_mm256_sub_ps(before, max));
    float *logits = a->logits + v * LANES;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++, logits += TILE) {
        const __m256 p = exp2_ps(_mm256_sub_ps(_mm256_loadu_ps(logits), max));
        _mm256_storeu_ps(logits, p);
        sum = _mm256_add_ps(sum, p);
    }
    float *total = a->sum + v * LANES;
    _mm256_storeu_ps(total, _mm256_fmadd_ps(_mm256_loadu_ps(total), rescale, sum));
    _mm256_storeu_ps(a->max + v * LANES, max);
    return rescale;
}

/* ------------------------------------------------------------ values */

/*
 * One column of one vector of rows, leaving out the keys that a row does
 * not see: their weight is 0, but 0 times a NaN or infinity is a NaN.
 */
static __attribute__((noinline)) __m256 careful_column(const qkv_tile_step_args *a, int v,
                                                       const float *column)
{
    __m256 acc = _mm256_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++) {
        const __m256 p = _mm256_loadu_ps(a->logits + j * TILE + v * LANES);
        const __m256 sum = _mm256_fmadd_ps(p, _mm256_broadcast_ss(column + j * PANEL), acc);
        acc = _mm256_blendv_ps(acc, sum, visible(a, v, j));
    }
    return acc;
}

/* Key 'j' after where 'weights' and 'panels' stand: its part of the sums of 'columns'. */
QKV_INLINE void values_key(const float *weights, const float *const panels[WIDE / PANEL],
                           const int j, const int columns, const int n_vecs, __m256 acc[WIDE][VECS])
{
    __m256 p[VECS];
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        p[v] = _mm256_loadu_ps(weights + j * TILE + v * LANES);
    QKV_UNROLL
    for (int c = 0; c < columns; c++) {
        const __m256 value = _mm256_broadcast_ss(panels[c / PANEL] + j * PANEL + c % PANEL);
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[c][v] = accumulate(value, p[v], acc[c][v]);
    }
    QKV_IN_ORDER();
}

/* 'n_panels' panels of columns from column d on. */
QKV_INLINE void values_block(const qkv_tile_step_args *a, int64_t d, const int n_panels,
                             const int n_vecs, const __m256 rescale[VECS])
{
    const int columns = n_panels * PANEL;
    __m256 acc[WIDE][VECS];
    QKV_UNROLL
    for (int c = 0; c < columns; c++)
        QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        acc[c][v] = _mm256_setzero_ps();

    const int64_t panel_size = a->values_keys * PANEL;
    const float *values = a->values + d * a->values_keys;
    const float *panels[WIDE / PANEL];
    QKV_UNROLL
    for (int i = 0; i < n_panels; i++)
        panels[i] = values + i * panel_size;

    const float *weights = a->logits, *end = weights + a->kv_len * TILE;
    for (; weights + STEPS * TILE <= end; weights += STEPS * TILE) {
        QKV_UNROLL
        for (int j = 0; j < STEPS; j++)
            values_key(weights, panels, j, columns, n_vecs, acc);
        QKV_UNROLL
        for (int i = 0; i < n_panels; i++)
            panels[i] += STEPS * PANEL;
    }
    for (; weights < end; weights += TILE) {
        values_key(weights, panels, 0, columns, n_vecs, acc);
        QKV_UNROLL
        for (int i = 0; i < n_panels; i++)
            panels[i] += PANEL;
    }

    QKV_UNROLL
    for (int c = 0; c < columns; c++) {
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++) {
            if (a->end && any_nan(acc[c][v]))
                acc[c][v] = careful_column(a, v, values + c / PANEL * panel_size + c % PANEL);
            float *out = a->out + (d + c) * TILE + v * LANES;
            _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_loadu_ps(out), rescale[v], acc[c][v]));
        }
    }
}

QKV_INLINE void tile_values(const qkv_tile_step_args *a, const int n_vecs,
                            const __m256 rescale[VECS])
{
    const int panels = n_vecs == 1 ? WIDE / PANEL : 1;
    int64_t d = 0;
    for (; d + (panels - 1) * PANEL < a->value_dim; d += panels * PANEL)
        values_block(a, d, panels, n_vecs, rescale);
    if (panels > 1 && d < a->value_dim)
        values_block(a, d, 1, n_vecs, rescale);
}

/* -------------------------------------------------------------- step */

QKV_INLINE void tile_step(const qkv_tile_step_args *a, const int n_vecs)
{
    __m256 max[VECS], rescale[VECS];
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        max[v] = _mm256_loadu_ps(a->max + v * LANES);
    tile_logits(a, n_vecs, max);
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        rescale[v] = softmax_vec(a, v, max[v]);
    tile_values(a, n_vecs, rescale);
}

void qkv_tile_step_f32_avx2(const qkv_tile_step_args *a)
{
    if (a->n_rows <= LANES)
        tile_step(a, 1);
    else if (a->n_rows <= 2 * LANES)
        tile_step(a, 2);
    else
        tile_step(a, 3);
}
