/* SPDX-License-Identifier: MIT */
/* Scores against the keys of a cache, widened a few at a time; see kv_staged.h. */
#include "../kv_staged.h"

static void widen_f16(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    qkv_widen_f16_neon(x, y, n);
}

static void widen_bf16(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    qkv_widen_bf16_neon(x, y, n);
}

void qkv_dot_f16_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, widen_f16, qkv_dot_f32_neon);
}

void qkv_dot_bf16_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, widen_bf16, qkv_dot_f32_neon);
}

void qkv_dot_i8_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, qkv_widen_i8_neon, qkv_dot_f32_neon);
}

void qkv_dot_q8_0_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, qkv_widen_q8_0_neon, qkv_dot_f32_neon);
}

void qkv_dot_q4_0_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, qkv_widen_q4_0_neon, qkv_dot_f32_neon);
}

void qkv_dot_f8_e4m3_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, qkv_widen_f8_e4m3_neon, qkv_dot_f32_neon);
}

void qkv_dot_f8_e5m2_neon(const qkv_dot_kv_args *a)
{
    kv_staged_dot(a, qkv_widen_f8_e5m2_neon, qkv_dot_f32_neon);
}
