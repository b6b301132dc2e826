/* SPDX-License-Identifier: MIT */
/*
 * Step 1, projection: one panel of y = x W + bias, lanes along the columns.
 *
 * 12 rows x 2 vectors of accumulators (24), 2 vectors of the panel, 1
 * broadcast of x: 27 of 32 registers. A step of depth has 24 multiply-adds
 * and 14 loads, and streams 128 bytes of the panel: 11 bytes a cycle, which
 * the second-level cache delivers. 8 x 3 would load less (11) and stream half
 * as much again, and 48 columns do not divide a head of 64 or 128. The rows
 * that are left take 8, 6, 5 or 4 at a time where they can be made of these: 8 chains
 * cover a latency of 4 cycles. Each output is one chain over depth, so that a row's
 * bits do not depend on the rows around it.
 *
 * The addresses of x are those of every fourth row plus 0 to 3 strides: with 12
 * pointers GCC runs out of registers.
 *
 * Pieces are copied for a later call a few after every 8 steps, each with the lines
 * of a piece some rows on asked for.
 *
 * By llvm-mca 19, cycles a step and the bound of the multiply-adds: 13.04
 * (12) on skylake-avx512, 24.05 (24) on sapphirerapids, 36.0 (24) on znver4;
 * without the slots that the first and the last charge for broadcasts from
 * memory (see tile_avx512.c) all meet the bound.
 */
#include "internal.h"

#include "isa_avx512.h"

enum {
    COLS = QKV_avx512_gemm_cols,
    ROWS = 12,
    BLOCK = 8, /* steps between copies */
    AHEAD = 4  /* rows that a copy is asked for ahead, in the second-level cache: its
                  lines would push the panel out of the first */
};

/* 16 elements as f32. */
ALWAYS_INLINE __m512 load_wide(const char *p, const int32_t dtype)
{
    if (dtype == QKV_F32)
        return _mm512_loadu_ps(p);
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    if (dtype == QKV_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The next pieces. Inlined, as a call would move all accumulators to memory and back. */
ALWAYS_INLINE void copy_pieces(qkv_gemm_copy *copy, int64_t n)
{
    const int64_t size = copy->dtype == QKV_F32 ? 4 : 2;
    for (int64_t i = 0; i < n; i++) {
        const char *from = (const char *)copy->from + copy->panel * COLS * size;
        const char *later = from + AHEAD * copy->from_stride * size;
        float *to = copy->to + copy->panel * copy->to_stride;
        QKV_PREFETCH_LATER(later);
        QKV_PREFETCH_LATER(later + (COLS * size - 1));
        _mm512_storeu_ps(to, load_wide(from, copy->dtype));
        _mm512_storeu_ps(to + LANES, load_wide(from + LANES * size, copy->dtype));
        if (++copy->panel == copy->panels) {
            copy->panel = 0;
            copy->from = (const char *)copy->from + copy->from_stride * size;
            copy->to += COLS;
        }
    }
    copy->pieces -= n;
}

/* Some steps of depth for some rows. */
ALWAYS_INLINE void steps(const float *const x[ROWS / 4], int64_t x_stride, const float *panel,
                         int64_t begin, int64_t end, const int rows, const int vecs, __m512 *acc)
{
    for (int64_t k = begin; k < end; k++) {
        const __m512 w0 = _mm512_loadu_ps(panel + k * COLS);
        const __m512 w1 = vecs > 1 ? _mm512_loadu_ps(panel + k * COLS + LANES) : w0;
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 value = _mm512_set1_ps(x[r / 4][k + r % 4 * x_stride]);
            acc[r * vecs] = _mm512_fmadd_ps(value, w0, acc[r * vecs]);
            if (vecs > 1)
                acc[r * vecs + 1] = _mm512_fmadd_ps(value, w1, acc[r * vecs + 1]);
        }
    }
}

/*
 * Rows i .. i + rows - 1 of a panel of which 'vecs' vectors hold columns that exist,
 * and the next 'pieces' of the copy.
 */
ALWAYS_INLINE void product(const qkv_gemm_args *a, int64_t i, int64_t pieces, const int rows,
                           const int vecs)
{
    const float *x[ROWS / 4] = {0};
    __m512 acc[ROWS * 2];
    UNROLL
    for (int r = 0; r < rows; r += 4)
        x[r / 4] = a->x + (i + r) * a->x_stride;
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        acc[u] = _mm512_setzero_ps();

    /* For the end, which would wait for them. */
    UNROLL
    for (int u = 0; u < rows * vecs; u++)
        QKV_PREFETCH(a->y + (i + u / vecs) * a->y_stride + u % vecs * LANES);

    int64_t k = 0;
    if (pieces > 0) {
        const int64_t blocks = a->depth / BLOCK, each = blocks ? pieces / blocks : 0;
        const int64_t more =
            pieces - each * blocks; /* blocks that take one more, or what is left */
        for (int64_t b = 0; b < blocks; b++, k += BLOCK) {
            steps(x, a->x_stride, a->panel, k, k + BLOCK, rows, vecs, acc);
            copy_pieces(a->copy, each + (b < more));
        }
        if (blocks == 0)
            copy_pieces(a->copy, pieces);
    }
    steps(x, a->x_stride, a->panel, k, a->depth, rows, vecs, acc);

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

/* How many of the rows that are left go next. */
static int64_t next_rows(int64_t left)
{
    static const int8_t next[] = {0,  1, 2, 3, 4, 5,  6,  4, 8,  5, 6, 6,
                                  12, 8, 8, 8, 8, 12, 12, 8, 12, 8, 8, 12};
    return left < (int64_t)sizeof next ? next[left] : ROWS;
}

ALWAYS_INLINE void all_rows(const qkv_gemm_args *a, const int vecs)
{
    const int64_t all = a->copy ? a->copy->pieces : 0;
    for (int64_t n, i = 0; i < a->rows; i += n) {
        n = next_rows(a->rows - i);
        const int64_t pieces = all * (i + n) / a->rows - all * i / a->rows;
        switch (n) {
        case 12:
            product(a, i, pieces, 12, vecs);
            break;
        case 8:
            product(a, i, pieces, 8, vecs);
            break;
        case 6:
            product(a, i, pieces, 6, vecs);
            break;
        case 5:
            product(a, i, pieces, 5, vecs);
            break;
        case 4:
            product(a, i, pieces, 4, vecs);
            break;
        case 3:
            product(a, i, pieces, 3, vecs);
            break;
        case 2:
            product(a, i, pieces, 2, vecs);
            break;
        default:
            product(a, i, pieces, 1, vecs);
            break;
        }
    }
}

void qkv_gemm_f32_avx512(const qkv_gemm_args *args)
{
    const qkv_gemm_args a = *args; /* a copy that no store can alias */
    if (a.cols > LANES)
        all_rows(&a, 2);
    else
        all_rows(&a, 1);
}
