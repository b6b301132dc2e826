/* SPDX-License-Identifier: MIT */
/*
 * Between the public functions and the kernels: a validated attention
 * problem, the plan how to cut it, and the two drivers that carry it out.
 */
#ifndef QKV_DRIVERS_ATTENTION_H
#define QKV_DRIVERS_ATTENTION_H

#include "internal.h"
#include "validate.h"

/* A validated problem: no defaults left open. */
typedef struct qkv_attention_problem {
    qkv_view query, key, value, out, lse;    /* lse.data NULL: not wanted */
    qkv_view row_max, weights;               /* likewise */
    int64_t batch, q_heads, kv_heads, group; /* group: query heads a key/value head */
    /* Of every sequence; or the rows of all together, with q_starts and
     * kv_starts; or the most that a sequence has. */
    int64_t q_len, kv_len;
    int64_t head_dim, value_dim;
    int64_t shared_len; /* keys that are the same in all sequences */
    /* As in qkv_attention_desc; NULL where every sequence is alike. */
    const int64_t *q_starts, *kv_starts, *kv_lens, *q_offsets;
    const int32_t *page_table; /* NULL: keys and values are not in pages */
    int64_t page_table_stride;
    int32_t page_shift;              /* log2(page_size) */
    qkv_view key_scale, value_scale; /* data NULL but for QKV_I8: one f32 a row */
    bool causal;
    bool split;       /* parts of the keys are tasks of their own */
    bool narrow;      /* some tensor is not f32 */
    bool invariant;   /* no bit may depend on q_len */
    float scale_log2; /* scale * log2(e) */

    /* Visibility by position: see visibility.h. */
    bool windowed;
    int64_t window_left, window_right, sink_tokens; /* negative widths: no limit */

    /* What happens to a logit before the softmax: see adjust.h. */
    bool adjusted;                             /* any of the following but 'sinks' */
    float scale, softcap;                      /* softcap 0: none */
    const float *slopes, *head_scales, *sinks; /* [q_heads] or NULL */
    qkv_mask_view mask;                        /* data NULL: none */
    const uint64_t *tree_mask;                 /* or NULL */
    int64_t tree_stride;
    int32_t weights_stage;
} qkv_attention_problem;

/* One sequence of the batch: its lengths, and where its rows lie. */
typedef struct qkv_sequence {
    int64_t index; /* its place in the batch */
    int64_t q_len, kv_len;
    int64_t q_offset;           /* the position of query 0: position j is that of key j */
    int64_t q_batch, q_first;   /* query 0, its output and log-sum-exp: batch entry and row */
    int64_t kv_batch, kv_first; /* key and value 0, where they are not in pages */
    const int32_t *pages;       /* its pages, or NULL */
} qkv_sequence;

qkv_sequence qkv_sequence_at(const qkv_attention_problem *problem, int64_t index);

typedef enum qkv_route { QKV_ROUTE_TILE, QKV_ROUTE_ROW, QKV_ROUTE_SHORT } qkv_route;

/*
 * How each key/value head of a sequence is cut. Row r of a key/value head is
 * query r / group of its head r % group, so that rows with nearly the same
 * visible keys lie together and every head of the group shares each load of a
 * key or value.
 */
typedef struct qkv_cut {
    qkv_route route;
    int64_t rows;           /* group * q_len */
    int64_t run_rows, runs; /* of a run, which is what a driver takes at once */
    /* Parts of the keys, each with sums of its own, joined in their order. How
     * many depends on kv_len (and on which driver it is), so that bits do not
     * depend on who takes which part. */
    int64_t part_keys, parts;
} qkv_cut;

enum {
    QKV_PASS_ROWS = 16, /* most rows that go through the keys together, in the row driver */
    QKV_PARTS_MAX = 64
};

/* Sequences from 'first' on that go together through the first parts of their
 * keys, which are the same; count is 1, and parts 0, for a sequence alone. */
typedef struct qkv_sharing {
    int64_t first, count, parts;
} qkv_sharing;

enum { QKV_SHARING_ROWS = 64 }; /* most rows of a key/value head that go together so */

/* What is decided for all sequences of a problem. */
typedef struct qkv_attention_plan {
    const qkv_kernels *kernels;
    bool general;        /* too large for a tile: right, but not tuned */
    int64_t key_block;   /* keys of a tile's step: the kernels', or fewer of very large ones */
    int64_t task_tiles;  /* most tiles of a task of the tile driver */
    int64_t short_rows;  /* most rows that may go at once on a short sequence */
    size_t worker_bytes; /* scratch memory a worker, a multiple of its alignment */
} qkv_attention_plan;

qkv_attention_plan qkv_plan_attention(const qkv_attention_problem *problem,
                                      const qkv_kernels *kernels);

/* How a sequence is cut: by its own lengths and what all sequences have in common, so
 * that its bits depend on no other one. */
qkv_cut qkv_cut_sequence(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                         const qkv_sequence *sequence);

/* The sequences from 'first' on that may go together, as many as there are. */
qkv_sharing qkv_sharing_from(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                             int64_t first);

/* Keys begin <= j < end. */
typedef struct qkv_range {
    int64_t begin, end;
} qkv_range;

/* The keys of one part. */
qkv_range qkv_part_keys(const qkv_cut *cut, const qkv_sequence *sequence, int64_t part);

/* The tasks of a problem without a schedule: a run of a key/value head each. */
int64_t qkv_attention_tasks(const qkv_attention_problem *problem, const qkv_attention_plan *plan);

/* One task of a problem without a schedule, with a worker's scratch memory. */
void qkv_run_attention_task(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                            int64_t task, void *scratch);

/* Run 'task' % runs of key/value head 'task' / runs of a sequence. */
void qkv_run_cut(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                 const qkv_sequence *sequence, const qkv_cut *cut, int64_t task, void *scratch);

/* All of it. */
void qkv_run_attention(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                       void *scratch);

/* A run of query rows of one sequence and key/value head. */
typedef struct qkv_row_run {
    const qkv_sequence *sequence;
    int64_t kv_head, first, count;
} qkv_row_run;

/* The rows of a run against all keys. */
void qkv_run_tiles(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                   qkv_row_run run, float *scratch);
void qkv_run_rows(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                  qkv_row_run run, const qkv_cut *cut, float *scratch);

/* All rows of a key/value head, no more than plan->short_rows, on at most QKV_SHORT_KEYS keys. */
void qkv_run_short(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                   qkv_row_run run, float *scratch);

/* What one part of the keys gives a run's rows, not normalised: [row][value_dim]
 * and [row]. */
typedef struct qkv_partial {
    float *out;
    qkv_row_state *states;
} qkv_partial;

/* Do the heads' keys or values lie side by side, those of a position closer than
 * those of the next? */
static inline bool qkv_heads_lie_together(const qkv_attention_problem *problem)
{
    const int64_t *key = problem->key.stride, *value = problem->value.stride;
    return problem->kv_heads > 1 &&
           (key[QKV_AXIS_HEAD] < key[QKV_AXIS_ROW] || value[QKV_AXIS_HEAD] < value[QKV_AXIS_ROW]);
}

/*
 * All rows of all key/value heads of a sequence, of which a head has at most
 * QKV_PASS_ROWS, one part of the keys after the other. Where heads lie together,
 * a head finds in the translation tables what the one before it has left there.
 * As many go together as a worker's scratch memory has room for beside what rows
 * need; false, and nothing is done, if that is fewer than two. The bits are those of
 * qkv_run_rows().
 */
bool qkv_run_heads(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                   const qkv_sequence *sequence, const qkv_cut *cut, float *scratch);

/* A run of at most QKV_PASS_ROWS rows against one part of the keys; and the
 * parts joined and stored, which uses them up. */
void qkv_run_row_part(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                      qkv_row_run run, const qkv_cut *cut, int64_t part, qkv_partial to,
                      float *scratch);
void qkv_join_row_parts(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                        qkv_row_run run, const qkv_partial *parts, int64_t n_parts, float *scratch);

/* All rows of a key/value head of sequences that share the first parts of their keys. */
void qkv_run_sharing(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                     const qkv_sharing *sharing, int64_t kv_head, float *scratch);

/* Rows that the row driver takes together: fewer where a row is very large. */
int64_t qkv_pass_rows(bool general);

/* Floats of scratch memory that a run needs: of tiles, what each row in them
 * takes, and the rest. */
int64_t qkv_tile_rows_scratch(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                              int64_t run_rows);
int64_t qkv_tile_block_scratch(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                               int64_t keys);
int64_t qkv_rows_scratch(const qkv_attention_problem *problem, bool general);
int64_t qkv_short_scratch(const qkv_attention_problem *problem, int64_t rows);

/* Keys or values of a sequence that lie one after the other: 'count' of them,
 * from the one asked for on. */
typedef struct qkv_kv_piece {
    const void *data;
    const float *scales; /* NULL but for QKV_I8 */
    int64_t stride_bytes, scales_stride;
    int64_t count;
} qkv_kv_piece;
typedef qkv_kv_piece qkv_piece_fn(const qkv_attention_problem *problem,
                                  const qkv_sequence *sequence, int64_t kv_head, int64_t first,
                                  int64_t most);
qkv_piece_fn qkv_key_piece, qkv_value_piece;

/*
 * 'count' consecutive rows of 'view', the problem's key or value, as f32: where they lie, or
 * gathered into 'stage', which has room for count * dim floats.
 */
typedef struct qkv_f32_rows {
    const float *data;
    int64_t stride;
} qkv_f32_rows;
qkv_f32_rows qkv_fetch_rows(const qkv_attention_problem *problem, const qkv_kernels *kernels,
                            const qkv_view *view, const qkv_sequence *sequence, int64_t kv_head,
                            int64_t first, int64_t count, float *stage);

/* Does the tile driver need a stage: for other types than f32, or for pages? */
static inline bool qkv_is_staged(const qkv_attention_problem *problem)
{
    return problem->narrow || problem->page_table;
}

static inline void qkv_fill(float *x, int64_t n, float value)
{
    for (int64_t j = 0; j < n; j++)
        x[j] = value;
}

/* Rounds a number of floats up to the alignment of scratch memory. */
static inline int64_t qkv_align_floats(int64_t n)
{
    const int64_t unit = QKV_SCRATCH_ALIGN / (int64_t)sizeof(float);
    return (n + unit - 1) & -unit;
}

/*
 * Parts of scratch memory are laid out one after the other from 'base' on, each
 * aligned; with base NULL they are only counted, in floats.
 */
typedef struct qkv_layout {
    float *base;
    int64_t used;
} qkv_layout;
static inline float *qkv_next_part(qkv_layout *layout, int64_t floats)
{
    float *part = layout->base ? layout->base + layout->used : NULL;
    layout->used += qkv_align_floats(floats);
    return part;
}

/* Sums that are kept in memory: how many floats they take, and where they lie. */
static inline int64_t qkv_partial_floats(const qkv_attention_problem *problem, int64_t rows)
{
    const int64_t state = (int64_t)(sizeof(qkv_row_state) / sizeof(float));
    return qkv_align_floats(rows * problem->value_dim) + qkv_align_floats(rows * state);
}
static inline qkv_partial qkv_partial_at(const qkv_attention_problem *problem, int64_t rows,
                                         float *base)
{
    float *states = base + qkv_align_floats(rows * problem->value_dim);
    return (qkv_partial){.out = base, .states = (qkv_row_state *)(void *)states};
}

/*
 * A row of a run: its query head, and which query of the sequence it is. Inline,
 * as what follows, and no division where there is one query or one head: a
 * token's call passes here many times and has little else to do.
 */
typedef struct qkv_row_place {
    const qkv_sequence *sequence;
    int64_t head, query;
} qkv_row_place;
static inline qkv_row_place qkv_place_of(const qkv_attention_problem *problem, qkv_row_run run,
                                         int64_t row)
{
    const int64_t group = problem->group, r = run.first + row;
    const int64_t query = r < group ? 0 : group == 1 ? r : r / group;
    return (qkv_row_place){run.sequence, run.kv_head * group + (r - query * group), query};
}

/* The address of a row's query, output and log-sum-exp. */
static inline void *qkv_row_of(const qkv_view *view, const qkv_attention_problem *problem,
                               qkv_row_run run, int64_t row)
{
    const qkv_row_place place = qkv_place_of(problem, run, row);
    return qkv_view_row(view, run.sequence->q_batch, place.head,
                        run.sequence->q_first + place.query);
}

/* The same for 'count' rows in a row, without a division for each. */
void qkv_rows_of(const qkv_view *view, const qkv_attention_problem *problem, qkv_row_run run,
                 int64_t first, int64_t count, void **rows);

#endif
