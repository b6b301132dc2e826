/* SPDX-License-Identifier: MIT */
/*
 * The matrix that fused attention never stores, for those who want to look
 * at it: a row's normalised weights once its maximum and sum are known, or
 * its logits as they stand at a stage on the way. The logits are made anew.
 */
#include "adjust.h"
#include "typed.h"

#include <math.h>

#include "visibility.h"

typedef struct weights_scratch {
    float *query; /* [head_dim]: read only */
    float *keys;  /* [KEYS][head_dim] */
    float *bias;  /* [KEYS] */
} weights_scratch;

/* Keys a time. */
enum { KEYS = 32 };

static int64_t lay_out(weights_scratch *s, float *base, const qkv_attention_problem *p)
{
    const int64_t sizes[] = {p->head_dim, qkv_is_staged(p) ? KEYS * p->head_dim : 0, KEYS};
    float **parts[] = {&s->query, &s->keys, &s->bias};
    return qkv_lay_out(base, sizes, parts, sizeof sizes / sizeof *sizes);
}

int64_t qkv_weights_scratch(const qkv_attention_problem *p)
{
    weights_scratch unused;
    return p->weights.data ? lay_out(&unused, NULL, p) : 0;
}

static void dot_products(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                         const float *query, int64_t first, int64_t n, float *logits, float *stage)
{
    const qkv_f32_rows keys =
        qkv_fetch_rows(p, k, &p->key, run.sequence, run.kv_head, first, n, stage);
    for (int64_t d = 0; d < p->head_dim; d += QKV_DOT_BLOCK) {
        const int64_t rest = p->head_dim - d;
        k->dot_f32(&(qkv_dot_args){.queries = query + d,
                                   .keys = keys.data + d,
                                   .scores = logits,
                                   .queries_stride = p->head_dim,
                                   .keys_stride = keys.stride,
                                   .scores_stride = n,
                                   .rows = 1,
                                   .kv_len = n,
                                   .head_dim = rest < QKV_DOT_BLOCK ? rest : QKV_DOT_BLOCK,
                                   .accumulate = d > 0});
    }
}

/* The logits as they are after the stage, in the wanted units. */
static void to_stage(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_place place,
                     int64_t first, int64_t n, const float *bias, float *logits)
{
    const bool softmax = p->weights_stage == QKV_WEIGHTS_SOFTMAX;
    qkv_row_factors f = qkv_factors_of(p, place.head, softmax ? QKV_UNITS_LOG2 : QKV_UNITS_NATURAL);
    if (p->weights_stage == QKV_WEIGHTS_SCALED) {
        f.scale = p->scale * (p->head_scales ? p->head_scales[place.head] : 1.0f);
        f.cap = 0.0f;
    }
    const bool complete = softmax || p->weights_stage == QKV_WEIGHTS_MASKED;
    k->row_adjust_f32(&(qkv_row_adjust_args){.logits = logits,
                                             .bias = complete ? bias : NULL,
                                             .n = n,
                                             .scale = f.scale,
                                             .cap = f.cap,
                                             .slope = complete ? f.slope : 0.0f,
                                             .behind = qkv_behind_of(place, first),
                                             .bias_scale = f.bias_scale});
}

/* p_j = 2^(t_j - max) / sum */
static void normalise(const qkv_kernels *k, qkv_row_state state, int64_t n, float *logits)
{
    for (int64_t j = 0; j < n; j++)
        logits[j] = isnan(state.sum) ? state.sum : logits[j] - state.max;
    k->exp2_f32(logits, logits, n);
    for (int64_t j = 0; j < n; j++)
        logits[j] /= state.sum;
}

static void fill(float *x, int64_t n, float value)
{
    for (int64_t j = 0; j < n; j++)
        x[j] = value;
}

/* Keys first .. first + n - 1 of one row, into 'out'. */
static void store_keys(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       qkv_row_place place, int64_t first, int64_t n, qkv_row_state state,
                       const weights_scratch *s, float *out)
{
    const float *bias = NULL;
    if (qkv_has_bias(p)) {
        qkv_bias_row(p, k, place, first, n, s->bias);
        bias = s->bias;
    }
    dot_products(p, k, run, s->query, first, n, out, s->keys);
    to_stage(p, k, place, first, n, bias, out);
    if (p->weights_stage == QKV_WEIGHTS_SOFTMAX)
        normalise(k, state, n, out);
}

/* Keys from 'begin' on that lie before 'end'. */
static void store_range(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                        qkv_row_place place, qkv_range range, qkv_row_state state,
                        const weights_scratch *s, float *out)
{
    for (int64_t j = range.begin; j < range.end; j += KEYS) {
        const int64_t n = range.end - j < KEYS ? range.end - j : KEYS;
        store_keys(p, k, run, place, j, n, state, s, out + j);
    }
}

void qkv_store_weights(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       int64_t row, qkv_row_state state, float *scratch)
{
    weights_scratch s;
    lay_out(&s, scratch, p);
    const qkv_row_place place = qkv_place_of(p, run, row);
    void *query = qkv_row_of(&p->query, p, run, row);
    if (p->query.dtype != QKV_F32)
        qkv_widen_typed(k, p->query.dtype, query, NULL, s.query, p->head_dim);
    else
        s.query = query;

    float *out = qkv_row_of(&p->weights, p, run, row);
    const bool softmax = p->weights_stage == QKV_WEIGHTS_SOFTMAX;
    const bool masked = p->weights_stage == QKV_WEIGHTS_MASKED;
    fill(out, p->weights.dim, masked ? -INFINITY : softmax && isnan(state.sum) ? state.sum : 0.0f);
    if (!softmax && !masked) {
        store_range(p, k, run, place, (qkv_range){0, place.sequence->kv_len}, state, &s, out);
        return;
    }
    if (softmax && state.sum == 0.0f)
        return;
    const qkv_range sees = qkv_visible_keys(p, place.sequence, place.query);
    const qkv_range sinks = {0, qkv_sink_keys(p, place.sequence, sees)};
    store_range(p, k, run, place, sinks, state, &s, out);
    store_range(p, k, run, place, sees, state, &s, out);
}
