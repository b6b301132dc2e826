/* SPDX-License-Identifier: MIT */
/*
 * exp and exp2 over every f32 from -0 to -110 (exp2: to -152), and a sample
 * from there to -infinity, on every ISA:
 *
 * - within 1 ulp while the exact result is a normal number;
 * - below that, 0 or within one spacing of the denormals;
 * - 0 from -104 on (exp2: from -150.1 on, where 2^x < 2^-150 by more than
 *   the error of a result);
 * - exp is monotone over all of it. exp2 serves the online softmax alone and
 *   is monotone where it need be, from -115.4 (80 / ln(2)) on: where results
 *   turn to denormals and 0.
 *
 * The reference is libm's f64 exp() or exp2(), whose error (below 2^-52)
 * moves none of these verdicts by more than 2^-28 ulp. Nearer to 0 than
 * 2^-30, 1 + x ln(base) replaces it: x^2/2 < 2^-61 is left out.
 *
 * The walk is cut into SLICES tests that run in parallel; each starts one
 * number early, so that no pair of neighbours is missed.
 */
#include "harness.h"
#include "oracle/oracle.h"

#include <criterion/parameterized.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { SLICES = 16, CHUNK = 2048 };

typedef struct slice {
    int which; /* 0: exp, 1: exp2 */
    uint32_t first, last;
} slice;

static float apply(const qkv_kernels *table, int which, const float *x, float *y, int64_t n)
{
    (which ? table->exp2_f32 : table->exp_f32)(x, y, n);
    return y[n - 1];
}

static double reference(int which, float x)
{
    if (x > -0x1p-30f)
        return 1.0 + (double)x * (which ? 0x1.62e42fefa39efp-1 : 1.0);
    return which ? exp2((double)x) : exp((double)x);
}

/* Walk state of one ISA: the last argument's result, the worst error. */
typedef struct walk {
    test_isa isa;
    float previous;
    double worst;
    float worst_at;
} walk;

static void check_chunk(walk *w, int which, const float *x, const double *exact, int64_t n)
{
    static float y[CHUNK];
    const float zero_from = which ? -150.1f : -104.0f;
    apply(w->isa.table, which, x, y, n);
    for (int64_t i = 0; i < n; i++) {
        /* 1 ulp of a number in [2^(e-1), 2^e) is 2^(e-24), at least 2^-149. */
        const double off = fabs((double)y[i] - exact[i]);
        /* Cheap and sufficient first: a normal ulp is over 2^-24 of the number. */
        if (!(off <= exact[i] * 0x1p-25) || exact[i] < 0x1p-126) {
            const double ulp = oracle_ulp_error(y[i], exact[i]);
            if (exact[i] >= 0x1p-126 && !(ulp <= w->worst)) {
                w->worst = ulp;
                w->worst_at = x[i];
            }
            if (exact[i] < 0x1p-126 && y[i] != 0.0f && !(ulp <= 1.0))
                fail_with("%s at %.9g (0x%08x): %.9g is %.4f ulp from %.17g", w->isa.name,
                          (double)x[i], bits_of(x[i]), (double)y[i], ulp, exact[i]);
        }
        if (!(y[i] <= w->previous) && (which == 0 || x[i] <= -115.4f))
            fail_with("%s at %.9g (0x%08x): %.9g, but %.9g for its neighbour nearer to 0",
                      w->isa.name, (double)x[i], bits_of(x[i]), (double)y[i], (double)w->previous);
        w->previous = y[i];
        if (x[i] <= zero_from && y[i] != 0.0f)
            fail_with("%s at %.9g: %.9g, expected 0", w->isa.name, (double)x[i], (double)y[i]);
    }
}

static int walks_begin(walk *walks)
{
    int count = 0;
    for (int id = 0; id < TEST_ISA_COUNT; id++) {
        const test_isa isa = test_isa_of(id);
        if (!isa.missing)
            walks[count++] = (walk){.isa = isa, .previous = INFINITY};
    }
    return count;
}

static void walk_slice(const slice *s, uint32_t stride)
{
    static float x[CHUNK];
    static double exact[CHUNK];
    walk walks[TEST_ISA_COUNT];
    const int count = walks_begin(walks);

    uint64_t bits = s->first;
    while (bits <= s->last) {
        int64_t n = 0;
        for (; n < CHUNK && bits <= s->last; n++, bits += stride) {
            x[n] = float_of((uint32_t)bits);
            exact[n] = reference(s->which, x[n]);
        }
        for (int i = 0; i < count; i++)
            check_chunk(&walks[i], s->which, x, exact, n);
    }
    for (int i = 0; i < count; i++) {
        tally(walks[i].isa.id, 1);
        tally_ulp(s->which, walks[i].isa.id, walks[i].worst, walks[i].worst_at);
    }
    for (int i = 0; i < count; i++)
        if (!(walks[i].worst <= 1.0))
            fail_with("%s at %.9g (0x%08x) is %.4f ulp off", walks[i].isa.name,
                      (double)walks[i].worst_at, bits_of(walks[i].worst_at), walks[i].worst);
}

ParameterizedTestParameters(exp_every_f32, slices)
{
    static slice slices[2 * SLICES];
    for (int which = 0; which < 2; which++) {
        const uint32_t first = bits_of(-0.0f), last = bits_of(which ? -152.0f : -110.0f);
        const uint32_t middle = bits_of(-0x1p-30f);
        /* Two slices of cheap arguments, the rest of those that need libm. */
        for (uint32_t i = 0; i < SLICES; i++) {
            const uint32_t from = i < 2 ? first : middle, to = i < 2 ? middle : last;
            const uint32_t k = i < 2 ? i : i - 2, parts = i < 2 ? 2 : SLICES - 2;
            slices[(uint32_t)which * SLICES + i] = (slice){
                .which = which,
                .first = from + (uint32_t)((uint64_t)(to - from) * k / parts),
                .last = from + (uint32_t)((uint64_t)(to - from) * (k + 1) / parts),
            };
        }
    }
    return cr_make_param_array(slice, slices, 2 * SLICES);
}

ParameterizedTest(slice *s, exp_every_f32, slices)
{
    context("%s", s->which ? "exp2" : "exp");
    walk_slice(s, effort_is_full() ? 1 : 4093);
}

/* From the end of the walk to the lowest finite number and -infinity: 0. */
Test(exp_every_f32, beyond)
{
    for (int which = 0; which < 2; which++) {
        context("%s", which ? "exp2" : "exp");
        const slice s = {which, bits_of(which ? -152.0f : -110.0f), bits_of(-INFINITY)};
        walk_slice(&s, 1009);
        const slice end = {which, bits_of(-FLT_MAX), bits_of(-INFINITY)};
        walk_slice(&end, 1);
    }
}

/* exp(0) = 1 exactly, and a NaN of either sign and any payload stays one. */
Test(exp_every_f32, nan_and_zero)
{
    const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001,
                             0x7fffffff, 0xffffffff, 0x7fa00000, 0xffa12345};
    for (int id = 0; id < TEST_ISA_COUNT; id++) {
        const test_isa isa = test_isa_of(id);
        for (int which = 0; which < 2 && !isa.missing; which++) {
            context("%s on %s", which ? "exp2" : "exp", isa.name);
            for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
                float x[19], y[19];
                for (int k = 0; k < 19; k++)
                    x[k] = k % 3 ? 0.0f : float_of(nans[i]);
                apply(isa.table, which, x, y, 19);
                for (int k = 0; k < 19; k++)
                    if (k % 3 ? y[k] != 1.0f : !isnan(y[k]))
                        fail_with("element %d is %.9g", k, (double)y[k]);
                tally(id, 1);
            }
        }
    }
}
