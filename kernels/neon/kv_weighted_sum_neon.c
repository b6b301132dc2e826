/* SPDX-License-Identifier: MIT */
/* Weighted sums of a cache's values, widened a few at a time; see kv_staged.h. */
#include "../kv_staged.h"

enum { BLOCKS = KV_PANEL / QKV_KV_BLOCK };

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

void qkv_weighted_sum_f16_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, KV_PANEL * 2, widen_f16, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_bf16_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, KV_PANEL * 2, widen_bf16, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_i8_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, KV_PANEL, qkv_widen_i8_neon, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_q8_0_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, BLOCKS * QKV_Q8_0_BYTES, qkv_widen_q8_0_neon, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_q4_0_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, BLOCKS * QKV_Q4_0_BYTES, qkv_widen_q4_0_neon, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_f8_e4m3_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, KV_PANEL, qkv_widen_f8_e4m3_neon, qkv_weighted_sum_f32_neon);
}

void qkv_weighted_sum_f8_e5m2_neon(const qkv_weighted_sum_kv_args *a)
{
    kv_staged_sum(a, KV_PANEL, qkv_widen_f8_e5m2_neon, qkv_weighted_sum_f32_neon);
}
