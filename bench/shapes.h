/* SPDX-License-Identifier: MIT */
/* The problems that are measured: attention shapes and matrix products. */
#ifndef BENCH_SHAPES_H
#define BENCH_SHAPES_H

#include <stdbool.h>
#include <stdint.h>

typedef struct bench_shape {
    char name[32];
    bool product; /* rows x in_dim x out_dim, for qkv_project; else attention */
    bool causal;
    int64_t q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    int64_t rows, in_dim, out_dim;
} bench_shape;

/*
 * Reads "P512c", "h,hkv,lq,lkv,d,dv" with an optional trailing c, or
 * "ROWSxINxOUT". False if the text is none of them or a size is impossible.
 */
bool bench_shape_parse(const char *text, bench_shape *shape);

/* The named shapes, one after the other; false past the last. */
bool bench_shape_named(int index, bench_shape *shape);

/* How many pairs of a query and a key that it sees one head has. */
double bench_shape_pairs(const bench_shape *shape);

/* Keys that query i sees. */
int64_t bench_shape_visible(const bench_shape *shape, int64_t i);

#endif
