/* SPDX-License-Identifier: MIT */
/* qkv_dot(), qkv_scale_softmax() and qkv_weighted_sum() against the oracle. */
#include "problem.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_A, SLOT_B, SLOT_C, SLOT_D };
enum { WANT, BOUND, WANT_LSE, BOUND_LSE };

static float *matrix(int slot, rng *r, int64_t rows, int64_t stride, int64_t cols, int place,
                     float sigma)
{
    float *m = guarded(slot, rows && cols ? (rows - 1) * stride + cols : 0, place);
    if (r)
        for (int64_t i = 0; i < rows; i++)
            fill_normal(r, m + i * stride, cols, sigma);
    return m;
}

static void check_dot(rng *r, int64_t rows, int64_t keys, int64_t dim, int64_t pad, int place)
{
    const int64_t q_stride = pad == 5 ? 0 : dim + pad, k_stride = pad == 6 ? 0 : dim + pad;
    const int64_t s_stride = keys + pad;
    context("qkv_dot: rows %lld, keys %lld, dim %lld, pad %lld, place %d", (long long)rows,
            (long long)keys, (long long)dim, (long long)pad, place);
    const float *q = matrix(SLOT_A, r, rows, q_stride, dim, place, 1.0f);
    const float *k = matrix(SLOT_B, r, keys, k_stride, dim, place, 1.0f);
    float *s = matrix(SLOT_C, NULL, rows, s_stride, keys, place, 1.0f);
    double *want = doubles(WANT, rows * keys), *bound = doubles(BOUND, rows * keys);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < keys; j++)
            want[i * keys + j] =
                oracle_dot(q + i * q_stride, k + j * k_stride, dim, &bound[i * keys + j], NULL);
    for_each_isa(isa)
    {
        canary_fill(s, rows && keys ? (rows - 1) * s_stride + keys : 0);
        cr_assert_eq(qkv_dot(q, q_stride, k, k_stride, s, s_stride, rows, keys, dim), QKV_OK);
        guards_intact();
        gaps_intact("scores", s, rows, s_stride, keys);
        expect_close_rows(qkv_isa_name(), s, s_stride, want, bound, rows, keys);
        tally(isa, 1);
    }
}

Test(steps, dot)
{
    rng r = rng_make("steps dot");
    for (int64_t dim = 0; dim <= 131; dim++)
        if (effort_takes(dim))
            check_dot(&r, 3, 5, dim, dim % 7, (int)(dim % PLACES));
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_dot(&r, rng_int(&r, 0, 20), rng_int(&r, 0, 50), rng_int(&r, 0, i % 8 ? 300 : 13000),
                  rng_int(&r, 0, 6), (int)rng_int(&r, 0, PLACES - 1));
}

static void check_softmax(rng *r, int64_t rows, int64_t n, int64_t pad, int place, bool in_place,
                          float scale, float sigma)
{
    const int64_t in_stride = n + pad, out_stride = in_place ? in_stride : n + 3;
    context("qkv_scale_softmax: rows %lld, n %lld, pad %lld, place %d, in place %d, scale %g",
            (long long)rows, (long long)n, (long long)pad, place, in_place, (double)scale);
    float *in = matrix(SLOT_A, r, rows, in_stride, n, place, sigma);
    float *out = in_place ? in : matrix(SLOT_B, NULL, rows, out_stride, n, place, 1.0f);
    float *lse = guarded(SLOT_C, rows, place);
    const int64_t extent = rows && n ? (rows - 1) * in_stride + n : 0;
    if (n && rows > 1 && pad % 2) /* a row that is all masked, one with a masked score */
        for (int64_t j = 0; j < n; j++)
            in[in_stride + j] = -INFINITY;
    if (n > 1 && rows > 2)
        in[2 * in_stride] = -INFINITY;

    double *want = doubles(WANT, rows * n), *bound = doubles(BOUND, rows * n);
    double *want_lse = doubles(WANT_LSE, rows), *lse_bound = doubles(BOUND_LSE, rows);
    for (int64_t i = 0; i < rows; i++)
        oracle_softmax(in + i * in_stride, n, scale, want + i * n, bound + i * n, want_lse + i,
                       lse_bound + i);
    float *saved = malloc((size_t)(extent + 1) * sizeof *saved);
    memcpy(saved, in, (size_t)extent * sizeof *saved);
    for_each_isa(isa)
    {
        memcpy(in, saved, (size_t)extent * sizeof *saved);
        canary_fill(lse, rows);
        if (!in_place)
            canary_fill(out, rows && n ? (rows - 1) * out_stride + n : 0);
        cr_assert_eq(qkv_scale_softmax(in, in_stride, out, out_stride, lse, rows, n, scale),
                     QKV_OK);
        guards_intact();
        gaps_intact("weights", out, rows, out_stride, n);
        expect_close_rows(qkv_isa_name(), out, out_stride, want, bound, rows, n);
        expect_close("lse", lse, want_lse, lse_bound, rows);
        tally(isa, 1);
    }
    free(saved);
}

Test(steps, scale_softmax)
{
    rng r = rng_make("steps softmax");
    for (int64_t n = 0; n <= 131; n++)
        if (effort_takes(n))
            check_softmax(&r, 3, n, n % 5, (int)(n % PLACES), n % 2, 0.5f, 4.0f);
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_softmax(&r, rng_int(&r, 0, 9), rng_int(&r, 0, i % 8 ? 300 : 6000), rng_int(&r, 0, 6),
                      (int)rng_int(&r, 0, PLACES - 1), i % 3 == 0,
                      i % 7 ? rng_uniform(&r, -2.0f, 2.0f) : 0.0f, i % 5 ? 3.0f : 300.0f);
}

/* A row of -infinity of any length: zeros, and the log-sum-exp -infinity. */
Test(steps, masked_rows)
{
    for_each_isa(isa)
    {
        for (int64_t n = 0; n <= 300; n++) {
            context("%s: n %lld", qkv_isa_name(), (long long)n);
            float *scores = guarded(SLOT_A, n, PLACE_AT_END);
            float lse = 0;
            for (int64_t j = 0; j < n; j++)
                scores[j] = -INFINITY;
            cr_assert_eq(qkv_scale_softmax(scores, n, scores, n, &lse, 1, n, 0.25f), QKV_OK);
            for (int64_t j = 0; j < n; j++)
                if (scores[j] != 0.0f)
                    fail_with("weight %lld is %.9g", (long long)j, (double)scores[j]);
            if (lse != -INFINITY)
                fail_with("log-sum-exp %.9g", (double)lse);
            tally(isa, 1);
        }
    }
}

/* +infinity and NaN at every index, and two of the former: the row is NaN. */
Test(steps, infinite_scores)
{
    for_each_isa(isa)
    {
        for (int n = 1; n <= 40; n++) {
            for (int at = 0; at < n; at++) {
                for (int kind = 0; kind < 3; kind++) {
                    float scores[2][40], lse[2];
                    for (int j = 0; j < n; j++)
                        scores[0][j] = scores[1][j] = 0.5f * (float)(j % 9) - 1.0f;
                    scores[0][at] = kind == 2 ? NAN : INFINITY;
                    if (kind == 1)
                        scores[0][n - 1 - at] = INFINITY;
                    cr_assert_eq(qkv_scale_softmax(scores[0], 40, scores[0], 40, lse, 2, n, 1.0f),
                                 QKV_OK);
                    context("%s: n %d, at %d", qkv_isa_name(), n, at);
                    for (int j = 0; j < n; j++)
                        if (!isnan(scores[0][j]) || isnan(scores[1][j]))
                            fail_with("weight %d is %.9g", j, (double)scores[0][j]);
                    if (!isnan(lse[0]) || isnan(lse[1]))
                        fail_with("log-sum-exp %.9g", (double)lse[0]);
                    tally(isa, 1);
                }
            }
        }
    }
}

static void check_weighted_sum(rng *r, int64_t rows, int64_t keys, int64_t dim, int64_t pad,
                               int place)
{
    const int64_t w_stride = pad == 5 ? 0 : keys + pad, v_stride = pad == 6 ? 0 : dim + pad;
    const int64_t o_stride = dim + pad;
    context("qkv_weighted_sum: rows %lld, keys %lld, dim %lld, pad %lld, place %d", (long long)rows,
            (long long)keys, (long long)dim, (long long)pad, place);
    const float *w = matrix(SLOT_A, r, rows, w_stride, keys, place, 1.0f);
    float *v = matrix(SLOT_B, r, keys, v_stride, dim, place, 1.0f);
    float *o = matrix(SLOT_C, NULL, rows, o_stride, dim, place, 1.0f);
    double *want = doubles(WANT, rows * dim), *bound = doubles(BOUND, rows * dim);
    for (int64_t i = 0; i < rows; i++)
        oracle_weighted_sum(w + i * w_stride, v, v_stride, keys, dim, want + i * dim,
                            bound + i * dim);
    for_each_isa(isa)
    {
        canary_fill(o, rows && dim ? (rows - 1) * o_stride + dim : 0);
        cr_assert_eq(qkv_weighted_sum(w, w_stride, v, v_stride, o, o_stride, rows, keys, dim),
                     QKV_OK);
        guards_intact();
        gaps_intact("out", o, rows, o_stride, dim);
        expect_close_rows(qkv_isa_name(), o, o_stride, want, bound, rows, dim);
        tally(isa, 1);
    }
}

Test(steps, weighted_sum)
{
    rng r = rng_make("steps sum");
    for (int64_t dim = 0; dim <= 131; dim++)
        if (effort_takes(dim))
            check_weighted_sum(&r, 3, dim % 11, dim, dim % 7, (int)(dim % PLACES));
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_weighted_sum(&r, rng_int(&r, 0, 20), rng_int(&r, 0, i % 8 ? 300 : 5000),
                           rng_int(&r, 0, 150), rng_int(&r, 0, 6), (int)rng_int(&r, 0, PLACES - 1));
}

/* A weight of 0 has no say even where its value is NaN, in any block. */
Test(steps, zero_weights)
{
    enum { KEYS = 1100, DIM = 11 };
    static float w[9][KEYS], v[KEYS][DIM], out[9][DIM];
    for_each_isa(isa)
    {
        for (int at = 0; at < KEYS; at += 73) {
            for (int i = 0; i < 9; i++)
                for (int j = 0; j < KEYS; j++)
                    w[i][j] = j == at ? (i == 4 ? 1.0f : i % 2 ? 0.0f : -0.0f) : 1.0f;
            for (int j = 0; j < KEYS; j++)
                for (int d = 0; d < DIM; d++)
                    v[j][d] = j == at ? (d % 2 ? NAN : INFINITY) : 1.0f;
            cr_assert_eq(qkv_weighted_sum(w[0], KEYS, v[0], DIM, out[0], DIM, 9, KEYS, DIM),
                         QKV_OK);
            context("%s: NaN and infinity behind weight %d", qkv_isa_name(), at);
            for (int i = 0; i < 9; i++) {
                for (int d = 0; d < DIM; d++) {
                    const float want = i != 4 ? KEYS - 1 : d % 2 ? NAN : INFINITY;
                    expect_same_values("out", &out[i][d], &want, 1);
                }
            }
            tally(isa, 1);
        }
    }
}

/*
 * The three steps one after the other are the fused call: both are within
 * its bound of the exact result, so they differ by two bounds at most.
 */
Test(steps, agree_with_the_fused_call)
{
    rng r = rng_make("steps fused");
    for (int64_t i = effort_cases(60); i > 0; i--) {
        shape s = {.batch = 1,
                   .q_heads = 1,
                   .kv_heads = 1,
                   .q_len = rng_int(&r, 1, 40),
                   .kv_len = rng_int(&r, 1, 200),
                   .head_dim = rng_int(&r, 1, 70),
                   .value_dim = rng_int(&r, 1, 70),
                   .scale = 0.25f};
        problem p = problem_make(s, &r);
        problem_check(&p); /* against the oracle; leaves want and bound behind */
        double *want = doubles(SLOTS - 1, s.q_len * s.value_dim);
        double *bound = doubles(SLOTS - 2, s.q_len * s.value_dim);
        const oracle_attention o = {.batch = 1,
                                    .q_heads = 1,
                                    .kv_heads = 1,
                                    .q_len = s.q_len,
                                    .kv_len = s.kv_len,
                                    .head_dim = s.head_dim,
                                    .value_dim = s.value_dim,
                                    .scale = 0.25,
                                    .q = tensor_doubles(&p.query, SLOTS - 3),
                                    .k = tensor_doubles(&p.key, SLOTS - 4),
                                    .v = tensor_doubles(&p.value, SLOTS - 5),
                                    .out = want,
                                    .out_bound = bound};
        oracle_attention_run(&o);
        float *scores = guarded(SLOT_FREE, s.q_len * s.kv_len, PLACE_AT_END);
        for_each_isa(isa)
        {
            cr_assert_eq(qkv_dot(p.query.data, s.head_dim, p.key.data, s.head_dim, scores, s.kv_len,
                                 s.q_len, s.kv_len, s.head_dim),
                         QKV_OK);
            cr_assert_eq(qkv_scale_softmax(scores, s.kv_len, scores, s.kv_len, NULL, s.q_len,
                                           s.kv_len, 0.25f),
                         QKV_OK);
            cr_assert_eq(qkv_weighted_sum(scores, s.kv_len, p.value.data, s.value_dim, p.out.data,
                                          s.value_dim, s.q_len, s.kv_len, s.value_dim),
                         QKV_OK);
            context("the steps on %s: q_len %lld, kv_len %lld, head_dim %lld", qkv_isa_name(),
                    (long long)s.q_len, (long long)s.kv_len, (long long)s.head_dim);
            expect_close("out", p.out.data, want, bound, s.q_len * s.value_dim);
            tally(isa, 1);
        }
    }
}
