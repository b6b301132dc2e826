/* SPDX-License-Identifier: MIT */
#include "semantic_case.h"

#include <inttypes.h>
#include <stdio.h>

static const char *const field_names[C_FIELDS] = {
    "more batch",     "more kv_heads", "more group", "more q_len",  "kv_len",   "more head_dim",
    "more value_dim", "causal",        "windowed",   "left",        "right",    "sink_tokens",
    "offsets",        "q_starts",      "kv_starts",  "kv_lens",     "shared",   "paged",
    "scale",          "softcap",       "slopes",     "head_scales", "sinks",    "mask",
    "mask strides",   "mask density",  "tree",       "type q",      "type k",   "type v",
    "type out",       "how q",         "how kv",     "how out",     "in place", "latent",
    "invariant",      "tasks",         "row_max",    "weights",     "poison",   "nan"};

static bool one_in(rng *r, int n)
{
    return rng_int(r, 1, n) == 1;
}

static void small_shape(rng *r, semantic_case *c)
{
    static const int groups[] = {0, 0, 0, 1, 2, 3, 7};
    const bool decoding = one_in(r, 3), large = one_in(r, 40);
    c->f[C_MORE_BATCH] = (int)rng_int(r, 0, one_in(r, 3) ? 2 : 0);
    c->f[C_MORE_KV_HEADS] = (int)rng_int(r, 0, one_in(r, 3) ? 2 : 0);
    c->f[C_MORE_GROUP] = groups[rng_int(r, 0, 6)];
    c->f[C_MORE_Q] = (int)rng_int(r, 0, decoding ? 2 : large ? 99 : 29);
    c->f[C_KV] = (int)rng_int(r, one_in(r, 20) ? 0 : 1, large ? 700 : one_in(r, 4) ? 150 : 40);
    c->f[C_MORE_DIM] = (int)rng_int(r, 0, one_in(r, 6) ? 71 : 19);
    c->f[C_MORE_VALUE_DIM] =
        one_in(r, 2) ? c->f[C_MORE_DIM] : (int)rng_int(r, 0, one_in(r, 6) ? 71 : 19);
}

/* Few queries and so many keys that they make several parts. */
static void long_shape(rng *r, semantic_case *c)
{
    c->f[C_MORE_BATCH] = (int)rng_int(r, 0, 4);
    c->f[C_MORE_GROUP] = (int)rng_int(r, 0, 3);
    c->f[C_MORE_Q] = (int)rng_int(r, 0, 3);
    c->f[C_KV] = (int)rng_int(r, 400, 2600);
    c->f[C_MORE_DIM] = (int)rng_int(r, 0, 15);
    c->f[C_MORE_VALUE_DIM] = (int)rng_int(r, 0, 15);
}

/* The head sizes of models, on few queries and keys. */
static void model_shape(rng *r, semantic_case *c)
{
    static const int dims[][2] = {{64, 64},   {80, 80},   {96, 96},   {128, 128},
                                  {192, 128}, {192, 128}, {256, 256}, {576, 512}};
    const int which = (int)rng_int(r, 0, 7);
    const int most = dims[which][0] > 200 ? 8 : 24;
    c->f[C_MORE_BATCH] = (int)rng_int(r, 0, 1);
    c->f[C_MORE_GROUP] = (int)rng_int(r, 0, 3);
    c->f[C_MORE_Q] = (int)rng_int(r, 0, one_in(r, 2) ? 1 : most);
    c->f[C_KV] = (int)rng_int(r, 1, 2 * most);
    c->f[C_MORE_DIM] = dims[which][0] - 1;
    c->f[C_MORE_VALUE_DIM] = dims[which][1] - 1;
}

static void random_features(rng *r, semantic_case *c)
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
    c->f[C_KV_LENS] = one_in(r, 4);
    c->f[C_PAGED] = one_in(r, 4) ? (int)rng_int(r, 1, 6) : 0;
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

/* Mostly without what makes sequences read a shared prefix on their own. */
static void share(rng *r, semantic_case *c)
{
    c->f[C_SHARED] = (int)rng_int(r, 1, c->f[C_KV] + 1);
    if (one_in(r, 4))
        return;
    c->f[C_MASK] = c->f[C_TREE] = c->f[C_INVARIANT] = 0;
    c->f[C_OFFSETS] = c->f[C_KV_STARTS] = 0;
    c->f[C_MORE_Q] = (int)rng_int(r, 0, 1);
}

/* All f32; or 16 bits here and there; or a cache of any type. */
static void random_types(rng *r, semantic_case *c)
{
    const int kind = (int)rng_int(r, 0, 5);
    if (kind < 2)
        return;
    if (one_in(r, 2)) {
        c->f[C_TYPE_Q] = (int)rng_int(r, QKV_F32, QKV_BF16);
        c->f[C_TYPE_OUT] = (int)rng_int(r, QKV_F32, QKV_BF16);
    }
    const int last = kind == 2 ? QKV_BF16 : QKV_Q4_0;
    c->f[C_TYPE_K] = (int)rng_int(r, QKV_F32, last);
    c->f[C_TYPE_V] = one_in(r, 2) ? c->f[C_TYPE_K] : (int)rng_int(r, QKV_F32, last);
}

semantic_case semantic_case_random(uint64_t seed)
{
    rng r = {seed};
    semantic_case c = {.seed = seed};
    const int shape = (int)rng_int(&r, 1, 30);
    if (shape == 1)
        long_shape(&r, &c);
    else if (shape == 2)
        model_shape(&r, &c);
    else
        small_shape(&r, &c);
    random_features(&r, &c);
    random_types(&r, &c);
    if (c.f[C_MORE_BATCH] > 0 && one_in(&r, shape == 1 ? 2 : 6))
        share(&r, &c);
    if (c.f[C_MORE_BATCH] > 0) {
        c.f[C_Q_STARTS] = one_in(&r, 2);
        c.f[C_KV_STARTS] = one_in(&r, c.f[C_SHARED] ? 6 : 2);
    }
    c.f[C_HOW_Q] = (int)rng_int(&r, 0, 2);
    c.f[C_HOW_KV] = (int)rng_int(&r, 0, 2);
    c.f[C_HOW_OUT] = (int)rng_int(&r, 0, 2);
    c.f[C_IN_PLACE] = one_in(&r, 6);
    c.f[C_LATENT] = one_in(&r, shape == 2 ? 2 : 8);
    c.f[C_TASKS] = one_in(&r, shape == 1 ? 1 : 3) ? (int)rng_int(&r, BY_TASKS, BY_SPLIT_TASKS) : 0;
    c.f[C_POISON] = one_in(&r, 2);
    c.f[C_NAN] = one_in(&r, 8);
    return c;
}

void semantic_case_describe(const semantic_case *c, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "case seed %" PRIu64 ":", c->seed);
    for (int i = 0; i < C_FIELDS && at < size; i++)
        if (c->f[i])
            at += (size_t)snprintf(text + at, size - at, " %s %d,", field_names[i], c->f[i]);
}
