/* SPDX-License-Identifier: MIT */
/* The problems that are measured: attention shapes and matrix products. */
#ifndef BENCH_SHAPES_H
#define BENCH_SHAPES_H

#include <stdbool.h>
#include <stdint.h>

enum { BENCH_SEQUENCES_MAX = 16 };

typedef struct bench_shape {
    char name[80];
    bool product; /* rows x in_dim x out_dim, for qkv_project; else attention */
    bool causal;
    int64_t q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    int64_t rows, in_dim, out_dim;
    /* A batch, for qkv_attention: the length of each sequence, kv_len being the
     * longest. Without one, 'sequences' is 1 and lens[0] is kv_len. */
    int sequences;
    int64_t lens[BENCH_SEQUENCES_MAX];
    int64_t page_size; /* 0: no pages */
} bench_shape;

/*
 * Reads "P512c", "h,hkv,lq,lkv,d,dv" or "ROWSxINxOUT". The second may end in c
 * for causal, and in pN for pages of N rows; its lkv may be a batch of lengths,
 * "17+100+9". False if the text is none of them or a size is impossible.
 */
bool bench_shape_parse(const char *text, bench_shape *shape);

/* More than one sequence, or pages: only attention takes it. */
bool bench_shape_is_batch(const bench_shape *shape);

/* Keys of one head, over all sequences, and how many pages hold them. */
int64_t bench_shape_keys(const bench_shape *shape);
int64_t bench_shape_pages(const bench_shape *shape);

/* The named shapes, one after the other; false past the last. */
bool bench_shape_named(int index, bench_shape *shape);

/* How many pairs of a query and a key that it sees one head has, over all sequences. */
double bench_shape_pairs(const bench_shape *shape);

/* Keys that query i of a sequence sees. */
int64_t bench_shape_visible(const bench_shape *shape, int sequence, int64_t i);

#endif
