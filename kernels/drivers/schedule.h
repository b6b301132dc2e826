/* SPDX-License-Identifier: MIT */
/*
 * The schedule of a problem whose tasks cannot be told from its sizes alone:
 * sequences of different lengths, pages, or keys that are cut into parts for
 * several threads. It is written once into scratch memory before the first
 * task, and then finding a task's work takes no more than a binary search.
 *
 * Shared scratch memory: the schedule, an entry a sequence, a counter for
 * each of its key/value heads whose keys are cut, and the parts' sums.
 */
#ifndef QKV_DRIVERS_SCHEDULE_H
#define QKV_DRIVERS_SCHEDULE_H

#include "attention.h"

/* A sequence with something to do, or several that share a prefix, and where the
 * tasks, counters and sums begin. */
typedef struct qkv_schedule_entry {
    int64_t sequence;  /* the first */
    int64_t task_cost; /* of its most costly task */
    int64_t first_task, first_counter, first_partial;
} qkv_schedule_entry;

typedef struct qkv_schedule {
    qkv_attention_desc desc; /* whose schedule it is */
    qkv_attention_problem problem;
    qkv_attention_plan plan;
    int64_t n_entries, n_tasks;
    int64_t bytes;                    /* of all shared scratch memory */
    int64_t counters_at, partials_at; /* bytes from the schedule on */
} qkv_schedule;

/* Does the problem need one, with or without its keys cut into parts? */
bool qkv_needs_schedule(const qkv_attention_problem *problem);

/* Bytes of scratch memory that all workers share; false if it overflows. */
bool qkv_schedule_bytes(const qkv_attention_problem *problem, const qkv_attention_plan *plan,
                        size_t *bytes);

/* Tasks in all. */
int64_t qkv_schedule_tasks(const qkv_attention_problem *problem, const qkv_attention_plan *plan);

void qkv_schedule_begin(qkv_schedule *schedule, const qkv_attention_desc *desc,
                        const qkv_attention_problem *problem, const qkv_attention_plan *plan);

void qkv_schedule_run(qkv_schedule *schedule, int64_t task, void *worker_scratch);

#endif
