/* SPDX-License-Identifier: MIT */
/*
 * Everything that a descriptor can ask for, crossed at random: features,
 * shapes, types and layouts, on every ISA, against the oracle. A case is a
 * small struct; all its data follow from it, so that the seed in a message
 * makes the same case again and a failing one can be shrunk: fields are made
 * smaller one by one for as long as it still fails.
 */
#include "api.h"
#include "harness.h"
#include "oracle/semantics.h"
#include "problem.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ cases */

enum { MASK_NONE, MASK_F32, MASK_F16, MASK_BF16, MASK_BOOL, MASK_BIT, MASK_KINDS };
enum { HOW_PACKED, HOW_BSHD, HOW_PADDED, HOWS };

/* All numbers: shrinking moves each towards 0, which is the plain case. */
enum {
    C_MORE_BATCH, /* sizes that are at least 1 are stored less 1 */
    C_MORE_KV_HEADS,
    C_MORE_GROUP,
    C_MORE_Q,
    C_KV,
    C_MORE_DIM,
    C_MORE_VALUE_DIM,
    C_CAUSAL,
    C_WINDOWED,
    C_LEFT, /* the width plus 1: 0 has no limit */
    C_RIGHT,
    C_SINK_TOKENS,
    C_OFFSETS, /* 0: NULL; else how widely they scatter */
    C_KV_LENS, /* a length of its own for every sequence */
    C_PAGED,   /* pages of 4 << n keys, in any order */
    C_SCALE,   /* 0: the default; 1: set to 0; 2: negative; 3: large */
    C_SOFTCAP,
    C_SLOPES,
    C_HEAD_SCALES,
    C_SINKS,
    C_MASK,
    C_MASK_STRIDES, /* bits: which axes are broadcast; padded keys */
    C_MASK_DENSITY, /* 0: all seen */
    C_TREE,
    C_TYPE_Q,
    C_TYPE_K,
    C_TYPE_V,
    C_TYPE_OUT,
    C_HOW_Q,
    C_HOW_KV,
    C_HOW_OUT,
    C_IN_PLACE,
    C_LATENT, /* V is a prefix of K */
    C_INVARIANT,
    C_ROW_MAX,
    C_WEIGHTS, /* the stage plus 1 */
    C_POISON,  /* NaN and infinity in all that no row sees */
    C_NAN,     /* a NaN in something that may be seen */
    C_FIELDS
};

static const char *const field_names[C_FIELDS] = {
    "more batch",    "more kv_heads",  "more group",   "more q_len",  "kv_len",
    "more head_dim", "more value_dim", "causal",       "windowed",    "left",
    "right",         "sink_tokens",    "offsets",      "kv_lens",     "paged",
    "scale",         "softcap",        "slopes",       "head_scales", "sinks",
    "mask",          "mask strides",   "mask density", "tree",        "type q",
    "type k",        "type v",         "type out",     "how q",       "how kv",
    "how out",       "in place",       "latent",       "invariant",   "row_max",
    "weights",       "poison",         "nan"};

typedef struct sem_case {
    uint64_t seed;
    int f[C_FIELDS];
} sem_case;

static bool one_in(rng *r, int n)
{
    return rng_int(r, 1, n) == 1;
}

static void random_shape(rng *r, sem_case *c)
{
    static const int groups[] = {0, 0, 0, 1, 2, 3, 7};
    const bool decoding = one_in(r, 3), large = one_in(r, 40);
    c->f[C_MORE_BATCH] = (int)rng_int(r, 0, one_in(r, 4) ? 2 : 0);
    c->f[C_MORE_KV_HEADS] = (int)rng_int(r, 0, one_in(r, 3) ? 2 : 0);
    c->f[C_MORE_GROUP] = groups[rng_int(r, 0, 6)];
    c->f[C_MORE_Q] = (int)rng_int(r, 0, decoding ? 2 : large ? 99 : 29);
    c->f[C_KV] = (int)rng_int(r, one_in(r, 20) ? 0 : 1, large ? 700 : one_in(r, 4) ? 150 : 40);
    c->f[C_MORE_DIM] = (int)rng_int(r, 0, one_in(r, 6) ? 71 : 19);
    c->f[C_MORE_VALUE_DIM] =
        one_in(r, 2) ? c->f[C_MORE_DIM] : (int)rng_int(r, 0, one_in(r, 6) ? 71 : 19);
}

static void random_features(rng *r, sem_case *c)
{
    const int most = c->f[C_KV] + 2;
    c->f[C_CAUSAL] = one_in(r, 2);
    if (one_in(r, 3)) {
        c->f[C_WINDOWED] = 1;
        c->f[C_LEFT] = (int)rng_int(r, 0, one_in(r, 2) ? 6 : most);
        c->f[C_RIGHT] = one_in(r, 2) ? 0 : (int)rng_int(r, 0, most);
        c->f[C_SINK_TOKENS] = one_in(r, 2) ? 0 : (int)rng_int(r, 1, one_in(r, 2) ? 4 : most);
    }
    c->f[C_OFFSETS] = one_in(r, 4) ? (int)rng_int(r, 1, 2 * most) : 0;
    c->f[C_KV_LENS] = one_in(r, 5);
    c->f[C_PAGED] = one_in(r, 5) ? (int)rng_int(r, 1, 3) : 0;
    c->f[C_SCALE] = one_in(r, 5) ? (int)rng_int(r, 1, 3) : 0;
    c->f[C_SOFTCAP] = one_in(r, 4) ? (int)rng_int(r, 1, 60) : 0;
    c->f[C_SLOPES] = one_in(r, 5);
    c->f[C_HEAD_SCALES] = one_in(r, 6);
    c->f[C_SINKS] = one_in(r, 4);
    c->f[C_MASK] = one_in(r, 2) ? 0 : (int)rng_int(r, 1, MASK_KINDS - 1);
    c->f[C_MASK_STRIDES] = (int)rng_int(r, 0, 31);
    c->f[C_MASK_DENSITY] = (int)rng_int(r, 0, 10);
    c->f[C_TREE] = one_in(r, 6);
    c->f[C_INVARIANT] = one_in(r, 6);
    c->f[C_ROW_MAX] = one_in(r, 3);
    c->f[C_WEIGHTS] = one_in(r, 3) ? (int)rng_int(r, 1, 4) : 0;
}

static sem_case random_case(uint64_t seed)
{
    rng r = {seed};
    sem_case c = {.seed = seed};
    random_shape(&r, &c);
    random_features(&r, &c);
    if (one_in(&r, 3))
        for (int t = C_TYPE_Q; t <= C_TYPE_OUT; t++)
            c.f[t] = (int)rng_int(&r, 0, 2);
    c.f[C_HOW_Q] = (int)rng_int(&r, 0, HOWS - 1);
    c.f[C_HOW_KV] = (int)rng_int(&r, 0, HOWS - 1);
    c.f[C_HOW_OUT] = (int)rng_int(&r, 0, HOWS - 1);
    c.f[C_IN_PLACE] = one_in(&r, 6);
    c.f[C_LATENT] = one_in(&r, 8);
    c.f[C_POISON] = one_in(&r, 2);
    c.f[C_NAN] = one_in(&r, 8);
    return c;
}

static void describe(const sem_case *c, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "case seed %" PRIu64 ":", c->seed);
    for (int i = 0; i < C_FIELDS && at < size; i++)
        if (c->f[i])
            at += (size_t)snprintf(text + at, size - at, " %s %d,", field_names[i], c->f[i]);
}

/* ---------------------------------------------------------------- tensors */

/* A tensor of any of the three types, flush against a guard page. */
typedef struct any_tensor {
    char *data;
    int32_t dtype;
    int64_t count[3], stride[3], dim, extent;
    qkv_tensor desc;
    const int32_t *pages; /* NULL: batch and row are what they say */
    int64_t table_stride, page_size;
} any_tensor;

static int64_t bytes_of(int32_t dtype)
{
    return dtype == QKV_F32 ? 4 : 2;
}

static any_tensor any_make(int slot, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
                           int how, int32_t dtype)
{
    const int64_t row = dim + (how == HOW_PADDED ? 3 : 0);
    any_tensor t = {.dtype = dtype, .count = {batch, heads, rows}, .dim = dim};
    t.stride[2] = how == HOW_BSHD ? heads * dim : row;
    t.stride[1] = how == HOW_BSHD ? dim : rows * row;
    t.stride[0] = heads * rows * row;
    const bool empty = rows == 0 || dim == 0;
    t.extent = dim;
    for (int a = 0; a < 3; a++)
        t.extent += (t.count[a] - 1) * t.stride[a];
    if (empty)
        t.extent = 0;
    t.data = guarded_bytes(slot, (size_t)(t.extent * bytes_of(dtype)), PLACE_AT_END);
    t.desc = (qkv_tensor){.data = t.data,
                          .stride_batch = t.stride[0],
                          .stride_head = t.stride[1],
                          .stride_row = t.stride[2],
                          .dtype = dtype,
                          .flags = QKV_TENSOR_STRIDED};
    return t;
}

static void *any_row(const any_tensor *t, int64_t b, int64_t h, int64_t i)
{
    if (t->pages) {
        b = t->pages[b * t->table_stride + i / t->page_size];
        i %= t->page_size;
    }
    return t->data + (b * t->stride[0] + h * t->stride[1] + i * t->stride[2]) * bytes_of(t->dtype);
}

static void put(int32_t dtype, void *row, int64_t d, float x)
{
    const qkv_kernels *k = qkv_kernels_of(QKV_ISA_scalar);
    if (dtype == QKV_F32)
        memcpy((float *)row + d, &x, sizeof x);
    else
        (dtype == QKV_F16 ? k->narrow_f16 : k->narrow_bf16)(&x, (uint16_t *)row + d, 1);
}

static float get(int32_t dtype, const void *row, int64_t d)
{
    const qkv_kernels *k = qkv_kernels_of(QKV_ISA_scalar);
    float x;
    if (dtype == QKV_F32)
        memcpy(&x, (const float *)row + d, sizeof x);
    else
        (dtype == QKV_F16 ? k->widen_f16 : k->widen_bf16)((const uint16_t *)row + d, &x, 1);
    return x;
}

#define each_row(t, b, h, i)                                                                       \
    for (int64_t b = 0; b < (t)->count[0]; b++)                                                    \
        for (int64_t h = 0; h < (t)->count[1]; h++)                                                \
            for (int64_t i = 0; i < (t)->count[2]; i++)

static void any_fill(const any_tensor *t, rng *r)
{
    each_row(t, b, h, i) for (int64_t d = 0; d < t->dim; d++)
        put(t->dtype, any_row(t, b, h, i), d, rng_normal(r));
}

static double *any_doubles(const any_tensor *t, int slot)
{
    double *all = doubles(slot, t->extent ? t->count[0] * t->count[1] * t->count[2] * t->dim : 0);
    double *at = all;
    each_row(t, b, h, i) for (int64_t d = 0; d < t->dim; d++) *at++ =
        (double)get(t->dtype, any_row(t, b, h, i), d);
    return all;
}

/* ----------------------------------------------------------- one instance */

enum { SLOT_Q, SLOT_K, SLOT_V, SLOT_O, SLOT_L, SLOT_S, SLOT_M, SLOT_W, SLOT_MASK, SLOT_ARRAYS };
enum { D_Q, D_K, D_V, D_ROOM, D_MASK, D_OUT, D_OUT_B, D_LSE, D_LSE_B, D_MAX, D_MAX_B, D_W, D_W_B };

typedef struct instance {
    sem_case c;
    int64_t batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim;
    any_tensor q, k, v, out, lse, row_max, weights;
    bool in_place;
    float slopes[32], head_scales[32], sinks[32];
    double slopes64[32], head_scales64[32], sinks64[32];
    int64_t offsets[8], lens[8];
    int32_t *pages;
    uint64_t *tree;
    unsigned char *tree_bytes;
    qkv_attention_desc desc;
    oracle_semantics oracle;
    float *queries; /* a copy, where the output overwrites them */
} instance;

static void make_arrays(instance *x, rng *r)
{
    for (int h = 0; h < 32; h++) {
        x->slopes[h] = rng_uniform(r, -0.1f, 0.5f);
        x->head_scales[h] = rng_uniform(r, -0.5f, 2.0f);
        x->sinks[h] = h % 5 == 4 ? -INFINITY : 2.0f * rng_normal(r);
        x->slopes64[h] = (double)x->slopes[h];
        x->head_scales64[h] = (double)x->head_scales[h];
        x->sinks64[h] = (double)x->sinks[h];
    }
    for (int b = 0; b < 8; b++) {
        x->offsets[b] = rng_int(r, -x->q_len - 1, x->c.f[C_OFFSETS]);
        x->lens[b] = rng_int(r, 0, x->kv_len);
    }
    const sem_case *c = &x->c;
    x->desc.slopes = c->f[C_SLOPES] ? x->slopes : NULL;
    x->desc.head_scales = c->f[C_HEAD_SCALES] ? x->head_scales : NULL;
    x->desc.sinks = c->f[C_SINKS] ? x->sinks : NULL;
    x->desc.q_offsets = c->f[C_OFFSETS] ? x->offsets : NULL;
    x->oracle.slopes = c->f[C_SLOPES] ? x->slopes64 : NULL;
    x->oracle.head_scales = c->f[C_HEAD_SCALES] ? x->head_scales64 : NULL;
    x->oracle.sinks = c->f[C_SINKS] ? x->sinks64 : NULL;
    x->oracle.q_offsets = x->desc.q_offsets;
    x->desc.kv_lens = c->f[C_KV_LENS] ? x->lens : NULL;
    x->oracle.kv_lens = x->desc.kv_lens;
}

/* The mask's element at (b, h, i, j): what the oracle adds. */
static double put_mask(int kind, char *data, int64_t at, rng *r, int density)
{
    const bool seen = density == 0 || rng_int(r, 0, 10) >= density;
    const float added = !seen ? -INFINITY : one_in(r, 9) ? -30000.0f : rng_normal(r);
    switch (kind) {
    case MASK_F32:
        put(QKV_F32, data, at, added);
        return (double)get(QKV_F32, data, at);
    case MASK_F16:
        put(QKV_F16, data, at, added);
        return (double)get(QKV_F16, data, at);
    case MASK_BF16:
        put(QKV_BF16, data, at, added);
        return (double)get(QKV_BF16, data, at);
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
    const int64_t rows = x->batch * x->q_len;
    x->tree = guarded_bytes(SLOT_ARRAYS, (size_t)(rows * words) * sizeof *x->tree, PLACE_AT_END);
    x->tree_bytes = calloc((size_t)(rows * x->q_len) + 1, 1);
    for (int64_t i = 0; i < rows * words; i++)
        x->tree[i] = rng_bits(r); /* what lies beyond q_len is not looked at */
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < x->q_len; j++)
            x->tree_bytes[i * x->q_len + j] = x->tree[i * words + j / 64] >> j % 64 & 1;
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
               (f[C_WINDOWED] ? QKV_WINDOW : 0) | (f[C_INVARIANT] ? QKV_INVARIANT : 0);
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
}

static void make_sizes(instance *x)
{
    const int *f = x->c.f;
    x->batch = 1 + f[C_MORE_BATCH];
    x->kv_heads = 1 + f[C_MORE_KV_HEADS];
    x->q_heads = x->kv_heads * (1 + f[C_MORE_GROUP]);
    x->q_len = 1 + f[C_MORE_Q];
    x->kv_len = f[C_KV];
    x->dim = 1 + f[C_MORE_DIM];
    x->value_dim = 1 + f[C_MORE_VALUE_DIM];
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

/* A pool of pages, one more than are used, and who has which. */
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
    x->desc.page_size = size;
    x->desc.pages = used + 1;
    x->desc.page_table = x->pages;
    x->desc.page_table_stride = each;
}

static any_tensor make_cache(const instance *x, int slot, int64_t dim, int how, int32_t dtype)
{
    if (!x->c.f[C_PAGED])
        return any_make(slot, x->batch, x->kv_heads, x->kv_len, dim, how, dtype);
    any_tensor t = any_make(slot, x->desc.pages, x->kv_heads, x->desc.page_size, dim, how, dtype);
    t.count[0] = x->batch;
    t.count[2] = x->kv_len;
    t.pages = x->pages;
    t.table_stride = x->desc.page_table_stride;
    t.page_size = x->desc.page_size;
    return t;
}

static void make_tensors(instance *x, rng *r)
{
    const int *f = x->c.f;
    if (f[C_PAGED])
        make_pages(x, r);
    x->q = any_make(SLOT_Q, x->batch, x->q_heads, x->q_len, x->dim, f[C_HOW_Q], f[C_TYPE_Q]);
    x->k = make_cache(x, SLOT_K, x->dim, f[C_HOW_KV], f[C_TYPE_K]);
    if (f[C_LATENT]) {
        x->v = x->k;
        x->v.dim = x->value_dim;
    } else {
        x->v = make_cache(x, SLOT_V, x->value_dim, f[C_HOW_KV], f[C_TYPE_V]);
    }
    x->out = x->in_place ? x->q
                         : any_make(SLOT_O, x->batch, x->q_heads, x->q_len, x->value_dim,
                                    f[C_HOW_OUT], f[C_TYPE_OUT]);
    x->lse = any_make(SLOT_L, x->batch, x->q_heads, x->q_len, 1, f[C_HOW_OUT], QKV_F32);
    x->row_max = any_make(SLOT_M, x->batch, x->q_heads, x->q_len, 1, HOW_PACKED, QKV_F32);
    x->weights = any_make(SLOT_W, x->batch, x->q_heads, x->q_len, x->kv_len, f[C_HOW_OUT], QKV_F32);
    x->desc.query = x->q.desc;
    x->desc.key = x->k.desc;
    x->desc.value = x->v.desc;
    x->desc.out = x->out.desc;
    x->desc.lse = x->lse.desc;
    if (f[C_ROW_MAX])
        x->desc.row_max = x->row_max.desc;
    if (f[C_WEIGHTS]) {
        x->desc.weights = x->weights.desc;
        x->desc.weights_stage = f[C_WEIGHTS] - 1;
    }
}

/* Does any query of the key/value head see the key? */
static bool anyone_sees(const instance *x, int64_t b, int64_t kv_head, int64_t j)
{
    const int64_t group = x->q_heads / x->kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t i = 0; i < x->q_len; i++)
            if (oracle_sees(&x->oracle, b, h, i, j))
                return true;
    return false;
}

static void fill_row(const any_tensor *t, int64_t b, int64_t h, int64_t i, float value)
{
    for (int64_t d = 0; d < t->dim; d++)
        put(t->dtype, any_row(t, b, h, i), d, value);
}

static void make_contents(instance *x, rng *r)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    any_fill(&x->q, r);
    any_fill(&x->k, r);
    if (!x->c.f[C_LATENT])
        any_fill(&x->v, r);
    /* The stages before the mask look at hidden keys as well. */
    const bool all_shown =
        x->c.f[C_WEIGHTS] == 1 + QKV_WEIGHTS_SCALED || x->c.f[C_WEIGHTS] == 1 + QKV_WEIGHTS_CAPPED;
    if (x->c.f[C_POISON] && !all_shown)
        each_row(&x->k, b, h, j) if (!anyone_sees(x, b, h, j))
        {
            fill_row(&x->k, b, h, j, odd[rng_int(r, 0, 2)]);
            fill_row(&x->v, b, h, j, odd[rng_int(r, 0, 2)]);
        }
    if (x->c.f[C_NAN] && x->kv_len > 0) {
        const any_tensor *t = one_in(r, 2) ? &x->v : one_in(r, 2) ? &x->k : &x->q;
        put(t->dtype,
            any_row(t, rng_int(r, 0, x->batch - 1), rng_int(r, 0, t->count[1] - 1),
                    rng_int(r, 0, t->count[2] - 1)),
            rng_int(r, 0, t->dim - 1), NAN);
    }
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

static void instance_make(instance *x, const sem_case *c)
{
    *x = (instance){.c = *c};
    rng r = {c->seed ^ 0x5eed};
    make_sizes(x);
    make_options(x);
    make_arrays(x, &r);
    make_mask(x, &r);
    make_tree(x, &r);
    make_tensors(x, &r);
    make_contents(x, &r);
    ask_oracle(x);
    x->queries = malloc((size_t)(x->q.extent * 4) + 1);
    memcpy(x->queries, x->q.data, (size_t)(x->q.extent * bytes_of(x->q.dtype)));
}

static void instance_free(instance *x)
{
    free(x->queries);
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
static bool differs(const char *what, const any_tensor *t, const double *want, const double *bound,
                    char *message, size_t size)
{
    each_row(t, b, h, i)
    {
        for (int64_t d = 0; d < t->dim; d++, want++, bound++) {
            const double got = (double)get(t->dtype, any_row(t, b, h, i), d);
            const double allowed = *bound + half_ulp(t->dtype, fabs(*want) + *bound);
            if (isnan(*want)   ? isnan(got)
                : isinf(*want) ? got == *want
                               : fabs(got - *want) <= allowed)
                continue;
            snprintf(message, size,
                     "%s of batch %d, head %d, row %d, element %d is %.9g, expected %.17g within "
                     "%.3g",
                     what, (int)b, (int)h, (int)i, (int)d, got, *want, allowed);
            return true;
        }
    }
    return false;
}

static void instance_reset(const instance *x)
{
    memcpy(x->q.data, x->queries, (size_t)(x->q.extent * bytes_of(x->q.dtype)));
    if (!x->in_place)
        memset(x->out.data, 0xff, (size_t)(x->out.extent * bytes_of(x->out.dtype)));
    canary_fill((float *)(void *)x->lse.data, x->lse.extent);
    canary_fill((float *)(void *)x->row_max.data, x->row_max.extent);
    canary_fill((float *)(void *)x->weights.data, x->weights.extent);
}

/* With the kernels of a table that cannot be selected: those through SIMDe. */
static qkv_status run_with(const qkv_kernels *kernels, const qkv_attention_desc *desc)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    const qkv_attention_plan plan = qkv_plan_attention(&p, kernels);
    void *scratch =
        guarded_bytes(SLOT_S, plan.worker_bytes,
                      plan.worker_bytes % QKV_SCRATCH_ALIGN == 0 ? PLACE_AT_END : PLACE_AT_START);
    qkv_run_attention(&p, &plan, scratch);
    return QKV_OK;
}

static qkv_status run_selected(const qkv_attention_desc *desc)
{
    size_t bytes = 0;
    const qkv_status status = qkv_attention_scratch_size(desc, 1, &bytes);
    if (status)
        return status;
    void *scratch = guarded_bytes(SLOT_S, bytes,
                                  bytes % QKV_SCRATCH_ALIGN == 0 ? PLACE_AT_END : PLACE_AT_START);
    return qkv_attention(desc, scratch, bytes);
}

static bool result_differs(const instance *x, char *message, size_t size)
{
    const oracle_semantics *o = &x->oracle;
    if (x->c.f[C_WEIGHTS] &&
        differs("weights", &x->weights, o->weights, o->weights_bound, message, size))
        return true;
    if (x->c.f[C_ROW_MAX] && differs("row_max", &x->row_max, o->max, o->max_bound, message, size))
        return true;
    return differs("lse", &x->lse, o->lse, o->lse_bound, message, size) ||
           differs("out", &x->out, o->out, o->out_bound, message, size);
}

/* On one ISA, by its number. */
static bool run_fails(const instance *x, const test_isa *isa, char *message, size_t size)
{
    instance_reset(x);
    const bool real = isa->id < QKV_ISA_COUNT;
    if (real && qkv_isa_select(isa->name) != QKV_OK)
        fail_with("%s cannot be selected", isa->name);
    const qkv_status status = real ? run_selected(&x->desc) : run_with(isa->table, &x->desc);
    guards_intact();
    char what[256] = "";
    if (status)
        snprintf(what, sizeof what, "%s", qkv_strerror(status));
    else if (!result_differs(x, what, sizeof what))
        return false;
    snprintf(message, size, "%s: %s", isa->name, what);
    return true;
}

/* On every ISA; those through SIMDe are slow and take every sixteenth case. */
static bool case_fails(const sem_case *c, bool count, char *message, size_t size)
{
    instance x;
    instance_make(&x, c);
    bool failed = false;
    for (int id = 0; id < TEST_ISA_COUNT && !failed; id++) {
        const test_isa isa = test_isa_of(id);
        if (isa.missing || (id >= QKV_ISA_COUNT && c->seed % 16 != 0))
            continue;
        failed = run_fails(&x, &isa, message, size);
        if (count)
            tally(id, 1);
    }
    instance_free(&x);
    return failed;
}

/* One field at a time: 0, half, one less, as long as the case still fails. */
static void shrink(sem_case *c, char *message, size_t size)
{
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (int i = 0; i < C_FIELDS; i++) {
            const int tries[] = {0, c->f[i] / 2, c->f[i] - 1};
            for (int t = 0; t < 3 && c->f[i] > 0; t++) {
                sem_case candidate = *c;
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

static void check_case(sem_case c)
{
    char text[1024], message[512];
    describe(&c, text, sizeof text);
    context("%s", text);
    if (!case_fails(&c, true, message, sizeof message))
        return;
    shrink(&c, message, sizeof message);
    describe(&c, text, sizeof text);
    context("%s", text);
    fail_with("%s", message);
}

/* QKV_TEST_CASE=<seed> makes one case again. */
static void check_cases(const char *name, int64_t full)
{
    rng r = rng_make(name);
    const char *only = getenv("QKV_TEST_CASE");
    for (int64_t i = effort_is_full() ? full : full / 50; i > 0; i--) {
        const uint64_t seed = rng_bits(&r);
        if (!only || strtoull(only, NULL, 10) == seed)
            check_case(random_case(seed));
    }
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
