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

#define KV_BLOCK_SHIFT 5
_Static_assert(1 << KV_BLOCK_SHIFT == QKV_KV_BLOCK, "the shift of a block");

const qkv_dtype_block qkv_dtype_blocks[] = {
    [QKV_F32] = {0, 0, 4, 4},
    [QKV_F16] = {0, 0, 2, 2},
    [QKV_BF16] = {0, 0, 2, 2},
    [QKV_Q8_0] = {KV_BLOCK_SHIFT, QKV_KV_BLOCK - 1, QKV_Q8_0_BYTES, 1},
    [QKV_I8] = {0, 0, 1, 1},
    [QKV_F8_E4M3] = {0, 0, 1, 1},
    [QKV_F8_E5M2] = {0, 0, 1, 1},
    [QKV_Q4_0] = {KV_BLOCK_SHIFT, QKV_KV_BLOCK - 1, QKV_Q4_0_BYTES, 1},
    [QKV_BOOL] = {0, 0, 1, 1},
    [QKV_BIT] = {0, 0, 1, 1}, /* never counted so */
};

int64_t qkv_element_size(int32_t dtype)
{
    return qkv_dtype_blocks[dtype].bytes;
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

/* A stride along an axis of size 1 is 0, whatever was given. */
static void drop_single_strides(qkv_view *v)
{
    for (int axis = 0; axis < QKV_AXES; axis++)
        v->stride[axis] = v->count[axis] == 1 ? 0 : v->stride[axis];
}

/* Elements from a view's first one to past its last; its strides are those of
 * [batch][head][row][element] without gaps. False if it overflows. */
static bool pack(qkv_view *v, int64_t *span)
{
    int64_t head, batch;
    if (!qkv_mul(v->count[QKV_AXIS_ROW], v->dim, &head) ||
        !qkv_mul(v->count[QKV_AXIS_HEAD], head, &batch) ||
        !qkv_mul(v->count[QKV_AXIS_BATCH], batch, span))
        return false;
    v->stride[QKV_AXIS_ROW] = v->dim;
    v->stride[QKV_AXIS_HEAD] = head;
    v->stride[QKV_AXIS_BATCH] = batch;
    drop_single_strides(v);
    return true;
}

/* The same for the strides that were given. */
static qkv_status check_strides(qkv_view *v, int64_t mask, int64_t *span)
{
    drop_single_strides(v);
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (v->stride[axis] & mask)
            return QKV_E_STRIDE;
    return view_span(v, span) ? QKV_OK : QKV_E_OVERFLOW;
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

/* Where the elements of a view lie: from its first on for 'span' of them. */
static qkv_status check_place(qkv_view *v, qkv_dtype_block block, int64_t span)
{
    int64_t most;
    if (!qkv_mul(span, block.bytes, &most) || most > PTRDIFF_MAX)
        return QKV_E_OVERFLOW;
    if (!v->data)
        return QKV_E_NULL;
    const uintptr_t address = (uintptr_t)v->data;
    if (address & (uintptr_t)(block.align - 1))
        return QKV_E_ALIGN;
    v->bytes = (span >> block.shift) * block.bytes;
    return (uintptr_t)v->bytes > UINTPTR_MAX - address ? QKV_E_OVERFLOW : QKV_OK;
}

/* A view with given strides: everything but dtype and flags, which a plain
 * matrix does not have. */
static qkv_status check_strided(qkv_view *v, qkv_access access)
{
    const qkv_dtype_block block = qkv_dtype_blocks[v->dtype];
    int64_t span;
    for (int axis = 0; axis < QKV_AXES; axis++)
        if (v->stride[axis] < 0)
            return QKV_E_STRIDE;
    if (qkv_view_empty(v))
        return QKV_OK;
    qkv_status status = check_strides(v, block.mask, &span);
    if (!status)
        status = check_place(v, block, span);
    if (!status && (access == QKV_OUTPUT || access == QKV_CACHE_OUTPUT) && !rows_are_apart(v))
        status = QKV_E_STRIDE;
    return status;
}

static qkv_status view_any(const qkv_tensor *t, const qkv_rows *rows, int64_t dim,
                           qkv_access access, qkv_view *view)
{
    if (t->dtype < QKV_F32 || t->dtype > QKV_Q4_0)
        return QKV_E_DTYPE;
    if (t->dtype > QKV_BF16 && access != QKV_CACHE && access != QKV_CACHE_OUTPUT)
        return QKV_E_UNSUPPORTED;
    const qkv_dtype_block block = qkv_dtype_blocks[t->dtype];
    if (dim & block.mask)
        return QKV_E_SHAPE;
    if (t->flags & ~QKV_TENSOR_STRIDED)
        return QKV_E_FLAGS;

    *view = (qkv_view){.data = t->data,
                       .dtype = t->dtype,
                       .count = {rows->batch, rows->heads, rows->rows},
                       .stride = {t->stride_batch, t->stride_head, t->stride_row},
                       .dim = dim};
    if (t->flags || t->stride_batch != 0 || t->stride_head != 0 || t->stride_row != 0)
        return check_strided(view, access);
    /* Packed: rows are apart, and made of whole blocks. */
    int64_t span;
    if (!pack(view, &span))
        return qkv_view_empty(view) ? QKV_OK : QKV_E_OVERFLOW;
    return span == 0 ? QKV_OK : check_place(view, block, span);
}

/*
 * Nothing can be wrong with a packed tensor of a small size at an aligned address,
 * and that is all that many calls have: it takes half as long as to look for what
 * might be.
 */
qkv_status qkv_view_tensor(const qkv_tensor *t, const qkv_rows *rows, int64_t dim,
                           qkv_access access, qkv_view *view)
{
    enum { SMALL = 1 << 14 }; /* four of them make fewer than 2^56 elements */
    const uintptr_t address = (uintptr_t)t->data;
    const int64_t given = t->stride_batch | t->stride_head | t->stride_row | t->flags;
    const int64_t sizes = rows->batch | rows->heads | rows->rows | dim;
    if (given != 0 || (uint64_t)sizes >= SMALL || t->dtype < QKV_F32 || t->dtype > QKV_BF16 ||
        address % sizeof(float) != 0 || address - 1 > UINTPTR_MAX / 2)
        return view_any(t, rows, dim, access, view);
    const int64_t head = rows->rows * dim, batch = rows->heads * head;
    view->data = t->data;
    view->dtype = t->dtype;
    view->count[QKV_AXIS_BATCH] = rows->batch;
    view->count[QKV_AXIS_HEAD] = rows->heads;
    view->count[QKV_AXIS_ROW] = rows->rows;
    view->stride[QKV_AXIS_BATCH] = rows->batch > 1 ? batch : 0;
    view->stride[QKV_AXIS_HEAD] = rows->heads > 1 ? head : 0;
    view->stride[QKV_AXIS_ROW] = rows->rows > 1 ? dim : 0;
    view->dim = dim;
    view->bytes = qkv_bytes(t->dtype, rows->batch * batch);
    return QKV_OK;
}

qkv_status qkv_view_matrix(const float *data, int64_t stride, int64_t rows, int64_t dim,
                           qkv_access access, qkv_view *view)
{
    *view = (qkv_view){.data = (void *)(uintptr_t)data,
                       .count = {1, 1, rows},
                       .stride = {0, 0, stride},
                       .dim = dim};
    return check_strided(view, access);
}

bool qkv_array_fits(const void *data, int64_t n, size_t element)
{
    return !data || ((uint64_t)n <= PTRDIFF_MAX / element &&
                     (uint64_t)n * element <= UINTPTR_MAX - (uintptr_t)data);
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
    if (!qkv_mul(batch, *table_stride, &entries) || !qkv_array_fits(table, entries, sizeof *table))
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
    if (need > PTRDIFF_MAX) /* no memory is larger */
        need = PTRDIFF_MAX;

    qkv_view area;
    area.data = (void *)(uintptr_t)scratch;
    area.bytes = (int64_t)need;
    for (size_t i = 0; i < n_views; i++) {
        if (!qkv_spans_meet(&area, views[i]))
            continue;
        area = qkv_view_bytes(scratch, (int64_t)need, 1);
        if (qkv_views_overlap(&area, views[i]))
            return QKV_E_OVERLAP;
    }
    return QKV_OK;
}

static bool is_one_of(size_t size, const size_t *sizes)
{
    for (; sizes && *sizes != 0; sizes++)
        if (size == *sizes)
            return true;
    return false;
}

qkv_status qkv_copy_desc(void *copy, size_t known, const size_t *older, const void *desc)
{
    if (!desc)
        return QKV_E_NULL;
    size_t size;
    memcpy(&size, desc, sizeof size);
    if (size > 65536 || size % sizeof(int64_t) != 0 || (size < known && !is_one_of(size, older)))
        return QKV_E_SIZE;

    memset(copy, 0, known);
    memcpy(copy, desc, size < known ? size : known);
    const unsigned char *bytes = desc;
    for (size_t i = known; i < size; i++)
        if (bytes[i] != 0)
            return QKV_E_SIZE;
    return QKV_OK;
}
