/* SPDX-License-Identifier: MIT */
/*
 * The kernels of keys and values one by one, in every type: the query rows of
 * one key/value head against all its keys or values, and rows on their way
 * into a cache and out of it.
 */
#include "cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oracle.h"

/* A format as the kernels of one table know it. */
typedef struct kv_type {
    int bytes, elements; /* of a block */
    bool scaled;         /* one f32 scale a row */
    qkv_dot_fn *dot;
    qkv_weighted_sum_fn *weighted_sum;
    qkv_widen_kv_fn *widen;
    qkv_narrow_kv_fn *narrow;
    qkv_widen_f16_fn *widen_16;
    qkv_narrow_f16_fn *narrow_16;
} kv_type;

typedef struct kv_context {
    bench_memory memory;
    kv_type type;
    qkv_rotary_f32_fn *rotary;
    float *wide, *other; /* the rows as f32, read only here; queries or weights */
    char *rows;
    float *scales, *y;
    int64_t row_bytes, heads, kv_len, dim;
} kv_context;

static void to_cache(const kv_type *t, const float *x, void *y, float *scale, int64_t n)
{
    if (t->narrow_16)
        t->narrow_16(x, y, n);
    else if (t->narrow)
        t->narrow(x, y, scale, n);
    else
        memcpy(y, x, (size_t)n * sizeof *x);
}

static void from_cache(const kv_type *t, const void *x, const float *scale, float *y, int64_t n)
{
    if (t->widen_16)
        t->widen_16(x, y, n);
    else if (t->widen)
        t->widen(x, scale, y, n);
    else
        memcpy(y, x, (size_t)n * sizeof *y);
}

/* A cache of kv_len rows of 'dim', and room for the rows of 'others' floats;
 * 'outs' floats of output and, apart from what is measured, the rows as f32. */
static kv_context *context_new(const bench_wish *wish, kv_type type, int64_t dim, int64_t others,
                               int64_t outs)
{
    const bench_shape *s = wish->shape;
    kv_context *x = bench_alloc(sizeof *x);
    x->type = type;
    x->kv_len = s->kv_len;
    x->dim = dim;
    x->row_bytes = dim / type.elements * type.bytes;
    x->memory.in = bench_arena_new(x->kv_len * (x->row_bytes + 4) / 4 + others + 64);
    x->memory.out = bench_arena_new(outs + x->kv_len * dim);
    x->rows = (char *)bench_take(&x->memory.in, x->kv_len * x->row_bytes / 4 + 1);
    x->scales = type.scaled ? bench_take(&x->memory.in, x->kv_len) : NULL;
    x->other = bench_take(&x->memory.in, others);
    x->wide = bench_take(&x->memory.out, x->kv_len * dim);
    x->y = bench_take(&x->memory.out, outs);
    bench_fill_normal(x->wide, x->kv_len * dim, 21);
    for (int64_t j = 0; j < x->kv_len; j++) {
        float *row = x->wide + j * dim, *scale = type.scaled ? x->scales + j : NULL;
        to_cache(&type, row, x->rows + j * x->row_bytes, scale, dim);
        from_cache(&type, x->rows + j * x->row_bytes, scale, row, dim);
    }
    return x;
}

static int64_t heads_of(const bench_shape *s)
{
    const int64_t rows = s->q_len * (s->q_heads / s->kv_heads);
    return rows < QKV_ROWS_MAX ? rows : QKV_ROWS_MAX;
}

/* -------------------------------------------------------------------- dot */

static void run_dot(void *context, int worker)
{
    (void)worker;
    const kv_context *x = context;
    x->type.dot(&(qkv_dot_args){.queries = x->other,
                                .keys = x->rows,
                                .key_scales = x->scales,
                                .scores = x->y,
                                .queries_stride = x->dim,
                                .keys_stride = x->row_bytes,
                                .key_scales_stride = 1,
                                .scores_stride = x->kv_len,
                                .rows = x->heads,
                                .kv_len = x->kv_len,
                                .head_dim = x->dim});
}

static double error_dot(void *context)
{
    const kv_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->heads; i++)
        for (int64_t j = 0; j < x->kv_len; j++) {
            const double exact =
                bench_oracle_dot(x->other + i * x->dim, 1, x->wide + j * x->dim, 1, x->dim);
            worst = bench_oracle_worse(worst, fabs((double)x->y[i * x->kv_len + j] - exact));
        }
    return worst;
}

static bool make_dot(const bench_wish *wish, bench_case *c, kv_type type)
{
    const bench_shape *s = wish->shape;
    const int64_t heads = heads_of(s), dim = s->head_dim;
    if (dim % type.elements || dim > QKV_DOT_BLOCK)
        return false;
    kv_context *x = context_new(wish, type, dim, heads * dim, heads * s->kv_len);
    x->heads = heads;
    bench_fill_normal(x->other, heads * dim, 22);
    c->flops = 2.0 * (double)heads * (double)s->kv_len * (double)dim;
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, run_dot, error_dot);
    return true;
}

/* ----------------------------------------------------------- weighted sum */

static void run_weighted_sum(void *context, int worker)
{
    (void)worker;
    static const float keep[QKV_ROWS_MAX] = {1, 1, 1, 1, 1, 1, 1, 1};
    const kv_context *x = context;
    for (int64_t begin = 0; begin < x->kv_len; begin += QKV_KEY_BLOCK) {
        const int64_t rest = x->kv_len - begin;
        x->type.weighted_sum(
            &(qkv_weighted_sum_args){.weights = x->other + begin,
                                     .values = x->rows + begin * x->row_bytes,
                                     .value_scales = x->scales ? x->scales + begin : NULL,
                                     .out = x->y,
                                     .rescale = begin ? keep : NULL,
                                     .weights_stride = x->kv_len,
                                     .values_stride = x->row_bytes,
                                     .value_scales_stride = 1,
                                     .out_stride = x->dim,
                                     .rows = x->heads,
                                     .kv_len = rest < QKV_KEY_BLOCK ? rest : QKV_KEY_BLOCK,
                                     .value_dim = x->dim});
    }
}

static double error_weighted_sum(void *context)
{
    const kv_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->heads; i++)
        for (int64_t d = 0; d < x->dim; d++) {
            const double exact =
                bench_oracle_dot(x->other + i * x->kv_len, 1, x->wide + d, x->dim, x->kv_len);
            worst = bench_oracle_worse(worst, fabs((double)x->y[i * x->dim + d] - exact));
        }
    return worst;
}

static bool make_weighted_sum(const bench_wish *wish, bench_case *c, kv_type type)
{
    const bench_shape *s = wish->shape;
    const int64_t heads = heads_of(s), dim = s->value_dim;
    if (dim % type.elements)
        return false;
    kv_context *x = context_new(wish, type, dim, heads * s->kv_len, heads * dim);
    x->heads = heads;
    bench_fill_range(x->other, heads * x->kv_len, 0.0f, 2.0f / (float)x->kv_len, 23);
    c->flops = 2.0 * (double)heads * (double)s->kv_len * (double)dim;
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, run_weighted_sum, error_weighted_sum);
    return true;
}

/* ------------------------------------------------------------- conversions */

static void run_widen(void *context, int worker)
{
    (void)worker;
    const kv_context *x = context;
    for (int64_t j = 0; j < x->kv_len; j++)
        x->type.widen(x->rows + j * x->row_bytes, x->scales ? x->scales + j : NULL,
                      x->y + j * x->dim, x->dim);
}

static bool make_widen(const bench_wish *wish, bench_case *c, kv_type type)
{
    bench_shape shape = *wish->shape;
    shape.kv_len = wish->kernels->key_block;
    const bench_wish block = {.shape = &shape, .kernels = wish->kernels};
    if (shape.head_dim % type.elements)
        return false;
    kv_context *x = context_new(&block, type, shape.head_dim, 0, shape.kv_len * shape.head_dim);
    c->elements = (double)(x->kv_len * x->dim);
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run_widen, NULL);
    return true;
}

static void run_narrow(void *context, int worker)
{
    (void)worker;
    const kv_context *x = context;
    for (int64_t j = 0; j < x->kv_len; j++)
        x->type.narrow(x->other + j * x->dim, (char *)x->y + j * x->row_bytes,
                       x->scales ? x->scales + j : NULL, x->dim);
}

static bool make_narrow(const bench_wish *wish, bench_case *c, kv_type type)
{
    bench_shape shape = *wish->shape;
    shape.kv_len = wish->kernels->key_block;
    const bench_wish block = {.shape = &shape, .kernels = wish->kernels};
    const int64_t dim = shape.head_dim, n = shape.kv_len * dim;
    if (dim % type.elements)
        return false;
    kv_context *x = context_new(&block, type, dim, n, n);
    bench_fill_normal(x->other, n, 24);
    c->elements = (double)n;
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run_narrow, NULL);
    return true;
}

/* ----------------------------------------------------------------- rotary */

static void run_rotary(void *context, int worker)
{
    (void)worker;
    const kv_context *x = context;
    for (int64_t j = 0; j < x->kv_len; j++)
        x->rotary(x->wide + j * x->dim, x->other, x->other + x->dim / 2, x->y + j * x->dim,
                  x->dim / 2, false);
}

bool bench_make_rotary_f32(const bench_wish *wish, bench_case *c)
{
    bench_shape shape = *wish->shape;
    shape.kv_len = wish->kernels->key_block;
    const bench_wish block = {.shape = &shape, .kernels = wish->kernels};
    const int64_t dim = shape.head_dim;
    if (dim % 2)
        return false;
    kv_context *x = context_new(&block,
                                (kv_type){.bytes = 2,
                                          .elements = 1,
                                          .widen_16 = wish->kernels->widen_f16,
                                          .narrow_16 = wish->kernels->narrow_f16},
                                dim, dim, shape.kv_len * dim);
    x->rotary = wish->kernels->rotary_f32;
    bench_fill_range(x->other, dim, -1.0f, 1.0f, 25);
    c->elements = (double)(x->kv_len * dim);
    c->bound = BENCH_NO_BOUND;
    bench_finish(c, &x->memory, run_rotary, NULL);
    return true;
}

/* ---------------------------------------------------------------- formats */

static kv_type type_f32(const qkv_kernels *k)
{
    (void)k;
    return (kv_type){.bytes = sizeof(float), .elements = 1};
}

static kv_type type_f16(const qkv_kernels *k)
{
    return (kv_type){
        .bytes = 2, .elements = 1, .widen_16 = k->widen_f16, .narrow_16 = k->narrow_f16};
}

static kv_type type_bf16(const qkv_kernels *k)
{
    return (kv_type){
        .bytes = 2, .elements = 1, .widen_16 = k->widen_bf16, .narrow_16 = k->narrow_bf16};
}

#define TYPE(name, bytes_, elements_, scaled_)                                                     \
    static kv_type type_##name(const qkv_kernels *k)                                               \
    {                                                                                              \
        return (kv_type){.bytes = (bytes_),                                                        \
                         .elements = (elements_),                                                  \
                         .scaled = (scaled_),                                                      \
                         .widen = k->widen_##name,                                                 \
                         .narrow = k->narrow_##name};                                              \
    }                                                                                              \
    bool bench_make_widen_##name(const bench_wish *wish, bench_case *c)                            \
    {                                                                                              \
        return make_widen(wish, c, type_##name(wish->kernels));                                    \
    }                                                                                              \
    bool bench_make_narrow_##name(const bench_wish *wish, bench_case *c)                           \
    {                                                                                              \
        return make_narrow(wish, c, type_##name(wish->kernels));                                   \
    }
TYPE(q8_0, QKV_Q8_0_BYTES, QKV_KV_BLOCK, false)
TYPE(i8, 1, 1, true)
TYPE(f8_e4m3, 1, 1, false)
TYPE(f8_e5m2, 1, 1, false)
TYPE(q4_0, QKV_Q4_0_BYTES, QKV_KV_BLOCK, false)

#define PRODUCTS(name)                                                                             \
    bool bench_make_dot_##name(const bench_wish *wish, bench_case *c)                              \
    {                                                                                              \
        kv_type type = type_##name(wish->kernels);                                                 \
        type.dot = wish->kernels->dot_##name;                                                      \
        return make_dot(wish, c, type);                                                            \
    }                                                                                              \
    bool bench_make_weighted_sum_##name(const bench_wish *wish, bench_case *c)                     \
    {                                                                                              \
        kv_type type = type_##name(wish->kernels);                                                 \
        type.weighted_sum = wish->kernels->weighted_sum_##name;                                    \
        return make_weighted_sum(wish, c, type);                                                   \
    }
PRODUCTS(f32)
PRODUCTS(f16)
PRODUCTS(bf16)
PRODUCTS(q8_0)
PRODUCTS(i8)
PRODUCTS(f8_e4m3)
PRODUCTS(f8_e5m2)
PRODUCTS(q4_0)
