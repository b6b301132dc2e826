/* SPDX-License-Identifier: MIT */
/*
 * The tile driver: many query rows, tile by tile, against one block of keys
 * after the other.
 *
 *     load all tiles of the run
 *     for each block of keys that some row sees
 *         pack the block's values
 *         for each tile that sees a key of it: one step
 *     store all tiles
 *
 * A block's packed values are used by every tile of the run and so by all
 * query heads of the group; the keys are read where they lie. Of tensors that
 * are not f32, a block of keys or values, or a tile of queries or outputs, is
 * converted at a time, through one stage.
 */
#include "attention.h"

#include <float.h>
#include <string.h>

/* The parts of a worker's scratch memory. */
typedef struct tile_scratch {
    float *values, *logits; /* of one block */
    float *query, *out;     /* [tile][head_dim or value_dim][tile_rows] */
    float *max, *sum;       /* [tile][tile_rows] */
    float *stage;           /* rows on their way to or from f32 */
} tile_scratch;

static int64_t panels_dim(const qkv_kernels *k, int64_t value_dim)
{
    return (value_dim + k->value_panel - 1) / k->value_panel * k->value_panel;
}

/* Lays out the parts from 'base' on; returns the floats used. */
static int64_t lay_out(tile_scratch *s, float *base, const qkv_attention_problem *p,
                       const qkv_kernels *k, int64_t run_rows)
{
    const int64_t value_columns = panels_dim(k, p->value_dim);
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    const int64_t most = k->key_block > k->tile_rows ? k->key_block : k->tile_rows;
    const int64_t sizes[] = {
        k->key_block * value_columns,
        (int64_t)k->key_block * k->tile_rows,
        run_rows * p->head_dim,
        run_rows * value_columns,
        run_rows,
        run_rows,
        qkv_is_staged(p) ? most * widest : 0,
    };
    float **parts[] = {&s->values, &s->logits, &s->query, &s->out, &s->max, &s->sum, &s->stage};

    return qkv_lay_out(base, sizes, parts, sizeof sizes / sizeof *sizes);
}

int64_t qkv_tiles_scratch(const qkv_attention_problem *p, const qkv_kernels *k, int64_t run_rows)
{
    tile_scratch unused;
    return lay_out(&unused, NULL, p, k, run_rows);
}

/* One tile of the run: its rows, and the keys that they see. */
typedef struct tile_part {
    int64_t first, count; /* rows of the run */
    qkv_range first_sees, last_sees;
} tile_part;

static tile_part tile_at(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                         int64_t index)
{
    tile_part t = {.first = index * k->tile_rows, .count = k->tile_rows};
    if (t.count > run.count - t.first)
        t.count = run.count - t.first;
    const int64_t row = run.first + t.first;
    t.first_sees = qkv_visible_keys(p, run.sequence, row / p->group);
    t.last_sees = qkv_visible_keys(p, run.sequence, (row + t.count - 1) / p->group);
    return t;
}

/*
 * Rows that a later tile reads or writes come from beyond the private caches,
 * and are too short for the hardware to notice a stream: they are asked for one
 * tile ahead.
 */
#if defined(__GNUC__)
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) ((void)(p))
#endif

static void prefetch_rows(const qkv_attention_problem *p, const qkv_view *view, qkv_row_run run,
                          int64_t first, int64_t count)
{
    enum { CACHE_LINE = 64 };
    void *rows[QKV_TILE_ROWS_MAX];
    if (count > run.count - first)
        count = run.count - first;
    if (count <= 0)
        return;
    qkv_rows_of(view, p, run, first, count, rows);
    const int64_t bytes = view->dim * qkv_element_size(view->dtype);
    for (int64_t i = 0; i < count; i++)
        for (int64_t at = 0; at < bytes; at += CACHE_LINE)
            PREFETCH((const char *)rows[i] + at);
}

static void load_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      tile_part t, tile_scratch *s)
{
    void *rows[QKV_TILE_ROWS_MAX];
    const float *wide[QKV_TILE_ROWS_MAX];
    prefetch_rows(p, &p->query, run, t.first + t.count, t.count);
    qkv_rows_of(&p->query, p, run, t.first, t.count, rows);
    for (int64_t i = 0; i < t.count; i++) {
        wide[i] = rows[i];
        if (p->query.dtype != QKV_F32) {
            float *staged = s->stage + i * p->head_dim;
            qkv_widen_row(k, p->query.dtype, rows[i], staged, p->head_dim);
            wide[i] = staged;
        }
    }
    k->tile_load_f32(wide, t.count, p->head_dim, s->query + t.first * p->head_dim);

    const int64_t columns = panels_dim(k, p->value_dim);
    memset(s->out + t.first * columns, 0, (size_t)(k->tile_rows * columns) * sizeof *s->out);
    for (int64_t i = 0; i < k->tile_rows; i++) {
        s->max[t.first + i] = -FLT_MAX;
        s->sum[t.first + i] = 0.0f;
    }
}

static int32_t clamp_to_block(int64_t key, int64_t block_first, int64_t block_len)
{
    const int64_t j = key - block_first;
    return (int32_t)(j < 0 ? 0 : j < block_len ? j : block_len);
}

/* Takes a tile through the keys of one block that it sees. */
static void step_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      tile_part t, qkv_range block, qkv_f32_rows keys, const tile_scratch *s)
{
    if (t.last_sees.end <= block.begin || t.first_sees.begin >= block.end)
        return;

    const int64_t end = t.last_sees.end < block.end ? t.last_sees.end : block.end;
    const int64_t kv_len = end - block.begin;
    qkv_tile_step_args args = {
        .query = s->query + t.first * p->head_dim,
        .keys = keys.data,
        .values = s->values,
        .logits = s->logits,
        .out = s->out + t.first * panels_dim(k, p->value_dim),
        .max = s->max + t.first,
        .sum = s->sum + t.first,
        .keys_stride = keys.stride,
        .values_keys = block.end - block.begin,
        .n_rows = t.count,
        .kv_len = kv_len,
        .head_dim = p->head_dim,
        .value_dim = p->value_dim,
        .scale_log2 = p->scale_log2,
    };

    int32_t begins[QKV_TILE_ROWS_MAX] = {0}, ends[QKV_TILE_ROWS_MAX] = {0};
    if (t.first_sees.end < end || t.last_sees.begin > block.begin) {
        for (int64_t i = 0; i < t.count; i++) {
            const qkv_range sees =
                qkv_visible_keys(p, run.sequence, (run.first + t.first + i) / p->group);
            begins[i] = clamp_to_block(sees.begin, block.begin, kv_len);
            ends[i] = clamp_to_block(sees.end, block.begin, kv_len);
        }
        args.begin = begins;
        args.end = ends;
    }
    k->tile_step_f32(&args);
}

static void store_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       tile_part t, const tile_scratch *s)
{
    const bool narrow = p->out.dtype != QKV_F32;
    void *rows[QKV_TILE_ROWS_MAX];
    float *wide[QKV_TILE_ROWS_MAX];
    prefetch_rows(p, &p->out, run, t.first + t.count, t.count);
    qkv_rows_of(&p->out, p, run, t.first, t.count, rows);
    for (int64_t i = 0; i < t.count; i++)
        wide[i] = narrow ? s->stage + i * p->value_dim : rows[i];
    const float *max = s->max + t.first, *sum = s->sum + t.first;
    k->tile_store_f32(s->out + t.first * panels_dim(k, p->value_dim), sum, t.count, p->value_dim,
                      wide);

    for (int64_t i = 0; narrow && i < t.count; i++)
        qkv_narrow_row(k, p->out.dtype, wide[i], rows[i], p->value_dim);
    for (int64_t i = 0; p->lse.data && i < t.count; i++)
        *(float *)qkv_row_of(&p->lse, p, run, t.first + i) = qkv_lse_of(max[i], sum[i]);
}

/* All tiles of the run against one block of keys. */
static void step_block(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       int64_t tiles, qkv_range block, const tile_scratch *s)
{
    const int64_t kv_len = block.end - block.begin;
    const qkv_f32_rows values =
        qkv_fetch_rows(p, k, &p->value, run.sequence, run.kv_head, block.begin, kv_len, s->stage);
    k->tile_pack_f32(values.data, values.stride, kv_len, p->value_dim, s->values);

    /* The values are packed: the stage is free for the keys. */
    const qkv_f32_rows keys =
        qkv_fetch_rows(p, k, &p->key, run.sequence, run.kv_head, block.begin, kv_len, s->stage);
    for (int64_t i = 0; i < tiles; i++)
        step_tile(p, k, run, tile_at(p, k, run, i), block, keys, s);
}

/*
 * Blocks have three quarters of the keys that a step can take, so that the last
 * one can take a short rest along: a step of a few keys costs nearly as much in
 * loading and storing what stays.
 */
static qkv_range next_block(const qkv_kernels *k, int64_t first, int64_t keys_end)
{
    const int64_t rest = keys_end - first;
    return (qkv_range){first, first + (rest <= k->key_block ? rest : k->key_block / 4 * 3)};
}

void qkv_run_tiles(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                   float *scratch)
{
    const qkv_kernels *k = plan->kernels;
    const int64_t tiles = (run.count + k->tile_rows - 1) / k->tile_rows;
    tile_scratch s;
    lay_out(&s, scratch, p, k, tiles * k->tile_rows);

    for (int64_t i = 0; i < tiles; i++)
        load_tile(p, k, run, tile_at(p, k, run, i), &s);

    const int64_t keys_end = tile_at(p, k, run, tiles - 1).last_sees.end;
    for (qkv_range block = {0, 0}; block.end < keys_end;) {
        block = next_block(k, block.end, keys_end);
        step_block(p, k, run, tiles, block, &s);
    }

    for (int64_t i = 0; i < tiles; i++)
        store_tile(p, k, run, tile_at(p, k, run, i), &s);
}
