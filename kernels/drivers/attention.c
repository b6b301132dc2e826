/* SPDX-License-Identifier: MIT */
#include "attention.h"

#include <math.h>

enum {
    /* Scratch memory of a worker stays below this where a tile fits at all. */
    SCRATCH_LIMIT = 1 << 20,
    /* The queries and running outputs of a task, which every key block
     * passes over: they should stay in the second-level cache together with
     * a block of keys and values. */
    TASK_STATE_LIMIT = 256 << 10,
    /* More rows than this do not make packing a value block any cheaper. */
    TASK_ROWS_LIMIT = 384,
    /* Rows a task of the row driver. */
    ROW_TASK_ROWS = 64
};

int64_t qkv_align_floats(int64_t n)
{
    const int64_t unit = QKV_SCRATCH_ALIGN / (int64_t)sizeof(float);
    return (n + unit - 1) / unit * unit;
}

int64_t qkv_lay_out(float *base, const int64_t *sizes, float **const *parts, size_t n)
{
    int64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (base)
            *parts[i] = base + used;
        used += qkv_align_floats(sizes[i]);
    }
    return used;
}

qkv_range qkv_visible_keys(const qkv_attention_problem *p, int64_t position)
{
    qkv_range range = {0, p->kv_len};
    if (p->causal) {
        const int64_t end = position - p->q_len + 1 + p->kv_len; /* in this order: no overflow */
        range.end = end < 0 ? 0 : end < p->kv_len ? end : p->kv_len;
    }
    return range;
}

void *qkv_row_of(const qkv_view *view, const qkv_attention_problem *p, qkv_row_run run, int64_t row)
{
    const int64_t r = run.first + row;
    return qkv_view_row(view, run.batch, run.kv_head * p->group + r % p->group, r / p->group);
}

void qkv_widen_row(const qkv_kernels *k, int32_t dtype, const void *row, float *wide, int64_t n)
{
    if (dtype == QKV_F16)
        k->widen_f16(row, wide, n);
    else
        k->widen_bf16(row, wide, n);
}

void qkv_narrow_row(const qkv_kernels *k, int32_t dtype, const float *wide, void *row, int64_t n)
{
    if (dtype == QKV_F16)
        k->narrow_f16(wide, row, n);
    else
        k->narrow_bf16(wide, row, n);
}

qkv_f32_rows qkv_widen_rows(const qkv_view *view, const qkv_kernels *k, int64_t batch, int64_t head,
                            int64_t first, int64_t count, float *stage)
{
    if (view->dtype == QKV_F32)
        return (qkv_f32_rows){qkv_view_row(view, batch, head, first), view->stride[QKV_AXIS_ROW]};
    for (int64_t i = 0; i < count; i++)
        qkv_widen_row(k, view->dtype, qkv_view_row(view, batch, head, first + i),
                      stage + i * view->dim, view->dim);
    return (qkv_f32_rows){stage, view->dim};
}

float qkv_lse_of(float max_log2, float sum)
{
    const double ln2 = 0x1.62e42fefa39efp-1;
    return sum == 0.0f ? -INFINITY : (float)((double)max_log2 * ln2 + log((double)sum));
}

/* The most tiles a task may have for its state to stay within the limit. */
static int64_t task_tiles(const qkv_attention_problem *p, const qkv_kernels *k)
{
    const int64_t tile = k->tile_rows;
    const int64_t tile_bytes = tile * (p->head_dim + p->value_dim) * (int64_t)sizeof(float);
    const int64_t by_state = TASK_STATE_LIMIT / tile_bytes, by_rows = TASK_ROWS_LIMIT / tile;
    const int64_t most = by_state < by_rows ? by_state : by_rows;
    return most < 1 ? 1 : most;
}

/* The rows of each task, evened out so that the last one is not a small rest. */
static int64_t tile_task_rows(const qkv_attention_problem *p, const qkv_kernels *k, int64_t rows)
{
    const int64_t most = task_tiles(p, k);
    const int64_t tiles = (rows + k->tile_rows - 1) / k->tile_rows;
    const int64_t tasks = (tiles + most - 1) / most;
    return (tiles + tasks - 1) / tasks * k->tile_rows;
}

/* Does one tile of these head sizes fit the limit? (Sizes up to 2^20 only:
 * larger ones do not, and could overflow the sum.) */
static bool tile_fits(const qkv_attention_problem *p, const qkv_kernels *k)
{
    const int64_t most = 1 << 20;
    return p->head_dim <= most && p->value_dim <= most &&
           qkv_tiles_scratch(p, k, k->tile_rows) * (int64_t)sizeof(float) <= SCRATCH_LIMIT;
}

/* The scratch memory of a worker: enough for every number of rows and keys,
 * so that one buffer serves every call with these head sizes. */
static size_t worker_bytes(const qkv_attention_problem *p, const qkv_kernels *k, bool tiles)
{
    int64_t floats = qkv_rows_scratch(p);
    if (tiles) {
        const int64_t most = qkv_tiles_scratch(p, k, task_tiles(p, k) * k->tile_rows);
        if (most > floats)
            floats = most;
    }
    return (size_t)floats * sizeof(float);
}

qkv_attention_plan qkv_plan_attention(const qkv_attention_problem *p, const qkv_kernels *kernels)
{
    qkv_attention_plan plan = {.kernels = kernels, .rows = p->group * p->q_len};
    plan.general = !tile_fits(p, kernels);
    plan.worker_bytes = worker_bytes(p, kernels, !plan.general);

    if (plan.general || p->kv_len == 0 || plan.rows <= kernels->row_limit) {
        plan.route = QKV_ROUTE_ROW;
        plan.task_rows = (ROW_TASK_ROWS + p->group - 1) / p->group * p->group;
    } else {
        plan.task_rows = tile_task_rows(p, kernels, plan.rows);
    }
    plan.tasks_a_head = (plan.rows + plan.task_rows - 1) / plan.task_rows;
    plan.tasks = p->batch * p->kv_heads * plan.tasks_a_head;
    return plan;
}

void qkv_run_attention_task(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                            int64_t task, void *scratch)
{
    const int64_t part = task % plan->tasks_a_head;
    const int64_t head = task / plan->tasks_a_head;
    qkv_row_run run = {.batch = head / problem->kv_heads,
                       .kv_head = head % problem->kv_heads,
                       .first = part * plan->task_rows,
                       .count = plan->task_rows};
    if (run.count > plan->rows - run.first)
        run.count = plan->rows - run.first;

    if (plan->route == QKV_ROUTE_TILE)
        qkv_run_tiles(problem, plan, run, scratch);
    else
        qkv_run_rows(problem, plan, run, scratch);
}
