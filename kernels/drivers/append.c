/* SPDX-License-Identifier: MIT */
/*
 * Filling a cache, row by row: widen, turn, narrow. A row passes through the
 * first-level cache at most twice on its way; f32 that is only narrowed goes
 * straight from its source, and 16-bit elements of the same type are copied.
 */
#include "append.h"
#include "typed.h"

#include <string.h>

/* Where a row comes from and goes to, and its position in its sequence. */
typedef struct row_move {
    const void *from;
    void *to;
    float *scale;
    int64_t position;
} row_move;

static void move_row(const qkv_append_problem *p, const qkv_append_side *side, const qkv_kernels *k,
                     row_move m)
{
    float wide[QKV_APPEND_DIM_MAX], turned[QKV_APPEND_DIM_MAX];
    const int64_t n = side->from.dim, pairs = side->rotary_pairs;
    const int32_t from = side->from.dtype, to = side->to.dtype;
    if (from == to && !pairs) {
        memcpy(m.to, m.from, (size_t)qkv_bytes(to, n));
        return;
    }
    const float *x = m.from;
    if (from != QKV_F32) {
        qkv_widen_typed(k, from, m.from, NULL, wide, n);
        x = wide;
    }
    if (pairs) {
        k->rotary_f32(x, p->cosines + m.position * p->rotary_stride,
                      p->sines + m.position * p->rotary_stride, turned, pairs, p->neighbours);
        memcpy(turned + 2 * pairs, x + 2 * pairs, (size_t)(n - 2 * pairs) * sizeof *x);
        x = turned;
    }
    qkv_narrow_typed(k, to, x, m.to, m.scale, n);
}

/* The new rows of one sequence and head. */
static void move_rows(const qkv_append_problem *p, const qkv_append_side *side,
                      const qkv_kernels *k, int64_t b, int64_t head)
{
    const int64_t first = p->new_starts ? p->new_starts[b] : 0;
    const int64_t count = p->new_starts ? p->new_starts[b + 1] - first : p->new_len;
    const int64_t position = p->positions ? p->positions[b] : 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = position + i;
        int64_t batch = b, row = at;
        if (p->page_table) {
            batch = p->page_table[b * p->page_table_stride + at / p->page_size];
            row = at % p->page_size;
        }
        move_row(
            p, side, k,
            (row_move){.from = qkv_view_row(&side->from, p->new_starts ? 0 : b, head, first + i),
                       .to = qkv_view_row(&side->to, batch, head, row),
                       .scale =
                           side->scale.data ? qkv_view_row(&side->scale, batch, head, row) : NULL,
                       .position = at});
    }
}

void qkv_run_append(const qkv_append_problem *p, const qkv_kernels *k)
{
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t head = 0; head < p->heads; head++) {
            if (p->key.from.data)
                move_rows(p, &p->key, k, b, head);
            if (p->value.from.data)
                move_rows(p, &p->value, k, b, head);
        }
    }
}
