/* SPDX-License-Identifier: MIT */
/*
 * The fused attention tile: 48 query rows along the lanes of 3 vectors.
 *
 * Keys and values are broadcast element by element from where they lie, so
 * that keys need no packing, and maximum, sum and rescaling are operations
 * between whole vectors. A row's lane never meets another's, and each logit
 * and each output is one chain of fused multiply-adds (over d; over the keys
 * of the block) whatever the block's shape: a row's bits do not depend on its
 * place in the tile, nor on how many rows are in use.
 *
 *   logits   8 keys x 3 vectors of accumulators (24), 3 vectors of the query
 *            tile, 1 broadcast: 28 of 32 registers. A step of head_dim has 24
 *            multiply-adds, 11 loads and 4 more instructions.
 *   softmax  the running maximum is taken while the logits are stored; then
 *            12 operations a vector, exponential and sum together.
 *   values   8 columns x 3 vectors of accumulators over all keys of the
 *            block, from packed panels: the same 24 to 11.
 *
 * With fewer rows the same loops run on 2 vectors (16 chains) or 1 (8 chains:
 * just enough for a latency of 4 on two ports). On the diagonal of a causal
 * mask, too: of 48 rows and 48 keys, three of nine 16 x 16 squares are left out.
 *
 * Cycles by llvm-mca 19 for one turn of the loop, and the bound that the
 * multiply-adds alone set:
 *
 *                        skylake-avx512   sapphirerapids   znver4
 *   logits, values, 3 v.    12.05 (12)      24.05 (24)    30.9 (24)
 *                   2 v.     9.04  (8)      16.05 (16)    24.0 (16)
 *                   1 v.     4.55  (4)       8.05  (8)     8.0  (8)
 *   softmax, 3 v.           19.8            24.1          21.1
 *
 * Read it knowing the models: the one of Sapphire Rapids has a single port
 * for 512-bit multiply-adds, the hardware two; those of Skylake and Zen 4
 * charge each broadcast from memory a slot of the arithmetic ports, though
 * the load unit does it (on Zen 3, a loop with a broadcast for every three
 * multiply-adds takes exactly as long as one without). Broadcasts embedded in
 * the multiply-adds are as fast for znver4 (24.1), but are 27 loads a step:
 * 13.5 cycles on two load ports.
 *
 * Model, cycles a key and vector of rows on two ports: (head_dim + value_dim)
 * / 2 + 7, and on top (head_dim + 2 value_dim) / key_block for what is loaded
 * and stored again once a block. 9 keys x 3 vectors would fit into the
 * registers too, but no block of keys is a multiple of 9.
 */
#include "internal.h"

#include "isa_avx512.h"

#include <math.h>

enum {
    TILE = QKV_avx512_tile_rows,
    PANEL = QKV_avx512_value_panel,
    VECS_MAX = TILE / LANES,
    KEYS = 8 /* keys of one register block */
};

void qkv_tile_load_f32_avx512(const float *const *rows, int64_t n_rows, int64_t head_dim,
                              float *tile)
{
    for (int64_t first = 0; first < n_rows; first += LANES) {
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const __mmask16 columns = lanes_below(head_dim - d);
            __m512 x[LANES];
            UNROLL
            for (int i = 0; i < LANES; i++) {
                const bool exists = first + i < n_rows;
                x[i] = load_tail(rows[exists ? first + i : 0] + d, exists ? columns : 0);
            }
            transpose_16x16(x);
            UNROLL
            for (int c = 0; c < LANES; c++)
                if (d + c < head_dim)
                    _mm512_storeu_ps(tile + (d + c) * TILE + first, x[c]);
        }
    }
}

void qkv_tile_store_f32_avx512(const float *out, const float *sum, int64_t n_rows,
                               int64_t value_dim, float *const *rows)
{
    for (int64_t first = 0; first < n_rows; first += LANES) {
        const __m512 total = load_tail(sum + first, lanes_below(n_rows - first));
        const __mmask16 not_empty = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        /*
         * No division by 0, which would raise a flag: 1 is or-ed into sums of
         * 0. A masked division would do, but clang carries it out unmasked.
         */
        const __m512 one = _mm512_set1_ps(1.0f);
        const __m512 instead = _mm512_maskz_mov_ps((__mmask16)~not_empty, one);
        const __m512 inverse = _mm512_div_ps(one, _mm512_or_ps(total, instead));
        for (int64_t d = 0; d < value_dim; d += LANES) {
            const __mmask16 columns = lanes_below(value_dim - d);
            __m512 x[LANES];
            UNROLL
            for (int c = 0; c < LANES; c++) {
                const int64_t column = min_i64(d + c, value_dim - 1);
                x[c] = _mm512_maskz_mul_ps(not_empty, _mm512_loadu_ps(out + column * TILE + first),
                                           inverse);
            }
            transpose_16x16(x);
            UNROLL
            for (int i = 0; i < LANES; i++)
                if (first + i < n_rows)
                    store_tail(rows[first + i] + d, columns, x[i]);
        }
    }
}

/* 16 columns of two keys become two whole cache lines, one of each panel. */
static void pack_two_keys(const float *value0, const float *value1, int64_t value_dim, float *panel,
                          int64_t panel_size)
{
    int64_t d = 0;
    for (; d + 2 * PANEL <= value_dim; d += 2 * PANEL, panel += 2 * panel_size) {
        const __m512 x0 = _mm512_loadu_ps(value0 + d), x1 = _mm512_loadu_ps(value1 + d);
        _mm512_storeu_ps(panel, _mm512_shuffle_f32x4(x0, x1, 0x44));
        _mm512_storeu_ps(panel + panel_size, _mm512_shuffle_f32x4(x0, x1, 0xee));
    }
    if (d < value_dim) {
        const __mmask16 columns = lanes_below(value_dim - d);
        const __m512 x0 = load_tail(value0 + d, columns), x1 = load_tail(value1 + d, columns);
        _mm512_storeu_ps(panel, _mm512_shuffle_f32x4(x0, x1, 0x44));
        if (d + PANEL < value_dim)
            _mm512_storeu_ps(panel + panel_size, _mm512_shuffle_f32x4(x0, x1, 0xee));
    }
}

static void pack_one_key(const float *value, int64_t value_dim, float *panel, int64_t panel_size)
{
    for (int64_t d = 0; d < value_dim; d += PANEL, panel += panel_size)
        store_tail(panel, 0x00ff, load_tail(value + d, 0x00ff & lanes_below(value_dim - d)));
}

void qkv_tile_pack_f32_avx512(const float *values, int64_t values_stride, int64_t kv_len,
                              int64_t value_dim, float *packed)
{
    const int64_t panel_size = kv_len * PANEL;
    int64_t j = 0;
    for (; j + 2 <= kv_len; j += 2, values += 2 * values_stride, packed += 2 * PANEL)
        pack_two_keys(values, values + values_stride, value_dim, packed, panel_size);
    if (j < kv_len)
        pack_one_key(values, value_dim, packed, panel_size);
}

/*
 * Which keys of a step take which work. On the diagonal of a causal mask the
 * first vectors of rows see fewer keys than the last: vector v takes part up to
 * end[v] only, and no later vector ends before it. Between 'clear_begin' and
 * 'clear_end' every row sees every key.
 */
typedef struct spans {
    int64_t end[VECS_MAX];
    int64_t clear_begin, clear_end;
} spans;

static spans spans_of(const qkv_tile_step_args *a)
{
    spans s = {.end = {a->kv_len, a->kv_len, a->kv_len}, .clear_end = a->kv_len};
    if (!a->end)
        return s;
    for (int v = 0; v < VECS_MAX; v++)
        s.end[v] = 0;
    for (int64_t i = 0; i < a->n_rows; i++) {
        int64_t *end = &s.end[i / LANES];
        *end = a->end[i] > *end ? a->end[i] : *end;
        s.clear_end = min_i64(a->end[i], s.clear_end);
        s.clear_begin = a->begin[i] > s.clear_begin ? a->begin[i] : s.clear_begin;
    }
    for (int v = 1; v < VECS_MAX; v++)
        s.end[v] = s.end[v] > s.end[v - 1] ? s.end[v] : s.end[v - 1];
    return s;
}

/*
 * One line of the tile, [tile_rows] floats, of which the vectors from 'first'
 * to 'vecs' are in use. No array: clang 14 would keep one of a single element
 * in memory.
 */
typedef struct row_vectors {
    __m512 v0, v1, v2;
} row_vectors;

ALWAYS_INLINE row_vectors load_rows(const float *line, const int first, const int vecs)
{
    row_vectors x;
    x.v0 = x.v1 = x.v2 = _mm512_setzero_ps();
    if (first <= 0)
        x.v0 = _mm512_loadu_ps(line);
    if (first <= 1 && vecs > 1)
        x.v1 = _mm512_loadu_ps(line + LANES);
    if (vecs > 2)
        x.v2 = _mm512_loadu_ps(line + 2 * LANES);
    return x;
}

ALWAYS_INLINE void multiply_add(__m512 *acc, const int first, const int vecs, row_vectors x,
                                __m512 y)
{
    if (first <= 0)
        acc[0] = _mm512_fmadd_ps(y, x.v0, acc[0]);
    if (first <= 1 && vecs > 1)
        acc[1] = _mm512_fmadd_ps(y, x.v1, acc[1]);
    if (vecs > 2)
        acc[2] = _mm512_fmadd_ps(y, x.v2, acc[2]);
}

/* The lanes of row vector v that see key j. */
ALWAYS_INLINE __mmask16 lanes_that_see(const qkv_tile_step_args *a, int64_t j, int64_t v)
{
    const __m512i key = _mm512_set1_epi32((int)j);
    const __m512i begin = _mm512_loadu_si512(a->begin + v * LANES);
    const __m512i end = _mm512_loadu_si512(a->end + v * LANES);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(begin, key), end, key);
}

/*
 * Scales the logits of keys j .. j + KEYS - 1, stores them and takes the
 * maximum further. Keys from kv_len on are copies of the last one: dropped.
 */
ALWAYS_INLINE void store_logits(const qkv_tile_step_args *a, const spans *s, int64_t j,
                                const int first, const int vecs, const __m512 *acc, __m512 *max)
{
    const bool clear = s->clear_begin <= j && j + KEYS <= s->clear_end;
    const __m512 scale = _mm512_set1_ps(a->scale_log2);
    UNROLL
    for (int u = 0; u < KEYS; u++) {
        if (j + u >= a->kv_len)
            return;
        UNROLL
        for (int v = first; v < vecs; v++) {
            __m512 t = _mm512_mul_ps(acc[u * vecs + v], scale);
            if (!clear && a->end)
                t = _mm512_mask_blend_ps(lanes_that_see(a, j + u, v), _mm512_set1_ps(-INFINITY), t);
            max[v] = max_ignoring_nan(max[v], t);
            _mm512_storeu_ps(a->logits + (j + u) * TILE + v * LANES, t);
        }
    }
}

/* Lines that the step asks for on the way: a share with every block of keys. */
typedef struct lines_ahead {
    const void *const *row, *const *end;
    int64_t at, bytes, share;
} lines_ahead;

ALWAYS_INLINE lines_ahead lines_ahead_of(const qkv_tile_step_args *a, int64_t keys)
{
    const int64_t lines = a->ahead_rows * ((a->ahead_bytes + 63) / 64);
    const int64_t blocks = (a->kv_len + keys - 1) / keys;
    return (lines_ahead){a->ahead, a->ahead + a->ahead_rows, 0, a->ahead_bytes,
                         (lines + blocks - 1) / blocks};
}

ALWAYS_INLINE void ask_ahead(lines_ahead *x)
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

/* The keys from j on that the vector 'first' takes part in; returns where it stops. */
ALWAYS_INLINE int64_t logits_span(const qkv_tile_step_args *a, const spans *s, int64_t j,
                                  const int first, const int vecs, lines_ahead *lines, __m512 *max)
{
    for (; j < s->end[first]; j += KEYS) {
        ask_ahead(lines);
        const float *key[KEYS];
        __m512 acc[KEYS * VECS_MAX];
        UNROLL
        for (int u = 0; u < KEYS; u++)
            key[u] = a->keys + min_i64(j + u, a->kv_len - 1) * a->keys_stride;
        UNROLL
        for (int u = 0; u < KEYS * vecs; u++)
            acc[u] = _mm512_setzero_ps();

        for (int64_t d = 0; d < a->head_dim; d++) {
            const row_vectors query = load_rows(a->query + d * TILE, first, vecs);
            UNROLL
            for (int u = 0; u < KEYS; u++)
                multiply_add(acc + u * vecs, first, vecs, query, _mm512_set1_ps(key[u][d]));
        }
        store_logits(a, s, j, first, vecs, acc, max);
    }
    return j;
}

/* Step 2 of the tile: logits of the whole block; 'max' becomes the new maximum. */
ALWAYS_INLINE void tile_logits(const qkv_tile_step_args *a, const spans *s, const int vecs,
                               __m512 *max)
{
    lines_ahead lines = lines_ahead_of(a, KEYS);
    int64_t j = logits_span(a, s, 0, 0, vecs, &lines, max);
    if (vecs > 1)
        j = logits_span(a, s, j, 1, vecs, &lines, max);
    if (vecs > 2)
        logits_span(a, s, j, 2, vecs, &lines, max);
}

/*
 * 2^t for t <= 0 within 4 u, u = 2^-24. vscalefps itself takes the integer below t, so
 * that with f = t - floor(t) nothing need be subtracted; on [0, 1) a polynomial of
 * degree 5 with p(0) = 1 is within 1.4 u. Below 2^-126 it is 0.
 */
ALWAYS_INLINE __m512 weight_ps(__m512 t)
{
    const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(QKV_EXP2_FLOOR_C5);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_FLOOR_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_FLOOR_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_FLOOR_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(QKV_EXP2_FLOOR_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return scale_by_normal_power(p, t, t);
}

ALWAYS_INLINE int64_t softmax_span(const qkv_tile_step_args *a, const spans *s, int64_t j,
                                   const int first, const int vecs, const __m512 *max, __m512 *sum)
{
    for (; j < s->end[first]; j++) {
        UNROLL
        for (int v = first; v < vecs; v++) {
            float *logits = a->logits + j * TILE + v * LANES;
            const __m512 p = weight_ps(_mm512_sub_ps(_mm512_loadu_ps(logits), max[v]));
            _mm512_storeu_ps(logits, p);
            sum[v] = _mm512_add_ps(sum[v], p);
        }
    }
    return j;
}

/* Step 3: logits become exponentials; sum and maximum move on. */
ALWAYS_INLINE void tile_softmax(const qkv_tile_step_args *a, const spans *s, const int vecs,
                                const __m512 *max, float *rescale)
{
    __m512 sum[VECS_MAX];
    UNROLL
    for (int v = 0; v < vecs; v++)
        sum[v] = _mm512_setzero_ps();

    int64_t j = softmax_span(a, s, 0, 0, vecs, max, sum);
    if (vecs > 1)
        j = softmax_span(a, s, j, 1, vecs, max, sum);
    if (vecs > 2)
        softmax_span(a, s, j, 2, vecs, max, sum);

    UNROLL
    for (int v = 0; v < vecs; v++) {
        const __m512 factor = vexp2(_mm512_sub_ps(_mm512_loadu_ps(a->max + v * LANES), max[v]));
        _mm512_storeu_ps(rescale + v * LANES, factor);
        sum[v] = _mm512_fmadd_ps(_mm512_loadu_ps(a->sum + v * LANES), factor, sum[v]);
        _mm512_storeu_ps(a->sum + v * LANES, sum[v]);
        _mm512_storeu_ps(a->max + v * LANES, max[v]);
    }
}

/*
 * Step 4 for one panel in which a row vector came out NaN although some keys
 * are hidden: probability 0 times a NaN or infinity in a hidden value. Lanes
 * that are NaN take a sum over the visible keys only; all others keep theirs,
 * so that a row's bits do not depend on its neighbours.
 */
static __attribute__((noinline)) void careful_panel(const qkv_tile_step_args *a, const spans *s,
                                                    int64_t d, int64_t vecs, const float *rescale)
{
    for (int64_t i = 0; i < PANEL * vecs; i++) {
        const int64_t column = d + i / vecs, v = i % vecs;
        const float *value = a->values + d / PANEL * a->values_keys * PANEL + i / vecs;
        __m512 all = _mm512_setzero_ps(), seen = all;
        for (int64_t j = 0; j < s->end[v]; j++) {
            const __m512 p = _mm512_loadu_ps(a->logits + j * TILE + v * LANES);
            const __m512 x = _mm512_set1_ps(value[j * PANEL]);
            all = _mm512_fmadd_ps(p, x, all);
            seen = _mm512_mask_blend_ps(lanes_that_see(a, j, v), seen, _mm512_fmadd_ps(p, x, seen));
        }
        const __m512 sum = _mm512_mask_blend_ps(nan_lanes(all, all), all, seen);
        float *out = a->out + column * TILE + v * LANES;
        _mm512_storeu_ps(
            out, _mm512_fmadd_ps(_mm512_loadu_ps(out), _mm512_loadu_ps(rescale + v * LANES), sum));
    }
}

/* Whether an accumulator of a panel is NaN in the lane of a row in use. */
ALWAYS_INLINE bool has_nan(const __m512 *acc, const int vecs, int64_t n_rows)
{
    unsigned found = 0;
    UNROLL
    for (int v = 0; v < vecs; v++) {
        unsigned lanes = 0;
        UNROLL
        for (int c = 0; c < PANEL; c += 2)
            lanes |= nan_lanes(acc[c * vecs + v], acc[(c + 1) * vecs + v]);
        found |= lanes & lanes_below(n_rows - v * LANES);
    }
    return found != 0;
}

/* The weighted values of a panel from key j on, as far as the vector 'first' goes. */
ALWAYS_INLINE int64_t values_span(const qkv_tile_step_args *a, const spans *s, const float *values,
                                  int64_t j, const int first, const int vecs, __m512 *acc)
{
    const float *value = values + j * PANEL, *weight = a->logits + j * TILE;
    for (; j < s->end[first]; j++, value += PANEL, weight += TILE) {
        const row_vectors p = load_rows(weight, first, vecs);
        UNROLL
        for (int c = 0; c < PANEL; c++)
            multiply_add(acc + c * vecs, first, vecs, p, _mm512_set1_ps(value[c]));
    }
    return j;
}

/* Step 4 of the tile: one panel of columns at a time over all keys. */
ALWAYS_INLINE void tile_values(const qkv_tile_step_args *a, const spans *s, const int vecs,
                               const float *rescale, const qkv_tile_step_args *args)
{
    for (int64_t d = 0; d < a->value_dim; d += PANEL) {
        const float *values = a->values + d / PANEL * a->values_keys * PANEL;
        __m512 acc[PANEL * VECS_MAX];
        UNROLL
        for (int u = 0; u < PANEL * vecs; u++)
            acc[u] = _mm512_setzero_ps();

        int64_t j = values_span(a, s, values, 0, 0, vecs, acc);
        if (vecs > 1)
            j = values_span(a, s, values, j, 1, vecs, acc);
        if (vecs > 2)
            values_span(a, s, values, j, 2, vecs, acc);

        if (a->end && has_nan(acc, vecs, a->n_rows)) {
            careful_panel(args, s, d, vecs, rescale);
            continue;
        }
        UNROLL
        for (int u = 0; u < PANEL * vecs; u++) {
            float *out = a->out + (d + u / vecs) * TILE + u % vecs * LANES;
            const __m512 factor = _mm512_loadu_ps(rescale + u % vecs * LANES);
            _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_loadu_ps(out), factor, acc[u]));
        }
    }
}

ALWAYS_INLINE void tile_step(const qkv_tile_step_args *args, const int vecs)
{
    const qkv_tile_step_args a = *args; /* a copy that no store can alias */
    float rescale[TILE];
    __m512 max[VECS_MAX];
    UNROLL
    for (int v = 0; v < vecs; v++)
        max[v] = _mm512_loadu_ps(a.max + v * LANES);
    const spans s = spans_of(args);
    tile_logits(&a, &s, vecs, max);
    tile_softmax(&a, &s, vecs, max, rescale);
    tile_values(&a, &s, vecs, rescale, args);
}

/* Only the row vectors that hold a row are computed. */
void qkv_tile_step_f32_avx512(const qkv_tile_step_args *a)
{
    if (a->n_rows > 2 * LANES)
        tile_step(a, 3);
    else if (a->n_rows > LANES)
        tile_step(a, 2);
    else
        tile_step(a, 1);
}

/* The step in halves, for logits that something happens to in between. */

ALWAYS_INLINE void logits_half(const qkv_tile_step_args *a, const int vecs)
{
    __m512 max[VECS_MAX];
    UNROLL
    for (int v = 0; v < vecs; v++)
        max[v] = _mm512_setzero_ps();
    const spans s = spans_of(a);
    tile_logits(a, &s, vecs, max);
}

ALWAYS_INLINE void weigh_half(const qkv_tile_step_args *a, const float *new_max, const int vecs)
{
    float rescale[TILE];
    __m512 max[VECS_MAX];
    UNROLL
    for (int v = 0; v < vecs; v++)
        max[v] = _mm512_loadu_ps(new_max + v * LANES);
    const spans s = spans_of(a);
    tile_softmax(a, &s, vecs, max, rescale);
    tile_values(a, &s, vecs, rescale, a);
}

void qkv_tile_logits_f32_avx512(const qkv_tile_step_args *args)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = 0;
    if (a.n_rows > 2 * LANES)
        logits_half(&a, 3);
    else if (a.n_rows > LANES)
        logits_half(&a, 2);
    else
        logits_half(&a, 1);
}

void qkv_tile_weigh_f32_avx512(const qkv_tile_step_args *args, const float *max)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = 0;
    if (a.n_rows > 2 * LANES)
        weigh_half(&a, max, 3);
    else if (a.n_rows > LANES)
        weigh_half(&a, max, 2);
    else
        weigh_half(&a, max, 1);
}
