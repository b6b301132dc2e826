/* SPDX-License-Identifier: MIT */
/*
 * The elements of key/value caches one by one, as internal.h defines the
 * formats. The 8-bit floats: Open Compute Project, "OCP 8-bit Floating Point
 * Specification (OFP8)", revision 1.0, 2023, section 5; the blocks are those
 * of the GGUF file format's types Q8_0 and Q4_0.
 */
#ifndef QKV_KV_SCALAR_H
#define QKV_KV_SCALAR_H

#include <string.h>

#include "internal.h"

static inline float kv_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t kv_bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint16_t kv_load_16(const void *p)
{
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/*
 * The value of a float of 'exponent_bits' and 'fraction_bits' below its sign,
 * as IEEE 754 defines it: infinities and NaNs (made quiet) at the highest
 * exponent, which e4m3 uses for numbers as well.
 */
static inline float kv_ieee(uint32_t x, int exponent_bits, int fraction_bits)
{
    const uint32_t sign = x >> (exponent_bits + fraction_bits) << 31;
    const uint32_t largest = (1u << exponent_bits) - 1, bias = largest >> 1;
    const uint32_t exponent = x >> fraction_bits & largest;
    const uint32_t fraction = x & ((1u << fraction_bits) - 1);
    const uint32_t aligned = fraction << (23 - fraction_bits);
    if (exponent == largest)
        return kv_float_of(sign | 0x7f800000 | aligned | (fraction ? 0x00400000 : 0));
    if (exponent == 0) { /* zero or subnormal: a multiple of the smallest, exact in f32 */
        const float step = kv_float_of((128 - bias - (uint32_t)fraction_bits) << 23);
        const float magnitude = (float)fraction * step;
        return sign ? -magnitude : magnitude;
    }
    return kv_float_of(sign | (exponent + 127 - bias) << 23 | aligned);
}

/* What the f32 of one element of a row is; 'scale' is the row's, of i8 only. */
typedef float kv_element_fn(const void *row, int64_t i, float scale);

static inline float kv_f32(const void *row, int64_t i, float scale)
{
    float x;
    (void)scale;
    memcpy(&x, (const char *)row + 4 * i, sizeof x);
    return x;
}

static inline float kv_f16(const void *row, int64_t i, float scale)
{
    (void)scale;
    return kv_ieee(kv_load_16((const char *)row + 2 * i), 5, 10);
}

static inline float kv_bf16(const void *row, int64_t i, float scale)
{
    (void)scale;
    return kv_float_of((uint32_t)kv_load_16((const char *)row + 2 * i) << 16);
}

/* Bias 7; only the fraction 7 of the exponent 15 is a NaN. */
static inline float kv_f8_e4m3(const void *row, int64_t i, float scale)
{
    (void)scale;
    const uint32_t x = ((const uint8_t *)row)[i], sign = x >> 7 << 31;
    if ((x & 0x7f) == 0x7f)
        return kv_float_of(sign | 0x7fc00000);
    if ((x & 0x78) == 0x78) /* 2^8 * (1 + fraction / 8) */
        return kv_float_of(sign | (127 + 8) << 23 | (x & 7) << 20);
    return kv_ieee(x, 4, 3);
}

static inline float kv_f8_e5m2(const void *row, int64_t i, float scale)
{
    (void)scale;
    return kv_ieee(((const uint8_t *)row)[i], 5, 2);
}

static inline float kv_q8_0(const void *row, int64_t i, float scale)
{
    (void)scale;
    const char *block = (const char *)row + i / QKV_KV_BLOCK * QKV_Q8_0_BYTES;
    const int8_t e = (int8_t)block[2 + i % QKV_KV_BLOCK];
    return kv_f16(block, 0, 0.0f) * (float)e;
}

static inline float kv_q4_0(const void *row, int64_t i, float scale)
{
    (void)scale;
    const uint8_t *block = (const uint8_t *)row + i / QKV_KV_BLOCK * QKV_Q4_0_BYTES;
    const int at = (int)(i % QKV_KV_BLOCK);
    const int e = at < 16 ? block[2 + at] & 15 : block[2 + at - 16] >> 4;
    return kv_f16(block, 0, 0.0f) * (float)(e - 8);
}

static inline float kv_i8(const void *row, int64_t i, float scale)
{
    return scale * (float)((const int8_t *)row)[i];
}

/* The formats but f32, for definitions that are the same for each. */
#define KV_FORMATS(define)                                                                         \
    define(f16) define(bf16) define(q8_0) define(i8) define(f8_e4m3) define(f8_e5m2) define(q4_0)

#endif
