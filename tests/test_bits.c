/* SPDX-License-Identifier: MIT */
/*
 * What the bits of a result may not depend on: how tasks are spread over
 * threads, the batch around a sequence, alignment, the layout, or whether
 * the output lies over the queries.
 */
#include "problem.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A result to compare with, out of the reach of guarded slots. */
typedef struct result {
    tensor out, lse;
} result;

static tensor keep(const tensor *t)
{
    float *copy = malloc((size_t)(t->extent + 1) * sizeof *copy);
    memcpy(copy, t->data, (size_t)t->extent * sizeof *copy);
    return tensor_at(copy, t->count, t->stride, t->dim);
}

static result keep_result(const problem *p)
{
    return (result){keep(&p->out), keep(&p->lse)};
}

static void free_result(result r)
{
    free(r.out.data);
    free(r.lse.data);
}

static void expect_result(const char *what, const problem *p, const result *want)
{
    context("%s on %s: q_len %lld, kv_len %lld, heads %lld/%lld, head_dim %lld", what,
            qkv_isa_name(), (long long)p->s.q_len, (long long)p->s.kv_len, (long long)p->s.q_heads,
            (long long)p->s.kv_heads, (long long)p->s.head_dim);
    guards_intact();
    tensor_expect_bits("out", &p->out, &want->out);
    tensor_expect_bits("lse", &p->lse, &want->lse);
}

static shape some_shape(rng *r, int64_t i)
{
    const int64_t group = rng_int(r, 1, 5);
    shape s = {.batch = rng_int(r, 1, 3),
               .kv_heads = rng_int(r, 1, 3),
               .q_len = i % 3 ? rng_int(r, 1, 90) : rng_int(r, 1, 3),
               .kv_len = rng_int(r, 1, 300),
               .head_dim = rng_int(r, 1, 80),
               .causal = i % 2};
    s.q_heads = s.kv_heads * group;
    s.value_dim = i % 4 ? s.head_dim : rng_int(r, 1, 80);
    return s;
}

Test(bits, tasks_in_any_order)
{
    rng r = rng_make("bits tasks");
    for (int64_t i = effort_cases(120); i > 0; i--) {
        shape s = some_shape(&r, i);
        if (i % 10 == 0)
            s.q_len = 700; /* several tasks a head */
        problem p = problem_make(s, &r);
        for_each_isa(isa)
        {
            problem_reset(&p);
            cr_assert_eq(problem_run(&p), QKV_OK);
            const result want = keep_result(&p);
            for (int64_t workers = 1; workers <= 4; workers += 3) {
                problem_reset(&p);
                cr_assert_eq(problem_run_tasks(&p, &r, workers), QKV_OK);
                expect_result("shuffled tasks", &p, &want);
                tally(isa, 1);
            }
            free_result(want);
        }
    }
}

/* Threads, each a worker, take the tasks in turn. */
typedef struct pool {
    const qkv_attention_desc *desc;
    void *scratch;
    size_t bytes;
    int64_t count, workers;
} pool;

typedef struct member {
    const pool *pool;
    int64_t worker;
    qkv_status status;
} member;

static void *work(void *argument)
{
    member *m = argument;
    for (int64_t t = m->worker; t < m->pool->count && m->status == QKV_OK; t += m->pool->workers)
        m->status =
            qkv_attention_run_task(m->pool->desc, t, m->worker, m->pool->scratch, m->pool->bytes);
    return NULL;
}

Test(bits, threads)
{
    enum { WORKERS = 5 };
    rng r = rng_make("bits threads");
    for (int64_t i = effort_cases(30); i > 0; i--) {
        problem p = problem_make(some_shape(&r, i), &r);
        for_each_isa(isa)
        {
            problem_reset(&p);
            cr_assert_eq(problem_run(&p), QKV_OK);
            const result want = keep_result(&p);
            problem_reset(&p);

            pool all = {.desc = &p.desc, .workers = WORKERS};
            cr_assert_eq(qkv_attention_scratch_size(&p.desc, WORKERS, &all.bytes), QKV_OK);
            cr_assert_eq(qkv_attention_task_count(&p.desc, &all.count), QKV_OK);
            all.scratch = guarded_bytes(SLOT_SCRATCH, all.bytes, PLACE_AT_START);
            pthread_t threads[WORKERS];
            member members[WORKERS];
            for (int64_t w = 0; w < WORKERS; w++) {
                members[w] = (member){&all, w, QKV_OK};
                cr_assert_eq(pthread_create(&threads[w], NULL, work, &members[w]), 0);
            }
            for (int w = 0; w < WORKERS; w++) {
                pthread_join(threads[w], NULL);
                cr_assert_eq(members[w].status, QKV_OK);
            }
            expect_result("threads", &p, &want);
            free_result(want);
            tally(isa, 1);
        }
    }
}

/* Each batch entry and key/value head alone, as it was in the batch. */
Test(bits, batch_entry_alone)
{
    rng r = rng_make("bits batch");
    for (int64_t i = effort_cases(80); i > 0; i--) {
        problem p = problem_make(some_shape(&r, i), &r);
        const shape s = p.s;
        const int64_t group = s.q_heads / s.kv_heads;
        for_each_isa(isa)
        {
            problem_reset(&p);
            cr_assert_eq(problem_run(&p), QKV_OK);
            const int64_t b = rng_int(&r, 0, s.batch - 1), h = rng_int(&r, 0, s.kv_heads - 1);
            qkv_attention_desc d = p.desc;
            d.batch = d.kv_heads = 1;
            d.q_heads = group;
            d.query.data = tensor_row(&p.query, b, h * group, 0);
            d.key.data = tensor_row(&p.key, b, h, 0);
            d.value.data = tensor_row(&p.value, b, h, 0);
            const int64_t rows = group * s.q_len;
            float *out = guarded(SLOT_FREE, rows * s.value_dim, PLACE_AT_END);
            float *lse = guarded(SLOT_FREE + 1, rows, PLACE_AT_END);
            d.out = (qkv_tensor){.data = out};
            d.lse = (qkv_tensor){.data = lse};
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
            void *scratch = guarded_bytes(SLOT_SCRATCH, bytes, PLACE_AT_START);
            cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
            context("batch entry %lld, head %lld alone on %s", (long long)b, (long long)h,
                    qkv_isa_name());
            expect_same_bits("out", out, tensor_row(&p.out, b, h * group, 0), rows * s.value_dim);
            expect_same_bits("lse", lse, tensor_row(&p.lse, b, h * group, 0), rows);
            tally(isa, 1);
        }
    }
}

/* Every place in memory, every layout, and in place. */
Test(bits, alignment_layout_and_place)
{
    rng r = rng_make("bits places");
    for (int64_t i = effort_cases(24); i > 0; i--) {
        shape s = some_shape(&r, i);
        s.value_dim = s.head_dim;
        problem first = problem_make(s, &r);
        const tensor q = keep(&first.query), k = keep(&first.key), v = keep(&first.value);
        result want[QKV_ISA_COUNT] = {{.lse = {.data = NULL}}};
        for_each_isa(isa)
        {
            problem_reset(&first);
            cr_assert_eq(problem_run(&first), QKV_OK);
            want[isa] = keep_result(&first);
        }
        for (int place = 0; place < PLACES; place++) {
            s.place = place;
            s.q = s.out = (layout)(place % 3);
            s.kv = (layout)(place % 3);
            s.in_place = place % 4 == 1;
            problem p = problem_make(s, NULL);
            tensor *to[] = {&p.key, &p.value};
            const tensor *from[] = {&k, &v};
            for (int t = 0; t < 2; t++)
                for (int64_t b = 0; b < s.batch; b++)
                    for (int64_t h = 0; h < s.kv_heads; h++)
                        for (int64_t j = 0; j < s.kv_len; j++)
                            memcpy(tensor_row(to[t], b, h, j), tensor_row(from[t], b, h, j),
                                   (size_t)s.head_dim * sizeof(float));
            for_each_isa(isa)
            {
                for (int64_t b = 0; b < s.batch; b++)
                    for (int64_t h = 0; h < s.q_heads; h++)
                        for (int64_t j = 0; j < s.q_len; j++)
                            memcpy(tensor_row(&p.query, b, h, j), tensor_row(&q, b, h, j),
                                   (size_t)s.head_dim * sizeof(float));
                problem_reset(&p);
                cr_assert_eq(problem_run(&p), QKV_OK);
                expect_result(s.in_place ? "in place" : "another place", &p, &want[isa]);
                tally(isa, 1);
            }
        }
        for (int isa = 0; isa < QKV_ISA_COUNT; isa++)
            free_result(want[isa]);
        free(q.data);
        free(k.data);
        free(v.data);
    }
}

/* ------------------------------------------------------------------- pages */

enum { PAGED_ROWS = 80, PAGED_DIM = 24, PAGED_HEADS = 4 };

/* The keys or values in pages that lie in reverse, what is behind them being NaN. */
static void *in_pages(int slot, const char *rows, size_t row_bytes, int64_t kv_len,
                      int64_t page_size, int32_t *table)
{
    const int64_t pages = (kv_len + page_size - 1) / page_size;
    char *memory = guarded_bytes(slot, (size_t)(pages * page_size) * row_bytes, PLACE_AT_END);
    memset(memory, 0xff, (size_t)(pages * page_size) * row_bytes);
    for (int64_t i = 0; i < pages; i++)
        table[i] = (int32_t)(pages - 1 - i);
    for (int64_t j = 0; j < kv_len; j++)
        memcpy(memory +
                   (size_t)((int64_t)table[j / page_size] * page_size + j % page_size) * row_bytes,
               rows + (size_t)j * row_bytes, row_bytes);
    return memory;
}

/* Few keys in one piece and in pages of every size: the same bits. */
static void check_pages(int isa, rng *r, int64_t q_len, int64_t kv_len, int32_t dtype, bool causal)
{
    float query[5 * PAGED_HEADS * PAGED_DIM], out[2][5 * PAGED_HEADS * PAGED_DIM];
    float rows[2][PAGED_ROWS * PAGED_DIM];
    uint16_t halves[2][PAGED_ROWS * PAGED_DIM];
    int32_t table[PAGED_ROWS];
    const int64_t n = kv_len * PAGED_DIM;
    fill_normal(r, query, q_len * PAGED_HEADS * PAGED_DIM, 1.0f);
    for (int i = 0; i < 2; i++) {
        fill_normal(r, rows[i], n, 1.0f);
        narrow_16(QKV_F16, rows[i], halves[i], n);
    }
    const bool narrow = dtype == QKV_F16;
    char *keys = narrow ? (char *)halves[0] : (char *)rows[0];
    char *values = narrow ? (char *)halves[1] : (char *)rows[1];
    const size_t row_bytes = PAGED_DIM * (narrow ? sizeof(uint16_t) : sizeof(float));
    qkv_attention_desc d = {.size = sizeof d,
                            .flags = causal ? QKV_CAUSAL : 0,
                            .q_heads = PAGED_HEADS,
                            .kv_heads = 1,
                            .q_len = q_len,
                            .kv_len = kv_len,
                            .head_dim = PAGED_DIM,
                            .query = {.data = query},
                            .key = {.data = keys, .dtype = dtype},
                            .value = {.data = values, .dtype = dtype},
                            .out = {.data = out[0]}};
    size_t bytes = 0;
    d.page_size = 8; /* with pages it may take more */
    d.pages = PAGED_ROWS / d.page_size;
    d.page_table = memset(table, 0, sizeof table);
    cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
    void *scratch = scratch_alloc(bytes);
    d.page_size = d.pages = 0;
    d.page_table = NULL;
    cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
    d.out.data = out[1];
    d.page_table = table;
    for (d.page_size = 8; d.page_size <= 256; d.page_size *= 2) {
        context("%s: q_len %lld, kv_len %lld, dtype %d, causal %d, pages of %lld", qkv_isa_name(),
                (long long)q_len, (long long)kv_len, (int)dtype, causal, (long long)d.page_size);
        d.pages = (kv_len + d.page_size - 1) / d.page_size;
        d.key.data = in_pages(SLOTS - 1, keys, row_bytes, kv_len, d.page_size, table);
        d.value.data = in_pages(SLOTS - 2, values, row_bytes, kv_len, d.page_size, table);
        cr_assert_eq(qkv_attention(&d, scratch, bytes), QKV_OK);
        expect_same_bits("out", out[1], out[0], q_len * PAGED_HEADS * PAGED_DIM);
        tally(isa, 1);
    }
    free(scratch);
}

Test(bits, few_keys_in_pages)
{
    rng r = rng_make("few keys in pages");
    for_each_isa(isa)
    {
        for (int64_t kv_len = 1; kv_len < PAGED_ROWS; kv_len++) {
            if (!effort_takes(kv_len))
                continue;
            check_pages(isa, &r, rng_int(&r, 1, 5), kv_len, QKV_F32, kv_len % 2);
            check_pages(isa, &r, rng_int(&r, 1, 5), kv_len, QKV_F16, kv_len % 2);
        }
    }
}
