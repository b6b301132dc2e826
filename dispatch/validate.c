/* SPDX-License-Identifier: MIT */
#include "validate.h"

#include <string.h>

bool qkv_add(int64_t a, int64_t b, int64_t *result)
{
    if (a > INT64_MAX - b)
        return false;
    *result = a + b;
    return true;
}

bool qkv_mul(int64_t a, int64_t b, int64_t *result)
{
#if defined(__GNUC__) /* a division for every size would be a good part of a short call */
    return !__builtin_mul_overflow(a, b, result);
#else
    if (a != 0 && b > INT64_MAX / a)
        return false;
    *result = a * b;
    return true;
#endif
}

bool qkv_view_empty(const qkv_view *v)
{
    return v->dim == 0 || v->count[0] == 0 || v->count[1] == 0 || v->count[2] == 0;
}

/* Elements that are stored together, the bytes they take, and the alignment. */
typedef struct dtype_block {
    int64_t elements, bytes, align;
} dtype_block;

static dtype_block block_of(int32_t dtype)
{
    switch (dtype) {
    case QKV_F32:
        return (dtype_block){1, 4, 4};
    case QKV_F16:
    case QKV_BF16:
        return (dtype_block){1, 2, 2};
    case QKV_Q8_0:
        return (dtype_block){QKV_KV_BLOCK, QKV_Q8_0_BYTES, 1};
    case QKV_Q4_0:
        return (dtype_block){QKV_KV_BLOCK, QKV_Q4_0_BYTES, 1};
    default: /* QKV_I8, QKV_F8_E4M3, QKV_F8_E5M2, QKV_BOOL */
        return (dtype_block){1, 1, 1};
    }
}

int64_t qkv_bytes(int32_t dtype, int64_t n)
{
    switch (dtype) { /* the common types first: this is on the way to every row */
    case QKV_F32:
        return n * 4;
    case QKV_F16:
    case QKV_BF16:
        return n * 2;
    default:
        return n / block_of(dtype).elements * block_of(dtype).bytes;
    }
}

int64_t qkv_element_size(int32_t dtype)
{
    return block_of(dtype).bytes;
}

void *qkv_view_row(const qkv_view *v, int64_t batch, int64_t head, int64_t row)
{
    const int64_t element = batch * v->stride[QKV_AXIS_BATCH] + head * v->stride[QKV_AXIS_HEAD] +
                            row * v->stride[QKV_AXIS_ROW];
    return (char *)v->data + qkv_bytes(v->dtype, element);
}

/* Elements from the first to one past the last; false if it overflows. */
static bool view_span(const qkv_view *v, int64_t *span)
{
    *span = v->dim;
    for (int axis = 0; axis < QKV_AXES; axis++) {
        int64_t reach;
        if (!qkv_mul(v->count[axis] - 1, v->stride[axis], &reach) || !qkv_add(*span, reach, span))
            return false;
    }
    return true;
}

/* The strides of [batch][head][row][element] without gaps. */
static bool packed_strides(qkv_view *v)
{
    int64_t *s = v->stride;
    s[QKV_AXIS_ROW] = v->dim;
    return qkv_mul(v->count[QKV_AXIS_ROW], s[QKV_AXIS_ROW], &s[QKV_AXIS_HEAD]) &&
           qkv_mul(v->count[QKV_AXIS_HEAD], s[QKV_AXIS_HEAD], &s[QKV_AXIS_BATCH]);
}

/*
 * Are all rows of an output apart? From the smallest stride up, each must
 * reach beyond all that the smaller ones cover. (Sufficient, and necessary
 * for every layout that is not a puzzle.)
 */
static bool rows_are_apart(const qkv_view *v)
{
    bool done[QKV_AXES] = {false};
    int64_t extent = v->dim;
    for (int pass = 0; pass < QKV_AXES; pass++) {
        int next = -1;
        for (int axis = 0; axis < QKV_AXES; axis++)
            if (!done[axis] && (next < 0 || v->stride[axis] < v->stride[next]))
                next = axis;
        done[next] = true;
        if (v->count[next] == 1)
            continue;
        if (v->stride[next] < extent)
            return false;
        extent += (v->count[next] - 1) * v->stride[next];
    }
    return true;
}

/* Everything but dtype and flags, which a plain matrix does not have. */
static qkv_status check_view(qkv_view *v, bool packed, qkv_access access)
{
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (v->stride[axis] < 0)
            return QKV_E_STRIDE;
    if (qkv_view_empty(v))
        return QKV_OK;

    if (packed && !packed_strides(v))
        return QKV_E_OVERFLOW;
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (v->count[axis] == 1)
            v->stride[axis] = 0;

    const dtype_block block = block_of(v->dtype);
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (v->stride[axis] & (block.elements - 1)) /* a power of two */
            return QKV_E_STRIDE;
    int64_t span, most;
    if (!view_span(v, &span) || !qkv_mul(span, block.bytes, &most) || most > PTRDIFF_MAX)
        return QKV_E_OVERFLOW;
    if (!v->data)
        return QKV_E_NULL;
    const uintptr_t address = (uintptr_t)v->data;
    if (address & (uintptr_t)(block.align - 1))
        return QKV_E_ALIGN;
    v->bytes = qkv_bytes(v->dtype, span);
    if ((uintptr_t)v->bytes > UINTPTR_MAX - address)
        return QKV_E_OVERFLOW;
    if ((access == QKV_OUTPUT || access == QKV_CACHE_OUTPUT) && !rows_are_apart(v))
        return QKV_E_STRIDE;
    return QKV_OK;
}

qkv_status qkv_view_tensor(const qkv_tensor *t, int64_t batch, int64_t heads, int64_t rows,
                           int64_t dim, qkv_access access, qkv_view *view)
{
    if (t->dtype < QKV_F32 || t->dtype > QKV_Q4_0)
        return QKV_E_DTYPE;
    if (t->dtype > QKV_BF16 && access != QKV_CACHE && access != QKV_CACHE_OUTPUT)
        return QKV_E_UNSUPPORTED;
    if (dim % block_of(t->dtype).elements != 0)
        return QKV_E_SHAPE;
    if (t->flags & ~QKV_TENSOR_STRIDED)
        return QKV_E_FLAGS;

    *view = (qkv_view){.data = t->data,
                       .dtype = t->dtype,
                       .count = {batch, heads, rows},
                       .stride = {t->stride_batch, t->stride_head, t->stride_row},
                       .dim = dim};
    const bool packed = !(t->flags & QKV_TENSOR_STRIDED) && t->stride_batch == 0 &&
                        t->stride_head == 0 && t->stride_row == 0;
    return check_view(view, packed, access);
}

qkv_status qkv_view_matrix(const float *data, int64_t stride, int64_t rows, int64_t dim,
                           qkv_access access, qkv_view *view)
{
    *view = (qkv_view){.data = (void *)(uintptr_t)data,
                       .count = {1, 1, rows},
                       .stride = {0, 0, stride},
                       .dim = dim};
    return check_view(view, false, access);
}

bool qkv_aligned(const void *data, size_t element)
{
    return (uintptr_t)data % element == 0;
}

qkv_view qkv_view_bytes(const void *data, int64_t count, size_t size)
{
    return (qkv_view){.data = (void *)(uintptr_t)data,
                      .dtype = QKV_BOOL,
                      .count = {1, 1, 1},
                      .dim = data ? count * (int64_t)size : 0,
                      .bytes = data ? count * (int64_t)size : 0};
}

static bool mask_dtype(int32_t dtype)
{
    return dtype == QKV_F32 || dtype == QKV_F16 || dtype == QKV_BF16 || dtype == QKV_BOOL ||
           dtype == QKV_BIT;
}

/* Elements, or bits, from the first to one past the last; false on overflow. */
static bool mask_span(const qkv_mask_view *v, const int64_t count[QKV_AXES], int64_t keys,
                      int64_t *span)
{
    int64_t reach;
    if (!qkv_mul(keys - 1, v->stride_key, &reach) || !qkv_add(1, reach, span))
        return false;
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (!qkv_mul(count[axis] - 1, v->stride[axis], &reach) || !qkv_add(*span, reach, span))
            return false;
    return true;
}

/* The strides of [batch][head][row][key] without gaps. */
static bool packed_mask(qkv_mask_view *v, const int64_t count[QKV_AXES], int64_t keys)
{
    int64_t *s = v->stride;
    v->stride_key = 1;
    s[QKV_AXIS_ROW] = keys;
    return qkv_mul(count[QKV_AXIS_ROW], s[QKV_AXIS_ROW], &s[QKV_AXIS_HEAD]) &&
           qkv_mul(count[QKV_AXIS_HEAD], s[QKV_AXIS_HEAD], &s[QKV_AXIS_BATCH]);
}

static qkv_status measure_mask(qkv_mask_view *v, const int64_t count[QKV_AXES], int64_t keys)
{
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (count[axis] == 1)
            v->stride[axis] = 0;
    int64_t span;
    if (!mask_span(v, count, keys, &span))
        return QKV_E_OVERFLOW;
    if (v->dtype == QKV_BIT) {
        v->bytes = (span - 1) / 8 + 1;
    } else {
        const int64_t element = qkv_element_size(v->dtype);
        if (!qkv_aligned(v->data, (size_t)element))
            return QKV_E_ALIGN;
        if (!qkv_mul(span, element, &v->bytes))
            return QKV_E_OVERFLOW;
    }
    if ((uint64_t)v->bytes > PTRDIFF_MAX || (uintptr_t)v->bytes > UINTPTR_MAX - (uintptr_t)v->data)
        return QKV_E_OVERFLOW;
    return QKV_OK;
}

qkv_status qkv_view_mask(const qkv_mask *m, int64_t batch, int64_t heads, int64_t rows,
                         int64_t keys, qkv_mask_view *view)
{
    const int64_t count[QKV_AXES] = {batch, heads, rows};
    *view = (qkv_mask_view){.data = m->data,
                            .dtype = m->dtype,
                            .stride = {m->stride_batch, m->stride_head, m->stride_query},
                            .stride_key = m->stride_key};
    if (!mask_dtype(m->dtype))
        return QKV_E_DTYPE;
    if (m->flags & ~QKV_TENSOR_STRIDED)
        return QKV_E_FLAGS;
    if (m->stride_batch < 0 || m->stride_head < 0 || m->stride_query < 0 || m->stride_key < 0)
        return QKV_E_STRIDE;
    if (!m->data || batch == 0 || heads == 0 || rows == 0 || keys == 0) {
        view->data = NULL; /* not there, or about nothing */
        return QKV_OK;
    }

    const bool packed = !(m->flags & QKV_TENSOR_STRIDED) && m->stride_batch == 0 &&
                        m->stride_head == 0 && m->stride_query == 0 && m->stride_key == 0;
    if (packed && !packed_mask(view, count, keys))
        return QKV_E_OVERFLOW;
    return measure_mask(view, count, keys);
}

qkv_status qkv_check_page_sizes(int64_t page_size, int64_t pages, int64_t batch, int64_t kv_len,
                                const int32_t *table, int64_t *table_stride)
{
    if (page_size == 0)
        return pages != 0 || *table_stride != 0 || table ? QKV_E_SHAPE : QKV_OK;
    if (page_size < 8 || page_size > 256 || (page_size & (page_size - 1)) != 0 || pages < 0)
        return QKV_E_SHAPE;
    if (*table_stride < 0)
        return QKV_E_STRIDE;
    if (!table)
        return QKV_E_NULL;
    if (!qkv_aligned(table, sizeof *table))
        return QKV_E_ALIGN;
    if (*table_stride == 0)
        *table_stride = kv_len / page_size + (kv_len % page_size != 0);
    int64_t entries;
    if (!qkv_mul(batch, *table_stride, &entries) || entries > PTRDIFF_MAX / (int64_t)sizeof *table)
        return QKV_E_OVERFLOW;
    return QKV_OK;
}

bool qkv_views_same(const qkv_view *a, const qkv_view *b)
{
    return a->data == b->data && a->dtype == b->dtype && a->dim == b->dim &&
           memcmp(a->count, b->count, sizeof a->count) == 0 &&
           memcmp(a->stride, b->stride, sizeof a->stride) == 0;
}

/*
 * Bytes that a view covers within one period: the axes whose stride is a
 * multiple of the period only repeat it. -1 if they reach beyond a period.
 */
static int64_t extent_within(const qkv_view *v, int64_t period)
{
    int64_t extent = qkv_bytes(v->dtype, v->dim);
    for (int axis = 0; axis < QKV_AXES; axis++) {
        const int64_t stride = qkv_bytes(v->dtype, v->stride[axis]);
        if (stride % period != 0)
            extent += (v->count[axis] - 1) * stride;
    }
    return extent <= period ? extent : -1;
}

/* Do the two keep to separate parts of a period of bytes that both repeat? */
static bool apart_within(const qkv_view *a, const qkv_view *b, int64_t period)
{
    const int64_t extent_a = extent_within(a, period);
    const int64_t extent_b = extent_within(b, period);
    if (extent_a < 0 || extent_b < 0)
        return false;
    int64_t distance = (int64_t)((uintptr_t)b->data - (uintptr_t)a->data) % period;
    if (distance < 0)
        distance += period;
    return distance >= extent_a && distance + extent_b <= period;
}

bool qkv_views_overlap(const qkv_view *a, const qkv_view *b)
{
    const uintptr_t begin_a = (uintptr_t)a->data, begin_b = (uintptr_t)b->data;
    if (a->bytes == 0 || b->bytes == 0 || begin_a + (uintptr_t)a->bytes <= begin_b ||
        begin_b + (uintptr_t)b->bytes <= begin_a)
        return false;

    for (int axis = 0; axis < QKV_AXES; axis++) {
        if (a->stride[axis] > 0 && apart_within(a, b, qkv_bytes(a->dtype, a->stride[axis])))
            return false;
        if (b->stride[axis] > 0 && apart_within(a, b, qkv_bytes(b->dtype, b->stride[axis])))
            return false;
    }
    return true;
}

qkv_status qkv_check_scratch(const void *scratch, size_t size, size_t need,
                             const qkv_view *const *views, size_t n_views)
{
    if (need == 0)
        return QKV_OK;
    if (!scratch || size < need || (uintptr_t)scratch % QKV_SCRATCH_ALIGN != 0)
        return QKV_E_SCRATCH;

    const qkv_view area = {.data = (void *)(uintptr_t)scratch,
                           .count = {1, 1, 1},
                           .dim = (int64_t)(need / sizeof(float)),
                           .bytes = (int64_t)need};
    for (size_t i = 0; i < n_views; i++)
        if (qkv_views_overlap(&area, views[i]))
            return QKV_E_OVERLAP;
    return QKV_OK;
}

qkv_status qkv_copy_desc(void *copy, size_t known, size_t oldest, const void *desc)
{
    if (!desc)
        return QKV_E_NULL;
    size_t size;
    memcpy(&size, desc, sizeof size);
    if (size < oldest || size > 65536)
        return QKV_E_SIZE;

    memset(copy, 0, known);
    memcpy(copy, desc, size < known ? size : known);
    const unsigned char *bytes = desc;
    for (size_t i = known; i < size; i++)
        if (bytes[i] != 0)
            return QKV_E_SIZE;
    return QKV_OK;
}
