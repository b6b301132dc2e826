/* SPDX-License-Identifier: MIT */
/*
 * Which keys a query sees. A key is seen if every rule lets it: its position
 * (length, causal order, window), the tree of drafted tokens, and the mask.
 *
 * The rules of position leave at most two runs of keys,
 *
 *     0 <= j < sinks   and   begin <= j < end      with sinks <= begin,
 *
 * so they cost nothing a key: a driver does not even visit the others. What
 * the tree and the mask say is written down as a row of biases (adjust.h).
 */
#ifndef QKV_DRIVERS_VISIBILITY_H
#define QKV_DRIVERS_VISIBILITY_H

#include "attention.h"

/* The keys that query i may see by their position: begin <= j < end, and
 * those before qkv_sink_keys() as well. Neither end falls as i rises. */
qkv_range qkv_visible_keys(const qkv_attention_problem *problem, const qkv_sequence *sequence,
                           int64_t query);

/* The keys 0 .. n - 1 that the window's left limit does not hide, n <= begin. */
int64_t qkv_sink_keys(const qkv_attention_problem *problem, const qkv_sequence *sequence,
                      qkv_range sees);

/* Does query i see key j for all that the tree of drafted tokens says? */
bool qkv_tree_shows(const qkv_attention_problem *problem, const qkv_sequence *sequence,
                    int64_t query, int64_t key);

#endif
