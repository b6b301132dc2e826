/* SPDX-License-Identifier: MIT */
#include <math.h>

#include "api.h"

/* Slope 'h' of 'n', a power of two: a geometric series that ends at 2^-8. */
static float slope(int64_t h, int64_t n)
{
    return (float)exp2(-8.0 * (double)(h + 1) / (double)n);
}

qkv_status qkv_alibi_slopes(float *slopes, int64_t heads)
{
    if (heads < 0)
        return QKV_E_SHAPE;
    if (heads == 0)
        return QKV_OK;
    if (!slopes)
        return QKV_E_NULL;
    if (!qkv_aligned(slopes, sizeof *slopes))
        return QKV_E_ALIGN;
    if (!qkv_array_fits(slopes, heads, sizeof *slopes))
        return QKV_E_OVERFLOW;

    int64_t n = 1;
    while (n <= heads / 2)
        n *= 2;
    for (int64_t h = 0; h < heads; h++)
        slopes[h] = h < n ? slope(h, n) : slope(2 * (h - n), 2 * n);
    return QKV_OK;
}
