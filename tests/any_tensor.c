/* SPDX-License-Identifier: MIT */
#include "any_tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/kv.h"

/* For every type but f32, which the formats of caches do not list. */
static kv_format format_of(int32_t dtype)
{
    static const kv_format formats[] = {
        [QKV_F16] = KV_F16,  [QKV_BF16] = KV_BF16,       [QKV_Q8_0] = KV_Q8_0,
        [QKV_I8] = KV_I8,    [QKV_F8_E4M3] = KV_F8_E4M3, [QKV_F8_E5M2] = KV_F8_E5M2,
        [QKV_Q4_0] = KV_Q4_0};
    return formats[dtype];
}

static int64_t bytes_of(int32_t dtype, int64_t n)
{
    return dtype == QKV_F32 ? 4 * n : oracle_kv_bytes(format_of(dtype), n);
}

int64_t any_step(int32_t dtype)
{
    return dtype == QKV_F32 ? 1 : oracle_kv_step(format_of(dtype));
}

size_t any_bytes(const any_tensor *t)
{
    return (size_t)bytes_of(t->dtype, t->extent);
}

static void set_strides(int64_t stride[3], int64_t heads, int64_t rows, int64_t dim, int64_t gap,
                        int how)
{
    const int64_t row = dim + (how == HOW_PADDED ? gap : 0);
    stride[2] = how == HOW_BSHD ? heads * dim : row;
    stride[1] = how == HOW_BSHD ? dim : rows * row;
    stride[0] = heads * rows * row;
}

/* Elements from the first to one past the last. */
static int64_t extent_of(const int64_t count[3], const int64_t stride[3], int64_t dim)
{
    int64_t extent = dim;
    for (int a = 0; a < 3; a++)
        extent += (count[a] - 1) * stride[a];
    return count[0] == 0 || count[1] == 0 || count[2] == 0 || dim == 0 ? 0 : extent;
}

static qkv_tensor describe(void *data, const int64_t stride[3], int32_t dtype)
{
    return (qkv_tensor){.data = data,
                        .stride_batch = stride[0],
                        .stride_head = stride[1],
                        .stride_row = stride[2],
                        .dtype = dtype,
                        .flags = QKV_TENSOR_STRIDED};
}

any_tensor any_make(int slot, int64_t batch, int64_t heads, int64_t rows, int64_t dim, int how,
                    int32_t dtype)
{
    any_tensor t = {.dtype = dtype, .count = {batch, heads, rows}, .dim = dim};
    const int64_t step = any_step(dtype);
    set_strides(t.stride, heads, rows, dim, step == 1 ? 3 : step, how);
    t.extent = extent_of(t.count, t.stride, dim);
    t.data = guarded_bytes(slot, any_bytes(&t), PLACE_AT_END);
    t.desc = describe(t.data, t.stride, dtype);
    return t;
}

void any_make_scales(any_tensor *t, int slot, int how)
{
    set_strides(t->scale_stride, t->count[1], t->count[2], 1, 2, how);
    t->scales = guarded(slot, extent_of(t->count, t->scale_stride, 1), PLACE_AT_END);
    t->scale_desc = describe(t->scales, t->scale_stride, QKV_F32);
}

int64_t any_rows(const any_tensor *t, int64_t b)
{
    return t->lens ? t->lens[b] : t->count[2];
}

/* From sequence and row to batch entry and row of the memory. */
static void find(const any_tensor *t, int64_t *b, int64_t *i)
{
    if (t->pages) {
        *b = t->pages[*b * t->table_stride + *i / t->page_size];
        *i %= t->page_size;
    } else if (t->starts) {
        *i += t->starts[*b];
        *b = 0;
    }
}

void *any_row(const any_tensor *t, int64_t b, int64_t h, int64_t i)
{
    find(t, &b, &i);
    return t->data + bytes_of(t->dtype, b * t->stride[0] + h * t->stride[1] + i * t->stride[2]);
}

static float *scale_at(const any_tensor *t, int64_t b, int64_t h, int64_t i)
{
    find(t, &b, &i);
    return t->scales ? t->scales + b * t->scale_stride[0] + h * t->scale_stride[1] +
                           i * t->scale_stride[2]
                     : NULL;
}

double any_get(const any_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d)
{
    const void *row = any_row(t, b, h, i);
    float x;
    if (t->dtype != QKV_F32)
        return oracle_kv_element(format_of(t->dtype), row, d,
                                 t->scales ? *scale_at(t, b, h, i) : 0.0f);
    memcpy(&x, (const float *)row + d, sizeof x);
    return (double)x;
}

static void set_row(const any_tensor *t, int64_t b, int64_t h, int64_t i, const float *x)
{
    void *row = any_row(t, b, h, i);
    if (t->dtype == QKV_F32)
        memcpy(row, x, (size_t)t->dim * sizeof *x);
    else
        oracle_kv_encode(format_of(t->dtype), x, t->dim, row, scale_at(t, b, h, i));
}

void any_fill(const any_tensor *t, rng *r)
{
    float *x = malloc((size_t)(t->dim + 1) * sizeof *x);
    each_row(t, b, h, i)
    {
        for (int64_t d = 0; d < t->dim; d++)
            x[d] = rng_normal(r);
        set_row(t, b, h, i, x);
    }
    free(x);
}

void any_put_nan(const any_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d)
{
    float *x = malloc((size_t)(t->dim + 1) * sizeof *x);
    for (int64_t e = 0; e < t->dim; e++)
        x[e] = (float)any_get(t, b, h, i, e);
    x[d] = NAN;
    set_row(t, b, h, i, x);
    free(x);
}

static void fill_16(void *row, int64_t stride, int64_t n, unsigned bits)
{
    unsigned char *p = row;
    for (int64_t i = 0; i < n; i++, p += stride) {
        p[0] = (unsigned char)bits;
        p[1] = (unsigned char)(bits >> 8);
    }
}

/* All ones are a NaN in every format that can hold one. */
void any_poison_row(const any_tensor *t, int64_t b, int64_t h, int64_t i, bool infinite)
{
    void *row = any_row(t, b, h, i);
    const float infinity = i % 2 ? INFINITY : -INFINITY;
    memset(row, 0xff, (size_t)bytes_of(t->dtype, t->dim));
    if (t->scales)
        *scale_at(t, b, h, i) = infinite ? infinity : NAN;
    if (!infinite)
        return;
    switch (t->dtype) {
    case QKV_F32:
        for (int64_t d = 0; d < t->dim; d++)
            memcpy((float *)row + d, &infinity, sizeof infinity);
        break;
    case QKV_F16:
        fill_16(row, 2, t->dim, i % 2 ? 0x7c00 : 0xfc00);
        break;
    case QKV_BF16:
        fill_16(row, 2, t->dim, i % 2 ? 0x7f80 : 0xff80);
        break;
    case QKV_F8_E5M2:
        memset(row, i % 2 ? 0x7c : 0xfc, (size_t)t->dim);
        break;
    case QKV_Q8_0: /* the integers are -1, those of q4_0 15 - 8 */
        fill_16(row, 34, t->dim / 32, 0x7c00);
        break;
    case QKV_Q4_0:
        fill_16(row, 18, t->dim / 32, 0x7c00);
        break;
    default: /* e4m3 has no infinity */
        break;
    }
}

void any_copy_row(const any_tensor *t, int64_t h, int64_t i, int64_t from, int64_t to)
{
    void *row = any_row(t, to, h, i), *source = any_row(t, from, h, i);
    if (row == source)
        return;
    memcpy(row, source, (size_t)bytes_of(t->dtype, t->dim));
    if (t->scales)
        *scale_at(t, to, h, i) = *scale_at(t, from, h, i);
}

double *any_doubles(const any_tensor *t, int slot)
{
    const int64_t *n = t->count;
    double *all = doubles(slot, n[0] * n[1] * n[2] * t->dim);
    each_row(t, b, h, i) for (int64_t d = 0; d < t->dim; d++)
        all[((b * n[1] + h) * n[2] + i) * t->dim + d] = any_get(t, b, h, i, d);
    return all;
}
