/* SPDX-License-Identifier: MIT */
/*
 * The formats of key/value caches in f64, from the text of their definitions:
 * what every element of a row is worth, and what a row of f32 becomes. Shares
 * no code with the library.
 */
#ifndef ORACLE_KV_H
#define ORACLE_KV_H

#include <stddef.h>
#include <stdint.h>

typedef enum kv_format {
    KV_F16,
    KV_BF16,
    KV_Q8_0,
    KV_I8,
    KV_F8_E4M3,
    KV_F8_E5M2,
    KV_Q4_0,
    KV_FORMATS
} kv_format;

/* For each format: define(its name in kernels.def, its number here). Those that
 * only caches have, and all. */
#define KV_EACH_OF_CACHES(define)                                                                  \
    define(q8_0, KV_Q8_0) define(i8, KV_I8) define(f8_e4m3, KV_F8_E4M3)                            \
        define(f8_e5m2, KV_F8_E5M2) define(q4_0, KV_Q4_0)
#define KV_EACH(define) define(f16, KV_F16) define(bf16, KV_BF16) KV_EACH_OF_CACHES(define)

/* Bytes of a row of n elements, and of how many elements n is a multiple. */
int64_t oracle_kv_bytes(kv_format format, int64_t n);
int64_t oracle_kv_step(kv_format format);

/* How a row must be aligned: blocks may begin at any byte. */
size_t oracle_kv_align(kv_format format);

/* Element i of a row; 'scale' is the row's, of KV_I8 only. */
double oracle_kv_element(kv_format format, const void *row, int64_t i, float scale);

/* The bytes, and for KV_I8 the scale, that n elements become. */
void oracle_kv_encode(kv_format format, const float *x, int64_t n, void *row, float *scale);

#endif
