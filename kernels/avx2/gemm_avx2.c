/* SPDX-License-Identifier: MIT */
/*
 * One panel of y = x W + bias: y[i][c] = sum over k of x[i][k] * panel[k][c].
 *
 * The lanes run along the 16 columns of the panel. Registers: 6 rows x 2
 * vectors of accumulators, 2 of the panel, 2 broadcast from x, the register
 * block of block_avx2.h: 20 instructions in 6 cycles on two FMA ports, its 8
 * loads take 4 on two load ports.
 *
 * A copy waits for memory, so its pieces are spread evenly: over the rows, and
 * over the depth as the same number of pieces after the same number of blocks of
 * 8 steps. A branch that the predictor cannot know costs more than the piece, and
 * prefetches in bursts hold the miss buffers that x and the panel need, too. A
 * piece is a line to read: 2 loads, 2 stores and a prefetch.
 *
 * Measured on a Zen 3, 16 x 4096 x 4096, in parts of the multiply-adds' bound:
 * 0.88 without a copy, 0.78 with its stores alone, 0.60 with its prefetches alone,
 * 0.51 with all of it; with f16 weights, half as many lines, 0.63. With 128 rows
 * 0.92, 0.90, 0.85 and 0.83.
 *
 * 5 rows have 10 chains and 4 have 8, which just cover a latency of 4 cycles;
 * every number of rows but 1, 2, 3 and 7 is made of 6, 5 and 4.
 */
#include "internal.h"

#include "block_avx2.h"
#include "isa_avx2.h"

enum {
    PANEL = QKV_avx2_gemm_cols,
    ROWS = PRODUCT_ROWS,
    AHEAD = 4 /* rows that a copy is prefetched ahead: two are late at times */
};

QKV_INLINE __m256 base_of(const qkv_gemm_args *a, const float *y, int64_t column, int64_t cols)
{
    const float *base = a->accumulate ? y : a->bias ? a->bias + column : NULL;
    if (!base || cols <= 0)
        return _mm256_setzero_ps();
    return cols >= LANES ? _mm256_loadu_ps(base) : load_tail(base, cols);
}

QKV_INLINE void store_row(const qkv_gemm_args *a, float *y, const __m256 acc[2])
{
    QKV_UNROLL
    for (int v = 0; v < 2; v++) {
        const int64_t cols = a->cols - v * LANES;
        if (cols <= 0)
            return;
        float *at = y + v * LANES;
        const __m256 sum = _mm256_add_ps(base_of(a, at, v * LANES, cols), acc[v]);
        if (cols >= LANES)
            _mm256_storeu_ps(at, sum);
        else
            store_tail(at, cols, sum);
    }
}

/* What is left to copy: 'from' runs along a row of the source up to 'end'. */
typedef struct copying {
    const char *from, *end;
    float *to;
    int64_t row, row_bytes; /* from one row to the next, and what a row has */
    int64_t to_stride, to_back;
} copying;

QKV_INLINE copying start_copy(const qkv_gemm_copy *copy, const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2, piece = PANEL * size;
    const char *from = copy->from;
    return (copying){.from = from + copy->panel * piece,
                     .end = from + copy->panels * piece,
                     .to = copy->to + copy->panel * copy->to_stride,
                     .row = copy->from_stride * size,
                     .row_bytes = copy->panels * piece,
                     .to_stride = copy->to_stride,
                     .to_back = copy->panels * copy->to_stride - PANEL};
}

QKV_INLINE void end_copy(qkv_gemm_copy *copy, const copying *c, const int32_t dtype)
{
    const int64_t piece = PANEL * (dtype == QKV_F32 ? 4 : 2);
    const char *start = c->end - c->row_bytes;
    copy->from = start;
    copy->panel = (c->from - start) / piece;
    copy->to = c->to - copy->panel * c->to_stride;
    copy->pieces = 0;
}

QKV_INLINE void copy_piece(copying *c, const int32_t dtype)
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2;
    prefetch_far(c->from, AHEAD * c->row);
    _mm256_storeu_ps(c->to, load_wide(c->from, dtype));
    _mm256_storeu_ps(c->to + LANES, load_wide(c->from + LANES * size, dtype));
    c->from += PANEL * size;
    c->to += c->to_stride;
    if (c->from == c->end) {
        c->end += c->row;
        c->from = c->end - c->row_bytes;
        c->to -= c->to_back;
    }
}

/* Rows of x and of the panel, at the same depth. */
typedef struct operands {
    const float *x, *panel;
    int64_t stride;
} operands;

QKV_INLINE void move_on(operands *o, int64_t steps)
{
    o->x += steps;
    o->panel += steps * PANEL;
}

/*
 * How the pieces are spread over the blocks of 8 steps: 'each' pieces after
 * every 'gap' blocks, 'times' times. What does not divide evenly is left to plain
 * blocks before and single pieces behind.
 */
typedef struct spread {
    int64_t times, gap, each;
} spread;

QKV_INLINE spread spread_evenly(int64_t pieces, int64_t blocks)
{
    const int64_t times = pieces < blocks ? pieces : blocks;
    if (times == 0)
        return (spread){.times = 0};
    return (spread){times, blocks / times, pieces / times};
}

QKV_INLINE void multiply_and_copy(operands *o, spread s, int64_t pieces, const int rows,
                                  const int32_t dtype, qkv_gemm_copy *copy, __m256 acc[ROWS][2])
{
    copying c = start_copy(copy, dtype);
    for (int64_t t = 0; t < s.times; t++) {
        for (int64_t g = 0; g < s.gap; g++) {
            product_8(o->x, o->stride, o->panel, rows, acc);
            move_on(o, PRODUCT_STEPS);
        }
        for (int64_t i = 0; i < s.each; i++)
            copy_piece(&c, dtype);
    }
    for (int64_t i = s.times * s.each; i < pieces; i++)
        copy_piece(&c, dtype);
    end_copy(copy, &c, dtype);
}

QKV_INLINE void multiply_rows(const qkv_gemm_args *a, int64_t row, qkv_gemm_copy *copy,
                              int64_t pieces, const int rows)
{
    __m256 acc[ROWS][2];
    float *y = a->y + row * a->y_stride;
    QKV_UNROLL
    for (int r = 0; r < rows; r++)
        _mm_prefetch((const char *)(y + r * a->y_stride), _MM_HINT_T0);

    const spread s = spread_evenly(pieces, a->depth / PRODUCT_STEPS);
    const int64_t plain = a->depth - s.times * s.gap * PRODUCT_STEPS;
    operands o = {a->x + row * a->x_stride, a->panel, a->x_stride};
    product_steps(o.x, o.stride, o.panel, plain, rows, acc);
    move_on(&o, plain);
    if (pieces > 0) {
        if (copy->dtype == QKV_F32)
            multiply_and_copy(&o, s, pieces, rows, QKV_F32, copy, acc);
        else if (copy->dtype == QKV_F16)
            multiply_and_copy(&o, s, pieces, rows, QKV_F16, copy, acc);
        else
            multiply_and_copy(&o, s, pieces, rows, QKV_BF16, copy, acc);
    }

    QKV_UNROLL
    for (int r = 0; r < rows; r++)
        store_row(a, y + r * a->y_stride, acc[r]);
}

/* The next 1 to 6 rows, so that few steps are left with fewer than 4. */
static int64_t next_rows(int64_t rows)
{
    if (rows == 8 || rows == 9)
        return rows - 4;
    if (rows == 7)
        return 4;
    if (rows == 13)
        return 5;
    return rows < ROWS ? rows : ROWS;
}

void qkv_gemm_f32_avx2(const qkv_gemm_args *args)
{
    const qkv_gemm_args a = *args; /* a copy that no store can alias */
    qkv_gemm_copy copy = a.copy ? *a.copy : (qkv_gemm_copy){.pieces = 0};
    const int64_t all = copy.pieces;
    for (int64_t n, i = 0; i < a.rows; i += n) {
        n = next_rows(a.rows - i);
        /* Each group of rows copies its share: so the waiting spreads. */
        const int64_t pieces = all * (i + n) / a.rows - all * i / a.rows;
        switch (n) {
        case 6:
            multiply_rows(&a, i, &copy, pieces, 6);
            break;
        case 5:
            multiply_rows(&a, i, &copy, pieces, 5);
            break;
        case 4:
            multiply_rows(&a, i, &copy, pieces, 4);
            break;
        case 3:
            multiply_rows(&a, i, &copy, pieces, 3);
            break;
        case 2:
            multiply_rows(&a, i, &copy, pieces, 2);
            break;
        default:
            multiply_rows(&a, i, &copy, pieces, 1);
            break;
        }
    }
    if (a.copy) {
        copy.pieces = 0;
        *a.copy = copy;
    }
}
