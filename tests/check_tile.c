/* SPDX-License-Identifier: MIT */
/*
 * The kernels of the attention tile. tile_step is judged step by step: given
 * the state before (as the kernel left it), the state behind must be what
 * exact arithmetic makes of it, within a bound from the same inputs.
 */
#include "checks.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    SLOT_QUERY,
    SLOT_KEYS,
    SLOT_VALUES,
    SLOT_PACKED,
    SLOT_LOGITS,
    SLOT_OUT,
    SLOT_MAX,
    SLOT_SUM,
    SLOT_BEGIN,
    SLOT_END,
    SLOT_ROWS
};
/* ------------------------------------------------------ load, pack, store */

/* Rows of one buffer, the last flush against the guard page. */
static void row_pointers(float *data, int64_t stride, int64_t n, float *rows[QKV_TILE_ROWS_MAX])
{
    for (int64_t i = 0; i < n; i++)
        rows[i] = data + i * stride;
}

static void check_load(const test_isa *isa, rng *r, int64_t n_rows, int64_t dim, int64_t pad,
                       int place)
{
    context("tile_load_f32 on %s: rows %lld, head_dim %lld, pad %lld, place %d", isa->name,
            (long long)n_rows, (long long)dim, (long long)pad, place);
    const int64_t tile_rows = isa->table->tile_rows;
    float *data = guarded(SLOT_ROWS, (n_rows - 1) * (dim + pad) + dim, place);
    float *tile = guarded(SLOT_QUERY, dim * tile_rows, place ? PLACE_AT_START : PLACE_AT_END);
    float *rows[QKV_TILE_ROWS_MAX];
    row_pointers(data, dim + pad, n_rows, rows);
    for (int64_t i = 0; i < n_rows; i++)
        fill_normal(r, rows[i], dim, 1.0f);
    rows[n_rows - 1][dim - 1] = float_of(0x7fa01234); /* bits travel unchanged, even these */

    guarded_freeze(SLOT_ROWS);
    isa->table->tile_load_f32((const float *const *)rows, n_rows, dim, tile);
    guards_intact();
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t d = 0; d < dim; d++)
            if (bits_of(tile[d * tile_rows + i]) != bits_of(rows[i][d]))
                fail_with("row %lld, element %lld", (long long)i, (long long)d);
    tally(isa->id, 1);
}

void check_tile_load_f32(const test_isa *isa)
{
    rng r = rng_make("tile_load_f32");
    const int64_t tile_rows = isa->table->tile_rows;
    for (int64_t dim = 1; dim <= LENGTHS; dim++)
        for (int64_t n = 1; n <= tile_rows; n++)
            if (effort_takes(dim + n))
                check_load(isa, &r, n, dim, (dim + n) % 4, (int)((dim * 7 + n) % PLACES));
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_load(isa, &r, rng_int(&r, 1, tile_rows), rng_int(&r, 1, 700), rng_int(&r, 0, 9),
                   (int)rng_int(&r, 0, PLACES - 1));
}

static void check_pack(const test_isa *isa, rng *r, int64_t keys, int64_t dim, int64_t pad,
                       int place)
{
    context("tile_pack_f32 on %s: keys %lld, value_dim %lld, pad %lld, place %d", isa->name,
            (long long)keys, (long long)dim, (long long)pad, place);
    const int64_t panel = isa->table->value_panel, panels = (dim + panel - 1) / panel;
    const int64_t stride = dim + pad;
    float *values = guarded(SLOT_VALUES, (keys - 1) * stride + dim, place);
    float *packed =
        guarded(SLOT_PACKED, panels * keys * panel, place ? PLACE_AT_START : PLACE_AT_END);
    for (int64_t j = 0; j < keys; j++)
        fill_normal(r, values + j * stride, dim, 1.0f);
    values[(keys - 1) * stride + dim - 1] = float_of(0x7fa01234);

    guarded_freeze(SLOT_VALUES);
    isa->table->tile_pack_f32(values, stride, keys, dim, packed);
    guards_intact();
    for (int64_t d = 0; d < panels * panel; d++) {
        for (int64_t j = 0; j < keys; j++) {
            const uint32_t got = bits_of(packed[(d / panel * keys + j) * panel + d % panel]);
            if (got != (d < dim ? bits_of(values[j * stride + d]) : 0))
                fail_with("key %lld, column %lld", (long long)j, (long long)d);
        }
    }
    tally(isa->id, 1);
}

void check_tile_pack_f32(const test_isa *isa)
{
    rng r = rng_make("tile_pack_f32");
    for (int64_t dim = 1; dim <= LENGTHS; dim++)
        for (int64_t keys = 1; keys <= 12; keys++)
            if (effort_takes(dim + keys))
                check_pack(isa, &r, keys, dim, (dim + keys) % 4, (int)((dim * 5 + keys) % PLACES));
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_pack(isa, &r, rng_int(&r, 1, isa->table->key_block), rng_int(&r, 1, 600),
                   rng_int(&r, 0, 9), (int)rng_int(&r, 0, PLACES - 1));
}

static void check_store(const test_isa *isa, rng *r, int64_t n_rows, int64_t dim, int64_t pad,
                        int place)
{
    context("tile_store_f32 on %s: rows %lld, value_dim %lld, pad %lld, place %d", isa->name,
            (long long)n_rows, (long long)dim, (long long)pad, place);
    const int64_t tile_rows = isa->table->tile_rows, panel = isa->table->value_panel;
    const int64_t columns = (dim + panel - 1) / panel * panel, stride = dim + pad;
    float *out = guarded(SLOT_OUT, columns * tile_rows, place % 2);
    float *sum = guarded(SLOT_SUM, tile_rows, place % 2);
    float *data = guarded(SLOT_ROWS, (n_rows - 1) * stride + dim, place);
    float *rows[QKV_TILE_ROWS_MAX];
    row_pointers(data, stride, n_rows, rows);
    for (int64_t d = 0; d < dim; d++) /* lanes without a row stay NaN */
        for (int64_t i = 0; i < n_rows; i++)
            out[d * tile_rows + i] = rng_normal(r);
    for (int64_t i = 0; i < n_rows; i++)
        sum[i] = (i + dim) % 5 == 0 ? 0.0f : rng_uniform(r, 1.0f, 3000.0f);
    if (n_rows > 1)
        sum[dim % n_rows] = NAN;

    guarded_freeze(SLOT_OUT);
    guarded_freeze(SLOT_SUM);
    isa->table->tile_store_f32(out, sum, n_rows, dim, rows);
    guards_intact();
    gaps_intact("rows", data, n_rows, stride, dim);
    for (int64_t i = 0; i < n_rows; i++) {
        for (int64_t d = 0; d < dim; d++) {
            const double exact = (double)out[d * tile_rows + i] / (double)sum[i];
            if (sum[i] == 0.0f ? rows[i][d] != 0.0f
                : isnan(exact) ? !isnan(rows[i][d])
                               : !(fabs((double)rows[i][d] - exact) <=
                                   2 * ORACLE_U * fabs(exact) + 2 * ORACLE_TINY))
                fail_with("row %lld, column %lld is %.9g, expected %.17g", (long long)i,
                          (long long)d, (double)rows[i][d], sum[i] == 0.0f ? 0.0 : exact);
        }
    }
    tally(isa->id, 1);
}

void check_tile_store_f32(const test_isa *isa)
{
    rng r = rng_make("tile_store_f32");
    const int64_t tile_rows = isa->table->tile_rows;
    for (int64_t dim = 1; dim <= LENGTHS; dim++)
        for (int64_t n = 1; n <= tile_rows; n++)
            if (effort_takes(dim + n))
                check_store(isa, &r, n, dim, (dim + n) % 4, (int)((dim * 3 + n) % PLACES));
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_store(isa, &r, rng_int(&r, 1, tile_rows), rng_int(&r, 1, 600), rng_int(&r, 0, 9),
                    (int)rng_int(&r, 0, PLACES - 1));
}

/* ------------------------------------------------------------------- step */

/* A block of keys and values, and the rows that go through it. */
typedef struct step_case {
    int64_t n_rows, keys, values_keys, head_dim, value_dim, pad;
    int place;
    float scale_log2, sigma;
    bool ragged;   /* begin and end given, of every kind */
    bool poisoned; /* where no row sees: NaN and infinity */
    bool fresh;    /* the first block of a row, or one under way */
} step_case;

/* The tile's buffers, as a kernel gets them. */
typedef struct tile_buffers {
    qkv_tile_step_args args;
    float *query, *keys, *values, *packed;
    int32_t *begin, *end;
    int64_t tile_rows, columns;
} tile_buffers;

static int64_t sees_from(const tile_buffers *t, int64_t i)
{
    return t->args.end ? t->begin[i] : 0;
}

static int64_t sees_to(const tile_buffers *t, int64_t i)
{
    return t->args.end ? t->end[i] : t->args.kv_len;
}

/* Ranges of all kinds: nothing, everything, one key, a prefix, a window. */
static void make_ranges(tile_buffers *t, rng *r, const step_case *c)
{
    for (int64_t i = 0; i < t->tile_rows; i++) {
        const int32_t a = (int32_t)rng_int(r, 0, c->keys), b = (int32_t)rng_int(r, 0, c->keys);
        const int kind = (int)rng_int(r, 0, 5);
        t->begin[i] = kind == 0 ? a : kind == 1 || kind == 2 ? 0 : a < b ? a : b;
        t->end[i] = kind == 0 ? a : kind == 1 ? (int32_t)c->keys : kind == 2 ? b : a < b ? b : a;
    }
}

/* Keys and values that no row may see get the worst of bits. */
static void poison(tile_buffers *t, const step_case *c)
{
    const float worst[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
    for (int64_t j = 0; j < c->keys; j++) {
        bool seen = false;
        for (int64_t i = 0; i < c->n_rows; i++)
            seen |= sees_from(t, i) <= j && j < sees_to(t, i);
        for (int64_t d = 0; d < c->head_dim && !seen; d++)
            t->keys[j * t->args.keys_stride + d] = worst[(j + d) % 4];
        for (int64_t d = 0; d < c->value_dim && !seen; d++)
            t->values[j * (c->value_dim + c->pad) + d] = worst[(j + d) % 4];
    }
}

static void take_buffers(tile_buffers *t, const qkv_kernels *k, const step_case *c)
{
    const int64_t rows = k->tile_rows, keys_stride = c->head_dim + c->pad;
    const int tile_place = c->place % 2;
    t->tile_rows = rows;
    t->columns = (c->value_dim + k->value_panel - 1) / k->value_panel * k->value_panel;
    t->query = guarded(SLOT_QUERY, c->head_dim * rows, tile_place);
    t->keys = guarded(SLOT_KEYS, (c->keys - 1) * keys_stride + c->head_dim, c->place);
    t->values = guarded(SLOT_VALUES, (c->values_keys - 1) * (c->value_dim + c->pad) + c->value_dim,
                        c->place);
    t->packed = guarded(SLOT_PACKED, t->columns * c->values_keys, tile_place);
    t->begin = guarded_bytes(SLOT_BEGIN, (size_t)rows * sizeof *t->begin, PLACE_AT_END);
    t->end = guarded_bytes(SLOT_END, (size_t)rows * sizeof *t->end, PLACE_AT_END);
    t->args = (qkv_tile_step_args){
        .query = t->query,
        .keys = t->keys,
        .values = t->packed,
        .logits = guarded(SLOT_LOGITS, (int64_t)k->key_block * rows, tile_place),
        .out = guarded(SLOT_OUT, t->columns * rows, tile_place),
        .max = guarded(SLOT_MAX, rows, tile_place),
        .sum = guarded(SLOT_SUM, rows, tile_place),
        .begin = c->ragged ? t->begin : NULL,
        .end = c->ragged ? t->end : NULL,
        .keys_stride = keys_stride,
        .values_keys = c->values_keys,
        .n_rows = c->n_rows,
        .kv_len = c->keys,
        .head_dim = c->head_dim,
        .value_dim = c->value_dim,
        .scale_log2 = c->scale_log2,
    };
}

static void fill_buffers(tile_buffers *t, const qkv_kernels *k, rng *r, const step_case *c)
{
    float *rows[QKV_TILE_ROWS_MAX];
    float *queries = guarded(SLOT_ROWS, c->n_rows * c->head_dim, PLACE_AT_END);
    row_pointers(queries, c->head_dim, c->n_rows, rows);
    fill_normal(r, queries, c->n_rows * c->head_dim, c->sigma);
    k->tile_load_f32((const float *const *)rows, c->n_rows, c->head_dim, t->query);

    for (int64_t j = 0; j < c->keys; j++)
        fill_normal(r, t->keys + j * t->args.keys_stride, c->head_dim, c->sigma);
    for (int64_t j = 0; j < c->values_keys; j++)
        fill_normal(r, t->values + j * (c->value_dim + c->pad), c->value_dim, 1.0f);
    make_ranges(t, r, c);
    if (c->poisoned)
        poison(t, c);
    k->tile_pack_f32(t->values, c->value_dim + c->pad, c->values_keys, c->value_dim, t->packed);

    for (int64_t i = 0; i < t->tile_rows; i++) { /* lanes without a row as the driver leaves them */
        const bool fresh = c->fresh || i >= c->n_rows || i % 7 == 3;
        t->args.max[i] = fresh ? -FLT_MAX : rng_uniform(r, -9.0f, 9.0f);
        t->args.sum[i] = fresh ? 0.0f : rng_uniform(r, 1.0f, 900.0f);
        for (int64_t d = 0; d < t->columns; d++)
            t->args.out[d * t->tile_rows + i] = fresh || d >= c->value_dim ? 0.0f : rng_normal(r);
    }
}

/* The tile's exponential may be off by 4 u, the others by 2. */
static double weight_error(double exact, double x_error)
{
    return oracle_exp2_error(exact, x_error) + 2 * ORACLE_U * exact;
}

/* What one row should have become, judged by the maximum that it chose. */
typedef struct row_verdict {
    double max, max_error;
    double p[QKV_KEY_BLOCK], p_error[QKV_KEY_BLOCK];
    double factor, factor_error;
    int64_t from, to;
} row_verdict;

static void judge_logits(const tile_buffers *t, int64_t i, double old_max, double new_max,
                         row_verdict *v)
{
    const qkv_tile_step_args *a = &t->args;
    double logits[QKV_KEY_BLOCK], errors[QKV_KEY_BLOCK];
    v->max = old_max;
    v->max_error = 0;
    v->from = sees_from(t, i);
    v->to = sees_to(t, i);
    for (int64_t j = v->from; j < v->to; j++) {
        double dot = 0, absolute = 0;
        for (int64_t d = 0; d < a->head_dim; d++) {
            const double product =
                (double)t->query[d * t->tile_rows + i] * (double)t->keys[j * a->keys_stride + d];
            dot += product;
            absolute += fabs(product);
        }
        const double scale = fabs((double)a->scale_log2);
        logits[j] = dot * (double)a->scale_log2;
        errors[j] = scale * ((double)(a->head_dim + 2) * ORACLE_U * absolute +
                             (double)a->head_dim * ORACLE_TINY) +
                    ORACLE_U * fabs(logits[j]);
        v->max = fmax(v->max, logits[j]);
        v->max_error = fmax(v->max_error, errors[j]);
    }
    for (int64_t j = v->from; j < v->to; j++) {
        const double x = logits[j] - new_max;
        v->p[j] = exp2(x);
        v->p_error[j] = weight_error(v->p[j], errors[j] + ORACLE_U * fabs(x));
    }
    const double x = old_max - new_max;
    v->factor = exp2(x);
    v->factor_error = weight_error(v->factor, ORACLE_U * fabs(x));
}

static void judge_sum(const row_verdict *v, int64_t i, int64_t keys, double old, float got)
{
    double sum = old * v->factor, error = old * v->factor_error;
    for (int64_t j = v->from; j < v->to; j++) {
        sum += v->p[j];
        error += v->p_error[j];
    }
    error += (double)(keys + 2) * ORACLE_U * sum;
    if (!(fabs((double)got - sum) <= error))
        fail_with("row %lld: the sum is %.9g, expected %.17g within %.3g", (long long)i,
                  (double)got, sum, error);
}

static void judge_out(const tile_buffers *t, const step_case *c, const row_verdict *v, int64_t i,
                      int64_t d, double old, float got)
{
    double out = old * v->factor, error = fabs(old) * (v->factor_error + 2 * ORACLE_U * v->factor);
    for (int64_t j = v->from; j < v->to; j++) {
        const double value = (double)t->values[j * (c->value_dim + c->pad) + d];
        out += v->p[j] * value;
        error += fabs(value) * (v->p_error[j] + (double)(c->keys + 3) * ORACLE_U * v->p[j]) +
                 ORACLE_TINY;
    }
    error += ORACLE_U * fabs(out);
    if (!(fabs((double)got - out) <= error))
        fail_with("row %lld, column %lld is %.9g, expected %.17g within %.3g", (long long)i,
                  (long long)d, (double)got, out, error);
}

static void judge(const tile_buffers *t, const step_case *c, const float *max, const float *sum,
                  const float *out)
{
    for (int64_t i = 0; i < c->n_rows; i++) {
        row_verdict v;
        const double new_max = (double)t->args.max[i];
        judge_logits(t, i, (double)max[i], new_max, &v);
        if (!(fabs(new_max - v.max) <= v.max_error))
            fail_with("row %lld: the maximum is %.9g, expected %.17g within %.3g", (long long)i,
                      new_max, v.max, v.max_error);
        judge_sum(&v, i, c->keys, (double)sum[i], t->args.sum[i]);
        for (int64_t d = 0; d < c->value_dim; d++)
            judge_out(t, c, &v, i, d, (double)out[d * t->tile_rows + i],
                      t->args.out[d * t->tile_rows + i]);
    }
}

/* Lane 'from' of an array of tiles becomes lane 'to' of another; the rest is
 * NaN, except that lanes without a row of the query are 0 as tile_load
 * makes them. */
static void move_lane(const float *source, float *target, int64_t n, int64_t tile_rows,
                      int64_t from, int64_t to, float rest)
{
    for (int64_t d = 0; d < n; d++)
        for (int64_t i = 0; i < tile_rows; i++)
            target[d * tile_rows + i] = i == to ? source[d * tile_rows + from] : rest;
}

/*
 * The same row in another lane, among rows of NaN that see everything, or
 * alone: its maximum, sum and outputs keep their bits.
 */
static void check_lane(const test_isa *isa, const tile_buffers *t, const step_case *c,
                       const float *max, const float *sum, const float *out, int64_t i,
                       int64_t lane, float rest)
{
    const int64_t rows = t->tile_rows;
    static float query[600 * QKV_TILE_ROWS_MAX], moved_out[608 * QKV_TILE_ROWS_MAX];
    static float logits[QKV_KEY_BLOCK * QKV_TILE_ROWS_MAX];
    float moved_max[QKV_TILE_ROWS_MAX], moved_sum[QKV_TILE_ROWS_MAX];
    int32_t begin[QKV_TILE_ROWS_MAX] = {0}, end[QKV_TILE_ROWS_MAX];
    move_lane(t->query, query, c->head_dim, rows, i, lane, rest);
    move_lane(out, moved_out, t->columns, rows, i, lane, rest);
    move_lane(max, moved_max, 1, rows, i, lane, -FLT_MAX);
    move_lane(sum, moved_sum, 1, rows, i, lane, rest);
    for (int64_t k = 0; k < rows; k++)
        end[k] = (int32_t)c->keys;
    begin[lane] = (int32_t)sees_from(t, i);
    end[lane] = (int32_t)sees_to(t, i);

    qkv_tile_step_args a = t->args;
    a.query = query;
    a.out = moved_out;
    a.logits = logits;
    a.max = moved_max;
    a.sum = moved_sum;
    a.n_rows = isnan(rest) ? rows : lane + 1;
    a.begin = begin;
    a.end = end;
    isa->table->tile_step_f32(&a);
    expect_same_bits("max of a row in another lane", &moved_max[lane], &t->args.max[i], 1);
    expect_same_bits("sum of a row in another lane", &moved_sum[lane], &t->args.sum[i], 1);
    for (int64_t d = 0; d < c->value_dim; d++)
        expect_same_bits("out of a row in another lane", &moved_out[d * rows + lane],
                         &t->args.out[d * rows + i], 1);
}

static void check_step(const test_isa *isa, rng *r, step_case c)
{
    context("tile_step_f32 on %s: rows %lld, keys %lld (values packed for %lld), head_dim %lld, "
            "value_dim %lld, pad %lld, place %d, %s%s%s",
            isa->name, (long long)c.n_rows, (long long)c.keys, (long long)c.values_keys,
            (long long)c.head_dim, (long long)c.value_dim, (long long)c.pad, c.place,
            c.ragged ? "ragged" : "full", c.poisoned ? ", poisoned" : "",
            c.fresh ? ", first block" : "");
    tile_buffers t;
    take_buffers(&t, isa->table, &c);
    fill_buffers(&t, isa->table, r, &c);

    static float out[608 * QKV_TILE_ROWS_MAX];
    float max[QKV_TILE_ROWS_MAX], sum[QKV_TILE_ROWS_MAX];
    memcpy(out, t.args.out, (size_t)(t.columns * t.tile_rows) * sizeof *out);
    memcpy(max, t.args.max, (size_t)t.tile_rows * sizeof *max);
    memcpy(sum, t.args.sum, (size_t)t.tile_rows * sizeof *sum);

    const int inputs[] = {SLOT_QUERY, SLOT_KEYS, SLOT_PACKED, SLOT_BEGIN, SLOT_END};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        guarded_freeze(inputs[i]);
    isa->table->tile_step_f32(&t.args);
    guards_intact();
    judge(&t, &c, max, sum, out);
    const int64_t row = rng_int(r, 0, c.n_rows - 1), lane = rng_int(r, 0, t.tile_rows - 1);
    check_lane(isa, &t, &c, max, sum, out, row, lane, NAN);
    check_lane(isa, &t, &c, max, sum, out, row, lane, 0.0f);
    check_lane(isa, &t, &c, max, sum, out, row, 0, 0.0f);
    tally(isa->id, 1);
}

static step_case random_step(rng *r, const qkv_kernels *k, int64_t keys_most, int64_t dim_most)
{
    step_case c = {.n_rows = rng_int(r, 1, k->tile_rows),
                   .keys = rng_int(r, 1, keys_most),
                   .head_dim = rng_int(r, 1, dim_most),
                   .value_dim = rng_int(r, 1, dim_most),
                   .pad = rng_int(r, 0, 5),
                   .place = (int)rng_int(r, 0, PLACES - 1),
                   .scale_log2 = rng_uniform(r, -0.5f, 1.5f),
                   .sigma = 1.0f,
                   .ragged = rng_int(r, 0, 2) > 0,
                   .fresh = rng_int(r, 0, 1)};
    c.values_keys = rng_int(r, 0, 3) ? c.keys : rng_int(r, c.keys, k->key_block);
    c.poisoned = c.ragged;
    c.scale_log2 /= sqrtf((float)c.head_dim);
    if (rng_int(r, 0, 7) == 0)
        c.sigma = 12.0f; /* logits of several hundred */
    if (rng_int(r, 0, 15) == 0)
        c.scale_log2 = 0.0f;
    return c;
}

/* A NaN that one row sees, or has in its query, is that row's alone. */
static void check_nan_rows(const test_isa *isa, rng *r)
{
    for (int64_t i = 0; i < effort_cases(64); i++) {
        step_case c = random_step(r, isa->table, 20, 20);
        c.ragged = true;
        c.poisoned = false;
        c.sigma = 1.0f;
        tile_buffers t;
        take_buffers(&t, isa->table, &c);
        fill_buffers(&t, isa->table, r, &c);
        const int64_t row = rng_int(r, 0, c.n_rows - 1), key = rng_int(r, 0, c.keys - 1);
        const bool in_value = i % 3 == 0, in_key = i % 3 == 1;
        for (int64_t k = 0; k < t.tile_rows; k++) { /* every row but one looks past the key */
            t.begin[k] = k == row ? (int32_t)key : (int32_t)key + 1;
            t.end[k] = k == row ? (int32_t)key + 1 : (int32_t)c.keys;
        }
        context("tile_step_f32 on %s: NaN in a %s, rows %lld, row %lld, keys %lld, key %lld",
                isa->name,
                in_value ? "value"
                : in_key ? "key"
                         : "query",
                (long long)c.n_rows, (long long)row, (long long)c.keys, (long long)key);
        const int64_t column = rng_int(r, 0, c.value_dim - 1);
        if (in_value)
            t.values[key * (c.value_dim + c.pad) + column] = NAN;
        else if (in_key)
            t.keys[key * t.args.keys_stride + rng_int(r, 0, c.head_dim - 1)] = NAN;
        else
            t.query[rng_int(r, 0, c.head_dim - 1) * t.tile_rows + row] = NAN;
        isa->table->tile_pack_f32(t.values, c.value_dim + c.pad, c.values_keys, c.value_dim,
                                  t.packed);
        isa->table->tile_step_f32(&t.args);
        for (int64_t k = 0; k < c.n_rows; k++) {
            if (isnan(t.args.sum[k]) != (k == row && !in_value))
                fail_with("row %lld has the sum %.9g", (long long)k, (double)t.args.sum[k]);
            for (int64_t d = 0; d < c.value_dim; d++) {
                const bool want = k == row && (!in_value || d == column);
                if (isnan(t.args.out[d * t.tile_rows + k]) != want)
                    fail_with("row %lld, column %lld is %.9g", (long long)k, (long long)d,
                              (double)t.args.out[d * t.tile_rows + k]);
            }
        }
        tally(isa->id, 1);
    }
}

/* Rows that see nothing, block after block, keep the state they began with. */
static void check_unseen_blocks(const test_isa *isa, rng *r)
{
    step_case c = random_step(r, isa->table, 40, 40);
    c.n_rows = isa->table->tile_rows;
    c.ragged = c.poisoned = c.fresh = true;
    tile_buffers t;
    take_buffers(&t, isa->table, &c);
    fill_buffers(&t, isa->table, r, &c);
    for (int64_t i = 0; i < t.tile_rows; i++)
        t.begin[i] = t.end[i] = (int32_t)(i % (c.keys + 1));
    poison(&t, &c);
    isa->table->tile_pack_f32(t.values, c.value_dim + c.pad, c.values_keys, c.value_dim, t.packed);
    context("tile_step_f32 on %s: rows that see nothing", isa->name);
    for (int block = 0; block < 3; block++) {
        isa->table->tile_step_f32(&t.args);
        for (int64_t i = 0; i < t.tile_rows; i++) {
            if (t.args.max[i] != -FLT_MAX || t.args.sum[i] != 0.0f)
                fail_with("row %lld has the state %.9g, %.9g", (long long)i, (double)t.args.max[i],
                          (double)t.args.sum[i]);
            for (int64_t d = 0; d < c.value_dim; d++)
                if (t.args.out[d * t.tile_rows + i] != 0.0f)
                    fail_with("row %lld has an output", (long long)i);
        }
    }
    tally(isa->id, 1);
}

void check_tile_step_f32(const test_isa *isa)
{
    rng r = rng_make("tile_step_f32");
    const qkv_kernels *k = isa->table;
    /* Every number of rows, of keys, and both head sizes with every rest. */
    for (int64_t n = 1; n <= LENGTHS; n++) {
        if (!effort_takes(n))
            continue;
        step_case c = random_step(&r, k, 24, 24);
        c.n_rows = (n - 1) % k->tile_rows + 1;
        check_step(isa, &r, c);
        c = random_step(&r, k, 24, 24);
        c.keys = (n - 1) % k->key_block + 1;
        c.values_keys = c.keys;
        check_step(isa, &r, c);
        c = random_step(&r, k, 24, 24);
        c.head_dim = n;
        check_step(isa, &r, c);
        c = random_step(&r, k, 24, 24);
        c.value_dim = n;
        check_step(isa, &r, c);
    }
    for (int64_t i = effort_cases(300); i > 0; i--)
        check_step(isa, &r, random_step(&r, k, k->key_block, i % 8 ? 130 : 600));
    check_nan_rows(isa, &r);
    for (int i = 0; i < 8; i++)
        check_unseen_blocks(isa, &r);
}
