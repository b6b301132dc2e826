/* SPDX-License-Identifier: MIT */
/* Fused attention: from the public descriptor to a validated problem. */
#include <math.h>
#include <string.h>

#include "../kernels/drivers/schedule.h"
#include "api.h"

/* Replaces defaults and checks the plain numbers of a descriptor. */
static qkv_status check_sizes(qkv_attention_desc *d)
{
    if (d->flags & ~(QKV_CAUSAL | QKV_SCALE_SET | QKV_WINDOW | QKV_INVARIANT | QKV_SPLIT))
        return QKV_E_FLAGS;
    if (d->batch < 0 || d->q_heads < 0 || d->kv_heads < 0 || d->q_len < 0 || d->kv_len < 0 ||
        d->head_dim < 1 || d->value_dim < 0 || d->shared_len < 0 || d->shared_len > d->kv_len)
        return QKV_E_SHAPE;
    if (d->batch == 0)
        d->batch = 1;
    if (d->q_heads == 0)
        d->q_heads = 1;
    if (d->kv_heads == 0)
        d->kv_heads = d->q_heads;
    if (d->value_dim == 0)
        d->value_dim = d->head_dim;
    if (d->q_heads % d->kv_heads != 0)
        return QKV_E_SHAPE;
    return QKV_OK;
}

qkv_status qkv_check_scale(int32_t flags, float scale, int64_t head_dim, float *natural,
                           float *scale_log2)
{
    const double log2e = 0x1.71547652b82fep+0;
    double s = (double)scale;
    if (!(flags & QKV_SCALE_SET) && scale == 0.0f)
        s = 1.0 / sqrt((double)head_dim);
    *natural = (float)s;
    *scale_log2 = (float)(s * log2e);
    return isfinite(*scale_log2) ? QKV_OK : QKV_E_VALUE;
}

/* Are starts[0] .. starts[batch] a rising way through 'rows' rows? */
static bool are_starts(const int64_t *starts, int64_t batch, int64_t rows)
{
    if (starts[0] < 0 || starts[batch] > rows)
        return false;
    for (int64_t b = 0; b < batch; b++)
        if (starts[b] > starts[b + 1])
            return false;
    return true;
}

/* The lengths and offsets of sequences, and that they stay within the tensors. */
static qkv_status check_sequences(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    if (!qkv_aligned(d->q_starts, sizeof(int64_t)) || !qkv_aligned(d->kv_starts, sizeof(int64_t)) ||
        !qkv_aligned(d->kv_lens, sizeof(int64_t)) || !qkv_aligned(d->q_offsets, sizeof(int64_t)))
        return QKV_E_ALIGN;
    if (d->batch >= PTRDIFF_MAX / (int64_t)sizeof(int64_t) &&
        (d->q_starts || d->kv_starts || d->kv_lens || d->q_offsets))
        return QKV_E_OVERFLOW;
    if (d->q_starts && !are_starts(d->q_starts, d->batch, d->q_len))
        return QKV_E_SHAPE;
    if (d->kv_starts && !are_starts(d->kv_starts, d->batch, d->kv_len))
        return QKV_E_SHAPE;
    p->q_starts = d->q_starts;
    p->kv_starts = d->kv_starts;
    for (int64_t b = 0; d->kv_lens && b < d->batch; b++)
        if (d->kv_lens[b] < 0 || d->kv_lens[b] > qkv_sequence_at(p, b).kv_len)
            return QKV_E_SHAPE;
    p->kv_lens = d->kv_lens;
    for (int64_t b = 0; d->q_offsets && b < d->batch; b++)
        if (d->q_offsets[b] > INT64_MAX - 1 - qkv_sequence_at(p, b).q_len)
            return QKV_E_OVERFLOW;
    p->q_offsets = d->q_offsets;
    return QKV_OK;
}

static qkv_status check_page_sizes(qkv_attention_desc *d)
{
    if (d->page_size != 0 && d->kv_starts)
        return QKV_E_FLAGS;
    return qkv_check_page_sizes(d->page_size, d->pages, d->batch, d->kv_len, d->page_table,
                                &d->page_table_stride);
}

/* Are a sequence's pages of the shared prefix those of the first one? */
static bool shares_pages(const qkv_attention_problem *p, const qkv_sequence *s)
{
    const qkv_sequence first = qkv_sequence_at(p, 0);
    int64_t shared = first.kv_len < s->kv_len ? first.kv_len : s->kv_len;
    shared = (p->shared_len < shared ? p->shared_len : shared) >> p->page_shift;
    for (int64_t i = 0; i < shared; i++)
        if (s->pages[i] != first.pages[i])
            return false;
    return true;
}

/* Every entry of the page table that a sequence's length reaches. */
static qkv_status check_pages(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    if (d->page_size == 0)
        return QKV_OK;
    p->page_table = d->page_table;
    p->page_table_stride = d->page_table_stride;
    while (INT64_C(1) << p->page_shift < d->page_size)
        p->page_shift++;
    for (int64_t b = 0; b < d->batch && d->kv_len > 0; b++) {
        const qkv_sequence s = qkv_sequence_at(p, b);
        const int64_t last = (s.kv_len - 1) >> p->page_shift;
        if (last >= p->page_table_stride)
            return QKV_E_SHAPE;
        for (int64_t i = 0; i <= last; i++)
            if (s.pages[i] < 0 || s.pages[i] >= d->pages)
                return QKV_E_INDEX;
        if (!shares_pages(p, &s))
            return QKV_E_INDEX;
    }
    return QKV_OK;
}

/* The keys' or the values' tensor, with its scales. */
static qkv_status check_cache(const qkv_attention_desc *d, const qkv_tensor *tensor,
                              const qkv_tensor *scale_tensor, int64_t dim, qkv_view *view,
                              qkv_view *scale)
{
    const int64_t batch = d->page_size ? d->pages : d->kv_starts ? 1 : d->batch;
    const int64_t rows = d->page_size ? d->page_size : d->kv_len;
    const qkv_status status =
        qkv_view_tensor(tensor, batch, d->kv_heads, rows, dim, QKV_CACHE, view);
    if (status)
        return status;
    if (tensor->dtype != QKV_I8)
        return scale_tensor->data ? QKV_E_FLAGS : QKV_OK;
    if (scale_tensor->dtype != QKV_F32)
        return QKV_E_DTYPE;
    return qkv_view_tensor(scale_tensor, batch, d->kv_heads, rows, 1, QKV_INPUT, scale);
}

/* Windows, and what is done to logits: numbers first, then arrays. */
static qkv_status check_adjustments(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    p->windowed = (d->flags & QKV_WINDOW) != 0;
    if (!p->windowed && (d->window_left != 0 || d->window_right != 0 || d->sink_tokens != 0))
        return QKV_E_FLAGS;
    if (d->sink_tokens < 0)
        return QKV_E_SHAPE;
    if (!(d->softcap >= 0.0f) || !isfinite(d->softcap) ||
        (d->softcap > 0.0f && !isfinite(p->scale / d->softcap)) ||
        d->weights_stage < QKV_WEIGHTS_SOFTMAX || d->weights_stage > QKV_WEIGHTS_MASKED)
        return QKV_E_VALUE;
    if (!qkv_aligned(d->tree_mask, sizeof *d->tree_mask) ||
        !qkv_aligned(d->slopes, sizeof *d->slopes) ||
        !qkv_aligned(d->head_scales, sizeof *d->head_scales) ||
        !qkv_aligned(d->sinks, sizeof *d->sinks))
        return QKV_E_ALIGN;
    int64_t words;
    if ((d->slopes || d->head_scales || d->sinks) &&
        d->q_heads > PTRDIFF_MAX / (int64_t)sizeof *d->slopes)
        return QKV_E_OVERFLOW;
    if (d->tree_mask && d->tree_stride < (d->q_len + 63) / 64)
        return QKV_E_STRIDE;
    if (d->tree_mask &&
        (!qkv_mul(d->batch, d->q_len, &words) || !qkv_mul(words, d->tree_stride, &words) ||
         words > PTRDIFF_MAX / (int64_t)sizeof *d->tree_mask))
        return QKV_E_OVERFLOW;

    p->window_left = d->window_left;
    p->window_right = d->window_right;
    p->sink_tokens = d->sink_tokens;
    p->softcap = d->softcap;
    p->slopes = d->slopes;
    p->head_scales = d->head_scales;
    p->sinks = d->sinks;
    p->tree_mask = d->tree_mask;
    p->tree_stride = d->tree_mask ? d->tree_stride : 0;
    p->weights_stage = d->weights_stage;
    const qkv_status status =
        qkv_view_mask(&d->mask, d->batch, d->q_heads, d->q_len, d->kv_len, &p->mask);
    p->adjusted = p->softcap > 0.0f || p->slopes || p->head_scales || p->mask.data || p->tree_mask;
    return status;
}

/* An optional output of f32. */
static qkv_status check_extra(const qkv_attention_desc *d, const qkv_tensor *tensor, int64_t dim,
                              qkv_view *view)
{
    const int64_t batch = d->q_starts ? 1 : d->batch;
    if (!tensor->data)
        return QKV_OK;
    if (tensor->dtype != QKV_F32)
        return QKV_E_DTYPE;
    return qkv_view_tensor(tensor, batch, d->q_heads, d->q_len, dim, QKV_OUTPUT, view);
}

static qkv_status check_tensors(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    const int64_t batch = d->q_starts ? 1 : d->batch;
    qkv_status status =
        qkv_view_tensor(&d->query, batch, d->q_heads, d->q_len, d->head_dim, QKV_INPUT, &p->query);
    if (!status)
        status = check_cache(d, &d->key, &d->key_scale, d->head_dim, &p->key, &p->key_scale);
    if (!status)
        status =
            check_cache(d, &d->value, &d->value_scale, d->value_dim, &p->value, &p->value_scale);
    if (!status)
        status = qkv_view_tensor(&d->out, batch, d->q_heads, d->q_len, d->value_dim, QKV_OUTPUT,
                                 &p->out);
    if (!status)
        status = check_extra(d, &d->lse, 1, &p->lse);
    if (!status)
        status = check_extra(d, &d->row_max, 1, &p->row_max);
    if (!status)
        status = check_extra(d, &d->weights, d->kv_len, &p->weights);
    p->narrow = (p->query.dtype | p->key.dtype | p->value.dtype | p->out.dtype) != QKV_F32;
    return status;
}

/* The memory that a problem reads, the query first, and that it writes. Most of
 * what a descriptor can name is not there, and a short call has no time to look
 * at it again and again. */
enum { INPUTS_MAX = 15, OUTPUTS_MAX = 4, ARRAYS_MAX = 10 };
typedef struct memory_list {
    const qkv_view *inputs[INPUTS_MAX], *outputs[OUTPUTS_MAX];
    int n_inputs, n_outputs, n_arrays;
    qkv_view arrays[ARRAYS_MAX];
} memory_list;

static void list_input(memory_list *list, const qkv_view *view)
{
    if (view->bytes > 0)
        list->inputs[list->n_inputs++] = view;
}

static void list_output(memory_list *list, const qkv_view *view)
{
    if (view->bytes > 0)
        list->outputs[list->n_outputs++] = view;
}

static void list_array(memory_list *list, const void *data, int64_t count, size_t size)
{
    if (!data)
        return;
    list->arrays[list->n_arrays] = qkv_view_bytes(data, count, size);
    list_input(list, &list->arrays[list->n_arrays++]);
}

static void list_memory(const qkv_attention_problem *p, memory_list *list)
{
    list->n_inputs = list->n_outputs = list->n_arrays = 0;
    list_input(list, &p->query);
    list_input(list, &p->key);
    list_input(list, &p->value);
    list_input(list, &p->key_scale);
    list_input(list, &p->value_scale);
    const int64_t starts = p->q_starts || p->kv_starts ? p->batch + 1 : 0;
    list_array(list, p->q_starts, starts, sizeof *p->q_starts);
    list_array(list, p->kv_starts, starts, sizeof *p->kv_starts);
    list_array(list, p->kv_lens, p->batch, sizeof *p->kv_lens);
    list_array(list, p->q_offsets, p->batch, sizeof *p->q_offsets);
    list_array(list, p->page_table, p->batch * p->page_table_stride, sizeof *p->page_table);
    list_array(list, p->mask.data, p->mask.bytes, 1);
    const int64_t rows = p->q_starts ? p->q_len : p->batch * p->q_len;
    list_array(list, p->tree_mask, rows * p->tree_stride, sizeof *p->tree_mask);
    list_array(list, p->slopes, p->q_heads, sizeof *p->slopes);
    list_array(list, p->head_scales, p->q_heads, sizeof *p->head_scales);
    list_array(list, p->sinks, p->q_heads, sizeof *p->sinks);
    list_output(list, &p->out);
    list_output(list, &p->lse);
    list_output(list, &p->row_max);
    list_output(list, &p->weights);
}

/* Outputs overlap nothing, but 'out' may be the query itself. */
static qkv_status check_overlap(const qkv_attention_problem *p)
{
    memory_list list;
    list_memory(p, &list);
    for (int o = 0; o < list.n_outputs; o++) {
        const qkv_view *out = list.outputs[o];
        for (int i = 0; i < list.n_inputs; i++) {
            const bool in_place =
                out == &p->out && list.inputs[i] == &p->query && qkv_views_same(out, &p->query);
            if (!in_place && qkv_views_overlap(out, list.inputs[i]))
                return QKV_E_OVERLAP;
        }
        for (int other = 0; other < o; other++)
            if (qkv_views_overlap(out, list.outputs[other]))
                return QKV_E_OVERLAP;
    }
    return QKV_OK;
}

static qkv_status copy_desc(qkv_attention_desc *copy, const qkv_attention_desc *desc)
{
    return qkv_copy_desc(copy, sizeof *copy, offsetof(qkv_attention_desc, lse) + sizeof copy->lse,
                         desc);
}

/* As qkv_needs_schedule(), of a descriptor that need not be checked yet. */
static bool has_schedule(const qkv_attention_desc *d)
{
    return d->flags & QKV_SPLIT || d->page_size != 0 || d->q_starts || d->kv_starts || d->kv_lens ||
           d->q_offsets || d->shared_len;
}

qkv_status qkv_check_attention(const qkv_attention_desc *desc, qkv_attention_problem *p)
{
    qkv_attention_desc d;
    qkv_status status = copy_desc(&d, desc);
    if (!status)
        status = check_sizes(&d);
    if (status)
        return status;

    *p = (qkv_attention_problem){.batch = d.batch,
                                 .q_heads = d.q_heads,
                                 .kv_heads = d.kv_heads,
                                 .group = d.q_heads / d.kv_heads,
                                 .q_len = d.q_len,
                                 .kv_len = d.kv_len,
                                 .head_dim = d.head_dim,
                                 .value_dim = d.value_dim,
                                 .shared_len = d.shared_len,
                                 .causal = (d.flags & QKV_CAUSAL) != 0,
                                 .invariant = (d.flags & QKV_INVARIANT) != 0,
                                 .split = (d.flags & QKV_SPLIT) != 0};
    status = qkv_check_scale(d.flags, d.scale, d.head_dim, &p->scale, &p->scale_log2);
    if (!status)
        status = check_page_sizes(&d);
    if (!status)
        status = check_tensors(&d, p);
    if (!status)
        status = check_sequences(&d, p);
    if (!status)
        status = check_pages(&d, p);
    if (!status)
        status = check_adjustments(&d, p);
    if (!status)
        status = check_overlap(p);
    /* The row driver's scratch memory is some rows of queries and values, and
     * lengths are rounded up to blocks. */
    if (!status && (d.value_dim > INT64_MAX / 4096 || d.head_dim > INT64_MAX / 4096 ||
                    d.kv_len > INT64_MAX / 4096 || d.q_len > INT64_MAX / 4096))
        status = QKV_E_OVERFLOW;
    return status;
}

static bool nothing_to_write(const qkv_attention_problem *p)
{
    return qkv_view_empty(&p->out);
}

static qkv_attention_plan plan_of(const qkv_attention_problem *p)
{
    if (nothing_to_write(p))
        return (qkv_attention_plan){.kernels = qkv_kernels_active()};
    return qkv_plan_attention(p, qkv_kernels_active());
}

qkv_status qkv_attention_supports(const qkv_attention_desc *desc, qkv_attention_support *support)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    if (status || !support)
        return status;

    const qkv_attention_plan plan = plan_of(&p);
    support->isa = plan.kernels->name;
    support->route = "row";
    support->path = QKV_PATH_NONE;
    for (int64_t b = 0; b < p.batch && !nothing_to_write(&p); b++) {
        const qkv_sequence s = qkv_sequence_at(&p, b);
        const qkv_cut cut = qkv_cut_sequence(&p, &plan, &s);
        if (cut.rows > 0 && s.kv_len > 0) {
            support->path = plan.general ? QKV_PATH_GENERAL : QKV_PATH_TUNED;
            if (cut.route == QKV_ROUTE_TILE)
                support->route = "tile";
        }
        if (!p.q_starts && !p.kv_starts && !p.kv_lens)
            break; /* the others are like it */
    }
    return QKV_OK;
}

/* Scratch memory that all workers share, in front of theirs. */
static qkv_status shared_bytes(const qkv_attention_problem *p, const qkv_attention_plan *plan,
                               size_t *bytes)
{
    *bytes = 0;
    if (nothing_to_write(p) || !qkv_needs_schedule(p) || qkv_schedule_bytes(p, plan, bytes))
        return QKV_OK;
    return QKV_E_OVERFLOW;
}

qkv_status qkv_attention_scratch_size(const qkv_attention_desc *desc, int64_t workers,
                                      size_t *bytes)
{
    qkv_attention_problem p;
    qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    if (!bytes)
        return QKV_E_NULL;
    if (workers < 1)
        return QKV_E_INDEX;
    const qkv_attention_plan plan = plan_of(&p);
    size_t shared;
    status = shared_bytes(&p, &plan, &shared);
    if (status)
        return status;
    if (plan.worker_bytes > 0 &&
        (uint64_t)workers > ((size_t)PTRDIFF_MAX - shared) / plan.worker_bytes)
        return QKV_E_OVERFLOW;
    *bytes = shared + plan.worker_bytes * (size_t)workers;
    return QKV_OK;
}

static qkv_status check_attention_scratch(const qkv_attention_problem *p, const void *scratch,
                                          size_t size, size_t need)
{
    memory_list list;
    list_memory(p, &list);
    const qkv_status status =
        qkv_check_scratch(scratch, size, need, list.inputs, (size_t)list.n_inputs);
    if (status)
        return status;
    return qkv_check_scratch(scratch, size, need, list.outputs, (size_t)list.n_outputs);
}

qkv_status qkv_attention(const qkv_attention_desc *desc, void *scratch, size_t scratch_size)
{
    qkv_attention_problem p;
    qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    const qkv_attention_plan plan = plan_of(&p);
    status = check_attention_scratch(&p, scratch, scratch_size, plan.worker_bytes);
    if (status)
        return status;

    if (!nothing_to_write(&p))
        qkv_run_attention(&p, &plan, scratch);
    return QKV_OK;
}

qkv_status qkv_attention_task_count(const qkv_attention_desc *desc, int64_t *count)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    if (!count)
        return QKV_E_NULL;
    const qkv_attention_plan plan = plan_of(&p);
    size_t shared;
    const qkv_status too_many = shared_bytes(&p, &plan, &shared);
    if (too_many)
        return too_many;
    if (nothing_to_write(&p))
        *count = 0;
    else if (qkv_needs_schedule(&p))
        *count = qkv_schedule_tasks(&p, &plan);
    else
        *count = qkv_attention_tasks(&p, &plan);
    return QKV_OK;
}

qkv_status qkv_check_workers_scratch(const qkv_attention_desc *desc, const void *scratch,
                                     size_t scratch_size, size_t need)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    return status ? status : check_attention_scratch(&p, scratch, scratch_size, need);
}

qkv_status qkv_attention_begin(const qkv_attention_desc *desc, void *scratch, size_t scratch_size)
{
    qkv_attention_desc copy;
    qkv_attention_problem p;
    qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    const qkv_attention_plan plan = plan_of(&p);
    size_t shared;
    status = shared_bytes(&p, &plan, &shared);
    if (!status)
        status = check_attention_scratch(&p, scratch, scratch_size, shared);
    if (status || shared == 0)
        return status;
    /* The tasks check no more: no worker's part may hold a tensor either. */
    status = check_attention_scratch(&p, scratch, scratch_size, scratch_size);
    if (status)
        return status;
    copy_desc(&copy, desc);
    qkv_schedule_begin(scratch, &copy, &p, &plan);
    return QKV_OK;
}

/* The part of 'worker' begins 'shared' bytes from the start of scratch memory. */
static qkv_status worker_end(const qkv_attention_plan *plan, size_t shared, int64_t worker,
                             size_t *end)
{
    if (worker < 0 || (uint64_t)worker >= ((size_t)PTRDIFF_MAX - shared) / plan->worker_bytes)
        return QKV_E_INDEX;
    *end = shared + plan->worker_bytes * ((size_t)worker + 1);
    return QKV_OK;
}

/* A task of a problem without a schedule: the descriptor is checked again. */
static qkv_status run_plain_task(const qkv_attention_problem *p, int64_t task, int64_t worker,
                                 void *scratch, size_t scratch_size)
{
    const qkv_attention_plan plan = plan_of(p);
    size_t end;
    if (nothing_to_write(p) || task < 0 || task >= qkv_attention_tasks(p, &plan))
        return QKV_E_INDEX;
    qkv_status status = worker_end(&plan, 0, worker, &end);
    if (!status)
        status = check_attention_scratch(p, scratch, scratch_size, end);
    if (status)
        return status;
    qkv_run_attention_task(p, &plan, task, (char *)scratch + end - plan.worker_bytes);
    return QKV_OK;
}

/* The schedule that qkv_attention_begin() wrote for a descriptor; NULL if there is none. */
static qkv_schedule *find_schedule(const qkv_attention_desc *desc, void *scratch,
                                   size_t scratch_size)
{
    qkv_schedule *schedule = scratch;
    if (!scratch || scratch_size < sizeof *schedule ||
        (uintptr_t)scratch % QKV_SCRATCH_ALIGN != 0 ||
        memcmp(&schedule->desc, desc, sizeof *desc) != 0)
        return NULL;
    return schedule;
}

/* A task of a problem that qkv_attention_begin() has checked. */
static qkv_status run_scheduled_task(qkv_schedule *schedule, int64_t task, int64_t worker,
                                     size_t scratch_size)
{
    size_t end;
    if (task < 0 || task >= schedule->n_tasks)
        return QKV_E_INDEX;
    const qkv_status status = worker_end(&schedule->plan, (size_t)schedule->bytes, worker, &end);
    if (status)
        return status;
    if (scratch_size < end)
        return QKV_E_SCRATCH;
    qkv_schedule_run(schedule, task, (char *)schedule + end - schedule->plan.worker_bytes);
    return QKV_OK;
}

qkv_status qkv_attention_run_task(const qkv_attention_desc *desc, int64_t task, int64_t worker,
                                  void *scratch, size_t scratch_size)
{
    qkv_attention_desc copy;
    qkv_status status = copy_desc(&copy, desc);
    if (status)
        return status;
    const bool scheduled = has_schedule(&copy);
    qkv_schedule *schedule = scheduled ? find_schedule(&copy, scratch, scratch_size) : NULL;
    if (schedule)
        return run_scheduled_task(schedule, task, worker, scratch_size);
    qkv_attention_problem p;
    status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    return scheduled ? QKV_E_SCRATCH : run_plain_task(&p, task, worker, scratch, scratch_size);
}
