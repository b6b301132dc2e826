/* SPDX-License-Identifier: MIT */
/*
 * Attention on f16 and bf16 tensors: the same numbers stored in 16 bits must
 * meet the oracle as f32 does, and a 16-bit output is the f32 one rounded.
 */
#include "problem.h"

#include <stdlib.h>
#include <string.h>

enum { SLOT_QUERY = SLOT_FREE, SLOT_KEY, SLOT_VALUE, SLOT_OUT };

static void narrow(int32_t dtype, const float *x, uint16_t *y, int64_t n)
{
    const qkv_kernels *scalar = qkv_kernels_of(QKV_ISA_scalar);
    (dtype == QKV_F16 ? scalar->narrow_f16 : scalar->narrow_bf16)(x, y, n);
}

static void widen(int32_t dtype, const uint16_t *x, float *y, int64_t n)
{
    const qkv_kernels *scalar = qkv_kernels_of(QKV_ISA_scalar);
    (dtype == QKV_F16 ? scalar->widen_f16 : scalar->widen_bf16)(x, y, n);
}

/*
 * Rounds a tensor to a type where it lies and returns a packed copy in that
 * type, flush against a page that may not be touched; for f32 the tensor.
 */
static qkv_tensor stored_as(int32_t dtype, int slot, const tensor *t)
{
    if (dtype == QKV_F32)
        return t->desc;
    const int64_t n = t->count[0] * t->count[1] * t->count[2] * t->dim;
    uint16_t *copy = guarded_bytes(slot, (size_t)n * sizeof *copy, PLACE_AT_END), *at = copy;
    for (int64_t b = 0; b < t->count[0]; b++)
        for (int64_t h = 0; h < t->count[1]; h++)
            for (int64_t i = 0; i < t->count[2]; i++, at += t->dim) {
                float *row = tensor_row(t, b, h, i);
                narrow(dtype, row, at, t->dim);
                widen(dtype, at, row, t->dim);
            }
    return (qkv_tensor){.data = copy, .dtype = dtype};
}

/* On every ISA: a 16-bit output has the bits of the f32 output, rounded. */
static void check_narrow_output(problem *p, int32_t dtype)
{
    const shape *s = &p->s;
    const int64_t n = s->batch * s->q_heads * s->q_len * s->value_dim;
    const qkv_tensor wide = p->desc.out;
    uint16_t *want = scratch_alloc((size_t)n * sizeof *want);
    for_each_isa(isa)
    {
        problem_reset(p);
        if (problem_run(p) != QKV_OK)
            fail_with("f32 output: refused");
        uint16_t *at = want;
        for (int64_t b = 0; b < s->batch; b++)
            for (int64_t h = 0; h < s->q_heads; h++)
                for (int64_t i = 0; i < s->q_len; i++, at += s->value_dim)
                    narrow(dtype, tensor_row(&p->out, b, h, i), at, s->value_dim);

        uint16_t *got = guarded_bytes(SLOT_OUT, (size_t)n * sizeof *got, PLACE_AT_END);
        p->desc.out = (qkv_tensor){.data = got, .dtype = dtype};
        if (problem_run(p) != QKV_OK)
            fail_with("16-bit output: refused");
        p->desc.out = wide;
        guards_intact();
        if (memcmp(got, want, (size_t)n * sizeof *got) != 0)
            fail_with("16-bit output is not the f32 output rounded");
    }
    free(want);
}

static void check_types(shape s, rng *r)
{
    const int32_t query = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const int32_t key = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    const int32_t value = (int32_t)rng_int(r, QKV_F32, QKV_BF16);
    problem p = problem_make(s, r);
    p.desc.query = stored_as(query, SLOT_QUERY, &p.query);
    p.desc.key = stored_as(key, SLOT_KEY, &p.key);
    p.desc.value = stored_as(value, SLOT_VALUE, &p.value);
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
