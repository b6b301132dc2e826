/* SPDX-License-Identifier: MIT */
/*
 * The projection driver: a matrix product by panels.
 *
 *     pack the first run of weights into panels of gemm_cols columns
 *     for each run of weights, along their rows in memory first
 *         for each run of input rows
 *             copy the input of the run, unless it lies well or is there
 *             for each panel: one kernel call, which packs its share of the
 *                             next run of weights
 *
 * The panels of a run fit the second-level cache, one panel the first, a run
 * of input rows stays beside them. Weights are copied, and inputs where their
 * rows lie a multiple of 4 KiB apart, because in place they would fall into a
 * few sets of every cache and evict each other.
 */
#include "project.h"

#include <string.h>

enum {
    DEPTH_RUN = 256,  /* so that a panel takes 8 to 32 KiB */
    COLUMN_RUN = 256, /* a multiple of every gemm_cols */
    ROW_RUN = 128,
    PANEL_PAD = 32, /* the widest gemm_cols: see panel_stride() */
    PACKED_RUN = DEPTH_RUN * COLUMN_RUN + COLUMN_RUN / 8 * PANEL_PAD
};

int64_t qkv_projection_scratch(void)
{
    return 2 * PACKED_RUN + DEPTH_RUN * ROW_RUN;
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

/* From the start of one panel of a run to the next: not a power of two, so
 * that one row's parts do not fall into a few sets of the first-level cache. */
static int64_t panel_stride(int64_t panel_cols, weight_run run)
{
    return run.depths * panel_cols + panel_cols;
}

/* Weights stored [in][out]: along each row once, a part to each panel. */
static void pack_in_out(const qkv_projection *p, int64_t panel_cols, weight_run run, int64_t first,
                        float *packed)
{
    for (int64_t k = first; k < run.depths; k++) {
        const float *w = p->weight + (run.depth + k) * p->weight_stride + run.column;
        float *panel = packed + k * panel_cols;
        for (int64_t c = 0; c < run.columns;
             c += panel_cols, panel += panel_stride(panel_cols, run))
            copy_panel_row(panel, w + c, min(panel_cols, run.columns - c));
    }
}

/* Four columns of a panel: rows of weights that are read side by side are
 * transposed in registers, by any compiler. */
static void transpose_4(const float *w, int64_t stride, int64_t depths, int64_t panel_cols,
                        float *panel)
{
    const float *w1 = w + stride, *w2 = w1 + stride, *w3 = w2 + stride;
    for (int64_t k = 0; k < depths; k++, panel += panel_cols)
        memcpy(panel, (const float[]){w[k], w1[k], w2[k], w3[k]}, 4 * sizeof *panel);
}

/* Weights stored [out][in]: each row is a column of a panel. */
static void pack_out_in(const qkv_projection *p, int64_t panel_cols, weight_run run, float *packed)
{
    int64_t here;
    for (int64_t c = 0; c < run.columns; c += here) {
        const float *w = p->weight + (run.column + c) * p->weight_stride + run.depth;
        float *panel = packed + c / panel_cols * panel_stride(panel_cols, run) + c % panel_cols;
        here = run.columns - c < 4 ? 1 : 4;
        if (here == 4)
            transpose_4(w, p->weight_stride, run.depths, panel_cols, panel);
        else
            for (int64_t k = 0; k < run.depths; k++)
                panel[k * panel_cols] = w[k];
    }
}

/*
 * Panels panel[k][c] = W[k][column + c], the last one filled up with zeros,
 * from the depth 'first' on.
 */
static void pack_run(const qkv_projection *p, int64_t panel_cols, weight_run run, int64_t first,
                     float *packed)
{
    const int64_t whole = run.columns / panel_cols;
    if (run.columns > whole * panel_cols)
        memset(packed + whole * panel_stride(panel_cols, run), 0,
               (size_t)(run.depths * panel_cols) * sizeof *packed);
    if (p->weight_out_in)
        pack_out_in(p, panel_cols, run, packed);
    else
        pack_in_out(p, panel_cols, run, first, packed);
}

/* Some rows of the input, over the depth of a run of weights. */
typedef struct input_run {
    const float *x;
    int64_t stride;
} input_run;

/* A worker's copy of a run, and which one it is. */
typedef struct input_copy {
    float *rows; /* [ROW_RUN][depths] */
    int64_t batch, row, depth;
} input_copy;

static input_run input_at(const qkv_projection *p, int64_t batch, int64_t row, int64_t rows,
                          weight_run run, input_copy *copy)
{
    enum { PAGE_FLOATS = 1024 };
    const int64_t stride = p->input.stride[QKV_AXIS_ROW];
    const float *x = (const float *)qkv_view_row(&p->input, batch, 0, row) + run.depth;
    if (stride % PAGE_FLOATS != 0)
        return (input_run){x, stride};

    /* Runs of weights side by side read the same part of the input. */
    if (copy->batch != batch || copy->row != row || copy->depth != run.depth)
        for (int64_t i = 0; i < rows; i++)
            memcpy(copy->rows + i * run.depths, x + i * stride,
                   (size_t)run.depths * sizeof *copy->rows);
    copy->batch = batch, copy->row = row, copy->depth = run.depth;
    return (input_run){copy->rows, run.depths};
}

/*
 * Packing the next run while one is multiplied: kernel calls copy an equal
 * share of it each. Only weights stored [in][out] whose columns fill whole
 * panels are copied so.
 */
typedef struct packing {
    weight_run run;
    float *packed;
    qkv_gemm_copy copy;  /* what is next */
    int64_t left, share; /* pieces of panel_cols in all and a call */
} packing;

static packing start_packing(const qkv_projection *p, int64_t panel_cols, weight_run run,
                             weight_run next, float *packed)
{
    packing result = {.run = next, .packed = packed};
    if (p->weight_out_in || next.columns % panel_cols != 0)
        return result;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    const int64_t calls = p->input.count[QKV_AXIS_BATCH] * ((rows + ROW_RUN - 1) / ROW_RUN) *
                          ((run.columns + panel_cols - 1) / panel_cols);
    result.copy = (qkv_gemm_copy){.from = p->weight + next.depth * p->weight_stride + next.column,
                                  .to = packed,
                                  .from_stride = p->weight_stride,
                                  .to_stride = panel_stride(panel_cols, next),
                                  .panels = next.columns / panel_cols};
    result.left = result.copy.panels * next.depths;
    result.share = min(run.depths, (result.left + calls - 1) / calls);
    return result;
}

/* One kernel call, with its share of the packing. */
static void multiply_panel(const qkv_kernels *k, qkv_gemm_args *args, packing *next)
{
    const int64_t share = min(next->share, next->left);
    next->copy.pieces = share;
    args->copy = share > 0 ? &next->copy : NULL;
    k->gemm_f32(args);
    next->left -= share - next->copy.pieces;
}

/* Packs what the kernels have left of the run. */
static void finish_packing(const qkv_projection *p, int64_t panel_cols, const packing *next)
{
    const weight_run run = next->run;
    const bool copied = next->copy.panels > 0;
    const int64_t rows =
        copied ? run.depths - (next->left + next->copy.panels - 1) / next->copy.panels : 0;
    if (rows < run.depths)
        pack_run(p, panel_cols, run, rows, next->packed);
}

static void multiply_run(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                         weight_run run, const float *packed, packing *next, input_copy *copy)
{
    const int64_t head = run.column / p->out.dim, column = run.column % p->out.dim;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    for (int64_t i = 0; i < rows; i += ROW_RUN) {
        const int64_t here = min(ROW_RUN, rows - i);
        const input_run input = input_at(p, batch, i, here, run, copy);
        float *y = (float *)qkv_view_row(&p->out, batch, head, i) + column;
        const float *panel = packed;
        for (int64_t c = 0; c < run.columns; c += k->gemm_cols) {
            multiply_panel(k,
                           &(qkv_gemm_args){.x = input.x,
                                            .panel = panel,
                                            .bias = p->bias ? p->bias + run.column + c : NULL,
                                            .y = y + c,
                                            .x_stride = input.stride,
                                            .y_stride = p->out.stride[QKV_AXIS_ROW],
                                            .rows = here,
                                            .cols = min(k->gemm_cols, run.columns - c),
                                            .depth = run.depths,
                                            .accumulate = run.depth > 0},
                           next);
            panel += panel_stride(k->gemm_cols, run);
        }
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

/* The run that begins at a column and a depth, empty if there is none. */
static weight_run run_at(const qkv_projection *p, int64_t column, int64_t depth)
{
    weight_run run = {.column = column, .depth = depth};
    if (depth < p->input.dim) {
        run.columns = min(COLUMN_RUN, p->out.dim - column % p->out.dim);
        run.depths = min(DEPTH_RUN, p->input.dim - depth);
    }
    return run;
}

/* Along the rows of the weights first, so that the pages stay the same. */
static weight_run run_after(const qkv_projection *p, weight_run run)
{
    const int64_t columns = p->out.dim * p->out.count[QKV_AXIS_HEAD];
    const int64_t column = run.column + run.columns, depth = run.depth + run.depths;
    if (p->weight_out_in)
        return depth < p->input.dim ? run_at(p, run.column, depth)
               : column < columns   ? run_at(p, column, 0)
                                    : (weight_run){.columns = 0};
    return column < columns ? run_at(p, column, run.depth) : run_at(p, 0, depth);
}

void qkv_run_projection(const qkv_projection *projection, const qkv_kernels *k, float *scratch)
{
    qkv_projection p = *projection;
    join_heads(&p.out);
    join_batches(&p);

    float *const packed[2] = {scratch, scratch + PACKED_RUN};
    input_copy copy = {.rows = scratch + 2 * PACKED_RUN, .batch = -1};
    weight_run run = run_at(&p, 0, 0);
    pack_run(&p, k->gemm_cols, run, 0, packed[0]);
    for (int turn = 0; run.columns > 0; turn = 1 - turn) {
        packing next = start_packing(&p, k->gemm_cols, run, run_after(&p, run), packed[1 - turn]);
        for (int64_t b = 0; b < p.input.count[QKV_AXIS_BATCH]; b++)
            multiply_run(&p, k, b, run, packed[turn], &next, &copy);
        finish_packing(&p, k->gemm_cols, &next);
        run = next.run;
    }
}
