/* SPDX-License-Identifier: MIT */
/*
 * Attention on f16 and bf16 tensors: the same numbers stored in 16 bits must
 * meet the oracle as f32 does, and a 16-bit output is the f32 one rounded.
 */
#include "problem.h"

#include <stdlib.h>
#include <string.h>

enum { SLOT_QUERY = SLOT_FREE, SLOT_KEY, SLOT_VALUE, SLOT_OUT };

/* On every ISA: a 16-bit output has the bits of the f32 output, rounded. */
static void check_narrow_output(problem *p, int32_t dtype)
{
    const qkv_tensor wide = p->desc.out;
    for_each_isa(isa)
    {
        problem_reset(p);
        if (problem_run(p) != QKV_OK)
            fail_with("f32 output: refused");
        p->desc.out = tensor_narrow(&p->out, dtype, SLOT_OUT, PLACE_AT_END);
        if (problem_run(p) != QKV_OK)
            fail_with("16-bit output: refused");
        guards_intact();
        tensor_expect_rounded("16-bit output", &p->out, &p->desc.out);
        p->desc.out = wide;
    }
}

static void check_types(shape s, rng *r)
{
    const int32_t query = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const int32_t key = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const int32_t value = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    problem p = problem_make(s, r);
    p.desc.query = tensor_stored(&p.query, query, SLOT_QUERY, PLACE_AT_END);
    p.desc.key = tensor_stored(&p.key, key, SLOT_KEY, PLACE_AT_END);
    p.desc.value = tensor_stored(&p.value, value, SLOT_VALUE, PLACE_AT_END);
    problem_check(&p);
    check_narrow_output(&p, (int32_t)rng_int(r, QKV_F16, QKV_BF16));
}

Test(dtypes, random_shapes)
{
    rng r = rng_make("dtypes");
    for (int64_t i = effort_cases(150); i > 0; i--)
        check_types((shape){.batch = rng_int(&r, 1, 2),
                            .q_heads = 4,
                            .kv_heads = rng_int(&r, 0, 1) ? 4 : 2,
                            .q_len = i % 3 ? rng_int(&r, 1, 60) : 1,
                            .kv_len = rng_int(&r, 1, i % 4 ? 200 : 700),
                            .head_dim = rng_int(&r, 1, 140),
                            .value_dim = rng_int(&r, 1, 140),
                            .causal = rng_int(&r, 0, 1)},
                    &r);
}

/* The row driver converts fewer keys at a time where rows are long. */
Test(dtypes, large_head_dims)
{
    rng r = rng_make("dtypes large");
    const int64_t dims[] = {576, 1100, 5000, 9000};
    for (int i = 0; i < 4; i++)
        check_types((shape){.batch = 1,
                            .q_heads = 2,
                            .kv_heads = 1,
                            .q_len = 3,
                            .kv_len = 77,
                            .head_dim = dims[i],
                            .value_dim = dims[3 - i] / 3,
                            .causal = true},
                    &r);
}

/* Products of the largest f16 numbers stay far within f32. */
Test(dtypes, largest_f16)
{
    uint16_t q[64], k[3 * 64];
    float v[3] = {1, 2, 3}, out;
    for (int i = 0; i < 64; i++)
        q[i] = 0x7bff; /* 65504 */
    for (int i = 0; i < 3 * 64; i++)
        k[i] = i / 64 == 1 ? 0x7bff : 0xfbff;
    const qkv_attention_desc desc = {.size = sizeof desc,
                                     .q_len = 1,
                                     .kv_len = 3,
                                     .head_dim = 64,
                                     .value_dim = 1,
                                     .query = {.data = q, .dtype = QKV_F16},
                                     .key = {.data = k, .dtype = QKV_F16},
                                     .value = {.data = v},
                                     .out = {.data = &out}};
    for_each_isa(isa)
    {
        size_t size;
        cr_assert(qkv_attention_scratch_size(&desc, 1, &size) == QKV_OK);
        void *scratch = scratch_alloc(size);
        cr_assert(qkv_attention(&desc, scratch, size) == QKV_OK);
        free(scratch);
        if (out != 2.0f)
            fail_with("%s: %.9g, not 2", qkv_isa_name(), (double)out);
    }
}

/* Sums of the largest f16 numbers over a long context stay far within f32. */
Test(dtypes, largest_f16_values_of_a_long_context)
{
    enum { KEYS = 32768, QUERIES = 40 };
    static uint16_t v[KEYS * 2];
    static float q[QUERIES], out[QUERIES * 2];
    for (int j = 0; j < KEYS; j++) {
        v[2 * j] = 0x7b53;                      /* 60000 */
        v[2 * j + 1] = j % 2 ? 0x7b53 : 0xfb53; /* in pairs of both signs */
    }
    for (int few = 0; few < 2; few++) {
        const int64_t q_len = few ? 1 : QUERIES;
        const float k[1] = {1};
        const qkv_attention_desc desc = {
            .size = sizeof desc,
            .q_len = q_len,
            .kv_len = KEYS,
            .head_dim = 1,
            .value_dim = 2,
            .query = {.data = q},
            .key = {.data = (void *)(uintptr_t)k, .flags = QKV_TENSOR_STRIDED},
            .value = {.data = v, .dtype = QKV_F16},
            .out = {.data = out}};
        for_each_isa(isa)
        {
            size_t size;
            cr_assert(qkv_attention_scratch_size(&desc, 1, &size) == QKV_OK);
            void *scratch = scratch_alloc(size);
            cr_assert(qkv_attention(&desc, scratch, size) == QKV_OK);
            free(scratch);
            const double terms = QKV_KEY_BLOCK + KEYS / QKV_KEY_BLOCK + 32;
            const double bound[2] = {terms * ORACLE_U * 60000, terms * ORACLE_U * 60000};
            for (int64_t i = 0; i < q_len; i++)
                expect_close("mean", out + 2 * i, (const double[]){60000, 0}, bound, 2);
            tally(isa, 1);
        }
    }
}

/* Keys that every type holds exactly, with sums that f32 holds exactly: the same
 * logits, and so the same bits, whatever type they are stored in. */
Test(dtypes, the_same_keys_in_every_type)
{
    enum { DIM = 48, KEYS = 70, QUERIES = 40, VALUE_DIM = 9 };
    rng r = rng_make("dtypes same");
    static float q[QUERIES * DIM], k[KEYS * DIM], v[KEYS * VALUE_DIM];
    static float first[QUERIES * VALUE_DIM], out[QUERIES * VALUE_DIM];
    static uint16_t narrow[KEYS * DIM];
    const qkv_kernels *scalar = qkv_kernels_of(QKV_ISA_scalar);
    fill_integers(&r, q, QUERIES * DIM, 3);
    fill_integers(&r, k, KEYS * DIM, 8);
    fill_normal(&r, v, KEYS * VALUE_DIM, 1.0f);
    for (int64_t q_len = 1; q_len <= QUERIES; q_len += QUERIES - 1) {
        for_each_isa(isa)
        {
            for (int32_t type = QKV_F32; type <= QKV_BF16; type++) {
                if (type == QKV_F16)
                    scalar->narrow_f16(k, narrow, KEYS * DIM);
                if (type == QKV_BF16)
                    scalar->narrow_bf16(k, narrow, KEYS * DIM);
                const qkv_attention_desc desc = {
                    .size = sizeof desc,
                    .scale = 0.03125f,
                    .q_len = q_len,
                    .kv_len = KEYS,
                    .head_dim = DIM,
                    .value_dim = VALUE_DIM,
                    .query = {.data = q},
                    .key = {.data = type == QKV_F32 ? (void *)k : narrow, .dtype = type},
                    .value = {.data = v},
                    .out = {.data = type == QKV_F32 ? first : out}};
                size_t size;
                cr_assert(qkv_attention_scratch_size(&desc, 1, &size) == QKV_OK);
                void *scratch = scratch_alloc(size);
                cr_assert(qkv_attention(&desc, scratch, size) == QKV_OK);
                free(scratch);
                context("%s, type %d, %d queries", qkv_isa_name(), (int)type, (int)q_len);
                if (type != QKV_F32)
                    expect_same_bits("row", out, first, q_len * VALUE_DIM);
                tally(isa, 1);
            }
        }
    }
}
