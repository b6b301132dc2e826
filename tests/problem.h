/* SPDX-License-Identifier: MIT */
/*
 * An attention problem for the public functions: guarded tensors in every
 * layout, the oracle's answer, and the comparison of the two.
 */
#ifndef TEST_PROBLEM_H
#define TEST_PROBLEM_H

#include "harness.h"
#include "oracle/oracle.h"

typedef enum layout {
    LAYOUT_PACKED,    /* [batch][head][row], strides left 0 */
    LAYOUT_BSHD,      /* [batch][row][head], as a projection leaves it */
    LAYOUT_PADDED,    /* gaps of CANARY behind rows, heads and batches */
    LAYOUT_BROADCAST, /* inputs only: every batch reads the same memory */
    LAYOUT_ONE_HEAD,  /* inputs only: every head and batch does */
    LAYOUTS
} layout;

/* A tensor in guarded memory. */
typedef struct tensor {
    float *data;
    int64_t count[3], stride[3], dim, extent; /* batch, head, row */
    qkv_tensor desc;
} tensor;

/* Takes the slot; all elements are CANARY still. */
tensor tensor_make(int slot, int64_t batch, int64_t heads, int64_t rows, int64_t dim, layout how,
                   int place);
/* The same view of memory that is there already. */
tensor tensor_at(float *data, const int64_t count[3], const int64_t stride[3], int64_t dim);
float *tensor_row(const tensor *t, int64_t batch, int64_t head, int64_t row);
void tensor_fill(const tensor *t, rng *r, float sigma);
void tensor_fill_value(const tensor *t, float value);
/* Element d of key j gets j * step + offset. */
void tensor_fill_index(const tensor *t, float offset, float step);
/* Packed f64 copy in doubles(slot). */
double *tensor_doubles(const tensor *t, int slot);
/* Each row against packed f64; then only those rows may have been written. */
void tensor_expect(const char *what, const tensor *t, const double *want, const double *bound);
/* Each row against the packed rows of another tensor, bit by bit. */
void tensor_expect_bits(const char *what, const tensor *t, const tensor *other);
void tensor_only_rows_written(const char *what, const tensor *t);

/*
 * Tensors of 16 bits, with the strides of an f32 one. tensor_stored rounds the
 * rows of 't' where they lie and returns a copy in guarded_16(slot, ...) of the
 * same numbers; for f32 it returns 't' itself. tensor_narrow is an output;
 * tensor_expect_rounded fails unless it holds the rows of 't' rounded once, and
 * nothing else of it has been written.
 */
void narrow_16(int32_t dtype, const float *x, uint16_t *y, int64_t n);
void widen_16(int32_t dtype, const uint16_t *x, float *y, int64_t n);
qkv_tensor tensor_stored(const tensor *t, int32_t dtype, int slot, int place);
qkv_tensor tensor_narrow(const tensor *t, int32_t dtype, int slot, int place);
void tensor_expect_rounded(const char *what, const tensor *t, const qkv_tensor *narrow);

typedef struct shape {
    int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    bool causal, in_place, no_lse;
    bool scale_set;
    float scale;
    layout q, kv, out;
    int place;
    float sigma; /* 0: 1 */
} shape;

typedef struct problem {
    shape s;
    tensor query, key, value, out, lse;
    qkv_attention_desc desc;
} problem;

/* Slots 0 to 5 (scratch memory is in 5) and doubles 0 to 6 belong to problems. */
enum { SLOT_SCRATCH = 5, SLOT_FREE = 8 };

void shape_context(const shape *s);
/* Tensors with random inputs (or none, to fill by hand). */
problem problem_make(shape s, rng *r);
/* Fresh outputs: CANARY everywhere, or the queries again when in place. */
void problem_reset(problem *p);
qkv_status problem_run(problem *p);
/* The same by tasks in the order that 'r' shuffles, on 'workers' scratch parts. */
qkv_status problem_run_tasks(problem *p, rng *r, int64_t workers);
/* Oracle, then every ISA: run, compare, look for stray writes. */
void problem_check(problem *p);
/* problem_make, fill at random, problem_check. */
void check_shape(shape s, rng *r);

/* 'for_each_isa (isa)': selects each ISA that runs here. */
#define for_each_isa(isa) for (int isa = next_isa(-1); isa < QKV_ISA_COUNT; isa = next_isa(isa))
int next_isa(int after);

#endif
