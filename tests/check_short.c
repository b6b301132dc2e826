/* SPDX-License-Identifier: MIT */
#include "checks.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { SLOT_Q, SLOT_K, SLOT_V, SLOT_OUT, SLOT_STATES, SLOT_AGAIN };
enum { WANT, BOUND, Q64, K64, V64 };
enum { ROWS = 16, KEYS = QKV_SHORT_KEYS };

typedef struct short_case {
    int64_t rows, keys, head_dim, value_dim, pad;
    bool ends, in_place;
    int place;
    float scale, spread; /* of the queries */
} short_case;

/* A case's arguments, which point into its own arrays. */
typedef struct short_data {
    const float *queries[ROWS], *keys[KEYS], *values[KEYS];
    float *out[ROWS];
    int32_t ends[ROWS];
    qkv_row_state *states;
    qkv_short_args args;
} short_data;

static const double *to_doubles(int slot, const float *x, int64_t n)
{
    double *wide = doubles(slot, n);
    for (int64_t i = 0; i < n; i++)
        wide[i] = (double)x[i];
    return wide;
}

/* What a row must become, alone with the keys that it sees. */
static void check_row(const short_data *x, const short_case *c, int64_t row, const float *query)
{
    const int64_t end = c->ends ? x->ends[row] : c->keys;
    double *want = doubles(WANT, c->value_dim), *bound = doubles(BOUND, c->value_dim);
    double lse = -HUGE_VAL, lse_bound = 0.0;
    double *k = doubles(K64, end * c->head_dim), *v = doubles(V64, end * c->value_dim);
    for (int64_t j = 0; j < end; j++) {
        for (int64_t d = 0; d < c->head_dim; d++)
            k[j * c->head_dim + d] = (double)x->keys[j][d];
        for (int64_t d = 0; d < c->value_dim; d++)
            v[j * c->value_dim + d] = (double)x->values[j][d];
    }
    if (end > 0)
        oracle_attention_run(&(oracle_attention){.batch = 1,
                                                 .q_heads = 1,
                                                 .kv_heads = 1,
                                                 .q_len = 1,
                                                 .kv_len = end,
                                                 .head_dim = c->head_dim,
                                                 .value_dim = c->value_dim,
                                                 .scale = (double)c->scale,
                                                 .q = to_doubles(Q64, query, c->head_dim),
                                                 .k = k,
                                                 .v = v,
                                                 .out = want,
                                                 .out_bound = bound,
                                                 .lse = &lse,
                                                 .lse_bound = &lse_bound});
    expect_close("output", x->out[row], want, bound, c->value_dim);
    const qkv_row_state state = x->states[row];
    if (end == 0 && (state.max != -FLT_MAX || state.sum != 0.0f))
        fail_with("a row without keys has the state %.9g, %.9g", (double)state.max,
                  (double)state.sum);
    const double got = (double)state.max * 0x1.62e42fefa39efp-1 + log((double)state.sum);
    if (end > 0 && !(fabs(got - lse) <= lse_bound))
        fail_with("row %lld: the log-sum-exp is %.17g, expected %.17g within %.3g", (long long)row,
                  got, lse, lse_bound);
}

/* The same row by itself has the same bits. */
static void check_alone(const test_isa *isa, const short_data *x, const short_case *c, int64_t row,
                        const float *query)
{
    float *again = guarded(SLOT_AGAIN, c->value_dim, PLACE_AT_END);
    qkv_row_state state;
    qkv_short_args alone = x->args;
    alone.rows = 1;
    alone.queries = &query;
    alone.out = &again;
    alone.states = &state;
    alone.ends = c->ends ? x->ends + row : NULL;
    isa->table->short_f32(&alone);
    guards_intact();
    expect_same_bits("a row alone", again, x->out[row], c->value_dim);
    expect_same_bits("its sum", &state.sum, &x->states[row].sum, 1);
}

/* Ends that do not fall, now and then for two rows the same. */
static void choose_ends(rng *r, const short_case *c, short_data *x)
{
    int64_t end = rng_int(r, 0, c->keys);
    for (int64_t i = 0; i < c->rows; i++) {
        x->ends[i] = (int32_t)end;
        end = rng_int(r, 0, 1) ? end : rng_int(r, end, c->keys);
    }
}

static void check_case(const test_isa *isa, rng *r, short_case c)
{
    context("short_f32 on %s: rows %lld, keys %lld, head_dim %lld, value_dim %lld, pad %lld, "
            "ends %d, in place %d, place %d",
            isa->name, (long long)c.rows, (long long)c.keys, (long long)c.head_dim,
            (long long)c.value_dim, (long long)c.pad, c.ends, c.in_place, c.place);
    const int64_t qk = c.head_dim + c.pad, vo = c.value_dim + c.pad;
    short_data x;
    float *q = guarded(SLOT_Q, (c.rows - 1) * qk + c.head_dim, c.place);
    float *k = guarded(SLOT_K, (c.keys - 1) * qk + c.head_dim, (c.place + 3) % PLACES);
    float *v = guarded(SLOT_V, (c.keys - 1) * vo + c.value_dim, (c.place + 6) % PLACES);
    float *out = guarded(SLOT_OUT, (c.rows - 1) * vo + c.value_dim, c.place);
    static float queries[ROWS * 320];
    choose_ends(r, &c, &x);
    x.states = guarded_bytes(SLOT_STATES, (size_t)c.rows * sizeof *x.states, PLACE_AT_END);
    for (int64_t i = 0; i < c.rows; i++) {
        fill_normal(r, q + i * qk, c.head_dim, c.spread);
        memcpy(queries + i * c.head_dim, q + i * qk, (size_t)c.head_dim * sizeof *q);
        x.queries[i] = q + i * qk;
        x.out[i] = c.in_place ? q + i * qk : out + i * vo;
    }
    for (int64_t j = 0; j < c.keys; j++) {
        x.keys[j] = k + j * qk;
        x.values[j] = v + j * vo;
        if (c.ends && j >= x.ends[c.rows - 1])
            continue; /* nobody sees it: it stays NaN */
        fill_normal(r, k + j * qk, c.head_dim, 1.0f);
        fill_normal(r, v + j * vo, c.value_dim, 1.0f);
    }
    x.args = (qkv_short_args){.queries = x.queries,
                              .keys = x.keys,
                              .values = x.values,
                              .out = x.out,
                              .ends = c.ends ? x.ends : NULL,
                              .states = x.states,
                              .rows = c.rows,
                              .kv_len = c.keys,
                              .head_dim = c.head_dim,
                              .value_dim = c.value_dim,
                              .scale_log2 = (float)((double)c.scale * 0x1.71547652b82fep+0)};
    if (!c.in_place)
        guarded_freeze(SLOT_Q);
    guarded_freeze(SLOT_K);
    guarded_freeze(SLOT_V);
    isa->table->short_f32(&x.args);
    guards_intact();
    if (!c.in_place)
        gaps_intact("outputs", out, c.rows, vo, c.value_dim);
    for (int64_t i = 0; i < c.rows; i++) {
        check_row(&x, &c, i, queries + i * c.head_dim);
        check_alone(isa, &x, &c, i, queries + i * c.head_dim);
    }
    tally(isa->id, 1);
}

/* What is odd in one key reaches the rows that see it and no other; a row that sees
 * one key returns its value. */
static void check_special(const test_isa *isa, int64_t rows, int64_t odd_key)
{
    enum { DIM = 11, COUNT = 13 };
    float one[DIM], value[COUNT][DIM], odd[DIM], first[ROWS][DIM];
    const float specials[] = {NAN, INFINITY, -INFINITY};
    short_data x;
    qkv_row_state states[ROWS];
    for (int d = 0; d < DIM; d++)
        one[d] = 1.0f;
    for (int64_t i = 0; i < rows; i++) {
        x.queries[i] = one;
        x.out[i] = first[i];
        x.ends[i] = (int32_t)(i + 1);
    }
    for (int kind = 0; kind < 6; kind++) {
        context("short_f32 on %s: %g in a %s, %lld rows, key %lld", isa->name,
                (double)specials[kind % 3], kind < 3 ? "key" : "value", (long long)rows,
                (long long)odd_key);
        for (int64_t j = 0; j < COUNT; j++) {
            for (int d = 0; d < DIM; d++)
                value[j][d] = (float)(j + d);
            x.keys[j] = one;
            x.values[j] = value[j];
        }
        memcpy(odd, kind < 3 ? one : value[odd_key], sizeof odd);
        odd[7] = specials[kind % 3];
        *(kind < 3 ? &x.keys[odd_key] : &x.values[odd_key]) = odd;
        isa->table->short_f32(&(qkv_short_args){.queries = x.queries,
                                                .keys = x.keys,
                                                .values = x.values,
                                                .out = x.out,
                                                .ends = x.ends,
                                                .states = states,
                                                .rows = rows,
                                                .kv_len = COUNT,
                                                .head_dim = DIM,
                                                .value_dim = DIM,
                                                .scale_log2 = 0.5f});
        for (int64_t i = 0; i < rows; i++)
            for (int d = 0; d < DIM; d++) {
                const bool sees = i >= odd_key, hidden_logit = kind == 2 && odd_key < i;
                const float got = first[i][d];
                if (!sees && fabsf(got - ((float)i * 0.5f + (float)d)) > 1e-4f)
                    fail_with("row %lld sees what it must not: %g", (long long)i, (double)got);
                if (sees && kind < 2 && !isnan(got))
                    fail_with("row %lld is %g, not NaN", (long long)i, (double)got);
                if (hidden_logit && !isfinite(got))
                    fail_with("row %lld, weight 0: %g", (long long)i, (double)got);
                if (sees && kind >= 3 && (d == 7) == isfinite(got))
                    fail_with("row %lld, column %d is %g", (long long)i, d, (double)got);
            }
        if (odd_key > 0)
            expect_same_bits("the only value", first[0], value[0], DIM);
        else if (kind == 2 && (states[0].sum != 0.0f || first[0][3] != 0.0f))
            fail_with("a row of -infinity is %g", (double)first[0][3]);
        tally(isa->id, 1);
    }
}

void check_short_f32(const test_isa *isa)
{
    rng r = rng_make("short_f32");
    for (int64_t keys = 1; keys <= KEYS; keys++)
        for (int64_t rows = 1; rows <= 5; rows++) {
            if (!effort_takes(keys + rows))
                continue;
            const int64_t dim = rng_int(&r, 1, 80);
            check_case(isa, &r,
                       (short_case){.rows = rows,
                                    .keys = keys,
                                    .head_dim = dim,
                                    .value_dim = dim,
                                    .pad = rng_int(&r, 0, 3),
                                    .ends = rng_int(&r, 0, 1),
                                    .in_place = rng_int(&r, 0, 1),
                                    .place = (int)rng_int(&r, 0, PLACES - 1),
                                    .scale = 0.125f,
                                    .spread = 1.0f});
        }
    for (int64_t i = effort_cases(400); i > 0; i--)
        check_case(isa, &r,
                   (short_case){.rows = rng_int(&r, 1, ROWS),
                                .keys = rng_int(&r, 1, KEYS),
                                .head_dim = rng_int(&r, 1, 320),
                                .value_dim = rng_int(&r, 1, 320),
                                .pad = rng_int(&r, 0, 9),
                                .ends = i % 2,
                                .place = (int)rng_int(&r, 0, PLACES - 1),
                                .scale = i % 3 ? 0.125f : -1.0f,
                                .spread = i % 5 ? 1.0f : 30.0f});
    for (int64_t rows = 1; rows <= 6; rows++)
        for (int64_t odd = 0; odd < rows; odd++)
            check_special(isa, rows, odd);
}
