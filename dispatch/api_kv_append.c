/* SPDX-License-Identifier: MIT */
/* Filling a key/value cache: what is checked before the first row is written. */
#include "../kernels/drivers/append.h"

/* The plain numbers; fills in the defaults. */
static qkv_status check_sizes(qkv_kv_append_desc *d)
{
    if (d->flags & ~QKV_ROTARY_NEIGHBOURS || d->reserved != 0)
        return QKV_E_FLAGS;
    if (d->batch == 0)
        d->batch = 1;
    if (d->kv_heads == 0)
        d->kv_heads = 1;
    if (d->value_dim == 0)
        d->value_dim = d->head_dim;
    if (d->batch < 0 || d->kv_heads < 0 || d->new_len < 0 || d->kv_len < 0 || d->head_dim < 1 ||
        d->value_dim < 1)
        return QKV_E_SHAPE;
    if (!qkv_aligned(d->new_starts, sizeof *d->new_starts) ||
        !qkv_aligned(d->positions, sizeof *d->positions) ||
        !qkv_aligned(d->page_table, sizeof *d->page_table) ||
        !qkv_aligned(d->cosines, sizeof *d->cosines) || !qkv_aligned(d->sines, sizeof *d->sines))
        return QKV_E_ALIGN;
    if ((uint64_t)d->batch > PTRDIFF_MAX / sizeof(int64_t) - 1 ||
        !qkv_array_fits(d->new_starts, d->batch + 1, sizeof *d->new_starts) ||
        !qkv_array_fits(d->positions, d->batch, sizeof *d->positions))
        return QKV_E_OVERFLOW;
    return d->new_len > 0 && !d->new_key.data && !d->new_value.data ? QKV_E_NULL : QKV_OK;
}

static qkv_status check_rotary(qkv_kv_append_desc *d, qkv_append_problem *p)
{
    if (d->rotary_dim == 0)
        return d->rotary_len != 0 || d->rotary_stride != 0 || d->cosines || d->sines ? QKV_E_SHAPE
                                                                                     : QKV_OK;
    if (d->rotary_dim < 0 || d->rotary_dim % 2 != 0 || d->rotary_dim > d->head_dim ||
        d->rotary_len < 0)
        return QKV_E_SHAPE;
    const int64_t pairs = d->rotary_dim / 2;
    if (d->rotary_stride == 0)
        d->rotary_stride = pairs;
    if (d->rotary_stride < pairs)
        return QKV_E_STRIDE;
    if (!d->cosines || !d->sines)
        return QKV_E_NULL;
    int64_t elements;
    if (!qkv_mul(d->rotary_len, d->rotary_stride, &elements) ||
        !qkv_array_fits(d->cosines, elements, sizeof *d->cosines) ||
        !qkv_array_fits(d->sines, elements, sizeof *d->sines))
        return QKV_E_OVERFLOW;
    p->key.rotary_pairs = pairs;
    p->rotary_stride = d->rotary_stride;
    p->cosines = d->cosines;
    p->sines = d->sines;
    return QKV_OK;
}

/* The pages of rows first .. first + count - 1 of sequence b. */
static qkv_status check_pages(const qkv_kv_append_desc *d, int64_t b, int64_t first, int64_t count)
{
    if (d->page_size == 0 || count == 0)
        return QKV_OK;
    const int32_t *pages = d->page_table + b * d->page_table_stride;
    const int64_t last = (first + count - 1) / d->page_size;
    if (last >= d->page_table_stride)
        return QKV_E_SHAPE;
    for (int64_t i = first / d->page_size; i <= last; i++)
        if (pages[i] < 0 || pages[i] >= d->pages)
            return QKV_E_INDEX;
    return QKV_OK;
}

/* Where each sequence's rows are and where they go. */
static qkv_status check_rows(const qkv_kv_append_desc *d)
{
    const int64_t *starts = d->new_starts;
    if (d->new_len == 0 && !starts && !d->positions)
        return QKV_OK; /* any number of sequences without rows */
    for (int64_t b = 0; b < d->batch; b++) {
        if (starts && (starts[b] < 0 || starts[b] > starts[b + 1] || starts[b + 1] > d->new_len))
            return QKV_E_SHAPE;
        const int64_t count = starts ? starts[b + 1] - starts[b] : d->new_len;
        const int64_t first = d->positions ? d->positions[b] : 0;
        int64_t end;
        if (first < 0 || !qkv_add(first, count, &end) || end > d->kv_len)
            return QKV_E_SHAPE;
        if (d->rotary_dim != 0 && d->new_key.data && end > d->rotary_len)
            return QKV_E_SHAPE;
        const qkv_status status = check_pages(d, b, first, count);
        if (status)
            return status;
    }
    return QKV_OK;
}

/* Keys or values: their new rows, their cache and its scales. */
static qkv_status check_side(const qkv_kv_append_desc *d, const qkv_tensor *from,
                             const qkv_tensor *to, const qkv_tensor *scale, int64_t dim,
                             qkv_append_side *side)
{
    const qkv_rows new_rows = {d->new_starts ? 1 : d->batch, d->kv_heads, d->new_len};
    const qkv_rows cache_rows = {d->page_size ? d->pages : d->batch, d->kv_heads,
                                 d->page_size ? d->page_size : d->kv_len};
    if (!from->data)
        return QKV_OK;

    qkv_status status = qkv_view_tensor(from, &new_rows, dim, QKV_INPUT, &side->from);
    if (!status)
        status = qkv_view_tensor(to, &cache_rows, dim, QKV_CACHE_OUTPUT, &side->to);
    if (status)
        return status;
    if ((from->dtype != QKV_F32 || side->rotary_pairs) && dim > QKV_APPEND_DIM_MAX)
        return QKV_E_UNSUPPORTED;
    if (to->dtype != QKV_I8)
        return scale->data ? QKV_E_FLAGS : QKV_OK;
    if (scale->dtype != QKV_F32)
        return QKV_E_DTYPE;
    return qkv_view_tensor(scale, &cache_rows, 1, QKV_OUTPUT, &side->scale);
}

enum { OUTPUTS = 4, INPUTS = 7 };

/* The cache overlaps nothing. */
static qkv_status check_overlap(const qkv_kv_append_desc *d, const qkv_append_problem *p)
{
    const int64_t angles = p->key.rotary_pairs && d->rotary_len
                               ? (d->rotary_len - 1) * p->rotary_stride + p->key.rotary_pairs
                               : 0;
    const qkv_view outputs[OUTPUTS] = {p->key.to, p->value.to, p->key.scale, p->value.scale};
    const qkv_view inputs[INPUTS] = {
        p->key.from,
        p->value.from,
        qkv_view_bytes(d->new_starts, d->batch + 1, sizeof *d->new_starts),
        qkv_view_bytes(d->positions, d->batch, sizeof *d->positions),
        qkv_view_bytes(d->page_table, d->batch * d->page_table_stride, sizeof *d->page_table),
        qkv_view_bytes(d->cosines, angles, sizeof *d->cosines),
        qkv_view_bytes(d->sines, angles, sizeof *d->sines),
    };
    for (int o = 0; o < OUTPUTS; o++) {
        for (int i = 0; i < INPUTS; i++)
            if (qkv_views_overlap(&outputs[o], &inputs[i]))
                return QKV_E_OVERLAP;
        for (int other = 0; other < o; other++)
            if (qkv_views_overlap(&outputs[o], &outputs[other]))
                return QKV_E_OVERLAP;
    }
    return QKV_OK;
}

static qkv_status check_append(qkv_kv_append_desc *d, qkv_append_problem *p)
{
    qkv_status status = check_sizes(d);
    if (!status)
        status = check_rotary(d, p);
    if (!status)
        status = qkv_check_page_sizes(d->page_size, d->pages, d->batch, d->kv_len, d->page_table,
                                      &d->page_table_stride);
    if (!status)
        status = check_side(d, &d->new_key, &d->key, &d->key_scale, d->head_dim, &p->key);
    if (!status)
        status = check_side(d, &d->new_value, &d->value, &d->value_scale, d->value_dim, &p->value);
    if (!status)
        status = check_rows(d);
    if (!status)
        status = check_overlap(d, p);
    p->batch = d->batch;
    p->heads = d->kv_heads;
    p->new_len = d->new_len;
    p->new_starts = d->new_starts;
    p->positions = d->positions;
    p->page_table = d->page_size ? d->page_table : NULL;
    p->page_table_stride = d->page_table_stride;
    p->page_size = d->page_size;
    p->neighbours = (d->flags & QKV_ROTARY_NEIGHBOURS) != 0;
    return status;
}

qkv_status qkv_kv_append(const qkv_kv_append_desc *desc)
{
    qkv_kv_append_desc d;
    qkv_append_problem p = {.batch = 0};
    qkv_status status = qkv_copy_desc(&d, sizeof d, NULL, desc);
    if (!status)
        status = check_append(&d, &p);
    if (!status && d.new_len > 0)
        qkv_run_append(&p, qkv_kernels_active());
    return status;
}
