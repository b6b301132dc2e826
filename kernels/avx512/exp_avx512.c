/* SPDX-License-Identifier: MIT */
/*
 * The exponentials of an array: y = e^x and y = 2^x for x <= 0.
 *
 * The functions themselves are in isa_avx512.h. Four vectors are under way at
 * a time: 8 registers for them, 7 or 11 for constants. By llvm-mca 19, cycles
 * for 64 elements and what the ports alone would take:
 *
 *          skylake-avx512   sapphirerapids   znver4
 *   exp        36.3 (36)        48.6 (48)    45.9 (44)
 *   exp2       22.1 (22)        32.1 (32)    24.1 (24)
 *
 * Over every f32: exp at most 0.8653 ulp, exp2 0.7996 (printed by the tests).
 */
#include "internal.h"

#include "isa_avx512.h"

enum { UNROLLED = 4 }; /* vectors of one step: their chains hide each other's latency */

void qkv_exp_f32_avx512(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + UNROLLED * LANES <= n; i += UNROLLED * LANES) {
        UNROLL
        for (int v = 0; v < UNROLLED; v++)
            _mm512_storeu_ps(y + i + v * LANES, vexp(_mm512_loadu_ps(x + i + v * LANES)));
    }
    for (; i < n; i += LANES) {
        const __mmask16 lanes = lanes_below(n - i);
        store_tail(y + i, lanes, vexp(load_tail(x + i, lanes)));
    }
}

void qkv_exp2_f32_avx512(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + UNROLLED * LANES <= n; i += UNROLLED * LANES) {
        UNROLL
        for (int v = 0; v < UNROLLED; v++)
            _mm512_storeu_ps(y + i + v * LANES, vexp2(_mm512_loadu_ps(x + i + v * LANES)));
    }
    for (; i < n; i += LANES) {
        const __mmask16 lanes = lanes_below(n - i);
        store_tail(y + i, lanes, vexp2(load_tail(x + i, lanes)));
    }
}
