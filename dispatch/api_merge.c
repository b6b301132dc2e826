/* SPDX-License-Identifier: MIT */
/* Partial outputs of attention joined into one. */
#include <math.h>

#include "api.h"

static qkv_status check_merge(const qkv_merge_desc *d, qkv_view *out, qkv_view *lse)
{
    if (d->parts < 0 || d->rows < 0 || d->value_dim < 0)
        return QKV_E_SHAPE;
    if (d->flags || d->reserved)
        return QKV_E_FLAGS;
    const bool any = d->parts > 0 && d->rows > 0;
    if (any && (!d->part_out || !d->part_lse))
        return QKV_E_NULL;
    if (any && (!qkv_aligned(d->part_out, sizeof *d->part_out) ||
                !qkv_aligned(d->part_lse, sizeof *d->part_lse)))
        return QKV_E_ALIGN;
    if (any && (!qkv_array_fits(d->part_out, d->parts, sizeof *d->part_out) ||
                !qkv_array_fits(d->part_lse, d->parts, sizeof *d->part_lse)))
        return QKV_E_OVERFLOW;
    qkv_status status =
        qkv_view_matrix(d->out, d->out_stride, d->rows, d->value_dim, QKV_OUTPUT, out);
    *lse = (qkv_view){.data = NULL};
    if (!status && d->lse)
        status = qkv_view_matrix(d->lse, 1, d->rows, 1, QKV_OUTPUT, lse);
    if (!status && qkv_views_overlap(out, lse))
        status = QKV_E_OVERLAP;
    const qkv_view arrays[] = {
        qkv_view_bytes(any ? d->part_out : NULL, d->parts, sizeof *d->part_out),
        qkv_view_bytes(any ? d->part_lse : NULL, d->parts, sizeof *d->part_lse)};
    for (int i = 0; !status && i < 2; i++)
        if (qkv_views_overlap(&arrays[i], out) || qkv_views_overlap(&arrays[i], lse))
            status = QKV_E_OVERLAP;
    for (int64_t i = 0; !status && d->rows > 0 && i < d->parts; i++) {
        qkv_view part, part_lse;
        status =
            qkv_view_matrix(d->part_out[i], d->out_stride, d->rows, d->value_dim, QKV_INPUT, &part);
        if (!status)
            status = qkv_view_matrix(d->part_lse[i], 1, d->rows, 1, QKV_INPUT, &part_lse);
        if (status)
            return status;
        if ((qkv_views_overlap(&part, out) && d->part_out[i] != d->out) ||
            (qkv_views_overlap(&part_lse, lse) && d->part_lse[i] != d->lse) ||
            qkv_views_overlap(&part, lse) || qkv_views_overlap(&part_lse, out))
            return QKV_E_OVERLAP;
    }
    return status;
}

/* The largest log-sum-exp of a row; NaN if there is one. */
static float largest(const qkv_merge_desc *d, int64_t row)
{
    float max = -INFINITY;
    for (int64_t i = 0; i < d->parts; i++) {
        const float lse = d->part_lse[i][row];
        if (!(lse <= max))
            max = lse;
        if (isnan(max))
            break;
    }
    return max;
}

/* Columns of a row that are summed at a time, in the order of the parts. */
enum { COLUMNS = 64 };

static void merge_columns(const qkv_merge_desc *d, int64_t row, int64_t column, int64_t n,
                          float max, float sum)
{
    float total[COLUMNS] = {0};
    for (int64_t i = 0; i < d->parts; i++) {
        const float weight = expf(d->part_lse[i][row] - max);
        if (weight == 0.0f)
            continue; /* an empty part has no say, whatever it holds */
        const float *part = d->part_out[i] + row * d->out_stride + column;
        for (int64_t c = 0; c < n; c++)
            total[c] += weight * part[c];
    }
    float *out = d->out + row * d->out_stride + column;
    for (int64_t c = 0; c < n; c++)
        out[c] = total[c] / sum;
}

static void merge_row(const qkv_merge_desc *d, int64_t row)
{
    const float max = largest(d, row);
    float *out = d->out + row * d->out_stride, sum = 0.0f;
    if (max == -INFINITY) { /* no part has a key */
        for (int64_t c = 0; c < d->value_dim; c++)
            out[c] = 0.0f;
    } else {
        for (int64_t i = 0; i < d->parts; i++)
            sum += expf(d->part_lse[i][row] - max);
        for (int64_t c = 0; c < d->value_dim; c += COLUMNS)
            merge_columns(d, row, c, d->value_dim - c < COLUMNS ? d->value_dim - c : COLUMNS, max,
                          sum);
    }
    if (d->lse) /* last: it may be a part's own */
        d->lse[row] = max == -INFINITY ? max : (float)((double)max + log((double)sum));
}

qkv_status qkv_merge(const qkv_merge_desc *desc)
{
    qkv_merge_desc d;
    qkv_view out, lse;
    qkv_status status = qkv_copy_desc(&d, sizeof d, NULL, desc);
    if (!status && d.out_stride == 0)
        d.out_stride = d.value_dim;
    if (!status)
        status = check_merge(&d, &out, &lse);
    if (status)
        return status;
    /* Any number of rows without elements. */
    for (int64_t row = 0; row < d.rows && (d.value_dim > 0 || d.lse); row++)
        merge_row(&d, row);
    return QKV_OK;
}
