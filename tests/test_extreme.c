/* SPDX-License-Identifier: MIT */
/*
 * Logits up to the largest number. Queries and keys have one element that is
 * not 0, so that a logit is a product or a power of two of it and exact: what
 * the softmax makes of it is then known to the last key, where an error of
 * u times 3e38 would allow anything.
 */
#include "any_tensor.h"
#include "api.h"
#include "problem.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { SLOT_Q, SLOT_K, SLOT_V, SLOT_O, SLOT_L, SLOT_M, SLOT_W, SLOT_MASK, SLOT_S, SLOT_SINKS };
enum { DIM = 5, VALUE_DIM = 3, HEADS = 2, PERIOD = 3, SINGLE = 17 };

/* All of them are bf16 numbers. The units of log2(e) end at 0x1.62e43p127. */
static const float highest = 0x1.fep127f, high = 0x1.ep127f, above = 0x1.64p127f;
static const float below = 0x1.6p127f, third = 0x1.3p126f;

typedef struct extreme {
    const char *name;
    float logits[PERIOD], bias[PERIOD]; /* key j has those of j % PERIOD */
    float single;                       /* the logit of key SINGLE, where it is not 0 */
    float sink, slope, softcap;         /* 0: none */
    bool biased, windowed;
} extreme;

#define ALL(x)                                                                                     \
    {                                                                                              \
        (x), (x), (x)                                                                              \
    }

/* clang-format off */
#define EACH_CASE(define)                                                                          \
    define(.name = "all equal, far below", .logits = ALL(-high))                                   \
    define(.name = "all equal, far above", .logits = ALL(high))                                    \
    define(.name = "all at the lowest", .logits = ALL(-highest))                                   \
    define(.name = "all where the units end", .logits = ALL(-above))                               \
    define(.name = "all before the units end", .logits = ALL(-below))                              \
    define(.name = "far below, not equal", .logits = {-high, -above, -highest})                    \
    define(.name = "far above, not equal", .logits = {high, above, highest})                       \
    define(.name = "both sides", .logits = {high, -high, below})                                   \
    define(.name = "one dominates small ones", .logits = {1, 2, 3}, .single = high)                \
    define(.name = "one dominates large ones", .logits = ALL(high), .single = highest)             \
    define(.name = "one dominates low ones", .logits = ALL(-highest), .single = -high)             \
    define(.name = "a NaN among large ones", .logits = ALL(high), .single = NAN)                   \
    define(.name = "an infinity among large ones", .logits = ALL(high), .single = INFINITY)        \
    define(.name = "-infinity among low ones", .logits = {-INFINITY, -high, -high})                \
    define(.name = "hidden large ones", .logits = {high, 1, 2}, .bias = {-INFINITY, 0, 0},         \
           .biased = true)                                                                         \
    define(.name = "lowest bias on all", .logits = {-5, 1, 3}, .bias = ALL(-FLT_MAX),              \
           .biased = true)                                                                         \
    define(.name = "lowest bias on some, the others low", .logits = {-above, 7, -above},           \
           .bias = {0, -FLT_MAX, 0}, .biased = true)                                               \
    define(.name = "lowest bias and a large logit", .logits = {above, -third, -high},              \
           .bias = {-FLT_MAX, -third, 0}, .biased = true)                                          \
    define(.name = "lowest bias and a low logit", .logits = ALL(-third),                           \
           .bias = ALL(-FLT_MAX), .biased = true)                                                  \
    define(.name = "large bias and a low logit", .logits = {-high, 1, 2},                          \
           .bias = {FLT_MAX, 0, -INFINITY}, .biased = true)                                        \
    define(.name = "an overflow", .logits = {high, 1, 2}, .bias = {FLT_MAX, 0, 0},                 \
           .biased = true)                                                                         \
    define(.name = "a sink far above", .logits = {1, 2, above}, .sink = high)                      \
    define(.name = "a sink as large as a logit", .logits = {high, 1, 2}, .sink = high)             \
    define(.name = "a sink far below", .logits = ALL(-highest), .sink = -high)                     \
    define(.name = "a sink as low as the logits", .logits = ALL(-high), .sink = -high)             \
    define(.name = "slopes that do not show", .logits = ALL(high), .slope = 0.5f)                  \
    define(.name = "a softcap that does not show", .logits = {1, 2, 3}, .softcap = high)           \
    define(.name = "a softcap far above", .logits = {high, 1, high}, .softcap = high)              \
    define(.name = "a window of large ones", .logits = {high, above, -high},                       \
           .windowed = true)                                                                       \
    define(.name = "a window and hidden ones", .logits = {highest, high, high},                    \
           .bias = {-INFINITY, 0, 0}, .biased = true, .windowed = true)
/* clang-format on */

/* How it is stored and how many rows and keys there are. */
typedef struct form {
    int64_t q_len, kv_len;
    int32_t type, out_type;
    int64_t page_size;
    bool in_place;
} form;

typedef struct run {
    extreme c;
    form f;
    any_tensor q, k, v, out, lse, row_max, weights;
    float *bias;
    float slopes[HEADS], sinks[HEADS];
    int32_t pages[256];
    qkv_attention_desc desc;
} run;

static void set(const any_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d, float x)
{
    const qkv_kernels *k = qkv_kernels_of(QKV_ISA_scalar);
    if (t->dtype == QKV_F32)
        memcpy((float *)any_row(t, b, h, i) + d, &x, sizeof x);
    else
        k->narrow_bf16(&x, (uint16_t *)any_row(t, b, h, i) + d, 1);
}

/* Rows of odd queries have ordinary logits. */
static float query_of(int64_t i)
{
    return i % 2 ? 0x1p-126f : 1.0f;
}

static float key_of(const extreme *c, int64_t j)
{
    return j == SINGLE && c->single != 0.0f ? c->single : c->logits[j % PERIOD];
}

static float value_of(int64_t j, int64_t d)
{
    return (float)((j * 5 + d * 3) % 16) - 4.0f;
}

static void fill(run *x)
{
    const form *f = &x->f;
    for (int64_t h = 0; h < HEADS; h++)
        for (int64_t i = 0; i < f->q_len; i++)
            for (int64_t d = 0; d < DIM; d++)
                set(&x->q, 0, h, i, d, d == 2 ? query_of(i) : 0.0f);
    for (int64_t j = 0; j < f->kv_len; j++) {
        for (int64_t d = 0; d < DIM; d++)
            set(&x->k, 0, 0, j, d, d == 2 ? key_of(&x->c, j) : 0.0f);
        for (int64_t d = 0; d < x->v.dim; d++)
            set(&x->v, 0, 0, j, d, value_of(j, d));
    }
    for (int64_t j = 0; j < f->kv_len; j++)
        x->bias[j] = x->c.bias[j % PERIOD];
    for (int h = 0; h < HEADS; h++) {
        x->sinks[h] = x->c.sink;
        x->slopes[h] = x->c.slope;
    }
}

static any_tensor make_cache(const run *x, int slot, int64_t dim)
{
    const int64_t size = x->f.page_size, n = x->f.kv_len;
    const int64_t pages = size ? (n + size - 1) / size : 1;
    any_tensor t = any_make(slot, pages, 1, size ? size : n, dim, HOW_PADDED, x->f.type);
    t.pages = size ? x->pages : NULL;
    t.page_size = size;
    return t;
}

static void describe(run *x)
{
    const form *f = &x->f;
    const int64_t size = f->page_size;
    x->desc = (qkv_attention_desc){
        .size = sizeof x->desc,
        .flags = QKV_SCALE_SET | (x->c.windowed ? QKV_WINDOW | QKV_CAUSAL : 0),
        .scale = 1.0f,
        .q_heads = HEADS,
        .kv_heads = 1,
        .q_len = f->q_len,
        .kv_len = f->kv_len,
        .head_dim = DIM,
        .value_dim = x->v.dim,
        .query = x->q.desc,
        .key = x->k.desc,
        .value = x->v.desc,
        .out = x->out.desc,
        .lse = x->lse.desc,
        .row_max = x->row_max.desc,
        .weights = x->weights.desc,
        .window_left = x->c.windowed ? 9 : 0,
        .window_right = x->c.windowed ? 3 : 0,
        .sink_tokens = x->c.windowed ? 2 : 0,
        .softcap = x->c.softcap,
        .slopes = x->c.slope != 0.0f ? x->slopes : NULL,
        .sinks = x->c.sink != 0.0f ? x->sinks : NULL,
        .page_size = size,
        .pages = size ? (f->kv_len + size - 1) / size : 0,
        .page_table = size ? x->pages : NULL,
    };
    if (x->c.biased)
        x->desc.mask = (qkv_mask){.data = x->bias, .stride_key = 1, .dtype = QKV_F32};
}

static void make(run *x, extreme c, form f)
{
    *x = (run){.c = c, .f = f};
    for (int64_t i = 0, n = f.page_size ? (f.kv_len + f.page_size - 1) / f.page_size : 0; i < n;
         i++)
        x->pages[i] = (int32_t)(n - 1 - i);
    const int64_t value_dim = f.in_place ? DIM : VALUE_DIM;
    x->q = any_make(SLOT_Q, 1, HEADS, f.q_len, DIM, HOW_PADDED, f.in_place ? f.out_type : f.type);
    x->k = make_cache(x, SLOT_K, DIM);
    x->v = make_cache(x, SLOT_V, value_dim);
    x->out =
        f.in_place ? x->q : any_make(SLOT_O, 1, HEADS, f.q_len, value_dim, HOW_BSHD, f.out_type);
    x->lse = any_make(SLOT_L, 1, HEADS, f.q_len, 1, HOW_PACKED, QKV_F32);
    x->row_max = any_make(SLOT_M, 1, HEADS, f.q_len, 1, HOW_PACKED, QKV_F32);
    x->weights = any_make(SLOT_W, 1, HEADS, f.q_len, f.kv_len, HOW_PACKED, QKV_F32);
    x->bias = guarded(SLOT_MASK, f.kv_len, PLACE_AT_END);
    describe(x);
}

/* --------------------------------------------------------------- expected */

static bool is_seen(const run *x, int64_t i, int64_t j)
{
    const int64_t p = i + x->f.kv_len - x->f.q_len;
    return !x->c.windowed || (j <= p && (j >= p - 9 || j < 2));
}

/* A logit, after f32 has rounded the sum with a bias. */
static double logit_of(const run *x, int64_t i, int64_t j)
{
    const extreme *c = &x->c;
    double t = (double)query_of(i) * (double)key_of(c, j);
    if (c->softcap != 0.0f)
        t = (double)c->softcap * tanh(t / (double)c->softcap);
    t += (double)c->slope * (double)(j - (i + x->f.kv_len - x->f.q_len));
    if (!is_seen(x, i, j) || (c->biased && x->bias[j] == -INFINITY))
        return -HUGE_VAL;
    if (c->biased)
        t += (double)x->bias[j];
    return isfinite(t) && fabs(t) > 1e30 && c->softcap == 0.0f ? (double)(float)t : t;
}

typedef struct expected {
    double t[800], max, sum, ds;
    double shown; /* how far a logit that is shown may be off: its parts may cancel */
} expected;

static void expect_row(const run *x, int64_t i, expected *e)
{
    e->max = x->c.sink != 0.0f ? (double)x->c.sink : -HUGE_VAL;
    e->sum = e->shown = 0;
    e->ds = 0x1p-148 * (double)x->c.softcap; /* of a denormal argument of tanh */
    for (int64_t j = 0; j < x->f.kv_len; j++) {
        e->t[j] = logit_of(x, i, j);
        if (e->t[j] > e->max || isnan(e->t[j]))
            e->max = e->t[j];
    }
    /* Large logits are exact here; small ones round when scaled, capped and summed. */
    for (int64_t j = 0; j < x->f.kv_len; j++)
        if (fabs(e->t[j]) < 1e30)
            e->ds = fmax(e->ds, 0x1p-24 * (12 * fabs(e->t[j]) +
                                           6 * fabs((double)x->c.slope) * (double)x->f.kv_len));
    for (int64_t j = 0; j < x->f.kv_len; j++)
        if (isfinite(e->t[j]))
            e->shown =
                fmax(e->shown, 0x1p-22 * (fabs((double)query_of(i) * (double)key_of(&x->c, j)) +
                                          (x->c.biased ? fabs((double)x->bias[j]) : 0)));
    e->shown = fmax(e->shown, 0x1p-22 * fabs((double)x->c.sink)) + e->ds + 0x1p-148;
    for (int64_t j = 0; j < x->f.kv_len && e->max > -HUGE_VAL; j++)
        e->sum += exp(e->t[j] - e->max);
    if (x->c.sink != 0.0f)
        e->sum += exp((double)x->c.sink - e->max);
}

static void expect_number(const char *what, double got, double want, double bound)
{
    const bool right = isnan(want)   ? isnan(got)
                       : isinf(want) ? got == want
                                     : fabs(got - want) <= bound;
    if (!right)
        fail_with("%s is %.9g, expected %.17g within %.3g", what, got, want, bound);
}

/* The weights, or the logits that they show; and whether they agree. */
static void expect_weights(const run *x, int64_t h, int64_t i, const expected *e, double relative)
{
    for (int64_t j = 0; j < x->f.kv_len; j++) {
        const double got = any_get(&x->weights, 0, h, i, j);
        const bool none = e->t[j] == -HUGE_VAL;
        if (x->desc.weights_stage == QKV_WEIGHTS_MASKED)
            expect_number("shown logit", got, e->t[j], none ? 0 : e->shown);
        else if (isnan(e->max))
            expect_number("weight", got, e->max, 0);
        else
            expect_number("weight", got, e->max > -HUGE_VAL ? exp(e->t[j] - e->max) / e->sum : 0.0,
                          relative + 0x1p-126);
    }
}

static void check_row(const run *x, int64_t h, int64_t i)
{
    expected e;
    expect_row(x, i, &e);
    const double blocks = ceil((double)x->f.kv_len / 512) + 2;
    const double relative = expm1(2 * e.ds) + (512 + blocks + 32) * 0x1p-24;
    const double lse = e.sum == 0 && !isnan(e.max) ? -HUGE_VAL : e.max + log(e.sum);
    const bool broken = isnan(e.sum) || isnan(e.max) || e.max == HUGE_VAL;
    if (x->desc.lse.data) {
        expect_number("row_max", any_get(&x->row_max, 0, h, i, 0), broken ? (double)NAN : e.max,
                      e.shown);
        expect_number("lse", any_get(&x->lse, 0, h, i, 0), broken ? (double)NAN : lse,
                      e.shown + relative + 0x1p-22 * fabs(lse));
        if (broken)
            e.max = (double)NAN;
        expect_weights(x, h, i, &e, relative);
    }
    for (int64_t d = 0; d < x->v.dim; d++) {
        double sum = 0, absolute = 0;
        for (int64_t j = 0; j < x->f.kv_len; j++) {
            const double w = e.sum == 0 ? 0 : exp(e.t[j] - e.max) / e.sum;
            sum += w * (double)value_of(j, d);
            absolute += w * fabs((double)value_of(j, d));
        }
        const double half = x->out.dtype == QKV_BF16 ? 0x1p-8 : 0;
        expect_number("out", any_get(&x->out, 0, h, i, d), broken ? (double)NAN : sum,
                      relative * absolute + half * (fabs(sum) + relative * absolute) + 0x1p-120);
    }
}

/* -------------------------------------------------------------------- runs */

static void run_on(const qkv_kernels *kernels, const qkv_attention_desc *desc)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        fail_with("%s", qkv_strerror(status));
    const qkv_attention_plan plan = qkv_plan_attention(&p, kernels);
    qkv_run_attention(&p, &plan, guarded_bytes(SLOT_S, plan.worker_bytes, PLACE_AT_START));
}

/* What is written beside the outputs: there is code of its own for nothing at all. */
enum { SHOW_WEIGHTS, SHOW_LOGITS, SHOW_NOTHING, SHOWS };

static void check_form(extreme c, form f)
{
    static const char *const names[] = {"", ", logits shown", ", outputs alone"};
    for (int id = 0; id < TEST_ISA_COUNT; id++) {
        const test_isa isa = test_isa_of(id);
        for (int show = 0; show < SHOWS && !isa.missing; show++) {
            run x;
            make(&x, c, f);
            fill(&x);
            x.desc.weights_stage = show == SHOW_LOGITS ? QKV_WEIGHTS_MASKED : QKV_WEIGHTS_SOFTMAX;
            if (show == SHOW_NOTHING)
                x.desc.lse.data = x.desc.row_max.data = x.desc.weights.data = NULL;
            context("%s on %s: q_len %d, kv_len %d, types %d %d, pages of %d%s%s", c.name, isa.name,
                    (int)f.q_len, (int)f.kv_len, (int)f.type, (int)f.out_type, (int)f.page_size,
                    f.in_place ? ", in place" : "", names[show]);
            run_on(isa.table, &x.desc);
            guards_intact();
            for (int64_t h = 0; h < HEADS; h++)
                for (int64_t i = 0; i < f.q_len; i++)
                    check_row(&x, h, i);
            tally(id, 1);
        }
    }
}

Test(extreme, logits)
{
    static const extreme cases[] = {
#define CASE(...) {__VA_ARGS__},
        EACH_CASE(CASE)
#undef CASE
    };
    static const form forms[] = {
        {.q_len = 1, .kv_len = 40},
        {.q_len = 2, .kv_len = 700},
        {.q_len = 3, .kv_len = 25, .in_place = true},
        {.q_len = 30, .kv_len = 70},
        {.q_len = 29, .kv_len = 400, .in_place = true},
        {.q_len = 4, .kv_len = 90, .type = QKV_BF16, .out_type = QKV_BF16},
        {.q_len = 30, .kv_len = 90, .type = QKV_BF16, .out_type = QKV_BF16, .in_place = true},
        {.q_len = 1, .kv_len = 600, .type = QKV_BF16, .page_size = 16},
        {.q_len = 31, .kv_len = 120, .page_size = 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t k = 0; k < sizeof forms / sizeof *forms; k++)
            check_form(cases[i], forms[k]);
}

/* A slope or a head's scale that is infinite in the units of log2(e), and a
 * logit that it multiplies by 0, beside a sink that keeps the maximum finite. */
Test(extreme, factors_beyond_the_units)
{
    enum { KEYS = 50, WIDE = 8, QUERIES = 40 };
    static float q[QUERIES * WIDE], k[KEYS * WIDE], out[QUERIES * WIDE], lse[QUERIES];
    const float factor = 3e38f, sink = 0.0f;
    for_each_isa(isa)
    {
        for (int n = 0; n < 4; n++) {
            const int64_t q_len = n % 2 ? QUERIES : 1;
            const bool slope = n < 2;
            for (int i = 0; i < QUERIES * WIDE; i++)
                q[i] = 1.0f;
            for (int i = 0; i < KEYS * WIDE; i++)
                k[i] = slope ? 1.0f : 0.0f;
            const qkv_attention_desc d = {.size = sizeof d,
                                          .flags = QKV_CAUSAL | QKV_SCALE_SET,
                                          .scale = 1.0f,
                                          .q_len = q_len,
                                          .kv_len = KEYS,
                                          .head_dim = WIDE,
                                          .query.data = q,
                                          .key.data = k,
                                          .value.data = k,
                                          .out.data = out,
                                          .lse.data = lse,
                                          .slopes = slope ? &factor : NULL,
                                          .head_scales = slope ? NULL : &factor,
                                          .sinks = &sink};
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
            cr_assert_eq(qkv_attention(&d, scratch_alloc(bytes), bytes), QKV_OK);
            /* With a slope the key at the query's place alone; else all, like the sink. */
            const double want = slope ? log(exp((double)WIDE) + 1) : log(KEYS + 1.0);
            context("%s: %s, %d queries: lse %g, expected %g", qkv_isa_name(),
                    slope ? "slope" : "head scale", (int)q_len, (double)lse[q_len - 1], want);
            if (!(fabs((double)lse[q_len - 1] - want) < 1e-5 * want) || !isfinite(out[0]))
                fail_with("not so");
            tally(isa, 1);
        }
    }
}
