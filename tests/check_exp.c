/* SPDX-License-Identifier: MIT */
/*
 * The exponential kernels as array functions: tails, places, in place,
 * special values. Their accuracy over every f32 is in test_exp.c.
 */
#include "checks.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <string.h>

typedef void exp_fn(const float *x, float *y, int64_t n);

enum { SLOT_X, SLOT_Y };

/* The result of one element on its own: every other way must give its bits. */
static float alone(exp_fn *fn, float x)
{
    float y;
    fn(&x, &y, 1);
    return y;
}

static void check_accuracy(const float *x, const float *y, int64_t n, double base_ln)
{
    const double most = ORACLE_U * 0x1p24; /* ulp */
    for (int64_t i = 0; i < n; i++) {
        const double exact = exp((double)x[i] * base_ln);
        if (exact >= 0x1p-126 && oracle_ulp_error(y[i], exact) > most)
            fail_with("at %.9g: %.9g is not within %g ulp of %.17g", (double)x[i], (double)y[i],
                      most, exact);
        if (exact < 0x1p-126 && y[i] != 0.0f && oracle_ulp_error(y[i], exact) > most)
            fail_with("at %.9g: %.9g is neither 0 nor within %g ulp of %.17g", (double)x[i],
                      (double)y[i], most, exact);
    }
}

static void check_length(const test_isa *isa, exp_fn *fn, rng *r, int64_t n, int place,
                         double base_ln)
{
    context("%s: n %lld, place %d", isa->name, (long long)n, place);
    float *x = guarded(SLOT_X, n, place);
    float *y = guarded(SLOT_Y, n, place == PLACE_AT_END ? place : 1 + (place + 6) % (PLACES - 1));
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_uniform(r, -110.0f, 0.0f);
    guarded_freeze(SLOT_X);
    fn(x, y, n);
    guarded_thaw(SLOT_X);
    guards_intact();
    check_accuracy(x, y, n, base_ln);
    for (int64_t i = 0; i < n; i++)
        if (bits_of(y[i]) != bits_of(alone(fn, x[i])))
            fail_with("element %lld: other bits than alone", (long long)i);

    fn(x, x, n);
    guards_intact();
    expect_same_bits("in place", x, y, n);
    tally(isa->id, 2);
}

/* A special value at each place of a vector, ordinary numbers around it. */
static void check_special(const test_isa *isa, exp_fn *fn)
{
    const float special[] = {0.0f,       -0.0f,    -INFINITY, -FLT_MAX, -1e30f,
                             -104.0f,    -151.0f,  -1e-40f,   -FLT_MIN, NAN,
                             -0x1p-149f, -0x1p23f, -0x1p31f,  -0x1p32f, -2147483520.0f};
    /* Where the exact result is no f32, rounding upward may give the next one. */
    const float wanted[] = {1, 1, 0, 0, 0, 0, 0, 1, 1, NAN, 1, 0, 0, 0, 0};
    for (size_t s = 0; s < sizeof special / sizeof *special; s++) {
        for (int64_t at = 0; at < 35; at++) {
            context("%s: %.9g at %lld", isa->name, (double)special[s], (long long)at);
            float *x = guarded(SLOT_X, 35, PLACE_AT_END);
            float *y = guarded(SLOT_Y, 35, PLACE_AT_END);
            for (int64_t i = 0; i < 35; i++)
                x[i] = i == at ? special[s] : -1.0f - (float)i;
            fn(x, y, 35);
            const bool is_exp2 = special[s] == -104.0f && fn == isa->table->exp2_f32;
            const bool directed_up = ORACLE_U > 0x1p-24 && y[at] == nextafterf(wanted[s], INFINITY);
            if (!is_exp2 && !directed_up)
                expect_same_values("y", y + at, wanted + s, 1);
            for (int64_t i = 0; i < 35; i++)
                if (i != at && bits_of(y[i]) != bits_of(alone(fn, -1.0f - (float)i)))
                    fail_with("element %lld has been reached by it", (long long)i);
            tally(isa->id, 1);
        }
    }
}

/* No tail lane divides 0 by 0 or the like: nothing invalid is flagged. */
static void check_flags(const test_isa *isa, exp_fn *fn)
{
    for (int64_t n = 0; n <= 35; n++) {
        context("%s: floating-point flags, n %lld", isa->name, (long long)n);
        float *x = guarded(SLOT_X, n, PLACE_AT_END);
        for (int64_t i = 0; i < n; i++)
            x[i] = -0.5f * (float)i;
        feclearexcept(FE_ALL_EXCEPT);
        fn(x, x, n);
        if (fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW))
            fail_with("ordinary arguments raise an exception flag");
        tally(isa->id, 1);
    }
}

static void check_exp(const test_isa *isa, exp_fn *fn, const char *name, double base_ln)
{
    rng r = rng_make(name);
    for (int place = 0; place < PLACES; place++)
        for (int64_t n = 0; n <= LENGTHS; n++)
            if (place < 2 || effort_takes(n + place))
                check_length(isa, fn, &r, n, place, base_ln);
    for (int64_t i = effort_cases(200); i > 0; i--)
        check_length(isa, fn, &r, rng_int(&r, 0, 3000), (int)rng_int(&r, 0, PLACES - 1), base_ln);
    check_special(isa, fn);
    check_flags(isa, fn);
}

void check_exp_f32(const test_isa *isa)
{
    check_exp(isa, isa->table->exp_f32, "exp_f32", 1.0);
}

void check_exp2_f32(const test_isa *isa)
{
    check_exp(isa, isa->table->exp2_f32, "exp2_f32", 0x1.62e42fefa39efp-1);
}
