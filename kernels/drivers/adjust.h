/* SPDX-License-Identifier: MIT */
/*
 * What happens to logits between the dot products and the softmax: scales of
 * heads, softcap, slopes, masks. The kernels do the arithmetic; here the
 * descriptor's arrays become their arguments.
 *
 * What a mask or a tree says of a query and some keys is written down as a
 * row of biases: f32 as they stand in an additive mask, 0 for a key that is
 * seen, -inf for one that is not. A bias of -inf hides a key like any other
 * rule.
 */
#ifndef QKV_DRIVERS_ADJUST_H
#define QKV_DRIVERS_ADJUST_H

#include "attention.h"

/* Is there a mask or a tree, so that rows of biases are needed? */
static inline bool qkv_has_bias(const qkv_attention_problem *problem)
{
    return problem->mask.data || problem->tree_mask;
}

/* The biases of keys first .. first + n - 1; false if all of them are hidden. */
bool qkv_bias_row(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                  qkv_row_place place, int64_t first, int64_t n, float *bias);

/* Do two rows of a sequence have the same biases for certain? */
bool qkv_same_bias(const qkv_attention_problem *problem, qkv_row_place a, qkv_row_place b);

/*
 * The factors of a row. In units of log2(e), for the softmax; or as they are,
 * for those that look at logits. Halves of them where a bias follows.
 */
typedef enum qkv_units { QKV_UNITS_LOG2, QKV_UNITS_NATURAL } qkv_units;
typedef struct qkv_row_factors {
    float scale, cap, slope, bias_scale;
} qkv_row_factors;
qkv_row_factors qkv_factors_of(const qkv_attention_problem *problem, int64_t head, qkv_units units,
                               bool biased);

/* How far the query stands ahead of key 'first', as a float. */
float qkv_behind_of(qkv_row_place place, int64_t first);

/* The dot products of a row with keys first .. first + n - 1, in place;
 * 'bias' is from qkv_bias_row() or NULL. */
void qkv_adjust_row(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                    qkv_row_place place, int64_t first, int64_t n, const float *bias,
                    float *logits);

/* The state in which a row begins: nothing summed but its sink. */
qkv_row_state qkv_first_state(const qkv_attention_problem *problem, int64_t head);

/*
 * A value that is NaN or infinite cannot stand in a weighted sum beside keys
 * that a row does not see: 0 times it is NaN. weighted_sum passes over every
 * weight of 0; qkv_add_odd_value() adds what it left out of a key that is seen:
 * out[d] += 0 * value[d] where that is not 0. 'bias' is the key's for this row.
 */
bool qkv_any_odd(const float *x, int64_t n);
void qkv_add_odd_value(float weight, float bias, const float *value, int64_t value_dim, float *out);

#endif
