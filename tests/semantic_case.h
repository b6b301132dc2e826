/* SPDX-License-Identifier: MIT */
/*
 * One combination of everything that a descriptor can ask for: a small struct
 * of which all data follow, so that a seed makes the same case again and a
 * failing one can be shrunk. All fields are numbers, and 0 is the plain case.
 */
#ifndef TEST_SEMANTIC_CASE_H
#define TEST_SEMANTIC_CASE_H

#include "harness.h"

enum { MASK_NONE, MASK_F32, MASK_F16, MASK_BF16, MASK_BOOL, MASK_BIT, MASK_KINDS };
enum { BY_CALL, BY_TASKS, BY_SPLIT_TASKS };

enum {
    C_MORE_BATCH, /* sizes that are at least 1 are stored less 1 */
    C_MORE_KV_HEADS,
    C_MORE_GROUP,
    C_MORE_Q,
    C_KV,
    C_MORE_DIM,
    C_MORE_VALUE_DIM,
    C_CAUSAL,
    C_WINDOWED,
    C_LEFT, /* the width plus 1: 0 has no limit */
    C_RIGHT,
    C_SINK_TOKENS,
    C_OFFSETS,   /* 0: NULL; else how widely they scatter */
    C_Q_STARTS,  /* the queries are dealt out to the sequences */
    C_KV_STARTS, /* the keys likewise, where they are not in pages */
    C_KV_LENS,   /* a length of its own for every sequence */
    C_SHARED,    /* so many keys are the same in all sequences */
    C_PAGED,     /* pages of 4 << n keys, in any order */
    C_SCALE,     /* 0: the default; 1: set to 0; 2: negative; 3: large */
    C_SOFTCAP,
    C_SLOPES,
    C_HEAD_SCALES,
    C_SINKS,
    C_MASK,
    C_MASK_STRIDES, /* bits: which axes are broadcast; padded keys */
    C_MASK_DENSITY, /* 0: all seen */
    C_TREE,
    C_TYPE_Q, /* up to QKV_BF16, as that of the output */
    C_TYPE_K, /* up to QKV_Q4_0 */
    C_TYPE_V,
    C_TYPE_OUT,
    C_HOW_Q,
    C_HOW_KV,
    C_HOW_OUT,
    C_IN_PLACE,
    C_LATENT, /* V is a prefix of K */
    C_INVARIANT,
    C_TASKS, /* BY_...: one call, or tasks in any order and by several workers */
    C_ROW_MAX,
    C_WEIGHTS, /* the stage plus 1 */
    C_POISON,  /* NaN and infinity in all that no row sees */
    C_NAN,     /* a NaN in something that may be seen */
    C_FIELDS
};

typedef struct semantic_case {
    uint64_t seed;
    int f[C_FIELDS];
} semantic_case;

semantic_case semantic_case_random(uint64_t seed);

/* The seed, and every field that is not 0 by its name. */
void semantic_case_describe(const semantic_case *c, char *text, size_t size);

#endif
