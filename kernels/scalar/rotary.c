/* SPDX-License-Identifier: MIT */
/*
 * Rotary position embedding of one row: pair i, (a, b), becomes
 * (a cos_i - b sin_i, a sin_i + b cos_i). Su et al., "RoFormer: Enhanced
 * Transformer with Rotary Position Embedding", 2021, equation 34; the pairs
 * are neighbours there, and halves of the row in most implementations since.
 * Each product and each sum is rounded, none fused: every ISA gives these
 * bits.
 */
#include "internal.h"

void qkv_rotary_f32_scalar(const float *x, const float *cosines, const float *sines, float *y,
                           int64_t pairs, bool neighbours)
{
    const int64_t step = neighbours ? 2 : 1, to_second = neighbours ? 1 : pairs;
    for (int64_t i = 0; i < pairs; i++) {
        const float a = x[i * step], b = x[i * step + to_second];
        y[i * step] = a * cosines[i] - b * sines[i];
        y[i * step + to_second] = a * sines[i] + b * cosines[i];
    }
}
