/* SPDX-License-Identifier: MIT */
/*
 * Between f32 and the 16-bit types that tensors may be stored in.
 *
 * Widening is exact. Narrowing rounds to nearest, ties to even, once:
 * overflow becomes infinity, what is small a subnormal or zero, and a NaN
 * stays a NaN (made quiet). IEEE 754-2019, 4.3.1 and 3.6; bfloat16 is the
 * upper half of a binary32.
 */
#include "internal.h"

#include <string.h>

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Drops the low 'n' bits of x, 1 <= n <= 31, rounding to nearest, ties to even. */
static uint32_t round_off(uint32_t x, int n)
{
    const uint32_t kept = x >> n;
    const uint32_t dropped = x & ((UINT32_C(1) << n) - 1);
    const uint32_t half = UINT32_C(1) << (n - 1);
    return kept + (dropped > half || (dropped == half && (kept & 1)));
}

/* binary16: 1 sign bit, 5 bits of exponent with bias 15, 10 of fraction. */
static float widen_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    const uint32_t exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 31) /* infinity, or a NaN made quiet */
        return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x00400000 : 0));
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact in f32 */
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_of(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

static uint16_t narrow_f16(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    const int exponent = (int)(magnitude >> 23) - 127;
    uint32_t half;
    if (magnitude > 0x7f800000)
        half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    else if (exponent > 15)
        half = 0x7c00;
    else if (exponent >= -14) /* rebias; a carry out of the fraction is right */
        half = round_off(magnitude - ((127 - 15) << 23), 13);
    else if (exponent >= -25) /* a multiple of 2^-24 */
        half = round_off((magnitude & 0x7fffff) | 0x800000, -exponent - 1);
    else
        half = 0;
    return (uint16_t)(sign | half);
}

static uint16_t narrow_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)round_off(bits, 16);
}

void qkv_widen_f16_scalar(const uint16_t *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = widen_f16(x[i]);
}

void qkv_widen_bf16_scalar(const uint16_t *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = float_of((uint32_t)x[i] << 16);
}

void qkv_narrow_f16_scalar(const float *x, uint16_t *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = narrow_f16(x[i]);
}

void qkv_narrow_bf16_scalar(const float *x, uint16_t *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = narrow_bf16(x[i]);
}
