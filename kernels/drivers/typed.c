/* SPDX-License-Identifier: MIT */
/* From an element type to its kernels, in one place. */
#include "typed.h"

#include <string.h>

void qkv_widen_typed(const qkv_kernels *k, int32_t dtype, const void *row, const float *scale,
                     float *wide, int64_t n)
{
    switch (dtype) {
    case QKV_F32:
        memcpy(wide, row, (size_t)n * sizeof *wide);
        break;
    case QKV_F16:
        k->widen_f16(row, wide, n);
        break;
    case QKV_BF16:
        k->widen_bf16(row, wide, n);
        break;
    case QKV_Q8_0:
        k->widen_q8_0(row, scale, wide, n);
        break;
    case QKV_I8:
        k->widen_i8(row, scale, wide, n);
        break;
    case QKV_F8_E4M3:
        k->widen_f8_e4m3(row, scale, wide, n);
        break;
    case QKV_F8_E5M2:
        k->widen_f8_e5m2(row, scale, wide, n);
        break;
    default:
        k->widen_q4_0(row, scale, wide, n);
        break;
    }
}

void qkv_narrow_typed(const qkv_kernels *k, int32_t dtype, const float *x, void *y, float *scale,
                      int64_t n)
{
    switch (dtype) {
    case QKV_F32:
        memcpy(y, x, (size_t)n * sizeof *x);
        break;
    case QKV_F16:
        k->narrow_f16(x, y, n);
        break;
    case QKV_BF16:
        k->narrow_bf16(x, y, n);
        break;
    case QKV_Q8_0:
        k->narrow_q8_0(x, y, scale, n);
        break;
    case QKV_I8:
        k->narrow_i8(x, y, scale, n);
        break;
    case QKV_F8_E4M3:
        k->narrow_f8_e4m3(x, y, scale, n);
        break;
    case QKV_F8_E5M2:
        k->narrow_f8_e5m2(x, y, scale, n);
        break;
    default:
        k->narrow_q4_0(x, y, scale, n);
    }
}

void qkv_dot_typed(const qkv_kernels *k, int32_t dtype, const qkv_dot_args *args)
{
    switch (dtype) {
    case QKV_F32:
        k->dot_f32(args);
        break;
    case QKV_F16:
        k->dot_f16(args);
        break;
    case QKV_BF16:
        k->dot_bf16(args);
        break;
    case QKV_Q8_0:
        k->dot_q8_0(args);
        break;
    case QKV_I8:
        k->dot_i8(args);
        break;
    case QKV_F8_E4M3:
        k->dot_f8_e4m3(args);
        break;
    case QKV_F8_E5M2:
        k->dot_f8_e5m2(args);
        break;
    default:
        k->dot_q4_0(args);
        break;
    }
}

void qkv_weighted_sum_typed(const qkv_kernels *k, int32_t dtype, const qkv_weighted_sum_args *args)
{
    switch (dtype) {
    case QKV_F32:
        k->weighted_sum_f32(args);
        break;
    case QKV_F16:
        k->weighted_sum_f16(args);
        break;
    case QKV_BF16:
        k->weighted_sum_bf16(args);
        break;
    case QKV_Q8_0:
        k->weighted_sum_q8_0(args);
        break;
    case QKV_I8:
        k->weighted_sum_i8(args);
        break;
    case QKV_F8_E4M3:
        k->weighted_sum_f8_e4m3(args);
        break;
    case QKV_F8_E5M2:
        k->weighted_sum_f8_e5m2(args);
        break;
    default:
        k->weighted_sum_q4_0(args);
        break;
    }
}
