/* SPDX-License-Identifier: MIT */
/* Shared by the scalar kernels only. */
#ifndef QKV_EXP_SCALAR_H
#define QKV_EXP_SCALAR_H

#include <stdint.h>
#include <string.h>

/* 2^t and e^x for arguments <= 0; NaN gives NaN. In exp.c. */
float qkv_exp2_scalar(float t);
float qkv_exp_scalar(float x);

/* The integer nearest to x <= 0, |x| < 2^22: ties go towards zero. */
static inline int qkv_round_scalar(float x)
{
    return -(int)(0.5f - x);
}

/* p * 2^n for -151 <= n <= 0: exact down to 2^-126, below it rounded once. */
static inline float qkv_scale2_scalar(float p, int n)
{
    const int high = n < -100 ? -100 : n;
    const uint32_t bits_high = (uint32_t)(high + 127) << 23;
    const uint32_t bits_low = (uint32_t)(n - high + 127) << 23;
    float factor_high, factor_low;
    memcpy(&factor_high, &bits_high, sizeof factor_high);
    memcpy(&factor_low, &bits_low, sizeof factor_low);
    return p * factor_high * factor_low;
}

#endif
