/* SPDX-License-Identifier: MIT */
/*
 * Rows with logits that are finite but beyond FLT_MAX / log2(e), about 2.3e38:
 * in units of log2(e) those are infinite. What the fused way makes of such a
 * row shows in its maximum. It is
 *
 *     +inf       where a logit was too large;
 *     -FLT_MAX   as it began, where all were too small, or none is seen;
 *     anything between where the largest logit fits: then those that do not
 *                lie so far below it that their weight is 0 in any case.
 *
 * So one comparison a row tells whether to make it again, in two passes over
 * the keys and in natural units. So do all rows if a softcap does not fit the
 * units either, and with factors those whose sum is a NaN: the product of an
 * infinite factor and 0.
 *
 *     m = max t_j      l = sum of e^(t_j - m)      out = sum of e^(t_j - m) v_j
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "anew.h"
#include "visibility.h"

static float max_of_range(const qkv_anew *a, qkv_range range, float max)
{
    for (int64_t j = range.begin; j < range.end; j += a->keys) {
        const int64_t n = range.end - j < a->keys ? range.end - j : a->keys;
        qkv_anew_logits(a, j, n, QKV_WEIGHTS_SOFTMAX, QKV_UNITS_NATURAL, a->logits);
        for (int64_t i = 0; i < n; i++)
            if (a->logits[i] > max) /* a NaN is met by the exponential */
                max = a->logits[i];
    }
    return max;
}

/* part = part + sum of weight * value, the weights in a->logits. */
static void add_values(const qkv_anew *a, int64_t first, int64_t n)
{
    const qkv_attention_problem *p = a->problem;
    const float one = 1.0f;
    const qkv_f32_rows values =
        qkv_fetch_rows(p, a->kernels, &p->value, a->place.sequence, a->kv_head, first, n, a->stage);
    a->kernels->weighted_sum_f32(
        &(qkv_weighted_sum_args){.weights = a->logits,
                                 .values = values.data,
                                 .out = a->part,
                                 .rescale = &one,
                                 .weights_stride = n,
                                 .values_stride = qkv_bytes(QKV_F32, values.stride),
                                 .out_stride = p->value_dim,
                                 .rows = 1,
                                 .kv_len = n,
                                 .value_dim = p->value_dim,
                                 .skip_zero = true});
    for (int64_t i = 0; i < n; i++)
        qkv_add_odd_value(a->logits[i], qkv_has_bias(p) ? a->bias[i] : 0.0f,
                          values.data + i * values.stride, p->value_dim, a->part);
}

/* Is any of the keys seen, for all that masks say? */
static bool any_shown(const qkv_anew *a, int64_t n)
{
    for (int64_t i = 0; i < n && qkv_has_bias(a->problem); i++)
        if (a->bias[i] != -INFINITY)
            return true;
    return !qkv_has_bias(a->problem);
}

/* Adds the keys of a range to a->out; returns their sum of exponentials. */
static double sum_of_range(const qkv_anew *a, qkv_range range, float max)
{
    double sum = 0.0;
    const int64_t value_dim = a->problem->value_dim;
    memset(a->part, 0, (size_t)value_dim * sizeof *a->part);
    for (int64_t j = range.begin, since = 0; j < range.end; j += a->keys) {
        const int64_t n = range.end - j < a->keys ? range.end - j : a->keys;
        qkv_anew_logits(a, j, n, QKV_WEIGHTS_SOFTMAX, QKV_UNITS_NATURAL, a->logits);
        for (int64_t i = 0; i < n; i++)
            a->logits[i] -= max;
        a->kernels->exp_f32(a->logits, a->logits, n);
        for (int64_t i = 0; i < n; i++)
            sum += (double)a->logits[i];
        if (any_shown(a, n))
            add_values(a, j, n);

        /* A block is summed on its own, so that rounding grows with it only. */
        since += n;
        if (since < QKV_KEY_BLOCK && j + n < range.end)
            continue;
        for (int64_t d = 0; d < value_dim; d++)
            a->out[d] += a->part[d];
        memset(a->part, 0, (size_t)value_dim * sizeof *a->part);
        since = 0;
    }
    return sum;
}

static qkv_row_total make_again(const qkv_anew *a)
{
    const qkv_attention_problem *p = a->problem;
    const qkv_range sees = qkv_visible_keys(p, a->place.sequence, a->place.query);
    const qkv_range always = {0, qkv_sink_keys(p, a->place.sequence, sees)};
    const float sink = p->sinks ? p->sinks[a->place.head] : -INFINITY;

    float max = sink > -FLT_MAX ? sink : -FLT_MAX;
    max = max_of_range(a, always, max);
    max = max_of_range(a, sees, max);

    memset(a->out, 0, (size_t)p->value_dim * sizeof *a->out);
    double sum = sum_of_range(a, always, max) + sum_of_range(a, sees, max);
    float of_sink = sink - max;
    a->kernels->exp_f32(&of_sink, &of_sink, 1);
    sum += (double)of_sink;
    return (qkv_row_total){.max = max, .sum = (float)sum, .units = QKV_UNITS_NATURAL};
}

qkv_row_end qkv_extreme_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                            int64_t row, float *scratch)
{
    const qkv_anew anew = qkv_anew_begin(p, k, run, row, scratch);
    const qkv_row_total total = make_again(&anew);
    return (qkv_row_end){.total = total, .sums = anew.out};
}
