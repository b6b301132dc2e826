/* SPDX-License-Identifier: MIT */
/*
 * Attention problems whose answer is known without computing: with queries
 * of 0 every visible key has the same weight, so that the output is the mean
 * of the visible values. Each is a class of fault that attention code is
 * prone to. They run on every ISA, with few and with many query rows, so
 * that both drivers meet them.
 */
#include "problem.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Runs on every ISA and hands each result to 'check'. */
static void on_every_isa(problem *p, void (*check)(const problem *p))
{
    for_each_isa(isa)
    {
        problem_reset(p);
        context("%s, q_len %lld, kv_len %lld", qkv_isa_name(), (long long)p->s.q_len,
                (long long)p->s.kv_len);
        const qkv_status status = problem_run(p);
        if (status != QKV_OK)
            fail_with("%s", qkv_strerror(status));
        guards_intact();
        check(p);
        tally(isa, 1);
    }
}

static problem uniform(int64_t q_len, int64_t kv_len, bool causal)
{
    problem p = problem_make((shape){.batch = 1,
                                     .q_heads = 1,
                                     .kv_heads = 1,
                                     .q_len = q_len,
                                     .kv_len = kv_len,
                                     .head_dim = 3,
                                     .value_dim = 5,
                                     .causal = causal},
                             NULL);
    tensor_fill_value(&p.query, 0.0f);
    tensor_fill_value(&p.key, 1.0f);
    tensor_fill_index(&p.value, 0.0f, 1.0f);
    return p;
}

/* Sums of ones are exact; dividing by them, or multiplying by their
 * reciprocal, is off by 2u at most. One key too many would be 1/301. */
static void all_ones(const problem *p)
{
    for (int64_t i = 0; i < p->out.extent; i++)
        if (!(fabsf(p->out.data[i] - 1.0f) <= 0x1p-23f))
            fail_with("element %lld is %.9g, not 1", (long long)i, (double)p->out.data[i]);
}

/* Padding of tiles and blocks is never counted as keys. */
Test(closed_form, padding_has_no_weight)
{
    for (int64_t q_len = 1; q_len <= 33; q_len += 32) {
        for (int64_t kv_len = 1; kv_len <= 300; kv_len++) {
            problem p = uniform(q_len, kv_len, false);
            tensor_fill_value(&p.value, 1.0f);
            on_every_isa(&p, all_ones);
        }
    }
}

/* What an earlier, longer call left behind in any buffer has no effect. */
Test(closed_form, leftovers_have_no_weight)
{
    for_each_isa(isa)
    {
        for (int64_t q_len = 1; q_len <= 40; q_len += 39) {
            problem p = uniform(q_len, 500, false);
            tensor_fill_value(&p.value, 7.0f);
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &bytes), QKV_OK);
            void *scratch = scratch_alloc(bytes);
            cr_assert_eq(qkv_attention(&p.desc, scratch, bytes), QKV_OK);
            p.desc.kv_len = 250;
            for (int64_t j = 0; j < 250 * 5; j++)
                p.value.data[j] = 1.0f;
            for (int64_t j = 250 * 3; j < 500 * 3; j++) /* a cache's unused end */
                p.key.data[j] = NAN;
            for (int64_t j = 250 * 5; j < 500 * 5; j++)
                p.value.data[j] = NAN;
            cr_assert_eq(qkv_attention(&p.desc, scratch, bytes), QKV_OK);
            context("%s", qkv_isa_name());
            all_ones(&p);
            free(scratch);
            tally(isa, 1);
        }
    }
}

/* The last query sees all keys, whatever the two lengths are. */
static void bottom_right(const problem *p)
{
    for (int64_t i = 0; i < p->s.q_len; i++) {
        const int64_t last = i + p->s.kv_len - p->s.q_len;
        const float want = last < 0 ? 0.0f : 0.5f * (float)last;
        const float lse = last < 0 ? -INFINITY : (float)log((double)(last + 1));
        for (int d = 0; d < 5; d++)
            if (!(fabsf(p->out.data[i * 5 + d] - want) <= 4e-6f * want))
                fail_with("row %lld is %.9g, expected %.9g", (long long)i,
                          (double)p->out.data[i * 5 + d], (double)want);
        if (last < 0 ? p->lse.data[i] != lse : !(fabsf(p->lse.data[i] - lse) <= 1e-5f))
            fail_with("row %lld: log-sum-exp %.9g, expected %.9g", (long long)i,
                      (double)p->lse.data[i], (double)lse);
    }
}

Test(closed_form, causal_is_bottom_right)
{
    const int64_t pairs[][2] = {{2, 5},   {5, 2},   {1, 9},    {9, 1},    {8, 8},
                                {40, 12}, {12, 40}, {64, 200}, {200, 64}, {33, 600}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        problem p = uniform(pairs[i][0], pairs[i][1], true);
        on_every_isa(&p, bottom_right);
    }
}

/* A row that sees one key is that key's value, bit for bit. */
static void first_row_is_first_value(const problem *p)
{
    expect_same_bits("row 0", p->out.data, p->value.data, 5);
}

Test(closed_form, one_visible_key)
{
    rng r = rng_make("one key");
    for (int64_t len = 1; len <= 70; len++) {
        problem p = uniform(len, len, true);
        tensor_fill(&p.query, &r, 3.0f);
        tensor_fill(&p.key, &r, 3.0f);
        tensor_fill(&p.value, &r, 1.0f);
        on_every_isa(&p, first_row_is_first_value);
    }
}

/* Query heads share key/value heads in groups: 0 0 1 1, not 0 1 0 1. */
static void heads_in_groups(const problem *p)
{
    for (int64_t h = 0; h < 6; h++)
        for (int64_t i = 0; i < p->s.q_len; i++)
            if (tensor_row(&p->out, 0, h, i)[0] != 10.0f * (float)(h / 3 + 1))
                fail_with("head %lld is %.9g", (long long)h,
                          (double)tensor_row(&p->out, 0, h, i)[0]);
}

Test(closed_form, head_groups)
{
    for (int64_t q_len = 1; q_len <= 20; q_len += 19) {
        problem p = problem_make((shape){.batch = 1,
                                         .q_heads = 6,
                                         .kv_heads = 2,
                                         .q_len = q_len,
                                         .kv_len = 4,
                                         .head_dim = 2,
                                         .value_dim = 1},
                                 NULL);
        tensor_fill_value(&p.query, 0.5f);
        tensor_fill_value(&p.key, 0.5f);
        for (int64_t j = 0; j < 4; j++) {
            *tensor_row(&p.value, 0, 0, j) = 10.0f;
            *tensor_row(&p.value, 0, 1, j) = 20.0f;
        }
        on_every_isa(&p, heads_in_groups);
    }
}

/* Denormal values come through: nothing is flushed to 0. */
static void all_1e_40(const problem *p)
{
    for (int64_t i = 0; i < p->out.extent; i++)
        if (p->out.data[i] != 1e-40f)
            fail_with("element %lld is %.9g", (long long)i, (double)p->out.data[i]);
}

Test(closed_form, denormal_values)
{
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        for (int64_t kv_len = 1; kv_len <= 64; kv_len *= 2) {
            problem p = uniform(q_len, kv_len, false);
            tensor_fill_value(&p.value, 1e-40f);
            on_every_isa(&p, all_1e_40);
        }
    }
}

/* Very low logits are low, not masked: no finite number stands for -infinity. */
static void uniform_of_3(const problem *p)
{
    for (int64_t i = 0; i < p->out.extent; i++)
        if (!(fabsf(p->out.data[i] - 1.0f) <= 1e-6f))
            fail_with("element %lld is %.9g, not the mean 1", (long long)i, (double)p->out.data[i]);
}

Test(closed_form, low_logits_are_not_masked)
{
    const float lows[] = {-5e4f, -1e10f, -1e30f, -1e38f, -2.3e38f, -3e38f, -FLT_MAX};
    for (size_t i = 0; i < sizeof lows / sizeof *lows; i++) {
        for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
            problem p = uniform(q_len, 3, false);
            tensor_fill_value(&p.query, 0.0f);
            for (int64_t k = 0; k < q_len; k++)
                tensor_row(&p.query, 0, 0, k)[1] = 1.0f;
            tensor_fill_value(&p.key, lows[i]);
            p.desc.scale = 1.0f;
            on_every_isa(&p, uniform_of_3);
        }
    }
}

/* Differences survive on top of a large offset that all logits share. */
Test(closed_form, offset_logits)
{
    const float offsets[] = {-100000.0f, 100000.0f, -3000.0f, 3000.0f};
    for (int i = 0; i < 4; i++) {
        for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
            shape s = {.batch = 1,
                       .q_heads = 1,
                       .kv_heads = 1,
                       .q_len = q_len,
                       .kv_len = 3,
                       .head_dim = 1,
                       .value_dim = 3,
                       .scale = 1.0f};
            problem p = problem_make(s, NULL);
            tensor_fill_value(&p.query, 1.0f);
            tensor_fill_index(&p.key, offsets[i], 1.0f);
            for (int64_t j = 0; j < 3; j++)
                for (int64_t d = 0; d < 3; d++)
                    tensor_row(&p.value, 0, 0, j)[d] = j == d;
            problem_check(&p);
        }
    }
}

/* An infinite logit makes its row NaN and no other; -infinity has weight 0. */
static void first_row_nan(const problem *p)
{
    for (int64_t i = 0; i < p->s.q_len; i++)
        for (int d = 0; d < 5; d++)
            if (isnan(p->out.data[i * 5 + d]) != (i == 0))
                fail_with("row %lld is %.9g", (long long)i, (double)p->out.data[i * 5 + d]);
    if (!isnan(p->lse.data[0]) || (p->s.q_len > 1 && isnan(p->lse.data[1])))
        fail_with("log-sum-exp");
}

static void without_key_2(const problem *p)
{
    const float want =
        ((float)(p->s.kv_len * (p->s.kv_len - 1) / 2) - 2.0f) / (float)(p->s.kv_len - 1);
    for (int64_t i = 0; i < p->s.q_len; i++)
        for (int d = 0; d < 5; d++)
            if (!(fabsf(p->out.data[i * 5 + d] - want) <= 2e-6f * want))
                fail_with("row %lld is %.9g, expected %.9g", (long long)i,
                          (double)p->out.data[i * 5 + d], (double)want);
}

Test(closed_form, infinite_logits)
{
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        for (int64_t kv_len = 3; kv_len <= 40; kv_len += 37) {
            problem p = uniform(q_len, kv_len, false);
            for (int d = 0; d < 3; d++) {
                tensor_fill_value(&p.query, 0.0f);
                p.query.data[d] = INFINITY; /* of row 0, whose logits are inf * 1 */
                on_every_isa(&p, first_row_nan);
                p.query.data[d] = NAN;
                on_every_isa(&p, first_row_nan);
            }
            tensor_fill_value(&p.query, 1.0f);
            tensor_row(&p.key, 0, 0, 2)[1] = -INFINITY;
            on_every_isa(&p, without_key_2);
        }
    }
}

/* Keys and values that a causal row does not see hold NaN and infinity: each
 * row has the bits it has without them. */
Test(closed_form, invisible_keys_hold_anything)
{
    rng r = rng_make("invisible");
    for (int64_t q_len = 1; q_len <= 80; q_len += q_len < 5 ? 1 : 15) {
        for (int64_t kv_len = 2; kv_len <= 300; kv_len += 47) {
            problem p = uniform(q_len, kv_len, true);
            tensor_fill(&p.query, &r, 1.0f);
            tensor_fill(&p.key, &r, 1.0f);
            tensor_fill(&p.value, &r, 1.0f);
            for_each_isa(isa)
            {
                context("%s, q_len %lld, kv_len %lld", qkv_isa_name(), (long long)q_len,
                        (long long)kv_len);
                float before[80 * 5], lse[80], saved_k[3], saved_v[5];
                problem_reset(&p);
                cr_assert_eq(problem_run(&p), QKV_OK);
                memcpy(before, p.out.data, (size_t)(q_len * 5) * sizeof *before);
                memcpy(lse, p.lse.data, (size_t)q_len * sizeof *lse);

                /* The last key is the last row's alone. */
                float *key = tensor_row(&p.key, 0, 0, kv_len - 1);
                float *value = tensor_row(&p.value, 0, 0, kv_len - 1);
                memcpy(saved_k, key, sizeof saved_k);
                memcpy(saved_v, value, sizeof saved_v);
                const float poisons[] = {NAN, INFINITY, -INFINITY};
                for (int k = 0; k < 3; k++) {
                    for (int d = 0; d < 3; d++)
                        key[d] = poisons[k];
                    for (int d = 0; d < 5; d++)
                        value[d] = poisons[2 - k];
                    problem_reset(&p);
                    cr_assert_eq(problem_run(&p), QKV_OK);
                    expect_same_bits("out", p.out.data, before, (q_len - 1) * 5);
                    expect_same_bits("lse", p.lse.data, lse, q_len - 1);
                    tally(isa, 1);
                }
                memcpy(key, saved_k, sizeof saved_k);
                memcpy(value, saved_v, sizeof saved_v);
            }
        }
    }
}

/* ------------------------------------------------- softmax and dot alone */

Test(closed_form, softmax_of_six_close_scores)
{
    const float scores[6] = {9.34623f, 8.43469f, 7.19462f, 6.59385f, 5.89481f, 5.67304f};
    double want[6], bound[6], largest = 0;
    oracle_softmax(scores, 6, 1.0f, want, bound, NULL, NULL);
    for_each_isa(isa)
    {
        float weights[6], sum = 0;
        cr_assert_eq(qkv_scale_softmax(scores, 6, weights, 6, NULL, 1, 6, 1.0f), QKV_OK);
        for (int j = 0; j < 6; j++) {
            largest = fmax(largest, fabs((double)weights[j] - want[j]));
            sum += weights[j];
        }
        cr_assert(largest <= 1e-6 && fabsf(sum - 1.0f) <= 1e-6f, "%s", qkv_isa_name());
        tally(isa, 1);
    }
}

Test(closed_form, softmax_of_one_score)
{
    for_each_isa(isa)
    {
        const float scores[] = {0.0f, 88.0f, -1e38f, FLT_MAX, -FLT_MAX, 1e-45f};
        for (int i = 0; i < 6; i++) {
            float weight = 0;
            cr_assert_eq(qkv_scale_softmax(&scores[i], 1, &weight, 1, NULL, 1, 1, 1.0f), QKV_OK);
            cr_assert(weight == 1.0f, "%s: %g", qkv_isa_name(), (double)weight);
            tally(isa, 1);
        }
    }
}

/* Sums beyond 2^24 lose no ones: a single f32 accumulator would stay there. */
Test(closed_form, very_long_dot)
{
    const int64_t lengths[] = {(INT64_C(1) << 24) + 2, INT64_C(1) << 25};
    const int count = effort_is_full() ? 2 : 1;
    float *ones = guarded(SLOT_FREE, lengths[count - 1], PLACE_AT_END);
    for (int64_t i = 0; i < lengths[count - 1]; i++)
        ones[i] = 1.0f;
    for_each_isa(isa)
    {
        for (int i = 0; i < count; i++) {
            float score = 0;
            cr_assert_eq(qkv_dot(ones, 0, ones, 0, &score, 1, 1, 1, lengths[i]), QKV_OK);
            cr_assert(score == (float)lengths[i], "%s: %.9g", qkv_isa_name(), (double)score);
            tally(isa, 1);
        }
    }
}

/* Integers: sums are exact, so that all ISAs agree to the bit. */
Test(closed_form, integers_agree_across_isas)
{
    rng r = rng_make("integers");
    for (int64_t n = 1; n <= 150; n++) {
        float q[3 * 150], k[5 * 150], w[3 * 5], first[15], out[3 * 150], first_out[3 * 150];
        fill_integers(&r, q, 3 * n, 9);
        fill_integers(&r, k, 5 * n, 9);
        fill_integers(&r, w, 15, 9);
        bool have = false;
        for_each_isa(isa)
        {
            float scores[15];
            cr_assert_eq(qkv_dot(q, n, k, n, scores, 5, 3, 5, n), QKV_OK);
            cr_assert_eq(qkv_weighted_sum(w, 5, k, n, out, n, 3, 5, n), QKV_OK);
            context("%s, n %lld", qkv_isa_name(), (long long)n);
            if (have) {
                expect_same_values("scores", scores, first, 15);
                expect_same_values("out", out, first_out, 3 * n);
            }
            memcpy(first, scores, sizeof first);
            memcpy(first_out, out, (size_t)(3 * n) * sizeof *out);
            have = true;
            tally(isa, 2);
        }
    }
}
