/* SPDX-License-Identifier: MIT */
#include "schedule.h"

#include <stdatomic.h>

/* The work of one key/value head of one sequence, in tasks; or of several
 * sequences that share a prefix, which is one task. */
typedef struct head_tasks {
    qkv_cut cut;
    qkv_sharing sharing;
    int64_t parts; /* tasks a run: 1 where one task takes all parts */
    int64_t tasks;
} head_tasks;

static head_tasks head_tasks_of(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                                const qkv_sequence *s)
{
    head_tasks h = {.cut = qkv_cut_sequence(p, plan, s),
                    .sharing = qkv_sharing_from(p, plan, s->index),
                    .parts = 1};
    if (p->split && h.cut.runs == 1 && h.sharing.count == 1)
        h.parts = h.cut.parts;
    h.tasks = h.cut.runs * h.parts;
    return h;
}

bool qkv_needs_schedule(const qkv_attention_problem *p)
{
    return p->split || p->page_table || p->q_starts || p->kv_starts || p->kv_lens || p->q_offsets ||
           p->shared_len > 0;
}

int64_t qkv_schedule_tasks(const qkv_attention_problem *p, const qkv_attention_plan *plan)
{
    int64_t tasks = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const qkv_sequence s = qkv_sequence_at(p, b);
        const head_tasks h = head_tasks_of(p, plan, &s);
        tasks += p->kv_heads * h.tasks;
        b += h.sharing.count - 1;
    }
    return tasks;
}

/* The most that a sequence can need, whatever its lengths up to the problem's. */
static bool most_partials(const qkv_attention_problem *p, int64_t *floats)
{
    const int64_t rows = p->group < QKV_PASS_ROWS && p->q_len < QKV_PASS_ROWS / p->group
                             ? p->group * p->q_len
                             : QKV_PASS_ROWS;
    const int64_t blocks = p->kv_len / QKV_KEY_BLOCK + (p->kv_len % QKV_KEY_BLOCK != 0);
    int64_t heads;
    return qkv_mul(qkv_partial_floats(p, rows), blocks < QKV_PARTS_MAX ? blocks : QKV_PARTS_MAX,
                   &heads) &&
           qkv_mul(heads, p->kv_heads, floats);
}

/* What the sequences need for their parts' sums, in floats. */
static bool all_partials(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                         int64_t *floats)
{
    *floats = 0;
    if (!p->split || plan->general)
        return true;
    if (!p->q_starts && !p->kv_starts && !p->kv_lens)
        return most_partials(p, floats) && qkv_mul(*floats, p->batch, floats);
    for (int64_t b = 0; b < p->batch; b++) {
        const qkv_sequence s = qkv_sequence_at(p, b);
        const head_tasks h = head_tasks_of(p, plan, &s);
        int64_t more;
        if (h.parts > 1 &&
            (!qkv_mul(p->kv_heads * h.parts, qkv_partial_floats(p, h.cut.rows), &more) ||
             !qkv_add(*floats, more, floats)))
            return false;
        b += h.sharing.count - 1;
    }
    return true;
}

/* Adds 'count' things of 'size' bytes to '*used'; where they begin is aligned. */
static bool reserve(int64_t *used, int64_t count, size_t size)
{
    int64_t bytes;
    if (!qkv_mul(count, (int64_t)size, &bytes) || !qkv_add(*used, bytes, used) ||
        !qkv_add(*used, QKV_SCRATCH_ALIGN - 1, used))
        return false;
    *used = *used / QKV_SCRATCH_ALIGN * QKV_SCRATCH_ALIGN;
    return true;
}

/* Where the parts begin, from the schedule on; the last is all of it. */
typedef struct schedule_layout {
    int64_t entries, counters, partials, end;
} schedule_layout;

static bool lay_out(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                    schedule_layout *at)
{
    int64_t used = 0, floats;
    if (!all_partials(p, plan, &floats) || !reserve(&used, 1, sizeof(qkv_schedule)))
        return false;
    at->entries = used;
    if (!reserve(&used, p->batch, sizeof(qkv_schedule_entry)))
        return false;
    at->counters = used;
    if (p->split && !reserve(&used, p->batch * p->kv_heads, sizeof(atomic_int)))
        return false;
    at->partials = used;
    if (!reserve(&used, floats, sizeof(float)))
        return false;
    at->end = used;
    return true;
}

bool qkv_schedule_bytes(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                        size_t *bytes)
{
    schedule_layout at;
    if (!lay_out(p, plan, &at) || at.end > PTRDIFF_MAX)
        return false;
    *bytes = (size_t)at.end;
    return true;
}

static qkv_schedule_entry *entries_of(qkv_schedule *s)
{
    return (qkv_schedule_entry *)(void *)((char *)s + (sizeof *s + QKV_SCRATCH_ALIGN - 1) /
                                                          QKV_SCRATCH_ALIGN * QKV_SCRATCH_ALIGN);
}

static atomic_int *counters_of(qkv_schedule *s)
{
    return (atomic_int *)(void *)((char *)s + s->counters_at);
}

/* The most costly tasks come first, so that no thread is left with one at the
 * end; among equals the order of the batch. */
static bool comes_before(const qkv_schedule_entry *a, const qkv_schedule_entry *b)
{
    return a->task_cost != b->task_cost ? a->task_cost > b->task_cost : a->sequence < b->sequence;
}

static void sift_down(qkv_schedule_entry *e, int64_t root, int64_t n)
{
    for (int64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && comes_before(&e[child], &e[child + 1]))
            child++;
        if (!comes_before(&e[root], &e[child]))
            return;
        const qkv_schedule_entry moved = e[root];
        e[root] = e[child];
        e[child] = moved;
    }
}

/* Heap sort: qsort() may allocate. */
static void sort_entries(qkv_schedule_entry *e, int64_t n)
{
    for (int64_t root = n / 2 - 1; root >= 0; root--)
        sift_down(e, root, n);
    for (int64_t end = n - 1; end > 0; end--) {
        const qkv_schedule_entry last = e[0];
        e[0] = e[end];
        e[end] = last;
        sift_down(e, 0, end);
    }
}

void qkv_schedule_begin(qkv_schedule *s, const qkv_attention_desc *desc,
                        const qkv_attention_problem *p, const qkv_attention_plan *plan)
{
    schedule_layout at = {0};
    lay_out(p, plan, &at);
    *s = (qkv_schedule){.desc = *desc,
                        .problem = *p,
                        .plan = *plan,
                        .bytes = at.end,
                        .counters_at = at.counters,
                        .partials_at = at.partials};

    qkv_schedule_entry *entries = entries_of(s);
    for (int64_t b = 0; b < p->batch; b++) {
        const qkv_sequence sequence = qkv_sequence_at(p, b);
        const head_tasks h = head_tasks_of(p, plan, &sequence);
        const int64_t rows = h.cut.rows < h.cut.run_rows ? h.cut.rows : h.cut.run_rows;
        const int64_t keys = h.parts > 1 ? h.cut.part_keys : sequence.kv_len;
        if (h.tasks > 0)
            entries[s->n_entries++] =
                (qkv_schedule_entry){.sequence = b, .task_cost = rows * keys * h.sharing.count};
        b += h.sharing.count - 1;
    }
    sort_entries(entries, s->n_entries);

    int64_t task = 0, counter = 0, partial = 0;
    for (int64_t i = 0; i < s->n_entries; i++) {
        const qkv_sequence sequence = qkv_sequence_at(p, entries[i].sequence);
        const head_tasks h = head_tasks_of(p, plan, &sequence);
        entries[i].first_task = task;
        entries[i].first_counter = counter;
        entries[i].first_partial = partial;
        task += p->kv_heads * h.tasks;
        if (h.parts == 1)
            continue;
        for (int64_t end = counter + p->kv_heads; counter < end; counter++)
            atomic_init(&counters_of(s)[counter], 0);
        partial += p->kv_heads * h.parts * qkv_partial_floats(p, h.cut.rows);
    }
    s->n_tasks = task;
}

/* The entry that a task belongs to. */
static const qkv_schedule_entry *entry_of(qkv_schedule *s, int64_t task)
{
    const qkv_schedule_entry *entries = entries_of(s);
    int64_t low = 0, high = s->n_entries;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (entries[middle].first_task <= task)
            low = middle;
        else
            high = middle;
    }
    return &entries[low];
}

/* Where the sums of a run's parts lie. */
static void partials_of(qkv_schedule *s, const qkv_schedule_entry *entry, const head_tasks *h,
                        int64_t kv_head, qkv_partial *partials)
{
    const qkv_attention_problem *p = &s->problem;
    const int64_t each = qkv_partial_floats(p, h->cut.rows);
    float *at = (float *)(void *)((char *)s + s->partials_at) + entry->first_partial +
                kv_head * h->parts * each;
    for (int64_t i = 0; i < h->parts; i++, at += each)
        partials[i] = qkv_partial_at(p, h->cut.rows, at);
}

/* One part of a run's keys; whoever finishes last joins them all. */
static void run_part(qkv_schedule *s, const qkv_schedule_entry *entry, const head_tasks *h,
                     qkv_row_run run, int64_t part, void *scratch)
{
    qkv_partial partials[QKV_PARTS_MAX];
    partials_of(s, entry, h, run.kv_head, partials);
    qkv_run_row_part(&s->problem, &s->plan, run, &h->cut, part, partials[part], scratch);

    atomic_int *finished = &counters_of(s)[entry->first_counter + run.kv_head];
    if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) == (int)h->parts - 1)
        qkv_join_row_parts(&s->problem, &s->plan, run, partials, h->parts, scratch);
}

void qkv_schedule_run(qkv_schedule *s, int64_t task, void *scratch)
{
    const qkv_schedule_entry *entry = entry_of(s, task);
    const qkv_sequence sequence = qkv_sequence_at(&s->problem, entry->sequence);
    const head_tasks h = head_tasks_of(&s->problem, &s->plan, &sequence);
    const int64_t local = task - entry->first_task;
    if (h.sharing.count > 1) {
        qkv_run_sharing(&s->problem, &s->plan, &h.sharing, local, scratch);
        return;
    }
    if (h.parts == 1) {
        qkv_run_cut(&s->problem, &s->plan, &sequence, &h.cut, local, scratch);
        return;
    }
    /* Tasks that follow one another read what lies together. */
    const bool together = qkv_heads_lie_together(&s->problem);
    const int64_t heads = s->problem.kv_heads;
    const int64_t head = together ? local % heads : local / h.parts;
    const int64_t part = together ? local / heads : local % h.parts;
    run_part(s, entry, &h, (qkv_row_run){&sequence, head, 0, h.cut.rows}, part, scratch);
}
