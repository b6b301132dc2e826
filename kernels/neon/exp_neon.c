/* SPDX-License-Identifier: MIT */
/*
 * y = e^x and y = 2^x for x <= 0, element by element.
 *
 * Four vectors go through the polynomial side by side, so that the chain of
 * some 12 dependent operations is hidden behind the three others. Registers:
 * the 10 constants, and 3 to 4 a vector in flight.
 *
 * Worst error over every f32 for results from 2^-126 up, and monotone over
 * all of them: 2^t 0.863 ulp, e^x 0.879 ulp.
 *
 * Cycle model: llvm-mca 19 on the code of gcc 12 and clang 19 at -O3, as
 * gcc / clang; "bound" is what the busiest kind of port allows. Its Apple M1
 * model has 3 vector ports and a multiply-add latency of 8 cycles.
 *
 *                          neoverse-n1   neoverse-v2   apple-m1
 *     2^t, 16 elements     37.1 / 36.0   18.6 / 18.1   27.1 / 24.2
 *     e^x, 16 elements     42.1 / 42.1   21.1 / 21.1   39.2 / 32.7
 *
 * 17 (19) vector operations and 4 (5) register copies for 4 elements on 2
 * (n1), 4 (v2) or 3 ports: the first two models are at their bound.
 */
#include "internal.h"

#include "isa_neon.h"

enum { UNROLL = 4 };

QKV_INLINE float32x4_t power_f32x4(float32x4_t x, bool base2)
{
    return base2 ? exp2_f32x4(x) : exp_f32x4(x);
}

QKV_INLINE void power(const float *x, float *y, int64_t n, bool base2)
{
    int64_t i = 0;
    for (; i + 4 * UNROLL <= n; i += 4 * UNROLL) {
        float32x4_t v[UNROLL];
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++)
            v[u] = vld1q_f32(x + i + 4 * u);
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++)
            v[u] = power_f32x4(v[u], base2);
        QKV_UNROLL
        for (int u = 0; u < UNROLL; u++)
            vst1q_f32(y + i + 4 * u, v[u]);
    }
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, power_f32x4(vld1q_f32(x + i), base2));
    if (i < n)
        store_tail(y + i, power_f32x4(load_tail(x + i, n - i), base2), n - i);
}

void qkv_exp_f32_neon(const float *x, float *y, int64_t n)
{
    power(x, y, n, false);
}

void qkv_exp2_f32_neon(const float *x, float *y, int64_t n)
{
    power(x, y, n, true);
}
