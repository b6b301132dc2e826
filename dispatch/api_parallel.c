/* SPDX-License-Identifier: MIT */
/* Attention on several threads: the caller's, or those of a pool by handle. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "api.h"

/* ------------------------------------------------------ attention, parallel */

/* What the workers of one call share. */
typedef struct shared_work {
    const qkv_attention_desc *desc;
    void *scratch;
    size_t scratch_size;
    int64_t tasks, workers;
    _Atomic int64_t next;
    _Atomic qkv_status status; /* the first that is not QKV_OK */
} shared_work;

/* Takes tasks as long as there are any. */
static void work(void *argument, int64_t worker)
{
    shared_work *w = argument;
    if (worker < 0 || worker >= w->workers)
        return;
    for (;;) {
        const int64_t task = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed);
        if (task >= w->tasks)
            return;
        const qkv_status status =
            qkv_attention_run_task(w->desc, task, worker, w->scratch, w->scratch_size);
        qkv_status expected = QKV_OK;
        if (status)
            atomic_compare_exchange_strong(&w->status, &expected, status);
    }
}

qkv_status qkv_attention_parallel(const qkv_attention_desc *desc, void *scratch,
                                  size_t scratch_size, int64_t workers,
                                  qkv_parallel_for *parallel_for, void *context)
{
    shared_work w = {
        .desc = desc, .scratch = scratch, .scratch_size = scratch_size, .workers = workers};
    size_t need = 0;
    qkv_status status = qkv_attention_scratch_size(desc, workers, &need);
    if (!status && !parallel_for)
        status = QKV_E_NULL;
    if (!status) /* of all workers, before the first task writes */
        status = qkv_check_workers_scratch(desc, scratch, scratch_size, need);
    if (!status)
        status = qkv_attention_begin(desc, scratch, scratch_size);
    if (!status)
        status = qkv_attention_task_count(desc, &w.tasks);
    if (status || w.tasks == 0)
        return status;
    parallel_for(context, workers < w.tasks ? workers : w.tasks, work, &w);
    return atomic_load(&w.status);
}

/* --------------------------------------------------------------------- pool */

struct qkv_pool {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int64_t threads; /* the caller's not counted */
    int64_t round;   /* of work given out so far */
    int64_t n;       /* indices of this round */
    int64_t next;    /* the next index to be taken */
    int64_t running; /* indices taken and not finished */
    bool stop;
    qkv_parallel_body *body;
    void *argument;
    pthread_t thread[];
};

/* Takes indices until none is left; called and left with the lock held. */
static void take_indices(qkv_pool *pool)
{
    while (pool->next < pool->n) {
        const int64_t index = pool->next++;
        pool->running++;
        pthread_mutex_unlock(&pool->lock);
        pool->body(pool->argument, index);
        pthread_mutex_lock(&pool->lock);
        pool->running--;
    }
}

static void *pool_thread(void *argument)
{
    qkv_pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (int64_t seen = 0;;) {
        while (!pool->stop && pool->round == seen)
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->stop)
            break;
        seen = pool->round;
        take_indices(pool);
        if (pool->running == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void qkv_pool_parallel_for(void *context, int64_t n, qkv_parallel_body *body, void *argument)
{
    qkv_pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    pool->body = body;
    pool->argument = argument;
    pool->n = n;
    pool->next = 0;
    pool->round++;
    pthread_cond_broadcast(&pool->wake);
    take_indices(pool);
    while (pool->running > 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

qkv_status qkv_pool_create(int64_t workers, qkv_pool **pool)
{
    enum { MOST = 4096 };
    if (!pool)
        return QKV_E_NULL;
    if (workers < 1 || workers > MOST)
        return QKV_E_INDEX;
    qkv_pool *p = calloc(1, sizeof *p + (size_t)(workers - 1) * sizeof p->thread[0]);
    if (!p)
        return QKV_E_SYSTEM;
    if (pthread_mutex_init(&p->lock, NULL) || pthread_cond_init(&p->wake, NULL) ||
        pthread_cond_init(&p->done, NULL)) {
        free(p);
        return QKV_E_SYSTEM;
    }
    for (; p->threads < workers - 1; p->threads++)
        if (pthread_create(&p->thread[p->threads], NULL, pool_thread, p)) {
            qkv_pool_destroy(p);
            return QKV_E_SYSTEM;
        }
    *pool = p;
    return QKV_OK;
}

void qkv_pool_destroy(qkv_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
