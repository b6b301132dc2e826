/* SPDX-License-Identifier: MIT */
/*
 * The fused attention tile, scalar: what the vector kernels must compute.
 * A tile holds some query rows; tile_step takes them all through one block
 * of keys, step by step as in dot.c, softmax.c and weighted_sum.c, but with
 * the rows in the innermost place, where a vector kernel has its lanes.
 */
#include "internal.h"

#include <math.h>

#include "exp_scalar.h"

enum { TILE = QKV_scalar_tile_rows, PANEL = QKV_scalar_value_panel };

void qkv_tile_load_f32_scalar(const float *const *rows, int64_t n_rows, int64_t head_dim,
                              float *tile)
{
    for (int64_t d = 0; d < head_dim; d++)
        for (int64_t i = 0; i < TILE; i++)
            tile[d * TILE + i] = i < n_rows ? rows[i][d] : 0.0f;
}

void qkv_tile_pack_f32_scalar(const float *values, int64_t values_stride, int64_t kv_len,
                              int64_t value_dim, float *packed)
{
    for (int64_t first = 0; first < value_dim; first += PANEL)
        for (int64_t j = 0; j < kv_len; j++)
            for (int64_t d = first; d < first + PANEL; d++)
                *packed++ = d < value_dim ? values[j * values_stride + d] : 0.0f;
}

static bool row_sees(const qkv_tile_step_args *a, int64_t i, int64_t j)
{
    return !a->end || (a->begin[i] <= j && j < a->end[i]);
}

/* Logits in units of log2(e), -inf where a row does not see the key. */
static void tile_logits(const qkv_tile_step_args *a)
{
    for (int64_t j = 0; j < a->kv_len; j++) {
        const float *key = a->keys + j * a->keys_stride;
        for (int64_t i = 0; i < a->n_rows; i++) {
            float sum = 0.0f;
            for (int64_t d = 0; d < a->head_dim; d++)
                sum += a->query[d * TILE + i] * key[d];
            a->logits[j * TILE + i] = row_sees(a, i, j) ? sum * a->scale_log2 : -INFINITY;
        }
    }
}

/* The running maximum of every row after this block. */
static void tile_max(const qkv_tile_step_args *a, float *max)
{
    for (int64_t i = 0; i < a->n_rows; i++) {
        max[i] = a->max[i];
        for (int64_t j = 0; j < a->kv_len; j++)
            if (a->logits[j * TILE + i] > max[i])
                max[i] = a->logits[j * TILE + i];
    }
}

/* Logits become exponentials; the running maximum and sum move on. */
static void tile_softmax(const qkv_tile_step_args *a, const float *max, float *rescale)
{
    for (int64_t i = 0; i < a->n_rows; i++) {
        float sum = 0.0f;
        for (int64_t j = 0; j < a->kv_len; j++) {
            const float p = qkv_exp2_scalar(a->logits[j * TILE + i] - max[i]);
            a->logits[j * TILE + i] = p;
            sum += p;
        }

        rescale[i] = qkv_exp2_scalar(a->max[i] - max[i]);
        a->sum[i] = a->sum[i] * rescale[i] + sum;
        a->max[i] = max[i];
    }
}

static void tile_values(const qkv_tile_step_args *a, const float *rescale)
{
    for (int64_t d = 0; d < a->value_dim; d++) {
        const float *column = a->values + d / PANEL * a->values_keys * PANEL + d % PANEL;
        for (int64_t i = 0; i < a->n_rows; i++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < a->kv_len; j++)
                if (row_sees(a, i, j)) /* 0 * NaN is NaN */
                    sum += a->logits[j * TILE + i] * column[j * PANEL];
            float *out = a->out + d * TILE + i;
            *out = *out * rescale[i] + sum;
        }
    }
}

void qkv_tile_step_f32_scalar(const qkv_tile_step_args *a)
{
    float max[TILE], rescale[TILE];
    tile_logits(a);
    tile_max(a, max);
    tile_softmax(a, max, rescale);
    tile_values(a, rescale);
}

/* The range of visible keys is left out: both halves are about all keys. */
static qkv_tile_step_args all_keys(const qkv_tile_step_args *args)
{
    qkv_tile_step_args a = *args;
    a.begin = a.end = NULL;
    return a;
}

void qkv_tile_logits_f32_scalar(const qkv_tile_step_args *args)
{
    const qkv_tile_step_args a = all_keys(args);
    tile_logits(&a);
}

void qkv_tile_weigh_f32_scalar(const qkv_tile_step_args *args, const float *max)
{
    const qkv_tile_step_args a = all_keys(args);
    float rescale[TILE];
    tile_softmax(&a, max, rescale);
    tile_values(&a, rescale);
}

void qkv_tile_store_f32_scalar(const float *out, const float *sum, int64_t n_rows,
                               int64_t value_dim, float *const *rows)
{
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t d = 0; d < value_dim; d++)
            rows[i][d] = sum[i] == 0.0f ? 0.0f : out[d * TILE + i] / sum[i];
}
