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
#include "attention.h"

#include <float.h>

int64_t qkv_rows_scratch(int64_t value_dim)
{
    return QKV_ROWS_MAX * QKV_KEY_BLOCK + qkv_align_floats(QKV_ROWS_MAX * value_dim);
}

/* Up to QKV_ROWS_MAX query heads at one position. */
typedef struct head_rows {
    const float *query;
    int64_t stride, count;
} head_rows;

static void row_logits(const qkv_attention_problem *p, const qkv_kernels *k, head_rows rows,
                       const float *keys, int64_t kv_len, float *logits)
{
    for (int64_t d = 0; d < p->head_dim; d += QKV_DOT_BLOCK) {
        const int64_t rest = p->head_dim - d;
        k->dot_f32(&(qkv_dot_args){.queries = rows.query + d,
                                   .keys = keys + d,
                                   .scores = logits,
                                   .queries_stride = rows.stride,
                                   .keys_stride = p->key.stride[QKV_AXIS_ROW],
                                   .scores_stride = QKV_KEY_BLOCK,
                                   .rows = rows.count,
                                   .kv_len = kv_len,
                                   .head_dim = rest < QKV_DOT_BLOCK ? rest : QKV_DOT_BLOCK,
                                   .accumulate = d > 0});
    }
}

static void row_block(const qkv_attention_problem *p, const qkv_kernels *k, head_rows rows,
                      const float *keys, const float *values, int64_t kv_len, qkv_row_state *states,
                      float *logits, float *out)
{
    row_logits(p, k, rows, keys, kv_len, logits);

    float rescale[QKV_ROWS_MAX];
    for (int64_t i = 0; i < rows.count; i++)
        rescale[i] =
            k->softmax_step_f32(logits + i * QKV_KEY_BLOCK, kv_len, p->scale_log2, &states[i]);

    k->weighted_sum_f32(&(qkv_weighted_sum_args){.weights = logits,
                                                 .values = values,
                                                 .out = out,
                                                 .rescale = rescale,
                                                 .weights_stride = QKV_KEY_BLOCK,
                                                 .values_stride = p->value.stride[QKV_AXIS_ROW],
                                                 .out_stride = p->value_dim,
                                                 .rows = rows.count,
                                                 .kv_len = kv_len,
                                                 .value_dim = p->value_dim});
}

static void store_row(const qkv_attention_problem *p, qkv_row_run run, int64_t row,
                      qkv_row_state state, const float *sums)
{
    float *out = qkv_row_of(&p->out, p, run, row);
    for (int64_t d = 0; d < p->value_dim; d++)
        out[d] = state.sum == 0.0f ? 0.0f : sums[d] / state.sum;
    if (p->lse.data)
        *qkv_row_of(&p->lse, p, run, row) = qkv_lse_of(state.max, state.sum);
}

/* 'count' rows from 'row' of the run on, all at the same position. */
static void run_position(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                         int64_t row, int64_t count, float *scratch)
{
    float *logits = scratch, *out = scratch + QKV_ROWS_MAX * QKV_KEY_BLOCK;
    const head_rows rows = {.query = qkv_row_of(&p->query, p, run, row),
                            .stride = p->query.stride[QKV_AXIS_HEAD],
                            .count = count};
    const qkv_range sees = qkv_visible_keys(p, (run.first + row) / p->group);

    qkv_row_state states[QKV_ROWS_MAX];
    for (int64_t i = 0; i < count; i++)
        states[i] = (qkv_row_state){.max = -FLT_MAX, .sum = 0.0f};
    for (int64_t d = 0; d < count * p->value_dim; d++)
        out[d] = 0.0f;

    for (int64_t j = sees.begin; j < sees.end; j += QKV_KEY_BLOCK) {
        const int64_t rest = sees.end - j;
        row_block(p, k, rows, qkv_view_row(&p->key, run.batch, run.kv_head, j),
                  qkv_view_row(&p->value, run.batch, run.kv_head, j),
                  rest < QKV_KEY_BLOCK ? rest : QKV_KEY_BLOCK, states, logits, out);
    }

    for (int64_t i = 0; i < count; i++)
        store_row(p, run, row + i, states[i], out + i * p->value_dim);
}

void qkv_run_rows(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                  float *scratch)
{
    for (int64_t row = 0; row < run.count;) {
        /* As many heads of the group as stand at this position still. */
        int64_t count = p->group - (run.first + row) % p->group;
        if (count > QKV_ROWS_MAX)
            count = QKV_ROWS_MAX;
        run_position(p, plan->kernels, run, row, count, scratch);
        row += count;
    }
}
