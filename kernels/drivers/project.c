/* SPDX-License-Identifier: MIT */
/*
 * The projection driver: a matrix product by panels.
 *
 *     for each run of output columns
 *         for each run of the depth
 *             pack the weights into panels of gemm_cols columns
 *             for each run of input rows
 *                 copy the input of the run
 *                 for each panel: one kernel call
 *
 * The panels of a run fit the second-level cache, one panel the first, a run
 * of input rows stays beside them. Weights and inputs are copied because
 * their rows often lie a power of two apart: where they are, they would fall
 * into a few sets of every cache and evict each other.
 */
#include "project.h"

#include <string.h>

enum {
    DEPTH_RUN = 256,  /* so that a panel takes 8 to 32 KiB */
    COLUMN_RUN = 256, /* a multiple of every gemm_cols */
    ROW_RUN = 96
};

int64_t qkv_projection_scratch(void)
{
    return DEPTH_RUN * (COLUMN_RUN + ROW_RUN);
}

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A run of columns, all of one head, and a run of the depth. */
typedef struct weight_run {
    int64_t column, columns; /* counted over all heads */
    int64_t depth, depths;
} weight_run;

/* Copies one row of a panel. A copy of constant size is a few moves where
 * one of variable size is a call. */
static void copy_panel_row(float *panel, const float *weights, int64_t cols)
{
    switch (cols) {
    case 8:
        memcpy(panel, weights, 8 * sizeof *panel);
        break;
    case 16:
        memcpy(panel, weights, 16 * sizeof *panel);
        break;
    case 32:
        memcpy(panel, weights, 32 * sizeof *panel);
        break;
    default:
        memcpy(panel, weights, (size_t)cols * sizeof *panel);
        break;
    }
}

/* Weights stored [in][out]: along each row once, a part to each panel. */
static void pack_in_out(const qkv_projection *p, int64_t panel_cols, weight_run run, float *packed)
{
    for (int64_t k = 0; k < run.depths; k++) {
        const float *w = p->weight + (run.depth + k) * p->weight_stride + run.column;
        for (int64_t c = 0; c < run.columns; c += panel_cols)
            copy_panel_row(packed + c * run.depths + k * panel_cols, w + c,
                           min(panel_cols, run.columns - c));
    }
}

/* Weights stored [out][in]: each row is a column of a panel. */
static void pack_out_in(const qkv_projection *p, int64_t panel_cols, weight_run run, float *packed)
{
    for (int64_t c = 0; c < run.columns; c++) {
        const float *w = p->weight + (run.column + c) * p->weight_stride + run.depth;
        float *panel = packed + c / panel_cols * panel_cols * run.depths + c % panel_cols;
        for (int64_t k = 0; k < run.depths; k++)
            panel[k * panel_cols] = w[k];
    }
}

/* Panels panel[k][c] = W[k][column + c], the last one filled up with zeros. */
static void pack_run(const qkv_projection *p, int64_t panel_cols, weight_run run, float *packed)
{
    const int64_t rest = run.columns % panel_cols;
    if (rest > 0)
        memset(packed + (run.columns - rest) * run.depths, 0,
               (size_t)(run.depths * panel_cols) * sizeof *packed);
    if (p->weight_out_in)
        pack_out_in(p, panel_cols, run, packed);
    else
        pack_in_out(p, panel_cols, run, packed);
}

/* The run's part of some input rows, [rows][depths]. */
static void copy_input(const qkv_projection *p, int64_t batch, int64_t row, int64_t rows,
                       weight_run run, float *copy)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(copy + i * run.depths,
               (const float *)qkv_view_row(&p->input, batch, 0, row + i) + run.depth,
               (size_t)run.depths * sizeof *copy);
}

static void multiply_run(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                         weight_run run, const float *packed, float *input)
{
    const int64_t head = run.column / p->out.dim, column = run.column % p->out.dim;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    for (int64_t i = 0; i < rows; i += ROW_RUN) {
        const int64_t here = min(ROW_RUN, rows - i);
        copy_input(p, batch, i, here, run, input);
        float *y = (float *)qkv_view_row(&p->out, batch, head, i) + column;
        for (int64_t c = 0; c < run.columns; c += k->gemm_cols)
            k->gemm_f32(&(qkv_gemm_args){.x = input,
                                         .panel = packed + c * run.depths,
                                         .bias = p->bias ? p->bias + run.column + c : NULL,
                                         .y = y + c,
                                         .x_stride = run.depths,
                                         .y_stride = p->out.stride[QKV_AXIS_ROW],
                                         .rows = here,
                                         .cols = min(k->gemm_cols, run.columns - c),
                                         .depth = run.depths,
                                         .accumulate = run.depth > 0});
    }
}

/* Heads that lie side by side in a row are one wide head. */
static void join_heads(qkv_view *out)
{
    if (out->count[QKV_AXIS_HEAD] > 1 && out->stride[QKV_AXIS_HEAD] == out->dim) {
        out->dim *= out->count[QKV_AXIS_HEAD];
        out->count[QKV_AXIS_HEAD] = 1;
        out->stride[QKV_AXIS_HEAD] = 0;
    }
}

/* Batches whose rows follow each other at the same distance are one batch. */
static void join_batches(qkv_projection *p)
{
    qkv_view *views[] = {&p->input, &p->out};
    const int64_t batch = p->input.count[QKV_AXIS_BATCH], rows = p->input.count[QKV_AXIS_ROW];
    if (batch == 1)
        return;
    for (int i = 0; i < 2; i++)
        if (rows > 1 && views[i]->stride[QKV_AXIS_BATCH] != rows * views[i]->stride[QKV_AXIS_ROW])
            return;
    for (int i = 0; i < 2; i++) {
        if (rows == 1)
            views[i]->stride[QKV_AXIS_ROW] = views[i]->stride[QKV_AXIS_BATCH];
        views[i]->count[QKV_AXIS_ROW] = rows * batch;
        views[i]->count[QKV_AXIS_BATCH] = 1;
    }
}

void qkv_run_projection(const qkv_projection *projection, const qkv_kernels *k, float *scratch)
{
    qkv_projection p = *projection;
    join_heads(&p.out);
    join_batches(&p);

    const int64_t depth = p.input.dim;
    const int64_t columns = p.out.dim * p.out.count[QKV_AXIS_HEAD];
    weight_run run = {0};
    for (; run.column < columns; run.column += run.columns) {
        run.columns = min(COLUMN_RUN, p.out.dim - run.column % p.out.dim);
        for (run.depth = 0; run.depth < depth; run.depth += run.depths) {
            run.depths = min(DEPTH_RUN, depth - run.depth);
            pack_run(&p, k->gemm_cols, run, scratch);
            for (int64_t b = 0; b < p.input.count[QKV_AXIS_BATCH]; b++)
                multiply_run(&p, k, b, run, scratch, scratch + DEPTH_RUN * COLUMN_RUN);
        }
    }
}
