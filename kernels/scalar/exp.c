/* SPDX-License-Identifier: MIT */
/*
 * The exponentials, scalar: y = e^x and y = 2^x for x <= 0.
 *
 * Both write the argument as n integer and f small, evaluate the polynomial
 * of constants.h at f and scale by 2^n. The scaling is split in two so that
 * results below 2^-126 come out as denormals, rounded once.
 *
 * The polynomial's leading terms are added up in f64, where their products
 * are exact: with each of them rounded to f32 the result would be up to 1.1
 * ulp off. The rest, f^2 * r, is small enough for f32, and its rounding errors
 * are smaller than what a step of one ulp in the argument changes: that is
 * why both functions are monotone.
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
    const float r =
        QKV_EXP2_C2 + f * (QKV_EXP2_C3 + f * (QKV_EXP2_C4 + f * (QKV_EXP2_C5 + f * QKV_EXP2_C6)));
    const double linear = (double)f * (double)QKV_EXP2_C1;
    const double p = 1.0 + (linear + (double)(f * f) * (double)r);
    return qkv_scale2_scalar((float)p, n);
}

float qkv_exp_scalar(float x)
{
    if (x != x)
        return x;
    if (x < QKV_EXP_MIN)
        return 0.0f;

    const int n = qkv_round_scalar(x * QKV_LOG2E);
    const double reduced = (double)(x - (float)n * QKV_LN2_HI16) - (double)n * (double)QKV_LN2_LO16;
    const float f = (float)reduced;
    const float r =
        QKV_EXP_C2 + f * (QKV_EXP_C3 + f * (QKV_EXP_C4 + f * (QKV_EXP_C5 + f * QKV_EXP_C6)));
    const double p = 1.0 + (reduced + (double)(f * f) * (double)r);
    return qkv_scale2_scalar((float)p, n);
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
