/* SPDX-License-Identifier: MIT */
/*
 * The matrix product of a few broadcast rows with a packed panel, which both
 * the attention tile's logits and the projection are made of:
 *
 *     acc[i][v] = sum over d of x[i][d] * panel[d][v]       v: a vector of 4
 *
 * Register plan: rows * vectors accumulators (at most 24 of the 32
 * registers), one register a row for 4 elements of x, which are used lane by
 * lane, and what is left (at least 2) for the panel's vectors. x is read
 * where it lies: a row's 4 elements come with one load, which no packing
 * could better.
 *
 * Each accumulator takes the terms in the order of d, one fused multiply-add
 * each: the bits of a result do not depend on rows and vectors, and
 * |error| <= depth * u * sum |x p|.
 */
#ifndef QKV_PRODUCT_NEON_H
#define QKV_PRODUCT_NEON_H

#include "isa_neon.h"

enum { QKV_NEON_PRODUCT_ROWS = 8, QKV_NEON_PRODUCT_ACCS = 24 };

QKV_INLINE void product(const float *x, int64_t x_stride, const float *panel, int64_t panel_stride,
                        int64_t depth, int rows, int vectors, float32x4_t *acc)
{
    const float *row[QKV_NEON_PRODUCT_ROWS];
    QKV_UNROLL
    for (int i = 0; i < rows; i++)
        row[i] = x + i * x_stride;
    QKV_UNROLL
    for (int i = 0; i < rows * vectors; i++)
        acc[i] = vdupq_n_f32(0.0f);

    int64_t d = 0;
    for (; d + 4 <= depth; d += 4) {
        float32x4_t quad[QKV_NEON_PRODUCT_ROWS];
        QKV_UNROLL
        for (int i = 0; i < rows; i++)
            quad[i] = vld1q_f32(row[i] + d);
        QKV_UNROLL
        for (int lane = 0; lane < 4; lane++) {
            QKV_UNROLL
            for (int v = 0; v < vectors; v++) {
                const float32x4_t p = vld1q_f32(panel + 4 * v);
                QKV_UNROLL
                for (int i = 0; i < rows; i++)
                    acc[i * vectors + v] = fma_lane(acc[i * vectors + v], p, quad[i], lane);
            }
            panel += panel_stride;
        }
    }
    for (; d < depth; d++) {
        QKV_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float32x4_t p = vld1q_f32(panel + 4 * v);
            QKV_UNROLL
            for (int i = 0; i < rows; i++)
                acc[i * vectors + v] = vfmaq_n_f32(acc[i * vectors + v], p, row[i][d]);
        }
        panel += panel_stride;
    }
}

#endif
