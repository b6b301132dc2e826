/* SPDX-License-Identifier: MIT */
/* Scores against the keys of a cache, widened a few at a time. */
#include "kv_staged_neon.h"

#define DOT(type, widen)                                                                           \
    void qkv_dot_##type##_neon(const qkv_dot_args *a)                                              \
    {                                                                                              \
        kv_staged_dot(a, widen);                                                                   \
    }
DOT(f16, kv_widen_f16)
DOT(bf16, kv_widen_bf16)
DOT(i8, qkv_widen_i8_neon)
DOT(q8_0, qkv_widen_q8_0_neon)
DOT(q4_0, qkv_widen_q4_0_neon)
DOT(f8_e4m3, qkv_widen_f8_e4m3_neon)
DOT(f8_e5m2, qkv_widen_f8_e5m2_neon)
