/* SPDX-License-Identifier: MIT */
/*
 * Between the public functions and the kernels: a validated attention
 * problem, the plan how to cut it, and the two drivers that carry it out.
 */
#ifndef QKV_DRIVERS_ATTENTION_H
#define QKV_DRIVERS_ATTENTION_H

#include "internal.h"
#include "validate.h"

/* A validated problem: no defaults left open. */
typedef struct qkv_attention_problem {
    qkv_view query, key, value, out, lse;    /* lse.data NULL: not wanted */
    int64_t batch, q_heads, kv_heads, group; /* group: query heads a key/value head */
    int64_t q_len, kv_len, head_dim, value_dim;
    bool causal;
    bool narrow;      /* some tensor is not f32 */
    float scale_log2; /* scale * log2(e) */
} qkv_attention_problem;

typedef enum qkv_route { QKV_ROUTE_TILE, QKV_ROUTE_ROW } qkv_route;

/*
 * How a problem is cut into tasks. A task is one batch entry, one key/value
 * head and a run of query rows; row r of a key/value head is the query at
 * position r / group of its head r % group, so that rows with nearly the
 * same visible keys lie together and every head of the group shares each
 * load of a key or value.
 */
typedef struct qkv_attention_plan {
    const qkv_kernels *kernels;
    qkv_route route;
    bool general;      /* too large for a tile: right, but not tuned */
    int64_t rows;      /* group * q_len */
    int64_t task_rows; /* query rows a task, a multiple of the tile's */
    int64_t tasks_a_head, tasks;
    size_t worker_bytes; /* scratch memory a worker, a multiple of its alignment */
} qkv_attention_plan;

qkv_attention_plan qkv_plan_attention(const qkv_attention_problem *problem,
                                      const qkv_kernels *kernels);

/* The keys that the query at 'position' sees: begin <= j < end. */
typedef struct qkv_range {
    int64_t begin, end;
} qkv_range;
qkv_range qkv_visible_keys(const qkv_attention_problem *problem, int64_t position);

/* One task of the plan, with a worker's scratch memory. */
void qkv_run_attention_task(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                            int64_t task, void *scratch);

/* A run of query rows of one batch entry and key/value head. */
typedef struct qkv_row_run {
    int64_t batch, kv_head, first, count;
} qkv_row_run;

void qkv_run_tiles(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                   qkv_row_run run, float *scratch);
void qkv_run_rows(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                  qkv_row_run run, float *scratch);

/* Floats of scratch memory that a run of task_rows rows needs. */
int64_t qkv_tiles_scratch(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                          int64_t task_rows);
int64_t qkv_rows_scratch(const qkv_attention_problem *problem);

/*
 * 'count' consecutive rows of a tensor as f32: where they lie, or widened
 * into 'stage', which has room for count * dim floats.
 */
typedef struct qkv_f32_rows {
    const float *data;
    int64_t stride;
} qkv_f32_rows;
qkv_f32_rows qkv_widen_rows(const qkv_view *view, const qkv_kernels *kernels, int64_t batch,
                            int64_t head, int64_t first, int64_t count, float *stage);

/* One row of 'n' elements of a type, to f32 and from f32. */
void qkv_widen_row(const qkv_kernels *kernels, int32_t dtype, const void *row, float *wide,
                   int64_t n);
void qkv_narrow_row(const qkv_kernels *kernels, int32_t dtype, const float *wide, void *row,
                    int64_t n);

/* Rounds a number of floats up to the alignment of scratch memory. */
int64_t qkv_align_floats(int64_t n);

/* Places parts of 'sizes' floats one after the other from 'base' on, each
 * aligned; returns the floats used. With base NULL it only counts. */
int64_t qkv_lay_out(float *base, const int64_t *sizes, float **const *parts, size_t n);

/* The address of a row's query, output and log-sum-exp. */
void *qkv_row_of(const qkv_view *view, const qkv_attention_problem *problem, qkv_row_run run,
                 int64_t row);

/* ln(sum) + max, where 'max' is in units of log2(e): -inf for an empty sum. */
float qkv_lse_of(float max_log2, float sum);

#endif
