/* SPDX-License-Identifier: MIT */
#include "adjust.h"
#include "typed.h"
#include "visibility.h"

#include <math.h>
#include <string.h>

enum {
    /* Scratch memory of a worker stays below this where a tile fits at all. */
    SCRATCH_LIMIT = 1 << 20,
    /* The queries and running outputs of a task, which every key block
     * passes over. A task of 512 KiB reads and packs the keys and values half as
     * often as one of 256 KiB, which counts with few queries and many keys (6 %
     * with 256 on 4096); that its state may come from the third-level cache
     * costs less: a step of a tile is long and reads it in order. */
    TASK_STATE_LIMIT = 512 << 10,
    /* More rows than this do not make packing a value block any cheaper. */
    TASK_ROWS_LIMIT = 528,
    /* Rows a task of the row driver. */
    ROW_TASK_ROWS = 64
};

qkv_sequence qkv_sequence_at(const qkv_attention_problem *p, int64_t index)
{
    qkv_sequence s = {.index = index,
                      .q_len = p->q_len,
                      .kv_len = p->kv_len,
                      .q_batch = index,
                      .kv_batch = index};
    if (p->q_starts) {
        s.q_batch = 0;
        s.q_first = p->q_starts[index];
        s.q_len = p->q_starts[index + 1] - s.q_first;
    }
    if (p->kv_starts) {
        s.kv_batch = 0;
        s.kv_first = p->kv_starts[index];
        s.kv_len = p->kv_starts[index + 1] - s.kv_first;
    }
    if (p->kv_lens)
        s.kv_len = p->kv_lens[index];
    if (p->page_table)
        s.pages = p->page_table + index * p->page_table_stride;
    s.q_offset = p->q_offsets ? p->q_offsets[index] : s.kv_len - s.q_len;
    return s;
}

void qkv_rows_of(const qkv_view *view, const qkv_attention_problem *p, qkv_row_run run,
                 int64_t first, int64_t count, void **rows)
{
    const int64_t next_head = qkv_bytes(view->dtype, view->stride[QKV_AXIS_HEAD]);
    const int64_t next_row =
        qkv_bytes(view->dtype, view->stride[QKV_AXIS_ROW]) - (p->group - 1) * next_head;
    int64_t head = (run.first + first) % p->group;
    for (int64_t i = 0; i < count; i++) {
        if (i == 0) {
            rows[0] = qkv_row_of(view, p, run, first);
        } else if (++head == p->group) {
            head = 0;
            rows[i] = (char *)rows[i - 1] + next_row;
        } else {
            rows[i] = (char *)rows[i - 1] + next_head;
        }
    }
}

static qkv_kv_piece piece_at(const qkv_attention_problem *p, const qkv_view *view,
                             const qkv_view *scale, const qkv_sequence *s, int64_t kv_head,
                             int64_t first, int64_t most)
{
    int64_t batch = s->kv_batch, row = s->kv_first + first;
    if (s->pages) {
        const int64_t page_size = INT64_C(1) << p->page_shift;
        batch = s->pages[first >> p->page_shift];
        row = first & (page_size - 1);
        most = page_size - row < most ? page_size - row : most;
    }
    qkv_kv_piece piece = {.data = qkv_view_row(view, batch, kv_head, row),
                          .stride_bytes = qkv_bytes(view->dtype, view->stride[QKV_AXIS_ROW]),
                          .count = most};
    if (scale->data) {
        piece.scales = qkv_view_row(scale, batch, kv_head, row);
        piece.scales_stride = scale->stride[QKV_AXIS_ROW];
    }
    return piece;
}

qkv_kv_piece qkv_key_piece(const qkv_attention_problem *p, const qkv_sequence *s, int64_t kv_head,
                           int64_t first, int64_t most)
{
    return piece_at(p, &p->key, &p->key_scale, s, kv_head, first, most);
}

qkv_kv_piece qkv_value_piece(const qkv_attention_problem *p, const qkv_sequence *s, int64_t kv_head,
                             int64_t first, int64_t most)
{
    return piece_at(p, &p->value, &p->value_scale, s, kv_head, first, most);
}

qkv_f32_rows qkv_fetch_rows(const qkv_attention_problem *p, const qkv_kernels *k,
                            const qkv_view *view, const qkv_sequence *s, int64_t kv_head,
                            int64_t first, int64_t count, float *stage)
{
    const qkv_view *scale = view == &p->key ? &p->key_scale : &p->value_scale;
    qkv_kv_piece piece = piece_at(p, view, scale, s, kv_head, first, count);
    if (view->dtype == QKV_F32 && piece.count == count)
        return (qkv_f32_rows){piece.data, view->stride[QKV_AXIS_ROW]};

    float *wide = stage;
    for (int64_t done = 0; done < count; done += piece.count) {
        piece = piece_at(p, view, scale, s, kv_head, first + done, count - done);
        const char *row = piece.data;
        for (int64_t i = 0; i < piece.count; i++, row += piece.stride_bytes, wide += view->dim)
            qkv_widen_typed(k, view->dtype, row,
                            piece.scales ? piece.scales + i * piece.scales_stride : NULL, wide,
                            view->dim);
    }
    return (qkv_f32_rows){stage, view->dim};
}

/* The rows of each task, evened out so that the last one is not a small rest. */
static int64_t tile_task_rows(const qkv_attention_plan *plan, int64_t rows)
{
    const int64_t tile = plan->kernels->tile_rows, tiles = (rows + tile - 1) / tile;
    const int64_t tasks = (tiles + plan->task_tiles - 1) / plan->task_tiles;
    return (tiles + tasks - 1) / tasks * tile;
}

/* The most tiles a task may have for its state, which may take 'rest' bytes, to stay
 * within the limit; 'dims' is of queries and values together. */
static int64_t task_tiles(const qkv_kernels *k, int64_t dims, int64_t rest)
{
    const int64_t state = rest < TASK_STATE_LIMIT ? rest : TASK_STATE_LIMIT;
    const int64_t row = dims * (int64_t)sizeof(float);
    const int64_t rows = row * TASK_ROWS_LIMIT <= state ? TASK_ROWS_LIMIT : state / row;
    return rows < k->tile_rows ? 1 : (int32_t)rows / k->tile_rows;
}

int64_t qkv_pass_rows(bool general)
{
    return general ? QKV_ROWS_MAX : QKV_PASS_ROWS;
}

/* Cuts the keys into parts of as many blocks, no more than QKV_PARTS_MAX. */
static void cut_keys(qkv_cut *cut, int64_t kv_len)
{
    const int64_t blocks = (kv_len + QKV_KEY_BLOCK - 1) / QKV_KEY_BLOCK;
    const int64_t each = (blocks + QKV_PARTS_MAX - 1) / QKV_PARTS_MAX;
    if (blocks < 2)
        return;
    cut->part_keys = each * QKV_KEY_BLOCK;
    cut->parts = (blocks + each - 1) / each;
}

qkv_range qkv_part_keys(const qkv_cut *cut, const qkv_sequence *s, int64_t part)
{
    const int64_t begin = part * cut->part_keys, rest = s->kv_len - begin;
    return (qkv_range){begin, rest < cut->part_keys ? s->kv_len : begin + cut->part_keys};
}

qkv_cut qkv_cut_sequence(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                         const qkv_sequence *s)
{
    const qkv_kernels *k = plan->kernels;
    qkv_cut cut = {.rows = p->group * s->q_len};
    if (cut.rows == 0)
        return cut;
    if (cut.rows <= plan->short_rows && s->kv_len <= QKV_SHORT_KEYS && s->kv_len > 0)
        return (qkv_cut){.route = QKV_ROUTE_SHORT,
                         .rows = cut.rows,
                         .run_rows = cut.rows,
                         .runs = 1,
                         .part_keys = s->kv_len,
                         .parts = 1};
    /* Keys and values that are not f32 are read where they lie by rows, while
     * tiles convert them first. */
    const bool cache_f32 = p->key.dtype == QKV_F32 && p->value.dtype == QKV_F32;
    const int64_t few = cache_f32 ? k->row_limit : k->row_limit_narrow;
    const bool few_rows = cut.rows <= few && !p->invariant;
    if (plan->general || s->kv_len == 0 || few_rows) {
        cut.route = QKV_ROUTE_ROW;
        cut.run_rows = cut.rows <= ROW_TASK_ROWS
                           ? cut.rows
                           : (ROW_TASK_ROWS + p->group - 1) / p->group * p->group;
    } else {
        cut.run_rows = tile_task_rows(plan, cut.rows);
    }
    cut.runs = cut.rows <= cut.run_rows ? 1 : (cut.rows + cut.run_rows - 1) / cut.run_rows;
    cut.parts = 1;
    cut.part_keys = s->kv_len;
    if (!plan->general && cut.route == QKV_ROUTE_ROW && cut.rows <= QKV_PASS_ROWS)
        cut_keys(&cut, s->kv_len);
    return cut;
}

/* How many parts of its keys are in the shared prefix and seen by all its rows. */
static int64_t shared_parts(const qkv_attention_problem *p, const qkv_sequence *s,
                            const qkv_cut *cut)
{
    if (p->shared_len == 0 || cut->parts < 2 || qkv_has_bias(p))
        return 0;
    const qkv_range first = qkv_visible_keys(p, s, 0);
    if (qkv_visible_keys(p, s, s->q_len - 1).begin > 0)
        return 0;
    return (first.end < p->shared_len ? first.end : p->shared_len) / cut->part_keys;
}

qkv_sharing qkv_sharing_from(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                             int64_t first)
{
    qkv_sharing sharing = {.first = first, .count = 1};
    if (p->shared_len == 0)
        return sharing;
    qkv_sequence s = qkv_sequence_at(p, first);
    const qkv_cut cut = qkv_cut_sequence(p, plan, &s);
    const int64_t parts = shared_parts(p, &s, &cut);
    for (int64_t b = first + 1, rows = cut.rows; b < p->batch && parts > 0; b++) {
        s = qkv_sequence_at(p, b);
        const qkv_cut next = qkv_cut_sequence(p, plan, &s);
        rows += next.rows;
        if (rows > QKV_SHARING_ROWS || next.part_keys != cut.part_keys ||
            shared_parts(p, &s, &next) != parts)
            break;
        sharing.count++;
        sharing.parts = parts;
    }
    return sharing;
}

/* The most rows that may go at once on a short sequence: none where something is
 * done to logits or no bit may depend on q_len. */
static int64_t short_rows(const qkv_attention_problem *p, const qkv_attention_plan *plan)
{
    const bool plain = !plan->general && !p->invariant && !p->adjusted && !p->windowed &&
                       !p->sinks && p->head_dim <= QKV_DOT_BLOCK;
    return plain ? plan->kernels->short_rows : 0;
}

/* Keys of a tile's step: as many as the kernels take, or fewer where one tile and what
 * they are converted in would not fit. */
static int64_t tile_keys(const qkv_attention_problem *p, const qkv_kernels *k, int64_t most_floats)
{
    enum { FEWEST = 32 };
    const int64_t rows = qkv_tile_rows_scratch(p, k, k->tile_rows);
    int64_t keys = k->key_block;
    while (keys / 2 >= FEWEST && rows + qkv_tile_block_scratch(p, k, keys) > most_floats)
        keys /= 2;
    return keys;
}

/*
 * A worker's scratch memory is enough for every number of rows and keys, so that
 * one buffer serves every call with these head sizes. A tile that does not fit
 * the limit (no head size above 2^20 does, and larger ones could overflow the sum)
 * is left to the row driver.
 */
qkv_attention_plan qkv_plan_attention(const qkv_attention_problem *p, const qkv_kernels *k)
{
    const int64_t most_floats = SCRATCH_LIMIT / (int64_t)sizeof(float);
    qkv_attention_plan plan = {.kernels = k, .general = true};
    int64_t floats = 0;
    if ((p->head_dim | p->value_dim) < 2 << 20) {
        plan.key_block = tile_keys(p, k, most_floats);
        const int64_t block = qkv_tile_block_scratch(p, k, plan.key_block);
        plan.task_tiles = task_tiles(k, p->head_dim + p->value_dim,
                                     (most_floats - block) * (int64_t)sizeof(float));
        floats = block + qkv_tile_rows_scratch(p, k, plan.task_tiles * k->tile_rows);
        /* Where there is room for several tiles there is for one. */
        plan.general = plan.task_tiles == 1 && floats > most_floats;
    }
    const int64_t rows_floats = qkv_rows_scratch(p, plan.general);
    plan.short_rows = short_rows(p, &plan);
    const int64_t short_floats = plan.short_rows ? qkv_short_scratch(p, plan.short_rows) : 0;
    if (plan.general || floats < rows_floats)
        floats = rows_floats;
    if (floats < short_floats)
        floats = short_floats;
    plan.worker_bytes = (size_t)floats * sizeof(float);
    return plan;
}

int64_t qkv_attention_tasks(const qkv_attention_problem *p, const qkv_attention_plan *plan)
{
    const qkv_sequence s = qkv_sequence_at(p, 0);
    return p->batch * p->kv_heads * qkv_cut_sequence(p, plan, &s).runs;
}

void qkv_run_cut(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                 const qkv_sequence *s, const qkv_cut *cut, int64_t task, void *scratch)
{
    const int64_t head = cut->runs == 1 ? task : task / cut->runs;
    qkv_row_run run = {.sequence = s,
                       .kv_head = head,
                       .first = (task - head * cut->runs) * cut->run_rows,
                       .count = cut->run_rows};
    if (run.count > cut->rows - run.first)
        run.count = cut->rows - run.first;

    if (cut->route == QKV_ROUTE_SHORT)
        qkv_run_short(p, plan, run, scratch);
    else if (cut->route == QKV_ROUTE_TILE)
        qkv_run_tiles(p, plan, run, scratch);
    else
        qkv_run_rows(p, plan, run, cut, scratch);
}

void qkv_run_attention_task(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                            int64_t task, void *scratch)
{
    qkv_sequence s = qkv_sequence_at(p, 0);
    const qkv_cut cut = qkv_cut_sequence(p, plan, &s);
    const int64_t each = p->kv_heads * cut.runs;
    s = qkv_sequence_at(p, task / each);
    qkv_run_cut(p, plan, &s, &cut, task % each, scratch);
}

static void run_sequence(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                         const qkv_sequence *s, const qkv_cut *cut, void *scratch)
{
    if (cut->parts > 1 && qkv_heads_lie_together(p) && qkv_run_heads(p, plan, s, cut, scratch))
        return;
    for (int64_t task = 0; task < p->kv_heads * cut->runs; task++)
        qkv_run_cut(p, plan, s, cut, task, scratch);
}

void qkv_run_attention(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                       void *scratch)
{
    for (int64_t b = 0; b < p->batch; b++) {
        const qkv_sequence s = qkv_sequence_at(p, b);
        const qkv_cut cut = qkv_cut_sequence(p, plan, &s);
        const qkv_sharing sharing = qkv_sharing_from(p, plan, b);
        if (sharing.count == 1) {
            run_sequence(p, plan, &s, &cut, scratch);
            continue;
        }
        for (int64_t head = 0; head < p->kv_heads; head++)
            qkv_run_sharing(p, plan, &sharing, head, scratch);
        b += sharing.count - 1;
    }
}
