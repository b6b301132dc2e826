/* SPDX-License-Identifier: MIT */
/*
 * A tensor of any element type and in any of the layouts that a descriptor
 * knows: strided, in pages, or with the rows of all sequences one after the
 * other. What its elements are worth is said by the oracle of formats.
 */
#ifndef TEST_ANY_TENSOR_H
#define TEST_ANY_TENSOR_H

#include "harness.h"

enum { HOW_PACKED, HOW_BSHD, HOW_PADDED, HOWS };

typedef struct any_tensor {
    char *data;
    int32_t dtype;
    int64_t count[3], stride[3], dim, extent; /* batch, head, row; extent in elements */
    qkv_tensor desc;

    /* Of QKV_I8, one a row. */
    float *scales;
    int64_t scale_stride[3];
    qkv_tensor scale_desc;

    /* Where row i of sequence b lies, if not in batch entry b, row i; and how
     * many rows a sequence has. */
    const int32_t *pages;
    int64_t table_stride, page_size;
    const int64_t *starts, *lens;
} any_tensor;

/* Takes the slot; flush against the guard page behind it. */
any_tensor any_make(int slot, int64_t batch, int64_t heads, int64_t rows, int64_t dim, int how,
                    int32_t dtype);
/* The scales of a tensor of QKV_I8, in a slot of their own. */
void any_make_scales(any_tensor *t, int slot, int how);

/* Of how many elements a row of the type is a multiple. */
int64_t any_step(int32_t dtype);
size_t any_bytes(const any_tensor *t);
int64_t any_rows(const any_tensor *t, int64_t b);
void *any_row(const any_tensor *t, int64_t b, int64_t h, int64_t i);
double any_get(const any_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d);

/* Random normal numbers; a NaN; nothing but NaN, or infinities where the type has any. */
void any_fill(const any_tensor *t, rng *r);
void any_put_nan(const any_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d);
void any_poison_row(const any_tensor *t, int64_t b, int64_t h, int64_t i, bool infinite);

/* Row i of head h of one sequence becomes that of another. */
void any_copy_row(const any_tensor *t, int64_t h, int64_t i, int64_t from, int64_t to);

/* All of it in f64, [count 0][count 1][count 2][dim]; 0 for rows that are not there. */
double *any_doubles(const any_tensor *t, int slot);

#define each_row(t, b, h, i)                                                                       \
    for (int64_t b = 0; b < (t)->count[0]; b++)                                                    \
        for (int64_t h = 0; h < (t)->count[1]; h++)                                                \
            for (int64_t i = 0; i < any_rows((t), b); i++)

#endif
