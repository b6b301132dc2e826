/* SPDX-License-Identifier: MIT */
#include "checks.h"

#include <math.h>
#include <string.h>

enum { SLOT_W, SLOT_V, SLOT_O, SLOT_R, SLOT_ONE };
enum { WANT, BOUND };

typedef struct sum_case {
    int64_t rows, keys, dim, pad;
    int place;
    bool rescale, skip_zero;
    bool values_stride_0;
} sum_case;

static const float *value_at(const qkv_weighted_sum_args *a, int64_t j)
{
    return (const void *)((const char *)a->values + j * a->values_stride);
}

/* (keys + 2) roundings of the block, 2 of the rescaled row and the last sum. */
static void want_rows(const qkv_weighted_sum_args *a, double *want, double *bound)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t d = 0; d < a->value_dim; d++) {
            double sum = 0, absolute = 0;
            for (int64_t j = 0; j < a->kv_len; j++) {
                const double w = (double)a->weights[i * a->weights_stride + j];
                if (a->skip_zero && w == 0)
                    continue;
                const double product = w * (double)value_at(a, j)[d];
                sum += product;
                absolute += fabs(product);
            }
            double old = 0;
            if (a->rescale)
                old = (double)a->out[i * a->out_stride + d] * (double)a->rescale[i];
            want[i * a->value_dim + d] = sum + old;
            bound[i * a->value_dim + d] = (double)(a->kv_len + 2) * ORACLE_U * absolute +
                                          2 * ORACLE_U * fabs(old) + ORACLE_U * fabs(sum) +
                                          (double)(a->kv_len + 1) * ORACLE_TINY;
        }
    }
}

/* A row on its own, with its output elsewhere, has the bits it had. */
static void check_rows_alone(const test_isa *isa, const qkv_weighted_sum_args *a,
                             const float *before)
{
    for (int64_t i = 0; i < a->rows; i++) {
        qkv_weighted_sum_args one = *a;
        one.rows = 1;
        one.weights += i * a->weights_stride;
        one.out = guarded(SLOT_ONE, a->value_dim, (int)(1 + (i * 5 + 2) % (PLACES - 1)));
        if (a->rescale)
            one.rescale = a->rescale + i;
        memcpy(one.out, before + i * a->out_stride, (size_t)a->value_dim * sizeof *one.out);
        isa->table->weighted_sum_f32(&one);
        guards_intact();
        expect_same_bits("the row alone", one.out, a->out + i * a->out_stride, a->value_dim);
    }
}

/* Values found by a list of their addresses; what is needed next is not read. */
static void check_listed(const test_isa *isa, const qkv_weighted_sum_args *a, const float *before)
{
    const void *values_at[QKV_KEY_BLOCK + 3] = {NULL};
    float *out = guarded(SLOT_ONE, (a->rows - 1) * a->out_stride + a->value_dim, PLACE_AT_END);
    for (int64_t j = 0; j < a->kv_len; j++)
        values_at[j] = value_at(a, j);
    memcpy(out, before, (size_t)((a->rows - 1) * a->out_stride + a->value_dim) * sizeof *out);
    qkv_weighted_sum_args listed = *a;
    listed.values = NULL;
    listed.values_at = values_at;
    listed.ahead = 3;
    listed.out = out;
    isa->table->weighted_sum_f32(&listed);
    for (int64_t i = 0; i < a->rows; i++)
        expect_same_bits("from a list", out + i * a->out_stride, a->out + i * a->out_stride,
                         a->value_dim);
}

static void check_case(const test_isa *isa, rng *r, sum_case c)
{
    context("weighted_sum_f32 on %s: rows %lld, keys %lld, value_dim %lld, pad %lld, place %d, "
            "rescale %d, skip_zero %d, values_stride %s",
            isa->name, (long long)c.rows, (long long)c.keys, (long long)c.dim, (long long)c.pad,
            c.place, c.rescale, c.skip_zero, c.values_stride_0 ? "0" : "set");
    const int64_t stride = c.values_stride_0 ? 0 : c.dim + c.pad;
    qkv_weighted_sum_args a = {.weights_stride = c.keys + c.pad,
                               .values_stride = stride * (int64_t)sizeof(float),
                               .out_stride = c.dim + c.pad,
                               .rows = c.rows,
                               .kv_len = c.keys,
                               .value_dim = c.dim,
                               .skip_zero = c.skip_zero};
    float *weights =
        guarded(SLOT_W, c.keys ? (c.rows - 1) * a.weights_stride + c.keys : 0, c.place);
    float *values = guarded(SLOT_V, c.keys ? (c.keys - 1) * stride + c.dim : 0,
                            c.place ? 1 + (c.place + 9) % (PLACES - 1) : 0);
    const int64_t out_extent = (c.rows - 1) * a.out_stride + c.dim;
    float *out = guarded(SLOT_O, out_extent, c.place);
    float *rescale = guarded(SLOT_R, c.rows, PLACE_AT_END);
    for (int64_t i = 0; i < c.rows; i++) {
        for (int64_t j = 0; j < c.keys; j++)
            weights[i * a.weights_stride + j] = rng_uniform(r, 0.0f, 1.0f);
        if (c.keys && c.skip_zero)
            weights[i * a.weights_stride + rng_int(r, 0, c.keys - 1)] = i % 2 ? -0.0f : 0.0f;
        if (c.rescale)
            fill_normal(r, out + i * a.out_stride, c.dim, 1.0f);
        rescale[i] = rng_uniform(r, 0.0f, 1.0f);
    }
    for (int64_t j = 0; j < c.keys; j++)
        fill_normal(r, values + j * stride, c.dim, 2.0f);
    a.weights = weights;
    a.values = values;
    a.out = out;
    a.rescale = c.rescale ? rescale : NULL;

    float before[8 * 700];
    memcpy(before, out, (size_t)out_extent * sizeof *before);
    double *want = doubles(WANT, c.rows * c.dim), *bound = doubles(BOUND, c.rows * c.dim);
    want_rows(&a, want, bound);
    guarded_freeze(SLOT_W);
    guarded_freeze(SLOT_V);
    guarded_freeze(SLOT_R);
    isa->table->weighted_sum_f32(&a);
    guards_intact();
    gaps_intact("out", out, c.rows, a.out_stride, c.dim);
    expect_close_rows("out", out, a.out_stride, want, bound, c.rows, c.dim);
    check_rows_alone(isa, &a, before);
    check_listed(isa, &a, before);
    tally(isa->id, 1);
}

/* NaN and infinity where every row's weight is 0, or one row's is not. */
static void check_special(const test_isa *isa)
{
    enum { ROWS = QKV_ROWS_MAX, KEYS = 13, DIM = 37 };
    const float specials[] = {NAN, INFINITY, -INFINITY};
    for (int64_t at = 0; at < DIM; at++) {
        for (int s = 0; s < 3; s++) {
            context("weighted_sum_f32 on %s: %g in column %lld", isa->name, (double)specials[s],
                    (long long)at);
            float *w = guarded(SLOT_W, ROWS * KEYS, PLACE_AT_END);
            float *v = guarded(SLOT_V, KEYS * DIM, PLACE_AT_END);
            float *out = guarded(SLOT_O, ROWS * DIM, PLACE_AT_END);
            for (int i = 0; i < ROWS * KEYS; i++)
                w[i] = 1.0f;
            for (int i = 0; i < KEYS * DIM; i++)
                v[i] = 1.0f;
            const int key = (int)(at % KEYS), seeing = (int)(at % (ROWS + 1)); /* ROWS: none */
            for (int i = 0; i < ROWS; i++)
                w[i * KEYS + key] = i == seeing ? 0.5f : i % 2 ? -0.0f : 0.0f;
            v[key * DIM + at] = specials[s];
            const qkv_weighted_sum_args a = {.weights = w,
                                             .values = v,
                                             .out = out,
                                             .weights_stride = KEYS,
                                             .values_stride = DIM * sizeof *v,
                                             .out_stride = DIM,
                                             .rows = ROWS,
                                             .kv_len = KEYS,
                                             .value_dim = DIM,
                                             .skip_zero = true};
            isa->table->weighted_sum_f32(&a);
            for (int i = 0; i < ROWS; i++) {
                for (int64_t d = 0; d < DIM; d++) {
                    const float sees = d == at ? specials[s] : KEYS - 0.5f;
                    const float want = i == seeing ? sees : KEYS - 1.0f;
                    expect_same_values("out", &out[i * DIM + d], &want, 1);
                }
            }
            tally(isa->id, 1);
        }
    }
}

/* One weight of 1 picks out its value row exactly, at every place. */
static void check_one_hot(const test_isa *isa, rng *r)
{
    for (int64_t keys = 1; keys <= 40; keys++) {
        const int64_t dim = 1 + keys * 7 % 45;
        float *w = guarded(SLOT_W, keys, PLACE_AT_END);
        float *v = guarded(SLOT_V, keys * dim, PLACE_AT_END);
        fill_normal(r, v, keys * dim, 1.0f);
        for (int64_t hot = 0; hot < keys; hot++) {
            context("weighted_sum_f32 on %s: one-hot %lld of %lld", isa->name, (long long)hot,
                    (long long)keys);
            float *out = guarded(SLOT_O, dim, PLACE_AT_END);
            for (int64_t j = 0; j < keys; j++)
                w[j] = j == hot ? 1.0f : 0.0f;
            const qkv_weighted_sum_args a = {.weights = w,
                                             .values = v,
                                             .out = out,
                                             .values_stride = dim * (int64_t)sizeof *v,
                                             .rows = 1,
                                             .kv_len = keys,
                                             .value_dim = dim};
            isa->table->weighted_sum_f32(&a);
            expect_same_values("out", out, v + hot * dim, dim);
        }
        tally(isa->id, 1);
    }
}

void check_weighted_sum_f32(const test_isa *isa)
{
    rng r = rng_make("weighted_sum_f32");
    for (int64_t dim = 1; dim <= LENGTHS; dim++) {
        for (int place = 0; place < PLACES; place++) {
            if (place > 1 && !effort_takes(dim * 7 + place))
                continue;
            check_case(isa, &r,
                       (sum_case){.rows = 1 + (dim + place) % QKV_ROWS_MAX,
                                  .keys = rng_int(&r, 0, 9),
                                  .dim = dim,
                                  .pad = rng_int(&r, 0, 3),
                                  .place = place,
                                  .rescale = place % 3 == 0,
                                  .skip_zero = place % 2});
        }
    }
    for (int64_t keys = 0; keys <= LENGTHS; keys++)
        for (int64_t rows = 1; rows <= QKV_ROWS_MAX; rows++)
            if (effort_takes(keys + rows))
                check_case(isa, &r,
                           (sum_case){.rows = rows,
                                      .keys = keys,
                                      .dim = rng_int(&r, 1, 40),
                                      .place = (int)rng_int(&r, 0, PLACES - 1),
                                      .rescale = rows % 2,
                                      .skip_zero = keys % 2});
    for (int64_t i = effort_cases(300); i > 0; i--)
        check_case(isa, &r,
                   (sum_case){.rows = rng_int(&r, 1, QKV_ROWS_MAX),
                              .keys = rng_int(&r, 0, QKV_KEY_BLOCK),
                              .dim = rng_int(&r, 1, 600),
                              .pad = rng_int(&r, 0, 9),
                              .place = (int)rng_int(&r, 0, PLACES - 1),
                              .rescale = rng_int(&r, 0, 1),
                              .skip_zero = rng_int(&r, 0, 1),
                              .values_stride_0 = i % 16 == 0});
    check_one_hot(isa, &r);
    check_special(isa);
}
