/* SPDX-License-Identifier: MIT */
/* Attention by tasks with a schedule, on a parallel-for, and merged parts. */
#include "problem.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_A = SLOT_FREE, SLOT_B, SLOT_LSE_A, SLOT_LSE_B, SLOT_OUT, SLOT_LSE };

static void expect_status(const char *what, qkv_status got, qkv_status want)
{
    if (got != want)
        fail_with("%s: %s, expected %s", what, qkv_strerror(got), qkv_strerror(want));
}

/* ------------------------------------------------------------------- schedule */

/* A sequence of its own whose keys are cut. */
static problem long_problem(rng *r, int64_t kv_len)
{
    problem p = problem_make((shape){.batch = 2,
                                     .q_heads = 2,
                                     .kv_heads = 2,
                                     .q_len = 1,
                                     .kv_len = kv_len,
                                     .head_dim = 16,
                                     .value_dim = 24},
                             r);
    p.desc.flags |= QKV_SPLIT;
    return p;
}

Test(parallel, begin_and_its_misuse)
{
    rng r = rng_make("parallel begin");
    for_each_isa(isa)
    {
        problem p = long_problem(&r, 1500);
        const qkv_attention_desc *d = &p.desc;
        size_t one = 0, two = 0;
        int64_t tasks = 0;
        cr_assert_eq(qkv_attention_scratch_size(d, 1, &one), QKV_OK);
        cr_assert_eq(qkv_attention_scratch_size(d, 2, &two), QKV_OK);
        cr_assert_eq(qkv_attention_task_count(d, &tasks), QKV_OK);
        const size_t worker = two - one, shared = one - worker;
        char *scratch = scratch_alloc(two + 64);
        memset(scratch, 0, two);
        context("schedule on %s: %d tasks", qkv_isa_name(), (int)tasks);
        cr_assert_eq(tasks, 2 * 2 * 3);

        problem_reset(&p);
        expect_status("not begun", qkv_attention_run_task(d, 0, 0, scratch, one), QKV_E_SCRATCH);
        expect_status("begin", qkv_attention_begin(d, NULL, one), QKV_E_SCRATCH);
        expect_status("begin", qkv_attention_begin(d, scratch, shared - 1), QKV_E_SCRATCH);
        expect_status("begin", qkv_attention_begin(d, scratch + 4, one), QKV_E_SCRATCH);
        expect_status("begin", qkv_attention_begin(NULL, scratch, one), QKV_E_NULL);
        expect_status("begin", qkv_attention_begin(d, scratch, shared), QKV_OK);

        qkv_attention_desc other = *d;
        other.scale = 0.5f;
        expect_status("another", qkv_attention_run_task(&other, 0, 0, scratch, one), QKV_E_SCRATCH);
        expect_status("task -1", qkv_attention_run_task(d, -1, 0, scratch, one), QKV_E_INDEX);
        expect_status("task", qkv_attention_run_task(d, tasks, 0, scratch, one), QKV_E_INDEX);
        expect_status("worker", qkv_attention_run_task(d, 0, -1, scratch, one), QKV_E_INDEX);
        expect_status("worker", qkv_attention_run_task(d, 0, INT64_MAX, scratch, one), QKV_E_INDEX);
        expect_status("worker", qkv_attention_run_task(d, 0, 1, scratch, two - 1), QKV_E_SCRATCH);
        expect_status("NULL", qkv_attention_run_task(NULL, 0, 0, scratch, one), QKV_E_NULL);
        expect_status("NULL", qkv_attention_run_task(d, 0, 0, NULL, one), QKV_E_SCRATCH);
        expect_status("size", qkv_attention_run_task(d, 0, 0, scratch, 64), QKV_E_SCRATCH);
        expect_status("parallel", qkv_attention_parallel(d, scratch, one, 1, NULL, NULL),
                      QKV_E_NULL);
        expect_status("parallel",
                      qkv_attention_parallel(d, scratch, one, 2, qkv_pool_parallel_for, NULL),
                      QKV_E_SCRATCH);
        expect_status("parallel",
                      qkv_attention_parallel(d, scratch, one, 0, qkv_pool_parallel_for, NULL),
                      QKV_E_INDEX);
        /* In the part of a worker that may never run. */
        other = *d;
        other.out.data = scratch + one + 64;
        expect_status("overlap", qkv_attention_begin(&other, scratch, two), QKV_E_OVERLAP);
        expect_status("overlap",
                      qkv_attention_parallel(&other, scratch, two, 2, qkv_pool_parallel_for, NULL),
                      QKV_E_OVERLAP);
        if (!canary_intact(p.out.data, p.out.extent))
            fail_with("the output has changed");
        free(scratch);
    }
    qkv_pool *pool;
    expect_status("pool", qkv_pool_create(1, NULL), QKV_E_NULL);
    expect_status("pool", qkv_pool_create(0, &pool), QKV_E_INDEX);
    expect_status("pool", qkv_pool_create(INT64_MAX, &pool), QKV_E_INDEX);
    qkv_pool_destroy(NULL);
}

/* Each of three bodies waits for the others: the pool's threads must take part. */
static void meet_others(void *argument, int64_t i)
{
    (void)i;
    atomic_int *arrived = argument;
    atomic_fetch_add(arrived, 1);
    while (atomic_load(arrived) % 3 != 0)
        sched_yield();
}

Test(parallel, pool_threads_take_part, .timeout = 600)
{
    qkv_pool *pool = NULL;
    atomic_int arrived = 0;
    expect_status("pool", qkv_pool_create(3, &pool), QKV_OK);
    for (int round = 1; round <= 5; round++) {
        qkv_pool_parallel_for(pool, 3, meet_others, &arrived);
        cr_assert_eq(atomic_load(&arrived), 3 * round);
    }
    qkv_pool_destroy(pool);
}

/* A pool whose threads cannot all be started leaves none behind. */
Test(parallel, pool_without_memory)
{
#ifdef __GLIBC__
    pthread_attr_t vast;
    qkv_pool *pool = NULL;
    cr_assert_eq(pthread_attr_init(&vast), 0);
    /* Beyond every address space, so that nobody looks for room: an emulator may take minutes. */
    cr_assert_eq(pthread_attr_setstacksize(&vast, SIZE_MAX / 4 + 1), 0);
    cr_assert_eq(pthread_setattr_default_np(&vast), 0);
    expect_status("pool", qkv_pool_create(3, &pool), QKV_E_SYSTEM);
    cr_assert_null(pool);
    expect_status("pool", qkv_pool_create(1, &pool), QKV_OK); /* the caller alone */
    qkv_pool_destroy(pool);
#else
    skip_test("pool without memory: no default of a thread's stack to change");
#endif
}

/* A size asked for the longest sequences without arrays is enough for any. */
Test(parallel, scratch_size_of_the_longest_serves_all)
{
    rng r = rng_make("parallel scratch");
    for (int64_t i = effort_cases(400); i > 0; i--) {
        int64_t kv_lens[4], q_starts[5] = {0};
        qkv_attention_desc d = {.size = sizeof d,
                                .flags = QKV_SPLIT,
                                .batch = 4,
                                .q_heads = 4,
                                .kv_heads = rng_int(&r, 0, 1) ? 2 : 4,
                                .q_len = rng_int(&r, 1, 40),
                                .kv_len = rng_int(&r, 1, 80000),
                                .head_dim = 8};
        static float x[4]; /* sizes alone are asked for */
        const qkv_tensor t = {.data = x, .stride_row = 0, .flags = QKV_TENSOR_STRIDED};
        d.query = d.key = d.value = t;
        d.out = (qkv_tensor){.data = (void *)(uintptr_t)0x100000};
        size_t most = 0, bytes = 0;
        cr_assert_eq(qkv_attention_scratch_size(&d, 1, &most), QKV_OK);
        for (int b = 0; b < 4; b++) {
            kv_lens[b] = rng_int(&r, 0, d.kv_len);
            q_starts[b + 1] = q_starts[b] + rng_int(&r, 0, d.q_len);
        }
        d.q_len = q_starts[4];
        d.q_starts = q_starts;
        d.kv_lens = kv_lens;
        cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
        if (bytes > most)
            fail_with("%zu bytes, but %zu for the longest", bytes, most);
    }
}

static void backwards(void *context, int64_t n, qkv_parallel_body *body, void *argument)
{
    *(int64_t *)context += n;
    for (int64_t i = n - 1; i >= 0; i--)
        body(argument, i);
    body(argument, n + 100); /* a body that it was not asked for does nothing */
}

Test(parallel, parallel_for_of_the_caller)
{
    rng r = rng_make("parallel for");
    for (int64_t i = effort_cases(20); i > 0; i--) {
        problem p = long_problem(&r, rng_int(&r, 1, 3000));
        for_each_isa(isa)
        {
            problem_reset(&p);
            cr_assert_eq(problem_run(&p), QKV_OK);
            const size_t bytes = (size_t)p.out.extent * sizeof(float);
            float *want = malloc(bytes);
            memcpy(want, p.out.data, bytes);
            problem_reset(&p);
            size_t need = 0;
            int64_t calls = 0;
            const int64_t workers = rng_int(&r, 1, 5);
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, workers, &need), QKV_OK);
            void *scratch = guarded_bytes(SLOT_SCRATCH, need, PLACE_AT_START);
            cr_assert_eq(qkv_attention_parallel(&p.desc, scratch, need, workers, backwards, &calls),
                         QKV_OK);
            guards_intact();
            cr_assert(calls >= 1 && calls <= workers);
            expect_same_bits("out", p.out.data, want, p.out.extent);
            free(want);
            tally(isa, 1);
        }
    }
}

/* Heads that lie together go through the keys together, with the same bits. */
Test(parallel, heads_side_by_side)
{
    rng r = rng_make("parallel side by side");
    for (int64_t i = effort_cases(24); i > 0; i--) {
        const int64_t group = rng_int(&r, 1, 4);
        shape s = {.batch = rng_int(&r, 1, 2),
                   .kv_heads = i % 4 ? rng_int(&r, 2, 9) : 150,
                   .q_len = i % 4 ? rng_int(&r, 1, 16 / group) : 1,
                   .kv_len = rng_int(&r, 513, 1700),
                   .head_dim = rng_int(&r, 1, 24),
                   .value_dim = rng_int(&r, 1, 24),
                   .kv = LAYOUT_PADDED,
                   .causal = i % 2};
        s.q_heads = s.kv_heads * group;
        for_each_isa(isa)
        {
            rng same = r, again = r;
            problem p = problem_make(s, &same);
            cr_assert_eq(problem_run(&p), QKV_OK);
            const size_t out_bytes = (size_t)p.out.extent * sizeof(float);
            float *want = malloc(out_bytes);
            memcpy(want, p.out.data, out_bytes);

            s.kv = LAYOUT_BSHD;
            p = problem_make(s, &again);
            s.kv = LAYOUT_PADDED;
            problem_reset(&p);
            cr_assert_eq(problem_run(&p), QKV_OK);
            guards_intact();
            expect_same_bits("out", p.out.data, want, p.out.extent);

            size_t bytes = 0;
            int64_t calls = 0;
            p.desc.flags |= QKV_SPLIT;
            problem_reset(&p);
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, 3, &bytes), QKV_OK);
            void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
            cr_assert_eq(qkv_attention_parallel(&p.desc, scratch, bytes, 3, backwards, &calls),
                         QKV_OK);
            guards_intact();
            expect_same_bits("out by tasks", p.out.data, want, p.out.extent);
            free(want);
            tally(isa, 1);
        }
        rng_int(&r, 0, 1);
    }
}

/* ---------------------------------------------------------------------- merge */

/* Keys in two places, one of them perhaps empty, are merged to what all give. */
Test(parallel, merge_of_parts)
{
    rng r = rng_make("merge");
    for (int64_t i = effort_cases(60); i > 0; i--) {
        problem p = problem_make((shape){.batch = 1,
                                         .q_heads = 3,
                                         .kv_heads = 3,
                                         .q_len = rng_int(&r, 1, 9),
                                         .kv_len = rng_int(&r, 1, 90),
                                         .head_dim = 8,
                                         .value_dim = rng_int(&r, 1, 150)},
                                 &r);
        const int64_t rows = 3 * p.s.q_len, cut = rng_int(&r, 0, p.s.kv_len);
        float *outs[2], *lses[2];
        for (int part = 0; part < 2; part++) {
            outs[part] = guarded(SLOT_A + part, rows * p.s.value_dim, PLACE_AT_END);
            lses[part] = guarded(SLOT_LSE_A + part, rows, PLACE_AT_END);
            qkv_attention_desc d = p.desc;
            d.kv_len = part ? p.s.kv_len - cut : cut;
            d.key = (qkv_tensor){.data = p.key.data + (part ? cut * 8 : 0),
                                 .stride_head = p.s.kv_len * 8,
                                 .stride_row = 8};
            d.value = (qkv_tensor){.data = p.value.data + (part ? cut * p.s.value_dim : 0),
                                   .stride_head = p.s.kv_len * p.s.value_dim,
                                   .stride_row = p.s.value_dim};
            d.out = (qkv_tensor){.data = outs[part]};
            d.lse = (qkv_tensor){.data = lses[part]};
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
            void *scratch = scratch_alloc(bytes);
            cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
            free(scratch);
            for (int64_t k = 0; d.kv_len == 0 && k < rows * p.s.value_dim; k++)
                outs[part][k] = NAN; /* an empty part may hold anything */
        }
        cr_assert_eq(problem_run(&p), QKV_OK);
        const bool in_place = rng_int(&r, 0, 1);
        float *out = in_place ? outs[0] : guarded(SLOT_OUT, rows * p.s.value_dim, PLACE_AT_END);
        float *lse = in_place ? lses[0] : guarded(SLOT_LSE, rows, PLACE_AT_END);
        const qkv_merge_desc m = {.size = sizeof m,
                                  .parts = 2,
                                  .rows = rows,
                                  .value_dim = p.s.value_dim,
                                  .part_out = (const float *const *)outs,
                                  .part_lse = (const float *const *)lses,
                                  .out = out,
                                  .lse = lse};
        cr_assert_eq(qkv_merge(&m), QKV_OK);
        guards_intact();

        /* Both sides are within attention's bound of the exact result, the
         * merge within its own of the parts; |v| <= 6 and |logit| <= 40 here
         * by far, so that all of it together stays below 2^-14. */
        for (int64_t k = 0; k < rows; k++) {
            if (fabs((double)lse[k] - (double)p.lse.data[k]) > 0x1p-16 * (1 + fabs((double)lse[k])))
                fail_with("lse of row %d: %g, not %g", (int)k, (double)lse[k],
                          (double)p.lse.data[k]);
            for (int64_t d = 0; d < p.s.value_dim; d++)
                if (!(fabs((double)out[k * p.s.value_dim + d] -
                           (double)p.out.data[k * p.s.value_dim + d]) <= 0x1p-14))
                    fail_with("row %d, column %d: %g, not %g", (int)k, (int)d,
                              (double)out[k * p.s.value_dim + d],
                              (double)p.out.data[k * p.s.value_dim + d]);
        }
    }
}

Test(parallel, merge_against_the_formula)
{
    enum { PARTS = 5, ROWS = 40, DIM = 70 };
    rng r = rng_make("merge formula");
    static float outs[PARTS][ROWS * DIM], lses[PARTS][ROWS];
    const float *out_of[PARTS], *lse_of[PARTS];
    for (int i = 0; i < PARTS; i++) {
        out_of[i] = outs[i];
        lse_of[i] = lses[i];
        fill_normal(&r, outs[i], ROWS * DIM, 1.0f);
        fill_normal(&r, lses[i], ROWS, 20.0f);
        for (int64_t row = i; row < ROWS; row += 3)
            lses[i][row] = row == 7 ? lses[i][row] : -INFINITY;
    }
    for (int i = 0; i < PARTS; i++)
        lses[i][9] = -INFINITY;
    lses[2][11] = NAN;
    lses[2][12] = INFINITY;
    float out[ROWS * DIM], lse[ROWS];
    const qkv_merge_desc m = {.size = sizeof m,
                              .parts = PARTS,
                              .rows = ROWS,
                              .value_dim = DIM,
                              .part_out = out_of,
                              .part_lse = lse_of,
                              .out = out,
                              .lse = lse};
    cr_assert_eq(qkv_merge(&m), QKV_OK);
    for (int64_t row = 0; row < ROWS; row++) {
        double max = (double)-INFINITY, sum = 0;
        for (int i = 0; i < PARTS; i++)
            max = (double)lses[i][row] > max ? (double)lses[i][row] : max;
        for (int i = 0; i < PARTS; i++)
            sum += exp((double)lses[i][row] - max);
        for (int64_t d = 0; d < DIM; d++) {
            const float got = out[row * DIM + d];
            double want = 0, bound = 0;
            for (int i = 0; i < PARTS; i++) {
                const double below = (double)lses[i][row] - max, w = exp(below);
                if (w == 0)
                    continue;
                const double term = w * (double)outs[i][row * DIM + d];
                want += term;
                bound += fabs(term) * (4 + fabs(below) + PARTS + 2) * 0x1p-24 + 0x1p-126;
            }
            if (row == 9                 ? got != 0.0f
                : row == 11 || row == 12 ? !isnan(got)
                                         : !(fabs((double)got - want / sum) <= bound / sum * 2))
                fail_with("row %d, column %d: %g, not %g", (int)row, (int)d, (double)got,
                          want / sum);
        }
        if (row == 9 && lse[row] != -INFINITY)
            fail_with("lse of nothing: %g", (double)lse[row]);
    }
}

Test(parallel, merge_misuse)
{
    float out[12], lse[3], a[12] = {0}, b[12] = {0}, la[3] = {0}, lb[3] = {0};
    const float *outs[2] = {a, b}, *lses[2] = {la, lb};
    const qkv_merge_desc good = {.size = sizeof good,
                                 .parts = 2,
                                 .rows = 3,
                                 .value_dim = 4,
                                 .part_out = outs,
                                 .part_lse = lses,
                                 .out = out,
                                 .lse = lse};
    canary_fill(out, 12);
    canary_fill(lse, 3);
#define MERGE(status, ...)                                                                         \
    do {                                                                                           \
        qkv_merge_desc d = good;                                                                   \
        __VA_ARGS__;                                                                               \
        expect_status(#__VA_ARGS__, qkv_merge(&d), (status));                                      \
    } while (0)
    expect_status("NULL", qkv_merge(NULL), QKV_E_NULL);
    MERGE(QKV_E_SIZE, d.size = 8);
    MERGE(QKV_E_FLAGS, d.flags = 1);
    MERGE(QKV_E_FLAGS, d.reserved = 1);
    MERGE(QKV_E_SHAPE, d.parts = -1);
    MERGE(QKV_E_SHAPE, d.rows = -1);
    MERGE(QKV_E_SHAPE, d.value_dim = -1);
    MERGE(QKV_E_STRIDE, d.out_stride = -1);
    MERGE(QKV_E_STRIDE, d.out_stride = 3);
    MERGE(QKV_E_NULL, d.part_out = NULL);
    MERGE(QKV_E_NULL, d.part_lse = NULL);
    MERGE(QKV_E_NULL, d.out = NULL);
    MERGE(QKV_E_OVERFLOW, d.rows = INT64_MAX / 4);
    MERGE(QKV_E_OVERLAP, d.out = (float *)(void *)(uintptr_t)outs);
    MERGE(QKV_E_ALIGN, d.part_out = (const float *const *)(const void *)((const char *)outs + 4));
    MERGE(QKV_E_OVERLAP, d.out = a + 1);
    MERGE(QKV_E_OVERLAP, d.lse = la + 1);
    MERGE(QKV_E_OVERLAP, d.lse = a);
    MERGE(QKV_E_OVERLAP, d.out = out; d.lse = out + 3);
    outs[1] = NULL;
    MERGE(QKV_E_NULL, (void)d);
    outs[1] = (const float *)(const void *)((const char *)b + 1);
    MERGE(QKV_E_ALIGN, (void)d);
    if (!canary_intact(out, 12) || !canary_intact(lse, 3))
        fail_with("an output has changed");
}
