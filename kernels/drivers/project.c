/* SPDX-License-Identifier: MIT */
/*
 * The projection driver: a matrix product by panels, or for few rows in place
 * (see run_few).
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
 *
 * All arithmetic is f32. Weights and inputs of 16 bits are widened as they are
 * copied, once a run. An output of 16 bits is made in f32, as many rows and
 * columns as fit a block of scratch memory over their whole depth, and then
 * rounded: so its bits are those of the f32 output, rounded once.
 */
#include "project.h"

#include <string.h>

#include "typed.h"

enum {
    DEPTH_RUN = 256,  /* so that a panel takes 8 to 32 KiB */
    COLUMN_RUN = 256, /* a multiple of every gemm_cols */
    ROW_RUN = 128,
    PANEL_PAD = 32, /* the widest gemm_cols: see panel_stride() */
    PACKED_RUN = DEPTH_RUN * COLUMN_RUN + COLUMN_RUN / 8 * PANEL_PAD,
    WIDE_RUN = 4 * DEPTH_RUN, /* rows of weights as f32, on their way to a panel */
    WIDE_ROWS = 256,          /* most rows of an output that is made in f32 first */
    WIDE_OUT = WIDE_ROWS * COLUMN_RUN,
    FEW_ROWS = 8,         /* with more than these and few_rows, panels are faster */
    FEW_ROWS_OUT_IN = 48, /* the same of weights stored [out][in], which cost more to pack */
    FEW_COLUMNS = 4096,   /* of few rows at a time: long streams of weights */
    FEW_INPUT = PACKED_RUN + DEPTH_RUN * ROW_RUN, /* behind the sums */
    SUMS = 2 * PACKED_RUN + DEPTH_RUN * ROW_RUN + WIDE_RUN
};

_Static_assert(PACKED_RUN >= 2 * FEW_ROWS_OUT_IN * (int)QKV_FEW_COLS &&
                   FEW_ROWS_OUT_IN >= (int)QKV_FEW_ROWS_MAX,
               "few rows' sums fit where panels are");
_Static_assert(FEW_COLUMNS % (int)QKV_FEW_COLS == 0, "runs of few rows are whole blocks");

int64_t qkv_projection_scratch(int32_t out_dtype)
{
    return out_dtype == QKV_F32 ? SUMS : SUMS + WIDE_OUT;
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

/* Copies one row of a panel or block. A copy of constant size is a few moves where
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

static const void *weight_at(const qkv_projection *p, int64_t row, int64_t column)
{
    return (const char *)p->weight + qkv_bytes(p->weight_dtype, row * p->weight_stride + column);
}

/* 'n' weights as f32: in place, or widened to 'wide'. */
static const float *wide_weights(const qkv_projection *p, const qkv_kernels *k, int64_t row,
                                 int64_t column, int64_t n, float *wide)
{
    const void *w = weight_at(p, row, column);
    if (p->weight_dtype == QKV_F32)
        return w;
    qkv_widen_typed(k, p->weight_dtype, w, NULL, wide, n);
    return wide;
}

/* Rows of weights are far apart: no hardware sees the next one coming. */
static void prefetch_weights(const qkv_projection *p, int64_t row, weight_run run)
{
    enum { CACHE_LINE = 64 };
    const char *w = weight_at(p, row, run.column);
    const int64_t bytes = qkv_bytes(p->weight_dtype, run.columns);
    for (int64_t at = 0; at < bytes; at += CACHE_LINE)
        QKV_PREFETCH(w + at);
}

/* Weights stored [in][out]: along each row once, a part to each panel. */
static void pack_in_out(const qkv_projection *p, const qkv_kernels *k, weight_run run,
                        int64_t first, float *packed, float *wide)
{
    enum { AHEAD = 4 }; /* rows */
    const int64_t panel_cols = k->gemm_cols;
    for (int64_t d = first; d < run.depths; d++) {
        if (d + AHEAD < run.depths)
            prefetch_weights(p, run.depth + d + AHEAD, run);
        const float *w = wide_weights(p, k, run.depth + d, run.column, run.columns, wide);
        float *panel = packed + d * panel_cols;
        for (int64_t c = 0; c < run.columns;
             c += panel_cols, panel += panel_stride(panel_cols, run))
            copy_panel_row(panel, w + c, min(panel_cols, run.columns - c));
    }
}

/* Four columns of a panel: rows of weights that are read side by side are
 * transposed in registers, by any compiler. */
static void transpose_4(const float *const w[4], int64_t depths, int64_t panel_cols, float *panel)
{
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    for (int64_t d = 0; d < depths; d++, panel += panel_cols)
        memcpy(panel, (const float[]){w0[d], w1[d], w2[d], w3[d]}, 4 * sizeof *panel);
}

/* Weights stored [out][in]: each row is a column of a panel. */
static void pack_out_in(const qkv_projection *p, const qkv_kernels *k, weight_run run,
                        float *packed, float *wide)
{
    const int64_t panel_cols = k->gemm_cols;
    int64_t here;
    for (int64_t c = 0; c < run.columns; c += here) {
        float *panel = packed + c / panel_cols * panel_stride(panel_cols, run) + c % panel_cols;
        here = run.columns - c < 4 ? 1 : 4;
        const float *w[4];
        for (int64_t i = 0; i < here; i++)
            w[i] =
                wide_weights(p, k, run.column + c + i, run.depth, run.depths, wide + i * DEPTH_RUN);
        if (here == 4)
            transpose_4(w, run.depths, panel_cols, panel);
        else
            for (int64_t d = 0; d < run.depths; d++)
                panel[d * panel_cols] = w[0][d];
    }
}

/*
 * Panels panel[k][c] = W[k][column + c], the last one filled up with zeros,
 * from the depth 'first' on.
 */
static void pack_run(const qkv_projection *p, const qkv_kernels *k, weight_run run, int64_t first,
                     float *packed, float *wide)
{
    const int64_t panel_cols = k->gemm_cols, whole = run.columns / panel_cols;
    if (run.columns > whole * panel_cols)
        memset(packed + whole * panel_stride(panel_cols, run), 0,
               (size_t)(run.depths * panel_cols) * sizeof *packed);
    if (p->weight_out_in)
        pack_out_in(p, k, run, packed, wide);
    else
        pack_in_out(p, k, run, first, packed, wide);
}

/* Some rows of the input, over the depth of a run of weights. */
typedef struct input_run {
    const float *x;
    int64_t stride;
} input_run;

/* A worker's copy of a run, and which one it is. */
typedef struct input_copy {
    float *rows; /* [rows][copy_stride()] */
    int64_t batch, row, depth;
} input_copy;

enum { PAGE_FLOATS = 1024, LINE_FLOATS = 16 };

static int64_t copy_stride(int64_t depths)
{
    return depths % PAGE_FLOATS == 0 ? depths + LINE_FLOATS : depths;
}

static input_run input_at(const qkv_projection *p, const qkv_kernels *k, int64_t batch, int64_t row,
                          int64_t rows, weight_run run, input_copy *copy)
{
    const int32_t dtype = p->input.dtype;
    const int64_t stride = p->input.stride[QKV_AXIS_ROW];
    const int64_t at = qkv_bytes(dtype, run.depth), step = qkv_bytes(dtype, stride);
    const char *x = (const char *)qkv_view_row(&p->input, batch, 0, row) + at;
    if (dtype == QKV_F32 && (rows == 1 || stride % PAGE_FLOATS != 0))
        return (input_run){(const float *)(const void *)x, stride};

    /* Runs of weights side by side read the same part of the input. */
    const int64_t to = copy_stride(run.depths);
    if (copy->batch != batch || copy->row != row || copy->depth != run.depth)
        for (int64_t i = 0; i < rows; i++)
            qkv_widen_typed(k, dtype, x + i * step, NULL, copy->rows + i * to, run.depths);
    copy->batch = batch, copy->row = row, copy->depth = run.depth;
    return (input_run){copy->rows, to};
}

/*
 * Packing the next run while one is multiplied: kernel calls copy an equal
 * share of it each. Only weights stored [in][out] whose columns fill whole
 * panels are copied so.
 */
typedef struct packing {
    weight_run run;
    float *packed, *wide;
    qkv_gemm_copy copy;  /* what is next */
    int64_t left, share; /* pieces of panel_cols in all and a call */
} packing;

static packing start_packing(const qkv_projection *p, int64_t panel_cols, weight_run run,
                             weight_run next, float *packed, float *wide)
{
    packing result = {.run = next, .packed = packed, .wide = wide};
    if (p->weight_out_in || next.columns % panel_cols != 0)
        return result;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    const int64_t calls = p->input.count[QKV_AXIS_BATCH] * ((rows + ROW_RUN - 1) / ROW_RUN) *
                          ((run.columns + panel_cols - 1) / panel_cols);
    result.copy = (qkv_gemm_copy){.from = weight_at(p, next.depth, next.column),
                                  .to = packed,
                                  .dtype = p->weight_dtype,
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
static void finish_packing(const qkv_projection *p, const qkv_kernels *k, const packing *next)
{
    const weight_run run = next->run;
    const bool copied = next->copy.panels > 0;
    const int64_t rows =
        copied ? run.depths - (next->left + next->copy.panels - 1) / next->copy.panels : 0;
    if (rows < run.depths)
        pack_run(p, k, run, rows, next->packed, next->wide);
}

static void multiply_run(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                         weight_run run, const float *packed, packing *next, input_copy *copy)
{
    const int64_t head = run.column / p->out.dim, column = run.column % p->out.dim;
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    for (int64_t i = 0; i < rows; i += ROW_RUN) {
        const int64_t here = min(ROW_RUN, rows - i);
        const input_run input = input_at(p, k, batch, i, here, run, copy);
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

/* Where a worker's scratch memory is what. */
typedef struct project_scratch {
    float *packed[2], *input, *wide, *sums; /* one after the other */
} project_scratch;

/* An output of f32. */
static void run_f32(const qkv_projection *p, const qkv_kernels *k, const project_scratch *s)
{
    input_copy copy = {.rows = s->input, .batch = -1};
    weight_run run = run_at(p, 0, 0);
    pack_run(p, k, run, 0, s->packed[0], s->wide);
    for (int turn = 0; run.columns > 0; turn = 1 - turn) {
        packing next =
            start_packing(p, k->gemm_cols, run, run_after(p, run), s->packed[1 - turn], s->wide);
        for (int64_t b = 0; b < p->input.count[QKV_AXIS_BATCH]; b++)
            multiply_run(p, k, b, run, s->packed[turn], &next, &copy);
        finish_packing(p, k, &next);
        run = next.run;
    }
}

/* ---------------------------------------------------------------- few rows */

/*
 * With few rows the weights take most of the time, and are read once, where
 * they lie, instead of being packed:
 *
 *     for each run of columns
 *         for each run of the depth
 *             for each 8 or 16 rows of weights
 *                 for each few rows of the input: one kernel call
 *
 * Weights stored [out][in] are read along their rows too, those of a few columns
 * through the whole depth, with one kernel call a run.
 *
 * Sums lie in blocks of columns, all rows of a block together: with rows of 4096
 * sums they and 8 rows of weights would all fall into the same few sets of the
 * first-level cache. On a Zen 3, 6 rows of 4096 x 4096 take a quarter less time so.
 *
 * The sums of a run of depth are added to those of the runs before it, as the
 * panels' are: a row has the same bits on both ways.
 */
typedef struct few_sums {
    float *run, *all; /* [blocks of columns][rows][QKV_FEW_COLS] */
    int64_t rows, column, columns;
} few_sums;

/* Row i of the block that begins with column c. */
static float *few_at(const few_sums *s, float *sums, int64_t i, int64_t c)
{
    return sums + c * s->rows + i * QKV_FEW_COLS;
}

/* The floats of all blocks, the last one whole. */
static int64_t few_floats(const few_sums *s)
{
    return s->rows * ((s->columns + QKV_FEW_COLS - 1) / QKV_FEW_COLS * QKV_FEW_COLS);
}

static void add_few_run(const few_sums *s)
{
    for (int64_t i = 0; i < few_floats(s); i++)
        s->all[i] += s->run[i];
}

static void start_few(const qkv_projection *p, const few_sums *s)
{
    const int64_t block = s->rows * QKV_FEW_COLS, last = few_floats(s) - block;
    memset(s->all, 0, (size_t)few_floats(s) * sizeof *s->all);
    memset(s->run + last, 0, (size_t)block * sizeof *s->run); /* no kernel fills it up */
    for (int64_t c = 0; c < s->columns && p->bias; c += QKV_FEW_COLS)
        for (int64_t i = 0; i < s->rows; i++)
            copy_panel_row(few_at(s, s->all, i, c), p->bias + s->column + c,
                           min(QKV_FEW_COLS, s->columns - c));
}

/* To the heads that the columns belong to, through a row where the runs' sums were. */
static void store_few(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                      const few_sums *s)
{
    float *row = s->run;
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t here;
        for (int64_t c = 0; c < s->columns; c += QKV_FEW_COLS)
            copy_panel_row(row + c, few_at(s, s->all, i, c), min(QKV_FEW_COLS, s->columns - c));
        for (int64_t c = 0; c < s->columns; c += here) {
            const int64_t head = (s->column + c) / p->out.dim, first = (s->column + c) % p->out.dim;
            char *out = qkv_view_row(&p->out, batch, head, i);
            here = min(p->out.dim - first, s->columns - c);
            qkv_narrow_typed(k, p->out.dtype, row + c, out + qkv_bytes(p->out.dtype, first), NULL,
                             here);
        }
    }
}

/* Rows for the next call: the same number in each, or one more. */
static int64_t next_few(const qkv_kernels *k, int64_t rows)
{
    const int64_t calls = (rows + k->few_rows - 1) / k->few_rows;
    return (rows + calls - 1) / calls;
}

/* What of the input to copy at a time: all of it, once, if there is room. */
static weight_run few_input(const qkv_projection *p, const few_sums *s, int64_t depth)
{
    if (s->rows * copy_stride(p->input.dim) <= FEW_INPUT)
        return (weight_run){.depths = p->input.dim};
    return (weight_run){.depth = depth, .depths = min(DEPTH_RUN, p->input.dim - depth)};
}

static void multiply_few(const qkv_projection *p, const qkv_kernels *k, int64_t batch,
                         const few_sums *s, input_copy *copy)
{
    for (int64_t depth = 0; depth < p->input.dim; depth += DEPTH_RUN) {
        const int64_t depths = min(DEPTH_RUN, p->input.dim - depth);
        const weight_run part = few_input(p, s, depth);
        const input_run input = input_at(p, k, batch, 0, s->rows, part, copy);
        const float *x = input.x + depth - part.depth;
        const int64_t most = p->weight_out_in ? DEPTH_RUN : k->few_depth;
        for (int64_t d = 0; d < depths; d += most) {
            for (int64_t n, i = 0; i < s->rows; i += n) {
                n = next_few(k, s->rows - i);
                k->gemm_few(&(qkv_gemm_few_args){.x = x + i * input.stride + d,
                                                 .w = p->weight_out_in
                                                          ? weight_at(p, s->column, depth + d)
                                                          : weight_at(p, depth + d, s->column),
                                                 .sums = few_at(s, s->run, i, 0),
                                                 .x_stride = input.stride,
                                                 .w_stride = p->weight_stride,
                                                 .sums_stride = QKV_FEW_COLS,
                                                 .sums_block = s->rows * QKV_FEW_COLS,
                                                 .rows = n,
                                                 .cols = s->columns,
                                                 .depth = min(most, depths - d),
                                                 .dtype = p->weight_dtype,
                                                 .begin = d == 0,
                                                 .out_in = p->weight_out_in});
            }
        }
        add_few_run(s);
    }
}

static void run_few(const qkv_projection *p, const qkv_kernels *k, const project_scratch *scratch)
{
    const int64_t columns = p->out.dim * p->out.count[QKV_AXIS_HEAD];
    const int64_t rows = p->input.count[QKV_AXIS_ROW];
    const int64_t room = PACKED_RUN / 2 / rows / QKV_FEW_COLS * QKV_FEW_COLS;
    const int64_t most = p->weight_out_in ? k->few_depth : min(FEW_COLUMNS, room);
    few_sums s = {
        .run = scratch->packed[0], .all = scratch->packed[0] + PACKED_RUN / 2, .rows = rows};
    input_copy copy = {.rows = scratch->packed[1], .batch = -1};
    for (int64_t b = 0; b < p->input.count[QKV_AXIS_BATCH]; b++) {
        for (s.column = 0; s.column < columns; s.column += s.columns) {
            s.columns = min(most, columns - s.column);
            start_few(p, &s);
            multiply_few(p, k, b, &s, &copy);
            store_few(p, k, b, &s);
        }
    }
}

/* ----------------------------------------------------- outputs of 16 bits */

/* Some rows and columns of a projection, all of one batch and head. */
typedef struct out_block {
    int64_t batch, row, rows, head, column, columns;
} out_block;

/* That block as a projection of its own, with an output of f32. */
static qkv_projection part_of(const qkv_projection *p, out_block b, float *sums)
{
    const int64_t column = b.head * p->out.dim + b.column;
    const int64_t first = p->weight_out_in ? column * p->weight_stride : column;
    qkv_projection part = *p;
    part.input.data = qkv_view_row(&p->input, b.batch, 0, b.row);
    part.input.count[QKV_AXIS_BATCH] = 1;
    part.input.count[QKV_AXIS_ROW] = b.rows;
    part.weight = (const char *)p->weight + qkv_bytes(p->weight_dtype, first);
    part.bias = p->bias ? p->bias + column : NULL;
    part.out = (qkv_view){
        .data = sums, .count = {1, 1, b.rows}, .stride = {0, 0, b.columns}, .dim = b.columns};
    return part;
}

static void run_block(const qkv_projection *p, const qkv_kernels *k, out_block b,
                      const project_scratch *s)
{
    const qkv_projection part = part_of(p, b, s->sums);
    run_f32(&part, k, s);
    for (int64_t i = 0; i < b.rows; i++) {
        char *row = qkv_view_row(&p->out, b.batch, b.head, b.row + i);
        qkv_narrow_typed(k, p->out.dtype, s->sums + i * b.columns,
                         row + qkv_bytes(p->out.dtype, b.column), NULL, b.columns);
    }
}

/* An output of 16 bits: blocks that are as wide as their rows allow. */
static void run_narrow(const qkv_projection *p, const qkv_kernels *k, const project_scratch *s)
{
    const int64_t all = p->input.count[QKV_AXIS_ROW];
    out_block b = {.batch = 0};
    for (; b.batch < p->input.count[QKV_AXIS_BATCH]; b.batch++) {
        for (b.row = 0; b.row < all; b.row += b.rows) {
            b.rows = min(WIDE_ROWS, all - b.row);
            const int64_t most = WIDE_OUT / b.rows / COLUMN_RUN * COLUMN_RUN;
            for (b.head = 0; b.head < p->out.count[QKV_AXIS_HEAD]; b.head++) {
                for (b.column = 0; b.column < p->out.dim; b.column += b.columns) {
                    b.columns = min(most, p->out.dim - b.column);
                    run_block(p, k, b, s);
                }
            }
        }
    }
}

/* Up to so many rows the weights stay where they lie. */
static int64_t few_rows(const qkv_projection *p, const qkv_kernels *k)
{
    if (p->weight_out_in)
        return FEW_ROWS_OUT_IN;
    return k->few_rows > FEW_ROWS ? k->few_rows : FEW_ROWS;
}

void qkv_run_projection(const qkv_projection *projection, const qkv_kernels *k, float *scratch)
{
    qkv_projection p = *projection;
    join_heads(&p.out);
    join_batches(&p);
    const project_scratch s = {.packed = {scratch, scratch + PACKED_RUN},
                               .input = scratch + 2 * PACKED_RUN,
                               .wide = scratch + SUMS - WIDE_RUN,
                               .sums = scratch + SUMS};
    if (p.input.count[QKV_AXIS_ROW] <= few_rows(&p, k))
        run_few(&p, k, &s);
    else if (p.out.dtype == QKV_F32)
        run_f32(&p, k, &s);
    else
        run_narrow(&p, k, &s);
}
