/* SPDX-License-Identifier: MIT */
/*
 * The kernels of an element type that is known at run time. Rows are of any
 * type that a cache can have; 'scale' is read or written for QKV_I8 only, and
 * may be NULL for the others.
 */
#ifndef QKV_DRIVERS_TYPED_H
#define QKV_DRIVERS_TYPED_H

#include "internal.h"

/* One row of 'n' elements to f32 and from f32. */
void qkv_widen_typed(const qkv_kernels *kernels, int32_t dtype, const void *row, const float *scale,
                     float *wide, int64_t n);
void qkv_narrow_typed(const qkv_kernels *kernels, int32_t dtype, const float *wide, void *row,
                      float *scale, int64_t n);

/* Strides of keys and values are in bytes, for f32 too. */
void qkv_dot_typed(const qkv_kernels *kernels, int32_t dtype, const qkv_dot_args *args);
void qkv_weighted_sum_typed(const qkv_kernels *kernels, int32_t dtype,
                            const qkv_weighted_sum_args *args);

#endif
