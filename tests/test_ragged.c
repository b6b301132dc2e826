/* SPDX-License-Identifier: MIT */
/*
 * Batches whose sequences differ in length, and keys and values in pages:
 * each sequence against the oracle, and bit by bit against itself alone in a
 * plain descriptor. Whatever does not belong to a sequence holds NaN.
 */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOT_Q = SLOT_FREE,
    SLOT_K,
    SLOT_V,
    SLOT_OUT,
    SLOT_LSE,
    SLOT_Q_STARTS,
    SLOT_KV_STARTS,
    SLOT_KV_LENS,
    SLOT_Q_OFFSETS,
    SLOT_PAGES,
    SLOT_K_SCALES,
    SLOT_V_SCALES,
    SLOT_ALONE_OUT,
    SLOT_ALONE_LSE
};
enum { MOST = 6 };
enum { D_Q, D_K, D_V, D_OUT, D_OUT_BOUND, D_LSE, D_LSE_BOUND, D_Q_ERROR };

/* How the rows of a sequence's keys and values are found. */
typedef enum cache { CACHE_PADDED, CACHE_STARTS, CACHE_PAGES, CACHES } cache;

typedef struct sequence {
    int64_t q_len, kv_len, q_first, kv_first, offset;
    float *q, *k, *v;             /* packed [heads][len][dim], with numbers that the types hold */
    qkv_tensor query, key, value; /* the same in their types */
    qkv_tensor key_scale, value_scale; /* of QKV_I8 */
} sequence;

typedef struct ragged {
    int64_t batch, q_heads, kv_heads, dim, value_dim;
    int64_t q_rows, kv_rows; /* of the tensors */
    int64_t page_size, pages, table_stride;
    bool causal, q_starts, kv_lens, q_offsets;
    cache how;
    int32_t q_type, k_type, v_type;
    sequence s[MOST];
    int32_t *table;
    qkv_attention_desc desc;
    float *out, *lse;
} ragged;

static bool is_blocks(int32_t dtype)
{
    return dtype == QKV_Q8_0 || dtype == QKV_Q4_0;
}

static size_t type_bytes(int32_t dtype, int64_t n)
{
    switch (dtype) {
    case QKV_F32:
        return (size_t)n * 4;
    case QKV_F16:
    case QKV_BF16:
        return (size_t)n * 2;
    case QKV_Q8_0:
        return (size_t)n / 32 * 34;
    case QKV_Q4_0:
        return (size_t)n / 32 * 18;
    default:
        return (size_t)n;
    }
}

/* One row of f32 to a type, and back to the numbers that the type holds. */
static void round_row(int32_t dtype, float *x, void *y, float *scale, int64_t n)
{
    const qkv_kernels *k = qkv_kernels_of(QKV_ISA_scalar);
    switch (dtype) {
    case QKV_F32:
        memcpy(y, x, (size_t)n * sizeof *x);
        break;
    case QKV_F16:
        k->narrow_f16(x, y, n);
        k->widen_f16(y, x, n);
        break;
    case QKV_BF16:
        k->narrow_bf16(x, y, n);
        k->widen_bf16(y, x, n);
        break;
    case QKV_Q8_0:
        k->narrow_q8_0(x, y, scale, n);
        k->widen_q8_0(y, scale, x, n);
        break;
    case QKV_I8:
        k->narrow_i8(x, y, scale, n);
        k->widen_i8(y, scale, x, n);
        break;
    case QKV_F8_E4M3:
        k->narrow_f8_e4m3(x, y, scale, n);
        k->widen_f8_e4m3(y, scale, x, n);
        break;
    case QKV_F8_E5M2:
        k->narrow_f8_e5m2(x, y, scale, n);
        k->widen_f8_e5m2(y, scale, x, n);
        break;
    default:
        k->narrow_q4_0(x, y, scale, n);
        k->widen_q4_0(y, scale, x, n);
        break;
    }
}

/* Random numbers that the type holds exactly, and their copy in that type. */
static float *make_rows(rng *r, int32_t dtype, int64_t rows, int64_t dim, qkv_tensor *typed,
                        qkv_tensor *scales)
{
    float *x = malloc((size_t)(rows * dim + 1) * sizeof *x);
    char *y = malloc(type_bytes(dtype, rows * dim) + 1);
    float *scale = malloc((size_t)(rows + 1) * sizeof *scale);
    fill_normal(r, x, rows * dim, 1.0f);
    for (int64_t i = 0; i < rows; i++)
        round_row(dtype, x + i * dim, y + type_bytes(dtype, i * dim), scale + i, dim);
    *typed = (qkv_tensor){.data = y, .dtype = dtype};
    *scales = (qkv_tensor){.data = scale};
    return x;
}

/* One row of a sequence's own copy to its place in the batch's tensor. */
static void place_row(const qkv_tensor *t, int64_t b, int64_t h, int64_t row,
                      const qkv_tensor *from, int64_t from_row, int64_t dim)
{
    const int64_t at = b * t->stride_batch + h * t->stride_head + row * t->stride_row;
    memcpy((char *)t->data + type_bytes(t->dtype, at),
           (char *)from->data + type_bytes(t->dtype, from_row * dim), type_bytes(t->dtype, dim));
}

/* A tensor of nothing but NaN, with gaps between its rows, flush at its end. */
static qkv_tensor make_tensor(int slot, int32_t dtype, int64_t batch, int64_t heads, int64_t rows,
                              int64_t dim, int64_t gap)
{
    qkv_tensor t = {.dtype = dtype, .flags = QKV_TENSOR_STRIDED};
    if (is_blocks(dtype))
        gap *= 32;
    t.stride_row = dim + gap;
    t.stride_head = rows * t.stride_row;
    t.stride_batch = heads * t.stride_head;
    const int64_t n = batch * heads * rows > 0 ? batch * t.stride_batch - gap : 0;
    t.data = guarded_bytes(slot, type_bytes(dtype, n), PLACE_AT_END);
    memset(t.data, 0xff, type_bytes(dtype, n));
    return t;
}

static int64_t *make_array(int slot, int64_t n)
{
    return guarded_bytes(slot, (size_t)n * sizeof(int64_t), PLACE_AT_END);
}

static void choose_lengths(ragged *g, rng *r, int64_t kv_most)
{
    static const int64_t q_lens[] = {0, 1, 1, 1, 1, 2, 3, 5, 16, 40, 100};
    int64_t q = g->q_starts ? rng_int(r, 0, 2) : 0, kv = rng_int(r, 0, 2);
    const int64_t q_same = q_lens[rng_int(r, 1, 9)], kv_same = rng_int(r, 0, kv_most);
    for (int64_t b = 0; b < g->batch; b++) {
        sequence *s = &g->s[b];
        s->q_len = g->q_starts ? q_lens[rng_int(r, 0, 10)] : q_same;
        s->kv_len = g->kv_lens || g->how == CACHE_STARTS
                        ? rng_int(r, 0, 5) ? rng_int(r, 0, kv_most) : 0
                        : kv_same;
        s->q_first = q;
        s->kv_first = kv;
        q += g->q_starts ? s->q_len : 0;
        kv += s->kv_len + (g->kv_lens ? rng_int(r, 0, 3) : 0);
        s->offset = g->q_offsets ? rng_int(r, -3, s->kv_len + 3) : s->kv_len - s->q_len;
    }
    g->q_rows = g->q_starts ? q + rng_int(r, 0, 2) : q_same;
    g->kv_rows = g->how == CACHE_STARTS ? kv + rng_int(r, 0, 2)
                 : g->kv_lens           ? kv_most + rng_int(r, 0, 9)
                                        : kv_same;
}

/* Gives every sequence pages in no order; some share their first ones with sequence 0. */
static void choose_pages(ragged *g, rng *r)
{
    g->table_stride = (g->kv_rows + g->page_size - 1) / g->page_size + rng_int(r, 0, 2);
    const int64_t entries = g->batch * g->table_stride;
    g->table = guarded_bytes(SLOT_PAGES, (size_t)entries * sizeof *g->table, PLACE_AT_END);
    g->pages = entries + 2;
    int32_t *order = malloc((size_t)g->pages * sizeof *order);
    for (int32_t i = 0; i < g->pages; i++) {
        const int64_t k = rng_int(r, 0, i);
        order[i] = order[k];
        order[k] = i;
    }
    for (int64_t i = 0; i < entries; i++) /* behind a sequence's end anything goes */
        g->table[i] = i % g->table_stride * g->page_size < g->s[i / g->table_stride].kv_len
                          ? order[i]
                          : (int32_t)rng_int(r, -100, 1000);
    free(order);
}

static void share_rows(int32_t dtype, float *x, const qkv_tensor *typed, const qkv_tensor *scales,
                       int64_t to, const float *from, const qkv_tensor *from_typed,
                       const qkv_tensor *from_scales, int64_t at, int64_t rows, int64_t dim)
{
    memcpy(x + to * dim, from + at * dim, (size_t)(rows * dim) * sizeof *x);
    memcpy((char *)typed->data + type_bytes(dtype, to * dim),
           (char *)from_typed->data + type_bytes(dtype, at * dim), type_bytes(dtype, rows * dim));
    memcpy((float *)scales->data + to, (float *)from_scales->data + at,
           (size_t)rows * sizeof(float));
}

static void share_pages(ragged *g, int64_t b)
{
    const sequence *first = &g->s[0];
    sequence *s = &g->s[b];
    const int64_t least = first->kv_len < s->kv_len ? first->kv_len : s->kv_len;
    const int64_t shared = least / g->page_size, rows = shared * g->page_size;
    memcpy(g->table + b * g->table_stride, g->table, (size_t)shared * sizeof *g->table);
    for (int64_t h = 0; h < g->kv_heads; h++) {
        const int64_t to = h * s->kv_len, from = h * first->kv_len;
        share_rows(g->k_type, s->k, &s->key, &s->key_scale, to, first->k, &first->key,
                   &first->key_scale, from, rows, g->dim);
        share_rows(g->v_type, s->v, &s->value, &s->value_scale, to, first->v, &first->value,
                   &first->value_scale, from, rows, g->value_dim);
    }
}

static void place_cache(const ragged *g, const qkv_tensor *t, int64_t b, const qkv_tensor *from,
                        int64_t dim)
{
    const sequence *s = &g->s[b];
    for (int64_t h = 0; h < g->kv_heads; h++)
        for (int64_t j = 0; j < s->kv_len; j++) {
            int64_t batch = b, row = j;
            if (g->how == CACHE_PAGES) {
                batch = g->table[b * g->table_stride + j / g->page_size];
                row = j % g->page_size;
            } else if (g->how == CACHE_STARTS) {
                batch = 0;
                row = s->kv_first + j;
            }
            place_row(t, batch, h, row, from, h * s->kv_len + j, dim);
        }
}

static void make_sequences(ragged *g, rng *r)
{
    for (int64_t b = 0; b < g->batch; b++) {
        sequence *s = &g->s[b];
        qkv_tensor unused;
        s->q = make_rows(r, g->q_type, g->q_heads * s->q_len, g->dim, &s->query, &unused);
        s->k = make_rows(r, g->k_type, g->kv_heads * s->kv_len, g->dim, &s->key, &s->key_scale);
        s->v = make_rows(r, g->v_type, g->kv_heads * s->kv_len, g->value_dim, &s->value,
                         &s->value_scale);
        free(unused.data);
        if (g->how == CACHE_PAGES && b > 0 && rng_int(r, 0, 1))
            share_pages(g, b);
    }
}

static void make_tensors(ragged *g, rng *r)
{
    qkv_attention_desc *d = &g->desc;
    const int64_t batch = g->how == CACHE_PAGES ? g->pages : g->how == CACHE_STARTS ? 1 : g->batch;
    const int64_t rows = g->how == CACHE_PAGES ? g->page_size : g->kv_rows;
    const int64_t q_batch = g->q_starts ? 1 : g->batch, gap = rng_int(r, 0, 2);
    d->query = make_tensor(SLOT_Q, g->q_type, q_batch, g->q_heads, g->q_rows, g->dim, gap);
    d->key = make_tensor(SLOT_K, g->k_type, batch, g->kv_heads, rows, g->dim, gap);
    d->value = make_tensor(SLOT_V, g->v_type, batch, g->kv_heads, rows, g->value_dim, gap);
    if (g->k_type == QKV_I8)
        d->key_scale = make_tensor(SLOT_K_SCALES, QKV_F32, batch, g->kv_heads, rows, 1, gap);
    if (g->v_type == QKV_I8)
        d->value_scale = make_tensor(SLOT_V_SCALES, QKV_F32, batch, g->kv_heads, rows, 1, gap);
    g->out = guarded(SLOT_OUT, q_batch * g->q_heads * g->q_rows * g->value_dim, PLACE_AT_END);
    g->lse = guarded(SLOT_LSE, q_batch * g->q_heads * g->q_rows, PLACE_AT_END);
    d->out = (qkv_tensor){.data = g->out};
    d->lse = (qkv_tensor){.data = g->lse};
    for (int64_t b = 0; b < g->batch; b++) {
        const sequence *s = &g->s[b];
        for (int64_t h = 0; h < g->q_heads; h++)
            for (int64_t i = 0; i < s->q_len; i++)
                place_row(&d->query, g->q_starts ? 0 : b, h, s->q_first + i, &s->query,
                          h * s->q_len + i, g->dim);
        place_cache(g, &d->key, b, &s->key, g->dim);
        place_cache(g, &d->value, b, &s->value, g->value_dim);
        if (d->key_scale.data)
            place_cache(g, &d->key_scale, b, &s->key_scale, 1);
        if (d->value_scale.data)
            place_cache(g, &d->value_scale, b, &s->value_scale, 1);
    }
}

static void make_arrays(ragged *g)
{
    qkv_attention_desc *d = &g->desc;
    int64_t *q_starts = make_array(SLOT_Q_STARTS, g->batch + 1);
    int64_t *kv_starts = make_array(SLOT_KV_STARTS, g->batch + 1);
    int64_t *kv_lens = make_array(SLOT_KV_LENS, g->batch);
    int64_t *q_offsets = make_array(SLOT_Q_OFFSETS, g->batch);
    for (int64_t b = 0; b < g->batch; b++) {
        q_starts[b] = g->s[b].q_first;
        kv_starts[b] = g->s[b].kv_first;
        kv_lens[b] = g->s[b].kv_len;
        q_offsets[b] = g->s[b].offset;
    }
    q_starts[g->batch] = g->s[g->batch - 1].q_first + g->s[g->batch - 1].q_len;
    kv_starts[g->batch] =
        g->kv_lens ? g->kv_rows : g->s[g->batch - 1].kv_first + g->s[g->batch - 1].kv_len;
    d->q_starts = g->q_starts ? q_starts : NULL;
    d->kv_starts = g->how == CACHE_STARTS ? kv_starts : NULL;
    d->kv_lens = g->kv_lens ? kv_lens : NULL;
    d->q_offsets = g->q_offsets ? q_offsets : NULL;
    if (g->how == CACHE_PAGES) {
        d->page_size = g->page_size;
        d->pages = g->pages;
        d->page_table = g->table;
        d->page_table_stride = g->table_stride;
    }
}

static ragged ragged_make(rng *r, int64_t kv_most, int64_t dim_most)
{
    static const int groups[] = {1, 2, 3, 4, 8};
    ragged g = {.batch = rng_int(r, 1, MOST),
                .kv_heads = rng_int(r, 1, 2),
                .dim = rng_int(r, 1, dim_most),
                .causal = rng_int(r, 0, 1),
                .q_starts = rng_int(r, 0, 3) != 0,
                .kv_lens = rng_int(r, 0, 2) != 0,
                .q_offsets = rng_int(r, 0, 1),
                .how = (cache)rng_int(r, 0, CACHES - 1),
                .page_size = INT64_C(8) << rng_int(r, 0, 5),
                .q_type = rng_int(r, 0, 1) ? QKV_F32 : (int32_t)rng_int(r, QKV_F32, QKV_BF16),
                .k_type = (int32_t)rng_int(r, QKV_F32, QKV_Q4_0),
                .v_type = (int32_t)rng_int(r, QKV_F32, QKV_Q4_0)};
    g.q_heads = g.kv_heads * groups[rng_int(r, 0, 4)];
    g.value_dim = rng_int(r, 0, 2) ? g.dim : rng_int(r, 1, dim_most);
    if (is_blocks(g.k_type))
        g.dim = (g.dim + 31) / 32 * 32;
    if (is_blocks(g.v_type))
        g.value_dim = (g.value_dim + 31) / 32 * 32;
    choose_lengths(&g, r, kv_most);
    if (g.how == CACHE_PAGES)
        choose_pages(&g, r);
    context("ragged: batch %lld, heads %lld/%lld, dims %lld %lld, cache %d, pages of %lld, types "
            "%d %d %d%s%s%s%s",
            (long long)g.batch, (long long)g.q_heads, (long long)g.kv_heads, (long long)g.dim,
            (long long)g.value_dim, (int)g.how, (long long)g.page_size, (int)g.q_type,
            (int)g.k_type, (int)g.v_type, g.causal ? ", causal" : "",
            g.q_starts ? ", q_starts" : "", g.kv_lens ? ", kv_lens" : "",
            g.q_offsets ? ", q_offsets" : "");
    make_sequences(&g, r);
    g.desc = (qkv_attention_desc){.size = sizeof g.desc,
                                  .flags = g.causal ? QKV_CAUSAL : 0,
                                  .batch = g.batch,
                                  .q_heads = g.q_heads,
                                  .kv_heads = g.kv_heads,
                                  .q_len = g.q_rows,
                                  .kv_len = g.kv_rows,
                                  .head_dim = g.dim,
                                  .value_dim = g.value_dim};
    make_tensors(&g, r);
    make_arrays(&g);
    return g;
}

static void ragged_free(ragged *g)
{
    for (int64_t b = 0; b < g->batch; b++) {
        sequence *s = &g->s[b];
        void *all[] = {s->q,
                       s->k,
                       s->v,
                       s->query.data,
                       s->key.data,
                       s->value.data,
                       s->key_scale.data,
                       s->value_scale.data};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}

static double *widened(int slot, const float *x, int64_t n)
{
    double *y = doubles(slot, n);
    for (int64_t i = 0; i < n; i++)
        y[i] = (double)x[i];
    return y;
}

/* The rows of sequence b, head h in the batch's output, as if they were a tensor. */
static const float *rows_of(const ragged *g, const float *all, int64_t b, int64_t h, int64_t dim)
{
    const int64_t batch = g->q_starts ? 0 : b;
    return all + ((batch * g->q_heads + h) * g->q_rows + g->s[b].q_first) * dim;
}

/* With integer keys a row of queries may be rounded to 16 bits: half a step. */
static const double *query_error(const ragged *g, const double *q, int64_t rows)
{
    if (g->k_type != QKV_Q8_0 && g->k_type != QKV_I8 && g->k_type != QKV_Q4_0)
        return NULL;
    double *error = doubles(D_Q_ERROR, rows * g->dim);
    for (int64_t i = 0; i < rows; i++) {
        double max = 0;
        for (int64_t d = 0; d < g->dim; d++)
            max = fmax(max, fabs(q[i * g->dim + d]));
        for (int64_t d = 0; d < g->dim; d++)
            error[i * g->dim + d] = max / 65534;
    }
    return error;
}

static void expect_oracle(const ragged *g, int64_t b)
{
    const sequence *s = &g->s[b];
    const int64_t rows = g->q_heads * s->q_len;
    oracle_attention o = {
        .batch = 1,
        .q_heads = g->q_heads,
        .kv_heads = g->kv_heads,
        .q_len = s->q_len,
        .kv_len = s->kv_len,
        .head_dim = g->dim,
        .value_dim = g->value_dim,
        .causal = g->causal,
        .has_offset = 1,
        .q_offset = s->offset,
        .scale = 1.0 / sqrt((double)g->dim),
        .q = widened(D_Q, s->q, rows * g->dim),
        .k = widened(D_K, s->k, g->kv_heads * s->kv_len * g->dim),
        .v = widened(D_V, s->v, g->kv_heads * s->kv_len * g->value_dim),
        .out = doubles(D_OUT, rows * g->value_dim),
        .out_bound = doubles(D_OUT_BOUND, rows * g->value_dim),
        .lse = doubles(D_LSE, rows),
        .lse_bound = doubles(D_LSE_BOUND, rows),
    };
    o.q_error = query_error(g, o.q, rows);
    oracle_attention_run(&o);
    for (int64_t h = 0; h < g->q_heads; h++) {
        const int64_t at = h * s->q_len;
        expect_close("out", rows_of(g, g->out, b, h, g->value_dim), o.out + at * g->value_dim,
                     o.out_bound + at * g->value_dim, s->q_len * g->value_dim);
        expect_close("lse", rows_of(g, g->lse, b, h, 1), o.lse + at, o.lse_bound + at, s->q_len);
    }
}

/* The sequence alone in a plain descriptor gives the same bits. */
static void expect_alone(const ragged *g, int64_t b)
{
    const sequence *s = &g->s[b];
    const int64_t rows = g->q_heads * s->q_len;
    float *out = guarded(SLOT_ALONE_OUT, rows * g->value_dim, PLACE_AT_START);
    float *lse = guarded(SLOT_ALONE_LSE, rows, PLACE_AT_START);
    qkv_attention_desc d = g->desc;
    d.batch = 1;
    d.q_len = s->q_len;
    d.kv_len = s->kv_len;
    d.q_starts = d.kv_starts = d.kv_lens = NULL;
    d.q_offsets = g->q_offsets ? &s->offset : NULL;
    d.page_table = NULL;
    d.page_size = d.pages = d.page_table_stride = 0;
    d.query = s->query;
    d.key = s->key;
    d.value = s->value;
    if (g->k_type == QKV_I8)
        d.key_scale = s->key_scale;
    if (g->v_type == QKV_I8)
        d.value_scale = s->value_scale;
    d.out = (qkv_tensor){.data = out};
    d.lse = (qkv_tensor){.data = lse};
    size_t bytes = 0;
    if (qkv_attention_scratch_size(&d, 1, &bytes) != QKV_OK)
        fail_with("alone: refused");
    void *scratch = scratch_alloc(bytes);
    if (qkv_attention(&d, scratch, bytes) != QKV_OK)
        fail_with("alone: refused");
    free(scratch);
    for (int64_t h = 0; h < g->q_heads; h++) {
        expect_same_bits("out alone", rows_of(g, g->out, b, h, g->value_dim),
                         out + h * s->q_len * g->value_dim, s->q_len * g->value_dim);
        expect_same_bits("lse alone", rows_of(g, g->lse, b, h, 1), lse + h * s->q_len, s->q_len);
    }
}

/* Rows of the output that belong to no sequence are as they were. */
static void expect_rest_intact(const ragged *g)
{
    const int64_t batch = g->q_starts ? 1 : g->batch, all = batch * g->q_heads * g->q_rows;
    for (int64_t b = 0; b < g->batch; b++)
        for (int64_t h = 0; h < g->q_heads; h++) {
            canary_fill((float *)(uintptr_t)rows_of(g, g->out, b, h, g->value_dim),
                        g->s[b].q_len * g->value_dim);
            canary_fill((float *)(uintptr_t)rows_of(g, g->lse, b, h, 1), g->s[b].q_len);
        }
    if (!canary_intact(g->out, all * g->value_dim) || !canary_intact(g->lse, all))
        fail_with("rows that belong to no sequence have been written");
}

static void ragged_reset(const ragged *g)
{
    const int64_t rows = (g->q_starts ? 1 : g->batch) * g->q_heads * g->q_rows;
    canary_fill(g->out, rows * g->value_dim);
    canary_fill(g->lse, rows);
}

static void ragged_run(const ragged *g)
{
    size_t bytes = 0;
    qkv_status status = qkv_attention_scratch_size(&g->desc, 1, &bytes);
    if (status == QKV_OK) {
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        status = qkv_attention(&g->desc, scratch, bytes);
    }
    if (status != QKV_OK)
        fail_with("%s: %s", qkv_isa_name(), qkv_strerror(status));
    guards_intact();
}

/* The same by tasks in any order, with and without the keys cut into parts. */
static void expect_tasks(ragged *g, rng *r, int64_t workers, int32_t flags)
{
    const int64_t rows = (g->q_starts ? 1 : g->batch) * g->q_heads * g->q_rows;
    float *out = malloc((size_t)(rows * g->value_dim + 1) * sizeof *out);
    float *lse = malloc((size_t)(rows + 1) * sizeof *lse);
    memcpy(out, g->out, (size_t)(rows * g->value_dim) * sizeof *out);
    memcpy(lse, g->lse, (size_t)rows * sizeof *lse);
    ragged_reset(g);

    qkv_attention_desc d = g->desc;
    d.flags |= flags;
    size_t bytes = 0;
    int64_t count = 0;
    cr_assert_eq(qkv_attention_scratch_size(&d, workers, &bytes), QKV_OK);
    cr_assert_eq(qkv_attention_task_count(&d, &count), QKV_OK);
    void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
    cr_assert_eq(qkv_attention_begin(&d, scratch, bytes), QKV_OK);
    int64_t *order = malloc((size_t)(count + 1) * sizeof *order);
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = rng_int(r, 0, i);
        order[i] = order[k];
        order[k] = i;
    }
    for (int64_t i = 0; i < count; i++)
        cr_assert_eq(
            qkv_attention_run_task(&d, order[i], rng_int(r, 0, workers - 1), scratch, bytes),
            QKV_OK);
    free(order);
    guards_intact();
    expect_same_bits("out by tasks", g->out, out, rows * g->value_dim);
    expect_same_bits("lse by tasks", g->lse, lse, rows);
    free(out);
    free(lse);
}

static void check_ragged(rng *r, int64_t kv_most, int64_t dim_most)
{
    ragged g = ragged_make(r, kv_most, dim_most);
    for_each_isa(isa)
    {
        ragged_reset(&g);
        ragged_run(&g);
        for (int64_t b = 0; b < g.batch; b++) {
            expect_oracle(&g, b);
            expect_alone(&g, b);
        }
        expect_tasks(&g, r, 1, 0);
        expect_tasks(&g, r, 3, QKV_SPLIT);
        expect_rest_intact(&g);
        tally(isa, 1);
    }
    ragged_free(&g);
}

Test(ragged, random)
{
    rng r = rng_make("ragged");
    for (int64_t i = effort_cases(250); i > 0; i--)
        check_ragged(&r, i % 4 ? 90 : 700, i % 3 ? 40 : 140);
}

/* Long enough for several parts of the keys. */
Test(ragged, split)
{
    rng r = rng_make("ragged split");
    for (int64_t i = effort_cases(30); i > 0; i--)
        check_ragged(&r, i % 8 ? 2100 : 5000, 24);
}

Test(ragged, long_heads)
{
    rng r = rng_make("ragged long heads");
    for (int64_t i = effort_cases(12); i > 0; i--)
        check_ragged(&r, 600, 1100);
}

/* ---------------------------------------------------------- shared prefixes */

enum { SHARING = 6, SHARED_KEYS = 2 * QKV_KEY_BLOCK, ALL_KEYS = SHARED_KEYS + 70 };

static qkv_attention_desc sharing_desc(rng *r, int64_t shared_len)
{
    enum { DIM_K = 16, DIM_V = 8, KV_HEADS = 2 };
    const int64_t rows = SHARING * KV_HEADS;
    float *q = guarded(SLOT_Q, rows * DIM_K, PLACE_AT_END);
    float *k = guarded(SLOT_K, rows * ALL_KEYS * DIM_K, PLACE_AT_END);
    float *v = guarded(SLOT_V, rows * ALL_KEYS * DIM_V, PLACE_AT_END);
    fill_normal(r, q, rows * DIM_K, 1.0f);
    fill_normal(r, k, rows * ALL_KEYS * DIM_K, 1.0f);
    fill_normal(r, v, rows * ALL_KEYS * DIM_V, 1.0f);
    for (int64_t i = KV_HEADS; i < rows; i++) {
        memcpy(k + i * ALL_KEYS * DIM_K, k + i % KV_HEADS * ALL_KEYS * DIM_K,
               SHARED_KEYS * DIM_K * sizeof *k);
        memcpy(v + i * ALL_KEYS * DIM_V, v + i % KV_HEADS * ALL_KEYS * DIM_V,
               SHARED_KEYS * DIM_V * sizeof *v);
    }
    return (qkv_attention_desc){.size = sizeof(qkv_attention_desc),
                                .flags = QKV_CAUSAL,
                                .batch = SHARING,
                                .q_heads = KV_HEADS,
                                .q_len = 1,
                                .kv_len = ALL_KEYS,
                                .head_dim = DIM_K,
                                .value_dim = DIM_V,
                                .query = {.data = q},
                                .key = {.data = k},
                                .value = {.data = v},
                                .out = {.data = guarded(SLOT_OUT, rows * DIM_V, PLACE_AT_END)},
                                .shared_len = shared_len};
}

/* What a sequence shares with the first one becomes NaN. */
static void spoil_copies(const qkv_attention_desc *d)
{
    for (int64_t i = d->q_heads; i < d->batch * d->q_heads; i++)
        for (int64_t j = 0; j < SHARED_KEYS; j++) {
            canary_fill((float *)d->key.data + (i * ALL_KEYS + j) * d->head_dim, d->head_dim);
            canary_fill((float *)d->value.data + (i * ALL_KEYS + j) * d->value_dim, d->value_dim);
        }
}

/* Of keys that sequences share one sequence's are read, and no bit tells. */
Test(ragged, shared_prefix_is_read_once)
{
    for_each_isa(isa)
    {
        context("%s", qkv_isa_name());
        rng r = rng_make("shared prefix");
        float want[SHARING * 2 * 8];
        qkv_attention_desc d = sharing_desc(&r, SHARED_KEYS);
        size_t bytes = 0;
        cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
        void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
        d.shared_len = 0;
        cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
        memcpy(want, d.out.data, sizeof want);
        spoil_copies(&d);
        d.shared_len = SHARED_KEYS;
        cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
        expect_same_bits("out", d.out.data, want, SHARING * 2 * 8);
        guards_intact();
        tally(isa, 1);
    }
}

/* ----------------------------------------------------------------- misuse */

/* Three sequences in pages of 8, whose descriptor is then made wrong. */
typedef struct parts {
    int64_t q_starts[4], kv_starts[4], kv_lens[3], q_offsets[3];
    int32_t table[3 * 4];
    float *q, *kv, *out, *lse;
} parts;

enum { Q_ROWS = 6, KV_ROWS = 30, PAGES = 9, HEADS = 2, DIM = 4 };

static qkv_attention_desc paged_desc(parts *x)
{
    return (qkv_attention_desc){.size = sizeof(qkv_attention_desc),
                                .flags = QKV_CAUSAL,
                                .batch = 3,
                                .q_heads = HEADS,
                                .q_len = Q_ROWS,
                                .kv_len = KV_ROWS,
                                .head_dim = DIM,
                                .query = {.data = x->q},
                                .key = {.data = x->kv},
                                .value = {.data = x->kv},
                                .out = {.data = x->out},
                                .lse = {.data = x->lse},
                                .q_starts = x->q_starts,
                                .kv_lens = x->kv_lens,
                                .q_offsets = x->q_offsets,
                                .page_size = 8,
                                .pages = PAGES,
                                .page_table_stride = 4,
                                .page_table = x->table};
}

/* The same with the sequences' keys one after the other. */
static qkv_attention_desc started_desc(parts *x)
{
    qkv_attention_desc d = paged_desc(x);
    d.page_size = d.pages = d.page_table_stride = 0;
    d.page_table = NULL;
    d.kv_starts = x->kv_starts;
    return d;
}

static void *shifted(const void *pointer, ptrdiff_t bytes)
{
    return (char *)(uintptr_t)pointer + bytes;
}

/* One wrong thing a case: 'what' is its text, 'want' what it must give. */
#define WRONG(base, status, ...)                                                                   \
    case __COUNTER__ - FIRST - 1:                                                                  \
        *d = base##_desc(x);                                                                       \
        *want = (status);                                                                          \
        *what = #__VA_ARGS__;                                                                      \
        __VA_ARGS__;                                                                               \
        return true;

static bool misuse(int n, parts *x, qkv_attention_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        WRONG(paged, QKV_OK, (void)0)
        WRONG(started, QKV_OK, (void)0)
        WRONG(paged, QKV_OK, x->table[2] = 1000) /* behind the sequence's end */
        WRONG(paged, QKV_OK, d->lse.data = NULL)
        WRONG(paged, QKV_E_SHAPE, x->q_starts[0] = -1)
        WRONG(paged, QKV_E_SHAPE, x->q_starts[1] = 3)
        WRONG(paged, QKV_E_SHAPE, x->q_starts[2] = INT64_MIN)
        WRONG(paged, QKV_E_SHAPE, x->q_starts[3] = Q_ROWS + 1)
        WRONG(paged, QKV_E_SHAPE, x->q_starts[3] = INT64_MAX)
        WRONG(paged, QKV_E_SHAPE, x->kv_lens[0] = -1)
        WRONG(paged, QKV_E_SHAPE, x->kv_lens[2] = KV_ROWS + 1)
        WRONG(paged, QKV_E_SHAPE, x->kv_lens[2] = INT64_MAX)
        WRONG(paged, QKV_E_OVERFLOW, x->q_offsets[1] = INT64_MAX)
        WRONG(paged, QKV_E_OVERFLOW, x->q_offsets[2] = INT64_MAX - 1)
        WRONG(paged, QKV_E_INDEX, x->table[0] = -1)
        WRONG(paged, QKV_E_INDEX, x->table[0] = PAGES)
        WRONG(paged, QKV_E_INDEX, x->table[1] = INT32_MAX)
        WRONG(paged, QKV_E_INDEX, x->table[8] = INT32_MIN)
        WRONG(paged, QKV_E_INDEX, x->table[3] = 1000; x->kv_lens[0] = 25)
        WRONG(paged, QKV_E_INDEX, d->pages = 4)
        WRONG(paged, QKV_E_INDEX, d->kv_lens = NULL; x->table[11] = -1)
        WRONG(paged, QKV_E_SHAPE, d->page_table_stride = 1)
        WRONG(paged, QKV_E_SHAPE, d->page_size = 12)
        WRONG(paged, QKV_E_SHAPE, d->page_size = 4)
        WRONG(paged, QKV_E_SHAPE, d->page_size = 512)
        WRONG(paged, QKV_E_SHAPE, d->page_size = -8)
        WRONG(paged, QKV_E_SHAPE, d->page_size = INT64_MIN)
        WRONG(paged, QKV_E_SHAPE, d->page_size = 0)
        WRONG(paged, QKV_E_SHAPE, d->pages = -1)
        WRONG(paged, QKV_E_STRIDE, d->page_table_stride = -1)
        WRONG(paged, QKV_E_OVERFLOW, d->page_table_stride = INT64_MAX)
        WRONG(paged, QKV_E_OVERFLOW, d->page_table_stride = INT64_MAX / 8)
        WRONG(paged, QKV_E_OVERFLOW, d->pages = INT64_MAX)
        WRONG(paged, QKV_E_NULL, d->page_table = NULL)
        WRONG(paged, QKV_OK, d->shared_len = 7)
        WRONG(paged, QKV_OK, d->shared_len = 9; x->table[8] = 8)
        WRONG(paged, QKV_E_INDEX, d->shared_len = 8)
        WRONG(paged, QKV_E_INDEX, d->shared_len = 8; x->kv_lens[0] = 0; x->kv_lens[1] = 8;
              x->kv_lens[2] = 8)
        WRONG(paged, QKV_E_SHAPE, d->shared_len = -1)
        WRONG(paged, QKV_E_SHAPE, d->shared_len = KV_ROWS + 1)
        WRONG(started, QKV_E_SHAPE, d->shared_len = KV_ROWS + 1)
        WRONG(paged, QKV_E_FLAGS, d->kv_starts = x->kv_starts)
        WRONG(paged, QKV_E_ALIGN, d->page_table = shifted(x->table, 2))
        WRONG(paged, QKV_E_ALIGN, d->q_starts = shifted(x->q_starts, 4))
        WRONG(paged, QKV_E_ALIGN, d->kv_lens = shifted(x->kv_lens, 4))
        WRONG(paged, QKV_E_ALIGN, d->q_offsets = shifted(x->q_offsets, 1))
        WRONG(paged, QKV_E_OVERLAP, d->out.data = x->table; d->lse.data = NULL)
        WRONG(paged, QKV_E_OVERLAP, d->lse.data = x->q_offsets)
        WRONG(paged, QKV_E_OVERLAP, d->lse.data = shifted(x->kv_lens, 20))
        WRONG(paged, QKV_E_OVERLAP, d->lse.data = shifted(x->q_starts, 28))
        WRONG(paged, QKV_E_OVERLAP, d->out.data = shifted(x->kv, PAGES * HEADS * 8 * DIM * 4 - 4))
        WRONG(started, QKV_E_SHAPE, x->kv_starts[0] = -1)
        WRONG(started, QKV_E_SHAPE, x->kv_starts[1] = 21)
        WRONG(started, QKV_E_SHAPE, x->kv_starts[3] = KV_ROWS + 1)
        WRONG(started, QKV_E_SHAPE, x->kv_lens[1] = 11)
        WRONG(started, QKV_E_SHAPE, d->page_table = x->table)
        WRONG(started, QKV_E_SHAPE, d->pages = PAGES)
        WRONG(started, QKV_E_SHAPE, d->page_table_stride = 4)
        WRONG(started, QKV_E_ALIGN, d->kv_starts = shifted(x->kv_starts, 3))
        WRONG(started, QKV_E_OVERLAP, d->lse.data = x->kv_starts)
        WRONG(started, QKV_E_OVERFLOW, d->batch = INT64_MAX / 8)
    default:
        return false;
    }
}

static void expect_call(const char *call, const char *what, qkv_status got, qkv_status want)
{
    if (got != want)
        fail_with("%s after '%s': %s, expected %s", call, what, qkv_strerror(got),
                  qkv_strerror(want));
}

static void one_by_one(void *context, int64_t n, qkv_parallel_body *body, void *argument)
{
    (void)context;
    for (int64_t i = 0; i < n; i++)
        body(argument, i);
}

Test(ragged, misuse)
{
    for_each_isa(isa)
    {
        qkv_status want = QKV_OK;
        const char *what = "";
        const parts good = {.q_starts = {0, 2, 2, 6},
                            .kv_starts = {0, 10, 20, 30},
                            .kv_lens = {10, 0, 9},
                            .table = {8, 0, 3, 1, 0, 0, 0, 0, 5, 8, 6, 2},
                            .q = guarded(SLOT_Q, Q_ROWS * HEADS * DIM, PLACE_AT_END),
                            .kv = guarded(SLOT_K, PAGES * HEADS * 8 * DIM, PLACE_AT_END),
                            .out = guarded(SLOT_OUT, Q_ROWS * HEADS * DIM, PLACE_AT_END),
                            .lse = guarded(SLOT_LSE, Q_ROWS * HEADS, PLACE_AT_END)};
        for (int n = 0;; n++) {
            parts x = good;
            qkv_attention_desc d = started_desc(&x);
            size_t bytes = 0, ignored;
            int64_t tasks;
            cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
            if (!misuse(n, &x, &d, &what, &want))
                break;
            void *scratch = scratch_alloc(bytes + 65536);
            context("%s, case %d", qkv_isa_name(), n);
            canary_fill(good.out, Q_ROWS * HEADS * DIM);
            canary_fill(good.lse, Q_ROWS * HEADS);
            expect_call("supports", what, qkv_attention_supports(&d, NULL), want);
            expect_call("size", what, qkv_attention_scratch_size(&d, 1, &ignored), want);
            expect_call("count", what, qkv_attention_task_count(&d, &tasks), want);
            expect_call("attention", what, qkv_attention(&d, scratch, bytes + 65536), want);
            expect_call("begin", what, qkv_attention_begin(&d, scratch, bytes + 65536), want);
            expect_call("parallel", what,
                        qkv_attention_parallel(&d, scratch, bytes + 65536, 1, one_by_one, NULL),
                        want);
            if (want != QKV_OK && (!canary_intact(good.out, Q_ROWS * HEADS * DIM) ||
                                   !canary_intact(good.lse, Q_ROWS * HEADS)))
                fail_with("'%s': an output has changed", what);
            free(scratch);
            tally(isa, 1);
        }
    }
}
