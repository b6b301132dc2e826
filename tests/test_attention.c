/* SPDX-License-Identifier: MIT */
/* qkv_attention() against the oracle, over shapes, layouts and options. */
#include "problem.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

static layout any_input(rng *r)
{
    return (layout)rng_int(r, 0, LAYOUTS - 1);
}

static layout any_output(rng *r)
{
    return (layout)rng_int(r, LAYOUT_PACKED, LAYOUT_PADDED);
}

static shape random_shape(rng *r, int64_t len_most, int64_t dim_most)
{
    static const int groups[] = {1, 1, 1, 2, 3, 4, 8};
    shape s = {.batch = rng_int(r, 1, 3),
               .kv_heads = rng_int(r, 1, 3),
               .q_len = rng_int(r, 1, len_most),
               .kv_len = rng_int(r, 1, len_most),
               .head_dim = rng_int(r, 1, dim_most),
               .causal = rng_int(r, 0, 1),
               .no_lse = rng_int(r, 0, 3) == 0,
               .q = any_input(r),
               .kv = any_input(r),
               .out = any_output(r),
               .place = (int)rng_int(r, 0, PLACES - 1)};
    s.q_heads = s.kv_heads * groups[rng_int(r, 0, 6)];
    s.value_dim = rng_int(r, 0, 2) ? s.head_dim : rng_int(r, 1, dim_most);
    switch (rng_int(r, 0, 7)) {
    case 0:
        s.scale_set = true; /* to 0: the mean of the visible values */
        break;
    case 1:
        s.scale = -0.3f;
        break;
    case 2:
        s.scale = 1.5f;
        s.scale_set = true;
        break;
    case 3:
        s.sigma = 6.0f; /* nearly one-hot */
        break;
    default:
        break;
    }
    return s;
}

/* Short lengths go ways of their own: every one of them, each row in its place. */
Test(attention, short_lengths)
{
    rng r = rng_make("short lengths");
    for (int64_t kv_len = 1; kv_len <= 70; kv_len++)
        for (int64_t q_len = 1; q_len <= 5; q_len++) {
            if (!effort_takes(kv_len + 3 * q_len))
                continue;
            const int64_t group = INT64_C(1) << rng_int(&r, 0, 2);
            check_shape((shape){.batch = 1,
                                .q_heads = 2 * group,
                                .kv_heads = 2,
                                .q_len = q_len,
                                .kv_len = kv_len,
                                .head_dim = rng_int(&r, 1, 40),
                                .value_dim = rng_int(&r, 1, 40),
                                .causal = rng_int(&r, 0, 3) > 0,
                                .q = (layout)rng_int(&r, 0, 2),
                                .kv = (layout)rng_int(&r, 0, 2),
                                .out = (layout)rng_int(&r, 0, 2),
                                .place = (int)rng_int(&r, 0, PLACES - 1)},
                        &r);
        }
}

Test(attention, random_shapes)
{
    rng r = rng_make("attention random");
    for (int64_t i = effort_cases(300); i > 0; i--)
        check_shape(random_shape(&r, i % 4 ? 40 : 150, i % 8 ? 72 : 140), &r);
}

/* Few queries against many keys: decoding. */
Test(attention, random_decoding)
{
    rng r = rng_make("attention decoding");
    for (int64_t i = effort_cases(150); i > 0; i--) {
        shape s = random_shape(&r, 3, 130);
        s.kv_len = rng_int(&r, 1, i % 8 ? 700 : 3000);
        check_shape(s, &r);
    }
}

/* Both block edges of keys and every edge of tiles. */
Test(attention, block_edges)
{
    rng r = rng_make("attention edges");
    const int64_t lengths[] = {1,  2,  7,   8,   9,   15,  16,  17,  23,  24,  25, 47,
                               48, 49, 127, 128, 129, 255, 256, 257, 511, 512, 513};
    const int n = sizeof lengths / sizeof *lengths;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            if (effort_is_full() || (i * n + k) % 8 == 0)
                check_shape((shape){.batch = 1,
                                    .q_heads = 1,
                                    .kv_heads = 1,
                                    .q_len = lengths[i],
                                    .kv_len = lengths[k],
                                    .head_dim = 5,
                                    .value_dim = 3,
                                    .causal = (i + k) % 2},
                            &r);
}

Test(attention, every_head_dim)
{
    rng r = rng_make("attention head_dim");
    for (int64_t d = 1; d <= 130; d++) {
        if (!effort_takes(d))
            continue;
        for (int q_len = 1; q_len <= 26; q_len += 25) {
            shape s = {.batch = 1,
                       .q_heads = 2,
                       .kv_heads = 1,
                       .q_len = q_len,
                       .kv_len = 37,
                       .head_dim = d,
                       .value_dim = d,
                       .causal = d % 2,
                       .place = (int)(d % PLACES),
                       .q = LAYOUT_PADDED,
                       .out = LAYOUT_PADDED};
            check_shape(s, &r);
            s.value_dim = 131 - d;
            check_shape(s, &r);
        }
    }
}

Test(attention, unusual_head_dims)
{
    rng r = rng_make("attention unusual");
    const int64_t pairs[][2] = {{192, 128}, {3, 5},     {576, 512}, {1, 17},      {256, 256},
                                {80, 80},   {112, 112}, {1024, 64}, {64, 1024},   {1024, 1024},
                                {32, 1},    {5000, 16}, {16, 5000}, {5000, 5000}, {4097, 3},
                                {8200, 2},  {300, 299}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int q_len = 1; q_len <= 29; q_len += 28)
            check_shape((shape){.batch = 1,
                                .q_heads = 2,
                                .kv_heads = 2,
                                .q_len = q_len,
                                .kv_len = 33,
                                .head_dim = pairs[i][0],
                                .value_dim = pairs[i][1],
                                .causal = i % 2,
                                .out = LAYOUT_PADDED},
                        &r);
}

/* Which way a descriptor goes is told, and a very large head is slow, not refused. */
Test(attention, supports)
{
    rng r = rng_make("attention supports");
    for_each_isa(isa)
    {
        shape s = {.batch = 1,
                   .q_heads = 4,
                   .kv_heads = 1,
                   .q_len = 1,
                   .kv_len = 10,
                   .head_dim = 16,
                   .value_dim = 16};
        for (int big = 0; big < 2; big++) {
            s.q_len = big ? 64 : 1;
            problem p = problem_make(s, &r);
            qkv_attention_support support = {.path = -1};
            cr_assert_eq(qkv_attention_supports(&p.desc, &support), QKV_OK);
            cr_assert_eq(support.path, QKV_PATH_TUNED);
            cr_assert_str_eq(support.isa, qkv_isa_name());
            const qkv_kernels *k = test_isa_of(isa).table;
            const bool row =
                s.q_len * s.q_heads <= k->row_limit || s.q_len * s.q_heads <= k->short_rows;
            cr_assert_str_eq(support.route, row ? "row" : "tile");
            cr_assert_eq(qkv_attention_supports(&p.desc, NULL), QKV_OK);
        }
        qkv_attention_support support = {.path = -1};
        s.head_dim = 576;
        s.value_dim = 512; /* a latent cache, of which a whole block is too much */
        problem latent = problem_make(s, &r);
        for (int32_t dtype = QKV_F32; dtype <= QKV_Q4_0; dtype++) {
            latent.desc.key.dtype = latent.desc.value.dtype = dtype;
            if (dtype == QKV_I8) /* has scales */
                continue;
            cr_assert_eq(qkv_attention_supports(&latent.desc, &support), QKV_OK);
            cr_assert_eq(support.path, QKV_PATH_TUNED, "dtype %d", dtype);
        }
        s.head_dim = s.value_dim = 20000;
        problem p = problem_make(s, &r);
        cr_assert_eq(qkv_attention_supports(&p.desc, &support), QKV_OK);
        cr_assert_eq(support.path, QKV_PATH_GENERAL);
        p.desc.kv_len = 0;
        cr_assert_eq(qkv_attention_supports(&p.desc, &support), QKV_OK);
        cr_assert_eq(support.path, QKV_PATH_NONE);
        p.desc.flags = 4096;
        cr_assert_eq(qkv_attention_supports(&p.desc, &support), QKV_E_FLAGS);
        tally(isa, 5);
    }
}

Test(attention, grouped_heads)
{
    rng r = rng_make("attention groups");
    const int groups[] = {1, 2, 4, 8, 71};
    for (int i = 0; i < 5; i++)
        for (int kv_heads = 1; kv_heads <= 3; kv_heads++)
            for (int q_len = 1; q_len <= 13; q_len += 4)
                check_shape((shape){.batch = 2,
                                    .q_heads = kv_heads * groups[i],
                                    .kv_heads = kv_heads,
                                    .q_len = q_len,
                                    .kv_len = 21,
                                    .head_dim = 20,
                                    .value_dim = 12,
                                    .causal = q_len % 2,
                                    .q = (layout)(i % 3),
                                    .kv = (layout)(kv_heads % 3),
                                    .out = (layout)(q_len % 3)},
                            &r);
}

Test(attention, causal_corners)
{
    rng r = rng_make("attention causal");
    for (int64_t q_len = 1; q_len <= 60; q_len += q_len < 10 ? 1 : 7)
        for (int64_t kv_len = 1; kv_len <= 300; kv_len += kv_len < 10 ? 1 : 29)
            if (effort_takes(q_len + kv_len))
                check_shape((shape){.batch = 1,
                                    .q_heads = 2,
                                    .kv_heads = 1,
                                    .q_len = q_len,
                                    .kv_len = kv_len,
                                    .head_dim = 9,
                                    .value_dim = 10,
                                    .causal = true},
                            &r);
}

/* All layouts of all tensors, and the three that projections leave behind. */
Test(attention, layouts)
{
    rng r = rng_make("attention layouts");
    for (int q = 0; q < LAYOUTS; q++)
        for (int kv = 0; kv < LAYOUTS; kv++)
            for (int out = 0; out <= LAYOUT_PADDED; out++)
                for (int q_len = 1; q_len <= 31; q_len += 30)
                    check_shape((shape){.batch = 2,
                                        .q_heads = 4,
                                        .kv_heads = 2,
                                        .q_len = q_len,
                                        .kv_len = 31,
                                        .head_dim = 11,
                                        .value_dim = 13,
                                        .causal = q_len > 1,
                                        .q = (layout)q,
                                        .kv = (layout)kv,
                                        .out = (layout)out,
                                        .place = (q + kv + out) % PLACES},
                                &r);
}

/* Rows that hold a token's queries, keys and values of all heads together. */
Test(attention, packed_qkv_rows)
{
    rng r = rng_make("attention packed qkv");
    for (int heads = 1; heads <= 3; heads++) {
        for (int64_t len = 1; len <= 50; len += 7) {
            const int64_t dim = 8 + heads, row = 3 * heads * dim + 2;
            shape s = {.batch = 2,
                       .q_heads = heads,
                       .kv_heads = heads,
                       .q_len = len,
                       .kv_len = len,
                       .head_dim = dim,
                       .value_dim = dim,
                       .causal = true,
                       .out = LAYOUT_BSHD};
            problem p = problem_make(s, &r);
            float *rows = guarded(SLOT_FREE, 2 * len * row, PLACE_AT_END);
            tensor *parts[] = {&p.query, &p.key, &p.value};
            qkv_tensor *descs[] = {&p.desc.query, &p.desc.key, &p.desc.value};
            for (int i = 0; i < 3; i++) {
                *parts[i] = tensor_at(rows + i * heads * dim, (int64_t[]){2, heads, len},
                                      (int64_t[]){len * row, dim, row}, dim);
                tensor_fill(parts[i], &r, 1.0f);
                *descs[i] = parts[i]->desc;
            }
            problem_check(&p);
        }
    }
}

Test(attention, in_place)
{
    rng r = rng_make("attention in place");
    for (int64_t i = effort_cases(100); i > 0; i--) {
        shape s = random_shape(&r, 60, 70);
        s.value_dim = s.head_dim;
        s.in_place = true;
        s.q = s.out = any_output(&r);
        check_shape(s, &r);
    }
}

/* Lengths of 0: nothing to write, or zeros where there are no keys. */
Test(attention, empty)
{
    const shape full = {.batch = 2,
                        .q_heads = 2,
                        .kv_heads = 2,
                        .q_len = 3,
                        .kv_len = 4,
                        .head_dim = 5,
                        .value_dim = 6};
    for_each_isa(isa)
    {
        for (int causal = 0; causal < 2; causal++) {
            shape s = full;
            s.causal = causal;
            s.kv_len = 0;
            rng r = rng_make("empty");
            problem p = problem_make(s, &r);
            if (causal) /* no keys: their addresses do not matter */
                p.desc.key.data = p.desc.value.data = NULL;
            cr_assert_eq(problem_run(&p), QKV_OK, "kv_len 0");
            guards_intact();
            for (int64_t i = 0; i < p.out.extent; i++)
                cr_assert(p.out.data[i] == 0.0f, "kv_len 0: out is not 0");
            for (int64_t i = 0; i < p.lse.extent; i++)
                cr_assert(p.lse.data[i] == -INFINITY, "kv_len 0: lse is not -infinity");

            s = full;
            s.causal = causal;
            p = problem_make(s, &r);
            p.desc.q_len = 0;
            cr_assert_eq(problem_run(&p), QKV_OK, "q_len 0");
            cr_assert(canary_intact(p.out.data, p.out.extent));
            p.desc.kv_len = 0;
            cr_assert_eq(problem_run(&p), QKV_OK, "q_len and kv_len 0");
            cr_assert(canary_intact(p.out.data, p.out.extent));
            p.desc.query.data = p.desc.out.data = p.desc.lse.data = NULL;
            cr_assert_eq(problem_run(&p), QKV_OK, "q_len 0 without tensors");
            tally(isa, 4);
        }
    }
}

/* Zero-initialised sizes mean 1 batch, 1 head, value_dim = head_dim; the
 * flags' default is that every query sees every key. */
Test(attention, defaults)
{
    rng r = rng_make("attention defaults");
    problem p = problem_make((shape){.batch = 1,
                                     .q_heads = 1,
                                     .kv_heads = 1,
                                     .q_len = 5,
                                     .kv_len = 5,
                                     .head_dim = 4,
                                     .value_dim = 4},
                             &r);
    p.desc.batch = p.desc.q_heads = p.desc.kv_heads = p.desc.value_dim = 0;
    problem_check(&p);
    tensor_fill_value(&p.query, 0.0f);
    tensor_fill_index(&p.value, 0.0f, 1.0f);
    for_each_isa(isa)
    {
        problem_reset(&p);
        cr_assert_eq(problem_run(&p), QKV_OK);
        for (int64_t i = 0; i < p.out.extent; i++)
            cr_assert(p.out.data[i] == 2.0f);
    }
    /* kv_heads 0 is q_heads. */
    shape s = {.batch = 1,
               .q_heads = 3,
               .kv_heads = 3,
               .q_len = 5,
               .kv_len = 6,
               .head_dim = 4,
               .value_dim = 4};
    p = problem_make(s, &r);
    p.desc.kv_heads = 0;
    problem_check(&p);
}

/* The size of scratch memory grows with workers, and neither with batch nor
 * with the lengths beyond what one task takes. */
Test(attention, scratch_size)
{
    rng r = rng_make("attention scratch");
    for_each_isa(isa)
    {
        problem p = problem_make((shape){.batch = 1,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .q_len = 8,
                                         .kv_len = 8,
                                         .head_dim = 64,
                                         .value_dim = 64},
                                 &r);
        size_t one = 0, three = 0, most = 0;
        cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &one), QKV_OK);
        cr_assert_eq(qkv_attention_scratch_size(&p.desc, 3, &three), QKV_OK);
        cr_assert_eq(three, 3 * one);
        for (int shift = 10; shift <= 40; shift += 10) {
            p.desc.kv_len = INT64_C(1) << shift;
            p.desc.q_len = 1 << 20;
            p.desc.batch = 1;
            p.desc.query.stride_row = p.desc.key.stride_row = p.desc.value.stride_row = 64;
            p.desc.out.stride_row = 256;
            p.desc.out.stride_head = 64;
            /* Addresses of nothing: a size query reads no element. */
            p.desc.out.data = (void *)(uintptr_t)0x10000;
            p.desc.query.data = (void *)(uintptr_t)0x100000000;
            p.desc.key.data = p.desc.value.data = (void *)(uintptr_t)0x200000000;
            p.desc.lse.data = NULL;
            size_t bytes = 0;
            const qkv_status status = qkv_attention_scratch_size(&p.desc, 1, &bytes);
            cr_assert_eq(status, QKV_OK, "kv_len 2^%d: %s", shift, qkv_strerror(status));
            cr_assert(most == 0 || bytes == most, "it grows with kv_len");
            most = bytes;
        }
        /* A buffer for the longest prompt serves a single token and all between. */
        const int64_t lengths[] = {1, 2, 7, 8, 48, 100, 384, 385, 1000, 4096};
        for (int i = 0; i < (int)(sizeof lengths / sizeof *lengths); i++) {
            p.desc.q_len = lengths[i];
            p.desc.kv_len = i % 3 ? 5000 : 0;
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &bytes), QKV_OK);
            cr_assert_eq(bytes, one, "q_len %d needs %zu bytes, not %zu", (int)lengths[i], bytes,
                         one);
        }
        cr_assert_leq(most, (size_t)1 << 20);
        tally(isa, 6);
    }
}

/* The floating-point environment is the caller's, flags of ordinary numbers
 * included: no unused lane divides by 0 or subtracts infinities. */
Test(attention, floating_point_environment)
{
    rng r = rng_make("attention fenv");
    for (int64_t i = 0; i < effort_cases(80); i++) {
        shape s = random_shape(&r, 40, 40);
        s.sigma = 1.0f;
        s.causal = false;
        s.q = s.kv = LAYOUT_PACKED; /* no NaN in gaps to be copied by the harness */
        problem p = problem_make(s, &r);
        for_each_isa(isa)
        {
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &bytes), QKV_OK);
            void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
            feclearexcept(FE_ALL_EXCEPT);
            const int rounding = fegetround();
            cr_assert_eq(qkv_attention(&p.desc, scratch, bytes), QKV_OK);
            cr_assert_eq(fegetround(), rounding);
            if (fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW))
                fail_with("%s raises the flags 0x%x", qkv_isa_name(),
                          (unsigned)fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW));
            tally(isa, 1);
        }
    }
}
