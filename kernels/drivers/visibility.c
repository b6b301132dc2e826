/* SPDX-License-Identifier: MIT */
/*
 * One function a rule; see visibility.h. Query i of a sequence stands at the
 * position p, and key j at the position j:
 *
 *     length   0 <= j < kv_len
 *     causal   j <= p                                (Vaswani et al. 2017, 3.2.3)
 *     window   p - left <= j <= p + right            (Beltagy et al. 2020, 3.1)
 *     sinks    j < sink_tokens passes the left limit (Xiao et al. 2023, 3.2)
 *     tree     bit j - (kv_len - q_len) of row i     (Miao et al. 2023, 4.2)
 *
 * Every rule but the tree keeps an interval, and an intersection of intervals
 * is one.
 */
#include "visibility.h"

/* a + b, held within the range of the type: offsets and widths may be huge. */
static int64_t add_within(int64_t a, int64_t b)
{
    if (b > 0 && a > INT64_MAX - b)
        return INT64_MAX;
    if (b < 0 && a < INT64_MIN - b)
        return INT64_MIN;
    return a + b;
}

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* The keys before the first one that length or causal order hide. */
static int64_t causal_end(const qkv_attention_problem *p, const qkv_sequence *s, int64_t position)
{
    if (!p->causal)
        return s->kv_len;
    return clamp(add_within(position, 1), 0, s->kv_len);
}

static qkv_range within_window(const qkv_attention_problem *p, const qkv_sequence *s,
                               int64_t position, int64_t end)
{
    qkv_range range = {0, end};
    if (p->window_left >= 0)
        range.begin = clamp(add_within(position, -p->window_left), 0, s->kv_len);
    if (p->window_right >= 0)
        range.end = clamp(add_within(add_within(position, p->window_right), 1), 0, end);
    return range;
}

qkv_range qkv_visible_keys(const qkv_attention_problem *p, const qkv_sequence *s, int64_t query)
{
    const int64_t position = add_within(s->q_offset, query);
    const int64_t end = causal_end(p, s, position);
    if (!p->windowed)
        return (qkv_range){0, end};

    qkv_range range = within_window(p, s, position, end);
    const int64_t sinks = p->sink_tokens < end ? p->sink_tokens : end;
    if (range.begin <= sinks) /* the two runs are one */
        return (qkv_range){0, range.end > sinks ? range.end : sinks};
    if (range.end < range.begin)
        range.end = range.begin;
    return range;
}

int64_t qkv_sink_keys(const qkv_attention_problem *p, const qkv_sequence *s, qkv_range sees)
{
    /* A range that does not begin with key 0 begins behind all sinks. */
    if (sees.begin == 0)
        return 0;
    return p->sink_tokens < s->kv_len ? p->sink_tokens : s->kv_len;
}

bool qkv_tree_shows(const qkv_attention_problem *p, const qkv_sequence *s, int64_t query,
                    int64_t key)
{
    const int64_t drafted = key - (s->kv_len - s->q_len);
    if (drafted < 0)
        return true;
    const uint64_t *row =
        p->tree_mask + (s->q_batch * p->q_len + s->q_first + query) * p->tree_stride;
    return (row[drafted / 64] >> drafted % 64 & 1) != 0;
}
