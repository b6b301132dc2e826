/* SPDX-License-Identifier: MIT */
/*
 * From dot products to the logits of the softmax, one rule after the other,
 * in the order of the mathematics:
 *
 *     scale    t = s (q . k)                 s = 1/sqrt(head_dim): Vaswani et al. 2017, 3.2.1
 *     softcap  t = cap tanh(t / cap)         Gemma 2 (2024), 2: capped, but never hidden
 *     slope    t = t + slope (j - p)         Press et al., "Train Short, Test Long", 2022 (ALiBi)
 *     bias     t = 2 (t/2 + bias/2)          Raffel et al., T5, 2020, 2.1; ONNX Attention
 *     hidden   t = -inf                      whatever t was: a NaN too
 *
 * The cap comes before slope and bias, as after them it would turn a hidden
 * key's -inf into the finite -cap. All is in units of log2(e), in which the
 * tile takes its exponentials; the factors that lead there are the caller's.
 * Where there is a bias they lead to half of that, and its sum is doubled: a
 * bias of -FLT_MAX fits these units no more than a logit of FLT_MAX does, but
 * what they come to together may.
 */
#include "internal.h"

#include <math.h>

#include "../constants.h"
#include "exp_scalar.h"

/* tanh(x): see constants.h. NaN gives NaN, -0 gives -0. */
static float tanh_scalar(float x)
{
    const float magnitude = fabsf(x);
    if (!(magnitude > 1.0f)) {
        const float z = x * x;
        float p = QKV_TANH_C6;
        p = p * z + QKV_TANH_C5;
        p = p * z + QKV_TANH_C4;
        p = p * z + QKV_TANH_C3;
        p = p * z + QKV_TANH_C2;
        p = p * z + QKV_TANH_C1;
        p = p * z + QKV_TANH_C0;
        return x + x * (z * p);
    }
    const float e = qkv_exp_scalar(-2.0f * magnitude);
    return copysignf(1.0f - 2.0f * e / (1.0f + e), x);
}

void qkv_tanh_f32_scalar(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = tanh_scalar(x[i]);
}

static float capped(float t, float cap)
{
    return cap != 0.0f ? cap * tanh_scalar(t) : t;
}

/* 'ahead' is how far the key lies ahead of the query: mostly negative. */
static float sloped(float t, float slope, float ahead)
{
    return slope != 0.0f ? t + slope * ahead : t;
}

/* 't' and bias * bias_scale are halves. */
static float biased(float t, float bias, float bias_scale)
{
    if (bias == -INFINITY)
        return -INFINITY;
    return 2.0f * (t + bias * bias_scale);
}

void qkv_row_adjust_f32_scalar(const qkv_row_adjust_args *a)
{
    for (int64_t j = 0; j < a->n; j++) {
        float t = capped(a->logits[j] * a->scale, a->cap);
        t = sloped(t, a->slope, (float)j - a->behind);
        if (a->bias)
            t = biased(t, a->bias[j], a->bias_scale);
        a->logits[j] = t;
    }
}

static bool in_range(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    return !a->end || (j < a->end[i] && (j >= a->begin[i] || j < a->sinks));
}

static float tile_logit(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    const int64_t at = j * a->tile_rows + i;
    if (!in_range(a, i, j))
        return -INFINITY;
    float t = capped(a->logits[at] * a->scale[i], a->cap);
    if (a->slope)
        t = sloped(t, a->slope[i], (float)j - a->behind[i]);
    return a->bias ? biased(t, a->bias[at], a->bias_scale) : t;
}

void qkv_tile_adjust_f32_scalar(const qkv_tile_adjust_args *a)
{
    for (int64_t j = 0; j < a->kv_len; j++) {
        for (int64_t i = 0; i < a->n_rows; i++) {
            const float t = tile_logit(a, i, j);
            a->logits[j * a->tile_rows + i] = t;
            if (t > a->max[i])
                a->max[i] = t;
        }
    }
}
