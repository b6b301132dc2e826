/* SPDX-License-Identifier: MIT */
/*
 * The shortest way: few query rows and few keys, with nothing done to the logits. One
 * kernel does all, of f32; here are only the addresses of its rows, after those of
 * other types are converted. Keys and values may lie in pages of any size, which
 * changes no bit.
 */
#include "anew.h"
#include "typed.h"
#include "visibility.h"

/* Where the rows are, and on their way from and to other types than f32. */
typedef struct short_rows {
    const float *queries[QKV_PASS_ROWS], *keys[QKV_SHORT_KEYS], *values[QKV_SHORT_KEYS];
    float *out[QKV_PASS_ROWS];
    int32_t ends[QKV_PASS_ROWS];
    qkv_row_state states[QKV_PASS_ROWS];
} short_rows;

/* Where the keys or the values are: f32 where they lie, others as f32 in scratch memory. */
static void find_keys(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      const qkv_view *view, const float **at, qkv_layout *scratch)
{
    const qkv_sequence *s = run.sequence;
    qkv_piece_fn *const pieces = view == &p->key ? qkv_key_piece : qkv_value_piece;
    if (view->dtype != QKV_F32) {
        float *wide = qkv_next_part(scratch, QKV_SHORT_KEYS * view->dim);
        qkv_fetch_rows(p, k, view, s, run.kv_head, 0, s->kv_len, wide);
        for (int64_t j = 0; j < s->kv_len; j++)
            at[j] = wide + j * view->dim;
        return;
    }
    for (int64_t j = 0; j < s->kv_len;) {
        const qkv_kv_piece piece = pieces(p, s, run.kv_head, j, s->kv_len - j);
        const char *row = piece.data;
        for (const int64_t end = j + piece.count; j < end; j++, row += piece.stride_bytes)
            at[j] = (const float *)(const void *)row;
    }
}

/* Outputs that are not f32 come to scratch memory first; so do those that may lie
 * over queries that are looked at again. */
static bool is_out_staged(const qkv_attention_problem *p)
{
    return p->out.dtype != QKV_F32 || p->out.data == p->query.data;
}

static void find_rows(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                      short_rows *rows, qkv_layout *scratch)
{
    for (int64_t i = 0; i < run.count; i++) {
        void *query = qkv_row_of(&p->query, p, run, i);
        rows->queries[i] = query;
        if (p->query.dtype != QKV_F32) {
            float *wide = qkv_next_part(scratch, p->head_dim);
            qkv_widen_typed(k, p->query.dtype, query, NULL, wide, p->head_dim);
            rows->queries[i] = wide;
        }
        rows->out[i] = is_out_staged(p) ? qkv_next_part(scratch, p->value_dim)
                                        : qkv_row_of(&p->out, p, run, i);
        if (p->causal)
            rows->ends[i] =
                (int32_t)qkv_visible_keys(p, run.sequence, qkv_place_of(p, run, i).query).end;
    }
}

/* What is left to do of a row: where its logits were too large it is made again. */
static void end_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                    int64_t row, const short_rows *rows, float *scratch)
{
    const qkv_row_end end = qkv_end_row(p, k, run, row, rows->states[row], scratch);
    float *out = rows->out[row];
    if (end.sums)
        for (int64_t d = 0; d < p->value_dim; d++)
            out[d] = end.total.sum == 0.0f ? 0.0f : end.sums[d] / end.total.sum;
    qkv_store_row_numbers(p, run, row, end.total);
    if (p->weights.data)
        qkv_store_weights(p, k, run, row, end.total, scratch);
    if (is_out_staged(p))
        qkv_narrow_typed(k, p->out.dtype, out, qkv_row_of(&p->out, p, run, row), NULL,
                         p->value_dim);
}

static bool has_extreme_row(const qkv_attention_problem *p, qkv_row_run run, const short_rows *rows)
{
    for (int64_t i = 0; i < run.count; i++)
        if (qkv_is_extreme(p, rows->states[i]))
            return true;
    return false;
}

void qkv_run_short(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                   float *scratch)
{
    const qkv_kernels *k = plan->kernels;
    short_rows rows;
    qkv_layout layout = {.base = scratch};
    find_keys(p, k, run, &p->key, rows.keys, &layout);
    find_keys(p, k, run, &p->value, rows.values, &layout);
    find_rows(p, k, run, &rows, &layout);
    k->short_f32(&(qkv_short_args){.queries = rows.queries,
                                   .keys = rows.keys,
                                   .values = rows.values,
                                   .out = rows.out,
                                   .ends = p->causal ? rows.ends : NULL,
                                   .states = rows.states,
                                   .rows = run.count,
                                   .kv_len = run.sequence->kv_len,
                                   .head_dim = p->head_dim,
                                   .value_dim = p->value_dim,
                                   .scale_log2 = p->scale_log2});
    if (!is_out_staged(p) && !p->lse.data && !p->row_max.data && !p->weights.data &&
        !has_extreme_row(p, run, &rows))
        return;
    for (int64_t i = 0; i < run.count; i++)
        end_row(p, k, run, i, &rows, scratch + layout.used);
}

int64_t qkv_short_scratch(const qkv_attention_problem *p, int64_t rows)
{
    qkv_layout layout = {.base = NULL};
    qkv_next_part(&layout, p->key.dtype == QKV_F32 ? 0 : QKV_SHORT_KEYS * p->head_dim);
    qkv_next_part(&layout, p->value.dtype == QKV_F32 ? 0 : QKV_SHORT_KEYS * p->value_dim);
    for (int64_t i = 0; i < rows; i++) {
        qkv_next_part(&layout, p->head_dim);
        qkv_next_part(&layout, p->value_dim);
    }
    return layout.used + qkv_anew_scratch(p);
}
