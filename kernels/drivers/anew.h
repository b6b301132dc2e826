/* SPDX-License-Identifier: MIT */
/*
 * A row whose logits are made anew, a few keys at a time and slowly: for its
 * weights, which fused attention never stores (weights.c), and where logits
 * are too large for the units of log2(e) that it holds them in (extreme.c).
 */
#ifndef QKV_DRIVERS_ANEW_H
#define QKV_DRIVERS_ANEW_H

#include <float.h>
#include <math.h>

#include "adjust.h"

/* A row with what is needed on the way; the arrays are scratch memory. */
typedef struct qkv_anew {
    const qkv_attention_problem *problem;
    const qkv_kernels *kernels;
    qkv_row_place place;
    int64_t kv_head, keys; /* keys a time, at most */
    const float *query;
    float *bias;   /* [keys], as of the latest keys */
    float *logits; /* [keys]: the caller's */
    float *stage;  /* rows on their way to f32 */
    float *out;    /* [value_dim]: qkv_extreme_row()'s result */
    float *part;   /* [value_dim]: likewise its own */
} qkv_anew;

/* Floats of scratch memory; and a row begun with it. */
int64_t qkv_anew_scratch(const qkv_attention_problem *problem);
qkv_anew qkv_anew_begin(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                        qkv_row_run run, int64_t row, float *scratch);

/*
 * The logits of keys first .. first + n - 1, n <= keys, as they are after the
 * stage; keys that a mask or the tree hides have -inf after the last ones. The
 * softmax's are in the units that are asked for, all others as they are.
 */
void qkv_anew_logits(const qkv_anew *row, int64_t first, int64_t n, int32_t stage, qkv_units units,
                     float *logits);

/* What a row comes to: 'max' in these units. */
typedef struct qkv_row_total {
    float max, sum;
    qkv_units units;
} qkv_row_total;

/* The row's normalised weights, or its logits, into the descriptor's 'weights'. */
void qkv_store_weights(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                       qkv_row_run run, int64_t row, qkv_row_total total, float *scratch);

/* The log-sum-exp and the largest logit of a row, as far as they are wanted. */
void qkv_store_row_numbers(const qkv_attention_problem *problem, qkv_row_run run, int64_t row,
                           qkv_row_total total);

/* Could it be that the fused way cannot hold the row? See extreme.c. */
static inline bool qkv_is_extreme(const qkv_attention_problem *problem, qkv_row_state state)
{
    const float largest = 0x1.62e42ep+127f; /* FLT_MAX * ln(2), rounded down */
    /* A factor beyond that range is infinite, and its product with 0 a NaN. */
    return !(fabsf(state.max) < FLT_MAX) || problem->softcap > largest ||
           (problem->adjusted && isnan(state.sum));
}

/* Such a row made again. */
typedef struct qkv_row_end {
    qkv_row_total total;
    const float *sums; /* the weighted values, not normalised; NULL: those of the fused way */
} qkv_row_end;
qkv_row_end qkv_extreme_row(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                            qkv_row_run run, int64_t row, float *scratch);

/* What a row comes to in the end. Inline: a token's call passes here for each head. */
static inline qkv_row_end qkv_end_row(const qkv_attention_problem *problem,
                                      const qkv_kernels *kernels, qkv_row_run run, int64_t row,
                                      qkv_row_state state, float *scratch)
{
    if (qkv_is_extreme(problem, state))
        return qkv_extreme_row(problem, kernels, run, row, scratch);
    return (qkv_row_end){.total = {state.max, state.sum, QKV_UNITS_LOG2}, .sums = NULL};
}

#endif
