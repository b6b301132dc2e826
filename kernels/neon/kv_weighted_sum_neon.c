/* SPDX-License-Identifier: MIT */
/* Weighted sums of a cache's values, widened a few at a time. */
#include "kv_staged_neon.h"

enum { BLOCKS = KV_PANEL / QKV_KV_BLOCK };

#define WEIGHTED_SUM(type, panel_bytes, widen)                                                     \
    void qkv_weighted_sum_##type##_neon(const qkv_weighted_sum_args *a)                            \
    {                                                                                              \
        kv_staged_sum(a, (panel_bytes), widen);                                                    \
    }
WEIGHTED_SUM(f16, KV_PANEL * 2, kv_widen_f16)
WEIGHTED_SUM(bf16, KV_PANEL * 2, kv_widen_bf16)
WEIGHTED_SUM(i8, KV_PANEL, qkv_widen_i8_neon)
WEIGHTED_SUM(q8_0, BLOCKS *QKV_Q8_0_BYTES, qkv_widen_q8_0_neon)
WEIGHTED_SUM(q4_0, BLOCKS *QKV_Q4_0_BYTES, qkv_widen_q4_0_neon)
WEIGHTED_SUM(f8_e4m3, KV_PANEL, qkv_widen_f8_e4m3_neon)
WEIGHTED_SUM(f8_e5m2, KV_PANEL, qkv_widen_f8_e5m2_neon)
