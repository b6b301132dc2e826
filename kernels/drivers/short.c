/* SPDX-License-Identifier: MIT */
/*
 * The shortest way: few query rows and few keys, f32, with nothing done to the
 * logits. One kernel does all; here are only the addresses of its rows. Keys and
 * values may lie in pages of any size, which changes no bit.
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

static void find_keys(const qkv_attention_problem *p, const qkv_row_run *run, short_rows *rows)
{
    const qkv_sequence *s = run->sequence;
    qkv_kv_piece keys;
    for (int64_t j = 0; j < s->kv_len; j += keys.count) {
        keys = qkv_key_piece(p, s, run->kv_head, j, s->kv_len - j);
        const qkv_kv_piece values = qkv_value_piece(p, s, run->kv_head, j, s->kv_len - j);
        const char *key = keys.data, *value = values.data;
        for (int64_t i = j; i < j + keys.count; i++) {
            rows->keys[i] = (const float *)(const void *)key;
            rows->values[i] = (const float *)(const void *)value;
            key += keys.stride_bytes;
            value += values.stride_bytes;
        }
    }
}

/* Outputs that are not f32 come to scratch memory first; so do those that may lie
 * over queries that are looked at again. */
static bool is_out_staged(const qkv_attention_problem *p)
{
    return p->out.dtype != QKV_F32 || p->weights.data || p->out.data == p->query.data;
}

static void find_rows(const qkv_attention_problem *p, const qkv_kernels *k, const qkv_row_run *run,
                      short_rows *rows, qkv_layout *scratch)
{
    for (int64_t i = 0; i < run->count; i++) {
        void *query = qkv_row_of(&p->query, p, *run, i);
        rows->queries[i] = query;
        if (p->query.dtype != QKV_F32) {
            float *wide = qkv_next_part(scratch, p->head_dim);
            qkv_widen_typed(k, p->query.dtype, query, NULL, wide, p->head_dim);
            rows->queries[i] = wide;
        }
        rows->out[i] = is_out_staged(p) ? qkv_next_part(scratch, p->value_dim)
                                        : qkv_row_of(&p->out, p, *run, i);
        if (p->causal)
            rows->ends[i] =
                (int32_t)qkv_visible_keys(p, run->sequence, qkv_place_of(p, *run, i).query).end;
    }
}

/* What is left to do of a row: where its logits were too large it is made again. */
static void end_row(const qkv_attention_problem *p, const qkv_kernels *k, const qkv_row_run *run,
                    int64_t row, const short_rows *rows, float *scratch)
{
    const qkv_row_end end = qkv_end_row(p, k, *run, row, rows->states[row], scratch);
    float *out = rows->out[row];
    for (int64_t d = 0; end.sums && d < p->value_dim; d++)
        out[d] = end.total.sum == 0.0f ? 0.0f : end.sums[d] / end.total.sum;
    qkv_store_row_numbers(p, *run, row, end.total);
    if (p->weights.data)
        qkv_store_weights(p, k, *run, row, end.total, scratch);
    if (is_out_staged(p))
        qkv_narrow_typed(k, p->out.dtype, out, qkv_row_of(&p->out, p, *run, row), NULL,
                         p->value_dim);
}

static bool has_extreme_row(const qkv_attention_problem *p, const qkv_row_run *run,
                            const short_rows *rows)
{
    for (int64_t i = 0; i < run->count; i++)
        if (qkv_is_extreme(p, rows->states[i]))
            return true;
    return false;
}

void qkv_run_short(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                   const qkv_row_run *run, float *scratch)
{
    short_rows rows;
    qkv_layout layout = {.base = scratch};
    find_keys(p, run, &rows);
    find_rows(p, plan->kernels, run, &rows, &layout);
    plan->kernels->short_f32(&(qkv_short_args){.queries = rows.queries,
                                               .keys = rows.keys,
                                               .values = rows.values,
                                               .out = rows.out,
                                               .ends = p->causal ? rows.ends : NULL,
                                               .states = rows.states,
                                               .rows = run->count,
                                               .kv_len = run->sequence->kv_len,
                                               .head_dim = p->head_dim,
                                               .value_dim = p->value_dim,
                                               .scale_log2 = p->scale_log2});
    if (!is_out_staged(p) && !p->lse.data && !p->row_max.data && !has_extreme_row(p, run, &rows))
        return;
    for (int64_t i = 0; i < run->count; i++)
        end_row(p, plan->kernels, run, i, &rows, scratch + layout.used);
}
