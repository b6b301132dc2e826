/* SPDX-License-Identifier: MIT */
/*
 * One panel of y = x W + bias: y[i][c] = sum over k of x[i][k] * panel[k][c].
 *
 * The lanes run along the 16 columns of the panel. Registers: 6 rows x 2
 * vectors of accumulators, 2 of the panel, 2 broadcast from x, the register
 * block of block_avx2.h: 20 instructions in 6 cycles on two FMA ports, its 8
 * loads take 4 on two load ports. The copy adds 2 loads, 2 stores and a prefetch to the steps of
 * the first rows: still less than 6 cycles for any port.
 *
 * The copy waits for memory, so its pieces are spread evenly over the rows.
 *
 * 5 rows have 10 chains and 4 have 8, which just cover a latency of 4 cycles;
 * every number of rows but 1, 2, 3 and 7 is made of 6, 5 and 4.
 */
#include "internal.h"

#include "block_avx2.h"
#include "isa_avx2.h"

enum {
    PANEL = QKV_avx2_gemm_cols,
    ROWS = 6,
    AHEAD = 2 /* rows that a copy is prefetched ahead: one is late, four are no better */
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

/* What a step of depth reads: row r of x is x[r / 3] + r % 3 * stride. */
typedef struct step {
    const float *x[ROWS / 3], *panel;
    int64_t stride;
} step;

/* One step; two to a loop would save one instruction of 24, but GCC then keeps
 * every stride twice and runs out of registers. */
QKV_INLINE void multiply_step(step *s, const int n_rows, __m256 acc[ROWS][2])
{
    const __m256 w0 = _mm256_loadu_ps(s->panel), w1 = _mm256_loadu_ps(s->panel + LANES);
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        const __m256 xk = _mm256_broadcast_ss(s->x[r / 3] + r % 3 * s->stride);
        acc[r][0] = _mm256_fmadd_ps(xk, w0, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(xk, w1, acc[r][1]);
    }
    QKV_UNROLL
    for (int i = 0; i < ROWS / 3; i++)
        s->x[i]++;
    s->panel += PANEL;
}

/* As many steps as there are pieces to copy. */
QKV_INLINE void multiply_and_copy_typed(qkv_gemm_copy *copy, int64_t pieces, step *s,
                                        const int n_rows, const int32_t dtype, __m256 acc[ROWS][2])
{
    const int64_t size = dtype == QKV_F32 ? 4 : 2, row = copy->from_stride * size;
    while (pieces > 0) {
        const char *from = (const char *)copy->from + copy->panel * PANEL * size;
        float *to = copy->to + copy->panel * copy->to_stride;
        const int64_t left = copy->panels - copy->panel, here = left < pieces ? left : pieces;
        const char *end = from + here * PANEL * size;
        for (; from < end; from += PANEL * size, to += copy->to_stride) {
            prefetch_bytes(from, AHEAD * row);
            _mm256_storeu_ps(to, load_wide(from, dtype));
            _mm256_storeu_ps(to + LANES, load_wide(from + LANES * size, dtype));
            multiply_step(s, n_rows, acc);
        }
        pieces -= here;
        copy->panel += here;
        if (copy->panel == copy->panels) {
            copy->panel = 0;
            copy->from = (const char *)copy->from + row;
            copy->to += PANEL;
        }
    }
}

QKV_INLINE void multiply_and_copy(qkv_gemm_copy *copy, int64_t pieces, step *s, const int n_rows,
                                  __m256 acc[ROWS][2])
{
    if (copy->dtype == QKV_F32)
        multiply_and_copy_typed(copy, pieces, s, n_rows, QKV_F32, acc);
    else if (copy->dtype == QKV_F16)
        multiply_and_copy_typed(copy, pieces, s, n_rows, QKV_F16, acc);
    else
        multiply_and_copy_typed(copy, pieces, s, n_rows, QKV_BF16, acc);
}

QKV_INLINE void multiply_rows(const qkv_gemm_args *a, int64_t row, qkv_gemm_copy *copy,
                              int64_t pieces, const int n_rows)
{
    __m256 acc[ROWS][2];
    float *y = a->y + row * a->y_stride;
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        _mm_prefetch((const char *)(y + r * a->y_stride), _MM_HINT_T0);

    /* Steps without a copy first, those with one last. */
    int64_t plain = 0;
    if (n_rows == ROWS) {
        plain = a->depth - pieces;
        block_6x2(a->x + row * a->x_stride, a->x_stride, a->panel, plain, acc);
    } else {
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    }
    step s = {.panel = a->panel + plain * PANEL, .stride = a->x_stride};
    QKV_UNROLL
    for (int i = 0; i < ROWS / 3; i++)
        s.x[i] = a->x + (row + 3 * i) * a->x_stride + plain;
    const float *end = a->panel + a->depth * PANEL;
    while (s.panel < end - pieces * PANEL)
        multiply_step(&s, n_rows, acc);
    multiply_and_copy(copy, pieces, &s, n_rows, acc);

    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
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
