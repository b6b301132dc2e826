/* SPDX-License-Identifier: MIT */
/*
 * The conversions to and from 16-bit types, against an oracle that decodes
 * fields and rounds in f64: every 16-bit pattern, the neighbourhood of every
 * rounding boundary, lengths and places.
 */
#include "checks.h"

#include <math.h>
#include <string.h>

typedef void widen_fn(const uint16_t *x, float *y, int64_t n);
typedef void narrow_fn(const float *x, uint16_t *y, int64_t n);

/* A 16-bit float: exponent and fraction bits, as IEEE 754 defines them. */
typedef struct format {
    int exponent_bits, fraction_bits;
} format;
static const format f16 = {5, 10}, bf16 = {8, 7};

enum { SLOT_WIDE, SLOT_NARROW };

static int bias(format f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

static double decode(format f, uint16_t bits)
{
    const int exponent = bits >> f.fraction_bits & ((1 << f.exponent_bits) - 1);
    const int fraction = bits & ((1 << f.fraction_bits) - 1);
    double magnitude;
    if (exponent == (1 << f.exponent_bits) - 1)
        magnitude = fraction ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        magnitude = ldexp(fraction, 1 - bias(f) - f.fraction_bits);
    else
        magnitude = ldexp(fraction + (1 << f.fraction_bits), exponent - bias(f) - f.fraction_bits);
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* x rounded to the format as 'to_integer' rounds, as a number. */
static double rounded_by(format f, double x, double (*to_integer)(double))
{
    if (!isfinite(x) || x == 0.0)
        return x;
    int exponent = ilogb(x);
    if (exponent < 1 - bias(f))
        exponent = 1 - bias(f);
    const double step = ldexp(1.0, exponent - f.fraction_bits);
    const double result = to_integer(x / step) * step; /* all exact but to_integer */
    if (fabs(result) < ldexp(1.0, bias(f) + 1))
        return result;
    if (x < 0.0 && to_integer(-1.5) == -1.0) /* upward */
        return -ldexp(2.0 - ldexp(1.0, -f.fraction_bits), bias(f));
    return copysign((double)INFINITY, x);
}

/* To nearest, ties to even. */
static double rounded(format f, double x)
{
    return rounded_by(f, x, nearbyint);
}

static bool same_number(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

static void check_every_pattern(const test_isa *isa, widen_fn *fn, format f)
{
    enum { N = 1 << 16 };
    context("%s: every pattern", isa->name);
    uint16_t *x = guarded_bytes(SLOT_NARROW, N * sizeof *x, PLACE_AT_END);
    float *y = guarded(SLOT_WIDE, N, PLACE_AT_END);
    for (int i = 0; i < N; i++)
        x[i] = (uint16_t)i;
    fn(x, y, N);
    guards_intact();
    for (int i = 0; i < N; i++)
        if (!same_number((double)y[i], decode(f, x[i])))
            fail_with("%04x became %.9g, not %.9g", x[i], (double)y[i], decode(f, x[i]));
    tally(isa->id, 1);
}

/* Every upper half with the low halves at which rounding turns. */
static void check_boundaries(const test_isa *isa, narrow_fn *fn, format f)
{
    static const uint32_t lows[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001,
                                    0x3000, 0x7fff, 0x8000, 0x8001, 0xffff};
    enum { LOWS = sizeof lows / sizeof *lows };
    /* Some instructions round to nearest always, others in the caller's mode. */
    const bool directed = ORACLE_U > 0x1p-24;
    for (uint32_t high = 0; high < 1 << 16; high++) {
        context("%s: upper half %04x", isa->name, high);
        float *x = guarded(SLOT_WIDE, LOWS, PLACE_AT_END);
        uint16_t *y = guarded_bytes(SLOT_NARROW, LOWS * sizeof *y, PLACE_AT_END);
        for (int i = 0; i < LOWS; i++)
            x[i] = float_of(high << 16 | lows[i]);
        fn(x, y, LOWS);
        for (int i = 0; i < LOWS; i++)
            if (!same_number(decode(f, y[i]), rounded(f, (double)x[i])) &&
                !(directed && same_number(decode(f, y[i]), rounded_by(f, (double)x[i], ceil))))
                fail_with("%08x became %04x = %.9g, not %.9g", bits_of(x[i]), y[i], decode(f, y[i]),
                          rounded(f, (double)x[i]));
    }
    guards_intact();
    tally(isa->id, LOWS);
}

/* Arrays of every length at every place give what single elements do. */
static void check_widen_lengths(const test_isa *isa, widen_fn *fn)
{
    for (int place = 0; place < PLACES_16; place++) {
        for (int64_t n = 0; n <= LENGTHS; n++) {
            if (place >= 2 && !effort_takes(n + place))
                continue;
            context("%s: n %lld, place %d", isa->name, (long long)n, place);
            uint16_t *x = guarded_16(SLOT_NARROW, n, place);
            float *y = guarded(SLOT_WIDE, n, place * 7 % PLACES);
            for (int64_t i = 0; i < n; i++)
                x[i] = (uint16_t)(0x3c00 + 37 * i);
            guarded_freeze(SLOT_NARROW);
            fn(x, y, n);
            guards_intact();
            for (int64_t i = 0; i < n; i++) {
                float alone;
                fn(x + i, &alone, 1);
                expect_same_bits("element", y + i, &alone, 1);
            }
            tally(isa->id, 1);
        }
    }
}

static void check_narrow_lengths(const test_isa *isa, narrow_fn *fn)
{
    rng r = rng_make("narrow");
    for (int place = 0; place < PLACES_16; place++) {
        for (int64_t n = 0; n <= LENGTHS; n++) {
            if (place >= 2 && !effort_takes(n + place))
                continue;
            context("%s: n %lld, place %d", isa->name, (long long)n, place);
            float *x = guarded(SLOT_WIDE, n, place * 7 % PLACES);
            uint16_t *y = guarded_16(SLOT_NARROW, n, place);
            fill_binades(&r, x, n, -30, 20);
            guarded_freeze(SLOT_WIDE);
            fn(x, y, n);
            guards_intact();
            for (int64_t i = 0; i < n; i++) {
                uint16_t alone;
                fn(x + i, &alone, 1);
                if (alone != y[i])
                    fail_with("element %lld: other bits than alone", (long long)i);
            }
            tally(isa->id, 1);
        }
    }
}

static void check_widen(const test_isa *isa, widen_fn *fn, format f)
{
    check_every_pattern(isa, fn, f);
    check_widen_lengths(isa, fn);
}

static void check_narrow(const test_isa *isa, narrow_fn *fn, format f)
{
    check_boundaries(isa, fn, f);
    check_narrow_lengths(isa, fn);
}

void check_widen_f16(const test_isa *isa)
{
    check_widen(isa, isa->table->widen_f16, f16);
}

void check_widen_bf16(const test_isa *isa)
{
    check_widen(isa, isa->table->widen_bf16, bf16);
}

void check_narrow_f16(const test_isa *isa)
{
    check_narrow(isa, isa->table->narrow_f16, f16);
}

void check_narrow_bf16(const test_isa *isa)
{
    check_narrow(isa, isa->table->narrow_bf16, bf16);
}
