/* SPDX-License-Identifier: MIT */
/*
 * The exponentials, scalar: y = e^x and y = 2^x for x <= 0.
 *
 * Both write the argument as n integer and f small, evaluate the polynomial
 * of constants.h at f and scale by 2^n. The scaling is split in two so that
 * results below 2^-126 come out as denormals, rounded once.
 */
#include "internal.h"

#include "../constants.h"
#include "exp_scalar.h"

float qkv_exp2_scalar(float t)
{
    if (t != t)
        return t;
    if (t < QKV_EXP2_MIN)
        return 0.0f;

    const int n = qkv_round_scalar(t);
    const float f = t - (float)n;
    const float p =
        1.0f +
        f * (QKV_EXP2_C1 +
             f * (QKV_EXP2_C2 +
                  f * (QKV_EXP2_C3 + f * (QKV_EXP2_C4 + f * (QKV_EXP2_C5 + f * QKV_EXP2_C6)))));
    return qkv_scale2_scalar(p, n);
}

float qkv_exp_scalar(float x)
{
    if (x != x)
        return x;
    if (x < QKV_EXP_MIN)
        return 0.0f;

    const int n = qkv_round_scalar(x * QKV_LOG2E);
    const float f = (x - (float)n * QKV_LN2_HI16) - (float)n * QKV_LN2_LO16;
    const float p =
        1.0f +
        f * (QKV_EXP_C1 +
             f * (QKV_EXP_C2 +
                  f * (QKV_EXP_C3 + f * (QKV_EXP_C4 + f * (QKV_EXP_C5 + f * QKV_EXP_C6)))));
    return qkv_scale2_scalar(p, n);
}

void qkv_exp_f32_scalar(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = qkv_exp_scalar(x[i]);
}

void qkv_exp2_f32_scalar(const float *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = qkv_exp2_scalar(x[i]);
}
