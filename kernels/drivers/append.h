/* SPDX-License-Identifier: MIT */
/* New rows for a cache, validated: no defaults left open. */
#ifndef QKV_DRIVERS_APPEND_H
#define QKV_DRIVERS_APPEND_H

#include "internal.h"
#include "validate.h"

/* Elements of the longest row that is converted or turned on its way. */
enum { QKV_APPEND_DIM_MAX = 4096 };

/* Keys or values. 'from' without data: not wanted. */
typedef struct qkv_append_side {
    qkv_view from, to, scale; /* scale.data NULL: the type has none */
    int64_t rotary_pairs;     /* 0: not turned */
} qkv_append_side;

typedef struct qkv_append_problem {
    qkv_append_side key, value;
    int64_t batch, heads, new_len;
    const int64_t *new_starts, *positions; /* or NULL */
    const int32_t *page_table;             /* NULL: not in pages */
    int64_t page_table_stride, page_size;
    const float *cosines, *sines;
    int64_t rotary_stride;
    bool neighbours;
} qkv_append_problem;

void qkv_run_append(const qkv_append_problem *problem, const qkv_kernels *kernels);

#endif
