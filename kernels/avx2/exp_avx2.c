/* SPDX-License-Identifier: MIT */
/* The exponentials over an array: isa_avx2.h has the method. */
#include "internal.h"

#include "isa_avx2.h"

void qkv_exp_f32_avx2(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(y + i, exp_ps(_mm256_loadu_ps(x + i)));
    if (i < n)
        store_tail(y + i, n - i, exp_ps(load_tail(x + i, n - i)));
}

void qkv_exp2_f32_avx2(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(y + i, exp2_ps(_mm256_loadu_ps(x + i)));
    if (i < n)
        store_tail(y + i, n - i, exp2_ps(load_tail(x + i, n - i)));
}
