/* SPDX-License-Identifier: MIT */
#include "checks.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { SLOT_IN, SLOT_OUT, SLOT_STATE };
enum { WANT, BOUND };
enum { LONGEST = 100000 };

/* ------------------------------------------------------- scale_softmax */

static void check_sum(const float *weights, int64_t n)
{
    double sum = 0;
    for (int64_t j = 0; j < n; j++)
        sum += (double)weights[j];
    const double blocks = (double)((n + QKV_KEY_BLOCK - 1) / QKV_KEY_BLOCK);
    if (!(fabs(sum - 1.0) <= (QKV_KEY_BLOCK + blocks + 16) * ORACLE_U))
        fail_with("the weights sum to %.17g", sum);
}

static void check_state(const float *scores, int64_t n, float scale, qkv_row_state state)
{
    double max = -HUGE_VAL, sum = 0, largest = 0;
    for (int64_t j = 0; j < n; j++) {
        const double s = (double)scores[j] * (double)scale;
        max = s > max ? s : max;
        largest = fmax(largest, fabs(s));
    }
    for (int64_t j = 0; j < n; j++)
        sum += exp((double)scores[j] * (double)scale - (double)state.max);
    const double blocks = (double)((n + QKV_KEY_BLOCK - 1) / QKV_KEY_BLOCK);
    const double relative =
        expm1(2 * ORACLE_U * largest) + (QKV_KEY_BLOCK + blocks + 16) * ORACLE_U;
    if (!(fabs((double)state.max - max) <= ORACLE_U * fabs(max) + ORACLE_TINY))
        fail_with("the maximum is %.9g, expected %.17g", (double)state.max, max);
    if (!(fabs((double)state.sum - sum) <= relative * sum))
        fail_with("the sum is %.9g, expected %.17g within %.3g", (double)state.sum, sum,
                  relative * sum);
}

/* The row at one place; the result is left in SLOT_OUT. */
static const float *softmax_at(const test_isa *isa, const float *scores, int64_t n, float scale,
                               int place, bool in_place, qkv_row_state *state)
{
    float *in = guarded(SLOT_IN, n, place);
    float *out = in_place ? in : guarded(SLOT_OUT, n, place ? 1 + (place + 8) % (PLACES - 1) : 0);
    memcpy(in, scores, (size_t)n * sizeof *in);
    if (!in_place)
        guarded_freeze(SLOT_IN);
    *state = isa->table->scale_softmax_f32(in, out, n, scale);
    guards_intact();
    return out;
}

static void check_row(const test_isa *isa, const float *scores, int64_t n, float scale, int place)
{
    context("scale_softmax_f32 on %s: n %lld, scale %.9g, place %d", isa->name, (long long)n,
            (double)scale, place);
    double *want = doubles(WANT, n), *bound = doubles(BOUND, n);
    oracle_softmax(scores, n, scale, want, bound, NULL, NULL);
    qkv_row_state state, again;
    const float *weights = softmax_at(isa, scores, n, scale, place, false, &state);
    expect_close("weights", weights, want, bound, n);
    check_sum(weights, n);
    check_state(scores, n, scale, state);

    static float copy[LONGEST];
    memcpy(copy, weights, (size_t)n * sizeof *copy);
    const float *other = softmax_at(isa, scores, n, scale, (place + 1) % PLACES, true, &again);
    expect_same_bits("weights in place, at another place", other, copy, n);
    expect_same_bits("state", &again.max, &state.max, 1);
    expect_same_bits("state", &again.sum, &state.sum, 1);
    tally(isa->id, 2);
}

/* All -infinity: zeros and (-inf, 0), for every length alike. */
static void check_masked(const test_isa *isa)
{
    float scores[300];
    for (int j = 0; j < 300; j++)
        scores[j] = -INFINITY;
    for (int64_t n = 1; n <= 300; n++) {
        context("scale_softmax_f32 on %s: %lld of -infinity", isa->name, (long long)n);
        qkv_row_state state;
        const float *weights = softmax_at(isa, scores, n, 1.0f, (int)(n % PLACES), false, &state);
        for (int64_t j = 0; j < n; j++)
            if (weights[j] != 0.0f)
                fail_with("weight %lld is %.9g", (long long)j, (double)weights[j]);
        if (state.max != -INFINITY || state.sum != 0.0f)
            fail_with("the state is %.9g, %.9g", (double)state.max, (double)state.sum);
        tally(isa->id, 1);
    }
}

/* One odd score at every place of a row of ordinary ones. */
static void check_odd_one(const test_isa *isa, float odd, int64_t n)
{
    for (int64_t at = 0; at < n; at++) {
        float scores[64];
        context("scale_softmax_f32 on %s: %g at %lld of %lld", isa->name, (double)odd,
                (long long)at, (long long)n);
        for (int64_t j = 0; j < n; j++)
            scores[j] = j == at ? odd : 0.25f * (float)(j % 7);
        double want[64], bound[64];
        oracle_softmax(scores, n, 1.0f, want, bound, NULL, NULL);
        qkv_row_state state;
        const float *weights = softmax_at(isa, scores, n, 1.0f, (int)(at % PLACES), false, &state);
        expect_close("weights", weights, want, bound, n);
        tally(isa->id, 1);
    }
}

/* 1 / n rounded once: to nearest, or in a directed mode to either side of it. */
static bool is_quotient(float x, int64_t n)
{
    const float nearest = 1.0f / (float)n;
    return x == nearest || (ORACLE_U > 0x1p-24 && fabs((double)x * (double)n - 1.0) < ORACLE_U);
}

static void check_uniform(const test_isa *isa, float value, float scale)
{
    float scores[300];
    for (int j = 0; j < 300; j++)
        scores[j] = value;
    for (int64_t n = 1; n <= 300; n++) {
        context("scale_softmax_f32 on %s: %lld times %g, scale %g", isa->name, (long long)n,
                (double)value, (double)scale);
        qkv_row_state state;
        const float *weights = softmax_at(isa, scores, n, scale, 0, false, &state);
        for (int64_t j = 0; j < n; j++)
            if (!is_quotient(weights[j], n))
                fail_with("weight %lld is %.9g", (long long)j, (double)weights[j]);
        tally(isa->id, 1);
    }
}

/*
 * Large weights first and behind them many that are each a little less than
 * half an ulp of a large one: a sum that adds them one by one to a large one
 * loses them all. 'large' covers every lane and accumulator of a kernel.
 */
static void check_small_behind_large(const test_isa *isa, rng *r, int64_t n, int64_t large,
                                     float spread)
{
    static float scores[LONGEST];
    for (int64_t j = 0; j < n; j++)
        scores[j] = j < large ? 8.3f : -8.35f - rng_uniform(r, 0.0f, spread);
    check_row(isa, scores, n, 1.0f, 0);
}

void check_scale_softmax_f32(const test_isa *isa)
{
    rng r = rng_make("scale_softmax_f32");
    const float scales[] = {1.0f, 0.125f, -0.5f, 0.0f, 30.0f};
    float scores[4096];

    for (int64_t n = 1; n <= LENGTHS; n++) {
        for (int place = 0; place < PLACES; place++) {
            if (place > 1 && !effort_takes(n * 3 + place))
                continue;
            fill_normal(&r, scores, n, 3.0f);
            check_row(isa, scores, n, scales[(n + place) % 5], place);
        }
    }
    for (int64_t i = effort_cases(300); i > 0; i--) {
        const int64_t n = rng_int(&r, 1, i % 4 ? 700 : 4096);
        const float sigma = i % 3 ? 4.0f : 2000.0f;
        fill_normal(&r, scores, n, sigma);
        check_row(isa, scores, n, scales[i % 5], (int)rng_int(&r, 0, PLACES - 1));
    }
    for (int64_t n = 2; n <= 4096; n += n < 40 ? 1 : n / 3)
        for (int64_t large = 1; large <= 64; large *= 2)
            check_small_behind_large(isa, &r, n, large, 0.05f);
    /* Whole blocks of small ones, whose roundings do not average out. */
    check_small_behind_large(isa, &r, LONGEST, 8, 0.0f);

    check_masked(isa);
    const float odd[] = {NAN,     INFINITY, -INFINITY, 1e30f,  -1e30f,
                         FLT_MAX, -FLT_MAX, 88.0f,     -104.0f};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int64_t n = 1; n <= 64; n += 9)
            if (!(odd[i] == -INFINITY && n == 1))
                check_odd_one(isa, odd[i], n);
    check_uniform(isa, 5.0f, 1.0f);
    check_uniform(isa, -FLT_MAX, 1.0f);
    check_uniform(isa, -3e38f, 1.0f);
    check_uniform(isa, 3e38f, -1.0f);
    check_uniform(isa, 1e-40f, 1.0f);
}

/* -------------------------------------------------------- softmax_step */

/*
 * After a step with the maximum that it chose, every exponential, the factor
 * and the sum must be right for that maximum; and the maximum itself must be
 * the largest of t_j = scale_log2 * scores[j] and the one before, rounded.
 */
static void check_step_result(const float *before, const float *after, int64_t n, float scale_log2,
                              qkv_row_state old, qkv_row_state new, float factor)
{
    double max = (double)old.max, sum = 0, sum_error = 0;
    for (int64_t j = 0; j < n; j++)
        max = fmax(max, (double)before[j] * (double)scale_log2);
    if (!(fabs((double)new.max - max) <= ORACLE_U * fabs(max) + ORACLE_TINY))
        fail_with("the maximum is %.9g, expected %.17g", (double)new.max, max);

    for (int64_t j = 0; j < n; j++) {
        const double t = (double)before[j] * (double)scale_log2, x = t - (double)new.max;
        const double p = exp2(x);
        /* The product's and the difference's rounding, then exp2's 1 ulp. */
        const double error = oracle_exp2_error(p, ORACLE_U * (fabs(t) + fabs(x)));
        if (!(fabs((double)after[j] - p) <= error))
            fail_with("exponential %lld is %.9g, expected %.17g within %.3g", (long long)j,
                      (double)after[j], p, error);
        sum += p;
        sum_error += error;
    }

    const double x = (double)old.max - (double)new.max, r = exp2(x);
    const double r_error = oracle_exp2_error(r, ORACLE_U * fabs(x));
    if (!(fabs((double)factor - r) <= r_error))
        fail_with("the factor is %.9g, expected %.17g", (double)factor, r);
    sum += (double)old.sum * r;
    sum_error += (double)old.sum * r_error + (double)(n + 2) * ORACLE_U * sum;
    if (!(fabs((double)new.sum - sum) <= sum_error))
        fail_with("the sum is %.9g, expected %.17g within %.3g", (double)new.sum, sum, sum_error);
}

static void check_step(const test_isa *isa, const float *scores, int64_t n, float scale_log2,
                       qkv_row_state old, int place)
{
    context("softmax_step_f32 on %s: n %lld, scale_log2 %.9g, max %.9g, sum %.9g, place %d",
            isa->name, (long long)n, (double)scale_log2, (double)old.max, (double)old.sum, place);
    float first[QKV_KEY_BLOCK], factor = 0.0f;
    qkv_row_state first_state = old;
    for (int again = 0; again < 2; again++) {
        float *x = guarded(SLOT_IN, n, (place + 5 * again) % PLACES);
        qkv_row_state *state = guarded_bytes(SLOT_STATE, sizeof *state, PLACE_AT_END);
        memcpy(x, scores, (size_t)n * sizeof *x);
        *state = old;
        const float r = isa->table->softmax_step_f32(x, n, scale_log2, state);
        guards_intact();
        if (again) {
            expect_same_bits("exponentials at another place", x, first, n);
            expect_same_bits("factor", &r, &factor, 1);
            expect_same_bits("state", &state->max, &first_state.max, 1);
            expect_same_bits("state", &state->sum, &first_state.sum, 1);
        } else {
            check_step_result(scores, x, n, scale_log2, old, *state, r);
            memcpy(first, x, (size_t)n * sizeof *x);
            first_state = *state;
            factor = r;
        }
    }
    tally(isa->id, 1);
}

/* Blocks without a visible key before, between and after others. */
static void check_masked_blocks(const test_isa *isa)
{
    for (int64_t n = 1; n <= 300; n++) {
        context("softmax_step_f32 on %s: blocks of %lld of -infinity", isa->name, (long long)n);
        float *x = guarded(SLOT_IN, n, (int)(n % PLACES));
        qkv_row_state state = {.max = -FLT_MAX, .sum = 0.0f};
        for (int block = 0; block < 5; block++) {
            for (int64_t j = 0; j < n; j++)
                x[j] = block == 2 ? 3.0f : -INFINITY;
            isa->table->softmax_step_f32(x, n, 1.0f, &state);
            const float max = block < 2 ? -FLT_MAX : 3.0f, sum = block < 2 ? 0.0f : (float)n;
            if (state.max != max || state.sum != sum)
                fail_with("after block %d the state is %.9g, %.9g", block, (double)state.max,
                          (double)state.sum);
            for (int64_t j = 0; j < n; j++)
                if (x[j] != (block == 2 ? 1.0f : 0.0f))
                    fail_with("block %d: exponential %lld is %.9g", block, (long long)j,
                              (double)x[j]);
        }
        tally(isa->id, 1);
    }
}

static void check_step_specials(const test_isa *isa)
{
    for (int64_t at = 0; at < 37; at++) {
        float x[37];
        context("softmax_step_f32 on %s: a NaN or infinity at %lld", isa->name, (long long)at);
        for (int kind = 0; kind < 2; kind++) {
            qkv_row_state state = {.max = 1.0f, .sum = 2.0f};
            for (int64_t j = 0; j < 37; j++)
                x[j] = (float)(j % 5);
            x[at] = kind ? NAN : INFINITY;
            isa->table->softmax_step_f32(x, 37, 1.0f, &state);
            if (!isnan(state.sum))
                fail_with("the sum is %.9g, not NaN", (double)state.sum);
            if (!isnan(x[at]))
                fail_with("its exponential is %.9g, not NaN", (double)x[at]);
            tally(isa->id, 1);
        }
    }
}

void check_softmax_step_f32(const test_isa *isa)
{
    rng r = rng_make("softmax_step_f32");
    const float scales[] = {1.44269504f, 0.18033688f, -1.0f, 0.0f, 40.0f};
    float scores[QKV_KEY_BLOCK];
    for (int64_t i = 0; i < LENGTHS * 4 + effort_cases(400); i++) {
        const int64_t n = i < LENGTHS * 4 ? i / 4 + 1 : rng_int(&r, 1, QKV_KEY_BLOCK);
        if (!effort_takes(i))
            continue;
        fill_normal(&r, scores, n, i % 7 ? 3.0f : 500.0f);
        if (i % 5 == 0)
            scores[rng_int(&r, 0, n - 1)] = -INFINITY;
        const float scale_log2 = i % 5 ? scales[rng_int(&r, 0, 4)] : 1.0f;
        const qkv_row_state fresh = {.max = -FLT_MAX, .sum = 0.0f};
        const qkv_row_state running = {.max = rng_uniform(&r, -30.0f, 30.0f),
                                       .sum = rng_uniform(&r, 1.0f, 5000.0f)};
        check_step(isa, scores, n, scale_log2, i % 2 ? fresh : running,
                   (int)rng_int(&r, 0, PLACES - 1));
    }
    check_masked_blocks(isa);
    check_step_specials(isa);
}
