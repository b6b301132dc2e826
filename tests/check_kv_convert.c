/* SPDX-License-Identifier: MIT */
/*
 * Rows of a cache from and to f32, bit for bit: every pattern of the 8-bit
 * formats, the neighbourhood of every rounding boundary, and blocks of every
 * size of number, all zero, with a single FLT_MAX, a NaN, an infinity.
 */
#include "checks.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "oracle/kv.h"

enum { SLOT_WIDE, SLOT_NARROW, SLOT_SCALE };
enum { LONGEST = 400 };

/* ------------------------------------------------------------------- widen */

/* Bits are promised in the default modes; in others the guards are tested. */
static bool default_modes(void)
{
    return ORACLE_U == 0x1p-24 && ORACLE_TINY == 0x1p-150;
}

/* f64 to f32 rounds once, what only i8 needs. */
static void check_widened(kv_format f, const void *x, float scale, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n && (f != KV_I8 || default_modes()); i++) {
        const float want = (float)oracle_kv_element(f, x, i, scale);
        expect_same_values("element", &y[i], &want, 1);
        if (!isnan(want) && signbit(want) != signbit(y[i]))
            fail_with("element %lld has the wrong sign", (long long)i);
    }
}

/* Places of floats beside those of bytes: the same at either end. */
static int wide_place(int place)
{
    return place <= PLACE_AT_START ? place : 1 + place * 7 % (PLACES - 1);
}

static void check_widen_row(const test_isa *isa, qkv_widen_kv_fn *fn, kv_format f, rng *r,
                            int64_t n, int place)
{
    const int64_t bytes = oracle_kv_bytes(f, n);
    uint8_t *x = guarded_elements(SLOT_NARROW, (size_t)bytes, place, oracle_kv_align(f));
    float *y = guarded(SLOT_WIDE, n, wide_place(place)),
          *scale = guarded(SLOT_SCALE, 1, PLACE_AT_END);
    for (int64_t i = 0; i < bytes; i++)
        x[i] = (uint8_t)rng_bits(r);
    *scale = rng_normal(r);
    guarded_freeze(SLOT_NARROW);
    guarded_freeze(SLOT_SCALE);
    fn(x, f == KV_I8 ? scale : NULL, y, n);
    guards_intact();
    check_widened(f, x, *scale, y, n);
    tally(isa->id, 1);
}

static void check_widen(const test_isa *isa, qkv_widen_kv_fn *fn, const char *op, kv_format f)
{
    rng r = rng_make(op);
    const int64_t step = oracle_kv_step(f);
    if (step == 1) {
        uint8_t every[256];
        float wide[256];
        const float scale = 0x1.23456p-3f;
        for (int i = 0; i < 256; i++)
            every[i] = (uint8_t)i;
        context("%s on %s: every pattern", op, isa->name);
        fn(every, &scale, wide, 256);
        check_widened(f, every, scale, wide, 256);
    }
    for (int64_t n = 0; n <= LENGTHS * (step > 1 ? 3 : 1); n += step) {
        for (int place = 0; place < places_of(oracle_kv_align(f)); place++) {
            if (place >= 2 && !effort_takes(n + place))
                continue;
            context("%s on %s: n %lld, place %d", op, isa->name, (long long)n, place);
            check_widen_row(isa, fn, f, &r, n, place);
        }
    }
}

/* ------------------------------------------------------------------ narrow */

static bool same_element(kv_format f, uint8_t got, uint8_t want)
{
    if (got == want || (f != KV_F8_E4M3 && f != KV_F8_E5M2))
        return got == want;
    return isnan(oracle_kv_element(f, &got, 0, 1)) && isnan(oracle_kv_element(f, &want, 0, 1));
}

/* The row becomes what the oracle says: all bits, but those of a NaN. */
static void check_narrowed(const test_isa *isa, qkv_narrow_kv_fn *fn, kv_format f, const float *row,
                           int64_t n, int place)
{
    const int64_t bytes = oracle_kv_bytes(f, n);
    float *x = guarded(SLOT_WIDE, n, wide_place(place));
    float *scale = guarded(SLOT_SCALE, 1, PLACE_AT_END);
    uint8_t *y = guarded_elements(SLOT_NARROW, (size_t)bytes, place, oracle_kv_align(f));
    uint8_t want[LONGEST * 2];
    float want_scale = 0.0f;
    for (int64_t i = 0; i < n; i++)
        x[i] = row[i];
    oracle_kv_encode(f, row, n, want, &want_scale);
    guarded_freeze(SLOT_WIDE);
    fn(x, y, f == KV_I8 ? scale : NULL, n);
    guards_intact();
    for (int64_t i = 0; i < bytes && default_modes(); i++)
        if (!same_element(f, y[i], want[i]))
            fail_with("byte %lld is %02x, not %02x", (long long)i, y[i], want[i]);
    if (f == KV_I8 && default_modes())
        expect_same_values("scale", scale, &want_scale, 1);
    tally(isa->id, 1);
}

/* Every upper half with the low halves at which rounding turns. */
static void check_boundaries(const test_isa *isa, qkv_narrow_kv_fn *fn, const char *op, kv_format f)
{
    static const uint32_t lows[] = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};
    enum { LOWS = sizeof lows / sizeof *lows, HIGHS = 32, N = LOWS * HIGHS };
    for (uint32_t high = 0; high < 1 << 16; high += HIGHS) {
        float row[N];
        context("%s on %s: upper halves from %04x", op, isa->name, high);
        for (uint32_t i = 0; i < N; i++)
            row[i] = float_of((high + i / LOWS) << 16 | lows[i % LOWS]);
        check_narrowed(isa, fn, f, row, N, PLACE_AT_END);
    }
}

/* Halves of the step between integers, where ties go to even. */
static void check_ties(const test_isa *isa, qkv_narrow_kv_fn *fn, kv_format f)
{
    for (int first = -128; first < 128; first += 16) {
        float row[64];
        for (int i = 0; i < 64; i++)
            row[i] = (float)(first + i % 16) + 0.5f;
        row[5] = row[40] = 127.0f;
        check_narrowed(isa, fn, f, row, 64, PLACE_AT_END);
        row[5] = row[40] = -8.0f;
        for (int i = 0; i < 64; i++)
            row[i] = row[i] > 8 || row[i] < -8 ? 7.5f : row[i];
        check_narrowed(isa, fn, f, row, 64, PLACE_AT_END);
    }
}

/* One element of a row of ordinary ones is remarkable, at every place. */
static void check_remarkable(const test_isa *isa, qkv_narrow_kv_fn *fn, const char *op, kv_format f)
{
    enum { ROW = 7 * 32 }; /* groups of 4, 2 and 1 blocks */
    const float those[] = {NAN,        INFINITY,      -INFINITY, FLT_MAX,      -FLT_MAX, 0x1p-149f,
                           -0x1p-149f, 127 * 65504.f, 8.4e6f,    -8 * 65505.f, -0.0f,    0x1p-126f};
    rng r = rng_make(op);
    for (int t = 0; t < (int)(sizeof those / sizeof *those); t++) {
        for (int at = 0; at < ROW; at += t ? 7 : 1) {
            float row[ROW];
            context("%s on %s: %g at %d", op, isa->name, (double)those[t], at);
            fill_normal(&r, row, ROW, 1.0f);
            row[at] = those[t];
            check_narrowed(isa, fn, f, row, ROW, PLACE_AT_END);
            for (int i = 0; i < ROW; i++)
                row[i] = i == at ? those[t] : at % 2 ? 0.0f : -0.0f;
            check_narrowed(isa, fn, f, row, ROW, PLACE_AT_END);
            for (int i = 0; i < ROW; i++) /* the same magnitude twice: the first counts */
                row[i] = i == at ? those[t] : i == 31 || i == 64 || i == 200 ? -those[t] : 0.0f;
            check_narrowed(isa, fn, f, row, ROW, PLACE_AT_END);
        }
    }
}

static void check_narrow(const test_isa *isa, qkv_narrow_kv_fn *fn, const char *op, kv_format f)
{
    rng r = rng_make(op);
    const int64_t step = oracle_kv_step(f);
    float row[LONGEST] = {0};
    if (f == KV_F8_E4M3 || f == KV_F8_E5M2)
        check_boundaries(isa, fn, op, f);
    else
        check_ties(isa, fn, f);
    check_remarkable(isa, fn, op, f);
    for (int64_t n = step; n <= LENGTHS * (step > 1 ? 3 : 1); n += step) {
        for (int place = 0; place < places_of(oracle_kv_align(f)); place++) {
            if (place >= 2 && !effort_takes(n + place))
                continue;
            context("%s on %s: n %lld, place %d", op, isa->name, (long long)n, place);
            memset(row, 0, sizeof row);
            check_narrowed(isa, fn, f, row, n, place);
            fill_normal(&r, row, n, 3.0f);
            check_narrowed(isa, fn, f, row, n, place);
            fill_binades(&r, row, n, -20, 20);
            check_narrowed(isa, fn, f, row, n, place);
            const int low = (int)rng_int(&r, -149, 120);
            fill_binades(&r, row, n, low, low + 6);
            check_narrowed(isa, fn, f, row, n, place);
        }
    }
}

#define CHECK(type, format)                                                                        \
    void check_widen_##type(const test_isa *isa)                                                   \
    {                                                                                              \
        check_widen(isa, isa->table->widen_##type, "widen_" #type, format);                        \
    }                                                                                              \
    void check_narrow_##type(const test_isa *isa)                                                  \
    {                                                                                              \
        check_narrow(isa, isa->table->narrow_##type, "narrow_" #type, format);                     \
    }
KV_EACH_OF_CACHES(CHECK)
