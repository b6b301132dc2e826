/* SPDX-License-Identifier: MIT */
/*
 * The kernels of kernels.def one by one, with the sizes that the drivers
 * call them with for the wished shape: a key/value head, its query rows, a
 * block of keys.
 */
#include "cases.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "oracle.h"

/* One for all kernels; each uses what it needs. */
typedef struct kernel_context {
    bench_memory memory;
    const qkv_kernels *k;
    float *a, *b, *c; /* inputs */
    float *y, *z;     /* outputs and scratch */
    int64_t rows, n, kv_len, d, dv;
    const float *row_in[QKV_TILE_ROWS_MAX];
    float *row_out[QKV_TILE_ROWS_MAX];
} kernel_context;

static int64_t at_most(int64_t x, int64_t limit)
{
    return x < limit ? x : limit;
}

static int64_t up_to_multiple(int64_t x, int64_t of)
{
    return (x + of - 1) / of * of;
}

/* A context with the shape's sizes and memory for so many floats. */
static kernel_context *context_new(const bench_wish *wish, int64_t in, int64_t out)
{
    kernel_context *x = bench_alloc(sizeof *x);
    const bench_shape *s = wish->shape;
    x->k = wish->kernels;
    x->rows = at_most(s->q_len * (s->q_heads / s->kv_heads), QKV_ROWS_MAX);
    x->kv_len = s->kv_len;
    x->d = at_most(s->head_dim, QKV_DOT_BLOCK);
    x->dv = s->value_dim;
    x->memory.in = bench_arena_new(in);
    x->memory.out = bench_arena_new(out);
    return x;
}

/* ------------------------------------------------------------ exponentials */

static void run_exp(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->exp_f32(x->a, x->y, x->n);
}

static void run_exp2(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->exp2_f32(x->a, x->y, x->n);
}

static double error_exp(void *context)
{
    const kernel_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->n; i++)
        worst = bench_oracle_worse(worst, fabs((double)x->y[i] - exp((double)x->a[i])));
    return worst;
}

static double error_exp2(void *context)
{
    const kernel_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->n; i++)
        worst = bench_oracle_worse(worst, fabs((double)x->y[i] - exp2((double)x->a[i])));
    return worst;
}

static kernel_context *make_exponential(const bench_wish *wish, bench_case *c, float low)
{
    /* 4096 elements stay in the first cache. */
    const int64_t n = at_most(wish->shape->kv_len, 4096);
    kernel_context *x = context_new(wish, n, n);
    x->n = n;
    x->a = bench_take(&x->memory.in, n);
    x->y = bench_take(&x->memory.out, n);
    bench_fill_range(x->a, n, low, 0.0f, 1);
    c->elements = (double)n;
    c->bound = BENCH_NO_BOUND;
    return x;
}

bool bench_make_exp_f32(const bench_wish *wish, bench_case *c)
{
    bench_finish(c, &make_exponential(wish, c, -87.0f)->memory, run_exp, error_exp);
    return true;
}

bool bench_make_exp2_f32(const bench_wish *wish, bench_case *c)
{
    bench_finish(c, &make_exponential(wish, c, -126.0f)->memory, run_exp2, error_exp2);
    return true;
}

static void run_tanh(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->tanh_f32(x->a, x->y, x->n);
}

static double error_tanh(void *context)
{
    const kernel_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->n; i++)
        worst = bench_oracle_worse(worst, fabs((double)x->y[i] - tanh((double)x->a[i])));
    return worst;
}

bool bench_make_tanh_f32(const bench_wish *wish, bench_case *c)
{
    bench_finish(c, &make_exponential(wish, c, -10.0f)->memory, run_tanh, error_tanh);
    return true;
}

/* ------------------------------------------------------------- conversions */

static void run_widen_f16(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->widen_f16((const void *)x->a, x->y, x->n);
}

static void run_widen_bf16(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->widen_bf16((const void *)x->a, x->y, x->n);
}

static void run_narrow_f16(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->narrow_f16(x->a, (void *)x->y, x->n);
}

static void run_narrow_bf16(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->narrow_bf16(x->a, (void *)x->y, x->n);
}

/* A block of keys' worth of elements; the tests hold the results to bits. */
static bool make_conversion(const bench_wish *wish, bench_case *c, void (*run)(void *, int))
{
    const int64_t n = wish->kernels->key_block * wish->shape->head_dim;
    kernel_context *x = context_new(wish, n, n);
    x->n = n;
    x->a = bench_take(&x->memory.in, n);
    x->y = bench_take(&x->memory.out, n);
    bench_fill_range(x->a, n, -1.0f, 1.0f, 1);
    c->elements = (double)n;
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run, NULL);
    return true;
}

bool bench_make_widen_f16(const bench_wish *wish, bench_case *c)
{
    return make_conversion(wish, c, run_widen_f16);
}

bool bench_make_widen_bf16(const bench_wish *wish, bench_case *c)
{
    return make_conversion(wish, c, run_widen_bf16);
}

bool bench_make_narrow_f16(const bench_wish *wish, bench_case *c)
{
    return make_conversion(wish, c, run_narrow_f16);
}

bool bench_make_narrow_bf16(const bench_wish *wish, bench_case *c)
{
    return make_conversion(wish, c, run_narrow_bf16);
}

/* ---------------------------------------------------------------- softmax */

/* Scores of unit variance after scaling. */
#define SCALE 0.125f

static void run_scale_softmax(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    bench_keep(x->k->scale_softmax_f32(x->a, x->y, x->n, SCALE).sum);
}

static double error_scale_softmax(void *context)
{
    const kernel_context *x = context;
    double *exact = bench_alloc((size_t)x->n * sizeof *exact), worst = 0.0;
    for (int64_t j = 0; j < x->n; j++)
        exact[j] = (double)SCALE * (double)x->a[j];
    bench_oracle_softmax(exact, x->n);
    for (int64_t j = 0; j < x->n; j++)
        worst = bench_oracle_worse(worst, fabs((double)x->y[j] - exact[j]));
    free(exact);
    return worst;
}

bool bench_make_scale_softmax_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t n = wish->shape->kv_len;
    kernel_context *x = context_new(wish, n, n);
    x->n = n;
    x->a = bench_take(&x->memory.in, n);
    x->y = bench_take(&x->memory.out, n);
    bench_fill_range(x->a, n, -16.0f, 16.0f, 4);
    c->elements = (double)n;
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run_scale_softmax, error_scale_softmax);
    return true;
}

/*
 * The step works in place, so from the second run on it sees the
 * exponentials of the run before: numbers between 0 and 1, as good as any.
 */
static void run_softmax_step(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    qkv_row_state state = {.max = -FLT_MAX, .sum = 0.0f};
    bench_keep(x->k->softmax_step_f32(x->a, x->n, SCALE, &state) + state.sum);
}

bool bench_make_softmax_step_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t n = at_most(wish->shape->kv_len, QKV_KEY_BLOCK);
    kernel_context *x = context_new(wish, n, 0);
    x->n = n;
    x->a = bench_take(&x->memory.in, n);
    bench_fill_range(x->a, n, -16.0f, 16.0f, 5);
    c->elements = (double)n;
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run_softmax_step, NULL);
    return true;
}

/* ------------------------------------------- few rows and few keys at once */

static qkv_short_args short_args(const kernel_context *x, const float **keys, const float **values,
                                 float **out, qkv_row_state *states)
{
    for (int64_t j = 0; j < x->kv_len; j++) {
        keys[j] = x->b + j * x->d;
        values[j] = x->c + j * x->dv;
    }
    for (int64_t i = 0; i < x->rows; i++)
        out[i] = x->y + i * x->dv;
    return (qkv_short_args){.queries = (const float *const *)x->row_in,
                            .keys = keys,
                            .values = values,
                            .out = out,
                            .states = states,
                            .rows = x->rows,
                            .kv_len = x->kv_len,
                            .head_dim = x->d,
                            .value_dim = x->dv,
                            .scale_log2 = SCALE};
}

static void run_short(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    const float *keys[QKV_SHORT_KEYS], *values[QKV_SHORT_KEYS];
    float *out[QKV_ROWS_MAX];
    qkv_row_state states[QKV_ROWS_MAX];
    const qkv_short_args args = short_args(x, keys, values, out, states);
    x->k->short_f32(&args);
}

static double error_short(void *context)
{
    const kernel_context *x = context;
    double weights[QKV_SHORT_KEYS], worst = 0.0;
    for (int64_t i = 0; i < x->rows; i++) {
        const bench_oracle_row row = {.query = x->row_in[i],
                                      .keys = x->b,
                                      .values = x->c,
                                      .out = x->y + i * x->dv,
                                      .keys_stride = x->d,
                                      .values_stride = x->dv,
                                      .kv_len = x->kv_len,
                                      .head_dim = x->d,
                                      .value_dim = x->dv,
                                      .scale = (double)SCALE / 0x1.71547652b82fep+0};
        worst = bench_oracle_worse(worst, bench_oracle_attention(&row, weights));
    }
    return worst;
}

bool bench_make_short_f32(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const int64_t keys = at_most(s->kv_len, QKV_SHORT_KEYS),
                  d = at_most(s->head_dim, QKV_DOT_BLOCK);
    kernel_context *x =
        context_new(wish, keys * (d + s->value_dim), QKV_ROWS_MAX * (d + s->value_dim));
    x->kv_len = keys;
    x->b = bench_take(&x->memory.in, keys * d);
    x->c = bench_take(&x->memory.in, keys * s->value_dim);
    x->a = bench_take(&x->memory.out, x->rows * d);
    x->y = bench_take(&x->memory.out, x->rows * s->value_dim);
    bench_fill_normal(x->a, x->rows * d, 6);
    bench_fill_normal(x->b, keys * d, 7);
    bench_fill_normal(x->c, keys * s->value_dim, 8);
    for (int64_t i = 0; i < x->rows; i++)
        x->row_in[i] = x->a + i * d;
    c->flops = 2.0 * (double)(x->rows * keys) * (double)(d + s->value_dim);
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, run_short, error_short);
    return true;
}

/* -------------------------------------------------------------------- tile */

static void run_tile_load(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->tile_load_f32(x->row_in, x->rows, x->d, x->y);
}

bool bench_make_tile_load_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t rows = wish->kernels->tile_rows, n = rows * wish->shape->head_dim;
    kernel_context *x = context_new(wish, n, n);
    x->rows = rows;
    x->a = bench_take(&x->memory.in, rows * x->d);
    x->y = bench_take(&x->memory.out, rows * x->d);
    bench_fill_normal(x->a, rows * x->d, 8);
    for (int64_t i = 0; i < rows; i++)
        x->row_in[i] = x->a + i * x->d;
    c->elements = (double)(rows * x->d);
    c->bound = BENCH_READ;
    bench_finish(c, &x->memory, run_tile_load, NULL);
    return true;
}

static void run_tile_pack(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->tile_pack_f32(x->a, x->dv, x->kv_len, x->dv, x->y);
}

bool bench_make_tile_pack_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t dv = wish->shape->value_dim, keys = wish->kernels->key_block;
    const int64_t padded = up_to_multiple(dv, wish->kernels->value_panel);
    kernel_context *x = context_new(wish, keys * dv, keys * padded);
    x->kv_len = at_most(x->kv_len, keys);
    x->a = bench_take(&x->memory.in, x->kv_len * dv);
    x->y = bench_take(&x->memory.out, x->kv_len * padded);
    bench_fill_normal(x->a, x->kv_len * dv, 9);
    c->elements = (double)(x->kv_len * dv);
    c->bound = BENCH_READ;
    bench_finish(c, &x->memory, run_tile_pack, NULL);
    return true;
}

/*
 * b: keys, c: packed values, a: the query tile; y: out, max and sum behind
 * it; z: logits. Every run is the first block of a tile.
 */
static qkv_tile_step_args tile_step_args(const kernel_context *x)
{
    const int64_t rows = x->rows, out = rows * x->n;
    for (int64_t i = 0; i < rows; i++) {
        x->y[out + i] = -FLT_MAX;
        x->y[out + rows + i] = 0.0f;
    }
    return (qkv_tile_step_args){
        .query = x->a,
        .keys = x->b,
        .values = x->c,
        .logits = x->z,
        .out = x->y,
        .max = x->y + out,
        .sum = x->y + out + rows,
        .keys_stride = x->d,
        .values_keys = x->kv_len,
        .n_rows = rows,
        .kv_len = x->kv_len,
        .head_dim = x->d,
        .value_dim = x->dv,
        .scale_log2 = 1.44269504f / sqrtf((float)x->d),
    };
}

static void run_tile_step(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    const qkv_tile_step_args args = tile_step_args(x);
    x->k->tile_step_f32(&args);
}

static double error_tile_step(void *context)
{
    kernel_context *x = context;
    const int64_t rows = x->rows, panel = x->k->value_panel;
    const float *sum = x->y + rows * x->n + rows;
    double *weights = bench_alloc((size_t)x->kv_len * sizeof *weights), worst = 0.0;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < x->kv_len; j++)
            weights[j] =
                bench_oracle_dot(x->a + i, rows, x->b + j * x->d, 1, x->d) / sqrt((double)x->d);
        bench_oracle_softmax(weights, x->kv_len);
        for (int64_t d = 0; d < x->dv; d++) {
            const float *column = x->c + d / panel * panel * x->kv_len + d % panel;
            double exact = 0.0;
            for (int64_t j = 0; j < x->kv_len; j++)
                exact += weights[j] * (double)column[j * panel];
            const double got = (double)x->y[d * rows + i] / (double)sum[i];
            worst = bench_oracle_worse(worst, fabs(got - exact));
        }
    }
    free(weights);
    return worst;
}

static kernel_context *tile_context(const bench_wish *wish)
{
    const int64_t rows = wish->kernels->tile_rows, block = wish->kernels->key_block;
    const int64_t d = wish->shape->head_dim;
    const int64_t padded = up_to_multiple(wish->shape->value_dim, wish->kernels->value_panel);
    kernel_context *x =
        context_new(wish, rows * d + block * (d + padded), rows * (padded + 2) + rows * block);
    x->rows = rows;
    x->d = d;
    x->n = padded;
    x->kv_len = at_most(x->kv_len, block);
    x->a = bench_take(&x->memory.in, rows * d);
    x->b = bench_take(&x->memory.in, x->kv_len * d);
    x->c = bench_take(&x->memory.in, x->kv_len * padded);
    x->y = bench_take(&x->memory.out, rows * (padded + 2));
    x->z = bench_take(&x->memory.out, rows * x->kv_len);
    bench_fill_normal(x->a, rows * d, 10);
    bench_fill_normal(x->b, x->kv_len * d, 11);
    bench_fill_normal(x->c, x->kv_len * padded, 12);
    bench_fill_normal(x->z, rows * x->kv_len, 13);
    return x;
}

bool bench_make_tile_step_f32(const bench_wish *wish, bench_case *c)
{
    kernel_context *x = tile_context(wish);
    c->flops = 2.0 * (double)x->rows * (double)x->kv_len * (double)(x->d + x->dv);
    c->bound = BENCH_FMA;
    bench_finish(c, &x->memory, run_tile_step, error_tile_step);
    return true;
}

static void run_tile_logits(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    const qkv_tile_step_args args = tile_step_args(x);
    x->k->tile_logits_f32(&args);
}

bool bench_make_tile_logits_f32(const bench_wish *wish, bench_case *c)
{
    kernel_context *x = tile_context(wish);
    c->flops = 2.0 * (double)x->rows * (double)x->kv_len * (double)x->d;
    c->bound = BENCH_FMA;
    bench_finish(c, &x->memory, run_tile_logits, NULL);
    return true;
}

/* The weights of one run are the logits of the next: from the second run on
 * all lie in 0..1, under a maximum of 8. */
static void run_tile_weigh(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    const qkv_tile_step_args args = tile_step_args(x);
    float max[QKV_TILE_ROWS_MAX];
    for (int i = 0; i < QKV_TILE_ROWS_MAX; i++)
        max[i] = 8.0f;
    x->k->tile_weigh_f32(&args, max);
}

bool bench_make_tile_weigh_f32(const bench_wish *wish, bench_case *c)
{
    kernel_context *x = tile_context(wish);
    c->flops = 2.0 * (double)x->rows * (double)x->kv_len * (double)x->dv;
    c->bound = BENCH_FMA;
    bench_finish(c, &x->memory, run_tile_weigh, NULL);
    return true;
}

/* Softcap, slopes, a bias and a causal edge, all at once. The scale keeps what
 * becomes of the logits small from run to run. */
static void run_tile_adjust(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    float scale[QKV_TILE_ROWS_MAX], slope[QKV_TILE_ROWS_MAX], behind[QKV_TILE_ROWS_MAX];
    float max[QKV_TILE_ROWS_MAX];
    int32_t begin[QKV_TILE_ROWS_MAX] = {0}, end[QKV_TILE_ROWS_MAX];
    for (int i = 0; i < QKV_TILE_ROWS_MAX; i++) {
        scale[i] = 0.02f;
        slope[i] = 0.01f;
        behind[i] = 100.0f;
        max[i] = -FLT_MAX;
        end[i] = (int32_t)(x->kv_len - i % 8);
    }
    x->k->tile_adjust_f32(&(qkv_tile_adjust_args){
        .logits = x->z,
        .scale = scale,
        .slope = slope,
        .behind = behind,
        .bias = x->c,
        .begin = begin,
        .end = end,
        .max = max,
        .n_rows = x->rows,
        .kv_len = x->kv_len,
        .tile_rows = x->rows,
        .cap = 50.0f,
        .bias_scale = 1.0f,
    });
}

bool bench_make_tile_adjust_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t rows = wish->kernels->tile_rows, block = wish->kernels->key_block;
    kernel_context *x = context_new(wish, rows * block, rows * block);
    x->rows = rows;
    x->kv_len = at_most(x->kv_len, block);
    x->c = bench_take(&x->memory.in, rows * x->kv_len);
    x->z = bench_take(&x->memory.out, rows * x->kv_len);
    bench_fill_normal(x->c, rows * x->kv_len, 14);
    bench_fill_normal(x->z, rows * x->kv_len, 15);
    c->elements = (double)(rows * x->kv_len);
    c->bound = BENCH_READ;
    bench_finish(c, &x->memory, run_tile_adjust, NULL);
    return true;
}

static void run_row_adjust(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->row_adjust_f32(&(qkv_row_adjust_args){.logits = x->z,
                                                .bias = x->c,
                                                .n = x->kv_len,
                                                .scale = 0.02f,
                                                .cap = 50.0f,
                                                .slope = 0.01f,
                                                .behind = 100.0f,
                                                .bias_scale = 1.0f});
}

bool bench_make_row_adjust_f32(const bench_wish *wish, bench_case *c)
{
    kernel_context *x = context_new(wish, QKV_KEY_BLOCK, QKV_KEY_BLOCK);
    x->kv_len = at_most(x->kv_len, QKV_KEY_BLOCK);
    x->c = bench_take(&x->memory.in, x->kv_len);
    x->z = bench_take(&x->memory.out, x->kv_len);
    bench_fill_normal(x->c, x->kv_len, 16);
    bench_fill_normal(x->z, x->kv_len, 17);
    c->elements = (double)x->kv_len;
    c->bound = BENCH_READ;
    bench_finish(c, &x->memory, run_row_adjust, NULL);
    return true;
}

static void run_tile_store(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->tile_store_f32(x->a, x->b, x->rows, x->dv, x->row_out);
}

bool bench_make_tile_store_f32(const bench_wish *wish, bench_case *c)
{
    const int64_t rows = wish->kernels->tile_rows, dv = wish->shape->value_dim;
    const int64_t padded = up_to_multiple(dv, wish->kernels->value_panel);
    kernel_context *x = context_new(wish, rows * (padded + 1), rows * dv);
    x->rows = rows;
    x->a = bench_take(&x->memory.in, rows * padded);
    x->b = bench_take(&x->memory.in, rows);
    x->y = bench_take(&x->memory.out, rows * dv);
    bench_fill_normal(x->a, rows * padded, 13);
    bench_fill_range(x->b, rows, 1.0f, 100.0f, 14);
    for (int64_t i = 0; i < rows; i++)
        x->row_out[i] = x->y + i * dv;
    c->elements = (double)(rows * dv);
    c->bound = BENCH_READ;
    bench_finish(c, &x->memory, run_tile_store, NULL);
    return true;
}

/* -------------------------------------------------------------------- gemm */

static void run_gemm(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    x->k->gemm_f32(&(qkv_gemm_args){
        .x = x->a,
        .panel = x->b,
        .y = x->y,
        .x_stride = x->d,
        .y_stride = x->n,
        .rows = x->rows,
        .cols = x->n,
        .depth = x->d,
    });
}

/* Sums in blocks of columns, as gemm_few's are, or in rows, of which 'block' is all. */
static double error_in_blocks(const kernel_context *x, int64_t block)
{
    double worst = 0.0;
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t col = 0; col < x->n; col++) {
            const double exact = bench_oracle_dot(x->a + i * x->d, 1, x->b + col, x->n, x->d);
            const int64_t at = (col / block * x->rows + i) * block + col % block;
            worst = bench_oracle_worse(worst, fabs((double)x->y[at] - exact));
        }
    return worst;
}

static double error_gemm(void *context)
{
    const kernel_context *x = context;
    return error_in_blocks(x, x->n);
}

bool bench_make_gemm_f32(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const int64_t rows = at_most(s->q_len, 64), cols = wish->kernels->gemm_cols;
    const int64_t depth = at_most(s->q_heads * s->head_dim, 512);
    kernel_context *x = context_new(wish, (rows + cols) * depth, rows * cols);
    x->rows = rows;
    x->n = cols;
    x->d = depth;
    x->a = bench_take(&x->memory.in, rows * depth);
    x->b = bench_take(&x->memory.in, cols * depth);
    x->y = bench_take(&x->memory.out, rows * cols);
    bench_fill_normal(x->a, rows * depth, 15);
    bench_fill_normal(x->b, cols * depth, 16);
    c->flops = 2.0 * (double)rows * (double)cols * (double)depth;
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, run_gemm, error_gemm);
    return true;
}

/* ---------------------------------------------------------- gemm, few rows */

static void run_gemm_few(void *context, int worker)
{
    (void)worker;
    const kernel_context *x = context;
    for (int64_t d = 0; d < x->d; d += x->k->few_depth)
        x->k->gemm_few(&(qkv_gemm_few_args){
            .x = x->a + d,
            .w = x->b + d * x->n,
            .sums = x->y,
            .x_stride = x->d,
            .w_stride = x->n,
            .sums_stride = QKV_FEW_COLS,
            .sums_block = x->rows * QKV_FEW_COLS,
            .rows = x->rows,
            .cols = x->n,
            .depth = at_most(x->d - d, x->k->few_depth),
            .begin = d == 0,
        });
}

static double error_gemm_few(void *context)
{
    return error_in_blocks(context, QKV_FEW_COLS);
}

bool bench_make_gemm_few(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const int64_t rows = at_most(s->q_len, wish->kernels->few_rows), cols = s->q_heads * s->head_dim;
    const int64_t depth = cols;
    const int64_t sums = rows * ((cols + QKV_FEW_COLS - 1) / QKV_FEW_COLS * QKV_FEW_COLS);
    kernel_context *x = context_new(wish, (rows + cols) * depth, sums);
    x->rows = rows;
    x->n = cols;
    x->d = depth;
    x->a = bench_take(&x->memory.in, rows * depth);
    x->b = bench_take(&x->memory.in, cols * depth);
    x->y = bench_take(&x->memory.out, sums);
    bench_fill_normal(x->a, rows * depth, 17);
    bench_fill_normal(x->b, cols * depth, 18);
    c->flops = 2.0 * (double)rows * (double)cols * (double)depth;
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, run_gemm_few, error_gemm_few);
    return true;
}
