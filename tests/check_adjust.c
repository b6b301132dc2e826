/* SPDX-License-Identifier: MIT */
/* The kernels between dot products and softmax, and the tile's step in halves. */
#include "checks.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { SLOT_A, SLOT_B, SLOT_C, SLOT_D, SLOT_E, SLOT_F, SLOT_G };

static const double log2e = 0x1.71547652b82fep+0;

/* ---------------------------------------------------------------- tanh */

static void expect_tanh(const float *x, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const double exact = tanh((double)x[i]);
        if (isnan(x[i])) {
            if (!isnan(y[i]))
                fail_with("tanh(NaN) is %.9g", (double)y[i]);
        } else if (exact != 0.0 && y[i] == 0.0f && fabs(exact) <= ORACLE_TINY) {
            continue; /* lost, as where denormals are flushed */
        } else if (!(oracle_ulp_error(y[i], exact) <= 2.0) || signbit(y[i]) != signbit(x[i]) ||
                   fabsf(y[i]) > 1.0f) {
            fail_with("tanh(%.9g) is %.9g, expected %.17g", (double)x[i], (double)y[i], exact);
        }
    }
}

/* Every 2^step-th float of both signs from 0 to infinity and beyond. */
static void check_tanh_walk(const test_isa *isa, uint32_t step)
{
    enum { N = 1024 };
    float x[N], y[N];
    uint64_t bits = 0;
    while (bits <= UINT32_MAX) {
        int64_t n = 0;
        for (; n < N && bits <= UINT32_MAX; n++, bits += step)
            x[n] = float_of((uint32_t)bits);
        isa->table->tanh_f32(x, y, n);
        expect_tanh(x, y, n);
    }
    tally(isa->id, 1);
}

void check_tanh_f32(const test_isa *isa)
{
    rng r = rng_make("tanh_f32");
    context("tanh_f32 on %s: a walk over all floats", isa->name);
    check_tanh_walk(isa, effort_is_full() ? 199 : 49999);
    for (int64_t n = 0; n <= LENGTHS; n++) {
        for (int place = 0; place < PLACES; place += effort_takes(n) ? 1 : 7) {
            context("tanh_f32 on %s: n %lld, place %d", isa->name, (long long)n, place);
            float *x = guarded(SLOT_A, n, place), *y = guarded(SLOT_B, n, (place + 3) % PLACES);
            fill_binades(&r, x, n, -30, 5);
            guarded_freeze(SLOT_A);
            isa->table->tanh_f32(x, y, n);
            guards_intact();
            expect_tanh(x, y, n);
            float copy[LENGTHS + 1];
            memcpy(copy, y, (size_t)n * sizeof *copy);
            guarded_thaw(SLOT_A);
            isa->table->tanh_f32(x, x, n);
            expect_same_bits("tanh in place", x, copy, n);
            tally(isa->id, 1);
        }
    }
}

/* -------------------------------------------------------------- adjusting */

/* What happens to one logit, in f64, and how far f32 may be off. */
typedef struct rule {
    double scale, cap, slope, ahead, bias, bias_scale;
    bool hidden, biased;
} rule;

static double apply(rule c, double dot, double *bound)
{
    const double u = ORACLE_U;
    double t = dot * c.scale;
    double error = u * fabs(t) + 0x1p-150;
    if (c.cap != 0.0) {
        const double s = t;
        t = c.cap * tanh(s);
        /* The argument's error, then 2 ulp (each at most 2u) and the product's. */
        error = fabs(c.cap) * error + 5 * u * fabs(t) + 0x1p-148;
    }
    if (c.slope != 0.0) {
        t += c.slope * c.ahead;
        /* 'ahead' may be rounded, the product and the sum are. */
        error += u * (2 * fabs(c.slope * c.ahead) + fabs(t)) * (1 + 2 * u);
    }
    if (c.biased) {
        const double b = c.bias * c.bias_scale;
        t += b;
        error += u * (fabs(b) + fabs(t)) * (1 + 2 * u);
        t *= 2;
        error *= 2;
        if (fabs(t) > (double)FLT_MAX * (1 + u / 2))
            t = copysign(HUGE_VAL, t);
    }
    *bound = error * (1 + 4 * u);
    return c.hidden || (c.biased && c.bias == -HUGE_VAL) ? -HUGE_VAL : t;
}

/* In a directed rounding mode an overflow may end at the largest number: there
 * is none then. */
static float random_bias(rng *r)
{
    const float large = ORACLE_U == 0x1p-24 ? FLT_MAX : 1e38f;
    switch (rng_int(r, 0, 7)) {
    case 0:
        return -INFINITY;
    case 1:
        return rng_int(r, 0, 1) ? -large : large;
    case 2:
        return -40000.0f;
    case 3:
        return 0.0f;
    default:
        return 3.0f * rng_normal(r);
    }
}

/* Ordinary dot products, very large ones, and some that must not matter where
 * they are hidden. */
static float random_dot(rng *r, bool hidden)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
    if (hidden && rng_int(r, 0, 1))
        return odd[rng_int(r, 0, 3)];
    return (rng_int(r, 0, 19) ? 8.0f : 1e36f) * rng_normal(r);
}

static void check_row(const test_isa *isa, rng *r, int64_t n, int options, int place)
{
    context("row_adjust_f32 on %s: n %lld, options %d, place %d", isa->name, (long long)n, options,
            place);
    float *logits = guarded(SLOT_A, n, place);
    float *bias = guarded(SLOT_B, n, (place + 5) % PLACES);
    double *want = doubles(0, n), *bound = doubles(1, n);
    qkv_row_adjust_args a = {.logits = logits,
                             .n = n,
                             .scale = rng_normal(r),
                             .cap = options & 1 ? rng_uniform(r, 0.5f, 60.0f) : 0.0f,
                             .slope = options & 2 ? rng_normal(r) : 0.0f,
                             .behind = (float)rng_int(r, -300, 300),
                             .bias = options & 4 ? bias : NULL,
                             .bias_scale = options & 8 ? (float)(0.5 * log2e) : 0.5f};
    for (int64_t j = 0; j < n; j++) {
        bias[j] = random_bias(r);
        logits[j] = random_dot(r, a.bias && bias[j] == -INFINITY);
        const rule c = {.scale = (double)a.scale,
                        .cap = (double)a.cap,
                        .slope = (double)a.slope,
                        .ahead = (double)j - (double)a.behind,
                        .bias = (double)bias[j],
                        .bias_scale = (double)a.bias_scale,
                        .biased = a.bias != NULL};
        want[j] = apply(c, (double)logits[j], &bound[j]);
    }
    guarded_freeze(SLOT_B);
    isa->table->row_adjust_f32(&a);
    guards_intact();
    expect_close("logits", logits, want, bound, n);
    tally(isa->id, 1);
}

void check_row_adjust_f32(const test_isa *isa)
{
    rng r = rng_make("row_adjust_f32");
    for (int64_t n = 0; n <= LENGTHS; n++)
        for (int options = 0; options < 16; options++)
            if (options == n % 16 || effort_takes(n * 16 + options))
                check_row(isa, &r, n, options, (int)((n + options) % PLACES));
}

/* A tile's arguments in guarded memory, the numbers of each row at random. */
static qkv_tile_adjust_args tile_args(const qkv_kernels *k, rng *r, int64_t n_rows, int64_t kv_len,
                                      int options, int place)
{
    const int64_t rows = k->tile_rows;
    float *numbers = guarded(SLOT_C, 3 * rows, place), *max = guarded(SLOT_E, rows, place);
    int32_t *ranges = guarded_bytes(SLOT_D, (size_t)(2 * rows) * sizeof *ranges, place);
    memset(numbers, 0, (size_t)(3 * rows) * sizeof *numbers);
    memset(max, 0, (size_t)rows * sizeof *max);
    memset(ranges, 0, (size_t)(2 * rows) * sizeof *ranges);
    for (int64_t i = 0; i < n_rows; i++) {
        numbers[i] = rng_normal(r);
        numbers[rows + i] = 0.3f * rng_normal(r);
        numbers[2 * rows + i] = (float)rng_int(r, -200, 200);
        max[i] = rng_int(r, 0, 1) ? -FLT_MAX : rng_normal(r);
        ranges[i] = (int32_t)rng_int(r, 0, kv_len);
        ranges[rows + i] = (int32_t)rng_int(r, ranges[i], kv_len);
    }
    return (qkv_tile_adjust_args){
        .scale = numbers,
        .slope = options & 2 ? numbers + rows : NULL,
        .behind = options & 2 ? numbers + 2 * rows : NULL,
        .max = max,
        .begin = options & 4 ? ranges : NULL,
        .end = options & 4 ? ranges + rows : NULL,
        .sinks = options & 4 ? (int32_t)rng_int(r, 0, kv_len / 2) : 0,
        .n_rows = n_rows,
        .kv_len = kv_len,
        .tile_rows = rows,
        .cap = options & 1 ? rng_uniform(r, 0.5f, 60.0f) : 0.0f,
        .bias_scale = (float)(0.5 * log2e),
        .bias = options & 8 ? guarded(SLOT_B, kv_len * rows, place) : NULL,
        .logits = guarded(SLOT_A, kv_len * rows, place),
    };
}

static bool tile_hides(const qkv_tile_adjust_args *a, int64_t i, int64_t j)
{
    return a->end && (j >= a->end[i] || (j < a->begin[i] && j >= a->sinks));
}

static void check_tile(const test_isa *isa, rng *r, int64_t n_rows, int64_t kv_len, int options,
                       int place)
{
    context("tile_adjust_f32 on %s: rows %lld, kv_len %lld, options %d, place %d", isa->name,
            (long long)n_rows, (long long)kv_len, options, place);
    qkv_tile_adjust_args a = tile_args(isa->table, r, n_rows, kv_len, options, place);
    const int64_t rows = a.tile_rows;
    double *want = doubles(0, kv_len * rows), *bound = doubles(1, kv_len * rows);
    float before[QKV_TILE_ROWS_MAX];
    memcpy(before, a.max, (size_t)rows * sizeof *before);
    for (int64_t j = 0; j < kv_len; j++) {
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = j * rows + i;
            float bias = i < n_rows ? random_bias(r) : 0.0f;
            if (a.bias)
                ((float *)(uintptr_t)a.bias)[at] = bias;
            const rule c = {.scale = (double)a.scale[i],
                            .cap = (double)a.cap,
                            .slope = a.slope ? (double)a.slope[i] : 0.0,
                            .ahead = (double)j - (a.slope ? (double)a.behind[i] : 0.0),
                            .bias = (double)bias,
                            .bias_scale = (double)a.bias_scale,
                            .biased = a.bias != NULL,
                            .hidden = tile_hides(&a, i, j)};
            const bool hidden = c.hidden || (c.biased && bias == -INFINITY);
            a.logits[at] = i < n_rows ? random_dot(r, hidden) : 0.0f;
            want[at] = apply(c, (double)a.logits[at], &bound[at]);
        }
    }
    for (int slot = SLOT_B; slot <= SLOT_D; slot++)
        guarded_freeze(slot);
    isa->table->tile_adjust_f32(&a);
    guards_intact();
    for (int64_t j = 0; j < kv_len; j++)
        expect_close("logits of a key", a.logits + j * rows, want + j * rows, bound + j * rows,
                     n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        float max = before[i];
        for (int64_t j = 0; j < kv_len; j++)
            max = fmaxf(max, a.logits[j * rows + i]);
        if (a.max[i] != max)
            fail_with("the maximum of row %lld is %.9g, expected %.9g", (long long)i,
                      (double)a.max[i], (double)max);
    }
    tally(isa->id, 1);
}

void check_tile_adjust_f32(const test_isa *isa)
{
    rng r = rng_make("tile_adjust_f32");
    const qkv_kernels *k = isa->table;
    for (int64_t n_rows = 1; n_rows <= k->tile_rows; n_rows++)
        for (int options = 0; options < 16; options++)
            if (options == n_rows % 16 || effort_takes(n_rows * 16 + options))
                for (int place = PLACE_AT_END; place <= PLACE_AT_START; place++)
                    check_tile(isa, &r, n_rows, rng_int(&r, 1, 20), options, place);
    check_tile(isa, &r, k->tile_rows, k->key_block, 15, PLACE_AT_END);
}

/* ------------------------------------------------------------ step, halves */

/* Two equal sets of what a step changes. */
typedef struct halves {
    qkv_tile_step_args whole, half;
    int64_t out_floats;
} halves;

static halves make_halves(const qkv_kernels *k, rng *r, int64_t n_rows, int64_t kv_len, int64_t dim,
                          int64_t value_dim, int place)
{
    const int64_t rows = k->tile_rows, panel = k->value_panel;
    const int64_t columns = (value_dim + panel - 1) / panel * panel;
    float *query = guarded(SLOT_A, dim * rows, place);
    float *keys = guarded(SLOT_B, kv_len * dim, place);
    float *packed = guarded(SLOT_C, kv_len * columns, place);
    memset(query, 0, (size_t)(dim * rows) * sizeof *query);
    for (int64_t d = 0; d < dim; d++)
        fill_normal(r, query + d * rows, n_rows, 1.0f);
    fill_normal(r, keys, kv_len * dim, 1.0f);
    fill_normal(r, packed, kv_len * columns, 1.0f);
    halves h = {.out_floats = (columns + 2) * rows};
    qkv_tile_step_args *sets[] = {&h.whole, &h.half};
    for (int i = 0; i < 2; i++) {
        float *out = guarded(SLOT_D + 2 * i, h.out_floats, place);
        for (int64_t j = 0; j < h.out_floats; j++)
            out[j] = j < columns * rows         ? 0.25f * (float)(j % 7)
                     : j < (columns + 1) * rows ? -3.0f
                                                : 2.0f;
        *sets[i] = (qkv_tile_step_args){
            .query = query,
            .keys = keys,
            .values = packed,
            .logits = guarded(SLOT_E + 2 * i, kv_len * rows, place),
            .out = out,
            .max = out + columns * rows,
            .sum = out + (columns + 1) * rows,
            .keys_stride = dim,
            .values_keys = kv_len,
            .n_rows = n_rows,
            .kv_len = kv_len,
            .head_dim = dim,
            .value_dim = value_dim,
            .scale_log2 = 0.4f,
        };
    }
    return h;
}

/* Both halves, with the maximum taken in between, are the step bit for bit. */
static void check_halves(const test_isa *isa, rng *r, int64_t n_rows, int64_t kv_len, int64_t dim,
                         int64_t value_dim, int place)
{
    context("tile_logits_f32, tile_weigh_f32 on %s: rows %lld, kv_len %lld, dims %lld, %lld, "
            "place %d",
            isa->name, (long long)n_rows, (long long)kv_len, (long long)dim, (long long)value_dim,
            place);
    const qkv_kernels *k = isa->table;
    halves h = make_halves(k, r, n_rows, kv_len, dim, value_dim, place);
    for (int slot = SLOT_A; slot <= SLOT_C; slot++)
        guarded_freeze(slot);
    k->tile_step_f32(&h.whole);
    k->tile_logits_f32(&h.half);
    float max[QKV_TILE_ROWS_MAX] = {0};
    for (int64_t i = 0; i < n_rows; i++) {
        max[i] = h.half.max[i];
        for (int64_t j = 0; j < kv_len; j++)
            max[i] = fmaxf(max[i], h.half.logits[j * k->tile_rows + i]);
    }
    k->tile_weigh_f32(&h.half, max);
    guards_intact();
    for (int64_t line = 0; line < h.out_floats / k->tile_rows; line++)
        expect_same_bits("out, maximum and sum", h.half.out + line * k->tile_rows,
                         h.whole.out + line * k->tile_rows, n_rows);
    tally(isa->id, 1);
}

static void check_all_halves(const test_isa *isa, const char *name)
{
    rng r = rng_make(name);
    for (int64_t n_rows = 1; n_rows <= isa->table->tile_rows; n_rows++)
        for (int64_t i = effort_cases(8); i > 0; i--)
            check_halves(isa, &r, n_rows, rng_int(&r, 1, 40), rng_int(&r, 1, 40),
                         rng_int(&r, 1, 40), (int)((n_rows + i) % 2));
    check_halves(isa, &r, isa->table->tile_rows, isa->table->key_block, 64, 64, PLACE_AT_END);
}

void check_tile_logits_f32(const test_isa *isa)
{
    check_all_halves(isa, "tile_logits_f32");
}

void check_tile_weigh_f32(const test_isa *isa)
{
    check_all_halves(isa, "tile_weigh_f32");
}
