/* SPDX-License-Identifier: MIT */
#include "semantics.h"

#include <math.h>

static const double u = 0x1p-24;
static const double key_block = 512, dot_block = 4096;
static const double tiny = 0x1p-126, half_denormal = 0x1p-150;

/* e^-105 is below half the smallest denormal: no weight is left there. */
static const double negligible = 105;

static int64_t queries_of(const oracle_semantics *s, int64_t batch)
{
    return s->q_lens ? s->q_lens[batch] : s->q_len;
}

static int64_t length_of(const oracle_semantics *s, int64_t batch)
{
    return s->kv_lens ? s->kv_lens[batch] : s->kv_len;
}

static int64_t position_of(const oracle_semantics *s, int64_t batch, int64_t query)
{
    return query +
           (s->q_offsets ? s->q_offsets[batch] : length_of(s, batch) - queries_of(s, batch));
}

static int within_window(const oracle_semantics *s, int64_t position, int64_t key)
{
    if (!s->windowed || key < s->sink_tokens)
        return 1;
    return (s->window_left < 0 || key >= position - s->window_left) &&
           (s->window_right < 0 || key <= position + s->window_right);
}

static int within_tree(const oracle_semantics *s, int64_t batch, int64_t query, int64_t key)
{
    const int64_t drafted = key - (length_of(s, batch) - queries_of(s, batch));
    return !s->tree || drafted < 0 || s->tree[(batch * s->q_len + query) * s->q_len + drafted] != 0;
}

static int64_t row_at(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query)
{
    return (batch * s->q_heads + head) * s->q_len + query;
}

int oracle_sees(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query, int64_t key)
{
    const int64_t position = position_of(s, batch, query);
    if (key >= length_of(s, batch) || (s->causal && key > position))
        return 0;
    if (!within_window(s, position, key) || !within_tree(s, batch, query, key))
        return 0;
    return !s->mask || s->mask[row_at(s, batch, head, query) * s->kv_len + key] != -HUGE_VAL;
}

/* A number and how far the library's may be from it. */
typedef struct number {
    double value, error;
} number;

/*
 * scale * (q . k): the header's bound, with the rounding of the factor and of
 * the product as the two terms beside the dot product's own. A query that is
 * rounded to steps of its largest element is off by half a step in each.
 */
static number scaled(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query,
                     int64_t key)
{
    const int64_t kv_head = head / (s->q_heads / s->kv_heads);
    const double *q = s->q + row_at(s, batch, head, query) * s->head_dim;
    const double *k = s->k + ((batch * s->kv_heads + kv_head) * s->kv_len + key) * s->head_dim;
    const double scale = s->scale * (s->head_scales ? s->head_scales[head] : 1);
    const double n = (double)s->head_dim;
    double sum = 0, absolute = 0, keys = 0, largest = 0;
    for (int64_t d = 0; d < s->head_dim; d++) {
        sum += q[d] * k[d];
        absolute += fabs(q[d] * k[d]);
        keys += fabs(k[d]);
        largest = fmax(largest, fabs(q[d]));
    }
    const double terms = fmin(n, dot_block) + fmax(0, ceil(n / dot_block) - 1) + 2;
    const double rounded = largest * s->q_step * keys;
    const double dot =
        (terms * u + s->k_rounding) * (absolute + rounded) + rounded + n * half_denormal;
    return (number){scale * sum, fabs(scale) * dot + (1 + fabs(scale)) * half_denormal};
}

/* The factors are rounded (u each), tanh is off by 2 ulp (4u), products round. */
static number capped(const oracle_semantics *s, number x)
{
    if (s->softcap == 0)
        return x;
    const double t = s->softcap * tanh(x.value / s->softcap);
    return (number){t, x.error + 2 * u * fmin(fabs(x.value), 20 * s->softcap) + 7 * u * fabs(t) +
                           s->softcap * 4 * half_denormal};
}

static number complete(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query,
                       int64_t key, number x)
{
    if (!oracle_sees(s, batch, head, query, key))
        return (number){-HUGE_VAL, 0};
    if (s->slopes) {
        const double added = s->slopes[head] * (double)(key - position_of(s, batch, query));
        x.value += added;
        x.error += 3 * u * fabs(added) + u * fabs(x.value);
    }
    if (s->mask) {
        const double added = s->mask[row_at(s, batch, head, query) * s->kv_len + key];
        x.value += added;
        x.error += 2 * u * fabs(added) + u * fabs(x.value);
    }
    return x;
}

/* What one row's logits come to; the sink counts as one of them. */
typedef struct row_sum {
    double max, max_error, sum, ds;
    int broken; /* a NaN or +inf is among them */
} row_sum;

static void meet(row_sum *r, number x)
{
    if (isnan(x.value) || x.value == HUGE_VAL)
        r->broken = 1;
    if (x.value > r->max) {
        r->max = x.value;
        r->max_error = x.error;
    }
}

static void count(row_sum *r, number x)
{
    if (x.value == -HUGE_VAL)
        return;
    r->sum += exp(x.value - r->max);
    if (x.value + x.error > r->max - r->max_error - negligible && x.error > r->ds)
        r->ds = x.error;
}

static number sink_of(const oracle_semantics *s, int64_t head)
{
    const double sink = s->sinks ? s->sinks[head] : -HUGE_VAL;
    return (number){sink, sink == -HUGE_VAL ? 0 : 2 * u * fabs(sink)};
}

static row_sum sum_up(const oracle_semantics *s, int64_t head, const double *values,
                      const double *errors)
{
    row_sum r = {.max = -HUGE_VAL};
    meet(&r, sink_of(s, head));
    for (int64_t j = 0; j < s->kv_len; j++)
        meet(&r, (number){values[j], errors[j]});
    if (r.broken || r.max == -HUGE_VAL)
        return r;
    count(&r, sink_of(s, head));
    for (int64_t j = 0; j < s->kv_len; j++)
        count(&r, (number){values[j], errors[j]});
    return r;
}

static double blocks_of(const oracle_semantics *s)
{
    /* A window's first block may be a part of one more. */
    return ceil((double)s->kv_len / key_block) + 2;
}

static void row_out(const oracle_semantics *s, int64_t batch, int64_t head, int64_t at,
                    const row_sum *r, const double *values)
{
    const int64_t kv_head = head / (s->q_heads / s->kv_heads);
    const double *v = s->v + (batch * s->kv_heads + kv_head) * s->kv_len * s->value_dim;
    const double relative = expm1(2 * r->ds) + (key_block + blocks_of(s) + 32) * u + s->v_rounding;
    for (int64_t d = 0; d < s->value_dim; d++) {
        double sum = 0, bound = 0;
        for (int64_t j = 0; j < s->kv_len && !r->broken && r->sum > 0; j++) {
            if (values[j] == -HUGE_VAL)
                continue;
            const double p = exp(values[j] - r->max), x = v[j * s->value_dim + d];
            const double lost = p < tiny * exp(r->ds) ? tiny : half_denormal;
            sum += p * x;
            bound += fabs(x) * (p * relative + lost) + half_denormal;
        }
        double *out = s->out + at * s->value_dim + d;
        *out = r->broken ? (double)NAN : r->sum > 0 ? sum / r->sum : 0;
        s->out_bound[at * s->value_dim + d] = r->sum > 0 ? bound / r->sum + 2 * half_denormal : 0;
    }
}

static void row_numbers(const oracle_semantics *s, int64_t at, const row_sum *r)
{
    const int empty = r->max == -HUGE_VAL;
    const double lse = r->max + log(r->sum);
    s->lse[at] = r->broken ? (double)NAN : empty ? -HUGE_VAL : lse;
    s->lse_bound[at] = empty ? 0
                             : r->ds + (key_block + blocks_of(s) + 16) * u +
                                   u * (3 * fabs(r->max) + fabs(lse) + 2 * fabs(log(r->sum)));
    s->max[at] = r->broken ? (double)NAN : r->max;
    s->max_bound[at] = empty ? 0 : r->max_error + 4 * u * fabs(r->max) + half_denormal;
}

static void row_weights(const oracle_semantics *s, int64_t at, const row_sum *r,
                        const double *values)
{
    const double relative = expm1(2 * r->ds) + (key_block + blocks_of(s) + 16) * u;
    for (int64_t j = 0; j < s->kv_len; j++) {
        const int none = r->max == -HUGE_VAL || values[j] == -HUGE_VAL;
        const double p = none ? 0 : exp(values[j] - r->max);
        const double w = none ? 0 : p / r->sum;
        const double lost = !none && fmin(p, w) < tiny * (1 + relative) ? tiny : half_denormal;
        s->weights[at * s->kv_len + j] = r->broken ? (double)NAN : w;
        s->weights_bound[at * s->kv_len + j] = none ? 0 : relative * w + lost;
    }
}

static void row_run(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query,
                    double *room)
{
    double *values = room, *errors = room + s->kv_len;
    const int64_t at = row_at(s, batch, head, query);
    for (int64_t j = 0; j < s->kv_len; j++) {
        number x = scaled(s, batch, head, query, j);
        const number stages[] = {x, x, capped(s, x),
                                 complete(s, batch, head, query, j, capped(s, x))};
        if (s->weights && s->stage != ORACLE_SOFTMAX && j >= length_of(s, batch)) {
            s->weights[at * s->kv_len + j] = s->stage == ORACLE_MASKED ? -HUGE_VAL : 0;
            s->weights_bound[at * s->kv_len + j] = 0;
        } else if (s->weights && s->stage != ORACLE_SOFTMAX) {
            s->weights[at * s->kv_len + j] = stages[s->stage].value;
            s->weights_bound[at * s->kv_len + j] = stages[s->stage].error;
        }
        values[j] = stages[ORACLE_MASKED].value;
        errors[j] = stages[ORACLE_MASKED].error;
    }
    const row_sum r = sum_up(s, head, values, errors);
    row_out(s, batch, head, at, &r, values);
    row_numbers(s, at, &r);
    if (s->weights && s->stage == ORACLE_SOFTMAX)
        row_weights(s, at, &r, values);
}

void oracle_semantics_run(const oracle_semantics *s, double *room)
{
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->q_heads; h++)
            for (int64_t i = 0; i < queries_of(s, b); i++)
                row_run(s, b, h, i, room);
}
