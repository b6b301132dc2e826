/* SPDX-License-Identifier: MIT */
#include "checks.h"

#include <math.h>

enum { SLOT_X, SLOT_C, SLOT_S, SLOT_Y };

/* What the definition gives, each operation rounded to f32: f64 holds the
 * product of two f32 exactly, but not their sum, which is rounded once more. */
static float rounded_sum(float a, float b, float c, float d)
{
    const float first = (float)((double)a * (double)b), second = (float)((double)c * (double)d);
    return (float)((double)first + (double)second);
}

static void check_row(const test_isa *isa, rng *r, int64_t pairs, bool neighbours, int place)
{
    context("rotary_f32 on %s: pairs %lld, neighbours %d, place %d", isa->name, (long long)pairs,
            neighbours, place);
    float *x = guarded(SLOT_X, 2 * pairs, place), *c = guarded(SLOT_C, pairs, place);
    float *s = guarded(SLOT_S, pairs, place), *y = guarded(SLOT_Y, 2 * pairs, place);
    fill_normal(r, x, 2 * pairs, 1.0f);
    for (int64_t i = 0; i < pairs; i++) {
        const float angle = rng_uniform(r, 0.0f, 6.28f);
        c[i] = cosf(angle);
        s[i] = sinf(angle);
    }
    guarded_freeze(SLOT_X);
    guarded_freeze(SLOT_C);
    guarded_freeze(SLOT_S);
    isa->table->rotary_f32(x, c, s, y, pairs, neighbours);
    guards_intact();
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t at = neighbours ? 2 * i : i, other = neighbours ? at + 1 : i + pairs;
        const float want[2] = {rounded_sum(x[at], c[i], -x[other], s[i]),
                               rounded_sum(x[at], s[i], x[other], c[i])};
        const float got[2] = {y[at], y[other]};
        if (ORACLE_U == 0x1p-24) /* bits are promised when rounding to nearest */
            expect_same_values("pair", got, want, 2);
    }
    tally(isa->id, 1);
}

void check_rotary_f32(const test_isa *isa)
{
    rng r = rng_make("rotary_f32");
    for (int64_t pairs = 0; pairs <= LENGTHS; pairs++)
        for (int place = 0; place < PLACES; place++)
            if (place < 2 || effort_takes(pairs * 5 + place))
                for (int neighbours = 0; neighbours < 2; neighbours++)
                    check_row(isa, &r, pairs, neighbours, place);
}
