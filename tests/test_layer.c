/* SPDX-License-Identifier: MIT */
/* qkv_project() and qkv_self_attention() against the oracle. */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"

enum { SLOT_INPUT, SLOT_W, SLOT_OUT, SLOT_BIAS, SLOT_LSE };
/* The same in 16 bits: after SLOT_FREE, which is for what a test needs else. */
enum { SLOT_INPUT_16 = SLOT_FREE + 4, SLOT_OUT_16, SLOT_W_16 };
enum { D_X, D_Y, D_BOUND };

/* -------------------------------------------------------------- projection */

typedef struct project_case {
    int64_t batch, rows, in, heads, dim, pad;
    layout input, out;
    bool out_in, bias;
    int place;
    int32_t x_type, w_type, y_type;
} project_case;

/* The weights as the oracle takes them, [in][out], from either storage. */
static float *weights_in_out(const float *w, int64_t stride, int64_t in, int64_t out, bool out_in)
{
    float *copy = malloc((size_t)(in * out + 1) * sizeof *copy);
    for (int64_t k = 0; k < in; k++)
        for (int64_t c = 0; c < out; c++)
            copy[k * out + c] = out_in ? w[c * stride + k] : w[k * stride + c];
    return copy;
}

/* With an output of 16 bits it is the f32 output 'y', rounded. */
static void check_project_rounded(const qkv_project_desc *wide, const tensor *y, int32_t dtype,
                                  int place)
{
    qkv_project_desc d = *wide;
    size_t bytes = 0;
    d.out = tensor_narrow(y, dtype, SLOT_OUT_16, place);
    cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
    cr_assert_eq(qkv_project(&d, guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START), bytes),
                 QKV_OK);
    guards_intact();
    tensor_expect_rounded("16-bit output", y, &d.out);
}

static void check_project(rng *r, project_case c)
{
    context("qkv_project: batch %lld, rows %lld, in %lld, heads %lld, dim %lld, pad %lld, "
            "layouts %d %d, %s, bias %d, place %d, types %d %d %d",
            (long long)c.batch, (long long)c.rows, (long long)c.in, (long long)c.heads,
            (long long)c.dim, (long long)c.pad, (int)c.input, (int)c.out,
            c.out_in ? "[out][in]" : "[in][out]", c.bias, c.place, (int)c.x_type, (int)c.w_type,
            (int)c.y_type);
    const int64_t width = c.heads * c.dim;
    const int64_t w_rows = c.out_in ? width : c.in, w_cols = c.out_in ? c.in : width;
    const int64_t w_stride = w_cols + c.pad;
    tensor x = tensor_make(SLOT_INPUT, c.batch, 1, c.rows, c.in, c.input, c.place);
    tensor y = tensor_make(SLOT_OUT, c.batch, c.heads, c.rows, c.dim, c.out, c.place);
    float *w = guarded(SLOT_W, (w_rows - 1) * w_stride + w_cols, c.place);
    float *bias = guarded(SLOT_BIAS, width, c.place);
    tensor_fill(&x, r, 1.0f);
    for (int64_t k = 0; k < w_rows; k++)
        fill_normal(r, w + k * w_stride, w_cols, 0.5f);
    fill_normal(r, bias, width, 3.0f);
    const qkv_tensor input = tensor_stored(&x, c.x_type, SLOT_INPUT_16, c.place);
    const int64_t w_counts[3] = {1, 1, w_rows}, w_strides[3] = {0, 0, w_stride};
    const tensor matrix = tensor_at(w, w_counts, w_strides, w_cols);
    const void *weight = tensor_stored(&matrix, c.w_type, SLOT_W_16, c.place).data;

    float *plain = weights_in_out(w, w_stride, c.in, width, c.out_in);
    double *want = doubles(D_Y, c.batch * c.rows * width);
    double *bound = doubles(D_BOUND, c.batch * c.rows * width);
    oracle_linear(tensor_doubles(&x, D_X), NULL, plain, c.bias ? bias : NULL, c.batch * c.rows,
                  c.in, width, want, bound);
    free(plain);

    const qkv_project_desc d = {.size = sizeof d,
                                .flags = c.out_in ? QKV_WEIGHT_OUT_IN : 0,
                                .batch = c.batch,
                                .rows = c.rows,
                                .in_dim = c.in,
                                .heads = c.heads,
                                .head_dim = c.dim,
                                .input = input,
                                .linear = {.weight = weight,
                                           .stride = c.pad ? w_stride : 0,
                                           .bias = c.bias ? bias : NULL,
                                           .dtype = c.w_type},
                                .out = y.desc};
    for_each_isa(isa)
    {
        size_t bytes = 0;
        cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        canary_fill(y.data, y.extent);
        const qkv_status status = qkv_project(&d, scratch, bytes);
        if (status != QKV_OK)
            fail_with("%s: %s", qkv_isa_name(), qkv_strerror(status));
        guards_intact();
        for (int64_t b = 0; b < c.batch; b++) {
            for (int64_t h = 0; h < c.heads; h++) {
                for (int64_t i = 0; i < c.rows; i++) {
                    const int64_t at = (b * c.rows + i) * width + h * c.dim;
                    expect_close(qkv_isa_name(), tensor_row(&y, b, h, i), want + at, bound + at,
                                 c.dim);
                }
            }
        }
        if (c.y_type != QKV_F32)
            check_project_rounded(&d, &y, c.y_type, c.place);
        tensor_only_rows_written("out", &y);
        tally(isa, 1);
    }
}

Test(layer, project)
{
    rng r = rng_make("project");
    for (int64_t in = 1; in <= 70; in++)
        if (effort_takes(in))
            check_project(&r, (project_case){.batch = 1,
                                             .rows = 5,
                                             .in = in,
                                             .heads = 1,
                                             .dim = 1 + in * 3 % 40,
                                             .out_in = in % 2,
                                             .bias = in % 3,
                                             .place = (int)(in % PLACES)});
    for (int64_t i = effort_cases(150); i > 0; i--)
        check_project(&r, (project_case){.batch = rng_int(&r, 1, 3),
                                         .rows = rng_int(&r, 1, 110),
                                         .in = rng_int(&r, 1, i % 8 ? 90 : 600),
                                         .heads = rng_int(&r, 1, 4),
                                         .dim = rng_int(&r, 1, 80),
                                         .pad = rng_int(&r, 0, 4),
                                         .input = (layout)rng_int(&r, 0, LAYOUTS - 1),
                                         .out = (layout)rng_int(&r, 0, LAYOUT_PADDED),
                                         .out_in = rng_int(&r, 0, 1),
                                         .bias = rng_int(&r, 0, 1),
                                         .place = (int)rng_int(&r, 0, PLACES - 1)});
    for (int64_t i = effort_cases(150); i > 0; i--)
        check_project(&r, (project_case){.batch = rng_int(&r, 1, 3),
                                         .rows = rng_int(&r, 1, i % 4 ? 20 : 300),
                                         .in = rng_int(&r, 1, i % 8 ? 90 : 600),
                                         .heads = rng_int(&r, 1, 4),
                                         .dim = rng_int(&r, 1, i % 5 ? 80 : 300),
                                         .pad = rng_int(&r, 0, 4),
                                         .input = (layout)rng_int(&r, 0, LAYOUTS - 1),
                                         .out = (layout)rng_int(&r, 0, LAYOUT_PADDED),
                                         .out_in = rng_int(&r, 0, 1),
                                         .bias = rng_int(&r, 0, 1),
                                         .place = (int)rng_int(&r, 0, PLACES - 1),
                                         .x_type = (int32_t)rng_int(&r, QKV_F32, QKV_BF16),
                                         .w_type = (int32_t)rng_int(&r, QKV_F32, QKV_BF16),
                                         .y_type = (int32_t)rng_int(&r, QKV_F32, QKV_BF16)});
    check_project(&r, (project_case){.batch = 1, .rows = 2, .in = 4100, .heads = 1, .dim = 7});
    /* Few rows: more columns than at a time; inputs whose rows would crowd in the
     * caches; more of them than are copied at once. */
    check_project(
        &r, (project_case){.batch = 1, .rows = 7, .in = 20, .heads = 1, .dim = 4120, .bias = true});
    check_project(
        &r,
        (project_case){.batch = 2, .rows = 6, .in = 2048, .heads = 1, .dim = 20, .out_in = true});
    check_project(&r, (project_case){.batch = 1,
                                     .rows = 30,
                                     .in = 4100,
                                     .heads = 1,
                                     .dim = 17,
                                     .out_in = true,
                                     .x_type = QKV_F16});
    for (int64_t rows = 1; rows <= 3; rows++)
        check_project(&r, (project_case){.batch = 3,
                                         .rows = rows,
                                         .in = 9,
                                         .heads = 1,
                                         .dim = 10,
                                         .input = LAYOUT_PADDED,
                                         .out = LAYOUT_PADDED});
    /* Several blocks of an output that is rounded. */
    check_project(&r,
                  (project_case){
                      .batch = 1, .rows = 200, .in = 8, .heads = 1, .dim = 300, .y_type = QKV_F16});
    check_project(
        &r,
        (project_case){.batch = 1, .rows = 3, .in = 8, .heads = 3, .dim = 300, .out = LAYOUT_BSHD});
}

/* The bits of a row do not depend on how many rows there are, whatever the types. */
static void check_rows_alone(rng *r, int64_t rows, int64_t in, int64_t out, bool out_in)
{
    const int32_t type = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const int32_t y_type = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    context("rows alone: rows %lld, in %lld, out %lld, %s, types %d %d", (long long)rows,
            (long long)in, (long long)out, out_in ? "[out][in]" : "[in][out]", (int)type,
            (int)y_type);
    tensor x = tensor_make(SLOT_INPUT, 1, 1, rows, in, LAYOUT_PACKED, PLACE_AT_END);
    tensor w = tensor_make(SLOT_W, 1, 1, out_in ? out : in, out_in ? in : out, LAYOUT_PACKED,
                           PLACE_AT_END);
    tensor_fill(&x, r, 1.0f);
    tensor_fill(&w, r, 1.0f);
    const size_t row_bytes = (size_t)out * (y_type == QKV_F32 ? 4 : 2);
    const qkv_tensor input = tensor_stored(&x, type, SLOT_INPUT_16, PLACE_AT_END);
    const size_t x_bytes = (size_t)in * (type == QKV_F32 ? 4 : 2);
    qkv_project_desc d = {
        .size = sizeof d,
        .flags = out_in ? QKV_WEIGHT_OUT_IN : 0,
        .rows = rows,
        .in_dim = in,
        .head_dim = out,
        .input = input,
        .linear = {.weight = tensor_stored(&w, type, SLOT_W_16, PLACE_AT_END).data, .dtype = type},
        .out = {.dtype = y_type}};
    for_each_isa(isa)
    {
        size_t bytes = 0;
        char *all = guarded_bytes(SLOT_OUT, (size_t)rows * row_bytes, PLACE_AT_END);
        qkv_project_desc one = d;
        one.rows = 1;
        d.out.data = all;
        cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        cr_assert_eq(qkv_project(&d, scratch, bytes), QKV_OK);
        for (int64_t i = 0; i < rows; i++) {
            one.input.data = (char *)input.data + (size_t)i * x_bytes;
            one.out.data = guarded_bytes(SLOT_OUT_16, row_bytes, PLACE_AT_END);
            cr_assert_eq(qkv_project(&one, scratch, bytes), QKV_OK);
            guards_intact();
            if (memcmp(one.out.data, all + (size_t)i * row_bytes, row_bytes) != 0)
                fail_with("%s: row %lld is another one alone", qkv_isa_name(), (long long)i);
        }
        tally(isa, 1);
    }
}

Test(layer, rows_alone)
{
    rng r = rng_make("rows alone");
    for (int64_t rows = 2; rows <= 53; rows++)
        if (effort_takes(rows))
            check_rows_alone(&r, rows, rng_int(&r, 1, rows % 3 ? 70 : 700), rng_int(&r, 1, 300),
                             rows % 2);
}

/* Empty batches write nothing; a default batch and head are 1. */
Test(layer, project_defaults)
{
    float x[3] = {1, 2, 3}, w[3] = {10, 100, 1000}, y = 5.0f;
    qkv_project_desc d = {.size = sizeof d,
                          .rows = 1,
                          .in_dim = 3,
                          .head_dim = 1,
                          .input = {.data = x},
                          .linear = {.weight = w},
                          .out = {.data = &y}};
    for_each_isa(isa)
    {
        size_t bytes = 0;
        cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
        void *scratch = scratch_alloc(bytes);
        y = 5.0f;
        cr_assert_eq(qkv_project(&d, scratch, bytes), QKV_OK);
        cr_assert(y == 3210.0f);
        qkv_project_desc none = d;
        none.rows = 0;
        y = 5.0f;
        cr_assert_eq(qkv_project(&none, scratch, bytes), QKV_OK);
        cr_assert(y == 5.0f);
        free(scratch);
        tally(isa, 2);
    }
}

/* ------------------------------------------------------------------- layer */

typedef struct layer_case {
    int64_t batch, len, model, q_heads, kv_heads, head_dim, value_dim, out_dim;
    bool causal, out_in, bias, wo, lse;
    layout input, out;
    int32_t x_type, w_type[4], y_type;
} layer_case;

typedef struct layer_weights {
    float *in_out[4], *stored[4], *bias[4]; /* q, k, v, o */
    void *typed[4];                         /* 'stored' in w_type */
    int64_t in[4], out[4];
} layer_weights;

/* The same numbers in a type, which they are rounded to first. */
static void *store_weights(int32_t dtype, float *w, int64_t n)
{
    if (dtype == QKV_F32)
        return w;
    uint16_t *copy = malloc((size_t)n * sizeof *copy);
    narrow_16(dtype, w, copy, n);
    widen_16(dtype, copy, w, n);
    return copy;
}

static layer_weights make_weights(rng *r, const layer_case *c)
{
    layer_weights w = {.in = {c->model, c->model, c->model, c->q_heads * c->value_dim},
                       .out = {c->q_heads * c->head_dim, c->kv_heads * c->head_dim,
                               c->kv_heads * c->value_dim, c->out_dim}};
    for (int i = 0; i < 4; i++) {
        const int64_t n = w.in[i] * w.out[i];
        w.stored[i] = malloc((size_t)n * sizeof(float));
        w.bias[i] = malloc((size_t)w.out[i] * sizeof(float));
        fill_normal(r, w.stored[i], n, 1.0f / sqrtf((float)w.in[i]));
        fill_normal(r, w.bias[i], w.out[i], 0.5f);
        w.typed[i] = store_weights(c->w_type[i], w.stored[i], n);
        w.in_out[i] = weights_in_out(w.stored[i], c->out_in ? w.in[i] : w.out[i], w.in[i], w.out[i],
                                     c->out_in);
    }
    return w;
}

static void free_weights(layer_weights *w)
{
    for (int i = 0; i < 4; i++) {
        if (w->typed[i] != w->stored[i])
            free(w->typed[i]);
        free(w->stored[i]);
        free(w->in_out[i]);
        free(w->bias[i]);
    }
}

/* [row][head * dim] to [head][row][dim], values and errors alike. */
static double *split(const double *joined, int64_t rows, int64_t heads, int64_t dim)
{
    double *out = malloc((size_t)(rows * heads * dim + 1) * sizeof *out);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t d = 0; d < dim; d++)
                out[(h * rows + i) * dim + d] = joined[i * heads * dim + h * dim + d];
    return out;
}

static double *join(const double *heads_rows, int64_t rows, int64_t heads, int64_t dim)
{
    double *out = malloc((size_t)(rows * heads * dim + 1) * sizeof *out);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t d = 0; d < dim; d++)
                out[i * heads * dim + h * dim + d] = heads_rows[(h * rows + i) * dim + d];
    return out;
}

static double *zeros(int64_t n)
{
    return calloc((size_t)n + 1, sizeof(double));
}

/*
 * The oracle's layer of one sequence. The errors of the projections go into
 * attention as errors of its inputs, and its error into the last projection.
 */
typedef struct layer_answer {
    double *out, *bound, *lse, *lse_bound;
} layer_answer;

static layer_answer ask_layer(const layer_case *c, const layer_weights *w, const double *x)
{
    const int64_t heads[3] = {c->q_heads, c->kv_heads, c->kv_heads};
    const int64_t dims[3] = {c->head_dim, c->head_dim, c->value_dim};
    double *part[3], *error[3];
    for (int i = 0; i < 3; i++) {
        double *y = zeros(c->len * w->out[i]), *e = zeros(c->len * w->out[i]);
        oracle_linear(x, NULL, w->in_out[i], c->bias ? w->bias[i] : NULL, c->len, w->in[i],
                      w->out[i], y, e);
        part[i] = split(y, c->len, heads[i], dims[i]);
        error[i] = split(e, c->len, heads[i], dims[i]);
        free(y);
        free(e);
    }
    const int64_t rows = c->q_heads * c->len;
    const oracle_attention o = {.batch = 1,
                                .q_heads = c->q_heads,
                                .kv_heads = c->kv_heads,
                                .q_len = c->len,
                                .kv_len = c->len,
                                .head_dim = c->head_dim,
                                .value_dim = c->value_dim,
                                .causal = c->causal,
                                .scale = 1.0 / sqrt((double)c->head_dim),
                                .q = part[0],
                                .k = part[1],
                                .v = part[2],
                                .q_error = error[0],
                                .k_error = error[1],
                                .v_error = error[2],
                                .out = zeros(rows * c->value_dim),
                                .out_bound = zeros(rows * c->value_dim),
                                .lse = zeros(rows),
                                .lse_bound = zeros(rows)};
    oracle_attention_run(&o);

    layer_answer a = {.out = join(o.out, c->len, c->q_heads, c->value_dim),
                      .bound = join(o.out_bound, c->len, c->q_heads, c->value_dim),
                      .lse = o.lse,
                      .lse_bound = o.lse_bound};
    free(o.out);
    free(o.out_bound);
    if (c->wo) {
        double *y = zeros(c->len * c->out_dim), *e = zeros(c->len * c->out_dim);
        oracle_linear(a.out, a.bound, w->in_out[3], c->bias ? w->bias[3] : NULL, c->len, w->in[3],
                      c->out_dim, y, e);
        free(a.out);
        free(a.bound);
        a.out = y;
        a.bound = e;
    }
    for (int i = 0; i < 3; i++) {
        free(part[i]);
        free(error[i]);
    }
    return a;
}

static qkv_self_attention_desc describe(const layer_case *c, const layer_weights *w,
                                        const tensor *x, const tensor *y, const tensor *lse)
{
    qkv_self_attention_desc d = {.size = sizeof d,
                                 .flags = (c->causal ? QKV_CAUSAL : 0) |
                                          (c->out_in ? QKV_WEIGHT_OUT_IN : 0),
                                 .batch = c->batch,
                                 .seq_len = c->len,
                                 .model_dim = c->model,
                                 .q_heads = c->q_heads,
                                 .kv_heads = c->kv_heads,
                                 .head_dim = c->head_dim,
                                 .value_dim = c->value_dim,
                                 .out_dim = c->out_dim,
                                 .input = x->desc,
                                 .out = y->desc};
    qkv_linear *linears[] = {&d.wq, &d.wk, &d.wv, &d.wo};
    for (int i = 0; i < (c->wo ? 4 : 3); i++)
        *linears[i] = (qkv_linear){
            .weight = w->typed[i], .bias = c->bias ? w->bias[i] : NULL, .dtype = c->w_type[i]};
    if (c->lse)
        d.lse = lse->desc;
    return d;
}

static void check_layer_rounded(const qkv_self_attention_desc *wide, const tensor *y, int32_t dtype)
{
    qkv_self_attention_desc d = *wide;
    size_t bytes = 0;
    d.out = tensor_narrow(y, dtype, SLOT_OUT_16, PLACE_AT_END);
    cr_assert_eq(qkv_self_attention_scratch_size(&d, &bytes), QKV_OK);
    cr_assert_eq(qkv_self_attention(&d, guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START), bytes),
                 QKV_OK);
    guards_intact();
    tensor_expect_rounded("16-bit output", y, &d.out);
}

static void check_layer(rng *r, layer_case c)
{
    context("qkv_self_attention: batch %lld, len %lld, model %lld, heads %lld/%lld, head_dim %lld, "
            "value_dim %lld, out_dim %lld, causal %d, %s, bias %d, wo %d, types %d %d %d %d %d %d",
            (long long)c.batch, (long long)c.len, (long long)c.model, (long long)c.q_heads,
            (long long)c.kv_heads, (long long)c.head_dim, (long long)c.value_dim,
            (long long)c.out_dim, c.causal, c.out_in ? "[out][in]" : "[in][out]", c.bias, c.wo,
            (int)c.x_type, (int)c.w_type[0], (int)c.w_type[1], (int)c.w_type[2], (int)c.w_type[3],
            (int)c.y_type);
    layer_weights w = make_weights(r, &c);
    const int64_t width = c.wo ? c.out_dim : c.q_heads * c.value_dim;
    tensor x = tensor_make(SLOT_INPUT, c.batch, 1, c.len, c.model, c.input, PLACE_AT_END);
    tensor y = tensor_make(SLOT_OUT, c.batch, 1, c.len, width, c.out, PLACE_AT_END);
    tensor lse = tensor_make(SLOT_LSE, c.batch, c.q_heads, c.len, 1, LAYOUT_PADDED, PLACE_AT_END);
    tensor_fill(&x, r, 1.0f);
    qkv_self_attention_desc d = describe(&c, &w, &x, &y, &lse);
    d.input = tensor_stored(&x, c.x_type, SLOT_INPUT_16, PLACE_AT_END);
    const double *inputs = tensor_doubles(&x, D_X);
    layer_answer answers[4];
    for (int64_t b = 0; b < c.batch; b++)
        answers[b] = ask_layer(&c, &w, inputs + b * c.len * c.model);

    for_each_isa(isa)
    {
        size_t bytes = 0;
        cr_assert_eq(qkv_self_attention_scratch_size(&d, &bytes), QKV_OK);
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        canary_fill(y.data, y.extent);
        canary_fill(lse.data, lse.extent);
        const qkv_status status = qkv_self_attention(&d, scratch, bytes);
        if (status != QKV_OK)
            fail_with("%s: %s", qkv_isa_name(), qkv_strerror(status));
        guards_intact();
        for (int64_t b = 0; b < c.batch; b++) {
            for (int64_t i = 0; i < c.len; i++)
                expect_close(qkv_isa_name(), tensor_row(&y, b, 0, i), answers[b].out + i * width,
                             answers[b].bound + i * width, width);
            for (int64_t h = 0; h < c.q_heads && c.lse; h++)
                for (int64_t i = 0; i < c.len; i++)
                    expect_close("lse", tensor_row(&lse, b, h, i), &answers[b].lse[h * c.len + i],
                                 &answers[b].lse_bound[h * c.len + i], 1);
        }
        if (c.y_type != QKV_F32)
            check_layer_rounded(&d, &y, c.y_type);
        tensor_only_rows_written("out", &y);
        tensor_only_rows_written("lse", &lse);
        tally(isa, 1);
    }
    for (int64_t b = 0; b < c.batch; b++) {
        free(answers[b].out);
        free(answers[b].bound);
        free(answers[b].lse);
        free(answers[b].lse_bound);
    }
    free_weights(&w);
}

static layer_case random_layer(rng *r)
{
    layer_case c = {.batch = rng_int(r, 1, 3),
                    .len = rng_int(r, 1, 60),
                    .model = rng_int(r, 1, 70),
                    .kv_heads = rng_int(r, 1, 3),
                    .head_dim = rng_int(r, 1, 40),
                    .value_dim = rng_int(r, 1, 40),
                    .out_dim = rng_int(r, 1, 70),
                    .causal = rng_int(r, 0, 1),
                    .out_in = rng_int(r, 0, 1),
                    .bias = rng_int(r, 0, 1),
                    .wo = rng_int(r, 0, 1),
                    .lse = rng_int(r, 0, 1),
                    .input = (layout)rng_int(r, 0, LAYOUTS - 1),
                    .out = (layout)rng_int(r, 0, LAYOUT_PADDED)};
    c.q_heads = c.kv_heads * rng_int(r, 1, 3);
    return c;
}

Test(layer, self_attention)
{
    rng r = rng_make("layer");
    for (int64_t i = effort_cases(120); i > 0; i--)
        check_layer(&r, random_layer(&r));
}

Test(layer, self_attention_types)
{
    rng r = rng_make("layer types");
    for (int64_t i = effort_cases(120); i > 0; i--) {
        layer_case c = random_layer(&r);
        c.x_type = (int32_t)rng_int(&r, QKV_F32, QKV_BF16);
        c.y_type = (int32_t)rng_int(&r, QKV_F32, QKV_BF16);
        for (int k = 0; k < 4; k++)
            c.w_type[k] = (int32_t)rng_int(&r, QKV_F32, QKV_BF16);
        check_layer(&r, c);
    }
}

static void run_layer(const qkv_self_attention_desc *d)
{
    size_t bytes = 1;
    cr_assert_eq(qkv_self_attention_scratch_size(d, &bytes), QKV_OK);
    void *scratch = scratch_alloc(bytes);
    cr_assert_eq(qkv_self_attention(d, scratch, bytes), QKV_OK);
    free(scratch);
}

/* Logits beyond what units of log2(e) hold: 3.2e38 and half of it. */
Test(layer, extreme_logits)
{
    float x[2] = {1.0f, 0.5f}, one = 1.0f, large = 3.2e38f, y[2], lse[2];
    for_each_isa(isa)
    {
        qkv_self_attention_desc d = {.size = sizeof d,
                                     .seq_len = 2,
                                     .model_dim = 1,
                                     .head_dim = 1,
                                     .input = {.data = x},
                                     .wq = {.weight = &one},
                                     .wk = {.weight = &large},
                                     .wv = {.weight = &one},
                                     .out = {.data = y},
                                     .lse = {.data = lse}};
        run_layer(&d);
        for (int i = 0; i < 2; i++) {
            context("%s, row %d", qkv_isa_name(), i);
            cr_assert(y[i] == 1.0f);
            cr_assert(fabsf(lse[i] - large * x[i]) <= 1e-6f * large);
        }
        tally(isa, 1);
    }
}

Test(layer, empty_sequence)
{
    float x[4] = {0}, w[4] = {1, 1, 1, 1}, y[4];
    for_each_isa(isa)
    {
        qkv_self_attention_desc d = {.size = sizeof d,
                                     .seq_len = 0,
                                     .model_dim = 2,
                                     .head_dim = 2,
                                     .input = {.data = x},
                                     .wq = {.weight = w},
                                     .wk = {.weight = w},
                                     .wv = {.weight = w},
                                     .out = {.data = y}};
        canary_fill(y, 4);
        run_layer(&d);
        cr_assert(canary_intact(y, 4));
        tally(isa, 1);
    }
}

/*
 * Token by token, as a text is generated: each token's query, key and value
 * by qkv_project(), then its scores, weights and sum by the three steps over
 * the keys so far. The matrix form is the same sum: both are within its
 * bound of the oracle.
 */
static void token_by_token(const layer_case *c, const layer_weights *w, const float *x,
                           float *context_rows)
{
    float *cache[3];
    for (int i = 0; i < 3; i++)
        cache[i] = malloc((size_t)(c->len * w->out[i]) * sizeof(float));
    float *weights = malloc((size_t)c->len * sizeof(float));
    for (int64_t t = 0; t < c->len; t++) {
        for (int i = 0; i < 3; i++) {
            const qkv_project_desc d = {
                .size = sizeof d,
                .flags = c->out_in ? QKV_WEIGHT_OUT_IN : 0,
                .rows = 1,
                .in_dim = c->model,
                .head_dim = w->out[i],
                .input = {.data = (void *)(uintptr_t)(x + t * c->model)},
                .linear = {.weight = w->stored[i], .bias = c->bias ? w->bias[i] : NULL},
                .out = {.data = cache[i] + t * w->out[i]}};
            size_t bytes = 0;
            cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
            void *scratch = scratch_alloc(bytes);
            cr_assert_eq(qkv_project(&d, scratch, bytes), QKV_OK);
            free(scratch);
        }
        for (int64_t h = 0; h < c->q_heads; h++) {
            const int64_t kv = h / (c->q_heads / c->kv_heads);
            const int64_t seen = t + 1;
            cr_assert_eq(qkv_dot(cache[0] + t * w->out[0] + h * c->head_dim, w->out[0],
                                 cache[1] + kv * c->head_dim, w->out[1], weights, seen, 1, seen,
                                 c->head_dim),
                         QKV_OK);
            cr_assert_eq(qkv_scale_softmax(weights, seen, weights, seen, NULL, 1, seen,
                                           1.0f / sqrtf((float)c->head_dim)),
                         QKV_OK);
            cr_assert_eq(qkv_weighted_sum(weights, seen, cache[2] + kv * c->value_dim, w->out[2],
                                          context_rows + (t * c->q_heads + h) * c->value_dim,
                                          c->value_dim, 1, seen, c->value_dim),
                         QKV_OK);
        }
    }
    for (int i = 0; i < 3; i++)
        free(cache[i]);
    free(weights);
}

Test(layer, token_by_token)
{
    rng r = rng_make("tokens");
    for (int64_t i = effort_cases(30); i > 0; i--) {
        layer_case c = random_layer(&r);
        c.batch = 1;
        c.causal = true;
        c.wo = c.lse = false;
        c.input = c.out = LAYOUT_PACKED;
        layer_weights w = make_weights(&r, &c);
        const int64_t width = c.q_heads * c.value_dim;
        float *x = guarded(SLOT_INPUT, c.len * c.model, PLACE_AT_END);
        float *steps = guarded(SLOT_FREE, c.len * width, PLACE_AT_END);
        fill_normal(&r, x, c.len * c.model, 1.0f);
        double *inputs = zeros(c.len * c.model);
        for (int64_t k = 0; k < c.len * c.model; k++)
            inputs[k] = (double)x[k];
        layer_answer a = ask_layer(&c, &w, inputs);
        for_each_isa(isa)
        {
            context("token by token on %s: len %lld, model %lld, heads %lld/%lld, dims %lld %lld",
                    qkv_isa_name(), (long long)c.len, (long long)c.model, (long long)c.q_heads,
                    (long long)c.kv_heads, (long long)c.head_dim, (long long)c.value_dim);
            token_by_token(&c, &w, x, steps);
            guards_intact();
            expect_close("context", steps, a.out, a.bound, c.len * width);
            tally(isa, 1);
        }
        free(a.out);
        free(a.bound);
        free(a.lse);
        free(a.lse_bound);
        free(inputs);
        free_weights(&w);
    }
}

/* ------------------------------------------------------ a layer of a model */

/*
 * Layer 3 of all-MiniLM-L6-v2 on two inputs, as PyTorch computed it in f32:
 * within 1.0e-6 of f64 (data/README.md).
 */
static const double pytorch_error = 1.0e-6;

static struct npy load(const char *name)
{
    char path[512], error[256];
    const char *folder = getenv("QKV_DATA");
    struct npy array;
    snprintf(path, sizeof path, "%s/minilm/%s.npy", folder ? folder : TEST_DATA, name);
    if (npy_load(path, &array, error, sizeof error))
        fail_with("%s: %s", path, error);
    return array;
}

static struct npy load_of(const char *input, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "%s_%s", input, what);
    return load(name);
}

static void expect_recorded(const char *what, const float *got, const struct npy *recorded,
                            const double *bound)
{
    double *want = doubles(D_Y, recorded->count), *wider = doubles(D_BOUND, recorded->count);
    double largest = 0;
    for (int64_t i = 0; i < recorded->count; i++) {
        want[i] = (double)recorded->data[i];
        wider[i] = bound[i] + pytorch_error;
        largest = fmax(largest, fabs((double)got[i] - want[i]));
    }
    cr_log_info("%s: largest difference %.3g", context_text(), largest);
    expect_close(what, got, want, wider, recorded->count);
}

static void check_model(const char *input, bool whole)
{
    const char *names[4][2] = {{"wq", "bq"}, {"wk", "bk"}, {"wv", "bv"}, {"wo", "bo"}};
    struct npy x = load_of(input, "x"), recorded = load_of(input, whole ? "out" : "context");
    const layer_case c = {.batch = 1,
                          .len = x.shape[0],
                          .model = 384,
                          .q_heads = 12,
                          .kv_heads = 12,
                          .head_dim = 32,
                          .value_dim = 32,
                          .out_dim = 384,
                          .bias = true,
                          .wo = whole};
    layer_weights w = {.in = {384, 384, 384, 384}, .out = {384, 384, 384, 384}};
    struct npy weights[4], biases[4];
    for (int i = 0; i < 4; i++) {
        weights[i] = load(names[i][0]);
        biases[i] = load(names[i][1]);
        w.in_out[i] = w.stored[i] = weights[i].data;
        w.typed[i] = w.stored[i];
        w.bias[i] = biases[i].data;
    }
    double *inputs = zeros(x.count);
    for (int64_t i = 0; i < x.count; i++)
        inputs[i] = (double)x.data[i];
    layer_answer a = ask_layer(&c, &w, inputs);

    tensor in = tensor_make(SLOT_INPUT, 1, 1, c.len, 384, LAYOUT_PACKED, PLACE_AT_END);
    tensor out = tensor_make(SLOT_OUT, 1, 1, c.len, 384, LAYOUT_PACKED, PLACE_AT_END);
    memcpy(in.data, x.data, (size_t)x.count * sizeof *x.data);
    const qkv_self_attention_desc d = describe(&c, &w, &in, &out, NULL);
    for_each_isa(isa)
    {
        context("%s, %s, on %s", input, whole ? "out" : "context", qkv_isa_name());
        size_t bytes = 0;
        cr_assert_eq(qkv_self_attention_scratch_size(&d, &bytes), QKV_OK);
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        cr_assert_eq(qkv_self_attention(&d, scratch, bytes), QKV_OK);
        guards_intact();
        expect_recorded(whole ? "out" : "context", out.data, &recorded, a.bound);
        tally(isa, 1);
    }
    for (int i = 0; i < 4; i++) {
        npy_free(&weights[i]);
        npy_free(&biases[i]);
    }
    npy_free(&x);
    npy_free(&recorded);
    free(inputs);
    free(a.out);
    free(a.bound);
    free(a.lse);
    free(a.lse_bound);
}

Test(recorded, model_sentence)
{
    check_model("sentence", false);
    check_model("sentence", true);
}

Test(recorded, model_text)
{
    check_model("text", false);
    check_model("text", true);
}

/*
 * The attention weights themselves, by qkv_project(), qkv_dot() and
 * qkv_scale_softmax(), head by head. A recorded weight is off by 7.4e-7 at
 * most, one of the text by the rounding to f16 as well (2.4e-4). A computed
 * one: 2 ds, with ds from the projections' errors, and the softmax's own.
 */
static void check_model_weights(const char *input, double recorded_error)
{
    struct npy x = load_of(input, "x"), recorded = load_of(input, "weights");
    const char *names[2][2] = {{"wq", "bq"}, {"wk", "bk"}};
    const int64_t len = x.shape[0];
    double *inputs = zeros(x.count), *exact[2], *error[2];
    float *rows[2];
    struct npy w[2], b[2];
    for (int64_t i = 0; i < x.count; i++)
        inputs[i] = (double)x.data[i];
    for (int i = 0; i < 2; i++) {
        w[i] = load(names[i][0]);
        b[i] = load(names[i][1]);
        exact[i] = zeros(len * 384);
        error[i] = zeros(len * 384);
        oracle_linear(inputs, NULL, w[i].data, b[i].data, len, 384, 384, exact[i], error[i]);
        rows[i] = guarded(SLOT_FREE + i, len * 384, PLACE_AT_END);
    }
    float *weights = guarded(SLOT_OUT, len * len, PLACE_AT_END);
    for_each_isa(isa)
    {
        for (int i = 0; i < 2; i++) {
            const qkv_project_desc d = {.size = sizeof d,
                                        .rows = len,
                                        .in_dim = 384,
                                        .head_dim = 384,
                                        .input = {.data = x.data},
                                        .linear = {.weight = w[i].data, .bias = b[i].data},
                                        .out = {.data = rows[i]}};
            size_t bytes = 0;
            cr_assert_eq(qkv_project_scratch_size(&d, &bytes), QKV_OK);
            cr_assert_eq(qkv_project(&d, guarded_bytes(SLOT_SCRATCH, bytes, 1), bytes), QKV_OK);
        }
        for (int64_t h = 0; h < 12; h++) {
            const float scale = 1.0f / sqrtf(32.0f);
            cr_assert_eq(
                qkv_dot(rows[0] + h * 32, 384, rows[1] + h * 32, 384, weights, len, len, len, 32),
                QKV_OK);
            cr_assert_eq(qkv_scale_softmax(weights, len, weights, len, NULL, len, len, scale),
                         QKV_OK);
            for (int64_t i = 0; i < len; i++) {
                double ds = 0;
                for (int64_t j = 0; j < len; j++) {
                    double sum = 0, s = 0;
                    for (int64_t k = h * 32; k < h * 32 + 32; k++) {
                        const double q = fabs(exact[0][i * 384 + k]), dq = error[0][i * 384 + k];
                        const double key = fabs(exact[1][j * 384 + k]);
                        const double dk = error[1][j * 384 + k];
                        sum += q * dk + key * dq + dq * dk + 34 * ORACLE_U * (q + dq) * (key + dk);
                        s += q * key;
                    }
                    ds = fmax(ds, (double)scale * (sum + 3 * ORACLE_U * s));
                }
                for (int64_t j = 0; j < len; j++) {
                    const double want = (double)recorded.data[(h * len + i) * len + j];
                    const double bound =
                        (want + recorded_error) * (expm1(2 * ds) + 16 * ORACLE_U) + recorded_error;
                    context("weights of %s on %s, head %lld, row %lld, key %lld", input,
                            qkv_isa_name(), (long long)h, (long long)i, (long long)j);
                    expect_close("weight", &weights[i * len + j], &want, &bound, 1);
                }
            }
        }
        tally(isa, 1);
    }
    for (int i = 0; i < 2; i++) {
        npy_free(&w[i]);
        npy_free(&b[i]);
        free(exact[i]);
        free(error[i]);
    }
    npy_free(&x);
    npy_free(&recorded);
    free(inputs);
}

Test(recorded, model_weights)
{
    check_model_weights("sentence", 7.4e-7);
    check_model_weights("text", 7.4e-7 + 2.4e-4);
}
