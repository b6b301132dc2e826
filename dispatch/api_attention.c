/* SPDX-License-Identifier: MIT */
/* Fused attention: from the public descriptor to a validated problem. */
#include <math.h>
#include <string.h>

#include "../kernels/drivers/schedule.h"
#include "api.h"

/*
 * A short call, one token against a short cache, takes little longer than its
 * checks: each reads the caller's descriptor where it lies, fills in its part
 * of the problem, and is passed over as a whole where nothing of what it looks
 * at is used.
 */

/* The memory that a problem reads, the query first, and writes: each check adds
 * what it has seen. Most of what a descriptor can name is not there. */
enum { MEMORY_MAX = 19, ARRAYS_MAX = 10 };
typedef struct memory_list {
    int n, outputs, outputs_end; /* views[outputs .. outputs_end - 1] are written */
    int n_arrays;
    const qkv_view *views[MEMORY_MAX];
    qkv_view arrays[ARRAYS_MAX];
} memory_list;

static void list_view(memory_list *list, const qkv_view *view)
{
    if (view->bytes > 0)
        list->views[list->n++] = view;
}

static void list_array(memory_list *list, const void *data, int64_t count, size_t size)
{
    if (!data)
        return;
    list->arrays[list->n_arrays] = qkv_view_bytes(data, count, size);
    list_view(list, &list->arrays[list->n_arrays++]);
}

/* Checks the plain numbers of a descriptor, and replaces defaults. */
static qkv_status check_sizes(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    if (d->flags & ~(QKV_CAUSAL | QKV_SCALE_SET | QKV_WINDOW | QKV_INVARIANT | QKV_SPLIT))
        return QKV_E_FLAGS;
    /* 'or' has the sign of whichever is negative */
    if ((d->batch | d->q_heads | d->kv_heads | d->q_len | d->kv_len | d->value_dim |
         d->shared_len) < 0 ||
        d->head_dim < 1 || d->shared_len > d->kv_len)
        return QKV_E_SHAPE;
    p->batch = d->batch ? d->batch : 1;
    p->q_heads = d->q_heads ? d->q_heads : 1;
    p->kv_heads = d->kv_heads ? d->kv_heads : p->q_heads;
    p->group = p->kv_heads == p->q_heads ? 1 : p->q_heads / p->kv_heads;
    p->q_len = d->q_len;
    p->kv_len = d->kv_len;
    p->head_dim = d->head_dim;
    p->value_dim = d->value_dim ? d->value_dim : d->head_dim;
    p->shared_len = d->shared_len;
    p->causal = (d->flags & QKV_CAUSAL) != 0;
    p->invariant = (d->flags & QKV_INVARIANT) != 0;
    p->split = (d->flags & QKV_SPLIT) != 0;
    return p->group * p->kv_heads != p->q_heads ? QKV_E_SHAPE : QKV_OK;
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
static qkv_status check_sequences(const qkv_attention_desc *d, qkv_attention_problem *p,
                                  memory_list *list)
{
    p->q_starts = p->kv_starts = p->kv_lens = p->q_offsets = NULL;
    if (!d->q_starts && !d->kv_starts && !d->kv_lens && !d->q_offsets)
        return QKV_OK;
    if (!qkv_aligned(d->q_starts, sizeof(int64_t)) || !qkv_aligned(d->kv_starts, sizeof(int64_t)) ||
        !qkv_aligned(d->kv_lens, sizeof(int64_t)) || !qkv_aligned(d->q_offsets, sizeof(int64_t)))
        return QKV_E_ALIGN;
    if (p->batch >= PTRDIFF_MAX / (int64_t)sizeof(int64_t) ||
        !qkv_array_fits(d->q_starts, p->batch + 1, sizeof(int64_t)) ||
        !qkv_array_fits(d->kv_starts, p->batch + 1, sizeof(int64_t)) ||
        !qkv_array_fits(d->kv_lens, p->batch, sizeof(int64_t)) ||
        !qkv_array_fits(d->q_offsets, p->batch, sizeof(int64_t)))
        return QKV_E_OVERFLOW;
    if (d->q_starts && !are_starts(d->q_starts, p->batch, p->q_len))
        return QKV_E_SHAPE;
    if (d->kv_starts && !are_starts(d->kv_starts, p->batch, p->kv_len))
        return QKV_E_SHAPE;
    p->q_starts = d->q_starts;
    p->kv_starts = d->kv_starts;
    for (int64_t b = 0; d->kv_lens && b < p->batch; b++)
        if (d->kv_lens[b] < 0 || d->kv_lens[b] > qkv_sequence_at(p, b).kv_len)
            return QKV_E_SHAPE;
    p->kv_lens = d->kv_lens;
    for (int64_t b = 0; d->q_offsets && b < p->batch; b++)
        if (d->q_offsets[b] > INT64_MAX - 1 - qkv_sequence_at(p, b).q_len)
            return QKV_E_OVERFLOW;
    p->q_offsets = d->q_offsets;
    list_array(list, p->q_starts, p->batch + 1, sizeof *p->q_starts);
    list_array(list, p->kv_starts, p->batch + 1, sizeof *p->kv_starts);
    list_array(list, p->kv_lens, p->batch, sizeof *p->kv_lens);
    list_array(list, p->q_offsets, p->batch, sizeof *p->q_offsets);
    return QKV_OK;
}

static qkv_status check_page_sizes(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    if (d->page_size != 0 && d->kv_starts)
        return QKV_E_FLAGS;
    /* until check_pages(): sequences are told from the lengths alone */
    p->page_table = NULL;
    p->page_table_stride = d->page_table_stride;
    if (!d->page_table && (d->page_size | d->pages | d->page_table_stride) == 0)
        return QKV_OK;
    return qkv_check_page_sizes(d->page_size, d->pages, p->batch, p->kv_len, d->page_table,
                                &p->page_table_stride);
}

/* Are the pages of the shared prefix the same in both, as far as both have it? */
static bool share_pages(const qkv_attention_problem *p, const qkv_sequence *a,
                        const qkv_sequence *b)
{
    int64_t shared = a->kv_len < b->kv_len ? a->kv_len : b->kv_len;
    shared = (p->shared_len < shared ? p->shared_len : shared) >> p->page_shift;
    for (int64_t i = 0; i < shared; i++)
        if (a->pages[i] != b->pages[i])
            return false;
    return true;
}

/* Every entry of the page table that a sequence's length reaches. */
static qkv_status check_pages(const qkv_attention_desc *d, qkv_attention_problem *p,
                              memory_list *list)
{
    if (d->page_size == 0)
        return QKV_OK;
    p->page_table = d->page_table;
    p->page_shift = 3; /* the smallest page */
    while (INT64_C(1) << p->page_shift < d->page_size)
        p->page_shift++;
    qkv_sequence longest = qkv_sequence_at(p, 0); /* so far: has most of the prefix */
    for (int64_t b = 0; b < p->batch && p->kv_len > 0; b++) {
        const qkv_sequence s = qkv_sequence_at(p, b);
        const int64_t last = (s.kv_len - 1) >> p->page_shift;
        if (last >= p->page_table_stride)
            return QKV_E_SHAPE;
        for (int64_t i = 0; i <= last; i++)
            if (s.pages[i] < 0 || s.pages[i] >= d->pages)
                return QKV_E_INDEX;
        if (!share_pages(p, &longest, &s))
            return QKV_E_INDEX;
        if (s.kv_len > longest.kv_len)
            longest = s;
    }
    list_array(list, p->page_table, p->batch * p->page_table_stride, sizeof *p->page_table);
    return QKV_OK;
}

/* A tensor that is not there: all that anybody looks at. */
static void leave_out(qkv_view *view)
{
    view->data = NULL;
    view->bytes = 0;
}

/* The keys' or the values' tensor, with its scales. */
static qkv_status check_cache(const qkv_tensor *tensor, const qkv_tensor *scale_tensor,
                              const qkv_rows *rows, int64_t dim, qkv_view *view, qkv_view *scale,
                              memory_list *list)
{
    qkv_status status = qkv_view_tensor(tensor, rows, dim, QKV_CACHE, view);
    if (status)
        return status;
    leave_out(scale);
    list_view(list, view);
    if (tensor->dtype != QKV_I8)
        return scale_tensor->data ? QKV_E_FLAGS : QKV_OK;
    if (scale_tensor->dtype != QKV_F32)
        return QKV_E_DTYPE;
    status = qkv_view_tensor(scale_tensor, rows, 1, QKV_INPUT, scale);
    list_view(list, scale);
    return status;
}

/* Is there anything that check_adjustments() would look at? */
static bool has_adjustments(const qkv_attention_desc *d)
{
    return (d->flags & QKV_WINDOW) || (d->window_left | d->window_right | d->sink_tokens) != 0 ||
           d->softcap != 0.0f || d->weights_stage != 0 || d->tree_mask || d->slopes ||
           d->head_scales || d->sinks || d->mask.data || d->mask.dtype != 0 || d->mask.flags != 0 ||
           (d->mask.stride_batch | d->mask.stride_head | d->mask.stride_query |
            d->mask.stride_key) != 0;
}

static qkv_status no_adjustments(qkv_attention_problem *p)
{
    p->windowed = p->adjusted = false;
    p->window_left = p->window_right = p->sink_tokens = 0;
    p->softcap = 0.0f;
    p->slopes = p->head_scales = p->sinks = NULL;
    p->tree_mask = NULL;
    p->tree_stride = 0;
    p->mask.data = NULL;
    p->weights_stage = QKV_WEIGHTS_SOFTMAX;
    return QKV_OK;
}

/* Windows, and what is done to logits: numbers first, then arrays. */
static qkv_status check_adjustments(const qkv_attention_desc *d, qkv_attention_problem *p,
                                    memory_list *list)
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
    if (!qkv_array_fits(d->slopes, p->q_heads, sizeof *d->slopes) ||
        !qkv_array_fits(d->head_scales, p->q_heads, sizeof *d->head_scales) ||
        !qkv_array_fits(d->sinks, p->q_heads, sizeof *d->sinks))
        return QKV_E_OVERFLOW;
    if (d->tree_mask && d->tree_stride < (p->q_len + 63) / 64)
        return QKV_E_STRIDE;
    if (d->tree_mask && (!qkv_mul(p->q_starts ? 1 : p->batch, p->q_len, &words) ||
                         !qkv_mul(words, d->tree_stride, &words) ||
                         !qkv_array_fits(d->tree_mask, words, sizeof *d->tree_mask)))
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
        qkv_view_mask(&d->mask, p->batch, p->q_heads, p->q_len, p->kv_len, &p->mask);
    if (status)
        return status;
    p->adjusted = p->softcap > 0.0f || p->slopes || p->head_scales || p->mask.data || p->tree_mask;
    list_array(list, p->mask.data, p->mask.bytes, 1);
    if (p->tree_mask) /* [rows][tree_stride] */
        list_array(list, p->tree_mask,
                   (p->q_starts ? p->q_len : p->batch * p->q_len) * p->tree_stride,
                   sizeof *p->tree_mask);
    list_array(list, p->slopes, p->q_heads, sizeof *p->slopes);
    list_array(list, p->head_scales, p->q_heads, sizeof *p->head_scales);
    list_array(list, p->sinks, p->q_heads, sizeof *p->sinks);
    return QKV_OK;
}

/* An optional output of f32. */
static qkv_status check_extra(const qkv_tensor *tensor, const qkv_rows *rows, int64_t dim,
                              qkv_view *view, memory_list *list)
{
    leave_out(view);
    if (!tensor->data)
        return QKV_OK;
    if (tensor->dtype != QKV_F32)
        return QKV_E_DTYPE;
    const qkv_status status = qkv_view_tensor(tensor, rows, dim, QKV_OUTPUT, view);
    list_view(list, view);
    return status;
}

static qkv_status check_outputs(const qkv_attention_desc *d, const qkv_rows *rows,
                                qkv_attention_problem *p, memory_list *list)
{
    list->outputs = list->n;
    qkv_status status = qkv_view_tensor(&d->out, rows, p->value_dim, QKV_OUTPUT, &p->out);
    list_view(list, &p->out);
    if (!status)
        status = check_extra(&d->lse, rows, 1, &p->lse, list);
    if (!status)
        status = check_extra(&d->row_max, rows, 1, &p->row_max, list);
    if (!status)
        status = check_extra(&d->weights, rows, p->kv_len, &p->weights, list);
    list->outputs_end = list->n;
    return status;
}

static qkv_status check_tensors(const qkv_attention_desc *d, qkv_attention_problem *p,
                                memory_list *list)
{
    const qkv_rows q_rows = {d->q_starts ? 1 : p->batch, p->q_heads, p->q_len};
    const qkv_rows kv_rows = {d->page_size   ? d->pages
                              : d->kv_starts ? 1
                                             : p->batch,
                              p->kv_heads, d->page_size ? d->page_size : p->kv_len};
    qkv_status status = qkv_view_tensor(&d->query, &q_rows, p->head_dim, QKV_INPUT, &p->query);
    if (status)
        return status;
    list_view(list, &p->query);
    status =
        check_cache(&d->key, &d->key_scale, &kv_rows, p->head_dim, &p->key, &p->key_scale, list);
    if (!status)
        status = check_cache(&d->value, &d->value_scale, &kv_rows, p->value_dim, &p->value,
                             &p->value_scale, list);
    if (!status)
        status = check_outputs(d, &q_rows, p, list);
    p->narrow = (p->query.dtype | p->key.dtype | p->value.dtype | p->out.dtype) != QKV_F32;
    return status;
}

/* May a view that is written share an element with another? 'out' may be the
 * query itself. */
static bool may_clash(const qkv_attention_problem *p, const qkv_view *out, const qkv_view *other)
{
    return qkv_spans_meet(out, other) && qkv_views_overlap(out, other) &&
           !(out == &p->out && other == &p->query && qkv_views_same(out, other));
}

/* Outputs overlap neither inputs nor each other. */
static qkv_status check_overlap(const qkv_attention_problem *p, const memory_list *list)
{
    for (int o = list->outputs; o < list->outputs_end; o++) {
        for (int i = 0; i < o; i++)
            if (may_clash(p, list->views[o], list->views[i]))
                return QKV_E_OVERLAP;
        for (int i = list->outputs_end; i < list->n; i++)
            if (may_clash(p, list->views[o], list->views[i]))
                return QKV_E_OVERLAP;
    }
    return QKV_OK;
}

/* As qkv_needs_schedule(), of a descriptor that need not be checked yet. */
static bool has_schedule(const qkv_attention_desc *d)
{
    return d->flags & QKV_SPLIT || d->page_size != 0 || d->q_starts || d->kv_starts || d->kv_lens ||
           d->q_offsets || d->shared_len;
}

/* Everything but scratch memory, of a descriptor of this version. */
static qkv_status check_desc(const qkv_attention_desc *d, qkv_attention_problem *p,
                             memory_list *list)
{
    qkv_status status = check_sizes(d, p);
    if (!status)
        status = qkv_check_scale(d->flags, d->scale, d->head_dim, &p->scale, &p->scale_log2);
    if (!status)
        status = check_page_sizes(d, p);
    list->n = list->n_arrays = 0;
    if (!status)
        status = check_tensors(d, p, list);
    if (!status)
        status = check_sequences(d, p, list);
    if (!status)
        status = check_pages(d, p, list);
    if (!status)
        status = has_adjustments(d) ? check_adjustments(d, p, list) : no_adjustments(p);
    if (!status)
        status = check_overlap(p, list);
    /* The row driver's scratch memory is some rows of queries and values, and
     * lengths are rounded up to blocks. (None is negative.) */
    if (!status && (p->value_dim | p->head_dim | p->kv_len | p->q_len) > INT64_MAX / 4096)
        status = QKV_E_OVERFLOW;
    return status;
}

/* The first version, and one without shared_len. */
static qkv_status copy_desc(qkv_attention_desc *copy, const qkv_attention_desc *desc)
{
    static const size_t older[] = {offsetof(qkv_attention_desc, q_starts),
                                   offsetof(qkv_attention_desc, shared_len), 0};
    return qkv_copy_desc(copy, sizeof *copy, older, desc);
}

static qkv_status check(const qkv_attention_desc *desc, qkv_attention_problem *p, memory_list *list)
{
    if (desc && desc->size == sizeof *desc)
        return check_desc(desc, p, list);
    qkv_attention_desc copy;
    const qkv_status status = copy_desc(&copy, desc);
    return status ? status : check_desc(&copy, p, list);
}

qkv_status qkv_check_attention(const qkv_attention_desc *desc, qkv_attention_problem *p)
{
    memory_list list;
    return check(desc, p, &list);
}

static bool nothing_to_write(const qkv_attention_problem *p)
{
    return p->out.bytes == 0;
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

static qkv_status check_attention_scratch(const memory_list *list, const void *scratch, size_t size,
                                          size_t need)
{
    return qkv_check_scratch(scratch, size, need, list->views, (size_t)list->n);
}

qkv_status qkv_attention(const qkv_attention_desc *desc, void *scratch, size_t scratch_size)
{
    qkv_attention_problem p;
    memory_list list;
    qkv_status status = check(desc, &p, &list);
    if (status)
        return status;
    const qkv_attention_plan plan = plan_of(&p);
    status = check_attention_scratch(&list, scratch, scratch_size, plan.worker_bytes);
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
    memory_list list;
    const qkv_status status = check(desc, &p, &list);
    return status ? status : check_attention_scratch(&list, scratch, scratch_size, need);
}

qkv_status qkv_attention_begin(const qkv_attention_desc *desc, void *scratch, size_t scratch_size)
{
    qkv_attention_desc copy;
    qkv_attention_problem p;
    memory_list list;
    qkv_status status = check(desc, &p, &list);
    if (status)
        return status;
    const qkv_attention_plan plan = plan_of(&p);
    size_t shared;
    status = shared_bytes(&p, &plan, &shared);
    if (!status)
        status = check_attention_scratch(&list, scratch, scratch_size, shared);
    if (status || shared == 0)
        return status;
    /* The tasks check no more: no worker's part may hold a tensor either. */
    status = check_attention_scratch(&list, scratch, scratch_size, scratch_size);
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
static qkv_status run_plain_task(const qkv_attention_problem *p, const memory_list *list,
                                 int64_t task, int64_t worker, void *scratch, size_t scratch_size)
{
    const qkv_attention_plan plan = plan_of(p);
    size_t end;
    if (nothing_to_write(p) || task < 0 || task >= qkv_attention_tasks(p, &plan))
        return QKV_E_INDEX;
    qkv_status status = worker_end(&plan, 0, worker, &end);
    if (!status)
        status = check_attention_scratch(list, scratch, scratch_size, end);
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
    memory_list list;
    status = check(desc, &p, &list);
    if (status)
        return status;
    return scheduled ? QKV_E_SCRATCH
                     : run_plain_task(&p, &list, task, worker, scratch, scratch_size);
}
