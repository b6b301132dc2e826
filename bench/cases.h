/* SPDX-License-Identifier: MIT */
/*
 * A case is one kernel or public function on one shape, ready to run, with
 * the work it does counted: useful operations and bytes only.
 */
#ifndef BENCH_CASES_H
#define BENCH_CASES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "internal.h"
#include "shapes.h"
#include "timing.h"

/* What a case can at best be bound by. */
typedef enum bench_bound {
    BENCH_NO_BOUND, /* elements a second, compared with nothing */
    BENCH_FMA,      /* multiply-adds */
    BENCH_READ,     /* reading its input */
    BENCH_ROOF,     /* whichever of the two takes longer */
    BENCH_COPY      /* reading its input and writing its output */
} bench_bound;

/* Memory for a case: one piece, handed out from the front in whole cache lines. */
typedef struct bench_arena {
    char *base;
    int64_t used, size;
} bench_arena;

typedef struct bench_case {
    const char *kernel;
    bench_bound bound;
    double flops;    /* useful ones of one run; 0: not counted */
    double elements; /* of one run, where flops are not counted */

    /* What one run reads at least, for the read limit; the rotation of
     * 'copies' pieces that follow each other keeps the caches cold. */
    const char *data;
    int64_t bytes, copies;
    int64_t to_bytes; /* what one run writes, for the copy limit */

    bench_work work;
    void (*run_one)(void *context, int worker); /* the same on one thread; NULL: no threads */
    /* The largest error of the last run against an oracle in f64; NULL: none. */
    double (*max_error)(void *context);
    void (*destroy)(void *context);
} bench_case;

/* How a case is wanted. */
typedef struct bench_wish {
    const bench_shape *shape;
    const qkv_kernels *kernels; /* also selected for the public functions */
    int threads;
    int32_t dtype; /* of all tensors; beside 8 bits and less of keys and values alone */
    bool cold;
} bench_wish;

/*
 * What can be measured: every kernel of kernels.def, then the public
 * functions. 'make' returns false where the shape does not suit.
 */
typedef struct bench_entry {
    const char *name;
    bool threads; /* can use more than one */
    bool dtypes;  /* can have other types than f32 */
    bool (*make)(const bench_wish *wish, bench_case *c);
} bench_entry;

int bench_entry_count(void);
const bench_entry *bench_entry_at(int index);

/* What the context of a kernel's case begins with: what is read, for the read
 * limit, and the rest. */
typedef struct bench_memory {
    bench_arena in, out;
} bench_memory;

/* A case whose context begins with a bench_memory and is freed with it. */
void bench_finish(bench_case *c, bench_memory *context, void (*run)(void *, int),
                  double (*max_error)(void *));
void bench_free_memory(void *context);

bench_arena bench_arena_new(int64_t floats); /* room for up to 16 arrays in all */
float *bench_take(bench_arena *arena, int64_t floats);
void bench_fill_normal(float *x, int64_t n, uint64_t seed); /* mean 0, variance 1 */
void bench_fill_range(float *x, int64_t n, float low, float high, uint64_t seed);
void bench_shuffle(int32_t *x, int64_t n, uint64_t seed);
void *bench_alloc(size_t bytes); /* zeroed; does not return NULL */
void bench_keep(float result);   /* makes a result count as used */

/* The public functions, bench/public.c. */
bool bench_make_dot(const bench_wish *wish, bench_case *c);
bool bench_make_scale_softmax(const bench_wish *wish, bench_case *c);
bool bench_make_weighted_sum(const bench_wish *wish, bench_case *c);
bool bench_make_attention(const bench_wish *wish, bench_case *c);
bool bench_make_kv_append(const bench_wish *wish, bench_case *c);
bool bench_make_kv_append_rotary(const bench_wish *wish, bench_case *c);
bool bench_make_project(const bench_wish *wish, bench_case *c);
bool bench_make_self_attention(const bench_wish *wish, bench_case *c);

/* The kernels, bench/kernels.c: one for each line of kernels.def. */
#define QKV_KERNEL(op, scalar, avx2, avx512, neon)                                                 \
    bool bench_make_##op(const bench_wish *wish, bench_case *c);
#include "kernels.def"
#undef QKV_KERNEL

#endif
