/* SPDX-License-Identifier: MIT */
#include "oracle.h"

#include <math.h>

double bench_oracle_worse(double a, double b)
{
    return a > b || isnan(a) ? a : b;
}

double bench_oracle_dot(const float *x, int64_t x_stride, const float *y, int64_t y_stride,
                        int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i * x_stride] * (double)y[i * y_stride];
    return sum;
}

void bench_oracle_softmax(double *x, int64_t n)
{
    double max = -HUGE_VAL, sum = 0.0;
    for (int64_t j = 0; j < n; j++)
        max = x[j] > max ? x[j] : max;
    for (int64_t j = 0; j < n; j++)
        sum += x[j] = exp(x[j] - max);
    for (int64_t j = 0; j < n; j++)
        x[j] /= sum;
}

double bench_oracle_attention(const bench_oracle_row *r, double *weights)
{
    for (int64_t j = 0; j < r->kv_len; j++)
        weights[j] =
            r->scale * bench_oracle_dot(r->query, 1, r->keys + j * r->keys_stride, 1, r->head_dim);
    bench_oracle_softmax(weights, r->kv_len);

    double worst = 0.0;
    for (int64_t d = 0; d < r->value_dim; d++) {
        double sum = 0.0;
        for (int64_t j = 0; j < r->kv_len; j++)
            sum += weights[j] * (double)r->values[j * r->values_stride + d];
        worst = bench_oracle_worse(worst, fabs((double)r->out[d] - sum));
    }
    return worst;
}
