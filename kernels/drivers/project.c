/* SPDX-License-Identifier: MIT */
/*
 * The projection driver: a matrix product by panels.
 *
 *     for each run of output columns
 *         for each run of the depth
 *             pack the weights into panels of gemm_cols columns
 *             for each run of input rows
 *                 for each panel: one kernel call
 *
 * The panels of a run fit the second-level cache, one panel the first; a
 * run of input rows is small enough to stay beside them.
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
    return DEPTH_RUN * COLUMN_RUN;
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

/* panel[k][c] = W[k][column + c], filled up with zeros. */
static void pack_panel(const qkv_projection *p, int64_t panel_cols, int64_t column, int64_t cols,
                       weight_run run, float *panel)
{
    if (cols < panel_cols)
        memset(panel, 0, (size_t)(run.depths * panel_cols) * sizeof *panel);
    if (p->weight_out_in) {
        for (int64_t c = 0; c < cols; c++) {
            const float *w = p->weight + (column + c) * p->weight_stride + run.depth;
            for (int64_t k = 0; k < run.depths; k++)
                panel[k * panel_cols + c] = w[k];
        }
    } else {
        for (int64_t k = 0; k < run.depths; k++)
            memcpy(panel + k * panel_cols, p->weight + (run.depth + k) * p->weight_stride + column,
                   (size_t)cols * sizeof *panel);
    }
}

static void pack_run(const qkv_projection *p, int64_t panel_cols, weight_run run, float *packed)
{
    for (int64_t c = 0; c < run.columns; c += panel_cols)
        pack_panel(p, panel_cols, run.column + c, min(panel_cols, run.columns - c), run,
                   packed + c * run.depths);
}

static void multiply_run(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                         weight_run run, const float *packed)
{
    const int64_t head = run.column / p->out.dim, column = run.column % p->out.dim;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    for (int64_t i = 0; i < rows; i += ROW_RUN) {
        const float *x = qkv_view_row(&p->input, batch, 0, i) + run.depth;
        float *y = qkv_view_row(&p->out, batch, head, i) + column;
        for (int64_t c = 0; c < run.columns; c += k->gemm_cols)
            k->gemm_f32(&(qkv_gemm_args){.x = x,
                                         .panel = packed + c * run.depths,
                                         .bias = p->bias ? p->bias + run.column + c : NULL,
                                         .y = y + c,
                                         .x_stride = p->input.stride[QKV_AXIS_ROW],
                                         .y_stride = p->out.stride[QKV_AXIS_ROW],
                                         .rows = min(ROW_RUN, rows - i),
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
                multiply_run(&p, k, b, run, scratch);
        }
    }
}
