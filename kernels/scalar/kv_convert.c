/* SPDX-License-Identifier: MIT */
/*
 * Rows of a cache from and to f32; internal.h has the rules. Every ISA gives
 * these bits: additions, multiplications and divisions are those of IEEE 754,
 * one by one, never fused.
 */
#include <math.h>

#include "kv_scalar.h"

/* ------------------------------------------------------------------- widen */

static inline void widen(const void *x, float scale, float *y, int64_t n, kv_element_fn *element)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = element(x, i, scale);
}

void qkv_widen_q8_0_scalar(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen(x, 1.0f, y, n, kv_q8_0);
}

void qkv_widen_i8_scalar(const void *x, const float *scale, float *y, int64_t n)
{
    widen(x, *scale, y, n, kv_i8);
}

void qkv_widen_f8_e4m3_scalar(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen(x, 1.0f, y, n, kv_f8_e4m3);
}

void qkv_widen_f8_e5m2_scalar(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen(x, 1.0f, y, n, kv_f8_e5m2);
}

void qkv_widen_q4_0_scalar(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen(x, 1.0f, y, n, kv_q4_0);
}

/* ---------------------------------------------------------------- narrow f8 */

/*
 * An 8-bit float of 'fraction_bits', whose smallest normal is 2^min_exponent
 * and whose largest number has the bits 'largest'. x is a multiple of the
 * format's step at its exponent, or of the step of the subnormals, plus a
 * part to round: adding 1.5 * 2^23 steps rounds to a multiple of the step,
 * ties to even, as it leaves no bit below it.
 */
static uint8_t narrow_f8(float x, int fraction_bits, int min_exponent, uint32_t largest)
{
    const uint32_t bits = kv_bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint8_t)(sign | 0x7f);
    int exponent = (int)(magnitude >> 23) - 127;
    if (exponent >= 16)
        return (uint8_t)(sign | largest);
    if (exponent < min_exponent)
        exponent = min_exponent;
    const uint32_t step = (uint32_t)(exponent - fraction_bits + 127) << 23;
    const float round = kv_float_of(step) * 0x1.8p23f;
    const float rounded = (kv_float_of(magnitude) + round) - round;
    /* In steps: a carry into the next exponent is right as it comes. */
    const uint32_t steps = (uint32_t)(rounded / kv_float_of(step));
    const uint32_t result = ((uint32_t)(exponent - min_exponent) << fraction_bits) + steps;
    return (uint8_t)(sign | (result > largest ? largest : result));
}

void qkv_narrow_f8_e4m3_scalar(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)y)[i] = narrow_f8(x[i], 3, -6, 0x7e); /* at most 448 */
}

void qkv_narrow_f8_e5m2_scalar(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)y)[i] = narrow_f8(x[i], 2, -14, 0x7b); /* at most 57344 */
}

/* ---------------------------------------------------------- narrow integers */

#define SMALLEST_NORMAL 0x1p-126f
#define F16_MAX 65504.0f

static float clamp(float x, float low, float high)
{
    return x < low ? low : x > high ? high : x;
}

/* The first element of the largest magnitude, or a NaN where one is not finite. */
static float largest_of(const float *x, int64_t n)
{
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return kv_float_of(0x7fc00000);
        if (fabsf(x[i]) > fabsf(largest))
            largest = x[i];
    }
    return largest;
}

static float inverse_of(float d)
{
    return fabsf(d) < SMALLEST_NORMAL ? 0.0f : 1.0f / d;
}

static void store_scale_16(void *p, float d)
{
    uint16_t half;
    qkv_narrow_f16_scalar(&d, &half, 1);
    memcpy(p, &half, sizeof half);
}

/* e = [x * (1 / d)]; 0 where d is a NaN. */
static void narrow_8(const float *x, float d, int8_t *y, int64_t n)
{
    const float inverse = inverse_of(d);
    for (int64_t i = 0; i < n; i++)
        y[i] = isnan(d) ? 0 : (int8_t)nearbyintf(clamp(x[i] * inverse, -127.0f, 127.0f));
}

void qkv_narrow_i8_scalar(const float *x, void *y, float *scale, int64_t n)
{
    const float d = fabsf(largest_of(x, n)) / 127.0f;
    narrow_8(x, d, y, n);
    *scale = d < SMALLEST_NORMAL ? 0.0f : d;
}

void qkv_narrow_q8_0_scalar(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    char *block = y;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q8_0_BYTES) {
        const float d = clamp(fabsf(largest_of(x + i, QKV_KV_BLOCK)) / 127.0f, 0.0f, F16_MAX);
        store_scale_16(block, d);
        narrow_8(x + i, d, (int8_t *)block + 2, QKV_KV_BLOCK);
    }
}

static uint8_t nibble(float x, float d)
{
    if (isnan(d))
        return 8;
    const float e = clamp(x * inverse_of(d), -8.0f, 7.0f) + 8.5f;
    return (uint8_t)e; /* at most 15.5 */
}

void qkv_narrow_q4_0_scalar(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    uint8_t *block = y;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q4_0_BYTES) {
        const float d = clamp(largest_of(x + i, QKV_KV_BLOCK) / -8.0f, -F16_MAX, F16_MAX);
        store_scale_16(block, d);
        for (int64_t j = 0; j < 16; j++)
            block[2 + j] = (uint8_t)(nibble(x[i + j], d) | nibble(x[i + j + 16], d) << 4);
    }
}
