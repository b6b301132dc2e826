/* SPDX-License-Identifier: MIT */
/*
 * The checks that every public function makes before it writes anything.
 * After them, sizes, strides and addresses are known to be consistent and
 * index arithmetic in int64_t cannot overflow.
 */
#ifndef QKV_VALIDATE_H
#define QKV_VALIDATE_H

#include "internal.h"

enum { QKV_AXIS_BATCH, QKV_AXIS_HEAD, QKV_AXIS_ROW, QKV_AXES };

/*
 * A tensor after validation: its rows, with defaults filled in. A view
 * without elements has data NULL or not; nothing of it is ever touched.
 */
typedef struct qkv_view {
    void *data;
    int32_t dtype; /* QKV_F32, QKV_F16 or QKV_BF16; keys and values also others */
    int64_t count[QKV_AXES];
    int64_t stride[QKV_AXES]; /* 0 along an axis of size 1 */
    int64_t dim;              /* elements of a row */
    int64_t bytes;            /* from the first byte to one past the last; 0: no elements */
} qkv_view;

/* A mask after validation; what a stride counts is bits for QKV_BIT. */
typedef struct qkv_mask_view {
    const void *data; /* NULL: no mask */
    int32_t dtype;
    int64_t stride[QKV_AXES]; /* 0 along an axis of size 1 */
    int64_t stride_key;
    int64_t bytes; /* from the first byte to one past the last */
} qkv_mask_view;

/* QKV_CACHE: an input of keys or values, which may have any type but masks';
 * QKV_CACHE_OUTPUT: one that is written. */
typedef enum qkv_access { QKV_INPUT, QKV_OUTPUT, QKV_CACHE, QKV_CACHE_OUTPUT } qkv_access;

/* How many rows a tensor has along each axis. */
typedef struct qkv_rows {
    int64_t batch, heads, rows;
} qkv_rows;

/* Checks a tensor of rows of 'dim' elements, where no number is negative, and
 * fills in 'view'. */
qkv_status qkv_view_tensor(const qkv_tensor *tensor, const qkv_rows *rows, int64_t dim,
                           qkv_access access, qkv_view *view);

/* The same for a plain matrix given by pointer and row stride. */
qkv_status qkv_view_matrix(const float *data, int64_t stride, int64_t rows, int64_t dim,
                           qkv_access access, qkv_view *view);

/* Checks a mask over batch x heads x rows x keys, none of which is negative. */
qkv_status qkv_view_mask(const qkv_mask *mask, int64_t batch, int64_t heads, int64_t rows,
                         int64_t keys, qkv_mask_view *view);

/* The plain numbers of a paged cache; a 'table_stride' of 0 gets its default. */
qkv_status qkv_check_page_sizes(int64_t page_size, int64_t pages, int64_t batch, int64_t kv_len,
                                const int32_t *table, int64_t *table_stride);

/* 'count' elements of 'size' bytes in a row, for the checks of overlap. */
qkv_view qkv_view_bytes(const void *data, int64_t count, size_t size);

/* Is an optional array NULL or aligned to its element? */
bool qkv_aligned(const void *data, size_t element);

/* Does an array of n elements end within the address space? NULL does. */
bool qkv_array_fits(const void *data, int64_t n, size_t element);

bool qkv_view_empty(const qkv_view *view);

/* Bytes of an element of a type without blocks; those of QKV_BIT are not counted so. */
int64_t qkv_element_size(int32_t dtype);

/* Elements that are stored together, 1 << shift = mask + 1 of them, the bytes
 * that they take, and their alignment. */
typedef struct qkv_dtype_block {
    int8_t shift, mask, bytes, align;
} qkv_dtype_block;
extern const qkv_dtype_block qkv_dtype_blocks[];

/* Bytes of n elements; n is a multiple of the type's block. (This and the next
 * are on the way to every row.) */
static inline int64_t qkv_bytes(int32_t dtype, int64_t n)
{
    return (n >> qkv_dtype_blocks[dtype].shift) * qkv_dtype_blocks[dtype].bytes;
}

/* The address of a row. */
static inline void *qkv_view_row(const qkv_view *view, int64_t batch, int64_t head, int64_t row)
{
    const int64_t element = batch * view->stride[QKV_AXIS_BATCH] +
                            head * view->stride[QKV_AXIS_HEAD] + row * view->stride[QKV_AXIS_ROW];
    return (char *)view->data + qkv_bytes(view->dtype, element);
}

/* The same elements at the same places. */
bool qkv_views_same(const qkv_view *a, const qkv_view *b);

/*
 * May the two share an element? Exact for tensors that lie apart and for
 * those that interleave with a common period (the Q, K and V of one packed
 * row, say); what it cannot tell apart counts as overlapping.
 */
bool qkv_views_overlap(const qkv_view *a, const qkv_view *b);

/* Most lie apart: what is left to qkv_views_overlap() are those that have elements
 * and do not. */
static inline bool qkv_spans_meet(const qkv_view *a, const qkv_view *b)
{
    const uintptr_t begin_a = (uintptr_t)a->data, begin_b = (uintptr_t)b->data;
    return begin_a + (uintptr_t)a->bytes > begin_b && begin_b + (uintptr_t)b->bytes > begin_a;
}

/* Does scratch memory of 'need' bytes satisfy the rules, away from 'views'? */
qkv_status qkv_check_scratch(const void *scratch, size_t size, size_t need,
                             const qkv_view *const *views, size_t n_views);

/*
 * Copies a descriptor of 'known' bytes that begins with its size_t size from
 * a caller's of any version: fields that the caller does not have are 0, fields
 * that this library does not know must be 0. 'older' are the sizes that it once
 * had, up to a 0, or NULL. Another smaller one, that ends in the middle of a field
 * or between two that belong together, is refused: half of a mask is another mask.
 */
qkv_status qkv_copy_desc(void *copy, size_t known, const size_t *older, const void *desc);

/* a + b and a * b for non-negative numbers; false if the result overflows. */
bool qkv_add(int64_t a, int64_t b, int64_t *result);
bool qkv_mul(int64_t a, int64_t b, int64_t *result);

#endif
