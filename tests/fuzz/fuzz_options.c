/* SPDX-License-Identifier: MIT */
/*
 * qkv_attention() with everything that a descriptor can ask for: sequences of
 * their own lengths, pages in any order, masks, windows, trees, caches of every
 * type. Arrays are now and then wrong: what is refused leaves the outputs as
 * they were. What is accepted runs in memory of exactly the described size,
 * whose unseen parts are NaNs, gives the same bits as a whole, by tasks and
 * through a parallel-for, and where no query is rounded to integers what the
 * f64 oracle gives, sequence by sequence.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <qkv/qkv.h>

#include "../oracle/kv.h"
#include "../oracle/semantics.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BATCH_MOST = 3, HEADS_MOST = 8, ENTRIES_MOST = 128, MOST_WORK = 1 << 21 };

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            abort();                                                                               \
    } while (0)

/* A tensor of rows, packed, with the bytes that lie there. */
typedef struct rows {
    int32_t dtype;
    int64_t batch, heads, count, dim;
    size_t row_bytes, bytes;
    unsigned char *at;
    float *scales; /* of QKV_I8 */
} rows;

typedef struct problem {
    qkv_attention_desc d;
    rows q, k, v, out;
    float *lse, *row_max, *weights;
    int64_t n_rows, n_weights; /* of lse; of weights */
    int64_t q_starts[BATCH_MOST + 1], kv_starts[BATCH_MOST + 1];
    int64_t kv_lens[BATCH_MOST], q_offsets[BATCH_MOST];
    int32_t table[ENTRIES_MOST];
    float slopes[HEADS_MOST], head_scales[HEADS_MOST], sinks[HEADS_MOST];
    unsigned char *mask;
    uint64_t *tree;
} problem;

/* --------------------------------------------------------------- elements */

static kv_format format_of(int32_t dtype)
{
    switch (dtype) {
    case QKV_F16:
        return KV_F16;
    case QKV_BF16:
        return KV_BF16;
    case QKV_Q8_0:
        return KV_Q8_0;
    case QKV_I8:
        return KV_I8;
    case QKV_F8_E4M3:
        return KV_F8_E4M3;
    case QKV_F8_E5M2:
        return KV_F8_E5M2;
    default:
        return KV_Q4_0;
    }
}

static double element(const rows *t, int64_t row, int64_t d)
{
    const unsigned char *at = t->at + (size_t)row * t->row_bytes;
    float x;
    if (t->dtype != QKV_F32)
        return oracle_kv_element(format_of(t->dtype), at, d, t->scales ? t->scales[row] : 0.0f);
    memcpy(&x, at + 4 * d, sizeof x);
    return (double)x;
}

static void put_row(rows *t, int64_t row, const float *x)
{
    unsigned char *at = t->at + (size_t)row * t->row_bytes;
    if (t->dtype == QKV_F32)
        memcpy(at, x, t->row_bytes);
    else
        oracle_kv_encode(format_of(t->dtype), x, t->dim, at, t->scales ? &t->scales[row] : NULL);
}

/* All bits are 1 at first: a NaN in every type that has one. */
static void make_rows(rows *t, int32_t dtype, int64_t batch, int64_t heads, int64_t count,
                      int64_t dim)
{
    *t = (rows){.dtype = dtype, .batch = batch, .heads = heads, .count = count, .dim = dim};
    t->row_bytes =
        dtype == QKV_F32 ? 4 * (size_t)dim : (size_t)oracle_kv_bytes(format_of(dtype), dim);
    const size_t n = (size_t)(batch * heads * count);
    t->bytes = n * t->row_bytes;
    t->at = malloc(t->bytes);
    make_unknown(t->at, t->bytes);
    if (dtype == QKV_I8) {
        t->scales = malloc(n * sizeof *t->scales);
        make_unknown(t->scales, n * sizeof *t->scales);
    }
}

static qkv_tensor tensor_of(const rows *t)
{
    return (qkv_tensor){.data = t->at, .dtype = t->dtype};
}

static int64_t row_index(const rows *t, int64_t batch, int64_t head, int64_t row)
{
    return (batch * t->heads + head) * t->count + row;
}

static float take_value(input *in, uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const int64_t raw = in->left ? take_int(in, -128, 127) : (int64_t)(*state >> 56) - 128;
    return (float)raw / 64.0f;
}

/* ------------------------------------------------------------ descriptors */

/* Whose lengths are where; now and then one is wrong. */
static void take_lengths(input *in, problem *p)
{
    qkv_attention_desc *d = &p->d;
    const bool wrong = take(in, 1) % 16 == 15;
    const uint64_t kind = take(in, 1);
    if (kind & 1) {
        d->q_starts = p->q_starts;
        for (int b = 0; b <= BATCH_MOST; b++)
            p->q_starts[b] = b == 0 ? 0 : take_int(in, p->q_starts[b - 1], d->q_len + wrong);
    }
    if ((kind & 6) == 2) {
        d->kv_starts = p->kv_starts;
        for (int b = 0; b <= BATCH_MOST; b++)
            p->kv_starts[b] = b == 0 ? 0 : take_int(in, p->kv_starts[b - 1], d->kv_len + wrong);
    }
    if (kind & 8) {
        d->kv_lens = p->kv_lens;
        for (int b = 0; b < BATCH_MOST; b++) {
            const int64_t most = d->kv_starts ? p->kv_starts[b + 1] - p->kv_starts[b] : d->kv_len;
            p->kv_lens[b] = take_int(in, -(int64_t)wrong, most + wrong);
        }
    }
    if (kind & 16) {
        d->q_offsets = p->q_offsets;
        for (int b = 0; b < BATCH_MOST; b++)
            p->q_offsets[b] =
                wrong ? (int64_t)take(in, 8) : take_int(in, -d->q_len - 2, d->kv_len + 2);
    }
    if ((kind & 6) == 4) {
        d->page_size = INT64_C(8) << take_int(in, 0, 2);
        d->pages = take_int(in, 1, 12);
        d->page_table = p->table;
        d->page_table_stride = take_int(in, 0, 1) * take_int(in, 1, ENTRIES_MOST / BATCH_MOST);
        for (int i = 0; i < ENTRIES_MOST; i++)
            p->table[i] = (int32_t)take_int(in, -(int64_t)wrong, d->pages - 1 + wrong);
    }
}

/* Is it small, and do all entries that may be looked at exist in our memory? */
static bool fits(const qkv_attention_desc *d)
{
    const int64_t stride = d->page_table_stride ? d->page_table_stride
                           : d->page_size       ? (d->kv_len + d->page_size - 1) / d->page_size
                                                : 0;
    const int64_t pairs = d->batch * d->q_heads * d->q_len * d->kv_len;
    return stride * d->batch <= ENTRIES_MOST && pairs * (d->head_dim + d->value_dim) <= MOST_WORK;
}

static void take_adjustments(input *in, problem *p)
{
    qkv_attention_desc *d = &p->d;
    const uint64_t kind = take(in, 1);
    uint64_t state = take(in, 2);
    if (take(in, 1) % 2) {
        d->flags |= QKV_WINDOW;
        d->window_left = take_int(in, -1, 40);
        d->window_right = take_int(in, -1, 9);
        d->sink_tokens = take_int(in, 0, 9);
    }
    if (kind & 1)
        d->softcap = (float)take_int(in, 1, 60);
    for (int h = 0; h < HEADS_MOST; h++) {
        p->slopes[h] = take_value(in, &state) / 8.0f;
        p->head_scales[h] = take_value(in, &state);
        p->sinks[h] = h % 3 == 2 ? -INFINITY : take_value(in, &state);
    }
    d->slopes = kind & 2 ? p->slopes : NULL;
    d->head_scales = kind & 4 ? p->head_scales : NULL;
    d->sinks = kind & 8 ? p->sinks : NULL;
    if (kind & 16) {
        d->tree_stride = take_int(in, 1, 2);
        const int64_t words = (d->q_starts ? d->q_len : d->batch * d->q_len) * d->tree_stride;
        p->tree = malloc((size_t)words * 8);
        d->tree_mask = p->tree;
        for (int64_t i = 0; i < words; i++)
            p->tree[i] = in->left ? take(in, 8) : state * (uint64_t)(2 * i + 1);
    }
}

static int64_t mask_bits(int32_t dtype)
{
    return dtype == QKV_F32 ? 32 : dtype == QKV_BIT ? 1 : dtype == QKV_BOOL ? 8 : 16;
}

static void take_mask(input *in, problem *p)
{
    static const int32_t types[] = {QKV_F32, QKV_F16, QKV_BF16, QKV_BOOL, QKV_BIT};
    const uint64_t kind = take(in, 1), seed = take(in, 2);
    qkv_attention_desc *d = &p->d;
    if (kind % 6 == 5 || d->q_len == 0 || d->kv_len == 0)
        return;
    qkv_mask m = {.dtype = types[kind % 6], .flags = QKV_TENSOR_STRIDED};
    const uint64_t axes = take(in, 1);
    m.stride_key = axes & 1;
    m.stride_query = axes & 2 ? d->kv_len : 0;
    m.stride_head = axes & 4 ? d->kv_len * d->q_len : 0;
    m.stride_batch = axes & 8 ? d->kv_len * d->q_len * d->q_heads : 0;
    const int64_t n = 1 + (d->kv_len - 1) * m.stride_key + (d->q_len - 1) * m.stride_query +
                      (d->q_heads - 1) * m.stride_head + (d->batch - 1) * m.stride_batch;
    p->mask = malloc((size_t)((n * mask_bits(m.dtype) + 7) / 8));
    for (int64_t i = 0; i < (n * mask_bits(m.dtype) + 7) / 8; i++)
        p->mask[i] = (unsigned char)(seed >> i % 9);
    uint64_t state = seed;
    for (int64_t i = 0; i < n && mask_bits(m.dtype) >= 16; i++) {
        const float x = take_value(in, &state), bias = x < -1.0f ? -INFINITY : x;
        if (m.dtype == QKV_F32) {
            memcpy(p->mask + 4 * i, &bias, 4);
        } else if (isinf(bias)) {
            p->mask[2 * i] = m.dtype == QKV_F16 ? 0x00 : 0x80;
            p->mask[2 * i + 1] = m.dtype == QKV_F16 ? 0xfc : 0xff;
        } else {
            oracle_kv_encode(format_of(m.dtype), &bias, 1, p->mask + 2 * i, NULL);
        }
    }
    m.data = p->mask;
    d->mask = m;
}

static int64_t take_dim(input *in, bool blocks)
{
    return blocks ? 32 * take_int(in, 1, 3) : take_int(in, 1, take(in, 1) % 8 ? 24 : 140);
}

static void take_problem(input *in, problem *p)
{
    qkv_attention_desc *d = &p->d;
    const bool blocks = take(in, 1) % 4 == 3;
    *d = (qkv_attention_desc){.size = sizeof *d};
    d->flags = (int32_t)(take(in, 1) & (QKV_CAUSAL | QKV_INVARIANT | QKV_SPLIT));
    d->batch = take_int(in, 1, BATCH_MOST);
    d->kv_heads = take_int(in, 1, 2);
    d->q_heads = d->kv_heads * take_int(in, 1, HEADS_MOST / 2);
    d->q_len = take_int(in, 0, take(in, 1) % 4 ? 6 : 40);
    d->kv_len = take_int(in, 0, take(in, 1) % 4 ? 40 : 1100);
    d->head_dim = take_dim(in, blocks);
    d->value_dim = take_dim(in, blocks);
    take_lengths(in, p);
    take_adjustments(in, p);
    take_mask(in, p);

    const int64_t batch = d->q_starts ? 1 : d->batch;
    const int64_t kv_batch = d->page_size ? d->pages : d->kv_starts ? 1 : d->batch;
    const int64_t kv_rows = d->page_size ? d->page_size : d->kv_len;
    const int32_t narrow = blocks ? QKV_Q4_0 : QKV_BF16;
    make_rows(&p->q, (int32_t)take_int(in, 0, 2), batch, d->q_heads, d->q_len, d->head_dim);
    make_rows(&p->k, (int32_t)take_int(in, 0, narrow), kv_batch, d->kv_heads, kv_rows, d->head_dim);
    make_rows(&p->v, (int32_t)take_int(in, 0, narrow), kv_batch, d->kv_heads, kv_rows,
              d->value_dim);
    make_rows(&p->out, (int32_t)take_int(in, 0, 2), batch, d->q_heads, d->q_len, d->value_dim);
    d->query = tensor_of(&p->q);
    d->key = tensor_of(&p->k);
    d->value = tensor_of(&p->v);
    d->out = tensor_of(&p->out);
    d->key_scale.data = p->k.scales;
    d->value_scale.data = p->v.scales;

    const uint64_t extra = take(in, 1);
    p->n_rows = batch * d->q_heads * d->q_len;
    p->n_weights = p->n_rows * d->kv_len;
    p->lse = malloc((size_t)p->n_rows * sizeof(float));
    p->row_max = malloc((size_t)p->n_rows * sizeof(float));
    p->weights = malloc((size_t)p->n_weights * sizeof(float));
    d->lse.data = extra & 1 ? p->lse : NULL;
    d->row_max.data = extra & 2 ? p->row_max : NULL;
    d->weights.data = extra & 4 && p->n_weights < 40000 ? p->weights : NULL;
    d->weights_stage = (int32_t)(extra >> 3 & 3);
}

/* -------------------------------------------------------------- sequences */

/* Where a sequence's rows are, as the header tells it. */
typedef struct sequence {
    int64_t index, q_batch, q_first, q_len, kv_batch, kv_first, kv_len;
} sequence;

static sequence sequence_of(const problem *p, int64_t b)
{
    const qkv_attention_desc *d = &p->d;
    sequence s = {b, b, 0, d->q_len, b, 0, d->kv_len};
    if (d->q_starts)
        s = (sequence){b,          0, d->q_starts[b], d->q_starts[b + 1] - d->q_starts[b],
                       s.kv_batch, 0, s.kv_len};
    if (d->kv_starts) {
        s.kv_batch = 0;
        s.kv_first = d->kv_starts[b];
        s.kv_len = d->kv_starts[b + 1] - d->kv_starts[b];
    }
    if (d->kv_lens)
        s.kv_len = d->kv_lens[b];
    return s;
}

static int64_t kv_row(const problem *p, const rows *t, const sequence *s, int64_t head, int64_t j)
{
    const qkv_attention_desc *d = &p->d;
    if (!d->page_size)
        return row_index(t, s->kv_batch, head, s->kv_first + j);
    const int64_t stride =
        d->page_table_stride ? d->page_table_stride : (d->kv_len + d->page_size - 1) / d->page_size;
    const int32_t page = d->page_table[s->index * stride + j / d->page_size];
    return row_index(t, page, head, j % d->page_size);
}

static void fill_row(input *in, rows *t, int64_t row, uint64_t *state)
{
    float x[140];
    for (int64_t i = 0; i < t->dim; i++)
        x[i] = take_value(in, state);
    put_row(t, row, x);
}

/* Numbers in every row that belongs to a sequence; all others stay NaN. */
static void fill_rows(input *in, problem *p)
{
    uint64_t state = take(in, 2);
    for (int64_t b = 0; b < p->d.batch; b++) {
        const sequence s = sequence_of(p, b);
        for (int64_t h = 0; h < p->d.q_heads; h++)
            for (int64_t i = 0; i < s.q_len; i++)
                fill_row(in, &p->q, row_index(&p->q, s.q_batch, h, s.q_first + i), &state);
        for (int64_t h = 0; h < p->d.kv_heads; h++)
            for (int64_t j = 0; j < s.kv_len; j++) {
                fill_row(in, &p->k, kv_row(p, &p->k, &s, h, j), &state);
                fill_row(in, &p->v, kv_row(p, &p->v, &s, h, j), &state);
            }
    }
}

/* ----------------------------------------------------------------- oracle */

static double mask_at(const problem *p, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const qkv_mask *m = &p->d.mask;
    const int64_t at =
        b * m->stride_batch + h * m->stride_head + i * m->stride_query + j * m->stride_key;
    float x;
    if (m->dtype == QKV_BIT)
        return p->mask[at / 8] >> at % 8 & 1 ? 0 : -HUGE_VAL;
    if (m->dtype == QKV_BOOL)
        return p->mask[at] ? 0 : -HUGE_VAL;
    if (m->dtype != QKV_F32)
        return oracle_kv_element(format_of(m->dtype), p->mask, at, 0.0f);
    memcpy(&x, p->mask + 4 * at, sizeof x);
    return (double)x;
}

static double *doubles(int64_t n)
{
    return calloc((size_t)(n + 1), sizeof(double));
}

/* The inputs of one sequence, packed; every array is freed by forget(). */
static oracle_semantics gather(const problem *p, const sequence *s, double numbers[3][HEADS_MOST])
{
    const qkv_attention_desc *d = &p->d;
    const int64_t pairs = d->q_heads * s->q_len * s->kv_len;
    double *q = doubles(d->q_heads * s->q_len * d->head_dim), *to = q;
    double *k = doubles(d->kv_heads * s->kv_len * d->head_dim);
    double *v = doubles(d->kv_heads * s->kv_len * d->value_dim), *mask = NULL;
    unsigned char *tree = NULL;
    for (int64_t h = 0; h < d->q_heads; h++)
        for (int64_t i = 0; i < s->q_len; i++)
            for (int64_t e = 0; e < d->head_dim; e++)
                *to++ = element(&p->q, row_index(&p->q, s->q_batch, h, s->q_first + i), e);
    for (int64_t h = 0; h < d->kv_heads; h++)
        for (int64_t j = 0; j < s->kv_len; j++) {
            for (int64_t e = 0; e < d->head_dim; e++)
                k[(h * s->kv_len + j) * d->head_dim + e] =
                    element(&p->k, kv_row(p, &p->k, s, h, j), e);
            for (int64_t e = 0; e < d->value_dim; e++)
                v[(h * s->kv_len + j) * d->value_dim + e] =
                    element(&p->v, kv_row(p, &p->v, s, h, j), e);
        }
    if (p->mask) {
        to = mask = doubles(pairs);
        for (int64_t h = 0; h < d->q_heads; h++)
            for (int64_t i = 0; i < s->q_len; i++)
                for (int64_t j = 0; j < s->kv_len; j++)
                    *to++ = mask_at(p, s->index, h, i, j);
    }
    if (p->tree) {
        tree = malloc((size_t)(s->q_len * s->q_len + 1));
        const int64_t first = d->q_starts ? s->q_first : s->index * d->q_len;
        for (int64_t i = 0; i < s->q_len; i++)
            for (int64_t j = 0; j < s->q_len; j++)
                tree[i * s->q_len + j] =
                    p->tree[(first + i) * d->tree_stride + j / 64] >> j % 64 & 1;
    }
    for (int h = 0; h < HEADS_MOST; h++) {
        numbers[0][h] = (double)p->slopes[h];
        numbers[1][h] = (double)p->head_scales[h];
        numbers[2][h] = (double)p->sinks[h];
    }
    const int64_t n = d->q_heads * s->q_len;
    return (oracle_semantics){.batch = 1,
                              .q_heads = d->q_heads,
                              .kv_heads = d->kv_heads,
                              .q_len = s->q_len,
                              .kv_len = s->kv_len,
                              .head_dim = d->head_dim,
                              .value_dim = d->value_dim,
                              .q = q,
                              .k = k,
                              .v = v,
                              .scale = 1 / sqrt((double)d->head_dim),
                              .causal = (d->flags & QKV_CAUSAL) != 0,
                              .q_offsets = d->q_offsets ? &d->q_offsets[s->index] : NULL,
                              .windowed = (d->flags & QKV_WINDOW) != 0,
                              .window_left = d->window_left,
                              .window_right = d->window_right,
                              .sink_tokens = d->sink_tokens,
                              .softcap = (double)d->softcap,
                              .slopes = d->slopes ? numbers[0] : NULL,
                              .head_scales = d->head_scales ? numbers[1] : NULL,
                              .sinks = d->sinks ? numbers[2] : NULL,
                              .mask = mask,
                              .tree = tree,
                              .stage = d->weights_stage,
                              .out = doubles(n * d->value_dim),
                              .out_bound = doubles(n * d->value_dim),
                              .lse = doubles(n),
                              .lse_bound = doubles(n),
                              .max = doubles(n),
                              .max_bound = doubles(n),
                              .weights = doubles(pairs),
                              .weights_bound = doubles(pairs)};
}

static void forget(oracle_semantics *o)
{
    const void *all[] = {o->q,         o->k,   o->v,         o->mask,    o->tree,
                         o->out,       o->lse, o->lse_bound, o->weights, o->weights_bound,
                         o->out_bound, o->max, o->max_bound};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free((void *)(uintptr_t)all[i]);
}

static void expect(double got, double want, double bound)
{
    if (isnan(want))
        REQUIRE(isnan(got));
    else if (isinf(want))
        REQUIRE(got == want);
    else
        REQUIRE(!isnan(got) && !(fabs(got - want) > bound)); /* a bound may be inf * 0 */
}

/* Half a unit of the output's type, at most. */
static double rounding(int32_t dtype, double x)
{
    return dtype == QKV_F16    ? fabs(x) * 0x1p-11 + 0x1p-25
           : dtype == QKV_BF16 ? fabs(x) * 0x1p-8 + 0x1p-133
                               : 0;
}

static void expect_sequence(const problem *p, int64_t b)
{
    const qkv_attention_desc *d = &p->d;
    const sequence s = sequence_of(p, b);
    double numbers[3][HEADS_MOST], *room = doubles(3 * s.kv_len);
    oracle_semantics o = gather(p, &s, numbers);
    oracle_semantics_run(&o, room);
    for (int64_t h = 0; h < d->q_heads; h++) {
        for (int64_t i = 0; i < s.q_len; i++) {
            const int64_t row = row_index(&p->out, s.q_batch, h, s.q_first + i);
            const int64_t at = h * s.q_len + i;
            for (int64_t e = 0; e < d->value_dim; e++) {
                const double want = o.out[at * d->value_dim + e];
                const double bound = o.out_bound[at * d->value_dim + e];
                expect(element(&p->out, row, e), want,
                       bound + rounding(d->out.dtype, fabs(want) + bound));
            }
            if (d->lse.data)
                expect((double)p->lse[row], o.lse[at], o.lse_bound[at]);
            if (d->row_max.data)
                expect((double)p->row_max[row], o.max[at], o.max_bound[at]);
            for (int64_t j = 0; d->weights.data && j < s.kv_len; j++)
                expect((double)p->weights[row * d->kv_len + j], o.weights[at * s.kv_len + j],
                       o.weights_bound[at * s.kv_len + j]);
        }
    }
    forget(&o);
    free(room);
}

/* -------------------------------------------------------------------- run */

static void *scratch_of(size_t bytes)
{
    void *scratch = NULL;
    REQUIRE(posix_memalign(&scratch, QKV_SCRATCH_ALIGN, bytes ? bytes : 1) == 0);
    make_unknown(scratch, bytes);
    return scratch;
}

/* Outputs of which every byte is known, before and after. */
static void *images(const problem *p)
{
    const size_t floats = 2 * (size_t)p->n_rows + (size_t)p->n_weights;
    unsigned char *image = malloc(p->out.bytes + floats * sizeof(float) + 1), *at = image;
    const struct {
        const void *from;
        size_t bytes;
    } parts[] = {{p->out.at, p->out.bytes},
                 {p->lse, (size_t)p->n_rows * sizeof(float)},
                 {p->row_max, (size_t)p->n_rows * sizeof(float)},
                 {p->weights, (size_t)p->n_weights * sizeof(float)}};
    for (int i = 0; i < 4; at += parts[i++].bytes)
        if (parts[i].bytes)
            memcpy(at, parts[i].from, parts[i].bytes);
    *at = 0;
    return image;
}

static void reset(problem *p)
{
    if (p->out.bytes)
        memset(p->out.at, 0xff, p->out.bytes);
    for (int64_t i = 0; i < p->n_rows; i++)
        p->lse[i] = p->row_max[i] = 77.0f;
    for (int64_t i = 0; i < p->n_weights; i++)
        p->weights[i] = 77.0f;
}

static bool same_images(const problem *p, void *one)
{
    void *other = images(p);
    const size_t floats = 2 * (size_t)p->n_rows + (size_t)p->n_weights;
    const bool same = memcmp(one, other, p->out.bytes + floats * sizeof(float)) == 0;
    free(other);
    return same;
}

static void one_by_one(void *context, int64_t n, qkv_parallel_body *body, void *argument)
{
    (void)context;
    for (int64_t i = n - 1; i >= 0; i--)
        body(argument, i);
}

static void run_whole(const qkv_attention_desc *d)
{
    size_t bytes = 0;
    REQUIRE(qkv_attention_scratch_size(d, 1, &bytes) == QKV_OK);
    void *scratch = scratch_of(bytes);
    REQUIRE(qkv_attention(d, scratch, bytes) == QKV_OK);
    free(scratch);
}

static void run_tasks(const qkv_attention_desc *d)
{
    size_t bytes = 0;
    int64_t count = 0;
    REQUIRE(qkv_attention_scratch_size(d, 2, &bytes) == QKV_OK);
    REQUIRE(qkv_attention_task_count(d, &count) == QKV_OK);
    void *scratch = scratch_of(bytes);
    REQUIRE(qkv_attention_begin(d, scratch, bytes) == QKV_OK);
    for (int64_t task = count - 1; task >= 0; task--)
        REQUIRE(qkv_attention_run_task(d, task, task % 2, scratch, bytes) == QKV_OK);
    free(scratch);
}

static void run_parallel(const qkv_attention_desc *d)
{
    size_t bytes = 0;
    REQUIRE(qkv_attention_scratch_size(d, 3, &bytes) == QKV_OK);
    void *scratch = scratch_of(bytes);
    REQUIRE(qkv_attention_parallel(d, scratch, bytes, 3, one_by_one, NULL) == QKV_OK);
    free(scratch);
}

static void check_accepted(problem *p)
{
    reset(p);
    run_whole(&p->d);
    const int32_t key = p->d.key.dtype; /* queries may be rounded to 16 bits for the others */
    if (key != QKV_Q8_0 && key != QKV_Q4_0 && key != QKV_I8)
        for (int64_t b = 0; b < p->d.batch; b++)
            expect_sequence(p, b);
    void *whole = images(p);
    reset(p);
    run_tasks(&p->d);
    REQUIRE(same_images(p, whole));
    reset(p);
    run_parallel(&p->d);
    REQUIRE(same_images(p, whole));
    free(whole);
}

static void check_refused(problem *p, qkv_status status)
{
    size_t bytes = 0;
    int64_t count = 0;
    void *scratch = scratch_of(65536);
    reset(p);
    void *before = images(p);
    REQUIRE(qkv_attention_scratch_size(&p->d, 1, &bytes) == status);
    REQUIRE(qkv_attention_task_count(&p->d, &count) == status);
    REQUIRE(qkv_attention(&p->d, scratch, 65536) == status);
    REQUIRE(qkv_attention_begin(&p->d, scratch, 65536) == status);
    REQUIRE(same_images(p, before));
    free(before);
    free(scratch);
}

static void select_isa(uint64_t choice)
{
    qkv_isa_info info;
    REQUIRE(qkv_isa_get((int32_t)(choice % (uint64_t)qkv_isa_count()), &info) == QKV_OK);
    REQUIRE(qkv_isa_select(info.supported && info.compiled ? info.name : NULL) == QKV_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    problem p;
    memset(&p, 0, sizeof p);
    select_isa(take(&in, 1));
    take_problem(&in, &p);
    if (fits(&p.d)) {
        const qkv_status status = qkv_attention_supports(&p.d, NULL);
        if (status != QKV_OK) {
            check_refused(&p, status);
        } else {
            fill_rows(&in, &p);
            check_accepted(&p);
        }
    }
    rows *const tensors[] = {&p.q, &p.k, &p.v, &p.out};
    for (int i = 0; i < 4; i++) {
        free(tensors[i]->at);
        free(tensors[i]->scales);
    }
    free(p.lse);
    free(p.row_max);
    free(p.weights);
    free(p.mask);
    free(p.tree);
    return 0;
}
