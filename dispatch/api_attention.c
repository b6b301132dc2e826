/* SPDX-License-Identifier: MIT */
/* Fused attention: from the public descriptor to a validated problem. */
#include <math.h>
#include <string.h>

#include "api.h"

/* Replaces defaults and checks the plain numbers of a descriptor. */
static qkv_status check_sizes(qkv_attention_desc *d)
{
    if (d->flags & ~(QKV_CAUSAL | QKV_SCALE_SET | QKV_WINDOW | QKV_INVARIANT))
        return QKV_E_FLAGS;
    if (d->batch < 0 || d->q_heads < 0 || d->kv_heads < 0 || d->q_len < 0 || d->kv_len < 0 ||
        d->head_dim < 1 || d->value_dim < 0)
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

/* Fields that are described already but that no code serves yet. */
static qkv_status check_unserved(const qkv_attention_desc *d)
{
    static const qkv_attention_desc none;
    const size_t first = offsetof(qkv_attention_desc, q_starts);
    const bool set =
        memcmp((const char *)d + first, (const char *)&none + first, sizeof none - first) != 0;
    return set || d->flags & (QKV_WINDOW | QKV_INVARIANT) ? QKV_E_UNSUPPORTED : QKV_OK;
}

qkv_status qkv_check_scale(int32_t flags, float scale, int64_t head_dim, float *scale_log2)
{
    const double log2e = 0x1.71547652b82fep+0;
    double s = (double)scale;
    if (!(flags & QKV_SCALE_SET) && scale == 0.0f)
        s = 1.0 / sqrt((double)head_dim);
    *scale_log2 = (float)(s * log2e);
    return isfinite(*scale_log2) ? QKV_OK : QKV_E_VALUE;
}

static qkv_status check_tensors(const qkv_attention_desc *d, qkv_attention_problem *p)
{
    qkv_status status = qkv_view_tensor(&d->query, d->batch, d->q_heads, d->q_len, d->head_dim,
                                        QKV_INPUT, &p->query);
    if (!status)
        status = qkv_view_tensor(&d->key, d->batch, d->kv_heads, d->kv_len, d->head_dim, QKV_INPUT,
                                 &p->key);
    if (!status)
        status = qkv_view_tensor(&d->value, d->batch, d->kv_heads, d->kv_len, d->value_dim,
                                 QKV_INPUT, &p->value);
    if (!status)
        status = qkv_view_tensor(&d->out, d->batch, d->q_heads, d->q_len, d->value_dim, QKV_OUTPUT,
                                 &p->out);
    if (!status && d->lse.data && d->lse.dtype != QKV_F32)
        status = QKV_E_DTYPE;
    if (!status && d->lse.data)
        status = qkv_view_tensor(&d->lse, d->batch, d->q_heads, d->q_len, 1, QKV_OUTPUT, &p->lse);
    p->narrow = (p->query.dtype | p->key.dtype | p->value.dtype | p->out.dtype) != QKV_F32;
    return status;
}

static qkv_status check_overlap(const qkv_attention_problem *p)
{
    const bool in_place = qkv_views_same(&p->out, &p->query);
    if ((!in_place && qkv_views_overlap(&p->out, &p->query)) ||
        qkv_views_overlap(&p->out, &p->key) || qkv_views_overlap(&p->out, &p->value) ||
        qkv_views_overlap(&p->out, &p->lse) || qkv_views_overlap(&p->lse, &p->query) ||
        qkv_views_overlap(&p->lse, &p->key) || qkv_views_overlap(&p->lse, &p->value))
        return QKV_E_OVERLAP;
    return QKV_OK;
}

qkv_status qkv_check_attention(const qkv_attention_desc *desc, qkv_attention_problem *p)
{
    qkv_attention_desc d;
    qkv_status status =
        qkv_copy_desc(&d, sizeof d, offsetof(qkv_attention_desc, lse) + sizeof d.lse, desc);
    if (!status)
        status = check_sizes(&d);
    if (!status)
        status = check_unserved(&d);
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
                                 .causal = (d.flags & QKV_CAUSAL) != 0};
    status = qkv_check_scale(d.flags, d.scale, d.head_dim, &p->scale_log2);
    if (!status)
        status = check_tensors(&d, p);
    if (!status)
        status = check_overlap(p);
    /* The row driver's scratch memory is some rows of queries and values. */
    if (!status && (d.value_dim > INT64_MAX / 4096 || d.head_dim > INT64_MAX / 4096))
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
    support->route = plan.route == QKV_ROUTE_TILE ? "tile" : "row";
    if (nothing_to_write(&p) || p.kv_len == 0)
        support->path = QKV_PATH_NONE;
    else
        support->path = plan.general ? QKV_PATH_GENERAL : QKV_PATH_TUNED;
    return QKV_OK;
}

qkv_status qkv_attention_scratch_size(const qkv_attention_desc *desc, int64_t workers,
                                      size_t *bytes)
{
    qkv_attention_problem p;
    const qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    if (!bytes)
        return QKV_E_NULL;
    if (workers < 1)
        return QKV_E_INDEX;
    const size_t one = plan_of(&p).worker_bytes;
    if (one > 0 && (uint64_t)workers > PTRDIFF_MAX / one)
        return QKV_E_OVERFLOW;
    *bytes = one * (size_t)workers;
    return QKV_OK;
}

static qkv_status check_attention_scratch(const qkv_attention_problem *p, const void *scratch,
                                          size_t size, size_t need)
{
    const qkv_view *views[] = {&p->query, &p->key, &p->value, &p->out, &p->lse};
    return qkv_check_scratch(scratch, size, need, views, sizeof views / sizeof *views);
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

    for (int64_t task = 0; task < plan.tasks; task++)
        qkv_run_attention_task(&p, &plan, task, scratch);
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
    *count = plan_of(&p).tasks;
    return QKV_OK;
}

qkv_status qkv_attention_run_task(const qkv_attention_desc *desc, int64_t task, int64_t worker,
                                  void *scratch, size_t scratch_size)
{
    qkv_attention_problem p;
    qkv_status status = qkv_check_attention(desc, &p);
    if (status)
        return status;
    const qkv_attention_plan plan = plan_of(&p);
    if (task < 0 || task >= plan.tasks || worker < 0 ||
        (uint64_t)worker >= PTRDIFF_MAX / plan.worker_bytes)
        return QKV_E_INDEX;
    status = check_attention_scratch(&p, scratch, scratch_size,
                                     plan.worker_bytes * ((size_t)worker + 1));
    if (status)
        return status;

    qkv_run_attention_task(&p, &plan, task, (char *)scratch + plan.worker_bytes * (size_t)worker);
    return QKV_OK;
}
