/* SPDX-License-Identifier: MIT */
/*
 * Filling a cache, row by row: widen, turn, narrow. A row passes through the
 * first-level cache at most twice on its way; f32 that is only narrowed goes
 * straight from its source, turned f32 straight to the cache, and elements of the same
 * type are copied.
 *
 * What costs is memory, and most of it the lines that are written, which a core reads
 * before it changes them. As many of them are under way at once as it has stores
 * waiting; whatever else is stored between two rows, for a call and on a stack, waits
 * among them. So a row's place is found by a step from the one before it, and its lines
 * are asked for some rows ahead. (Rows that touch each other as one long row for the
 * kernels: not faster, as what is asked for at a time becomes too much.)
 *
 * Stores past the caches need not read what they write. But attention on many new rows
 * reads them once for every tile of queries, and wants to find them in a cache.
 */
#include "append.h"
#include "typed.h"

#include <string.h>

enum {
    LINE = 64,
    AHEAD_BYTES = 4096, /* of the source, between asking for a row and moving it */
    /* Rows that a head moves before the next one does: their cosines and sines are
     * in the second-level cache by then, and heads that lie side by side meet in pages
     * of memory that were just used. */
    CHUNK_ROWS = 256
};

/* The rows of one sequence and head, and what lies between two of them. */
typedef struct row_list {
    const qkv_append_problem *problem;
    const qkv_append_side *side;
    const qkv_kernels *kernels;
    int64_t batch, head;
    int64_t dim;
    int64_t from_bytes, from_step; /* of a row, and to the next one */
    int64_t to_bytes, to_step;
    bool copy;
} row_list;

/* Rows that lie a step apart: where the first comes from and goes to, and its position
 * in its sequence. */
typedef struct row_run {
    const char *from;
    char *to;
    float *scale;
    int64_t position, count;
} row_run;

static row_list list_of(const qkv_append_problem *p, const qkv_append_side *side,
                        const qkv_kernels *k, int64_t batch, int64_t head)
{
    const qkv_view *from = &side->from, *to = &side->to;
    return (row_list){.problem = p,
                      .side = side,
                      .kernels = k,
                      .batch = batch,
                      .head = head,
                      .dim = from->dim,
                      .from_bytes = qkv_bytes(from->dtype, from->dim),
                      .from_step = qkv_bytes(from->dtype, from->stride[QKV_AXIS_ROW]),
                      .to_bytes = qkv_bytes(to->dtype, to->dim),
                      .to_step = qkv_bytes(to->dtype, to->stride[QKV_AXIS_ROW]),
                      .copy = from->dtype == to->dtype && !side->rotary_pairs};
}

/* The rows from 'position' on, up to where a page ends. */
static row_run run_of(const row_list *list, int64_t new_row, int64_t position, int64_t count)
{
    const qkv_append_problem *p = list->problem;
    const qkv_append_side *side = list->side;
    int64_t batch = list->batch, row = position;
    if (p->page_table) {
        batch = p->page_table[list->batch * p->page_table_stride + position / p->page_size];
        row = position % p->page_size;
        count = count < p->page_size - row ? count : p->page_size - row;
    }
    return (row_run){
        .from = qkv_view_row(&side->from, p->new_starts ? 0 : list->batch, list->head, new_row),
        .to = qkv_view_row(&side->to, batch, list->head, row),
        .scale = side->scale.data ? qkv_view_row(&side->scale, batch, list->head, row) : NULL,
        .position = position,
        .count = count};
}

/* Asks for the lines of the row that begins 'offset' bytes after 'from'. */
static inline void ask_for(const void *from, int64_t offset, int64_t bytes)
{
    const uintptr_t row = (uintptr_t)from + (uintptr_t)offset;
    for (int64_t i = 0; i < bytes; i += LINE)
        QKV_PREFETCH((const void *)(row + (uintptr_t)i));
}

static void turn(const row_list *list, const float *x, int64_t position, float *y)
{
    const qkv_append_problem *p = list->problem;
    const int64_t pairs = list->side->rotary_pairs, rest = list->dim - 2 * pairs;
    const int64_t angles = position * p->rotary_stride;
    list->kernels->rotary_f32(x, p->cosines + angles, p->sines + angles, y, pairs, p->neighbours);
    if (rest)
        memcpy(y + 2 * pairs, x + 2 * pairs, (size_t)rest * sizeof *x);
}

/* The first row of a run. */
static void move_row(const row_list *list, const row_run *run)
{
    /* Whole lines: vectors that cross from one to the next take twice as long. */
    _Alignas(LINE) float wide[QKV_APPEND_DIM_MAX];
    _Alignas(LINE) float turned[QKV_APPEND_DIM_MAX];
    const int32_t from = list->side->from.dtype, to = list->side->to.dtype;
    const float *x = (const float *)(const void *)run->from;
    if (from != QKV_F32) {
        qkv_widen_typed(list->kernels, from, run->from, NULL, wide, list->dim);
        x = wide;
    }
    if (list->side->rotary_pairs) {
        float *y = to == QKV_F32 ? (float *)(void *)run->to : turned;
        turn(list, x, run->position, y);
        if (to == QKV_F32)
            return;
        x = y;
    }
    qkv_narrow_typed(list->kernels, to, x, run->to, run->scale, list->dim);
}

static void move_run(const row_list *list, row_run run)
{
    const int64_t ahead = AHEAD_BYTES / list->from_bytes + 1;
    for (; run.count > 0; run.count--) {
        if (run.count > ahead) {
            ask_for(run.to, ahead * list->to_step, list->to_bytes);
            ask_for(run.from, ahead * list->from_step, list->from_bytes);
        }
        if (list->copy)
            memcpy(run.to, run.from, (size_t)list->to_bytes);
        else
            move_row(list, &run);
        run.from += list->from_step;
        run.to += list->to_step;
        if (run.scale)
            run.scale += list->side->scale.stride[QKV_AXIS_ROW];
        run.position++;
    }
}

/* The new rows of one sequence. */
static void move_sequence(const qkv_append_problem *p, const qkv_kernels *k, int64_t b)
{
    const qkv_append_side *const sides[] = {&p->key, &p->value};
    const int64_t begin = p->new_starts ? p->new_starts[b] : 0;
    const int64_t end = p->new_starts ? p->new_starts[b + 1] : p->new_len;
    const int64_t position = (p->positions ? p->positions[b] : 0) - begin;
    for (int64_t first = begin, next; first < end; first = next) {
        next = end - first < CHUNK_ROWS ? end : first + CHUNK_ROWS;
        for (int64_t head = 0; head < p->heads; head++) {
            for (int s = 0; s < 2; s++) {
                if (!sides[s]->from.data)
                    continue;
                const row_list list = list_of(p, sides[s], k, b, head);
                for (int64_t row = first; row < next;) {
                    const row_run run = run_of(&list, row, position + row, next - row);
                    move_run(&list, run);
                    row += run.count;
                }
            }
        }
    }
}

void qkv_run_append(const qkv_append_problem *p, const qkv_kernels *k)
{
    for (int64_t b = 0; b < p->batch; b++)
        move_sequence(p, k, b);
}
