/* SPDX-License-Identifier: MIT */
/*
 * Dot products and weighted sums of a cache's rows by way of f32: a few rows
 * at a time are widened into a stage that stays in the first-level cache, and
 * the f32 kernels read them there. One pass over the cache serves all rows.
 */
#ifndef QKV_KV_STAGED_NEON_H
#define QKV_KV_STAGED_NEON_H

#include "internal.h"

enum {
    KV_STAGE = 4096, /* floats of a stage, at least one row: 16 KiB */
    KV_PANEL = 256,  /* columns of a weighted sum that go together */
    KV_STAGED_ROWS = QKV_ROWS_MAX
};

/* One row of 'n' elements to f32. */
typedef void kv_widen_row(const void *x, const float *scale, float *y, int64_t n);

static inline void kv_widen_f16(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    qkv_widen_f16_neon(x, y, n);
}

static inline void kv_widen_bf16(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    qkv_widen_bf16_neon(x, y, n);
}

static inline int64_t kv_staged_keys(int64_t stride, int64_t left)
{
    const int64_t fit = stride ? KV_STAGE / stride : left;
    return left < fit ? left : fit;
}

static inline int64_t kv_up_to_16(int64_t n)
{
    return (n + 15) / 16 * 16;
}

static inline void kv_staged_dot(const qkv_dot_args *a, kv_widen_row *widen)
{
    _Alignas(64) float stage[KV_STAGE];
    const int64_t stride = kv_up_to_16(a->head_dim);
    int64_t n;
    for (int64_t key = 0; key < a->kv_len; key += n) {
        n = kv_staged_keys(stride, a->kv_len - key);
        for (int64_t k = 0; k < n; k++)
            widen(a->keys_at ? a->keys_at[key + k]
                             : (const char *)a->keys + (key + k) * a->keys_stride,
                  a->key_scales ? a->key_scales + (key + k) * a->key_scales_stride : NULL,
                  stage + k * stride, a->head_dim);
        qkv_dot_f32_neon(&(qkv_dot_args){.queries = a->queries,
                                         .keys = stage,
                                         .scores = a->scores + key,
                                         .queries_stride = a->queries_stride,
                                         .keys_stride = stride * (int64_t)sizeof *stage,
                                         .scores_stride = a->scores_stride,
                                         .rows = a->rows,
                                         .kv_len = n,
                                         .head_dim = a->head_dim,
                                         .accumulate = a->accumulate});
    }
}

/* 'columns' columns of all keys, from byte 'begin' of each on; the block's sum is made apart and
 * added last. */
static inline void kv_staged_panel(const qkv_weighted_sum_args *a, int64_t begin, float *out,
                                   int64_t columns, kv_widen_row *widen)
{
    _Alignas(64) float stage[KV_STAGE], sums[KV_STAGED_ROWS * KV_PANEL];
    static const float keep[KV_STAGED_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1};
    const int64_t stride = kv_up_to_16(columns);
    int64_t n = 0;
    for (int64_t key = 0; key == 0 || key < a->kv_len; key += n) {
        n = kv_staged_keys(stride, a->kv_len - key);
        for (int64_t k = 0; k < n; k++)
            widen((a->values_at ? (const char *)a->values_at[key + k]
                                : (const char *)a->values + (key + k) * a->values_stride) +
                      begin,
                  a->value_scales ? a->value_scales + (key + k) * a->value_scales_stride : NULL,
                  stage + k * stride, columns);
        qkv_weighted_sum_f32_neon(
            &(qkv_weighted_sum_args){.weights = a->weights + key,
                                     .values = stage,
                                     .out = sums,
                                     .rescale = key ? keep : NULL,
                                     .weights_stride = a->weights_stride,
                                     .values_stride = stride * (int64_t)sizeof *stage,
                                     .out_stride = KV_PANEL,
                                     .rows = a->rows,
                                     .kv_len = n,
                                     .value_dim = columns,
                                     .skip_zero = a->skip_zero});
        if (n == 0)
            break;
    }
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t d = 0; d < columns; d++) {
            float *to = out + i * a->out_stride + d;
            const float sum = sums[i * KV_PANEL + d];
            *to = a->rescale ? *to * a->rescale[i] + sum : sum;
        }
}

/* 'panel_bytes': those of KV_PANEL elements. */
static inline void kv_staged_sum(const qkv_weighted_sum_args *a, int64_t panel_bytes,
                                 kv_widen_row *widen)
{
    int64_t begin = 0;
    for (int64_t d = 0; d < a->value_dim; d += KV_PANEL, begin += panel_bytes) {
        const int64_t columns = a->value_dim - d < KV_PANEL ? a->value_dim - d : KV_PANEL;
        kv_staged_panel(a, begin, a->out + d, columns, widen);
    }
}

#endif
