/* SPDX-License-Identifier: MIT */
#include "anew.h"
#include "typed.h"

#include <math.h>
#include <string.h>

/* Lays out the parts from 'base' on; returns the floats used. */
static int64_t lay_out(qkv_anew *a, float *base, const qkv_attention_problem *p)
{
    enum { KEYS = 32, STAGE_FLOATS = 1 << 14 };
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    a->keys = widest <= STAGE_FLOATS / KEYS ? KEYS
              : widest >= STAGE_FLOATS      ? 1
                                            : STAGE_FLOATS / widest;
    qkv_layout layout = {.base = base};
    a->query = qkv_next_part(&layout, p->query.dtype != QKV_F32 ? p->head_dim : 0);
    a->bias = qkv_next_part(&layout, a->keys);
    a->logits = qkv_next_part(&layout, a->keys);
    a->stage = qkv_next_part(&layout, qkv_is_staged(p) ? a->keys * widest : 0);
    a->out = qkv_next_part(&layout, p->value_dim);
    a->part = qkv_next_part(&layout, p->value_dim);
    return layout.used;
}

int64_t qkv_anew_scratch(const qkv_attention_problem *p)
{
    qkv_anew unused;
    return lay_out(&unused, NULL, p);
}

qkv_anew qkv_anew_begin(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                        int64_t row, float *scratch)
{
    qkv_anew a = {
        .problem = p, .kernels = k, .place = qkv_place_of(p, run, row), .kv_head = run.kv_head};
    lay_out(&a, scratch, p);
    const void *query = qkv_row_of(&p->query, p, run, row);
    if (p->query.dtype == QKV_F32)
        a.query = query;
    else /* the first part of the scratch memory */
        qkv_widen_typed(k, p->query.dtype, query, NULL, scratch, p->head_dim);
    return a;
}

static void dot_products(const qkv_anew *a, int64_t first, int64_t n, float *logits)
{
    const qkv_attention_problem *p = a->problem;
    const qkv_f32_rows keys =
        qkv_fetch_rows(p, a->kernels, &p->key, a->place.sequence, a->kv_head, first, n, a->stage);
    for (int64_t d = 0; d < p->head_dim; d += QKV_DOT_BLOCK) {
        const int64_t rest = p->head_dim - d;
        a->kernels->dot_f32(&(qkv_dot_args){.queries = a->query + d,
                                            .keys = keys.data + d,
                                            .scores = logits,
                                            .queries_stride = p->head_dim,
                                            .keys_stride = qkv_bytes(QKV_F32, keys.stride),
                                            .scores_stride = n,
                                            .rows = 1,
                                            .kv_len = n,
                                            .head_dim = rest < QKV_DOT_BLOCK ? rest : QKV_DOT_BLOCK,
                                            .accumulate = d > 0});
    }
}

/* Only the weights and the logits after the mask have slopes and biases in them. */
static bool is_complete(int32_t stage)
{
    return stage == QKV_WEIGHTS_SOFTMAX || stage == QKV_WEIGHTS_MASKED;
}

void qkv_anew_logits(const qkv_anew *a, int64_t first, int64_t n, int32_t stage, qkv_units units,
                     float *logits)
{
    const qkv_attention_problem *p = a->problem;
    const bool complete = is_complete(stage), biased = complete && qkv_has_bias(p);
    if (biased && !qkv_bias_row(p, a->kernels, a->place, first, n, a->bias)) {
        memcpy(logits, a->bias, (size_t)n * sizeof *logits); /* all -inf: no key is read */
        return;
    }
    dot_products(a, first, n, logits);

    if (stage != QKV_WEIGHTS_SOFTMAX)
        units = QKV_UNITS_NATURAL;
    qkv_row_factors f = qkv_factors_of(p, a->place.head, units, biased);
    if (stage == QKV_WEIGHTS_SCALED) {
        f.scale = p->scale * (p->head_scales ? p->head_scales[a->place.head] : 1.0f);
        f.cap = 0.0f;
    }
    a->kernels->row_adjust_f32(&(qkv_row_adjust_args){.logits = logits,
                                                      .bias = biased ? a->bias : NULL,
                                                      .n = n,
                                                      .scale = f.scale,
                                                      .cap = f.cap,
                                                      .slope = complete ? f.slope : 0.0f,
                                                      .behind = qkv_behind_of(a->place, first),
                                                      .bias_scale = f.bias_scale});
}

/* ------------------------------------------------------------------ numbers */

static double natural_max(qkv_row_total total)
{
    const double ln2 = 0x1.62e42fefa39efp-1;
    return total.units == QKV_UNITS_LOG2 ? (double)total.max * ln2 : (double)total.max;
}

/* lse = m + ln l */
void qkv_store_row_numbers(const qkv_attention_problem *p, qkv_row_run run, int64_t row,
                           qkv_row_total total)
{
    double max = natural_max(total);
    if (total.sum == 0.0f)
        max = -HUGE_VAL;
    if (isnan(total.sum))
        max = (double)total.sum;
    if (p->row_max.data)
        *(float *)qkv_row_of(&p->row_max, p, run, row) = (float)max;
    if (p->lse.data) /* of an empty sum log() gives -inf too */
        *(float *)qkv_row_of(&p->lse, p, run, row) = (float)(max + log((double)total.sum));
}
