/* SPDX-License-Identifier: MIT */
/*
 * Everything that a descriptor can ask for, crossed at random: features,
 * shapes, types and layouts, on every ISA, against the oracle. The seed in a
 * message makes the same case again, and a failing one is shrunk: its fields
 * are made smaller one by one for as long as it still fails.
 */
#include "../kernels/drivers/schedule.h"
#include "any_tensor.h"
#include "api.h"
#include "oracle/semantics.h"
#include "semantic_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------- one instance */

enum {
    SLOT_Q,
    SLOT_K,
    SLOT_V,
    SLOT_O,
    SLOT_L,
    SLOT_S,
    SLOT_M,
    SLOT_W,
    SLOT_MASK,
    SLOT_TREE,
    SLOT_K_SCALES,
    SLOT_V_SCALES
};
enum { D_Q, D_K, D_V, D_ROOM, D_MASK, D_OUT, D_OUT_B, D_LSE, D_LSE_B, D_MAX, D_MAX_B, D_W, D_W_B };
enum { MOST_HEADS = 32, MOST_BATCH = 8 };

/* An output, and what its memory holds before a run. */
typedef struct output {
    const char *name;
    any_tensor t;
    char *before;
} output;

typedef struct instance {
    semantic_case c;
    int64_t batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim;
    any_tensor q, k, v;
    output out, lse, row_max, weights;
    bool in_place;
    float slopes[MOST_HEADS], head_scales[MOST_HEADS], sinks[MOST_HEADS];
    double slopes64[MOST_HEADS], head_scales64[MOST_HEADS], sinks64[MOST_HEADS];
    int64_t q_starts[MOST_BATCH + 1], kv_starts[MOST_BATCH + 1], offsets[MOST_BATCH];
    int64_t q_lens[MOST_BATCH], kv_lens[MOST_BATCH]; /* of every sequence, as they come out */
    int32_t *pages;
    uint64_t *tree;
    unsigned char *tree_bytes;
    qkv_attention_desc desc;
    oracle_semantics oracle;
} instance;

static bool one_in(rng *r, int n)
{
    return rng_int(r, 1, n) == 1;
}

/* Starts of 'batch' sequences within 'rows' rows, some of which are nobody's. */
static void make_starts(int64_t *starts, int64_t *lens, int64_t batch, int64_t rows, rng *r)
{
    for (int64_t b = 0; b <= batch; b++) {
        const int64_t at = rng_int(r, 0, rows);
        int64_t k = b;
        for (; k > 0 && starts[k - 1] > at; k--)
            starts[k] = starts[k - 1];
        starts[k] = at;
    }
    for (int64_t b = 0; b < batch; b++)
        lens[b] = starts[b + 1] - starts[b];
}

static void make_lengths(instance *x, rng *r)
{
    const int *f = x->c.f;
    for (int b = 0; b < MOST_BATCH; b++) {
        x->q_lens[b] = x->q_len;
        x->kv_lens[b] = x->kv_len;
        x->offsets[b] = rng_int(r, -x->q_len - 1, f[C_OFFSETS]);
    }
    if (f[C_Q_STARTS])
        make_starts(x->q_starts, x->q_lens, x->batch, x->q_len, r);
    const bool kv_starts = f[C_KV_STARTS] && !f[C_PAGED];
    if (kv_starts)
        make_starts(x->kv_starts, x->kv_lens, x->batch, x->kv_len, r);
    for (int b = 0; b < x->batch && f[C_KV_LENS]; b++)
        x->kv_lens[b] = rng_int(r, 0, x->kv_lens[b]);
    x->desc.shared_len = f[C_SHARED] < x->kv_len ? f[C_SHARED] : x->kv_len;
    x->desc.q_starts = f[C_Q_STARTS] ? x->q_starts : NULL;
    x->desc.kv_starts = kv_starts ? x->kv_starts : NULL;
    x->desc.kv_lens = f[C_KV_LENS] ? x->kv_lens : NULL;
    x->desc.q_offsets = f[C_OFFSETS] ? x->offsets : NULL;
    x->oracle.q_lens = x->q_lens;
    x->oracle.kv_lens = x->kv_lens;
    x->oracle.q_offsets = x->desc.q_offsets;
}

static void make_arrays(instance *x, rng *r)
{
    for (int h = 0; h < MOST_HEADS; h++) {
        x->slopes[h] = rng_uniform(r, -0.1f, 0.5f);
        x->head_scales[h] = rng_uniform(r, -0.5f, 2.0f);
        x->sinks[h] = h % 5 == 4 ? -INFINITY : 2.0f * rng_normal(r);
        x->slopes64[h] = (double)x->slopes[h];
        x->head_scales64[h] = (double)x->head_scales[h];
        x->sinks64[h] = (double)x->sinks[h];
    }
    const semantic_case *c = &x->c;
    x->desc.slopes = c->f[C_SLOPES] ? x->slopes : NULL;
    x->desc.head_scales = c->f[C_HEAD_SCALES] ? x->head_scales : NULL;
    x->desc.sinks = c->f[C_SINKS] ? x->sinks : NULL;
    x->oracle.slopes = c->f[C_SLOPES] ? x->slopes64 : NULL;
    x->oracle.head_scales = c->f[C_HEAD_SCALES] ? x->head_scales64 : NULL;
    x->oracle.sinks = c->f[C_SINKS] ? x->sinks64 : NULL;
}

/* The mask's element at (b, h, i, j): what the oracle adds. */
static double put_mask(int kind, char *data, int64_t at, rng *r, int density)
{
    const qkv_kernels *k = qkv_kernels_of(QKV_ISA_scalar);
    const bool seen = density == 0 || rng_int(r, 0, 10) >= density;
    float added = !seen ? -INFINITY : one_in(r, 9) ? -30000.0f : rng_normal(r);
    uint16_t *halves = (uint16_t *)(void *)data;
    switch (kind) {
    case MASK_F32:
        memcpy(data + at * 4, &added, sizeof added);
        return (double)added;
    case MASK_F16:
        k->narrow_f16(&added, halves + at, 1);
        k->widen_f16(halves + at, &added, 1);
        return (double)added;
    case MASK_BF16:
        k->narrow_bf16(&added, halves + at, 1);
        k->widen_bf16(halves + at, &added, 1);
        return (double)added;
    case MASK_BOOL:
        data[at] = (char)seen;
        break;
    default:
        data[at / 8] = (char)((data[at / 8] & ~(1 << at % 8)) | (int)seen << at % 8);
    }
    return seen ? 0.0 : -HUGE_VAL;
}

static void make_mask(instance *x, rng *r)
{
    static const int32_t types[] = {0, QKV_F32, QKV_F16, QKV_BF16, QKV_BOOL, QKV_BIT};
    static const int64_t bits[] = {0, 32, 16, 16, 8, 1};
    const int kind = x->c.f[C_MASK], strides = x->c.f[C_MASK_STRIDES];
    if (kind == MASK_NONE || x->kv_len == 0)
        return;
    const int64_t key = strides & 16 ? 2 : 1, query = x->kv_len * key + (strides & 16 ? 3 : 0);
    qkv_mask m = {.stride_key = strides & 1 ? 0 : key,
                  .stride_query = strides & 2 ? 0 : query,
                  .stride_head = strides & 4 ? 0 : x->q_len * query,
                  .stride_batch = strides & 8 ? 0 : x->q_heads * x->q_len * query,
                  .dtype = types[kind],
                  .flags = QKV_TENSOR_STRIDED};
    const int64_t last = (x->batch - 1) * m.stride_batch + (x->q_heads - 1) * m.stride_head +
                         (x->q_len - 1) * m.stride_query + (x->kv_len - 1) * m.stride_key;
    char *data = guarded_bytes(SLOT_MASK, (size_t)((last + 1) * bits[kind] + 7) / 8, PLACE_AT_END);
    const int64_t n = x->batch * x->q_heads * x->q_len * x->kv_len;
    double *want = doubles(D_MASK, n);
    /* Broadcast elements are written more than once: the last time counts. */
    for (int pass = 0; pass < 2; pass++) {
        rng again = *r;
        int64_t e = 0;
        for (int64_t b = 0; b < x->batch; b++)
            for (int64_t h = 0; h < x->q_heads; h++)
                for (int64_t i = 0; i < x->q_len; i++)
                    for (int64_t j = 0; j < x->kv_len; j++, e++) {
                        const int64_t at = b * m.stride_batch + h * m.stride_head +
                                           i * m.stride_query + j * m.stride_key;
                        rng own = {again.state ^ (uint64_t)(at + 1) * 0x9e3779b97f4a7c15u};
                        rng_bits(&own);
                        want[e] = put_mask(kind, data, at, &own, x->c.f[C_MASK_DENSITY]);
                    }
    }
    m.data = data;
    x->desc.mask = m;
    x->oracle.mask = want;
}

static void make_tree(instance *x, rng *r)
{
    if (!x->c.f[C_TREE])
        return;
    const int64_t words = (x->q_len + 63) / 64 + (x->c.f[C_MASK_STRIDES] & 1);
    const int64_t rows = (x->desc.q_starts ? 1 : x->batch) * x->q_len;
    x->tree = guarded_bytes(SLOT_TREE, (size_t)(rows * words) * sizeof *x->tree, PLACE_AT_END);
    x->tree_bytes = calloc((size_t)(x->batch * x->q_len * x->q_len) + 1, 1);
    for (int64_t i = 0; i < rows * words; i++)
        x->tree[i] = rng_bits(r); /* what lies beyond q_len is not looked at */
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t i = 0; i < x->q_lens[b]; i++)
            for (int64_t j = 0; j < x->q_lens[b]; j++) {
                const int64_t row = (x->desc.q_starts ? x->q_starts[b] : b * x->q_len) + i;
                x->tree_bytes[(b * x->q_len + i) * x->q_len + j] =
                    x->tree[row * words + j / 64] >> j % 64 & 1;
            }
    x->desc.tree_mask = x->tree;
    x->desc.tree_stride = words;
    x->oracle.tree = x->tree_bytes;
}

static void make_options(instance *x)
{
    static const float scales[] = {0.0f, 0.0f, -0.3f, 3.0f};
    const int *f = x->c.f;
    qkv_attention_desc *d = &x->desc;
    d->flags = (f[C_CAUSAL] ? QKV_CAUSAL : 0) | (f[C_SCALE] ? QKV_SCALE_SET : 0) |
               (f[C_WINDOWED] ? QKV_WINDOW : 0) | (f[C_INVARIANT] ? QKV_INVARIANT : 0) |
               (f[C_TASKS] == BY_SPLIT_TASKS ? QKV_SPLIT : 0);
    d->scale = scales[f[C_SCALE]];
    d->softcap = 0.5f * (float)f[C_SOFTCAP];
    if (f[C_WINDOWED]) {
        d->window_left = f[C_LEFT] - 1;
        d->window_right = f[C_RIGHT] - 1;
        d->sink_tokens = f[C_SINK_TOKENS];
    }
    oracle_semantics *o = &x->oracle;
    o->scale = f[C_SCALE] ? (double)d->scale : 1.0 / sqrt((double)x->dim);
    o->causal = f[C_CAUSAL];
    o->windowed = f[C_WINDOWED];
    o->window_left = d->window_left;
    o->window_right = d->window_right;
    o->sink_tokens = d->sink_tokens;
    o->softcap = (double)d->softcap;
    const bool integers =
        f[C_TYPE_K] == QKV_Q8_0 || f[C_TYPE_K] == QKV_I8 || f[C_TYPE_K] == QKV_Q4_0;
    o->q_step = integers ? 1.0 / 65534 : 0;
    o->k_rounding = f[C_TYPE_K] == QKV_I8 ? 0x1p-24 : 0;
    o->v_rounding = f[C_TYPE_V] == QKV_I8 ? 0x1p-24 : 0;
}

static int64_t rounded_up(int64_t n, int32_t dtype)
{
    return (n + any_step(dtype) - 1) / any_step(dtype) * any_step(dtype);
}

static void make_sizes(instance *x)
{
    int *f = x->c.f;
    if (f[C_LATENT])
        f[C_TYPE_V] = f[C_TYPE_K];
    x->batch = 1 + f[C_MORE_BATCH];
    x->kv_heads = 1 + f[C_MORE_KV_HEADS];
    x->q_heads = x->kv_heads * (1 + f[C_MORE_GROUP]);
    x->q_len = 1 + f[C_MORE_Q];
    x->kv_len = f[C_KV];
    x->dim = rounded_up(1 + f[C_MORE_DIM], f[C_TYPE_K]);
    x->value_dim = rounded_up(1 + f[C_MORE_VALUE_DIM], f[C_TYPE_V]);
    if (f[C_LATENT] && x->value_dim > x->dim)
        x->value_dim = x->dim;
    x->in_place = f[C_IN_PLACE] && x->value_dim == x->dim;
    x->desc = (qkv_attention_desc){.size = sizeof x->desc,
                                   .batch = x->batch,
                                   .q_heads = x->q_heads,
                                   .kv_heads = x->kv_heads,
                                   .q_len = x->q_len,
                                   .kv_len = x->kv_len,
                                   .head_dim = x->dim,
                                   .value_dim = x->value_dim};
    x->oracle = (oracle_semantics){.batch = x->batch,
                                   .q_heads = x->q_heads,
                                   .kv_heads = x->kv_heads,
                                   .q_len = x->q_len,
                                   .kv_len = x->kv_len,
                                   .head_dim = x->dim,
                                   .value_dim = x->value_dim};
}

/* The sequence with most keys: what is shared is its. */
static int64_t longest(const instance *x)
{
    int64_t most = 0;
    for (int64_t b = 1; b < x->batch; b++)
        if (x->kv_lens[b] > x->kv_lens[most])
            most = b;
    return most;
}

static int64_t shared_rows(const instance *x, int64_t b)
{
    return x->desc.shared_len < x->kv_lens[b] ? x->desc.shared_len : x->kv_lens[b];
}

/* Whole pages of the shared prefix are one sequence's. */
static void share_pages(instance *x, int64_t size, int64_t each)
{
    const int64_t from = longest(x);
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t i = 0; (i + 1) * size <= shared_rows(x, b); i++)
            x->pages[b * each + i] = x->pages[from * each + i];
}

/* The other rows of the shared prefix are copies. */
static void share_rows(const instance *x, const any_tensor *t)
{
    const int64_t from = longest(x);
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t h = 0; h < x->kv_heads; h++)
            for (int64_t i = 0; i < shared_rows(x, b); i++)
                any_copy_row(t, h, i, from, b);
}

/* A pool of pages, one more than are used, and who has which. What the table
 * says beyond a sequence's length is not looked at. */
static void make_pages(instance *x, rng *r)
{
    const int64_t size = 4 << x->c.f[C_PAGED], each = (x->kv_len + size - 1) / size;
    const int64_t used = x->batch * each;
    x->pages = malloc((size_t)(used + 1) * sizeof *x->pages);
    for (int64_t i = 0; i < used; i++) {
        const int64_t k = rng_int(r, 0, i);
        x->pages[i] = x->pages[k];
        x->pages[k] = (int32_t)i;
    }
    for (int64_t i = 0; i < used; i++)
        if (i % each * size >= x->kv_lens[i / each])
            x->pages[i] = (int32_t)rng_int(r, -1000, 1000);
    share_pages(x, size, each);
    x->desc.page_size = size;
    x->desc.pages = used + 1;
    x->desc.page_table = x->pages;
    x->desc.page_table_stride = each;
}

static any_tensor make_cache(const instance *x, int slot, int scales, int64_t dim, int32_t dtype)
{
    const int how = x->c.f[C_HOW_KV];
    const int64_t batch = x->pages ? x->desc.pages : x->desc.kv_starts ? 1 : x->batch;
    any_tensor t = any_make(slot, batch, x->kv_heads, x->pages ? x->desc.page_size : x->kv_len, dim,
                            how, dtype);
    if (dtype == QKV_I8)
        any_make_scales(&t, scales, how);
    t.count[0] = x->batch;
    t.count[2] = x->kv_len;
    t.pages = x->pages;
    t.table_stride = x->desc.page_table_stride;
    t.page_size = x->desc.page_size;
    t.starts = x->desc.kv_starts;
    t.lens = x->kv_lens;
    return t;
}

/* The query or an output. */
static any_tensor make_rows(const instance *x, int slot, int64_t dim, int how, int32_t dtype)
{
    any_tensor t =
        any_make(slot, x->desc.q_starts ? 1 : x->batch, x->q_heads, x->q_len, dim, how, dtype);
    t.count[0] = x->batch;
    t.starts = x->desc.q_starts;
    t.lens = x->q_lens;
    return t;
}

static void make_tensors(instance *x, rng *r)
{
    const int *f = x->c.f;
    if (f[C_PAGED])
        make_pages(x, r);
    x->q = make_rows(x, SLOT_Q, x->dim, f[C_HOW_Q], f[C_TYPE_Q]);
    x->k = make_cache(x, SLOT_K, SLOT_K_SCALES, x->dim, f[C_TYPE_K]);
    if (f[C_LATENT]) {
        x->v = x->k;
        x->v.dim = x->value_dim;
    } else {
        x->v = make_cache(x, SLOT_V, SLOT_V_SCALES, x->value_dim, f[C_TYPE_V]);
    }
    x->out = (output){.name = "out", .t = x->q};
    if (!x->in_place)
        x->out.t = make_rows(x, SLOT_O, x->value_dim, f[C_HOW_OUT], f[C_TYPE_OUT]);
    x->lse = (output){.name = "lse", .t = make_rows(x, SLOT_L, 1, f[C_HOW_OUT], QKV_F32)};
    x->row_max = (output){.name = "row_max", .t = make_rows(x, SLOT_M, 1, HOW_PACKED, QKV_F32)};
    x->weights =
        (output){.name = "weights", .t = make_rows(x, SLOT_W, x->kv_len, f[C_HOW_OUT], QKV_F32)};
    x->desc.query = x->q.desc;
    x->desc.key = x->k.desc;
    x->desc.value = x->v.desc;
    x->desc.key_scale = x->k.scale_desc;
    x->desc.value_scale = x->v.scale_desc;
    x->desc.out = x->out.t.desc;
    x->desc.lse = x->lse.t.desc;
    if (f[C_ROW_MAX])
        x->desc.row_max = x->row_max.t.desc;
    if (f[C_WEIGHTS]) {
        x->desc.weights = x->weights.t.desc;
        x->desc.weights_stage = f[C_WEIGHTS] - 1;
    }
}

/* Does any query of the key/value head see the key? */
static bool anyone_sees(const instance *x, int64_t b, int64_t kv_head, int64_t j)
{
    const int64_t group = x->q_heads / x->kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t i = 0; i < x->q_lens[b]; i++)
            if (oracle_sees(&x->oracle, b, h, i, j))
                return true;
    return false;
}

static void put_some_nan(const instance *x, rng *r)
{
    const any_tensor *t = one_in(r, 2) ? &x->v : one_in(r, 2) ? &x->k : &x->q;
    const int64_t b = rng_int(r, 0, x->batch - 1), rows = any_rows(t, b);
    if (rows > 0)
        any_put_nan(t, b, rng_int(r, 0, t->count[1] - 1), rng_int(r, 0, rows - 1),
                    rng_int(r, 0, t->dim - 1));
}

static void make_contents(instance *x, rng *r)
{
    any_fill(&x->q, r);
    any_fill(&x->k, r);
    if (!x->c.f[C_LATENT])
        any_fill(&x->v, r);
    /* The stages before the mask look at hidden keys as well. */
    const bool all_shown =
        x->c.f[C_WEIGHTS] == 1 + QKV_WEIGHTS_SCALED || x->c.f[C_WEIGHTS] == 1 + QKV_WEIGHTS_CAPPED;
    if (x->c.f[C_POISON] && !all_shown)
        each_row(&x->k, b, h, j) if (j >= x->desc.shared_len && !anyone_sees(x, b, h, j))
        {
            any_poison_row(&x->k, b, h, j, one_in(r, 2));
            if (!x->c.f[C_LATENT])
                any_poison_row(&x->v, b, h, j, one_in(r, 2));
        }
    if (x->c.f[C_NAN])
        put_some_nan(x, r);
    share_rows(x, &x->k);
    if (!x->c.f[C_LATENT])
        share_rows(x, &x->v);
}

static void ask_oracle(instance *x)
{
    oracle_semantics *o = &x->oracle;
    const int64_t rows = x->batch * x->q_heads * x->q_len;
    o->q = any_doubles(&x->q, D_Q);
    o->k = any_doubles(&x->k, D_K);
    o->v = any_doubles(&x->v, D_V);
    o->out = doubles(D_OUT, rows * x->value_dim);
    o->out_bound = doubles(D_OUT_B, rows * x->value_dim);
    o->lse = doubles(D_LSE, rows);
    o->lse_bound = doubles(D_LSE_B, rows);
    o->max = doubles(D_MAX, rows);
    o->max_bound = doubles(D_MAX_B, rows);
    o->stage = x->c.f[C_WEIGHTS] - 1;
    o->weights = x->c.f[C_WEIGHTS] ? doubles(D_W, rows * x->kv_len) : NULL;
    o->weights_bound = x->c.f[C_WEIGHTS] ? doubles(D_W_B, rows * x->kv_len) : NULL;
    oracle_semantics_run(o, doubles(D_ROOM, 3 * x->kv_len));
}

/* An output in place begins as the query. */
static void output_begin(output *o, const any_tensor *query)
{
    const size_t bytes = any_bytes(&o->t);
    o->before = malloc(bytes + 1);
    if (o->t.data == query->data)
        memcpy(o->before, query->data, bytes);
    else
        memset(o->before, 0xff, bytes);
}

static void instance_make(instance *x, const semantic_case *c)
{
    *x = (instance){.c = *c};
    rng r = {c->seed ^ 0x5eed};
    make_sizes(x);
    make_options(x);
    make_lengths(x, &r);
    make_arrays(x, &r);
    make_mask(x, &r);
    make_tree(x, &r);
    make_tensors(x, &r);
    make_contents(x, &r);
    ask_oracle(x);
    output_begin(&x->out, &x->q);
    output_begin(&x->lse, &x->q);
    output_begin(&x->row_max, &x->q);
    output_begin(&x->weights, &x->q);
}

static void instance_free(instance *x)
{
    free(x->out.before);
    free(x->lse.before);
    free(x->row_max.before);
    free(x->weights.before);
    free(x->tree_bytes);
    free(x->pages);
}

/* ------------------------------------------------------------- comparison */

/* Half an ulp of a 16-bit type at x, or of its smallest denormal. */
static double half_ulp(int32_t dtype, double x)
{
    if (dtype == QKV_F16)
        return fabs(x) * 0x1p-11 + 0x1p-25;
    return dtype == QKV_BF16 ? fabs(x) * 0x1p-8 + 0x1p-134 : 0.0;
}

/* The first element that is off, told in 'message'; false if there is none. */
static bool differs(const output *o, const double *want, const double *bound, char *message,
                    size_t size)
{
    const any_tensor *t = &o->t;
    each_row(t, b, h, i)
    {
        int64_t at = ((b * t->count[1] + h) * t->count[2] + i) * t->dim;
        for (int64_t d = 0; d < t->dim; d++, at++) {
            const double got = any_get(t, b, h, i, d);
            const double allowed = bound[at] + half_ulp(t->dtype, fabs(want[at]) + bound[at]);
            if (isnan(want[at])   ? isnan(got)
                : isinf(want[at]) ? got == want[at]
                                  : fabs(got - want[at]) <= allowed)
                continue;
            snprintf(message, size,
                     "%s of batch %d, head %d, row %d, element %d is %.9g, expected %.17g within "
                     "%.3g",
                     o->name, (int)b, (int)h, (int)i, (int)d, got, want[at], allowed);
            return true;
        }
    }
    return false;
}

/* Were bytes written that belong to no row? (Puts the rows back.) */
static bool strays(const output *o, char *message, size_t size)
{
    const any_tensor *t = &o->t;
    any_tensor before = *t;
    before.data = o->before;
    any_tensor one_row = *t;
    one_row.extent = t->dim;
    each_row(t, b, h, i)
        memcpy(any_row(t, b, h, i), any_row(&before, b, h, i), any_bytes(&one_row));
    if (memcmp(t->data, o->before, any_bytes(t)) == 0)
        return false;
    snprintf(message, size, "%s: bytes that belong to no row have changed", o->name);
    return true;
}

static void output_reset(const output *o)
{
    memcpy(o->t.data, o->before, any_bytes(&o->t));
}

static void instance_reset(const instance *x)
{
    output_reset(&x->out);
    output_reset(&x->lse);
    output_reset(&x->row_max);
    output_reset(&x->weights);
}

enum { WORKERS = 3 };

/* The numbers 0 .. n - 1 in any order. */
static int64_t *shuffled(int64_t n, rng *r)
{
    int64_t *order = malloc((size_t)(n + 1) * sizeof *order);
    for (int64_t i = 0; i < n; i++) {
        const int64_t k = rng_int(r, 0, i);
        order[i] = order[k];
        order[k] = i;
    }
    return order;
}

static void *scratch_of(size_t bytes)
{
    return guarded_bytes(SLOT_S, bytes,
                         bytes % QKV_SCRATCH_ALIGN == 0 ? PLACE_AT_END : PLACE_AT_START);
}

static void run_problem(const qkv_attention_problem *p, const qkv_attention_plan *plan)
{
    qkv_run_attention(p, plan, scratch_of(plan->worker_bytes));
}

/* As qkv_attention_begin() and qkv_attention_run_task() do it. */
static void run_problem_tasks(const qkv_attention_desc *desc, const qkv_attention_problem *p,
                              const qkv_attention_plan *plan, rng *r)
{
    const bool scheduled = qkv_needs_schedule(p);
    size_t shared = 0;
    if (scheduled)
        cr_assert(qkv_schedule_bytes(p, plan, &shared));
    char *scratch = scratch_of(shared + WORKERS * plan->worker_bytes);
    qkv_schedule *schedule = (qkv_schedule *)(void *)scratch;
    if (scheduled)
        qkv_schedule_begin(schedule, desc, p, plan);
    const int64_t tasks = scheduled ? schedule->n_tasks : qkv_attention_tasks(p, plan);
    int64_t *order = shuffled(tasks, r);
    for (int64_t i = 0; i < tasks; i++) {
        char *own = scratch + shared + plan->worker_bytes * (size_t)rng_int(r, 0, WORKERS - 1);
        if (scheduled)
            qkv_schedule_run(schedule, order[i], own);
        else
            qkv_run_attention_task(p, plan, order[i], own);
    }
    free(order);
}

/* With the kernels of a table that cannot be selected: those through SIMDe. */
static qkv_status run_with(const qkv_kernels *kernels, const instance *x, rng *r)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(&x->desc, &p);
    if (status)
        return status;
    const qkv_attention_plan plan = qkv_plan_attention(&p, kernels);
    if (x->c.f[C_TASKS] == BY_CALL)
        run_problem(&p, &plan);
    else
        run_problem_tasks(&x->desc, &p, &plan, r);
    return QKV_OK;
}

static qkv_status run_tasks(const qkv_attention_desc *desc, rng *r)
{
    size_t bytes = 0;
    int64_t tasks = 0;
    qkv_status status = qkv_attention_scratch_size(desc, WORKERS, &bytes);
    if (!status)
        status = qkv_attention_task_count(desc, &tasks);
    if (status)
        return status;
    void *scratch = scratch_of(bytes);
    status = qkv_attention_begin(desc, scratch, bytes);
    int64_t *order = shuffled(tasks, r);
    for (int64_t i = 0; i < tasks && !status; i++)
        status = qkv_attention_run_task(desc, order[i], rng_int(r, 0, WORKERS - 1), scratch, bytes);
    free(order);
    return status;
}

static qkv_status run_selected(const instance *x, rng *r)
{
    if (x->c.f[C_TASKS] != BY_CALL)
        return run_tasks(&x->desc, r);
    size_t bytes = 0;
    const qkv_status status = qkv_attention_scratch_size(&x->desc, 1, &bytes);
    return status ? status : qkv_attention(&x->desc, scratch_of(bytes), bytes);
}

static bool result_differs(const instance *x, char *message, size_t size)
{
    const oracle_semantics *o = &x->oracle;
    if (x->c.f[C_WEIGHTS] && differs(&x->weights, o->weights, o->weights_bound, message, size))
        return true;
    if (x->c.f[C_ROW_MAX] && differs(&x->row_max, o->max, o->max_bound, message, size))
        return true;
    return differs(&x->lse, o->lse, o->lse_bound, message, size) ||
           differs(&x->out, o->out, o->out_bound, message, size) ||
           strays(&x->out, message, size) || strays(&x->lse, message, size) ||
           strays(&x->row_max, message, size) || strays(&x->weights, message, size);
}

static qkv_status run_once(const instance *x, const test_isa *isa)
{
    rng r = {x->c.seed ^ 0x7a58};
    instance_reset(x);
    const bool real = isa->id < QKV_ISA_COUNT;
    if (real && qkv_isa_select(isa->name) != QKV_OK)
        fail_with("%s cannot be selected", isa->name);
    const qkv_status status = real ? run_selected(x, &r) : run_with(isa->table, x, &r);
    guards_intact();
    return status;
}

/* Are the bits others than those of sequences that know of nothing shared? */
static bool sharing_shows(const instance *x, const test_isa *isa)
{
    if (x->desc.shared_len == 0)
        return false;
    const size_t bytes = any_bytes(&x->out.t), lse_bytes = any_bytes(&x->lse.t);
    char *out = malloc(bytes + 1), *lse = malloc(lse_bytes + 1);
    memcpy(out, x->out.t.data, bytes);
    memcpy(lse, x->lse.t.data, lse_bytes);
    instance alone = *x;
    alone.desc.shared_len = 0;
    const bool differ = run_once(&alone, isa) || memcmp(out, x->out.t.data, bytes) != 0 ||
                        memcmp(lse, x->lse.t.data, lse_bytes) != 0;
    free(out);
    free(lse);
    return differ;
}

/* On one ISA, by its number. */
static bool run_fails(const instance *x, const test_isa *isa, char *message, size_t size)
{
    const qkv_status status = run_once(x, isa);
    char what[256] = "";
    if (status)
        snprintf(what, sizeof what, "%s", qkv_strerror(status));
    else if (sharing_shows(x, isa))
        snprintf(what, sizeof what, "other bits where a prefix is shared");
    else if (!result_differs(x, what, sizeof what))
        return false;
    snprintf(message, size, "%s: %s", isa->name, what);
    return true;
}

/* On every ISA. Those through SIMDe are slow: they take every sixteenth case,
 * or all of them where hours do not matter. */
static bool case_fails(const semantic_case *c, bool count, char *message, size_t size)
{
    instance x;
    instance_make(&x, c);
    bool failed = false;
    for (int id = 0; id < TEST_ISA_COUNT && !failed; id++) {
        const test_isa isa = test_isa_of(id);
        if (isa.missing || (id >= QKV_ISA_COUNT && c->seed % 16 != 0 && !effort_is_long()))
            continue;
        failed = run_fails(&x, &isa, message, size);
        if (count)
            tally(id, 1);
    }
    instance_free(&x);
    return failed;
}

/* One field at a time: 0, half, one less, as long as the case still fails. */
static void shrink(semantic_case *c, char *message, size_t size)
{
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (int i = 0; i < C_FIELDS; i++) {
            const int tries[] = {0, c->f[i] / 2, c->f[i] - 1};
            for (int t = 0; t < 3 && c->f[i] > 0; t++) {
                semantic_case candidate = *c;
                candidate.f[i] = tries[t];
                if (tries[t] < c->f[i] && case_fails(&candidate, false, message, size)) {
                    *c = candidate;
                    smaller = true;
                    break;
                }
            }
        }
    }
    case_fails(c, false, message, size);
}

static void check_case(semantic_case c)
{
    char text[1024], message[512];
    semantic_case_describe(&c, text, sizeof text);
    context("%s", text);
    if (!case_fails(&c, true, message, sizeof message))
        return;
    shrink(&c, message, sizeof message);
    semantic_case_describe(&c, text, sizeof text);
    context("%s", text);
    fail_with("%s", message);
}

/* QKV_TEST_CASE=<seed> makes one case again. */
static void check_cases(const char *name, int64_t full)
{
    rng r = rng_make(name);
    const char *only = getenv("QKV_TEST_CASE");
    if (only) {
        check_case(semantic_case_random(strtoull(only, NULL, 10)));
        return;
    }
    for (int64_t i = effort_is_full() ? full : full / 50; i > 0; i--)
        check_case(semantic_case_random(rng_bits(&r)));
}

/* 20,000 in all, in parts that run beside each other. */
Test(semantics, crossed_1)
{
    check_cases("semantics 1", 5000);
}

Test(semantics, crossed_2)
{
    check_cases("semantics 2", 5000);
}

Test(semantics, crossed_3)
{
    check_cases("semantics 3", 5000);
}

Test(semantics, crossed_4)
{
    check_cases("semantics 4", 5000);
}
