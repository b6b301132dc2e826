/* SPDX-License-Identifier: MIT */
/* See adjust.h. What a rule means is in kernels/scalar/adjust.c. */
#include "adjust.h"
#include "typed.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "visibility.h"

static const double log2e = 0x1.71547652b82fep+0;

/* --------------------------------------------------------------- factors */

/* The nearest float, where an overflow ends at the largest. */
static float nearest_finite(double x)
{
    if (x > (double)FLT_MAX)
        return FLT_MAX;
    return x < -(double)FLT_MAX ? -FLT_MAX : (float)x;
}

qkv_row_factors qkv_factors_of(const qkv_attention_problem *p, int64_t head, qkv_units units,
                               bool biased)
{
    const double unit = (units == QKV_UNITS_LOG2 ? log2e : 1.0) * (biased ? 0.5 : 1.0);
    double scale = (double)p->scale;
    if (p->head_scales)
        scale *= (double)p->head_scales[head];

    qkv_row_factors f = {.bias_scale = (float)unit};
    if (p->softcap != 0.0f) {
        f.scale = (float)(scale / (double)p->softcap);
        f.cap = nearest_finite((double)p->softcap * unit);
    } else {
        f.scale = (float)(scale * unit);
    }
    if (p->slopes)
        f.slope = (float)((double)p->slopes[head] * unit);
    return f;
}

float qkv_behind_of(qkv_row_place place, int64_t first)
{
    return (float)((double)place.sequence->q_offset + (double)(place.query - first));
}

qkv_row_state qkv_first_state(const qkv_attention_problem *p, int64_t head)
{
    const float sink = p->sinks ? p->sinks[head] : -INFINITY;
    if (sink == -INFINITY)
        return (qkv_row_state){.max = -FLT_MAX, .sum = 0.0f};
    if (!isfinite(sink))
        return (qkv_row_state){.max = -FLT_MAX, .sum = NAN};
    return (qkv_row_state){.max = nearest_finite((double)sink * log2e), .sum = 1.0f};
}

/* ---------------------------------------------------------------- biases */

/* 0 for a key that is seen, -inf for one that is not: without a branch, as
 * masks may be as good as random. */
static float bias_of_bit(uint32_t seen)
{
    const uint32_t bits = (seen - 1) & 0xff800000;
    float bias;
    memcpy(&bias, &bits, sizeof bias);
    return bias;
}

static void bits_to_bias(const uint8_t *bytes, int64_t first, int64_t stride, int64_t n,
                         float *bias)
{
    for (int64_t j = 0; j < n; j++) {
        const int64_t bit = first + j * stride;
        bias[j] = bias_of_bit(bytes[bit / 8] >> bit % 8 & 1u);
    }
}

static void bools_to_bias(const uint8_t *bytes, int64_t stride, int64_t n, float *bias)
{
    if (stride == 1) /* the loop that compilers make vectors of */
        for (int64_t j = 0; j < n; j++)
            bias[j] = bias_of_bit(bytes[j] != 0);
    else
        for (int64_t j = 0; j < n; j++)
            bias[j] = bias_of_bit(bytes[j * stride] != 0);
}

/* Elements 'stride' apart, one by one; next to each other, all at once. */
static void halves_to_bias(const qkv_kernels *k, int32_t dtype, const uint16_t *halves,
                           int64_t stride, int64_t n, float *bias)
{
    if (stride == 1) {
        qkv_widen_typed(k, dtype, halves, NULL, bias, n);
        return;
    }
    for (int64_t j = 0; j < n; j++)
        qkv_widen_typed(k, dtype, halves + j * stride, NULL, bias + j, 1);
}

static void floats_to_bias(const float *floats, int64_t stride, int64_t n, float *bias)
{
    if (stride == 1)
        memcpy(bias, floats, (size_t)n * sizeof *bias);
    else
        for (int64_t j = 0; j < n; j++)
            bias[j] = floats[j * stride];
}

static void mask_row(const qkv_mask_view *m, const qkv_kernels *k, qkv_row_place at, int64_t first,
                     int64_t n, float *bias)
{
    const int64_t element = at.sequence->index * m->stride[QKV_AXIS_BATCH] +
                            at.head * m->stride[QKV_AXIS_HEAD] +
                            at.query * m->stride[QKV_AXIS_ROW] + first * m->stride_key;
    if (m->dtype == QKV_BIT)
        bits_to_bias(m->data, element, m->stride_key, n, bias);
    else if (m->dtype == QKV_BOOL)
        bools_to_bias((const uint8_t *)m->data + element, m->stride_key, n, bias);
    else if (m->dtype == QKV_F32)
        floats_to_bias((const float *)m->data + element, m->stride_key, n, bias);
    else
        halves_to_bias(k, m->dtype, (const uint16_t *)m->data + element, m->stride_key, n, bias);
}

static bool any_seen(const float *bias, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        if (bias[j] != -INFINITY)
            return true;
    return false;
}

bool qkv_same_bias(const qkv_attention_problem *p, qkv_row_place a, qkv_row_place b)
{
    if (a.query != b.query && (p->tree_mask || p->mask.stride[QKV_AXIS_ROW] != 0))
        return false;
    return a.head == b.head || !p->mask.data || p->mask.stride[QKV_AXIS_HEAD] == 0;
}

bool qkv_bias_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_place place,
                  int64_t first, int64_t n, float *bias)
{
    if (p->mask.data)
        mask_row(&p->mask, k, place, first, n, bias);
    else
        memset(bias, 0, (size_t)n * sizeof *bias);
    if (p->tree_mask)
        for (int64_t j = 0; j < n; j++)
            if (!qkv_tree_shows(p, place.sequence, place.query, first + j))
                bias[j] = -INFINITY;
    return any_seen(bias, n);
}

/* ------------------------------------------------------------------ rows */

void qkv_adjust_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_place place,
                    int64_t first, int64_t n, const float *bias, float *logits)
{
    const qkv_row_factors f = qkv_factors_of(p, place.head, QKV_UNITS_LOG2, bias != NULL);
    k->row_adjust_f32(&(qkv_row_adjust_args){.logits = logits,
                                             .bias = bias,
                                             .n = n,
                                             .scale = f.scale,
                                             .cap = f.cap,
                                             .slope = f.slope,
                                             .behind = qkv_behind_of(place, first),
                                             .bias_scale = f.bias_scale});
}

bool qkv_any_odd(const float *x, int64_t n)
{
    /* An exponent of all ones carries into the sign: integers, of which
     * compilers make vectors where they would not of comparisons. */
    uint32_t carry = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        carry |= (bits & 0x7f800000) + 0x00800000;
    }
    return (carry & 0x80000000) != 0;
}

void qkv_add_odd_value(float weight, float bias, const float *value, int64_t value_dim, float *out)
{
    if (weight != 0.0f || bias == -INFINITY)
        return;
    for (int64_t d = 0; d < value_dim; d++)
        if (!isfinite(value[d]))
            out[d] += weight * value[d];
}
