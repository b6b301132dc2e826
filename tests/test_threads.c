/* SPDX-License-Identifier: MIT */
/*
 * One sequence, and a batch of many, on 1, 2, 3 and 8 threads: the bits of
 * one thread every time. A program by itself, so that it also runs under
 * ThreadSanitizer. Prints one line for each thing that is wrong.
 */
#include <qkv/qkv.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, HEADS = 8, DIM = 32, KV_LEN = 3000, BATCH = 3, PAGE = 16, MOST = 8 };
enum { PAGES = BATCH * (KV_LEN + PAGE - 1) / PAGE + BATCH };

static int failures;

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(QKV_SCRATCH_ALIGN, (bytes + 63) / 64 * 64 + 64);
    if (!p)
        exit(2);
    return p;
}

static float *numbers(size_t n)
{
    static uint32_t state = 1;
    float *x = memory(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        x[i] = (float)(state >> 8) * 0x1p-23f - 1.0f;
    }
    return x;
}

/* ------------------------------------------- threads that take tasks in turn */

typedef struct member {
    const qkv_attention_desc *desc;
    void *scratch;
    size_t bytes;
    int64_t worker, workers, tasks;
    qkv_status status;
} member;

static void *take_tasks(void *argument)
{
    member *m = argument;
    for (int64_t t = m->worker; t < m->tasks && m->status == QKV_OK; t += m->workers)
        m->status = qkv_attention_run_task(m->desc, t, m->worker, m->scratch, m->bytes);
    return NULL;
}

static qkv_status by_tasks(const qkv_attention_desc *d, void *scratch, size_t bytes,
                           int64_t workers)
{
    int64_t tasks = 0;
    qkv_status status = qkv_attention_begin(d, scratch, bytes);
    if (!status)
        status = qkv_attention_task_count(d, &tasks);
    pthread_t threads[MOST];
    member members[MOST];
    for (int64_t w = 0; w < workers; w++) {
        members[w] = (member){d, scratch, bytes, w, workers, tasks, status};
        if (pthread_create(&threads[w], NULL, take_tasks, &members[w]))
            exit(2);
    }
    for (int64_t w = 0; w < workers; w++) {
        pthread_join(threads[w], NULL);
        if (members[w].status)
            status = members[w].status;
    }
    return status;
}

/* ----------------------------------------------------------------- comparison */

static void compare(const char *what, int64_t workers, qkv_status status, const float *got,
                    const float *want, size_t n)
{
    if (status || memcmp(got, want, n * sizeof *got) != 0) {
        printf("%s, %d threads: %s\n", what, (int)workers,
               status ? qkv_strerror(status) : "other bits than one thread");
        failures++;
    }
}

static void check(const char *what, qkv_attention_desc d, size_t n)
{
    static const int64_t counts[] = {1, 2, 3, 8};
    size_t bytes = 0;
    if (qkv_attention_scratch_size(&d, MOST, &bytes)) {
        printf("%s: refused\n", what);
        failures++;
        return;
    }
    void *scratch = memory(bytes);
    float *want = memory(n * sizeof *want), *got = d.out.data;
    compare(what, 0, qkv_attention(&d, scratch, bytes), got, got, n);
    memcpy(want, got, n * sizeof *got);
    for (int i = 0; i < 4; i++) {
        memset(got, 0xff, n * sizeof *got);
        compare(what, counts[i], by_tasks(&d, scratch, bytes, counts[i]), got, want, n);

        qkv_pool *pool = NULL;
        qkv_status status = qkv_pool_create(counts[i], &pool);
        for (int repeat = 0; repeat < 3 && !status; repeat++) {
            memset(got, 0xff, n * sizeof *got);
            status =
                qkv_attention_parallel(&d, scratch, bytes, counts[i], qkv_pool_parallel_for, pool);
            compare(what, counts[i], status, got, want, n);
        }
        qkv_pool_destroy(pool);
    }
    free(want);
    free(scratch);
}

int main(void)
{
    const size_t n = (size_t)BATCH * HEADS * 2 * DIM;
    float *q = numbers(n), *kv = numbers((size_t)PAGES * KV_HEADS * PAGE * DIM);
    float *out = memory(n * sizeof *out);
    int32_t table[PAGES];
    for (int i = 0; i < PAGES; i++)
        table[i] = (int32_t)(i * 7 % PAGES);
    qkv_attention_desc d = {.size = sizeof d,
                            .flags = QKV_CAUSAL | QKV_SPLIT,
                            .q_heads = HEADS,
                            .kv_heads = KV_HEADS,
                            .q_len = 1,
                            .kv_len = KV_LEN,
                            .head_dim = DIM,
                            .query = {.data = q},
                            .key = {.data = kv},
                            .value = {.data = kv},
                            .out = {.data = out}};
    check("one sequence", d, HEADS * DIM);
    d.q_heads = KV_HEADS;
    check("one sequence, a query head each", d, KV_HEADS * DIM);
    d.q_heads = HEADS;

    const int64_t kv_lens[BATCH] = {17, KV_LEN, 1100}, q_starts[BATCH + 1] = {0, 1, 2, 6};
    d.batch = BATCH;
    d.q_len = 6;
    d.kv_lens = kv_lens;
    d.q_starts = q_starts;
    d.page_size = PAGE;
    d.pages = PAGES;
    d.page_table = table;
    check("a paged batch", d, n);
    d.flags = 0;
    check("a paged batch, whole", d, n);

    free(q);
    free(kv);
    free(out);
    if (!failures)
        puts("every number of threads gives the same bits");
    return failures != 0;
}
