/* SPDX-License-Identifier: MIT */
/*
 * The matrix that fused attention never stores, for those who want to look
 * at it: a row's normalised weights once its maximum and sum are known, or
 * its logits as they stand at a stage on the way. The logits are made anew.
 */
#include "anew.h"

#include <math.h>

#include "visibility.h"

/* p_j = 2^(t_j - max) / sum, or e^(t_j - max) / sum. A logit that is made anew
 * may come out above the maximum by its rounding. */
static void normalise(const qkv_kernels *k, qkv_row_total total, int64_t n, float *logits)
{
    for (int64_t j = 0; j < n; j++) {
        logits[j] = isnan(total.sum) ? total.sum : logits[j] - total.max;
        logits[j] = logits[j] > 0.0f ? 0.0f : logits[j];
    }
    (total.units == QKV_UNITS_LOG2 ? k->exp2_f32 : k->exp_f32)(logits, logits, n);
    for (int64_t j = 0; j < n; j++)
        logits[j] /= total.sum;
}

/* The keys of a range. */
static void store_range(const qkv_anew *row, qkv_range range, qkv_row_total total, float *out)
{
    const int32_t stage = row->problem->weights_stage;
    for (int64_t j = range.begin; j < range.end; j += row->keys) {
        const int64_t n = range.end - j < row->keys ? range.end - j : row->keys;
        qkv_anew_logits(row, j, n, stage, total.units, out + j);
        if (stage == QKV_WEIGHTS_SOFTMAX)
            normalise(row->kernels, total, n, out + j);
    }
}

void qkv_store_weights(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       int64_t row, qkv_row_total total, float *scratch)
{
    const qkv_anew anew = qkv_anew_begin(p, k, run, row, scratch);
    const qkv_row_place place = anew.place;
    float *out = qkv_row_of(&p->weights, p, run, row);
    const bool softmax = p->weights_stage == QKV_WEIGHTS_SOFTMAX;
    const bool masked = p->weights_stage == QKV_WEIGHTS_MASKED;
    const float unseen = softmax && isnan(total.sum) ? total.sum : 0.0f;
    qkv_fill(out, p->weights.dim, masked ? -INFINITY : unseen);
    if (!softmax && !masked) {
        store_range(&anew, (qkv_range){0, place.sequence->kv_len}, total, out);
        return;
    }
    if (softmax && total.sum == 0.0f)
        return;
    const qkv_range sees = qkv_visible_keys(p, place.sequence, place.query);
    const qkv_range sinks = {0, qkv_sink_keys(p, place.sequence, sees)};
    store_range(&anew, sinks, total, out);
    store_range(&anew, sees, total, out);
}
