/* SPDX-License-Identifier: MIT */
/*
 * The three steps as functions of their own. Kernels get the strides of the
 * checked views, which are 0 where there is one row: whatever a caller gives
 * there, no address is computed with it.
 */
#include <math.h>

#include "validate.h"

qkv_status qkv_dot(const float *queries, int64_t queries_stride, const float *keys,
                   int64_t keys_stride, float *scores, int64_t scores_stride, int64_t rows,
                   int64_t kv_len, int64_t head_dim)
{
    if (rows < 0 || kv_len < 0 || head_dim < 0)
        return QKV_E_SHAPE;

    qkv_view q, k, s;
    qkv_status status = qkv_view_matrix(queries, queries_stride, rows, head_dim, QKV_INPUT, &q);
    if (!status)
        status = qkv_view_matrix(keys, keys_stride, kv_len, head_dim, QKV_INPUT, &k);
    if (!status)
        status = qkv_view_matrix(scores, scores_stride, rows, kv_len, QKV_OUTPUT, &s);
    if (status)
        return status;
    if (qkv_view_empty(&s))
        return QKV_OK;
    if (qkv_views_overlap(&s, &q) || qkv_views_overlap(&s, &k))
        return QKV_E_OVERLAP;

    const qkv_kernels *kernels = qkv_kernels_active();
    int64_t d = 0;
    do {
        const int64_t block = head_dim - d < QKV_DOT_BLOCK ? head_dim - d : QKV_DOT_BLOCK;
        kernels->dot_f32(&(qkv_dot_args){.queries = queries + d,
                                         .keys = keys + d,
                                         .scores = scores,
                                         .queries_stride = q.stride[QKV_AXIS_ROW],
                                         .keys_stride = qkv_bytes(QKV_F32, k.stride[QKV_AXIS_ROW]),
                                         .scores_stride = s.stride[QKV_AXIS_ROW],
                                         .rows = rows,
                                         .kv_len = kv_len,
                                         .head_dim = block,
                                         .accumulate = d > 0});
        d += block;
    } while (d < head_dim);
    return QKV_OK;
}

qkv_status qkv_scale_softmax(const float *scores, int64_t scores_stride, float *weights,
                             int64_t weights_stride, float *lse, int64_t rows, int64_t kv_len,
                             float scale)
{
    if (rows < 0 || kv_len < 0)
        return QKV_E_SHAPE;
    if (!isfinite(scale))
        return QKV_E_VALUE;

    qkv_view s, w, l = {.dim = 0};
    qkv_status status = qkv_view_matrix(scores, scores_stride, rows, kv_len, QKV_INPUT, &s);
    if (!status)
        status = qkv_view_matrix(weights, weights_stride, rows, kv_len, QKV_OUTPUT, &w);
    if (!status && lse)
        status = qkv_view_matrix(lse, 1, rows, 1, QKV_OUTPUT, &l);
    if (status)
        return status;
    if ((!qkv_views_same(&w, &s) && qkv_views_overlap(&w, &s)) || qkv_views_overlap(&w, &l) ||
        qkv_views_overlap(&s, &l))
        return QKV_E_OVERLAP;

    if (kv_len == 0 && !lse)
        return QKV_OK; /* any number of rows without elements */
    const qkv_kernels *kernels = qkv_kernels_active();
    for (int64_t i = 0; i < rows; i++) {
        qkv_row_state state = {.max = -INFINITY, .sum = 0.0f};
        if (kv_len > 0)
            state = kernels->scale_softmax_f32(scores + i * scores_stride,
                                               weights + i * weights_stride, kv_len, scale);
        if (lse)
            lse[i] =
                state.sum == 0.0f ? -INFINITY : (float)((double)state.max + log((double)state.sum));
    }
    return QKV_OK;
}

/* One block of keys for up to QKV_ROWS_MAX rows; the first overwrites. */
static void weighted_sum_block(const qkv_kernels *kernels, qkv_weighted_sum_args args, bool first)
{
    float ones[QKV_ROWS_MAX];
    for (int i = 0; i < QKV_ROWS_MAX; i++)
        ones[i] = 1.0f;
    args.rescale = first ? NULL : ones;
    args.skip_zero = true;
    kernels->weighted_sum_f32(&args);
}

qkv_status qkv_weighted_sum(const float *weights, int64_t weights_stride, const float *values,
                            int64_t values_stride, float *out, int64_t out_stride, int64_t rows,
                            int64_t kv_len, int64_t value_dim)
{
    if (rows < 0 || kv_len < 0 || value_dim < 0)
        return QKV_E_SHAPE;

    qkv_view w, v, o;
    qkv_status status = qkv_view_matrix(weights, weights_stride, rows, kv_len, QKV_INPUT, &w);
    if (!status)
        status = qkv_view_matrix(values, values_stride, kv_len, value_dim, QKV_INPUT, &v);
    if (!status)
        status = qkv_view_matrix(out, out_stride, rows, value_dim, QKV_OUTPUT, &o);
    if (status)
        return status;
    if (qkv_view_empty(&o))
        return QKV_OK;
    if (qkv_views_overlap(&o, &w) || qkv_views_overlap(&o, &v))
        return QKV_E_OVERLAP;

    const qkv_kernels *kernels = qkv_kernels_active();
    for (int64_t i = 0; i < rows; i += QKV_ROWS_MAX) {
        const int64_t n_rows = rows - i < QKV_ROWS_MAX ? rows - i : QKV_ROWS_MAX;
        int64_t j = 0;
        do {
            const int64_t block = kv_len - j < QKV_KEY_BLOCK ? kv_len - j : QKV_KEY_BLOCK;
            weighted_sum_block(
                kernels,
                (qkv_weighted_sum_args){.weights = weights + i * weights_stride + j,
                                        .values = values + j * values_stride,
                                        .out = out + i * out_stride,
                                        .weights_stride = w.stride[QKV_AXIS_ROW],
                                        .values_stride = qkv_bytes(QKV_F32, v.stride[QKV_AXIS_ROW]),
                                        .out_stride = o.stride[QKV_AXIS_ROW],
                                        .rows = n_rows,
                                        .kv_len = block,
                                        .value_dim = value_dim},
                j == 0);
            j += block;
        } while (j < kv_len);
    }
    return QKV_OK;
}
