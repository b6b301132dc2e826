/* SPDX-License-Identifier: MIT */
/*
 * Rows more than 2^31 elements, and so more than 4 GiB, apart: a mapping of
 * tens of GiB of which a few pages exist. Every index that is computed in 32
 * bits, or in bytes of 32 bits, lands elsewhere: on a page that holds 0, or
 * outside the mapping. All tensors lie interleaved in each period of the
 * stride.
 */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>

enum { ROWS = 3, KEYS = 4, DIM = 8, HEADS = 4, HEAD_STRIDE = 16 };
static const int64_t stride = (INT64_C(1) << 31) + 2048;

/* Where each tensor begins within a period, in elements. */
enum { Q_AT = 0, K_AT = 256, V_AT = 512, O_AT = 768, L_AT = 1024 };

static float *far_memory(void)
{
    const size_t bytes = (size_t)(KEYS - 1) * (size_t)stride * sizeof(float) + 16384;
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return map == MAP_FAILED ? NULL : map;
}

static qkv_tensor far(float *base, int64_t at)
{
    return (qkv_tensor){.data = base + at, .stride_head = HEAD_STRIDE, .stride_row = stride};
}

/* The same numbers near and far, and the same bits out of both. */
static void check_far(float *base, int64_t heads, int64_t q_len)
{
    float q[HEADS * ROWS * DIM], k[KEYS * DIM], v[KEYS * DIM];
    float near_out[HEADS * ROWS * DIM], near_lse[HEADS * ROWS];
    rng r = rng_make("far");
    fill_normal(&r, q, heads * q_len * DIM, 1.0f);
    fill_normal(&r, k, KEYS * DIM, 1.0f);
    fill_normal(&r, v, KEYS * DIM, 1.0f);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < q_len; i++)
            memcpy(base + Q_AT + h * HEAD_STRIDE + i * stride, q + (h * q_len + i) * DIM,
                   sizeof(float[DIM]));
    for (int64_t j = 0; j < KEYS; j++) {
        memcpy(base + K_AT + j * stride, k + j * DIM, sizeof(float[DIM]));
        memcpy(base + V_AT + j * stride, v + j * DIM, sizeof(float[DIM]));
    }
    qkv_attention_desc near_desc = {.size = sizeof near_desc,
                                    .flags = QKV_CAUSAL,
                                    .q_heads = heads,
                                    .kv_heads = 1,
                                    .q_len = q_len,
                                    .kv_len = KEYS,
                                    .head_dim = DIM,
                                    .query = {.data = q},
                                    .key = {.data = k},
                                    .value = {.data = v},
                                    .out = {.data = near_out},
                                    .lse = {.data = near_lse}};
    qkv_attention_desc far_desc = near_desc;
    far_desc.query = far(base, Q_AT);
    far_desc.key = far(base, K_AT);
    far_desc.value = far(base, V_AT);
    far_desc.out = far(base, O_AT);
    far_desc.lse = far(base, L_AT);

    size_t bytes = 0;
    cr_assert_eq(qkv_attention_scratch_size(&far_desc, 1, &bytes), QKV_OK);
    void *scratch = scratch_alloc(bytes);
    cr_assert_eq(qkv_attention(&near_desc, scratch, bytes), QKV_OK);
    cr_assert_eq(qkv_attention(&far_desc, scratch, bytes), QKV_OK);
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t i = 0; i < q_len; i++) {
            expect_same_bits("far output", base + O_AT + h * HEAD_STRIDE + i * stride,
                             near_out + (h * q_len + i) * DIM, DIM);
            expect_same_bits("far log-sum-exp", base + L_AT + h * HEAD_STRIDE + i * stride,
                             near_lse + h * q_len + i, 1);
        }
    }
}

static void check_far_steps(float *base)
{
    float scores[ROWS * KEYS], near_q[ROWS * DIM], near_k[KEYS * DIM], near_v[KEYS * DIM];
    float near_scores[ROWS * KEYS], near_out[ROWS * DIM];
    for (int64_t i = 0; i < ROWS; i++)
        memcpy(near_q + i * DIM, base + Q_AT + i * stride, sizeof(float[DIM]));
    for (int64_t j = 0; j < KEYS; j++) {
        memcpy(near_k + j * DIM, base + K_AT + j * stride, sizeof(float[DIM]));
        memcpy(near_v + j * DIM, base + V_AT + j * stride, sizeof(float[DIM]));
    }
    cr_assert_eq(qkv_dot(near_q, DIM, near_k, DIM, near_scores, KEYS, ROWS, KEYS, DIM), QKV_OK);
    cr_assert_eq(
        qkv_dot(base + Q_AT, stride, base + K_AT, stride, base + L_AT, stride, ROWS, KEYS, DIM),
        QKV_OK);
    for (int64_t i = 0; i < ROWS; i++)
        memcpy(scores + i * KEYS, base + L_AT + i * stride, sizeof(float[KEYS]));
    expect_same_bits("far scores", scores, near_scores, ROWS * KEYS);

    cr_assert_eq(
        qkv_scale_softmax(base + L_AT, stride, base + L_AT, stride, NULL, ROWS, KEYS, 0.5f),
        QKV_OK);
    cr_assert_eq(qkv_scale_softmax(scores, KEYS, scores, KEYS, NULL, ROWS, KEYS, 0.5f), QKV_OK);
    cr_assert_eq(qkv_weighted_sum(scores, KEYS, near_v, DIM, near_out, DIM, ROWS, KEYS, DIM),
                 QKV_OK);
    cr_assert_eq(qkv_weighted_sum(base + L_AT, stride, base + V_AT, stride, base + O_AT, stride,
                                  ROWS, KEYS, DIM),
                 QKV_OK);
    for (int64_t i = 0; i < ROWS; i++)
        expect_same_bits("far weighted sum", base + O_AT + i * stride, near_out + i * DIM, DIM);
}

Test(far, rows_beyond_4_gib)
{
    float *base = far_memory();
    if (!base) {
        skip_test("rows beyond 4 GiB: no such mapping here");
        return;
    }
    for_each_isa(isa)
    {
        for (int64_t heads = 1; heads <= HEADS; heads++) {
            for (int64_t q_len = 1; q_len <= ROWS; q_len++) {
                context("%s: %lld heads, %lld rows", qkv_isa_name(), (long long)heads,
                        (long long)q_len);
                check_far(base, heads, q_len);
            }
        }
        check_far_steps(base);
        tally(isa, 1);
    }
}

static double largest(const float *x, int64_t n)
{
    float most = 0.0f;
    for (int64_t i = 0; i < n; i++)
        if (fabsf(x[i]) > most)
            most = fabsf(x[i]);
    return (double)most;
}

/* More keys than 2^31, of which a window shows the last few: positions, offsets
 * and addresses beyond 32 bits, near the end of a mapping that is mostly not there. */
Test(far, more_keys_than_2_to_31)
{
    enum { SEEN = 300, MOST_QUERIES = 40 };
    const int64_t keys = (INT64_C(1) << 31) + 1000;
    float *k = mmap(NULL, (size_t)keys * sizeof *k, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    float *v = mmap(NULL, (size_t)keys * sizeof *v, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (k == MAP_FAILED || v == MAP_FAILED) {
        skip_test("more keys than 2^31: no such mapping here");
        return;
    }
    rng r = rng_make("far keys");
    float q[MOST_QUERIES], out[MOST_QUERIES], near_out[MOST_QUERIES];
    fill_normal(&r, q, MOST_QUERIES, 1.0f);
    fill_normal(&r, k + keys - SEEN, SEEN, 1.0f);
    fill_normal(&r, v + keys - SEEN, SEEN, 1.0f);
    for (int64_t q_len = 1; q_len <= MOST_QUERIES; q_len += MOST_QUERIES - 1) {
        const qkv_attention_desc far_desc = {.size = sizeof far_desc,
                                             .flags = QKV_CAUSAL | QKV_WINDOW,
                                             .q_len = q_len,
                                             .kv_len = keys,
                                             .head_dim = 1,
                                             .window_left = SEEN - MOST_QUERIES,
                                             .window_right = -1,
                                             .query = {.data = q},
                                             .key = {.data = k},
                                             .value = {.data = v},
                                             .out = {.data = out}};
        qkv_attention_desc near_desc = far_desc;
        near_desc.kv_len = SEEN;
        near_desc.key.data = k + keys - SEEN;
        near_desc.value.data = v + keys - SEEN;
        near_desc.out.data = near_out;
        for_each_isa(isa)
        {
            context("%s, %d queries", qkv_isa_name(), (int)q_len);
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&far_desc, 1, &bytes), QKV_OK);
            void *scratch = scratch_alloc(bytes);
            cr_assert_eq(qkv_attention(&near_desc, scratch, bytes), QKV_OK);
            cr_assert_eq(qkv_attention(&far_desc, scratch, bytes), QKV_OK);
            /* Blocks are cut elsewhere: both are within the header's bound. */
            double want[MOST_QUERIES], bound[MOST_QUERIES];
            for (int64_t i = 0; i < q_len; i++) {
                const double most = largest(v + keys - SEEN, SEEN);
                const double ds =
                    3 * ORACLE_U * fabs((double)q[i]) * largest(k + keys - SEEN, SEEN);
                want[i] = (double)near_out[i];
                bound[i] = 2 * most * (2 * ds + (QKV_KEY_BLOCK + 33) * ORACLE_U);
            }
            expect_close("far keys", out, want, bound, q_len);
            free(scratch);
            tally(isa, 1);
        }
    }
}
