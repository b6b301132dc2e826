/* SPDX-License-Identifier: MIT */
/*
 * Weighted sums of a cache's values, in every format: within the bound of a
 * sum of products of the exact values of the elements.
 */
#include "checks.h"

#include <math.h>
#include <string.h>

#include "oracle/kv.h"

enum { SLOT_W, SLOT_V, SLOT_SCALES, SLOT_O, SLOT_R, SLOT_ONE };
enum { WANT, BOUND };

typedef struct sum_case {
    int64_t rows, keys, dim, pad;
    int place;
    bool rescale, skip_zero, specials;
} sum_case;

/* (keys + 3) roundings of the block, one of them the scale's, and 2 of the
 * rescaled row and the last sum. */
static void want_rows(const qkv_weighted_sum_args *a, kv_format f, double *want, double *bound)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t d = 0; d < a->value_dim; d++) {
            double sum = 0, absolute = 0, old = 0;
            for (int64_t j = 0; j < a->kv_len; j++) {
                const double w = (double)a->weights[i * a->weights_stride + j];
                if (a->skip_zero && w == 0)
                    continue;
                const float s = a->value_scales ? a->value_scales[j * a->value_scales_stride] : 1;
                const char *row = (const char *)a->values + j * a->values_stride;
                const double product = w * oracle_kv_element(f, row, d, s);
                sum += product;
                absolute += fabs(product);
            }
            if (a->rescale)
                old = (double)a->out[i * a->out_stride + d] * (double)a->rescale[i];
            want[i * a->value_dim + d] = sum + old;
            bound[i * a->value_dim + d] =
                (double)(a->kv_len + 3) * ORACLE_U * absolute + 2 * ORACLE_U * fabs(old) +
                ORACLE_U * fabs(sum) +
                (double)(a->kv_len + 1) * ORACLE_TINY * (f == KV_F8_E4M3 ? 256 : 1);
        }
    }
}

/* A row on its own, with its output elsewhere, has the bits it had. */
static void check_rows_alone(const qkv_weighted_sum_args *a, qkv_weighted_sum_fn *fn,
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
        fn(&one);
        guards_intact();
        expect_same_bits("the row alone", one.out, a->out + i * a->out_stride, a->value_dim);
    }
}

/* Values, of which with 'specials' the rows of weight 0 hold NaNs. */
static void fill_values(rng *r, kv_format f, char *values, int64_t stride, float *scales,
                        sum_case c)
{
    float row[700];
    for (int64_t j = 0; j < c.keys; j++) {
        fill_normal(r, row, c.dim, 2.0f);
        if (c.specials && j % 3 == 1)
            row[j % c.dim] = NAN;
        oracle_kv_encode(f, row, c.dim, values + j * stride, &scales[j * (1 + c.pad)]);
    }
}

/* Values found by a list of their addresses; what is needed next is not read. */
static void check_listed(const qkv_weighted_sum_args *a, qkv_weighted_sum_fn *fn,
                         const float *before)
{
    const void *values_at[QKV_KEY_BLOCK + 3] = {NULL};
    const int64_t extent = (a->rows - 1) * a->out_stride + a->value_dim;
    float *out = guarded(SLOT_ONE, extent, PLACE_AT_END);
    for (int64_t j = 0; j < a->kv_len; j++)
        values_at[j] = (const char *)a->values + j * a->values_stride;
    memcpy(out, before, (size_t)extent * sizeof *out);
    qkv_weighted_sum_args listed = *a;
    listed.values = NULL;
    listed.values_at = values_at;
    listed.ahead = 3;
    listed.out = out;
    fn(&listed);
    for (int64_t i = 0; i < a->rows; i++)
        expect_same_bits("from a list", out + i * a->out_stride, a->out + i * a->out_stride,
                         a->value_dim);
}

static void check_case(const test_isa *isa, qkv_weighted_sum_fn *fn, const char *op, kv_format f,
                       rng *r, sum_case c)
{
    context("%s on %s: rows %lld, keys %lld, value_dim %lld, pad %lld, place %d, rescale %d, "
            "skip_zero %d, specials %d",
            op, isa->name, (long long)c.rows, (long long)c.keys, (long long)c.dim, (long long)c.pad,
            c.place, c.rescale, c.skip_zero, c.specials);
    const int64_t bytes = oracle_kv_bytes(f, c.dim);
    qkv_weighted_sum_args a = {.weights_stride = c.keys + c.pad,
                               .values_stride = bytes + c.pad,
                               .value_scales_stride = 1 + c.pad,
                               .out_stride = c.dim + c.pad,
                               .rows = c.rows,
                               .kv_len = c.keys,
                               .value_dim = c.dim,
                               .skip_zero = c.skip_zero};
    const int other = c.place ? 1 + (c.place + 9) % (PLACES - 1) : 0;
    const int floats = c.place ? 1 + (c.place - 1) % (PLACES - 1) : 0;
    const bool any = c.keys > 0;
    float *weights = guarded(SLOT_W, any ? (c.rows - 1) * a.weights_stride + c.keys : 0, floats);
    char *values =
        guarded_elements(SLOT_V, any ? (size_t)((c.keys - 1) * a.values_stride + bytes) : 0,
                         c.place, oracle_kv_align(f));
    float *scales = guarded(SLOT_SCALES, any ? (c.keys - 1) * a.value_scales_stride + 1 : 0, other);
    const int64_t out_extent = (c.rows - 1) * a.out_stride + c.dim;
    float *out = guarded(SLOT_O, out_extent, floats);
    float *rescale = guarded(SLOT_R, c.rows, PLACE_AT_END);
    for (int64_t i = 0; i < c.rows; i++) {
        for (int64_t j = 0; j < c.keys; j++)
            weights[i * a.weights_stride + j] =
                c.skip_zero && j % 3 == 1 && i != 2 ? 0.0f : rng_uniform(r, 0.0f, 1.0f);
        if (c.rescale)
            fill_normal(r, out + i * a.out_stride, c.dim, 1.0f);
        rescale[i] = rng_uniform(r, 0.0f, 1.0f);
    }
    fill_values(r, f, values, a.values_stride, scales, c);
    a.weights = weights;
    a.values = values;
    a.value_scales = f == KV_I8 ? scales : NULL;
    a.out = out;
    a.rescale = c.rescale ? rescale : NULL;

    float before[QKV_ROWS_MAX * 720];
    memcpy(before, out, (size_t)out_extent * sizeof *before);
    double *want = doubles(WANT, c.rows * c.dim), *bound = doubles(BOUND, c.rows * c.dim);
    want_rows(&a, f, want, bound);
    guarded_freeze(SLOT_W);
    guarded_freeze(SLOT_V);
    guarded_freeze(SLOT_SCALES);
    guarded_freeze(SLOT_R);
    fn(&a);
    guards_intact();
    gaps_intact("out", out, c.rows, a.out_stride, c.dim);
    expect_close_rows("out", out, a.out_stride, want, bound, c.rows, c.dim);
    if (!c.specials)
        check_rows_alone(&a, fn, before);
    check_listed(&a, fn, before);
    tally(isa->id, 1);
}

/* Every pattern of an element under a weight of 1: its exact value. */
static void check_patterns(const test_isa *isa, qkv_weighted_sum_fn *fn, const char *op,
                           kv_format f)
{
    enum { DIM = 43 };
    const int bytes = f == KV_F16 || f == KV_BF16 ? 2 : 1;
    for (int first = 0; first < 1 << 8 * bytes; first += DIM) {
        char row[DIM * 2];
        float out[DIM];
        const float weight = 1.0f, scale = 0.75f;
        double want[DIM], bound[DIM] = {0};
        for (int i = 0; i < DIM; i++) {
            const int pattern = first + i;
            memcpy(row + bytes * i, &pattern, (size_t)bytes);
        }
        for (int i = 0; i < DIM; i++) {
            want[i] = oracle_kv_element(f, row, i, scale);
            bound[i] = ORACLE_TINY > 0x1p-149 ? ORACLE_TINY : 0;
        }
        context("%s on %s: patterns from %04x", op, isa->name, first);
        const qkv_weighted_sum_args a = {.weights = &weight,
                                         .values = row,
                                         .value_scales = f == KV_I8 ? &scale : NULL,
                                         .out = out,
                                         .rows = 1,
                                         .kv_len = 1,
                                         .value_dim = DIM};
        fn(&a);
        expect_close("out", out, want, bound, DIM);
    }
    tally(isa->id, 1 << 8 * bytes);
}

static void check_sum(const test_isa *isa, qkv_weighted_sum_fn *fn, const char *op, kv_format f)
{
    rng r = rng_make(op);
    const int64_t step = oracle_kv_step(f);
    const size_t align = oracle_kv_align(f);
    if (step == 1)
        check_patterns(isa, fn, op, f);
    for (int64_t dim = step; dim <= 70 * (step > 1 ? 4 : 1); dim += step) {
        for (int place = 0; place < places_of(align); place++) {
            if (place > 1 && !effort_takes(dim * 5 + place))
                continue;
            sum_case c = {.rows = rng_int(&r, 1, QKV_ROWS_MAX),
                          .keys = rng_int(&r, 0, 70),
                          .dim = dim,
                          .pad = rng_int(&r, 0, 3),
                          .place = place,
                          .rescale = place % 2};
            check_case(isa, fn, op, f, &r, c);
            c.skip_zero = c.specials = true;
            check_case(isa, fn, op, f, &r, c);
        }
    }
    for (int64_t i = effort_cases(40); i > 0; i--) {
        const sum_case c = {.rows = rng_int(&r, 1, QKV_ROWS_MAX),
                            .keys = rng_int(&r, 1, QKV_KEY_BLOCK),
                            .dim = rng_int(&r, 1, 700 / step) * step,
                            .pad = rng_int(&r, 0, 9),
                            .place = (int)rng_int(&r, 0, places_of(align) - 1),
                            .rescale = i % 2,
                            .skip_zero = i % 3 == 0};
        check_case(isa, fn, op, f, &r, c);
    }
}

#define CHECK(type, format)                                                                        \
    void check_weighted_sum_##type(const test_isa *isa)                                            \
    {                                                                                              \
        check_sum(isa, isa->table->weighted_sum_##type, "weighted_sum_" #type, format);            \
    }
KV_EACH(CHECK)
