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
