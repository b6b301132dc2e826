/* SPDX-License-Identifier: MIT */
/*
 * The fused attention tile: 24 query rows along the lanes of 6 vectors.
 *
 *   logits   the product of product_neon.h for 4 keys and the query tile, 24
 *            accumulators: a step of 4 of head_dim has 28 loads for 96
 *            multiply-adds. Keys are read where they lie.
 *   softmax  the maximum is taken while the logits are stored; the pass over
 *            them costs 19 operations and 4 register copies a vector.
 *   values   4 columns x 6 vectors, 24 accumulators over all keys of the
 *            block: a key has 7 loads for 24 multiply-adds.
 *
 * 24 rows, not 16 with 6 keys: 4 keys and 4 columns divide a block of 128 and
 * the usual head sizes, and both products have the 24 independent chains that
 * 4 ports with a latency of 4 want more than 16 of. Not 48: the query tile, a
 * block's logits and its keys (6 + 12 + 32 KiB at head_dim 64) fit a
 * first-level cache of 64 KiB together, and a causal mask wastes less.
 *
 * With fewer rows there are fewer vectors and, up to 3 of them, more keys at
 * a time: 3 x 6, 2 x 8, 1 x 8. No row's terms are added in another order for
 * that, so its bits depend neither on n_rows nor on its place in the tile.
 *
 * A key that a row does not see has the logit -inf whatever its bits are, and
 * so exactly the weight 0. Only 0 * NaN and 0 * inf remain: where the plain
 * sum of a block with invisible keys has a NaN, that panel is summed again,
 * key by key under the row's own mask.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *                            bound          neoverse-n1   neoverse-v2   apple-m1
 *     logits, 4 of head_dim  48 / 24 / 32   52.0 / 48.0   25.8 / 24.0   34.0 / 32.0
 *     softmax, 1 key                        63.1 / 64.5   30.1 / 32.0   58.2 / 45.1
 *     values, 1 key          12 / 6 / 8     12.0 / 12.0   6.0 / 6.0     8.0 / 8.0
 *
 * For 24 rows and a key, with head_dim = value_dim = D: 6 D + 63 cycles on
 * neoverse-n1 (clang), 3 D + 32 on neoverse-v2. gcc needs -fno-schedule-insns,
 * which the build gives it: its scheduler before register allocation moves
 * loads up until 16 accumulators are spilled a step, and the logits take
 * 60.0 / 29.3 / 34.7.
 */
#include "internal.h"

#include <math.h>

#include "product_neon.h"

enum {
    TILE = QKV_neon_tile_rows,
    PANEL = QKV_neon_value_panel,
    VECTORS = TILE / 4, /* of rows */
    PACK = 4            /* panels that are packed together: a cache line of values */
};

/* ------------------------------------------------------- in and out */

/* Rows first .. first + 3 of the tile; those from n_rows on are 0. */
static void load_four_rows(const float *const *rows, int64_t first, int64_t n_rows,
                           int64_t head_dim, float *tile)
{
    const uint32x4_t present = first_lanes(n_rows - first);
    const float *row[4];
    QKV_UNROLL
    for (int i = 0; i < 4; i++)
        row[i] = rows[first + i < n_rows ? first + i : first];

    for (int64_t d = 0; d < head_dim; d += 4) {
        const int64_t left = head_dim - d < 4 ? head_dim - d : 4;
        float32x4_t block[4];
        QKV_UNROLL
        for (int i = 0; i < 4; i++)
            block[i] = load_upto4(row[i] + d, left);
        transpose4(block);
        for (int64_t c = 0; c < left; c++)
            vst1q_f32(tile + (d + c) * TILE + first, keep(present, block[c]));
    }
}

void qkv_tile_load_f32_neon(const float *const *rows, int64_t n_rows, int64_t head_dim, float *tile)
{
    for (int64_t i = 0; i < n_rows; i += 4)
        load_four_rows(rows, i, n_rows, head_dim, tile);
}

static void store_four_rows(const float *out, float32x4_t sum, int64_t count, int64_t value_dim,
                            float *const *rows)
{
    const uint32x4_t empty = vceqq_f32(sum, vdupq_n_f32(0.0f));
    const float32x4_t one = vdupq_n_f32(1.0f);
    /*
     * No division by 0, which would raise the caller's exception flags: 1 is
     * or-ed into an empty row's sum. Not a select: clang knows that only the
     * other lanes matter in the end, and drops it. And a division for each
     * element, as n * (1 / n) is not always 1: the mean of equal values has to
     * be that value.
     */
    const uint32x4_t instead = vandq_u32(empty, vreinterpretq_u32_f32(one));
    const float32x4_t total = vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(sum), instead));

    for (int64_t d = 0; d < value_dim; d += 4) {
        const int64_t left = value_dim - d < 4 ? value_dim - d : 4;
        float32x4_t block[4] = {one, one, one, one};
        for (int64_t c = 0; c < left; c++)
            block[c] = keep(vmvnq_u32(empty), vdivq_f32(vld1q_f32(out + (d + c) * TILE), total));
        transpose4(block);
        for (int64_t i = 0; i < count; i++)
            store_upto4(rows[i] + d, block[i], left);
    }
}

void qkv_tile_store_f32_neon(const float *out, const float *sum, int64_t n_rows, int64_t value_dim,
                             float *const *rows)
{
    for (int64_t i = 0; i < n_rows; i += 4) {
        const int64_t count = n_rows - i < 4 ? n_rows - i : 4;
        store_four_rows(out + i, load_upto4(sum + i, count), count, value_dim, rows + i);
    }
}

QKV_INLINE void pack_panels(const float *values, int64_t values_stride, int64_t kv_len, int panels,
                            float *packed)
{
    for (int64_t j = 0; j < kv_len; j++)
        QKV_UNROLL
    for (int p = 0; p < panels; p++)
        vst1q_f32(packed + (p * kv_len + j) * PANEL,
                  vld1q_f32(values + j * values_stride + p * PANEL));
}

void qkv_tile_pack_f32_neon(const float *values, int64_t values_stride, int64_t kv_len,
                            int64_t value_dim, float *packed)
{
    int64_t d = 0;
    for (; d + PACK * PANEL <= value_dim; d += PACK * PANEL)
        pack_panels(values + d, values_stride, kv_len, PACK, packed + d * kv_len);
    for (; d + PANEL <= value_dim; d += PANEL)
        pack_panels(values + d, values_stride, kv_len, 1, packed + d * kv_len);
    if (d < value_dim)
        for (int64_t j = 0; j < kv_len; j++)
            vst1q_f32(packed + d * kv_len + j * PANEL,
                      load_tail(values + j * values_stride + d, value_dim - d));
}

/* ------------------------------------------------------------ logits */

/* All bits set for the rows of vector v that see key j. */
QKV_INLINE uint32x4_t visible(const qkv_tile_step_args *a, int v, int64_t j)
{
    const int32x4_t key = vdupq_n_s32((int32_t)j);
    return vandq_u32(vcleq_s32(vld1q_s32(a->begin + 4 * v), key),
                     vcltq_s32(key, vld1q_s32(a->end + 4 * v)));
}

/* The logits of 'keys' keys from 'first' on; max moves on. */
QKV_INLINE void logits_of_keys(const qkv_tile_step_args *a, int64_t first, int vectors, int keys,
                               float32x4_t *max)
{
    float32x4_t acc[QKV_NEON_PRODUCT_ACCS];
    product(a->keys + first * a->keys_stride, a->keys_stride, a->query, TILE, a->head_dim, keys,
            vectors, acc);
    QKV_UNROLL
    for (int k = 0; k < keys; k++) {
        float *logits = a->logits + (first + k) * TILE;
        QKV_UNROLL
        for (int v = 0; v < vectors; v++) {
            float32x4_t t = vmulq_n_f32(acc[k * vectors + v], a->scale_log2);
            if (a->end)
                t = vbslq_f32(visible(a, v, first + k), t, vdupq_n_f32(-INFINITY));
            vst1q_f32(logits + 4 * v, t);
            max[v] = vmaxnmq_f32(max[v], t);
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

/* The fewer the vectors of rows, the more keys, for enough accumulators. */
QKV_INLINE void tile_logits(const qkv_tile_step_args *a, int vectors, float32x4_t *max)
{
    const int keys = vectors <= 2 ? 8 : vectors == 3 ? 6 : 4;
    lines_ahead lines = lines_ahead_of(a, keys);
    int64_t j = 0;
    for (; j + keys <= a->kv_len; j += keys) {
        ask_ahead(&lines);
        logits_of_keys(a, j, vectors, keys, max);
    }
    if (keys > 4 && j + 4 <= a->kv_len) {
        logits_of_keys(a, j, vectors, 4, max);
        j += 4;
    }
    if (j + 2 <= a->kv_len) {
        logits_of_keys(a, j, vectors, 2, max);
        j += 2;
    }
    if (j < a->kv_len)
        logits_of_keys(a, j, vectors, 1, max);
}

/* ----------------------------------------------------------- softmax */

/* Logits become exponentials; the running maximum and sum move on. */
QKV_INLINE void tile_softmax(const qkv_tile_step_args *a, int vectors, const float32x4_t *max,
                             float32x4_t *rescale)
{
    float32x4_t sum[VECTORS];
    QKV_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = vdupq_n_f32(0.0f);
    for (int64_t j = 0; j < a->kv_len; j++) {
        float *row = a->logits + j * TILE;
        QKV_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float32x4_t p = exp2_f32x4(vsubq_f32(vld1q_f32(row + 4 * v), max[v]));
            vst1q_f32(row + 4 * v, p);
            sum[v] = vaddq_f32(sum[v], p);
        }
    }
    QKV_UNROLL
    for (int v = 0; v < vectors; v++) {
        rescale[v] = exp2_f32x4(vsubq_f32(vld1q_f32(a->max + 4 * v), max[v]));
        vst1q_f32(a->sum + 4 * v, vfmaq_f32(sum[v], vld1q_f32(a->sum + 4 * v), rescale[v]));
        vst1q_f32(a->max + 4 * v, max[v]);
    }
}

/* ------------------------------------------------------------ values */

/*
 * One column for the rows of vector v: the plain sum where that is not a NaN;
 * where it is, the sum over the keys that the row sees. Both are made here,
 * so that the rows that need no care keep the bits that they have without it.
 */
static float32x4_t sum_of_visible(const qkv_tile_step_args *a, const float *column, int v)
{
    float32x4_t plain = vdupq_n_f32(0.0f), careful = plain;
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float32x4_t p = vld1q_f32(a->logits + j * TILE + 4 * v);
        plain = vfmaq_n_f32(plain, p, column[j * PANEL]);
        careful = vbslq_f32(visible(a, v, j), vfmaq_n_f32(careful, p, column[j * PANEL]), careful);
    }
    return vbslq_f32(vceqq_f32(plain, plain), plain, careful);
}

/* A panel of a block with invisible keys, after its plain sum gave a NaN. */
QKV_NOINLINE void careful_panel(const qkv_tile_step_args *a, const float *panel, float *out,
                                const float32x4_t *rescale, int vectors)
{
    QKV_UNROLL
    for (int c = 0; c < PANEL; c++)
        QKV_UNROLL
    for (int v = 0; v < vectors; v++) {
        float *to = out + c * TILE + 4 * v;
        vst1q_f32(to, vfmaq_f32(sum_of_visible(a, panel + c, v), vld1q_f32(to), rescale[v]));
    }
}

QKV_INLINE void panel_values(const qkv_tile_step_args *a, const float *panel, float *out,
                             int vectors, const float32x4_t *rescale)
{
    float32x4_t acc[PANEL * VECTORS];
    QKV_UNROLL
    for (int i = 0; i < PANEL * vectors; i++)
        acc[i] = vdupq_n_f32(0.0f);
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float32x4_t values = vld1q_f32(panel + j * PANEL);
        QKV_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float32x4_t p = vld1q_f32(a->logits + j * TILE + 4 * v);
            QKV_UNROLL
            for (int c = 0; c < PANEL; c++)
                acc[c * vectors + v] = fma_lane(acc[c * vectors + v], p, values, c);
        }
    }

    if (a->end) {
        float32x4_t all = acc[0]; /* inf - inf may raise a false alarm: harmless */
        QKV_UNROLL
        for (int i = 1; i < PANEL * vectors; i++)
            all = vaddq_f32(all, acc[i]);
        if (has_nan(all)) {
            careful_panel(a, panel, out, rescale, vectors);
            return;
        }
    }
    QKV_UNROLL
    for (int c = 0; c < PANEL; c++)
        QKV_UNROLL
    for (int v = 0; v < vectors; v++) {
        float *to = out + c * TILE + 4 * v;
        vst1q_f32(to, vfmaq_f32(acc[c * vectors + v], vld1q_f32(to), rescale[v]));
    }
}

/* -------------------------------------------------------------- step */

QKV_INLINE void tile_step(const qkv_tile_step_args *a, int vectors)
{
    float32x4_t max[VECTORS], rescale[VECTORS];
    QKV_UNROLL
    for (int v = 0; v < vectors; v++)
        max[v] = vld1q_f32(a->max + 4 * v);
    tile_logits(a, vectors, max);
    tile_softmax(a, vectors, max, rescale);
    for (int64_t d = 0; d < a->value_dim; d += PANEL)
        panel_values(a, a->values + d * a->values_keys, a->out + d * TILE, vectors, rescale);
}

void qkv_tile_step_f32_neon(const qkv_tile_step_args *a)
{
    switch ((a->n_rows + 3) / 4) {
    case 1:
        tile_step(a, 1);
        break;
    case 2:
        tile_step(a, 2);
        break;
    case 3:
        tile_step(a, 3);
        break;
    case 4:
        tile_step(a, 4);
        break;
    case 5:
        tile_step(a, 5);
        break;
    default:
        tile_step(a, 6);
        break;
    }
}

/* ------------------------------------------------------ step, in halves */

QKV_INLINE void logits_half(const qkv_tile_step_args *a, int vectors)
{
    float32x4_t max[VECTORS];
    QKV_UNROLL
    for (int v = 0; v < vectors; v++)
        max[v] = vdupq_n_f32(0.0f);
    tile_logits(a, vectors, max);
}

QKV_INLINE void weigh_half(const qkv_tile_step_args *a, const float *new_max, int vectors)
{
    float32x4_t max[VECTORS], rescale[VECTORS];
    QKV_UNROLL
    for (int v = 0; v < vectors; v++)
        max[v] = vld1q_f32(new_max + 4 * v);
    tile_softmax(a, vectors, max, rescale);
    for (int64_t d = 0; d < a->value_dim; d += PANEL)
        panel_values(a, a->values + d * a->values_keys, a->out + d * TILE, vectors, rescale);
}

void qkv_tile_logits_f32_neon(const qkv_tile_step_args *args)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = 0;
    switch ((a.n_rows + 3) / 4) {
    case 1:
        logits_half(&a, 1);
        break;
    case 2:
        logits_half(&a, 2);
        break;
    case 3:
        logits_half(&a, 3);
        break;
    case 4:
        logits_half(&a, 4);
        break;
    case 5:
        logits_half(&a, 5);
        break;
    default:
        logits_half(&a, 6);
        break;
    }
}

void qkv_tile_weigh_f32_neon(const qkv_tile_step_args *args, const float *max)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = 0;
    switch ((a.n_rows + 3) / 4) {
    case 1:
        weigh_half(&a, max, 1);
        break;
    case 2:
        weigh_half(&a, max, 2);
        break;
    case 3:
        weigh_half(&a, max, 3);
        break;
    case 4:
        weigh_half(&a, max, 4);
        break;
    case 5:
        weigh_half(&a, max, 5);
        break;
    default:
        weigh_half(&a, max, 6);
        break;
    }
}
