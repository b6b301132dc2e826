/* SPDX-License-Identifier: MIT */
/*
 * Rows of a cache to f32, 8 elements at a time. Integers: two widenings and a
 * conversion for each 4, times the scale; the products of blocks are exact.
 * e5m2 is the upper half of an f16. e4m3 has the fields of an f16 but for an
 * exponent that lacks its highest bit: moved there it is an f16 of 2^-8 times
 * the value, and only its NaN has to be made one.
 */
#include "internal.h"

#include <string.h>

#include "isa_neon.h"

typedef struct pair {
    float32x4_t low, high;
} pair;

QKV_INLINE void store_pair(float *y, int64_t n, pair x)
{
    store_upto4(y, x.low, n);
    if (n > 4)
        store_upto4(y + 4, x.high, n - 4);
}

QKV_INLINE pair from_integers(int8x8_t x, float32x4_t scale)
{
    const int16x8_t wide = vmovl_s8(x);
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    const float32x4_t high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
    return (pair){vmulq_f32(low, scale), vmulq_f32(high, scale)};
}

QKV_INLINE pair from_halves(uint16x8_t x)
{
    return (pair){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x))),
                  vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)))};
}

QKV_INLINE pair from_e5m2(uint8x8_t x)
{
    return from_halves(vshlq_n_u16(vmovl_u8(x), 8));
}

QKV_INLINE pair from_e4m3(uint8x8_t x)
{
    const uint16x8_t moved = vshlq_n_u16(vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(x))), 7);
    const uint16x8_t magnitude = vandq_u16(moved, vdupq_n_u16(0x3fff));
    const uint16x8_t nan = vcgtq_u16(magnitude, vdupq_n_u16(0x3f00));
    const uint16x8_t half = vandq_u16(moved, vdupq_n_u16(0xbfff));
    const pair p = from_halves(vorrq_u16(half, nan));
    return (pair){vmulq_f32(p.low, vdupq_n_f32(256.0f)), vmulq_f32(p.high, vdupq_n_f32(256.0f))};
}

QKV_INLINE uint8x8_t load_bytes(const uint8_t *x, int64_t n)
{
    uint8_t copy[8] = {0};
    if (n >= 8)
        return vld1_u8(x);
    for (int64_t i = 0; i < n; i++)
        copy[i] = x[i];
    return vld1_u8(copy);
}

void qkv_widen_i8_neon(const void *x, const float *scale, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8)
        store_pair(y + i, n - i,
                   from_integers(vreinterpret_s8_u8(load_bytes((const uint8_t *)x + i, n - i)),
                                 vdupq_n_f32(*scale)));
}

void qkv_widen_f8_e5m2_neon(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    for (int64_t i = 0; i < n; i += 8)
        store_pair(y + i, n - i, from_e5m2(load_bytes((const uint8_t *)x + i, n - i)));
}

void qkv_widen_f8_e4m3_neon(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    for (int64_t i = 0; i < n; i += 8)
        store_pair(y + i, n - i, from_e4m3(load_bytes((const uint8_t *)x + i, n - i)));
}

/* The scale of a block in all lanes. */
QKV_INLINE float32x4_t block_scale(const uint8_t *block)
{
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
}

void qkv_widen_q8_0_neon(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    const uint8_t *block = x;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q8_0_BYTES)
        for (int d = 0; d < QKV_KV_BLOCK; d += 8)
            store_pair(
                y + i + d, 8,
                from_integers(vreinterpret_s8_u8(vld1_u8(block + 2 + d)), block_scale(block)));
}

void qkv_widen_q4_0_neon(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    const uint8_t *block = x;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q4_0_BYTES) {
        const float32x4_t s = block_scale(block);
        const int8x8_t eight = vdup_n_s8(8);
        for (int d = 0; d < 16; d += 8) {
            const uint8x8_t bytes = vld1_u8(block + 2 + d);
            const int8x8_t low = vreinterpret_s8_u8(vand_u8(bytes, vdup_n_u8(15)));
            const int8x8_t high = vreinterpret_s8_u8(vshr_n_u8(bytes, 4));
            store_pair(y + i + d, 8, from_integers(vsub_s8(low, eight), s));
            store_pair(y + i + 16 + d, 8, from_integers(vsub_s8(high, eight), s));
        }
    }
}
