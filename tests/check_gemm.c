/* SPDX-License-Identifier: MIT */
#include "checks.h"
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_X, SLOT_PANEL, SLOT_BIAS, SLOT_Y, SLOT_ONE, SLOT_FROM, SLOT_TO, SLOT_NARROW };
enum { WANT, BOUND };

typedef struct gemm_case {
    int64_t rows, cols, depth, pad;
    int place;
    bool bias, accumulate, integers;
} gemm_case;

static void want_rows(const qkv_gemm_args *a, int64_t panel_cols, double *want, double *bound)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t c = 0; c < a->cols; c++) {
            double before = 0, sum = 0, absolute = 0;
            if (a->accumulate)
                before = (double)a->y[i * a->y_stride + c];
            else if (a->bias)
                before = (double)a->bias[c];
            for (int64_t k = 0; k < a->depth; k++) {
                const double product =
                    (double)a->x[i * a->x_stride + k] * (double)a->panel[k * panel_cols + c];
                sum += product;
                absolute += fabs(product);
            }
            want[i * a->cols + c] = before + sum;
            bound[i * a->cols + c] = (double)(a->depth + 2) * ORACLE_U * (absolute + fabs(before)) +
                                     (double)a->depth * ORACLE_TINY;
        }
    }
}

static void check_rows_alone(const test_isa *isa, const qkv_gemm_args *a, const float *before)
{
    for (int64_t i = 0; i < a->rows; i++) {
        qkv_gemm_args one = *a;
        one.rows = 1;
        one.x += i * a->x_stride;
        one.y = guarded(SLOT_ONE, a->cols, (int)(1 + (i * 7 + 3) % (PLACES - 1)));
        memcpy(one.y, before + i * a->y_stride, (size_t)a->cols * sizeof *one.y);
        isa->table->gemm_f32(&one);
        guards_intact();
        expect_same_bits("the row alone", one.y, a->y + i * a->y_stride, a->cols);
    }
}

static void check_case(const test_isa *isa, rng *r, gemm_case c)
{
    context("gemm_f32 on %s: rows %lld, cols %lld, depth %lld, pad %lld, place %d, bias %d, "
            "accumulate %d",
            isa->name, (long long)c.rows, (long long)c.cols, (long long)c.depth, (long long)c.pad,
            c.place, c.bias, c.accumulate);
    const int64_t panel_cols = isa->table->gemm_cols;
    qkv_gemm_args a = {.x_stride = c.depth + c.pad,
                       .y_stride = c.cols + c.pad,
                       .rows = c.rows,
                       .cols = c.cols,
                       .depth = c.depth,
                       .accumulate = c.accumulate};
    float *x = guarded(SLOT_X, (c.rows - 1) * a.x_stride + c.depth, c.place);
    float *panel = guarded(SLOT_PANEL, c.depth * panel_cols, c.place % 2);
    float *bias = guarded(SLOT_BIAS, c.cols, c.place);
    const int64_t y_extent = (c.rows - 1) * a.y_stride + c.cols;
    float *y = guarded(SLOT_Y, y_extent, c.place ? 1 + (c.place + 6) % (PLACES - 1) : 0);
    for (int64_t i = 0; i < c.rows; i++) {
        if (c.integers)
            fill_integers(r, x + i * a.x_stride, c.depth, 8);
        else
            fill_normal(r, x + i * a.x_stride, c.depth, 1.0f);
        if (c.accumulate)
            fill_integers(r, y + i * a.y_stride, c.cols, 50);
    }
    for (int64_t k = 0; k < c.depth; k++) {
        memset(panel + k * panel_cols, 0, (size_t)panel_cols * sizeof *panel);
        if (c.integers)
            fill_integers(r, panel + k * panel_cols, c.cols, 8);
        else
            fill_normal(r, panel + k * panel_cols, c.cols, 1.0f);
    }
    fill_integers(r, bias, c.cols, 100);
    a.x = x;
    a.panel = panel;
    a.y = y;
    a.bias = c.bias ? bias : NULL;

    static float before[64 * 200];
    memcpy(before, y, (size_t)y_extent * sizeof *before);
    double *want = doubles(WANT, c.rows * c.cols), *bound = doubles(BOUND, c.rows * c.cols);
    want_rows(&a, panel_cols, want, bound);
    if (c.integers)
        memset(bound, 0, (size_t)(c.rows * c.cols) * sizeof *bound); /* sums are exact */
    guarded_freeze(SLOT_X);
    guarded_freeze(SLOT_PANEL);
    guarded_freeze(SLOT_BIAS);
    isa->table->gemm_f32(&a);
    guards_intact();
    gaps_intact("y", y, c.rows, a.y_stride, c.cols);
    expect_close_rows("y", y, a.y_stride, want, bound, c.rows, c.cols);
    check_rows_alone(isa, &a, before);
    tally(isa->id, 1);
}

/* A NaN in one row of x reaches that row; in a panel column, that column. */
static void check_special(const test_isa *isa)
{
    const int64_t cols = isa->table->gemm_cols, rows = 9, depth = 11;
    for (int64_t at = 0; at < rows * depth; at++) {
        context("gemm_f32 on %s: NaN at %lld", isa->name, (long long)at);
        float *x = guarded(SLOT_X, rows * depth, PLACE_AT_END);
        float *panel = guarded(SLOT_PANEL, depth * cols, PLACE_AT_END);
        float *y = guarded(SLOT_Y, rows * cols, PLACE_AT_END);
        for (int64_t i = 0; i < rows * depth; i++)
            x[i] = 1.0f;
        for (int64_t i = 0; i < depth * cols; i++)
            panel[i] = 1.0f;
        const int64_t bad_col = at % cols;
        x[at] = NAN;
        panel[at % depth * cols + bad_col] = INFINITY;
        const qkv_gemm_args a = {.x = x,
                                 .panel = panel,
                                 .y = y,
                                 .x_stride = depth,
                                 .y_stride = cols,
                                 .rows = rows,
                                 .cols = cols,
                                 .depth = depth};
        isa->table->gemm_f32(&a);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t c = 0; c < cols; c++) {
                const float want = i == at / depth ? NAN : c == bad_col ? INFINITY : (float)depth;
                expect_same_values("y", &y[i * cols + c], &want, 1);
            }
        }
        tally(isa->id, 1);
    }
}

/* A kernel copies all pieces that it is asked for and moves on, or none. */
static void check_copy(const test_isa *isa, rng *r)
{
    const int64_t cols = isa->table->gemm_cols, panels = rng_int(r, 1, 5);
    const int64_t depth = rng_int(r, 1, 40), rows = rng_int(r, 1, 27);
    const int64_t pieces = rng_int(r, 0, depth), first = rng_int(r, 0, panels - 1);
    const int64_t copied = (first + pieces + panels - 1) / panels, pad = rng_int(r, 0, 3);
    const int32_t dtype = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    context("gemm_f32 on %s: copy %lld of %lld panels from %lld, rows %lld, depth %lld, type %d",
            isa->name, (long long)pieces, (long long)panels, (long long)first, (long long)rows,
            (long long)depth, (int)dtype);
    const int64_t from_stride = panels * cols + pad, to_stride = (copied + 1) * cols;
    const int64_t extent = copied > 0 ? (copied - 1) * from_stride + panels * cols : 0;
    float *from = guarded(SLOT_FROM, extent, pad ? PLACE_AT_END : PLACE_AT_START);
    float *to = guarded(SLOT_TO, panels * to_stride, PLACE_AT_END);
    float *x = guarded(SLOT_X, rows * depth, PLACE_AT_END);
    float *panel = guarded(SLOT_PANEL, depth * cols, PLACE_AT_END);
    float *plain = guarded(SLOT_ONE, rows * cols, PLACE_AT_END);
    float *y = guarded(SLOT_Y, rows * cols, PLACE_AT_END);
    fill_normal(r, from, extent, 1.0f);
    fill_normal(r, x, rows * depth, 1.0f);
    fill_normal(r, panel, depth * cols, 1.0f);
    for (int64_t i = 0; i < panels * to_stride; i++)
        to[i] = -1.0f;
    const void *source = from;
    int64_t size = (int64_t)sizeof *from;
    if (dtype != QKV_F32) {
        uint16_t *narrow = guarded_16(SLOT_NARROW, extent, pad ? PLACE_AT_END : PLACE_AT_START);
        narrow_16(dtype, from, narrow, extent);
        widen_16(dtype, narrow, from, extent);
        source = narrow;
        size = (int64_t)sizeof *narrow;
    }

    qkv_gemm_copy copy = {.from = source,
                          .to = to,
                          .dtype = dtype,
                          .from_stride = from_stride,
                          .to_stride = to_stride,
                          .panel = first,
                          .panels = panels,
                          .pieces = pieces};
    qkv_gemm_args a = {.x = x,
                       .panel = panel,
                       .y = plain,
                       .x_stride = depth,
                       .y_stride = cols,
                       .rows = rows,
                       .cols = cols,
                       .depth = depth};
    isa->table->gemm_f32(&a);
    a.y = y;
    a.copy = &copy;
    guarded_freeze(dtype == QKV_F32 ? SLOT_FROM : SLOT_NARROW);
    isa->table->gemm_f32(&a);
    guards_intact();
    expect_same_bits("y beside a copy", y, plain, rows * cols);

    const int64_t done = pieces - copy.pieces, end = first + done;
    cr_assert(done == 0 || done == pieces);
    cr_assert_eq(copy.panel, end % panels);
    cr_assert_eq((const char *)copy.from - (const char *)source, end / panels * from_stride * size);
    cr_assert_eq(copy.to - to, end / panels * cols);
    for (int64_t p = 0; p < panels; p++) {
        for (int64_t i = 0; i <= copied; i++) {
            const int64_t piece = i * panels + p;
            for (int64_t c = 0; c < cols; c++) {
                const float want =
                    piece >= first && piece < end ? from[i * from_stride + p * cols + c] : -1.0f;
                expect_same_bits("copied", &to[p * to_stride + i * cols + c], &want, 1);
            }
        }
    }
    tally(isa->id, 1);
}

void check_gemm_f32(const test_isa *isa)
{
    rng r = rng_make("gemm_f32");
    const int64_t panel_cols = isa->table->gemm_cols;
    for (int64_t cols = 1; cols <= panel_cols; cols++)
        for (int64_t rows = 1; rows <= 35; rows++)
            if (effort_takes(rows + cols))
                check_case(isa, &r,
                           (gemm_case){.rows = rows,
                                       .cols = cols,
                                       .depth = rng_int(&r, 1, 20),
                                       .pad = rng_int(&r, 0, 3),
                                       .place = (int)((rows + cols) % PLACES),
                                       .bias = rows % 2,
                                       .accumulate = cols % 3 == 0,
                                       .integers = rows % 5 == 0});
    for (int64_t depth = 1; depth <= LENGTHS; depth++)
        check_case(isa, &r,
                   (gemm_case){.rows = rng_int(&r, 1, 13),
                               .cols = rng_int(&r, 1, panel_cols),
                               .depth = depth,
                               .place = (int)(depth % PLACES),
                               .bias = depth % 2,
                               .accumulate = depth % 3 == 0,
                               .integers = depth % 7 == 0});
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_case(isa, &r,
                   (gemm_case){.rows = rng_int(&r, 1, 60),
                               .cols = rng_int(&r, 1, panel_cols),
                               .depth = rng_int(&r, 1, i % 16 ? 500 : QKV_DOT_BLOCK),
                               .pad = rng_int(&r, 0, 9),
                               .place = (int)rng_int(&r, 0, PLACES - 1),
                               .bias = rng_int(&r, 0, 1),
                               .accumulate = rng_int(&r, 0, 1),
                               .integers = i % 9 == 0});
    for (int64_t i = effort_cases(300); i > 0; i--)
        check_copy(isa, &r);
    check_special(isa);
}

/* ----------------------------------------------------------------- few rows */

/* Piece by piece through the depth, against f64. */
static void check_few(const test_isa *isa, rng *r, int64_t rows, int64_t cols, int64_t depth)
{
    const int32_t dtype = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const bool out_in = rng_int(r, 0, 1);
    const int64_t pad = rng_int(r, 0, 3), most = out_in ? rng_int(r, 1, 40) : isa->table->few_depth;
    const int place = (int)rng_int(r, 0, PLACES - 1);
    context("gemm_few on %s: rows %lld, cols %lld, depth %lld, type %d, %s, pad %lld, place %d",
            isa->name, (long long)rows, (long long)cols, (long long)depth, (int)dtype,
            out_in ? "[out][in]" : "[in][out]", (long long)pad, place);
    const int64_t w_rows = out_in ? cols : depth, w_cols = out_in ? depth : cols;
    const int64_t counts[3] = {1, 1, w_rows}, strides[3] = {0, 0, w_cols + pad};
    float *x = guarded(SLOT_X, (rows - 1) * (depth + pad) + depth, place);
    float *w = guarded(SLOT_PANEL, (w_rows - 1) * (w_cols + pad) + w_cols, place);
    const tensor matrix = tensor_at(w, counts, strides, w_cols);
    const int64_t blocks = (cols + QKV_FEW_COLS - 1) / QKV_FEW_COLS;
    const int64_t last = cols - (blocks - 1) * QKV_FEW_COLS;
    const bool blocked = rng_int(r, 0, 1);
    const int64_t stride = blocked ? QKV_FEW_COLS + pad : cols + pad;
    const int64_t block = blocked ? rows * stride : QKV_FEW_COLS;
    float *sums = guarded(SLOT_Y, (rows - 1) * stride + (blocks - 1) * block + last, place);
    for (int64_t i = 0; i < rows; i++)
        fill_normal(r, x + i * (depth + pad), depth, 1.0f);
    tensor_fill(&matrix, r, 1.0f);
    const char *weights = tensor_stored(&matrix, dtype, SLOT_NARROW, place).data;
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    guarded_freeze(SLOT_X);
    guarded_freeze(dtype == QKV_F32 ? SLOT_PANEL : SLOT_NARROW);
    for (int64_t d = 0; d < depth; d += most) {
        isa->table->gemm_few(
            &(qkv_gemm_few_args){.x = x + d,
                                 .w = weights + (out_in ? d : d * (w_cols + pad)) * size,
                                 .sums = sums,
                                 .x_stride = depth + pad,
                                 .w_stride = w_cols + pad,
                                 .sums_stride = stride,
                                 .sums_block = block,
                                 .rows = rows,
                                 .cols = cols,
                                 .depth = depth - d < most ? depth - d : most,
                                 .dtype = dtype,
                                 .begin = d == 0,
                                 .out_in = out_in});
        guards_intact();
        if (!blocked)
            gaps_intact("sums", sums, rows, stride, cols);
        for (int64_t b = 0; b < blocks && blocked; b++)
            gaps_intact("sums of a block", sums + b * block, b < blocks - 1 ? rows + 1 : rows,
                        stride, b < blocks - 1 ? QKV_FEW_COLS : last);
    }

    float *packed = scratch_alloc((size_t)((depth > rows ? depth : rows) * cols) * sizeof *packed);
    for (int64_t k = 0; k < depth; k++)
        for (int64_t c = 0; c < cols; c++)
            packed[k * cols + c] = out_in ? w[c * (w_cols + pad) + k] : w[k * (w_cols + pad) + c];
    double *want = doubles(WANT, rows * cols), *bound = doubles(BOUND, rows * cols);
    const qkv_gemm_args a = {.x = x,
                             .panel = packed,
                             .x_stride = depth + pad,
                             .rows = rows,
                             .cols = cols,
                             .depth = depth};
    want_rows(&a, cols, want, bound);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++)
            packed[i * cols + c] = sums[i * stride + c / QKV_FEW_COLS * block + c % QKV_FEW_COLS];
    expect_close_rows("sums", packed, cols, want, bound, rows, cols);
    free(packed);
    tally(isa->id, 1);
}

/* The sums have the bits of gemm_f32's, so that a row is the same on both ways. */
static void check_few_bits(const test_isa *isa, rng *r)
{
    const int64_t cols = isa->table->gemm_cols, rows = rng_int(r, 1, isa->table->few_rows);
    const int64_t depth = rng_int(r, 1, 300);
    context("gemm_few and gemm_f32 on %s: rows %lld, depth %lld", isa->name, (long long)rows,
            (long long)depth);
    float *x = guarded(SLOT_X, rows * depth, PLACE_AT_END);
    float *panel = guarded(SLOT_PANEL, depth * cols, PLACE_AT_END);
    float *y = guarded(SLOT_Y, rows * cols, PLACE_AT_END);
    float *sums = guarded(SLOT_ONE, rows * cols, PLACE_AT_END);
    fill_normal(r, x, rows * depth, 1.0f);
    fill_normal(r, panel, depth * cols, 1.0f);
    isa->table->gemm_f32(&(qkv_gemm_args){.x = x,
                                          .panel = panel,
                                          .y = y,
                                          .x_stride = depth,
                                          .y_stride = cols,
                                          .rows = rows,
                                          .cols = cols,
                                          .depth = depth});
    for (int64_t d = 0; d < depth; d += isa->table->few_depth)
        isa->table->gemm_few(
            &(qkv_gemm_few_args){.x = x + d,
                                 .w = panel + d * cols,
                                 .sums = sums,
                                 .x_stride = depth,
                                 .w_stride = cols,
                                 .sums_stride = cols,
                                 .sums_block = QKV_FEW_COLS,
                                 .rows = rows,
                                 .cols = cols,
                                 .depth = depth - d < isa->table->few_depth ? depth - d : isa->table->few_depth,
                                 .begin = d == 0});
    guards_intact();
    expect_same_bits("sums", sums, y, rows * cols);

    float *turned = guarded(SLOT_FROM, depth * cols, PLACE_AT_END);
    for (int64_t k = 0; k < depth; k++)
        for (int64_t c = 0; c < cols; c++)
            turned[c * depth + k] = panel[k * cols + c];
    isa->table->gemm_few(&(qkv_gemm_few_args){.x = x,
                                              .w = turned,
                                              .sums = sums,
                                              .x_stride = depth,
                                              .w_stride = depth,
                                              .sums_stride = cols,
                                              .sums_block = QKV_FEW_COLS,
                                              .rows = rows,
                                              .cols = cols,
                                              .depth = depth,
                                              .begin = true,
                                              .out_in = true});
    guards_intact();
    expect_same_bits("sums of [out][in]", sums, y, rows * cols);
    tally(isa->id, 1);
}

void check_gemm_few(const test_isa *isa)
{
    rng r = rng_make("gemm_few");
    for (int64_t cols = 1; cols <= 50; cols++)
        for (int64_t rows = 1; rows <= isa->table->few_rows; rows++)
            if (effort_takes(rows + cols))
                check_few(isa, &r, rows, cols, rng_int(&r, 1, 20));
    for (int64_t i = effort_cases(100); i > 0; i--) {
        check_few(isa, &r, rng_int(&r, 1, isa->table->few_rows), rng_int(&r, 1, 300), rng_int(&r, 1, 300));
        check_few_bits(isa, &r);
    }
}
