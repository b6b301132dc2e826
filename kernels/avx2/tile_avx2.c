/* SPDX-License-Identifier: MIT */
/*
 * The fused attention tile: 24 query rows along the lanes of 3 vectors.
 *
 * Keys and values are broadcast element by element, so keys need no packing
 * and neither maximum, sum nor rescaling ever crosses lanes.
 *
 *   logits   4 keys x 3 vectors, the register block of block_avx2.h
 *   softmax  the running maximum is taken while the logits are stored; the
 *            pass over them then takes 5.6 cycles a vector (Zen 3), bound by the
 *            schedulers, which the chains of the exponentials fill
 *   values   4 columns x 3 vectors over all keys of the block, from packed
 *            panels: the same register block
 *
 * With fewer rows, 2 vectors keep 4 keys or columns (8 chains of 4 cycles'
 * latency fill two ports), 1 vector takes 8.
 *
 * Model, cycles a vector of rows and key on two FMA ports:
 * (head_dim + value_dim) / 2 + 5.6 + 1.5 for scaling, storing and taking the
 * maximum of a logit, and (head_dim + 2 value_dim) / key_block for loading and
 * storing what stays. Measured on hot data, a block of 192 keys: 72.4 where the
 * model says 72.1 (64 / 64), and 138.7 for 137.1 (128 / 128).
 */
#include "internal.h"

#include "block_avx2.h"
#include "isa_avx2.h"

enum {
    TILE = QKV_avx2_tile_rows,
    VECS = TILE / LANES,
    PANEL = QKV_avx2_value_panel,
    WIDE = 8,  /* keys or columns where one vector holds all rows */
    STEPS = 2, /* that a loop is unrolled by */
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

/* ------------------------------------------------------------- spans */

/*
 * Which keys of a step take which work. On the diagonal of a causal mask the
 * first vectors of rows see fewer keys than the last: vector v takes part up to
 * end[v] only, and no later vector ends before it. Between 'clear_begin' and
 * 'clear_end' every row sees every key.
 */
typedef struct spans {
    int64_t end[VECS];
    int64_t clear_begin, clear_end;
} spans;

static spans spans_of(const qkv_tile_step_args *a, int n_vecs)
{
    spans s = {.clear_end = a->kv_len};
    for (int v = 0; v < VECS; v++)
        s.end[v] = a->end ? 0 : a->kv_len;
    if (!a->end)
        return s;
    for (int64_t i = 0; i < a->n_rows; i++) {
        int64_t *end = &s.end[i / LANES];
        *end = a->end[i] > *end ? a->end[i] : *end;
        s.clear_end = a->end[i] < s.clear_end ? a->end[i] : s.clear_end;
        s.clear_begin = a->begin[i] > s.clear_begin ? a->begin[i] : s.clear_begin;
    }
    for (int v = 1; v < n_vecs; v++)
        s.end[v] = s.end[v] > s.end[v - 1] ? s.end[v] : s.end[v - 1];
    return s;
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

/* Dimension 'd' after where 'keys' and 'query' stand, for n_keys keys and the
 * vectors of rows from 'first' on. */
QKV_INLINE void logits_dim(const float *const keys[WIDE], const float *query, const int d,
                           const int n_keys, const int first, const int n_vecs,
                           __m256 acc[WIDE][VECS])
{
    __m256 q[VECS];
    QKV_UNROLL
    for (int v = first; v < n_vecs; v++)
        q[v] = _mm256_loadu_ps(query + d * TILE + v * LANES);
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        const __m256 kd = _mm256_broadcast_ss(keys[k] + d);
        QKV_UNROLL
        for (int v = first; v < n_vecs; v++)
            acc[k][v] = _mm256_fmadd_ps(kd, q[v], acc[k][v]);
    }
}

/* Dot products of n_keys keys from j on. Every key has its own pointer, which
 * spares an address computation a load. */
QKV_INLINE void dot_products(const qkv_tile_step_args *a, int64_t j, const int n_keys,
                             const int first, const int n_vecs, __m256 acc[WIDE][VECS])
{
    const float *keys[WIDE];
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        keys[k] = a->keys + (j + k) * a->keys_stride;
    if (n_keys == BLOCK_SCALARS && n_vecs - first == BLOCK_VECS) {
        block_rows(keys[0], keys[1], keys[2], keys[3], a->query, a->head_dim, acc);
        return;
    }

    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        QKV_UNROLL
    for (int v = first; v < n_vecs; v++)
        acc[k][v] = _mm256_setzero_ps();
    const float *query = a->query, *end = query + a->head_dim * TILE;
    for (; query + STEPS * TILE <= end; query += STEPS * TILE) {
        QKV_UNROLL
        for (int d = 0; d < STEPS; d++)
            logits_dim(keys, query, d, n_keys, first, n_vecs, acc);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k] += STEPS;
    }
    for (; query < end; query += TILE) {
        logits_dim(keys, query, 0, n_keys, first, n_vecs, acc);
        QKV_UNROLL
        for (int k = 0; k < n_keys; k++)
            keys[k]++;
    }
}

/* Logits of n_keys keys from j on; max[v] moves on. */
QKV_INLINE void logits_block(const qkv_tile_step_args *a, const spans *s, int64_t j,
                             const int n_keys, const int first, const int n_vecs, __m256 max[VECS])
{
    __m256 acc[WIDE][VECS];
    dot_products(a, j, n_keys, first, n_vecs, acc);

    const bool clear = s->clear_begin <= j && j + n_keys <= s->clear_end;
    const __m256 scale = _mm256_set1_ps(a->scale_log2);
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++) {
        QKV_UNROLL
        for (int v = first; v < n_vecs; v++) {
            __m256 t = _mm256_mul_ps(acc[k][v], scale);
            if (!clear)
                t = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), t, visible(a, v, j + k));
            _mm256_storeu_ps(a->logits + (j + k) * TILE + v * LANES, t);
            max[v] = max_ignoring_nan(t, max[v]);
        }
    }
}

/* Lines that the step asks for on the way: a share with every block of keys. */
typedef struct lines_ahead {
    const void *const *row, *const *end;
    int64_t at, bytes, share;
} lines_ahead;

QKV_INLINE lines_ahead lines_ahead_of(const qkv_tile_step_args *a, int64_t keys)
{
    const int64_t lines = a->ahead_rows * ((a->ahead_bytes + 63) / 64);
    const int64_t blocks = (a->kv_len + keys - 1) / keys;
    return (lines_ahead){a->ahead, a->ahead + a->ahead_rows, 0, a->ahead_bytes,
                         (lines + blocks - 1) / blocks};
}

QKV_INLINE void ask_ahead(lines_ahead *x)
{
    for (int64_t i = 0; i < x->share && x->row < x->end; i++) {
        QKV_PREFETCH_LATER((const char *)*x->row + x->at);
        x->at += 64;
        if (x->at >= x->bytes) {
            x->at = 0;
            x->row++;
        }
    }
}

/* Keys from j on, as long as there are keys before s->end[first]; returns where it stops. */
QKV_INLINE int64_t logits_span(const qkv_tile_step_args *a, const spans *s, int64_t j,
                               const int first, const int n_vecs, lines_ahead *lines,
                               __m256 max[VECS])
{
    const int step = n_vecs - first == 1 ? WIDE : 4;
    const int64_t end = s->end[first];
    for (; j < end && j + step <= a->kv_len; j += step) {
        ask_ahead(lines);
        logits_block(a, s, j, step, first, n_vecs, max);
    }
    if (step > 4 && j < end && j + 4 <= a->kv_len) {
        logits_block(a, s, j, 4, first, n_vecs, max);
        j += 4;
    }
    for (; j < end; j++)
        logits_block(a, s, j, 1, first, n_vecs, max);
    return j;
}

QKV_INLINE void tile_logits(const qkv_tile_step_args *a, const spans *s, const int n_vecs,
                            __m256 max[VECS])
{
    lines_ahead lines = lines_ahead_of(a, n_vecs == 1 ? WIDE : 4);
    int64_t j = 0;
    QKV_UNROLL
    for (int first = 0; first < n_vecs; first++)
        j = logits_span(a, s, j, first, n_vecs, &lines, max);
}

/* ----------------------------------------------------------- softmax */

/*
 * 2^t for t <= 0 within 4 u, u = 2^-24: 1.6 u of the polynomial and the rounding
 * of its last two sums. exp2_ps takes 6.5 cycles a vector in the loop below, as
 * the schedulers are full of operations that wait on Horner's chain; this one,
 * half as long, takes 5.6.
 */
QKV_INLINE __m256 weight_ps(__m256 t)
{
    __m256 shifted;
    const __m256 f = split2(t, &shifted);
    const __m256 f2 = _mm256_mul_ps(f, f);
    const __m256 low = _mm256_fmadd_ps(_mm256_set1_ps(QKV_EXP2_TILE_C1), f, _mm256_set1_ps(1.0f));
    const __m256 mid =
        _mm256_fmadd_ps(_mm256_set1_ps(QKV_EXP2_TILE_C3), f, _mm256_set1_ps(QKV_EXP2_TILE_C2));
    const __m256 high =
        _mm256_fmadd_ps(_mm256_set1_ps(QKV_EXP2_TILE_C5), f, _mm256_set1_ps(QKV_EXP2_TILE_C4));
    return scale2(_mm256_fmadd_ps(_mm256_fmadd_ps(high, f2, mid), f2, low), shifted);
}

/* Logits become exponentials, the running maximum and sum of one vector of
 * rows move on; returns the factor for what was summed before. */
QKV_INLINE __m256 softmax_vec(const qkv_tile_step_args *a, const spans *s, int v, __m256 max)
{
    const __m256 before = _mm256_loadu_ps(a->max + v * LANES);
    const __m256 rescale = weight_ps(_mm256_sub_ps(before, max));
    float *logits = a->logits + v * LANES;
    const float *end = logits + s->end[v] * TILE;
    __m256 sum = _mm256_setzero_ps();
    for (; logits < end; logits += TILE) {
        const __m256 p = weight_ps(_mm256_sub_ps(_mm256_loadu_ps(logits), max));
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
                                                       int64_t keys, const float *column)
{
    __m256 acc = _mm256_setzero_ps();
    for (int64_t j = 0; j < keys; j++) {
        const __m256 p = _mm256_loadu_ps(a->logits + j * TILE + v * LANES);
        const __m256 sum = _mm256_fmadd_ps(p, _mm256_broadcast_ss(column + j * PANEL), acc);
        acc = _mm256_blendv_ps(acc, sum, visible(a, v, j));
    }
    return acc;
}

/* Key 'j' after where 'weights' and 'panels' stand: its part of the sums of
 * 'columns', in the vectors of rows from 'first' on. */
QKV_INLINE void values_key(const float *weights, const float *const panels[WIDE / PANEL],
                           const int j, const int columns, const int first, const int n_vecs,
                           __m256 acc[WIDE][VECS])
{
    __m256 p[VECS];
    QKV_UNROLL
    for (int v = first; v < n_vecs; v++)
        p[v] = _mm256_loadu_ps(weights + j * TILE + v * LANES);
    QKV_UNROLL
    for (int c = 0; c < columns; c++) {
        const __m256 value = _mm256_broadcast_ss(panels[c / PANEL] + j * PANEL + c % PANEL);
        QKV_UNROLL
        for (int v = first; v < n_vecs; v++)
            acc[c][v] = _mm256_fmadd_ps(value, p[v], acc[c][v]);
    }
}

/* The keys of 'weights' up to 'end'; the panels move along. */
QKV_INLINE const float *values_span(const float *weights, const float *end,
                                    const float *panels[WIDE / PANEL], const int n_panels,
                                    const int first, const int n_vecs, __m256 acc[WIDE][VECS])
{
    const int columns = n_panels * PANEL;
    for (; weights + STEPS * TILE <= end; weights += STEPS * TILE) {
        QKV_UNROLL
        for (int j = 0; j < STEPS; j++)
            values_key(weights, panels, j, columns, first, n_vecs, acc);
        QKV_UNROLL
        for (int i = 0; i < n_panels; i++)
            panels[i] += STEPS * PANEL;
    }
    for (; weights < end; weights += TILE) {
        values_key(weights, panels, 0, columns, first, n_vecs, acc);
        QKV_UNROLL
        for (int i = 0; i < n_panels; i++)
            panels[i] += PANEL;
    }
    return weights;
}

/* 'n_panels' panels of columns from column d on. */
QKV_INLINE void values_block(const qkv_tile_step_args *a, const spans *s, int64_t d,
                             const int n_panels, const int n_vecs, const __m256 rescale[VECS])
{
    const int columns = n_panels * PANEL;
    const int64_t panel_size = a->values_keys * PANEL;
    const float *values = a->values + d * a->values_keys;
    const float *panels[WIDE / PANEL], *weights = a->logits;
    __m256 acc[WIDE][VECS];
    QKV_UNROLL
    for (int i = 0; i < n_panels; i++)
        panels[i] = values + i * panel_size;
    if (columns == BLOCK_SCALARS && n_vecs == BLOCK_VECS) {
        block_panel(values, weights, s->end[0], acc);
        panels[0] += s->end[0] * PANEL;
        weights += s->end[0] * TILE;
    } else {
        QKV_UNROLL
        for (int c = 0; c < columns; c++)
            QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[c][v] = _mm256_setzero_ps();
        weights =
            values_span(weights, weights + s->end[0] * TILE, panels, n_panels, 0, n_vecs, acc);
    }
    QKV_UNROLL
    for (int first = 1; first < n_vecs; first++)
        weights = values_span(weights, a->logits + s->end[first] * TILE, panels, n_panels, first,
                              n_vecs, acc);

    QKV_UNROLL
    for (int c = 0; c < columns; c++) {
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++) {
            if (a->end && any_nan(acc[c][v]))
                acc[c][v] =
                    careful_column(a, v, s->end[v], values + c / PANEL * panel_size + c % PANEL);
            float *out = a->out + (d + c) * TILE + v * LANES;
            _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_loadu_ps(out), rescale[v], acc[c][v]));
        }
    }
}

QKV_INLINE void tile_values(const qkv_tile_step_args *a, const spans *s, const int n_vecs,
                            const __m256 rescale[VECS])
{
    const int panels = n_vecs == 1 ? WIDE / PANEL : 1;
    int64_t d = 0;
    for (; d + (panels - 1) * PANEL < a->value_dim; d += panels * PANEL)
        values_block(a, s, d, panels, n_vecs, rescale);
    if (panels > 1 && d < a->value_dim)
        values_block(a, s, d, 1, n_vecs, rescale);
}

/* -------------------------------------------------------------- step */

/* The two halves of a step. 'max' is [tile_rows]: what logits_half leaves there
 * is the running maximum. Not inline: the step and its halves share them. */
#define HALVES(n_vecs)                                                                             \
    static __attribute__((noinline)) void logits_half_##n_vecs(const qkv_tile_step_args *a,        \
                                                               const spans *s, float *max)         \
    {                                                                                              \
        logits_half(a, s, (n_vecs), max);                                                          \
    }                                                                                              \
    static __attribute__((noinline)) void weigh_half_##n_vecs(const qkv_tile_step_args *a,         \
                                                              const spans *s, const float *max)    \
    {                                                                                              \
        weigh_half(a, s, (n_vecs), max);                                                           \
    }

QKV_INLINE void logits_half(const qkv_tile_step_args *a, const spans *s, const int n_vecs,
                            float *row_max)
{
    __m256 max[VECS];
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        max[v] = _mm256_loadu_ps(a->max + v * LANES);
    tile_logits(a, s, n_vecs, max);
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        _mm256_storeu_ps(row_max + v * LANES, max[v]);
}

QKV_INLINE void weigh_half(const qkv_tile_step_args *a, const spans *s, const int n_vecs,
                           const float *row_max)
{
    __m256 rescale[VECS];
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        rescale[v] = softmax_vec(a, s, v, _mm256_loadu_ps(row_max + v * LANES));
    tile_values(a, s, n_vecs, rescale);
}

HALVES(1)
HALVES(2)
HALVES(3)

static int vecs_of(const qkv_tile_step_args *a)
{
    return (int)((a->n_rows + LANES - 1) / LANES);
}

static void step_logits(const qkv_tile_step_args *a, const spans *s, float *max)
{
    static void (*const half[])(const qkv_tile_step_args *, const spans *,
                                float *) = {logits_half_1, logits_half_2, logits_half_3};
    half[vecs_of(a) - 1](a, s, max);
}

static void step_weigh(const qkv_tile_step_args *a, const spans *s, const float *max)
{
    static void (*const half[])(const qkv_tile_step_args *, const spans *,
                                const float *) = {weigh_half_1, weigh_half_2, weigh_half_3};
    half[vecs_of(a) - 1](a, s, max);
}

void qkv_tile_step_f32_avx2(const qkv_tile_step_args *a)
{
    const spans s = spans_of(a, vecs_of(a));
    float max[TILE];
    step_logits(a, &s, max);
    step_weigh(a, &s, max);
}

void qkv_tile_logits_f32_avx2(const qkv_tile_step_args *args)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = NULL;
    const spans s = spans_of(&a, vecs_of(&a));
    float unused[TILE];
    step_logits(&a, &s, unused);
}

void qkv_tile_weigh_f32_avx2(const qkv_tile_step_args *args, const float *max)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = NULL;
    const spans s = spans_of(&a, vecs_of(&a));
    step_weigh(&a, &s, max);
}
