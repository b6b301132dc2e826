/* SPDX-License-Identifier: MIT */
/*
 * The oracle for everything that a descriptor can ask for: one row at a time,
 * key by key, every rule asked of every key. It shares no code with the
 * library nor with the plain oracle beside it, so that two hands have written
 * down the common part.
 */
#ifndef ORACLE_SEMANTICS_H
#define ORACLE_SEMANTICS_H

#include <stdint.h>

enum { ORACLE_SOFTMAX, ORACLE_SCALED, ORACLE_CAPPED, ORACLE_MASKED };

/* All arrays packed, in f64; those that may be NULL are marked. */
typedef struct oracle_semantics {
    int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    const double *q, *k, *v; /* [batch][heads][rows][dim] */
    double scale;
    int causal;
    const int64_t *q_lens;    /* [batch], NULL: q_len. Other rows are not touched */
    const int64_t *kv_lens;   /* [batch], NULL: kv_len */
    const int64_t *q_offsets; /* [batch], NULL: length - q_len of the sequence */
    int windowed;
    int64_t window_left, window_right, sink_tokens;
    double softcap;                             /* 0: none */
    const double *slopes, *head_scales, *sinks; /* [q_heads], NULL */
    const double *mask;                         /* [batch][q_heads][q_len][kv_len], added; NULL */
    const unsigned char *tree;                  /* [batch][q_len][q_len], NULL */
    int stage;                                  /* what 'weights' holds */

    /* What narrow types may cost: queries rounded to this part of the largest
     * one of a row, and elements of keys and values to so much of themselves. */
    double q_step, k_rounding, v_rounding;

    /* Results, each with how far f32 may be off. */
    double *out, *out_bound;         /* [batch][q_heads][q_len][value_dim] */
    double *lse, *lse_bound;         /* [batch][q_heads][q_len] */
    double *max, *max_bound;         /* likewise */
    double *weights, *weights_bound; /* [batch][q_heads][q_len][kv_len], NULL */
} oracle_semantics;

/* Does query i of a head see key j? */
int oracle_sees(const oracle_semantics *s, int64_t batch, int64_t head, int64_t query, int64_t key);

/* 'room' holds 3 * kv_len doubles. */
void oracle_semantics_run(const oracle_semantics *s, double *room);

#endif
