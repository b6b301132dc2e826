/* SPDX-License-Identifier: MIT */
/*
 * The row driver: few query rows against many keys (decoding), and head
 * sizes that no tile holds. All query heads of a group that stand at one
 * position go through each block of keys together:
 *
 *     for each block of keys that the position sees
 *         logits = query . key        (dot)
 *         logits become exponentials  (softmax_step)
 *         out    = out * r + exponentials . values   (weighted_sum)
 */
#include "adjust.h"
#include "attention.h"
#include "visibility.h"

#include <float.h>

/* Keys of a block: fewer where rows are long, so that a block to be converted
 * or gathered needs a small stage. Whether it must be does not count: bits do
 * not depend on pages. */
static int64_t block_keys(const qkv_attention_problem *p)
{
    enum { STAGE_FLOATS = 1 << 16, FEWEST = 8 };
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    if (widest * QKV_KEY_BLOCK <= STAGE_FLOATS)
        return QKV_KEY_BLOCK;
    return widest * FEWEST >= STAGE_FLOATS ? FEWEST : STAGE_FLOATS / widest;
}

/* The parts of a worker's scratch memory. */
typedef struct row_scratch {
    float *logits;  /* [rows][QKV_KEY_BLOCK] */
    float *out;     /* [rows][value_dim] */
    float *query;   /* [rows][head_dim], where the queries are not f32 */
    float *stage;   /* a block of keys or values on its way to f32 */
    float *bias;    /* as 'logits', where there is a mask or a tree */
    float *weights; /* for qkv_store_weights() */
} row_scratch;

/* Lays out the parts from 'base' on; returns the floats used. */
static int64_t lay_out(row_scratch *s, float *base, const qkv_attention_problem *p)
{
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    const int64_t sizes[] = {
        QKV_ROWS_MAX * QKV_KEY_BLOCK,
        QKV_ROWS_MAX * p->value_dim,
        p->narrow ? QKV_ROWS_MAX * p->head_dim : 0,
        qkv_is_staged(p) ? block_keys(p) * widest : 0,
        qkv_has_bias(p) ? QKV_ROWS_MAX * QKV_KEY_BLOCK : 0,
        qkv_weights_scratch(p),
    };
    float **parts[] = {&s->logits, &s->out, &s->query, &s->stage, &s->bias, &s->weights};

    return qkv_lay_out(base, sizes, parts, sizeof sizes / sizeof *sizes);
}

int64_t qkv_rows_scratch(const qkv_attention_problem *p)
{
    row_scratch unused;
    return lay_out(&unused, NULL, p);
}

/* Up to QKV_ROWS_MAX query heads at one position. */
typedef struct head_rows {
    const float *query;
    int64_t stride, count;
} head_rows;

static void row_logits(const qkv_attention_problem *p, const qkv_kernels *k, head_rows rows,
                       qkv_f32_rows keys, int64_t kv_len, float *logits)
{
    for (int64_t d = 0; d < p->head_dim; d += QKV_DOT_BLOCK) {
        const int64_t rest = p->head_dim - d;
        k->dot_f32(&(qkv_dot_args){.queries = rows.query + d,
                                   .keys = keys.data + d,
                                   .scores = logits,
                                   .queries_stride = rows.stride,
                                   .keys_stride = keys.stride,
                                   .scores_stride = QKV_KEY_BLOCK,
                                   .rows = rows.count,
                                   .kv_len = kv_len,
                                   .head_dim = rest < QKV_DOT_BLOCK ? rest : QKV_DOT_BLOCK,
                                   .accumulate = d > 0});
    }
}

/* The biases of the rows against a block; false if they hide all of it. */
static bool row_biases(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       int64_t row, int64_t count, qkv_range block, float *bias)
{
    bool any = false;
    for (int64_t i = 0; i < count; i++)
        any |= qkv_bias_row(p, k, qkv_place_of(p, run, row + i), block.begin,
                            block.end - block.begin, bias + i * QKV_KEY_BLOCK);
    return any;
}

/* Values that are not finite, of keys with a weight of 0 that rows do see. */
static void odd_values(const qkv_attention_problem *p, int64_t count, int64_t kv_len,
                       qkv_f32_rows values, const row_scratch *s)
{
    for (int64_t i = 0; i < count; i++)
        qkv_add_odd_values(s->logits + i * QKV_KEY_BLOCK, s->bias + i * QKV_KEY_BLOCK, values.data,
                           values.stride, kv_len, p->value_dim, s->out + i * p->value_dim);
}

/* The rows against the keys of one block, all of which they see by position. */
static void row_block(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      int64_t row, head_rows rows, qkv_range block, qkv_row_state *states,
                      const row_scratch *s)
{
    const int64_t kv_len = block.end - block.begin;
    const bool biased = qkv_has_bias(p);
    if (biased && !row_biases(p, k, run, row, rows.count, block, s->bias))
        return;
    row_logits(
        p, k, rows,
        qkv_fetch_rows(p, k, &p->key, run.sequence, run.kv_head, block.begin, kv_len, s->stage),
        kv_len, s->logits);
    for (int64_t i = 0; p->adjusted && i < rows.count; i++)
        qkv_adjust_row(p, k, qkv_place_of(p, run, row + i), block.begin, kv_len,
                       biased ? s->bias + i * QKV_KEY_BLOCK : NULL, s->logits + i * QKV_KEY_BLOCK);

    float rescale[QKV_ROWS_MAX];
    for (int64_t i = 0; i < rows.count; i++)
        rescale[i] = k->softmax_step_f32(s->logits + i * QKV_KEY_BLOCK, kv_len,
                                         p->adjusted ? 1.0f : p->scale_log2, &states[i]);

    const qkv_f32_rows values =
        qkv_fetch_rows(p, k, &p->value, run.sequence, run.kv_head, block.begin, kv_len, s->stage);
    k->weighted_sum_f32(&(qkv_weighted_sum_args){.weights = s->logits,
                                                 .values = values.data,
                                                 .out = s->out,
                                                 .rescale = rescale,
                                                 .weights_stride = QKV_KEY_BLOCK,
                                                 .values_stride = values.stride,
                                                 .out_stride = p->value_dim,
                                                 .rows = rows.count,
                                                 .kv_len = kv_len,
                                                 .value_dim = p->value_dim,
                                                 .skip_zero = biased});
    if (biased)
        odd_values(p, rows.count, kv_len, values, s);
}

/* Normalises a row's sums and stores them; 'sums' is used up. */
static void store_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      int64_t row, qkv_row_state state, float *sums, float *scratch)
{
    qkv_store_row_numbers(p, run, row, state);
    /* Before the output, which may lie over the query. */
    if (p->weights.data)
        qkv_store_weights(p, k, run, row, state, scratch);

    void *out = qkv_row_of(&p->out, p, run, row);
    float *quotients = p->out.dtype == QKV_F32 ? out : sums;
    for (int64_t d = 0; d < p->value_dim; d++)
        quotients[d] = state.sum == 0.0f ? 0.0f : sums[d] / state.sum;
    if (p->out.dtype != QKV_F32)
        qkv_narrow_row(k, p->out.dtype, quotients, out, p->value_dim);
}

/* The queries of 'count' heads of the group from 'row' of the run on. */
static head_rows queries_at(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                            int64_t row, int64_t count, float *wide)
{
    if (p->query.dtype == QKV_F32)
        return (head_rows){.query = qkv_row_of(&p->query, p, run, row),
                           .stride = p->query.stride[QKV_AXIS_HEAD],
                           .count = count};
    for (int64_t i = 0; i < count; i++)
        qkv_widen_row(k, p->query.dtype, qkv_row_of(&p->query, p, run, row + i),
                      wide + i * p->head_dim, p->head_dim);
    return (head_rows){.query = wide, .stride = p->head_dim, .count = count};
}

/* The rows against some keys, block by block. */
static void row_range(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      int64_t row, head_rows rows, qkv_range range, qkv_row_state *states,
                      const row_scratch *s)
{
    const int64_t step = block_keys(p);
    for (int64_t j = range.begin; j < range.end; j += step) {
        const int64_t end = range.end - j < step ? range.end : j + step;
        row_block(p, k, run, row, rows, (qkv_range){j, end}, states, s);
    }
}

/* 'count' rows from 'row' of the run on, all at the same position. */
static void run_position(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                         int64_t row, int64_t count, const row_scratch *s)
{
    const head_rows rows = queries_at(p, k, run, row, count, s->query);
    qkv_row_state states[QKV_ROWS_MAX];
    for (int64_t i = 0; i < count; i++)
        states[i] = qkv_first_state(p, qkv_place_of(p, run, row + i).head);
    for (int64_t d = 0; d < count * p->value_dim; d++)
        s->out[d] = 0.0f;

    const qkv_range sees = qkv_visible_keys(p, run.sequence, (run.first + row) / p->group);
    row_range(p, k, run, row, rows, (qkv_range){0, qkv_sink_keys(p, run.sequence, sees)}, states,
              s);
    row_range(p, k, run, row, rows, sees, states, s);

    for (int64_t i = 0; i < count; i++)
        store_row(p, k, run, row + i, states[i], s->out + i * p->value_dim, s->weights);
}

void qkv_run_rows(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                  float *scratch)
{
    row_scratch s;
    lay_out(&s, scratch, p);
    for (int64_t row = 0; row < run.count;) {
        /* As many heads of the group as stand at this position still. */
        int64_t count = p->group - (run.first + row) % p->group;
        if (count > QKV_ROWS_MAX)
            count = QKV_ROWS_MAX;
        run_position(p, plan->kernels, run, row, count, &s);
        row += count;
    }
}
