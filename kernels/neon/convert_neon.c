/* SPDX-License-Identifier: MIT */
/*
 * Between f32 and the 16-bit types: f16 by FCVTL and FCVTN, bf16 by integer
 * shifts, so that plain Armv8.0 is enough. One conversion, or one shift (bf16
 * to f32), or five integer operations (f32 to bf16) a vector.
 */
#include "internal.h"

#include <stdbool.h>
#include <string.h>

#include "isa_neon.h"

QKV_INLINE float32x4_t widen_4(uint16x4_t x, const bool bf16)
{
    return bf16 ? vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16))
                : vcvt_f32_f16(vreinterpret_f16_u16(x));
}

/* Adding 0x7fff, and one more where the kept part is odd, carries into it
 * exactly when rounding to nearest even goes up. */
QKV_INLINE uint16x4_t narrow_4(float32x4_t x, const bool bf16)
{
    if (!bf16)
        return vreinterpret_u16_f16(vcvt_f16_f32(x));
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

QKV_INLINE void widen(const uint16_t *x, float *y, int64_t n, const bool bf16)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, widen_4(vld1_u16(x + i), bf16));
    if (i < n) {
        uint16_t copy[4] = {0};
        memcpy(copy, x + i, (size_t)(n - i) * sizeof *x);
        store_tail(y + i, widen_4(vld1_u16(copy), bf16), n - i);
    }
}

QKV_INLINE void narrow(const float *x, uint16_t *y, int64_t n, const bool bf16)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(y + i, narrow_4(vld1q_f32(x + i), bf16));
    if (i < n) {
        uint16_t copy[4];
        vst1_u16(copy, narrow_4(load_tail(x + i, n - i), bf16));
        memcpy(y + i, copy, (size_t)(n - i) * sizeof *y);
    }
}

void qkv_widen_f16_neon(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, false);
}

void qkv_widen_bf16_neon(const uint16_t *x, float *y, int64_t n)
{
    widen(x, y, n, true);
}

void qkv_narrow_f16_neon(const float *x, uint16_t *y, int64_t n)
{
    narrow(x, y, n, false);
}

void qkv_narrow_bf16_neon(const float *x, uint16_t *y, int64_t n)
{
    narrow(x, y, n, true);
}
