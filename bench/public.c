/* SPDX-License-Identifier: MIT */
/*
 * The public functions, called as a program calls them: argument checks,
 * planning and packing included. The three steps take one head; attention
 * and the projections take the whole shape.
 */
#include "cases.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/drivers/append.h"
#include "../kernels/drivers/typed.h"
#include "oracle.h"
#include "validate.h"

/* Rows whose result is compared with the oracle's. */
enum { SAMPLED_ROWS = 24 };

/* A rotation over this much memory is cold in every cache that is shared. */
#define COLD_BYTES (INT64_C(256) << 20)

static void must(qkv_status status, const char *what)
{
    if (status == QKV_OK)
        return;
    fprintf(stderr, "qkv-bench: %s: %s\n", what, qkv_strerror(status));
    exit(1);
}

static void *scratch_new(size_t bytes)
{
    const size_t whole = (bytes + QKV_SCRATCH_ALIGN) / QKV_SCRATCH_ALIGN * QKV_SCRATCH_ALIGN;
    void *p = aligned_alloc(QKV_SCRATCH_ALIGN, whole);
    if (!p)
        must(QKV_E_SCRATCH, "scratch memory");
    return p;
}

/* --------------------------------------------------------------- the steps */

typedef struct steps_context {
    bench_memory memory;
    float *a, *b, *y;
    int64_t rows, kv_len, d;
    float scale;
} steps_context;

/* a is rows x a_cols, b is b_rows x b_cols (or nothing), y is rows x y_cols. */
static steps_context *steps_new(const bench_wish *wish, bench_case *c, int64_t a_cols,
                                int64_t b_cols, int64_t y_cols)
{
    const bench_shape *s = wish->shape;
    steps_context *x = bench_alloc(sizeof *x);
    const int64_t b_rows = b_cols ? s->kv_len : 0;
    x->rows = s->q_len;
    x->kv_len = s->kv_len;
    x->scale = 1.0f / sqrtf((float)s->head_dim);
    x->memory.in = bench_arena_new(x->rows * a_cols + b_rows * b_cols);
    x->memory.out = bench_arena_new(x->rows * y_cols);
    x->a = bench_take(&x->memory.in, x->rows * a_cols);
    x->b = bench_take(&x->memory.in, b_rows * b_cols);
    x->y = bench_take(&x->memory.out, x->rows * y_cols);
    bench_fill_normal(x->a, x->rows * a_cols, 21);
    bench_fill_normal(x->b, b_rows * b_cols, 22);
    c->bound = BENCH_ROOF;
    bench_finish(c, &x->memory, NULL, NULL); /* each says what it runs */
    return x;
}

static void run_dot(void *context, int worker)
{
    (void)worker;
    const steps_context *x = context;
    must(qkv_dot(x->a, x->d, x->b, x->d, x->y, x->kv_len, x->rows, x->kv_len, x->d), "qkv_dot");
}

/* Every so-manieth row, so that SAMPLED_ROWS of them are looked at. */
static int64_t sample_step(int64_t rows)
{
    return rows > SAMPLED_ROWS ? rows / SAMPLED_ROWS : 1;
}

static double error_dot(void *context)
{
    const steps_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->rows; i += sample_step(x->rows))
        for (int64_t j = 0; j < x->kv_len; j++) {
            const double exact = bench_oracle_dot(x->a + i * x->d, 1, x->b + j * x->d, 1, x->d);
            worst = bench_oracle_worse(worst, fabs((double)x->y[i * x->kv_len + j] - exact));
        }
    return worst;
}

bool bench_make_dot(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    steps_context *x = steps_new(wish, c, s->head_dim, s->head_dim, s->kv_len);
    x->d = s->head_dim;
    c->flops = 2.0 * (double)x->rows * (double)x->kv_len * (double)s->head_dim;
    c->work.run = run_dot;
    c->max_error = error_dot;
    return true;
}

static void run_scale_softmax(void *context, int worker)
{
    (void)worker;
    const steps_context *x = context;
    must(qkv_scale_softmax(x->a, x->kv_len, x->y, x->kv_len, NULL, x->rows, x->kv_len, x->scale),
         "qkv_scale_softmax");
}

static double error_scale_softmax(void *context)
{
    const steps_context *x = context;
    double *exact = bench_alloc((size_t)x->kv_len * sizeof *exact), worst = 0.0;
    for (int64_t i = 0; i < x->rows; i += sample_step(x->rows)) {
        for (int64_t j = 0; j < x->kv_len; j++)
            exact[j] = (double)x->scale * (double)x->a[i * x->kv_len + j];
        bench_oracle_softmax(exact, x->kv_len);
        for (int64_t j = 0; j < x->kv_len; j++)
            worst = bench_oracle_worse(worst, fabs((double)x->y[i * x->kv_len + j] - exact[j]));
    }
    free(exact);
    return worst;
}

bool bench_make_scale_softmax(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const steps_context *x = steps_new(wish, c, s->kv_len, 0, s->kv_len);
    c->elements = (double)x->rows * (double)x->kv_len;
    c->bound = BENCH_NO_BOUND;
    c->work.run = run_scale_softmax;
    c->max_error = error_scale_softmax;
    return true;
}

static void run_weighted_sum(void *context, int worker)
{
    (void)worker;
    const steps_context *x = context;
    must(qkv_weighted_sum(x->a, x->kv_len, x->b, x->d, x->y, x->d, x->rows, x->kv_len, x->d),
         "qkv_weighted_sum");
}

static double error_weighted_sum(void *context)
{
    const steps_context *x = context;
    double worst = 0.0;
    for (int64_t i = 0; i < x->rows; i += sample_step(x->rows))
        for (int64_t d = 0; d < x->d; d++) {
            const double exact =
                bench_oracle_dot(x->a + i * x->kv_len, 1, x->b + d, x->d, x->kv_len);
            worst = bench_oracle_worse(worst, fabs((double)x->y[i * x->d + d] - exact));
        }
    return worst;
}

bool bench_make_weighted_sum(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    steps_context *x = steps_new(wish, c, s->kv_len, s->value_dim, s->value_dim);
    x->d = s->value_dim;
    bench_fill_range(x->a, x->rows * x->kv_len, 0.0f, 2.0f / (float)x->kv_len, 23);
    c->flops = 2.0 * (double)x->rows * (double)x->kv_len * (double)s->value_dim;
    c->work.run = run_weighted_sum;
    c->max_error = error_weighted_sum;
    return true;
}

/* --------------------------------------------------------------- attention */

typedef struct attention_context {
    const bench_shape *shape;
    /* Of a batch: where the keys of each sequence begin among all, and its pages. */
    int64_t starts[BENCH_SEQUENCES_MAX];
    int32_t *page_table;
    bench_arena exact;    /* queries, one output row, keys and values as f32 */
    bench_arena in, out;  /* as the function gets them; in: 'copies' times */
    int64_t copy, copies; /* of keys and values */
    int64_t copy_bytes, values_offset;
    float *q, *row, *keys, *values;
    char *kv;
    qkv_attention_desc desc;
    void *scratch;
    size_t scratch_size;
    bool tasks; /* run as tasks, on several threads */
    int64_t task_count;
    _Atomic int64_t next_task;
} attention_context;

static void attention_begin(void *context)
{
    attention_context *x = context;
    x->copy = x->copy + 1 < x->copies ? x->copy + 1 : 0;
    x->desc.key.data = x->kv + x->copy * x->copy_bytes;
    x->desc.value.data = x->kv + x->copy * x->copy_bytes + x->values_offset;
    if (x->tasks)
        must(qkv_attention_begin(&x->desc, x->scratch, x->scratch_size), "qkv_attention_begin");
    atomic_store(&x->next_task, 0);
}

static void attention_run(void *context, int worker)
{
    attention_context *x = context;
    if (!x->tasks) {
        must(qkv_attention(&x->desc, x->scratch, x->scratch_size), "qkv_attention");
        return;
    }
    for (;;) {
        const int64_t task = atomic_fetch_add(&x->next_task, 1);
        if (task >= x->task_count)
            return;
        must(qkv_attention_run_task(&x->desc, task, worker, x->scratch, x->scratch_size),
             "qkv_attention_run_task");
    }
}

/* What a program with one thread calls: no tasks, no parts to be merged by others. */
static void attention_run_one(void *context, int worker)
{
    (void)worker;
    const attention_context *x = context;
    qkv_attention_desc desc = x->desc;
    desc.flags &= ~QKV_SPLIT;
    must(qkv_attention(&desc, x->scratch, x->scratch_size), "qkv_attention");
}

/* Keys and values may have types that queries and outputs have not. */
static bool is_cache_only(int32_t dtype)
{
    return dtype > QKV_BF16;
}

static const qkv_kernels *plain(void)
{
    return qkv_kernels_of(QKV_ISA_scalar);
}

/* Converts a row and gives it the values that the conversion leaves. */
static void narrow_row(int32_t dtype, float *x, void *y, float *scale, int64_t n)
{
    qkv_narrow_typed(plain(), dtype, x, y, scale, n);
    qkv_widen_typed(plain(), dtype, y, scale, x, n);
}

/* Row j of a sequence and head: its place among the exact ones, [sequence][head][row]. */
static int64_t exact_row(const attention_context *x, int b, int64_t head, int64_t j)
{
    return x->shape->kv_heads * x->starts[b] + head * x->shape->lens[b] + j;
}

/* The same in the cache, [page][head][row] where there are pages. */
static int64_t cache_row(const attention_context *x, int b, int64_t head, int64_t j)
{
    const bench_shape *s = x->shape;
    if (!s->page_size)
        return (b * s->kv_heads + head) * s->kv_len + j;
    const int64_t columns = (s->kv_len + s->page_size - 1) / s->page_size;
    const int64_t page = x->page_table[b * columns + j / s->page_size];
    return (page * s->kv_heads + head) * s->page_size + j % s->page_size;
}

static void narrow(const attention_context *x, int32_t dtype, float *exact, char *cache,
                   float *scales, int64_t dim)
{
    const bench_shape *s = x->shape;
    for (int b = 0; b < s->sequences; b++)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t j = 0; j < s->lens[b]; j++) {
                const int64_t to = cache_row(x, b, head, j);
                narrow_row(dtype, exact + exact_row(x, b, head, j) * dim,
                           cache + qkv_bytes(dtype, to * dim), scales + to, dim);
            }
}

static double attention_error(void *context)
{
    const attention_context *x = context;
    const bench_shape *s = x->shape;
    const int64_t rows = s->sequences * s->q_heads * s->q_len, group = s->q_heads / s->kv_heads;
    /* From the last row up: under a causal mask it sees most. */
    double *weights = bench_alloc((size_t)s->kv_len * sizeof *weights), worst = 0.0;
    for (int64_t r = rows - 1; r >= 0; r -= sample_step(rows)) {
        const int b = (int)(r / s->q_len / s->q_heads);
        const int64_t kv_row = exact_row(x, b, r / s->q_len % s->q_heads / group, 0);
        const int32_t dtype = x->desc.out.dtype;
        const int64_t at = qkv_bytes(dtype, r * s->value_dim);
        qkv_widen_typed(plain(), dtype, (const char *)x->desc.out.data + at, NULL, x->row,
                        s->value_dim);
        const bench_oracle_row row = {
            .query = x->q + r * s->head_dim,
            .keys = x->keys + kv_row * s->head_dim,
            .values = x->values + kv_row * s->value_dim,
            .out = x->row,
            .keys_stride = s->head_dim,
            .values_stride = s->value_dim,
            .kv_len = bench_shape_visible(s, b, r % s->q_len),
            .head_dim = s->head_dim,
            .value_dim = s->value_dim,
            .scale = 1.0 / sqrt((double)s->head_dim),
        };
        worst = bench_oracle_worse(worst, bench_oracle_attention(&row, weights));
    }
    free(weights);
    return worst;
}

static void attention_destroy(void *context)
{
    attention_context *x = context;
    free(x->exact.base);
    free(x->in.base);
    free(x->out.base);
    free(x->scratch);
    free(x->page_table);
    free(x);
}

/* Who has which keys; the pages lie shuffled, as they do once sequences come and go. */
static void attention_batch(attention_context *x)
{
    const bench_shape *s = x->shape;
    for (int b = 1; b < s->sequences; b++)
        x->starts[b] = x->starts[b - 1] + s->lens[b - 1];
    if (s->sequences > 1) {
        x->desc.batch = s->sequences;
        x->desc.kv_lens = s->lens;
    }
    if (!s->page_size)
        return;
    const int64_t columns = (s->kv_len + s->page_size - 1) / s->page_size;
    const int64_t pages = bench_shape_pages(s);
    int32_t *order = bench_alloc((size_t)pages * sizeof *order);
    x->page_table = bench_alloc((size_t)(s->sequences * columns) * sizeof *x->page_table);
    for (int64_t i = 0; i < pages; i++)
        order[i] = (int32_t)i;
    bench_shuffle(order, pages, 34);
    for (int64_t b = 0, taken = 0; b < s->sequences; b++)
        for (int64_t j = 0; j * s->page_size < s->lens[b]; j++)
            x->page_table[b * columns + j] = order[taken++];
    free(order);
    x->desc.page_size = s->page_size;
    x->desc.pages = pages;
    x->desc.page_table = x->page_table;
}

/* Queries, keys and values as f32. */
static void attention_exact(attention_context *x, int64_t queries, int64_t scales)
{
    const bench_shape *s = x->shape;
    const int64_t keys = s->kv_heads * bench_shape_keys(s);
    x->exact =
        bench_arena_new(queries + s->value_dim + keys * (s->head_dim + s->value_dim) + 2 * scales);
    x->q = bench_take(&x->exact, queries);
    x->row = bench_take(&x->exact, s->value_dim);
    x->keys = bench_take(&x->exact, keys * s->head_dim);
    x->values = bench_take(&x->exact, keys * s->value_dim);
    bench_fill_normal(x->q, queries, 31);
    bench_fill_normal(x->keys, keys * s->head_dim, 32);
    bench_fill_normal(x->values, keys * s->value_dim, 33);
}

static void attention_memory(attention_context *x, const bench_wish *wish)
{
    const bench_shape *s = wish->shape;
    const int64_t rows = s->kv_heads * (s->page_size ? bench_shape_pages(s) * s->page_size
                                                     : s->sequences * s->kv_len);
    const int64_t queries = s->sequences * s->q_heads * s->q_len * s->head_dim;
    const int64_t outputs = s->sequences * s->q_heads * s->q_len * s->value_dim;

    attention_exact(x, queries, rows);
    float *key_scales = bench_take(&x->exact, rows), *value_scales = bench_take(&x->exact, rows);

    x->values_offset = (qkv_bytes(wish->dtype, rows * s->head_dim) + 63) / 64 * 64;
    x->copy_bytes = x->values_offset + (qkv_bytes(wish->dtype, rows * s->value_dim) + 63) / 64 * 64;
    x->copies = wish->cold ? COLD_BYTES / x->copy_bytes + 2 : 1;
    x->in = bench_arena_new(x->copies * x->copy_bytes / 4);
    x->out = bench_arena_new(queries + outputs);
    x->kv = (char *)bench_take(&x->in, x->copies * x->copy_bytes / 4);
    for (int64_t i = 0; i < x->copies; i++) {
        char *to = x->kv + i * x->copy_bytes;
        narrow(x, wish->dtype, x->keys, to, key_scales, s->head_dim);
        narrow(x, wish->dtype, x->values, to + x->values_offset, value_scales, s->value_dim);
    }
    if (wish->dtype == QKV_I8) {
        x->desc.key_scale.data = key_scales;
        x->desc.value_scale.data = value_scales;
    }
    x->desc.query.data = bench_take(&x->out, queries);
    x->desc.out.data = bench_take(&x->out, outputs);
    float unused;
    narrow_row(x->desc.query.dtype, x->q, x->desc.query.data, &unused, queries);
}

/* All keys and values once, in whole lines; of rows that are not used, none. */
static int64_t useful_bytes(const attention_context *x, int32_t dtype)
{
    const bench_shape *s = x->shape;
    if (!bench_shape_is_batch(s))
        return x->copy_bytes;
    const int64_t rows = s->kv_heads * bench_shape_keys(s);
    return qkv_bytes(dtype, rows * (s->head_dim + s->value_dim)) / 64 * 64;
}

bool bench_make_attention(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const bool blocks = wish->dtype == QKV_Q8_0 || wish->dtype == QKV_Q4_0;
    if (blocks && (s->head_dim % QKV_KV_BLOCK || s->value_dim % QKV_KV_BLOCK))
        return false;
    const int32_t other = is_cache_only(wish->dtype) ? QKV_F32 : wish->dtype;
    attention_context *x = bench_alloc(sizeof *x);
    x->shape = s;
    x->desc = (qkv_attention_desc){
        .size = sizeof x->desc,
        .flags = (s->causal ? QKV_CAUSAL : 0) | (wish->threads > 1 ? QKV_SPLIT : 0),
        .q_heads = s->q_heads,
        .kv_heads = s->kv_heads,
        .q_len = s->q_len,
        .kv_len = s->kv_len,
        .head_dim = s->head_dim,
        .value_dim = s->value_dim,
        .query = {.dtype = other},
        .key = {.dtype = wish->dtype},
        .value = {.dtype = wish->dtype},
        .out = {.dtype = other},
    };
    attention_batch(x);
    attention_memory(x, wish);
    x->desc.key.data = x->kv;
    x->desc.value.data = x->kv + x->values_offset;
    x->tasks = wish->threads > 1;
    must(qkv_attention_scratch_size(&x->desc, wish->threads, &x->scratch_size), "attention");
    must(qkv_attention_task_count(&x->desc, &x->task_count), "attention");
    x->scratch = scratch_new(x->scratch_size);

    const double dims = (double)(s->head_dim + s->value_dim);
    c->flops = 2.0 * (double)s->q_heads * bench_shape_pairs(s) * dims;
    c->bound = BENCH_ROOF;
    c->data = x->in.base;
    c->bytes = useful_bytes(x, wish->dtype);
    c->copies = x->copies;
    c->work = (bench_work){.begin = attention_begin, .run = attention_run, .context = x};
    c->run_one = attention_run_one;
    c->max_error = attention_error;
    c->destroy = attention_destroy;
    return true;
}

/* --------------------------------------------------------- filling a cache */

typedef struct append_context {
    bench_memory memory; /* in: new rows and tables; out: the cache */
    bench_arena exact;
    qkv_kv_append_desc desc;
    float *row; /* of the cache, as f32 */
} append_context;

static void append_run(void *context, int worker)
{
    (void)worker;
    const append_context *x = context;
    must(qkv_kv_append(&x->desc), "qkv_kv_append");
}

/* The largest difference of a cache's rows from the new ones, the rounding to its type included. */
static double side_error(const append_context *x, const qkv_tensor *from, const qkv_tensor *to,
                         const qkv_tensor *scale, int64_t dim, int64_t pairs)
{
    const int64_t rows = x->desc.kv_heads * x->desc.kv_len;
    double worst = 0.0;
    for (int64_t r = rows - 1; r >= 0; r -= sample_step(rows)) {
        const float *new = (const float *)from->data + r *dim;
        const int64_t table = r % x->desc.kv_len * pairs;
        qkv_widen_typed(plain(), to->dtype, (const char *)to->data + qkv_bytes(to->dtype, r * dim),
                        scale->data ? (const float *)scale->data + r : NULL, x->row, dim);
        for (int64_t d = 0; d < dim; d++) {
            double exact = (double)new[d];
            if (d < 2 * pairs) {
                const int64_t i = d % pairs;
                const double a = (double)new[i], b = (double)new[i + pairs];
                const double cosine = (double)x->desc.cosines[table + i];
                const double sine = (double)x->desc.sines[table + i];
                exact = d < pairs ? a * cosine - b * sine : a * sine + b * cosine;
            }
            worst = bench_oracle_worse(worst, fabs((double)x->row[d] - exact));
        }
    }
    return worst;
}

static double append_error(void *context)
{
    const append_context *x = context;
    const qkv_kv_append_desc *d = &x->desc;
    return bench_oracle_worse(
        side_error(x, &d->new_key, &d->key, &d->key_scale, d->head_dim, d->rotary_dim / 2),
        side_error(x, &d->new_value, &d->value, &d->value_scale, d->value_dim, 0));
}

static void append_destroy(void *context)
{
    append_context *x = context;
    free(x->exact.base);
    bench_free_memory(x);
}

/* A turn for every position and pair, the same for all heads. */
static void append_tables(append_context *x, int64_t pairs)
{
    const int64_t n = x->desc.kv_len * pairs;
    float *cosines = bench_take(&x->memory.in, n), *sines = bench_take(&x->memory.in, n);
    bench_fill_range(sines, n, -3.0f, 3.0f, 53);
    for (int64_t i = 0; i < n; i++) {
        cosines[i] = cosf(sines[i]);
        sines[i] = sinf(sines[i]);
    }
    x->desc.rotary_dim = 2 * pairs;
    x->desc.rotary_len = x->desc.kv_len;
    x->desc.cosines = cosines;
    x->desc.sines = sines;
}

static void append_memory(append_context *x, int32_t dtype, int64_t pairs)
{
    qkv_kv_append_desc *d = &x->desc;
    const int64_t rows = d->kv_heads * d->kv_len;
    const int64_t keys = rows * d->head_dim, values = rows * d->value_dim;
    x->memory.in = bench_arena_new(keys + values + 2 * d->kv_len * pairs);
    float *new_key = bench_take(&x->memory.in, keys);
    float *new_value = bench_take(&x->memory.in, values);
    bench_fill_normal(new_key, keys, 51);
    bench_fill_normal(new_value, values, 52);
    if (pairs)
        append_tables(x, pairs);
    x->exact = bench_arena_new(d->head_dim + d->value_dim);
    x->row = bench_take(&x->exact, d->head_dim + d->value_dim);

    const int64_t key_floats = (qkv_bytes(dtype, keys) + 3) / 4;
    const int64_t value_floats = (qkv_bytes(dtype, values) + 3) / 4;
    x->memory.out = bench_arena_new(key_floats + value_floats + 2 * rows);
    d->new_key.data = new_key;
    d->new_value.data = new_value;
    d->key = (qkv_tensor){.data = bench_take(&x->memory.out, key_floats), .dtype = dtype};
    d->value = (qkv_tensor){.data = bench_take(&x->memory.out, value_floats), .dtype = dtype};
    if (dtype == QKV_I8) {
        d->key_scale.data = bench_take(&x->memory.out, rows);
        d->value_scale.data = bench_take(&x->memory.out, rows);
    }
}

/* The shape's keys and values, f32, on their way into a cache of the wanted type. */
static bool make_append(const bench_wish *wish, bench_case *c, bool rotary)
{
    const bench_shape *s = wish->shape;
    const bool blocks = wish->dtype == QKV_Q8_0 || wish->dtype == QKV_Q4_0;
    if (blocks && (s->head_dim % QKV_KV_BLOCK || s->value_dim % QKV_KV_BLOCK))
        return false;
    if (rotary && (s->head_dim < 2 || s->head_dim > QKV_APPEND_DIM_MAX))
        return false;
    append_context *x = bench_alloc(sizeof *x);
    x->desc = (qkv_kv_append_desc){
        .size = sizeof x->desc,
        .kv_heads = s->kv_heads,
        .new_len = s->kv_len,
        .kv_len = s->kv_len,
        .head_dim = s->head_dim,
        .value_dim = s->value_dim,
    };
    append_memory(x, wish->dtype, rotary ? s->head_dim / 2 : 0);
    bench_finish(c, &x->memory, append_run, append_error);
    c->destroy = append_destroy;
    c->bound = BENCH_COPY;
    c->elements = (double)(s->kv_heads * s->kv_len) * (double)(s->head_dim + s->value_dim);
    c->to_bytes = x->memory.out.used;
    return true;
}

bool bench_make_kv_append(const bench_wish *wish, bench_case *c)
{
    return make_append(wish, c, false);
}

bool bench_make_kv_append_rotary(const bench_wish *wish, bench_case *c)
{
    return make_append(wish, c, true);
}

/* ------------------------------------------------------- projection, layer */

typedef struct layer_context {
    bench_arena exact;   /* input and weights as f32 */
    bench_arena in, out; /* as the function gets them */
    float *x, *w;        /* exact */
    void *input, *weights, *y;
    int32_t dtype;
    qkv_project_desc project;
    qkv_self_attention_desc layer;
    void *scratch;
    size_t scratch_size;
} layer_context;

static void layer_destroy(void *context)
{
    layer_context *x = context;
    free(x->exact.base);
    free(x->in.base);
    free(x->out.base);
    free(x->scratch);
    free(x);
}

/* Weights of the standard deviation 'sigma'. */
static layer_context *layer_new(const bench_wish *wish, bench_case *c, int64_t inputs,
                                int64_t weights, float sigma, int64_t outputs)
{
    layer_context *x = bench_alloc(sizeof *x);
    x->dtype = wish->dtype;
    x->exact = bench_arena_new(weights + inputs);
    x->w = bench_take(&x->exact, weights);
    x->x = bench_take(&x->exact, inputs);
    x->in = bench_arena_new(weights + inputs);
    x->out = bench_arena_new(outputs);
    const int64_t size = qkv_bytes(x->dtype, 1), round = 4 / size - 1;
    x->weights = bench_take(&x->in, (weights + round) * size / 4);
    x->input = bench_take(&x->in, (inputs + round) * size / 4);
    x->y = bench_take(&x->out, outputs);
    bench_fill_normal(x->x, inputs, 41);
    bench_fill_normal(x->w, weights, 42);
    for (int64_t i = 0; i < weights; i++)
        x->w[i] *= sigma;
    narrow_row(x->dtype, x->x, x->input, NULL, inputs);
    narrow_row(x->dtype, x->w, x->weights, NULL, weights);
    c->data = x->in.base;
    c->bytes = x->in.used;
    c->copies = 1;
    c->bound = BENCH_ROOF;
    c->destroy = layer_destroy;
    c->work.context = x;
    return x;
}

static void project_run(void *context, int worker)
{
    (void)worker;
    const layer_context *x = context;
    must(qkv_project(&x->project, x->scratch, x->scratch_size), "qkv_project");
}

static double project_error(void *context)
{
    const layer_context *x = context;
    const qkv_project_desc *p = &x->project;
    const int64_t out_dim = p->heads * p->head_dim;
    double worst = 0.0;
    for (int64_t i = 0; i < p->rows; i += sample_step(p->rows))
        for (int64_t col = 0; col < out_dim; col += sample_step(out_dim)) {
            const double exact =
                bench_oracle_dot(x->x + i * p->in_dim, 1, x->w + col, out_dim, p->in_dim);
            const int64_t h = col / p->head_dim, d = col % p->head_dim;
            const int64_t at = (h * p->rows + i) * p->head_dim + d;
            float got;
            qkv_widen_typed(plain(), x->dtype, (const char *)x->y + qkv_bytes(x->dtype, at), NULL,
                            &got, 1);
            worst = bench_oracle_worse(worst, fabs((double)got - exact));
        }
    return worst;
}

/* X W for a product; the query projection of an attention shape otherwise. */
bool bench_make_project(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    const int64_t model = s->q_heads * s->head_dim;
    const int64_t rows = s->product ? s->rows : s->q_len;
    const int64_t in_dim = s->product ? s->in_dim : model;
    const int64_t out_dim = s->product ? s->out_dim : model;

    if (is_cache_only(wish->dtype))
        return false;
    layer_context *x = layer_new(wish, c, rows * in_dim, in_dim * out_dim, 1.0f, rows * out_dim);
    x->project = (qkv_project_desc){
        .size = sizeof x->project,
        .rows = rows,
        .in_dim = in_dim,
        .heads = s->product ? 1 : s->q_heads,
        .head_dim = s->product ? out_dim : s->head_dim,
        .input = {.data = x->input, .dtype = x->dtype},
        .linear = {.weight = x->weights, .dtype = x->dtype},
        .out = {.data = x->y, .dtype = x->dtype},
    };
    must(qkv_project_scratch_size(&x->project, &x->scratch_size), "qkv_project");
    x->scratch = scratch_new(x->scratch_size);
    c->flops = 2.0 * (double)rows * (double)in_dim * (double)out_dim;
    c->work.run = project_run;
    c->max_error = project_error;
    return true;
}

static void self_attention_run(void *context, int worker)
{
    (void)worker;
    const layer_context *x = context;
    must(qkv_self_attention(&x->layer, x->scratch, x->scratch_size), "qkv_self_attention");
}

/* The matrix that begins at element 'at' of the weights. */
static qkv_linear linear_at(const layer_context *x, int64_t at)
{
    return (qkv_linear){.weight = (const char *)x->weights + qkv_bytes(x->dtype, at),
                        .dtype = x->dtype};
}

static void self_attention_describe(layer_context *x, const bench_shape *s, int64_t model)
{
    const int64_t wq = model * s->q_heads * s->head_dim;
    const int64_t wk = model * s->kv_heads * s->head_dim;
    const int64_t wv = model * s->kv_heads * s->value_dim;
    x->layer = (qkv_self_attention_desc){
        .size = sizeof x->layer,
        .flags = s->causal ? QKV_CAUSAL : 0,
        .seq_len = s->q_len,
        .model_dim = model,
        .q_heads = s->q_heads,
        .kv_heads = s->kv_heads,
        .head_dim = s->head_dim,
        .value_dim = s->value_dim,
        .input = {.data = x->input, .dtype = x->dtype},
        .wq = linear_at(x, 0),
        .wk = linear_at(x, wq),
        .wv = linear_at(x, wq + wk),
        .wo = linear_at(x, wq + wk + wv),
        .out = {.data = x->y, .dtype = x->dtype},
    };
}

/* The layer whose attention has this shape; it exists where queries and keys come together. */
bool bench_make_self_attention(const bench_wish *wish, bench_case *c)
{
    const bench_shape *s = wish->shape;
    if (s->q_len != s->kv_len || is_cache_only(wish->dtype))
        return false;
    const int64_t model = s->q_heads * s->head_dim;
    const int64_t columns =
        s->q_heads * (s->head_dim + s->value_dim) + s->kv_heads * (s->head_dim + s->value_dim);
    /* Keeps the logits near unit variance. */
    const float sigma = 1.0f / sqrtf((float)model);
    layer_context *x =
        layer_new(wish, c, s->q_len * model, model * columns, sigma, s->q_len * model);
    self_attention_describe(x, s, model);
    must(qkv_self_attention_scratch_size(&x->layer, &x->scratch_size), "qkv_self_attention");
    x->scratch = scratch_new(x->scratch_size);
    c->flops =
        2.0 * (double)s->q_len * (double)model * (double)columns +
        2.0 * (double)s->q_heads * bench_shape_pairs(s) * (double)(s->head_dim + s->value_dim);
    c->work.run = self_attention_run;
    return true;
}
