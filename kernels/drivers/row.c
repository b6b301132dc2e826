/* SPDX-License-Identifier: MIT */
/*
 * The row driver: few query rows against many keys (decoding), and head
 * sizes that no tile holds. All query heads of a group, and the queries of a
 * few positions, go through each block of keys together, so that keys and
 * values are read once for all of them:
 *
 *     for each part of the keys
 *         for each block of keys that some row sees
 *             logits = query . key        (dot; masks and the like: adjust.h)
 *             logits become exponentials  (softmax_step)
 *             out    = out * r + exponentials . values   (weighted_sum)
 *         join the part to those before it
 *
 * Keys and values are read where they lie, in whatever type and whatever
 * pages: the kernels get a list of addresses. It takes one from each quarter
 * of the block in turn, as a core reads four streams half as fast again as
 * one. Where a logit goes by its key's place, those of a block are put in order
 * after the dot products and back before the sum.
 */
#include "anew.h"
#include "attention.h"
#include "typed.h"
#include "visibility.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    STREAMS = 4,      /* parts of a block whose keys are taken in turn */
    STREAM_KEYS = 16, /* fewest keys of such a part */
    AHEAD = 64        /* most values of the next block that are listed as needed soon */
};

/* Keys of a block: fewer where rows are long, so that a block stays in the
 * second-level cache. */
static int64_t block_keys(const qkv_attention_problem *p)
{
    enum { BLOCK_ELEMENTS = 1 << 16, FEWEST = 8 };
    const int64_t widest = p->head_dim > p->value_dim ? p->head_dim : p->value_dim;
    if (widest * QKV_KEY_BLOCK <= BLOCK_ELEMENTS)
        return QKV_KEY_BLOCK;
    return widest * FEWEST >= BLOCK_ELEMENTS ? FEWEST : BLOCK_ELEMENTS / widest;
}

/* The parts of a worker's scratch memory. */
typedef struct row_scratch {
    float *logits; /* [QKV_ROWS_MAX][QKV_KEY_BLOCK] */
    float *bias;   /* likewise: -inf where a row does not see a key */
    float *listed; /* likewise: the logits in the order of the list, where that matters */
    float *out;    /* [pass][value_dim]: of all parts up to here */
    float *part;   /* [pass][value_dim]: of one part */
    float *query;  /* [pass][head_dim], where the queries are not used in place */
    float *value;  /* [value_dim] */
    float *anew;   /* for qkv_end_row() */
    float *shared; /* [QKV_SHARING_ROWS][value_dim + head_dim], for qkv_run_sharing() */
} row_scratch;

/* Lays out the parts from 'base' on; returns the floats used. */
static int64_t lay_out(row_scratch *s, float *base, const qkv_attention_problem *p, bool general)
{
    const int64_t pass = qkv_pass_rows(general);
    qkv_layout layout = {.base = base};
    s->logits = qkv_next_part(&layout, QKV_ROWS_MAX * QKV_KEY_BLOCK);
    s->bias = qkv_next_part(&layout, QKV_ROWS_MAX * QKV_KEY_BLOCK);
    s->listed = qkv_next_part(&layout, QKV_ROWS_MAX * QKV_KEY_BLOCK);
    s->out = qkv_next_part(&layout, pass * p->value_dim);
    s->part = qkv_next_part(&layout, general ? 0 : pass * p->value_dim);
    s->query = qkv_next_part(&layout, pass * p->head_dim);
    s->value = qkv_next_part(&layout, p->value_dim);
    s->anew = qkv_next_part(&layout, qkv_anew_scratch(p));
    s->shared = qkv_next_part(&layout, p->shared_len > 0 && !general
                                           ? QKV_SHARING_ROWS * (p->value_dim + p->head_dim)
                                           : 0);
    return layout.used;
}

int64_t qkv_rows_scratch(const qkv_attention_problem *p, bool general)
{
    row_scratch unused;
    return lay_out(&unused, NULL, p, general);
}

/* Keys that rows see: each its own range, and what holds all of them. */
typedef struct row_ranges {
    qkv_range row[QKV_PASS_ROWS];
    qkv_range all;
} row_ranges;

/* Rows of a run that go through the keys together. */
typedef struct row_pass {
    qkv_row_run run;             /* these rows alone */
    const qkv_row_place *places; /* NULL; or theirs, where they are of several sequences */
    const float *query;
    int64_t query_stride;
    row_ranges sinks, sees; /* see qkv_sink_keys() */
} row_pass;

static qkv_row_place place_in(const qkv_attention_problem *p, const row_pass *pass, int64_t row)
{
    return pass->places ? pass->places[row] : qkv_place_of(p, pass->run, row);
}

/* Some rows of a pass against one block of keys, as the kernels take them. */
typedef struct row_block {
    int64_t row, rows; /* of the pass */
    const row_ranges *ranges;
    qkv_range keys, next; /* 'next': of the block that comes after it */
} row_block;

static void add_range(row_ranges *ranges, int64_t row, qkv_range range)
{
    ranges->row[row] = range;
    if (row == 0 || range.begin < ranges->all.begin)
        ranges->all.begin = range.begin;
    if (row == 0 || range.end > ranges->all.end)
        ranges->all.end = range.end;
}

/* The queries of a run: where they lie if they are f32 with one stride from row
 * to row, and otherwise as f32 in 'wide'. */
static qkv_f32_rows find_queries(const qkv_attention_problem *p, const qkv_kernels *k,
                                 const qkv_row_run *run, float *wide)
{
    const qkv_row_place first = qkv_place_of(p, *run, 0);
    const bool one_head = p->group == 1;
    if (p->query.dtype == QKV_F32 &&
        (one_head || first.query == qkv_place_of(p, *run, run->count - 1).query))
        return (qkv_f32_rows){qkv_row_of(&p->query, p, *run, 0),
                              p->query.stride[one_head ? QKV_AXIS_ROW : QKV_AXIS_HEAD]};
    for (int64_t i = 0; i < run->count; i++)
        qkv_widen_typed(k, p->query.dtype, qkv_row_of(&p->query, p, *run, i), NULL,
                        wide + i * p->head_dim, p->head_dim);
    return (qkv_f32_rows){wide, p->head_dim};
}

/* Fills in a pass: much of it stays unused in most, so it is not returned. */
static void begin_pass(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       int64_t first, int64_t count, float *wide, row_pass *pass)
{
    pass->run = (qkv_row_run){run.sequence, run.kv_head, run.first + first, count};
    pass->places = NULL;
    pass->sinks.all = (qkv_range){0, 0};
    const qkv_f32_rows queries = find_queries(p, k, &pass->run, wide);
    pass->query = queries.data;
    pass->query_stride = queries.stride;
    for (int64_t i = 0; i < count; i++) {
        const qkv_range sees =
            qkv_visible_keys(p, run.sequence, qkv_place_of(p, pass->run, i).query);
        add_range(&pass->sees, i, sees);
        if (p->windowed)
            add_range(&pass->sinks, i, (qkv_range){0, qkv_sink_keys(p, run.sequence, sees)});
    }
}

/* Where the keys or the values of a block lie, and their scales if they have any. */
typedef struct row_list {
    const void *at[QKV_KEY_BLOCK + AHEAD];
    const float *scales; /* NULL: none */
    float own_scales[QKV_KEY_BLOCK];
} row_list;

/* The order in which the kernels take a block of 'keys' keys: one of each quarter in
 * turn, then the rest; with quarters of 0 as they lie. */
static int64_t quarter_of(int64_t keys)
{
    return keys >= STREAMS * STREAM_KEYS ? keys / STREAMS : 0;
}

/* The keys' order made the list's, or the other way round. */
static inline void reorder(const float *from, int64_t n, float *to, const bool to_list)
{
    const int64_t quarter = quarter_of(n), streamed = STREAMS * quarter;
    for (int64_t j = 0; j < quarter; j++)
        for (int i = 0; i < STREAMS; i++) {
            const int64_t listed = j * STREAMS + i, ordered = i * quarter + j;
            to[to_list ? listed : ordered] = from[to_list ? ordered : listed];
        }
    memcpy(to + streamed, from + streamed, (size_t)(n - streamed) * sizeof *to);
}

/* Lists n keys, one of each of 'streams' parts in turn, which are the keys from
 * 'first' on, from 'first' + n / streams on, and so on. */
static void list_streams(const qkv_attention_problem *p, const row_pass *pass, qkv_piece_fn *pieces,
                         int64_t first, int64_t n, const int streams, row_list *list, int64_t to)
{
    const int64_t part = n / streams;
    int64_t run;
    for (int64_t j = 0; j < part; j += run, to += run * streams) {
        const char *row[STREAMS];
        qkv_kv_piece piece[STREAMS];
        run = part - j;
        for (int i = 0; i < streams; i++) {
            piece[i] = pieces(p, pass->run.sequence, pass->run.kv_head, first + i * part + j, run);
            run = piece[i].count;
            row[i] = piece[i].data;
        }
        const int64_t stride = piece[0].stride_bytes;
        const void **at = list->at + to;
        for (int64_t k = 0; k < run; k++, at += streams)
            for (int i = 0; i < streams; i++)
                at[i] = row[i] + k * stride;
        if (!piece[0].scales)
            continue;
        for (int64_t k = 0; k < run; k++)
            for (int i = 0; i < streams; i++)
                list->own_scales[to + k * streams + i] =
                    piece[i].scales[k * piece[i].scales_stride];
        list->scales = list->own_scales;
    }
}

static void list_block(const qkv_attention_problem *p, const row_pass *pass, qkv_piece_fn *pieces,
                       qkv_range keys, row_list *list)
{
    const int64_t n = keys.end - keys.begin, streamed = STREAMS * quarter_of(n);
    list->scales = NULL;
    list_streams(p, pass, pieces, keys.begin, streamed, STREAMS, list, 0);
    list_streams(p, pass, pieces, keys.begin + streamed, n - streamed, 1, list, streamed);
}

/* The first values of the block after one of n, to be prefetched; returns how many. */
static int64_t list_ahead(const qkv_attention_problem *p, const row_pass *pass, qkv_range next,
                          int64_t n, row_list *list)
{
    const int64_t keys = next.end - next.begin, quarter = quarter_of(keys);
    const int64_t count = keys < AHEAD ? keys : AHEAD;
    for (int64_t i = 0; i < count; i++) {
        const int64_t j = i < STREAMS * quarter ? i % STREAMS * quarter + i / STREAMS : i;
        list->at[n + i] =
            qkv_value_piece(p, pass->run.sequence, pass->run.kv_head, next.begin + j, 1).data;
    }
    return count;
}

/* Do keys lie apart, so that a core does not see which comes next? */
static bool keys_are_scattered(const qkv_attention_problem *p)
{
    return p->page_table || p->key.stride[QKV_AXIS_ROW] > p->key.dim;
}

static void block_logits(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                         row_block block, float *logits)
{
    row_list list;
    const int64_t kv_len = block.keys.end - block.keys.begin;
    list_block(p, pass, qkv_key_piece, block.keys, &list);
    for (int64_t d = 0; d < p->head_dim; d += QKV_DOT_BLOCK) {
        const int64_t rest = p->head_dim - d;
        for (int64_t j = 0; j < kv_len && d > 0; j++)
            list.at[j] = (const char *)list.at[j] + qkv_bytes(p->key.dtype, QKV_DOT_BLOCK);
        qkv_dot_typed(k, p->key.dtype,
                      &(qkv_dot_args){.queries = pass->query + block.row * pass->query_stride + d,
                                      .keys_at = list.at,
                                      .key_scales = list.scales,
                                      .scores = logits,
                                      .queries_stride = pass->query_stride,
                                      .key_scales_stride = 1,
                                      .scores_stride = QKV_KEY_BLOCK,
                                      .rows = block.rows,
                                      .kv_len = kv_len,
                                      .head_dim = rest < QKV_DOT_BLOCK ? rest : QKV_DOT_BLOCK,
                                      .accumulate = d > 0,
                                      .scattered = keys_are_scattered(p)});
    }
}

static void block_values(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                         row_block block, const float *weights, const float *rescale,
                         bool skip_zero, float *out)
{
    row_list list;
    const int64_t kv_len = block.keys.end - block.keys.begin;
    list_block(p, pass, qkv_value_piece, block.keys, &list);
    const int64_t ahead = list_ahead(p, pass, block.next, kv_len, &list);
    qkv_weighted_sum_typed(k, p->value.dtype,
                           &(qkv_weighted_sum_args){.weights = weights,
                                                    .values_at = list.at,
                                                    .value_scales = list.scales,
                                                    .out = out + block.row * p->value_dim,
                                                    .rescale = rescale,
                                                    .weights_stride = QKV_KEY_BLOCK,
                                                    .value_scales_stride = 1,
                                                    .out_stride = p->value_dim,
                                                    .rows = block.rows,
                                                    .kv_len = kv_len,
                                                    .value_dim = p->value_dim,
                                                    .ahead = ahead,
                                                    .skip_zero = skip_zero});
}

static qkv_range clip(qkv_range range, qkv_range block)
{
    const qkv_range both = {range.begin > block.begin ? range.begin : block.begin,
                            range.end < block.end ? range.end : block.end};
    return both.begin < both.end ? both : (qkv_range){block.begin, block.begin};
}

/* A row's biases for the keys of a block, of which it sees 'sees' by position;
 * false if it sees none of them. */
static bool row_bias(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_place place,
                     qkv_range block, qkv_range sees, float *bias)
{
    float *seen = bias + (sees.begin - block.begin);
    const int64_t n = sees.end - sees.begin;
    qkv_fill(bias, sees.begin - block.begin, -INFINITY);
    qkv_fill(seen + n, block.end - sees.end, -INFINITY);
    if (qkv_has_bias(p) && n > 0)
        return qkv_bias_row(p, k, place, sees.begin, n, seen);
    qkv_fill(seen, n, 0.0f);
    return n > 0;
}

/* The biases of a block's rows, where some row does not see all of it or there
 * is a mask; false if no row sees anything of it. */
static bool block_biases(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                         row_block block, float *bias)
{
    bool any = false;
    const int64_t kv_len = block.keys.end - block.keys.begin;
    qkv_row_place before = {.query = -1};
    for (int64_t i = 0; i < block.rows; i++, bias += QKV_KEY_BLOCK) {
        const int64_t row = block.row + i;
        const qkv_row_place place = place_in(p, pass, row);
        /* Heads at one position see the same range, and often one mask. */
        if (place.query == before.query && qkv_same_bias(p, before, place))
            memcpy(bias, bias - QKV_KEY_BLOCK, (size_t)kv_len * sizeof *bias);
        else
            any |=
                row_bias(p, k, place, block.keys, clip(block.ranges->row[row], block.keys), bias);
        before = place;
    }
    return any;
}

/* Does some row see less than the whole block by position? */
static bool is_partial(row_block block)
{
    for (int64_t i = block.row; i < block.row + block.rows; i++)
        if (block.ranges->row[i].begin > block.keys.begin ||
            block.ranges->row[i].end < block.keys.end)
            return true;
    return false;
}

/* A row's logits of a block become exponentials, 0 where it does not see. */
static float row_softmax(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_place place,
                         qkv_range block, qkv_range sees, const float *bias, float *logits,
                         qkv_row_state *state)
{
    const int64_t first = sees.begin - block.begin, n = sees.end - sees.begin;
    qkv_fill(logits, first, 0.0f);
    qkv_fill(logits + first + n, block.end - sees.end, 0.0f);
    if (n == 0)
        return 1.0f;
    if (p->adjusted)
        qkv_adjust_row(p, k, place, sees.begin, n, bias ? bias + first : NULL, logits + first);
    return k->softmax_step_f32(logits + first, n, p->adjusted ? 1.0f : p->scale_log2, state);
}

/* Does some row of the block see key j with a weight of 0? */
static bool zero_weight_seen(row_block block, int64_t j, const row_scratch *s)
{
    for (int64_t i = 0; i < block.rows; i++)
        if (s->logits[i * QKV_KEY_BLOCK + j] == 0.0f && s->bias[i * QKV_KEY_BLOCK + j] != -INFINITY)
            return true;
    return false;
}

/* The values that are not finite of keys that a row sees with a weight of 0:
 * the sum has passed over all weights of 0. */
static void odd_values(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                       row_block block, float *out, const row_scratch *s)
{
    const int64_t kv_len = block.keys.end - block.keys.begin;
    for (int64_t j = 0; j < kv_len; j++) {
        if (!zero_weight_seen(block, j, s))
            continue;
        const qkv_f32_rows value =
            qkv_fetch_rows(p, k, &p->value, pass->run.sequence, pass->run.kv_head,
                           block.keys.begin + j, 1, s->value);
        if (!qkv_any_odd(value.data, p->value_dim))
            continue;
        for (int64_t i = 0; i < block.rows; i++)
            qkv_add_odd_value(s->logits[i * QKV_KEY_BLOCK + j], s->bias[i * QKV_KEY_BLOCK + j],
                              value.data, p->value_dim, out + (block.row + i) * p->value_dim);
    }
}

static void run_block(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                      row_block block, qkv_row_state *states, float *out, const row_scratch *s)
{
    const int64_t kv_len = block.keys.end - block.keys.begin;
    const bool careful = is_partial(block) || qkv_has_bias(p);
    if (careful && !block_biases(p, k, pass, block, s->bias))
        return;
    /* Ranges, biases and slopes go by a key's place. */
    const bool ordered = (careful || p->slopes) && quarter_of(kv_len) > 0;
    float *listed = ordered ? s->listed : s->logits;
    block_logits(p, k, pass, block, listed);

    float rescale[QKV_ROWS_MAX];
    for (int64_t i = 0; i < block.rows; i++) {
        const int64_t at = i * QKV_KEY_BLOCK, row = block.row + i;
        if (ordered)
            reorder(listed + at, kv_len, s->logits + at, false);
        rescale[i] = row_softmax(
            p, k, place_in(p, pass, row), block.keys, clip(block.ranges->row[row], block.keys),
            qkv_has_bias(p) ? s->bias + at : NULL, s->logits + at, &states[row]);
        if (ordered)
            reorder(s->logits + at, kv_len, listed + at, true);
    }
    block_values(p, k, pass, block, listed, rescale, careful, out);
    if (careful)
        odd_values(p, k, pass, block, out, s);
}

/* A pass against those keys of a part that lie within its ranges. Blocks are
 * counted from the part's first key, whatever is seen of it. */
static void run_ranges(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                       const row_ranges *ranges, qkv_range part, qkv_row_state *states, float *out,
                       const row_scratch *s)
{
    const int64_t step = block_keys(p);
    const qkv_range all = clip(ranges->all, part);
    for (int64_t j = part.begin + (all.begin - part.begin) / step * step; j < all.end; j += step)
        for (int64_t row = 0; row < pass->run.count; row += QKV_ROWS_MAX) {
            const int64_t rest = pass->run.count - row;
            const int64_t end = all.end - j < step ? all.end : j + step;
            const row_block block = {.row = row,
                                     .rows = rest < QKV_ROWS_MAX ? rest : QKV_ROWS_MAX,
                                     .ranges = ranges,
                                     .keys = {j < all.begin ? all.begin : j, end},
                                     .next = {end, all.end - end < step ? all.end : end + step}};
            run_block(p, k, pass, block, states, out, s);
        }
}

/* A pass against one part of the keys: its sums to 'out' and 'states', not
 * normalised. The first part has the sinks. */
static void run_part(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                     qkv_range part, qkv_row_state *states, float *out, const row_scratch *s)
{
    for (int64_t i = 0; i < pass->run.count; i++)
        states[i] = part.begin == 0 ? qkv_first_state(p, place_in(p, pass, i).head)
                                    : (qkv_row_state){.max = -FLT_MAX, .sum = 0.0f};
    memset(out, 0, (size_t)(pass->run.count * p->value_dim) * sizeof *out);
    if (p->windowed)
        run_ranges(p, k, pass, &pass->sinks, part, states, out, s);
    run_ranges(p, k, pass, &pass->sees, part, states, out, s);
}

/* Joins a part's sums of a row to those of the parts before it. */
static void join(const qkv_kernels *k, qkv_row_state *state, float *out, qkv_row_state part_state,
                 const float *part, int64_t n)
{
    const float max = state->max > part_state.max ? state->max : part_state.max;
    float factors[2] = {state->max - max, part_state.max - max};
    k->exp2_f32(factors, factors, 2);
    state->max = max;
    state->sum = state->sum * factors[0] + part_state.sum * factors[1];
    for (int64_t d = 0; d < n; d++)
        out[d] = out[d] * factors[0] + part[d] * factors[1];
}

/* Normalises a row's sums and stores them; 'sums' is used up. */
static inline void store_row(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                             int64_t row, qkv_row_state state, float *sums, float *scratch)
{
    const qkv_row_end end = qkv_end_row(p, k, run, row, state, scratch);
    const float *from = end.sums ? end.sums : sums, sum = end.total.sum;
    if (p->lse.data || p->row_max.data)
        qkv_store_row_numbers(p, run, row, end.total);
    /* Before the output, which may lie over the query. */
    if (p->weights.data)
        qkv_store_weights(p, k, run, row, end.total, scratch);

    void *out = qkv_row_of(&p->out, p, run, row);
    float *quotients = p->out.dtype == QKV_F32 ? out : sums;
    for (int64_t d = 0; d < p->value_dim; d++)
        quotients[d] = sum == 0.0f ? 0.0f : from[d] / sum;
    if (p->out.dtype != QKV_F32)
        qkv_narrow_typed(k, p->out.dtype, quotients, out, NULL, p->value_dim);
}

/* A pass against part i of the keys, added to what the parts before it gave. */
static void add_part(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                     const qkv_cut *cut, int64_t i, qkv_partial sums, const row_scratch *s)
{
    const qkv_range keys = qkv_part_keys(cut, pass->run.sequence, i);
    if (i == 0) {
        run_part(p, k, pass, keys, sums.states, sums.out, s);
        return;
    }
    qkv_row_state part[QKV_PASS_ROWS];
    run_part(p, k, pass, keys, part, s->part, s);
    for (int64_t row = 0; row < pass->run.count; row++)
        join(k, &sums.states[row], sums.out + row * p->value_dim, part[row],
             s->part + row * p->value_dim, p->value_dim);
}

static void store_rows(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run run,
                       qkv_partial sums, const row_scratch *s)
{
    for (int64_t row = 0; row < run.count; row++)
        store_row(p, k, run, row, sums.states[row], sums.out + row * p->value_dim, s->anew);
}

/* All parts of the keys one after the other. */
static void run_pass(const qkv_attention_problem *p, const qkv_kernels *k, const row_pass *pass,
                     const qkv_cut *cut, const row_scratch *s)
{
    qkv_row_state states[QKV_PASS_ROWS];
    const qkv_partial sums = {.out = s->out, .states = states};
    for (int64_t i = 0; i < cut->parts; i++)
        add_part(p, k, pass, cut, i, sums, s);
    store_rows(p, k, pass->run, sums, s);
}

/* How many rows from 'row' of the run on go together. Where no bit may depend
 * on how many queries there are, those of one position. */
static int64_t pass_length(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                           qkv_row_run run, int64_t row)
{
    int64_t most = qkv_pass_rows(plan->general);
    const int64_t position = p->group - (run.first + row) % p->group;
    if (p->invariant && position < most)
        most = position;
    return run.count - row < most ? run.count - row : most;
}

void qkv_run_rows(const qkv_attention_problem *p, const qkv_attention_plan *plan, qkv_row_run run,
                  const qkv_cut *cut, float *scratch)
{
    row_scratch s;
    lay_out(&s, scratch, p, plan->general);
    for (int64_t row = 0; row < run.count;) {
        const int64_t count = pass_length(p, plan, run, row);
        row_pass pass;
        begin_pass(p, plan->kernels, run, row, count, s.query, &pass);
        run_pass(p, plan->kernels, &pass, cut, &s);
        row += count;
    }
}

bool qkv_run_heads(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                   const qkv_sequence *sequence, const qkv_cut *cut, float *scratch)
{
    row_scratch s;
    const int64_t used = lay_out(&s, scratch, p, plan->general);
    const int64_t room = (int64_t)(plan->worker_bytes / sizeof(float)) - used;
    const int64_t each = qkv_partial_floats(p, cut->rows), most = room / each;
    if (most < 2)
        return false;
    float *sums = scratch + used;
    row_pass pass;
    for (int64_t first = 0; first < p->kv_heads; first += most) {
        const int64_t heads = p->kv_heads - first < most ? p->kv_heads - first : most;
        for (int64_t part = 0; part < cut->parts; part++)
            for (int64_t i = 0; i < heads; i++) {
                const qkv_row_run run = {sequence, first + i, 0, cut->rows};
                begin_pass(p, plan->kernels, run, 0, cut->rows, s.query, &pass);
                add_part(p, plan->kernels, &pass, cut, part,
                         qkv_partial_at(p, cut->rows, sums + i * each), &s);
            }
        for (int64_t i = 0; i < heads; i++)
            store_rows(p, plan->kernels, (qkv_row_run){sequence, first + i, 0, cut->rows},
                       qkv_partial_at(p, cut->rows, sums + i * each), &s);
    }
    return true;
}

void qkv_run_row_part(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                      qkv_row_run run, const qkv_cut *cut, int64_t part, qkv_partial to,
                      float *scratch)
{
    row_scratch s;
    lay_out(&s, scratch, p, plan->general);
    row_pass pass;
    begin_pass(p, plan->kernels, run, 0, run.count, s.query, &pass);
    run_part(p, plan->kernels, &pass, qkv_part_keys(cut, run.sequence, part), to.states, to.out,
             &s);
}

void qkv_join_row_parts(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                        qkv_row_run run, const qkv_partial *parts, int64_t n_parts, float *scratch)
{
    row_scratch s;
    lay_out(&s, scratch, p, plan->general);
    for (int64_t row = 0; row < run.count; row++) {
        float *out = parts[0].out + row * p->value_dim;
        for (int64_t i = 1; i < n_parts; i++)
            join(plan->kernels, &parts[0].states[row], out, parts[i].states[row],
                 parts[i].out + row * p->value_dim, p->value_dim);
        store_row(p, plan->kernels, run, row, parts[0].states[row], out, s.anew);
    }
}

/* ------------------------------------------- a prefix that sequences share */

/* Rows of several sequences, with what their keys so far come to. */
typedef struct sharing_rows {
    int64_t n;
    qkv_row_place places[QKV_SHARING_ROWS];
    qkv_row_state states[QKV_SHARING_ROWS];
    float *out, *query; /* [n][value_dim], [n][head_dim] */
} sharing_rows;

static void add_sequence(const qkv_attention_problem *p, const qkv_kernels *k,
                         const qkv_sequence *sequence, int64_t kv_head, sharing_rows *rows)
{
    const qkv_row_run run = {sequence, kv_head, 0, p->group * sequence->q_len};
    for (int64_t i = 0; i < run.count; i++, rows->n++) {
        rows->places[rows->n] = qkv_place_of(p, run, i);
        qkv_widen_typed(k, p->query.dtype, qkv_row_of(&p->query, p, run, i), NULL,
                        rows->query + rows->n * p->head_dim, p->head_dim);
    }
}

/* A part of the keys that all rows see whole, as they lie in 'reader', for the
 * rows of one pass; and what the part gives joined to what they have. */
static void share_part(const qkv_attention_problem *p, const qkv_kernels *k, qkv_row_run reader,
                       qkv_range part, int64_t first, sharing_rows *rows, const row_scratch *s)
{
    const int64_t rest = rows->n - first;
    row_pass pass = {.run = reader,
                     .places = rows->places + first,
                     .query = rows->query + first * p->head_dim,
                     .query_stride = p->head_dim};
    pass.run.count = rest < QKV_PASS_ROWS ? rest : QKV_PASS_ROWS;
    for (int64_t i = 0; i < pass.run.count; i++)
        add_range(&pass.sees, i, part);
    qkv_row_state states[QKV_PASS_ROWS];
    run_part(p, k, &pass, part, states, s->part, s);
    for (int64_t i = 0; i < pass.run.count; i++) {
        float *out = rows->out + (first + i) * p->value_dim;
        const float *of_part = s->part + i * p->value_dim;
        if (part.begin > 0) {
            join(k, &rows->states[first + i], out, states[i], of_part, p->value_dim);
        } else {
            rows->states[first + i] = states[i];
            memcpy(out, of_part, (size_t)p->value_dim * sizeof *out);
        }
    }
}

/* A sequence's other parts; its rows are those from 'first' on. */
static void end_sequence(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                         const qkv_sequence *sequence, int64_t kv_head, int64_t part, int64_t first,
                         sharing_rows *rows, const row_scratch *s)
{
    const qkv_kernels *k = plan->kernels;
    const qkv_cut cut = qkv_cut_sequence(p, plan, sequence);
    row_pass pass;
    begin_pass(p, k, (qkv_row_run){sequence, kv_head, 0, cut.rows}, 0, cut.rows, s->query, &pass);
    for (; part < cut.parts; part++) {
        qkv_row_state states[QKV_PASS_ROWS];
        run_part(p, k, &pass, qkv_part_keys(&cut, sequence, part), states, s->part, s);
        for (int64_t i = 0; i < cut.rows; i++)
            join(k, &rows->states[first + i], rows->out + (first + i) * p->value_dim, states[i],
                 s->part + i * p->value_dim, p->value_dim);
    }
    for (int64_t i = 0; i < cut.rows; i++)
        store_row(p, k, pass.run, i, rows->states[first + i],
                  rows->out + (first + i) * p->value_dim, s->anew);
}

/* Part by part and row by row the same sums as those of each sequence alone. */
void qkv_run_sharing(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                     const qkv_sharing *sharing, int64_t kv_head, float *scratch)
{
    row_scratch s;
    lay_out(&s, scratch, p, plan->general);
    qkv_sequence sequences[QKV_SHARING_ROWS];
    sharing_rows rows = {
        .n = 0, .out = s.shared, .query = s.shared + QKV_SHARING_ROWS * p->value_dim};
    for (int64_t i = 0; i < sharing->count; i++) {
        sequences[i] = qkv_sequence_at(p, sharing->first + i);
        add_sequence(p, plan->kernels, &sequences[i], kv_head, &rows);
    }

    const qkv_cut cut = qkv_cut_sequence(p, plan, &sequences[0]);
    for (int64_t part = 0; part < sharing->parts; part++)
        for (int64_t first = 0; first < rows.n; first += QKV_PASS_ROWS)
            share_part(p, plan->kernels, (qkv_row_run){&sequences[0], kv_head, 0, 0},
                       qkv_part_keys(&cut, &sequences[0], part), first, &rows, &s);

    for (int64_t i = 0, first = 0; i < sharing->count; i++) {
        end_sequence(p, plan, &sequences[i], kv_head, sharing->parts, first, &rows, &s);
        first += p->group * sequences[i].q_len;
    }
}
