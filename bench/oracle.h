/* SPDX-License-Identifier: MIT */
/* The definitions again, in double precision, a row at a time. */
#ifndef BENCH_ORACLE_H
#define BENCH_ORACLE_H

#include <stdint.h>

double bench_oracle_dot(const float *x, int64_t x_stride, const float *y, int64_t y_stride,
                        int64_t n);

/* x[j] = exp(x[j] - max) / sum, in place. */
void bench_oracle_softmax(double *x, int64_t n);

/*
 * The largest |out - exact| of one attention row that sees 'kv_len' keys;
 * 'weights' is room for as many.
 */
typedef struct bench_oracle_row {
    const float *query, *keys, *values, *out;
    int64_t keys_stride, values_stride, kv_len, head_dim, value_dim;
    double scale;
} bench_oracle_row;
double bench_oracle_attention(const bench_oracle_row *row, double *weights);

/* The larger of the two; NaN if either is. */
double bench_oracle_worse(double a, double b);

#endif
