/* SPDX-License-Identifier: MIT */
/*
 * Step 1, projection: one panel of y = x W + bias, lanes along the columns.
 *
 * 12 rows x 2 vectors of accumulators (24), 2 vectors of the panel, 1
 * broadcast of x: 27 of 32 registers. A step of depth has 24 multiply-adds
 * and 14 loads, and streams 128 bytes of the panel: 11 bytes a cycle, which
 * the second-level cache delivers. 8 x 3 would load less (11) and stream half
 * as much again, and 48 columns do not divide a head of 64 or 128. The rows
 * that are left take 4, 2 or 1 at a time. Each output is one chain over
 * depth, so that a row's bits do not depend on the rows around it.
 *
 * The addresses of x are those of every third row plus 0, 1 or 2 strides:
 * with 12 pointers GCC runs out of registers.
 *
 * By llvm-mca 19, cycles a step and the bound of the multiply-adds: 13.04
 * (12) on skylake-avx512, 24.05 (24) on sapphirerapids, 36.0 (24) on znver4;
 * without the slots that the first and the last charge for broadcasts from
 * memory (see tile_avx512.c) all meet the bound.
 */
#include "internal.h"

#include "isa_avx512.h"

enum { COLS = QKV_avx512_gemm_cols, ROWS = 12 };

/*
 * Rows i .. i + rows - 1 of a panel of which 'vecs' vectors hold columns
 * that exist.
 */
ALWAYS_INLINE void product(const qkv_gemm_args *a, int64_t i, const int rows, const int vecs)
{
    const float *x[ROWS / 3];
    __m512 acc[ROWS * 2];
    UNROLL
    for (int r = 0; r < rows; r += 3)
        x[r / 3] = a->x + min_i64(i + r, a->rows - 1) * a->x_stride;
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        acc[u] = _mm512_setzero_ps();

    for (int64_t k = 0; k < a->depth; k++) {
        const __m512 w0 = _mm512_loadu_ps(a->panel + k * COLS);
        const __m512 w1 = vecs > 1 ? _mm512_loadu_ps(a->panel + k * COLS + LANES) : w0;
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 value = _mm512_set1_ps(x[r / 3][k + r % 3 * a->x_stride]);
            acc[r * vecs] = _mm512_fmadd_ps(value, w0, acc[r * vecs]);
            if (vecs > 1)
                acc[r * vecs + 1] = _mm512_fmadd_ps(value, w1, acc[r * vecs + 1]);
        }
    }

    UNROLL
    for (int u = 0; u < rows * vecs; u++) {
        const int c = u % vecs * LANES;
        const __mmask16 columns = lanes_below(a->cols - c);
        float *y = a->y + (i + u / vecs) * a->y_stride + c;
        const float *before = a->accumulate ? y : a->bias ? a->bias + c : NULL;
        if (before)
            acc[u] = _mm512_add_ps(load_tail(before, columns), acc[u]);
        store_tail(y, columns, acc[u]);
    }
}

ALWAYS_INLINE void all_rows(const qkv_gemm_args *a, const int vecs)
{
    int64_t i = 0;
    for (; a->rows - i >= ROWS; i += ROWS)
        product(a, i, ROWS, vecs);
    for (; a->rows - i >= 4; i += 4)
        product(a, i, 4, vecs);
    for (; a->rows - i >= 2; i += 2)
        product(a, i, 2, vecs);
    if (i < a->rows)
        product(a, i, 1, vecs);
}

void qkv_gemm_f32_avx512(const qkv_gemm_args *args)
{
    const qkv_gemm_args a = *args; /* a copy that no store can alias */
    if (a.cols > LANES)
        all_rows(&a, 2);
    else
        all_rows(&a, 1);
}
