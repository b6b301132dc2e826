/* SPDX-License-Identifier: MIT */
/*
 * The tile driver: many query rows, tile by tile, against one block of keys
 * after the other.
 *
 *     for each block of keys that some row sees
 *         pack the block's values
 *         for each tile of the run
 *             before its first block, load it
 *             if it sees a key of the block: one step
 *             after its last block, store it
 *
 * A block's packed values are used by every tile of the run and so by all
 * query heads of the group; the keys are read where they lie. Of tensors that
 * are not f32, a block of keys or values, or a tile of queries or outputs, is
 * converted at a time, through a stage.
 */
#include "anew.h"
#include "attention.h"
#include "typed.h"
#include "visibility.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* The parts of a worker's scratch memory. */
typedef struct tile_scratch {
    int64_t keys;           /* of a block, at most */
    float *values, *logits; /* of one block */
    float *query, *out;     /* [tile][head_dim or value_dim][tile_rows] */
    float *max, *sum;       /* [tile][tile_rows] */
    float *stage;           /* keys or values on their way to f32 */
    float *row_stage;       /* queries on theirs, or outputs from f32 */
    float *bias;            /* [keys][tile_rows], of one tile and block */
    float *bias_rows;       /* [tile_rows][keys], the same before it is turned */
    float *odd;             /* as 'values': those that are not finite */
    float *anew;            /* for qkv_end_row() */
} tile_scratch;

static int64_t panels_dim(const qkv_kernels *k, int64_t value_dim)
{
    return (value_dim + k->value_panel - 1) & -(int64_t)k->value_panel; /* a power of two */
}

/* Can there be blocks whose logits something happens to before the softmax? */
static bool may_adjust(const qkv_attention_problem *p)
{
    return p->adjusted || p->sink_tokens > 0;
}

/* Lays out from 'base' on what the rows of a run take; returns the floats used. */
static int64_t lay_out_rows(tile_scratch *s, float *base, const qkv_attention_problem *p,
                            const qkv_kernels *k, int64_t run_rows)
{
    qkv_layout layout = {.base = base};
    s->query = qkv_next_part(&layout, run_rows * p->head_dim);
    s->out = qkv_next_part(&layout, run_rows * panels_dim(k, p->value_dim));
    s->max = qkv_next_part(&layout, run_rows);
    s->sum = qkv_next_part(&layout, run_rows);
    return layout.used;
}

/* The same for a block of keys, and what is stored and fetched through a stage. */
static int64_t lay_out_block(tile_scratch *s, float *base, const qkv_attention_problem *p,
                             const qkv_kernels *k, int64_t keys)
{
    const int64_t value_columns = panels_dim(k, p->value_dim);
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    const int64_t tile = keys * k->tile_rows;
    qkv_layout layout = {.base = base};
    s->keys = keys;
    s->values = qkv_next_part(&layout, keys * value_columns);
    s->logits = qkv_next_part(&layout, tile);
    s->stage = qkv_next_part(&layout, qkv_is_staged(p) ? keys * widest : 0);
    s->row_stage = qkv_next_part(&layout, qkv_is_staged(p) ? k->tile_rows * widest : 0);
    s->bias = qkv_next_part(&layout, qkv_has_bias(p) ? tile : 0);
    s->bias_rows = qkv_next_part(&layout, qkv_has_bias(p) ? tile : 0);
    s->odd = qkv_next_part(&layout, may_adjust(p) ? keys * value_columns : 0);
    s->anew = qkv_next_part(&layout, qkv_anew_scratch(p));
    return layout.used;
}

int64_t qkv_tile_rows_scratch(const qkv_attention_problem *p, const qkv_kernels *k,
                              int64_t run_rows)
{
    tile_scratch unused;
    return lay_out_rows(&unused, NULL, p, k, run_rows);
}

int64_t qkv_tile_block_scratch(const qkv_attention_problem *p, const qkv_kernels *k, int64_t keys)
{
    tile_scratch unused;
    return lay_out_block(&unused, NULL, p, k, keys);
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

/* Does a row of the tile see a key of the block, by its position? */
static bool tile_reaches(const qkv_attention_problem *p, qkv_row_run run, tile_part t,
                         qkv_range block)
{
    if (t.first_sees.begin < block.end && block.begin < t.last_sees.end)
        return true;
    return block.begin < qkv_sink_keys(p, run.sequence, t.last_sees);
}

static void load_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      tile_part t, void *const *rows, const tile_scratch *s)
{
    const float *wide[QKV_TILE_ROWS_MAX];
    for (int64_t i = 0; i < t.count; i++) {
        wide[i] = rows[i];
        if (p->query.dtype != QKV_F32) {
            float *staged = s->row_stage + i * p->head_dim;
            qkv_widen_typed(k, p->query.dtype, rows[i], NULL, staged, p->head_dim);
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
    for (int64_t i = 0; p->sinks && i < t.count; i++) {
        const qkv_row_state first = qkv_first_state(p, qkv_place_of(p, run, t.first + i).head);
        s->max[t.first + i] = first.max;
        s->sum[t.first + i] = first.sum;
    }
}

/* ----------------------------------------------------------------- steps */

static int32_t clamp_to_block(int64_t key, int64_t block_first, int64_t block_len)
{
    const int64_t j = key - block_first;
    return (int32_t)(j < 0 ? 0 : j < block_len ? j : block_len);
}

/* A block of keys; its values and keys are fetched when a tile first needs them. */
typedef struct key_block {
    qkv_range range;
    bool fetched;
    bool odd; /* some value is not finite */
    qkv_f32_rows keys;
} key_block;

/* Does something happen to the block's logits? Or do the sinks end inside it,
 * so that a row may see two parts of it? */
static bool is_adjusted(const qkv_attention_problem *p, qkv_range block)
{
    return p->adjusted || (block.begin < p->sink_tokens && p->sink_tokens < block.end);
}

/* Moves the values that are not finite from 'values' to 'odd'; any at all? */
static bool part_odd_values(float *values, float *odd, int64_t n)
{
    const bool any = qkv_any_odd(values, n);
    for (int64_t i = 0; any && i < n; i++) {
        const bool finite = isfinite(values[i]);
        odd[i] = finite ? 0.0f : values[i];
        values[i] = finite ? values[i] : 0.0f;
    }
    return any;
}

static void fetch(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                  key_block *block, const tile_scratch *s)
{
    if (block->fetched)
        return;
    block->fetched = true;
    const int64_t first = block->range.begin, kv_len = block->range.end - first;
    const qkv_f32_rows values =
        qkv_fetch_rows(p, k, &p->value, run.sequence, run.kv_head, first, kv_len, s->stage);
    k->tile_pack_f32(values.data, values.stride, kv_len, p->value_dim, s->values);
    if (is_adjusted(p, block->range))
        block->odd = part_odd_values(s->values, s->odd, kv_len * panels_dim(k, p->value_dim));

    /* The values are packed: the stage is free for the keys. */
    block->keys = qkv_fetch_rows(p, k, &p->key, run.sequence, run.kv_head, first, kv_len, s->stage);
}

/* Each row's visible part of the block. */
typedef struct row_ends {
    int32_t begin[QKV_TILE_ROWS_MAX], end[QKV_TILE_ROWS_MAX];
} row_ends;

static row_ends ends_in_block(const qkv_attention_problem *p, qkv_row_run run, tile_part t,
                              int64_t block_first, int64_t kv_len)
{
    row_ends ends = {{0}, {0}};
    const bool all_sinks = block_first + kv_len <= p->sink_tokens;
    for (int64_t i = 0; i < t.count; i++) {
        const qkv_range sees =
            qkv_visible_keys(p, run.sequence, (run.first + t.first + i) / p->group);
        ends.begin[i] = all_sinks ? 0 : clamp_to_block(sees.begin, block_first, kv_len);
        ends.end[i] = clamp_to_block(sees.end, block_first, kv_len);
    }
    return ends;
}

/* The biases of a tile against a block, [kv_len][tile_rows]; false if they
 * hide all of it. */
static bool bias_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      tile_part t, int64_t first, int64_t kv_len, const tile_scratch *s)
{
    const float *rows[QKV_TILE_ROWS_MAX];
    bool any = false;
    qkv_row_place before = {0};
    for (int64_t i = 0; i < t.count; i++) {
        const qkv_row_place place = qkv_place_of(p, run, t.first + i);
        float *row = s->bias_rows + i * s->keys;
        if (i > 0 && qkv_same_bias(p, before, place)) {
            rows[i] = rows[i - 1];
        } else {
            any |= qkv_bias_row(p, k, place, first, kv_len, row);
            rows[i] = row;
        }
        before = place;
    }
    if (any)
        k->tile_load_f32(rows, t.count, kv_len, s->bias);
    return any;
}

/* What tile_adjust reads of each row. */
typedef struct row_numbers {
    float scale[QKV_TILE_ROWS_MAX], slope[QKV_TILE_ROWS_MAX], behind[QKV_TILE_ROWS_MAX];
    float max[QKV_TILE_ROWS_MAX];
} row_numbers;

static qkv_tile_adjust_args adjust_args(const qkv_attention_problem *p, const qkv_kernels *k,
                                        qkv_row_run run, tile_part t, int64_t first,
                                        const tile_scratch *s, row_numbers *numbers)
{
    qkv_row_factors f = {0};
    *numbers = (row_numbers){{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < t.count; i++) {
        const qkv_row_place place = qkv_place_of(p, run, t.first + i);
        f = qkv_factors_of(p, place.head, QKV_UNITS_LOG2, qkv_has_bias(p));
        numbers->scale[i] = f.scale;
        numbers->slope[i] = f.slope;
        numbers->behind[i] = qkv_behind_of(place, first);
        numbers->max[i] = s->max[t.first + i];
    }
    return (qkv_tile_adjust_args){.logits = s->logits,
                                  .scale = numbers->scale,
                                  .slope = p->slopes ? numbers->slope : NULL,
                                  .behind = p->slopes ? numbers->behind : NULL,
                                  .bias = qkv_has_bias(p) ? s->bias : NULL,
                                  .max = numbers->max,
                                  .n_rows = t.count,
                                  .tile_rows = k->tile_rows,
                                  .cap = f.cap,
                                  .bias_scale = f.bias_scale};
}

static bool row_sees(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    if (a->end && (j >= a->end[i] || (j < a->begin[i] && j >= a->sinks)))
        return false;
    return !a->bias || a->bias[j * a->tile_rows + i] != -INFINITY;
}

/* The values that are not finite, for the rows that see their keys. */
static void add_odd_values(const qkv_kernels *k, const qkv_tile_adjust_args *a,
                           const qkv_tile_step_args *step, const float *odd)
{
    for (int64_t d = 0; d < step->value_dim; d++) {
        const float *column =
            odd + d / k->value_panel * k->value_panel * step->values_keys + d % k->value_panel;
        for (int64_t j = 0; j < step->kv_len; j++) {
            const float value = column[j * k->value_panel];
            for (int64_t i = 0; value != 0.0f && i < step->n_rows; i++)
                if (row_sees(a, i, j))
                    step->out[d * k->tile_rows + i] += step->logits[j * k->tile_rows + i] * value;
        }
    }
}

/* A step with something done to the logits on the way. */
static void adjusted_step(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                          tile_part t, const key_block *block, qkv_tile_step_args *step,
                          const tile_scratch *s)
{
    const int64_t first = block->range.begin;
    row_numbers numbers;
    qkv_tile_adjust_args adjust = adjust_args(p, k, run, t, first, s, &numbers);
    adjust.kv_len = step->kv_len;
    adjust.begin = step->begin;
    adjust.end = step->end;
    adjust.sinks = clamp_to_block(p->sink_tokens, first, step->kv_len);

    step->scale_log2 = 1.0f;
    k->tile_logits_f32(step);
    k->tile_adjust_f32(&adjust);
    k->tile_weigh_f32(step, numbers.max);
    if (block->odd)
        add_odd_values(k, &adjust, step, s->odd);
}

/*
 * What comes from beyond the private caches soon after a step, which asks for it while
 * it computes: at once it would fill all the buffers that a core has for such lines,
 * and wait for them.
 */
typedef struct rows_ahead {
    const void *row[2 * QKV_TILE_ROWS_MAX + 2 * QKV_KEY_BLOCK];
    int64_t count, bytes; /* of the longest */
} rows_ahead;

static void add_rows_ahead(const qkv_view *view, void *const *rows, int64_t n, rows_ahead *ahead)
{
    const int64_t bytes = qkv_bytes(view->dtype, view->dim);
    for (int64_t i = 0; i < n; i++)
        ahead->row[ahead->count + i] = rows[i];
    ahead->count += n;
    ahead->bytes = bytes > ahead->bytes ? bytes : ahead->bytes;
}

static void add_pieces_ahead(const qkv_attention_problem *p, const qkv_view *view,
                             qkv_piece_fn *pieces, qkv_row_run run, qkv_range keys,
                             rows_ahead *ahead)
{
    const int64_t bytes = qkv_bytes(view->dtype, view->dim);
    for (int64_t j = keys.begin; j < keys.end;) {
        const qkv_kv_piece piece = pieces(p, run.sequence, run.kv_head, j, keys.end - j);
        for (int64_t i = 0; i < piece.count; i++)
            ahead->row[ahead->count++] = (const char *)piece.data + i * piece.stride_bytes;
        j += piece.count;
    }
    ahead->bytes = bytes > ahead->bytes ? bytes : ahead->bytes;
}

static void add_keys_ahead(const qkv_attention_problem *p, qkv_row_run run, qkv_range keys,
                           rows_ahead *ahead)
{
    add_pieces_ahead(p, &p->value, qkv_value_piece, run, keys, ahead);
    add_pieces_ahead(p, &p->key, qkv_key_piece, run, keys, ahead);
}

/* Takes a tile through the keys of one block that it sees. */
static void step_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      tile_part t, key_block *block, const rows_ahead *ahead, const tile_scratch *s)
{
    const qkv_range range = block->range;
    if (!tile_reaches(p, run, t, range))
        return;
    const int64_t end = t.last_sees.end < range.end ? t.last_sees.end : range.end;
    const int64_t kv_len = end - range.begin;
    if (qkv_has_bias(p) && !bias_tile(p, k, run, t, range.begin, kv_len, s))
        return;
    fetch(p, k, run, block, s);

    qkv_tile_step_args args = {
        .query = s->query + t.first * p->head_dim,
        .keys = block->keys.data,
        .values = s->values,
        .logits = s->logits,
        .out = s->out + t.first * panels_dim(k, p->value_dim),
        .max = s->max + t.first,
        .sum = s->sum + t.first,
        .keys_stride = block->keys.stride,
        .values_keys = range.end - range.begin,
        .n_rows = t.count,
        .kv_len = kv_len,
        .head_dim = p->head_dim,
        .value_dim = p->value_dim,
        .scale_log2 = p->scale_log2,
        .ahead = ahead->row,
        .ahead_rows = ahead->count,
        .ahead_bytes = ahead->bytes,
    };
    row_ends ends;
    if (t.first_sees.end < end || t.last_sees.begin > range.begin) {
        ends = ends_in_block(p, run, t, range.begin, kv_len);
        args.begin = ends.begin;
        args.end = ends.end;
    }
    if (is_adjusted(p, range))
        adjusted_step(p, k, run, t, block, &args, s);
    else
        k->tile_step_f32(&args);
}

/* Row i of the tile becomes what it is made anew. */
static void replace_row(const qkv_attention_problem *p, const qkv_kernels *k, tile_part t,
                        int64_t i, qkv_row_end end, const tile_scratch *s)
{
    float *out = s->out + t.first * panels_dim(k, p->value_dim) + i;
    for (int64_t d = 0; d < p->value_dim; d++)
        out[d * k->tile_rows] = end.sums[d];
    s->sum[t.first + i] = end.total.sum;
}

/* The ends of rows, and what is written of them beside their output. */
static void end_rows(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                     tile_part t, const tile_scratch *s)
{
    const bool numbers = p->lse.data || p->row_max.data || p->weights.data;
    for (int64_t i = 0; i < t.count; i++) {
        const int64_t row = t.first + i;
        const qkv_row_state state = {s->max[row], s->sum[row]};
        if (!numbers && !qkv_is_extreme(p, state))
            continue;
        const qkv_row_end end = qkv_end_row(p, k, run, row, state, s->anew);
        if (end.sums)
            replace_row(p, k, t, i, end, s);
        qkv_store_row_numbers(p, run, row, end.total);
        if (p->weights.data)
            qkv_store_weights(p, k, run, row, end.total, s->anew);
    }
}

static void store_tile(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       tile_part t, void *const *rows, const tile_scratch *s)
{
    /* Before the output, which may lie over the queries. */
    end_rows(p, k, run, t, s);
    const bool narrow = p->out.dtype != QKV_F32;
    float *wide[QKV_TILE_ROWS_MAX];
    for (int64_t i = 0; i < t.count; i++)
        wide[i] = narrow ? s->row_stage + i * p->value_dim : rows[i];
    k->tile_store_f32(s->out + t.first * panels_dim(k, p->value_dim), s->sum + t.first, t.count,
                      p->value_dim, wide);
    for (int64_t i = 0; narrow && i < t.count; i++)
        qkv_narrow_typed(k, p->out.dtype, wide[i], rows[i], NULL, p->value_dim);
}

/*
 * The block that follows after key 'first', of those that the run looks at:
 * with keys before 'sinks', or from the range on that its rows see.
 *
 * Blocks have three quarters of the keys that a step can take, so that the last
 * one can take a short rest along: a step of a few keys costs nearly as much in
 * loading and storing what stays. But where no bit may depend on how many
 * queries there are, neither may where blocks end. They begin at multiples of
 * their size, wherever a window does: so bits do not depend on how the rows are
 * dealt out to tasks.
 */
static qkv_range next_block(const qkv_attention_problem *p, int64_t keys, int64_t first,
                            int64_t sinks, qkv_range sees)
{
    const int64_t size = keys / 4 * 3, begin = sees.begin / size * size;
    if (first >= sinks && first < begin)
        first = begin;
    /* Of a block of which only sinks are seen the rest would cost time. */
    if (first < sinks && sinks < first + size && first + size <= begin)
        return (qkv_range){first, sinks};
    const int64_t rest = sees.end - first;
    const int64_t most = p->invariant ? size : keys;
    return (qkv_range){first, first + (rest <= most ? rest : size)};
}

void qkv_run_tiles(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                   float *scratch)
{
    const qkv_kernels *k = plan->kernels;
    const int64_t tiles = (run.count + k->tile_rows - 1) / k->tile_rows;
    tile_scratch s;
    lay_out_block(&s, scratch + lay_out_rows(&s, scratch, p, k, tiles * k->tile_rows), p, k,
                  plan->key_block);

    const qkv_range first_sees = tile_at(p, k, run, 0).first_sees;
    const qkv_range last_sees = tile_at(p, k, run, tiles - 1).last_sees;
    const qkv_range sees = {first_sees.begin, last_sees.end};
    const int64_t sinks = qkv_sink_keys(p, run.sequence, last_sees);
    key_block block = {.range = next_block(p, s.keys, 0, sinks, sees)};
    void *queries[QKV_TILE_ROWS_MAX], *outs[QKV_TILE_ROWS_MAX];
    for (bool first = true, last = false; !last; first = false) {
        last = block.range.end >= sees.end;
        qkv_range after = {0, 0};
        if (!last)
            after = next_block(p, s.keys, block.range.end, sinks, sees);
        for (int64_t i = 0; i < tiles; i++) {
            const tile_part t = tile_at(p, k, run, i);
            rows_ahead ahead;
            ahead.count = ahead.bytes = 0;
            if (first && i == 0)
                qkv_rows_of(&p->query, p, run, t.first, t.count, queries);
            if (first)
                load_tile(p, k, run, t, queries, &s);
            if (first && i + 1 < tiles) {
                const tile_part u = tile_at(p, k, run, i + 1);
                qkv_rows_of(&p->query, p, run, u.first, u.count, queries);
                add_rows_ahead(&p->query, queries, u.count, &ahead);
            }
            if (last) {
                qkv_rows_of(&p->out, p, run, t.first, t.count, outs);
                add_rows_ahead(&p->out, outs, t.count, &ahead);
            }
            if (i + 1 == tiles && !last)
                add_keys_ahead(p, run, after, &ahead);
            step_tile(p, k, run, t, &block, &ahead, &s);
            if (last)
                store_tile(p, k, run, t, outs, &s);
        }
        block = (key_block){.range = after};
    }
}
