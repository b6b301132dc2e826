/* SPDX-License-Identifier: MIT */
/* The projection and the whole self-attention layer. */
#include <math.h>

#include "api.h"

/* A weight matrix and its bias, checked. */
typedef struct linear_views {
    qkv_view weight, bias; /* bias.data NULL: none */
} linear_views;

static qkv_status check_linear(const qkv_linear *linear, int32_t flags, int64_t in, int64_t out,
                               linear_views *views)
{
    if (linear->reserved != 0)
        return QKV_E_FLAGS;

    const bool out_in = (flags & QKV_WEIGHT_OUT_IN) != 0;
    const int64_t rows = out_in ? out : in, dim = out_in ? in : out;
    /* Rows of a weight matrix may not repeat or run into each other: that
     * is a mistake in every program that does not compute nonsense. */
    if (linear->stride < 0 || (linear->stride > 0 && linear->stride < dim))
        return QKV_E_STRIDE;
    const qkv_tensor matrix = {.data = (void *)(uintptr_t)linear->weight,
                               .stride_row = linear->stride > 0 ? linear->stride : dim,
                               .dtype = linear->dtype,
                               .flags = QKV_TENSOR_STRIDED};
    qkv_status status =
        qkv_view_tensor(&matrix, &(qkv_rows){1, 1, rows}, dim, QKV_INPUT, &views->weight);
    views->bias = (qkv_view){.data = NULL};
    if (!status && linear->bias)
        status = qkv_view_matrix(linear->bias, out, 1, out, QKV_INPUT, &views->bias);
    return status;
}

static qkv_projection projection_of(const qkv_linear *linear, int32_t flags, int64_t in,
                                    int64_t out)
{
    const bool out_in = (flags & QKV_WEIGHT_OUT_IN) != 0;
    return (qkv_projection){.weight = linear->weight,
                            .bias = linear->bias,
                            .weight_stride = linear->stride > 0 ? linear->stride
                                             : out_in           ? in
                                                                : out,
                            .weight_dtype = linear->dtype,
                            .weight_out_in = out_in};
}

static size_t projection_bytes(int32_t out_dtype)
{
    return (size_t)qkv_projection_scratch(out_dtype) * sizeof(float);
}

/* ------------------------------------------------------------ qkv_project */

typedef struct project_problem {
    qkv_projection projection;
    linear_views linear;
} project_problem;

static qkv_status check_project(const qkv_project_desc *desc, project_problem *p)
{
    qkv_project_desc d;
    qkv_status status = qkv_copy_desc(&d, sizeof d, NULL, desc);
    if (status)
        return status;
    if (d.flags & ~QKV_WEIGHT_OUT_IN || d.reserved != 0)
        return QKV_E_FLAGS;
    if (d.batch < 0 || d.rows < 0 || d.in_dim < 1 || d.heads < 0 || d.head_dim < 1)
        return QKV_E_SHAPE;
    if (d.batch == 0)
        d.batch = 1;
    if (d.heads == 0)
        d.heads = 1;

    int64_t columns;
    if (!qkv_mul(d.heads, d.head_dim, &columns))
        return QKV_E_OVERFLOW;
    p->projection = projection_of(&d.linear, d.flags, d.in_dim, columns);
    status = qkv_view_tensor(&d.input, &(qkv_rows){d.batch, 1, d.rows}, d.in_dim, QKV_INPUT,
                             &p->projection.input);
    if (!status)
        status = check_linear(&d.linear, d.flags, d.in_dim, columns, &p->linear);
    if (!status)
        status = qkv_view_tensor(&d.out, &(qkv_rows){d.batch, d.heads, d.rows}, d.head_dim,
                                 QKV_OUTPUT, &p->projection.out);
    if (status)
        return status;

    const qkv_view *out = &p->projection.out;
    if (qkv_views_overlap(out, &p->projection.input) || qkv_views_overlap(out, &p->linear.weight) ||
        qkv_views_overlap(out, &p->linear.bias))
        return QKV_E_OVERLAP;
    return QKV_OK;
}

static size_t project_need(const project_problem *p)
{
    const qkv_view *out = &p->projection.out;
    return qkv_view_empty(out) ? 0 : projection_bytes(out->dtype);
}

qkv_status qkv_project_scratch_size(const qkv_project_desc *desc, size_t *bytes)
{
    project_problem p;
    const qkv_status status = check_project(desc, &p);
    if (status)
        return status;
    if (!bytes)
        return QKV_E_NULL;
    *bytes = project_need(&p);
    return QKV_OK;
}

qkv_status qkv_project(const qkv_project_desc *desc, void *scratch, size_t scratch_size)
{
    project_problem p;
    qkv_status status = check_project(desc, &p);
    if (status)
        return status;
    const qkv_view *views[] = {&p.projection.input, &p.projection.out, &p.linear.weight,
                               &p.linear.bias};
    const size_t need = project_need(&p);
    status = qkv_check_scratch(scratch, scratch_size, need, views, sizeof views / sizeof *views);
    if (status || need == 0)
        return status;
    qkv_run_projection(&p.projection, qkv_kernels_active(), scratch);
    return QKV_OK;
}

/* ----------------------------------------------------- qkv_self_attention */

enum { WQ, WK, WV, WO, WEIGHTS };

/* A checked layer. The views of q, k, v and the joined heads are of one
 * sequence and have no data until scratch memory is laid out. */
typedef struct layer_problem {
    const qkv_kernels *kernels;
    qkv_view input, out, lse;
    linear_views linear[WEIGHTS];
    qkv_projection projection[WEIGHTS];
    qkv_attention_problem attention; /* of one sequence */
    qkv_attention_plan plan;
    int64_t batch;
    bool has_wo;
    /* Bytes from the start of scratch memory. */
    size_t q_at, k_at, v_at, joined_at, work_at, need;
} layer_problem;

static qkv_status check_layer_sizes(qkv_self_attention_desc *d)
{
    if (d->flags & ~(QKV_CAUSAL | QKV_SCALE_SET | QKV_WEIGHT_OUT_IN))
        return QKV_E_FLAGS;
    if (d->batch < 0 || d->seq_len < 0 || d->model_dim < 1 || d->q_heads < 0 || d->kv_heads < 0 ||
        d->head_dim < 1 || d->value_dim < 0 || d->out_dim < 0)
        return QKV_E_SHAPE;
    if (d->batch == 0)
        d->batch = 1;
    if (d->q_heads == 0)
        d->q_heads = 1;
    if (d->kv_heads == 0)
        d->kv_heads = d->q_heads;
    if (d->value_dim == 0)
        d->value_dim = d->head_dim;
    if (d->out_dim == 0)
        d->out_dim = d->model_dim;
    return d->q_heads % d->kv_heads != 0 ? QKV_E_SHAPE : QKV_OK;
}

/* Columns of Wq, Wk, Wv and rows of Wo. */
typedef struct layer_widths {
    int64_t q, k, v, joined;
} layer_widths;

static bool layer_widths_of(const qkv_self_attention_desc *d, layer_widths *w)
{
    return qkv_mul(d->q_heads, d->head_dim, &w->q) && qkv_mul(d->kv_heads, d->head_dim, &w->k) &&
           qkv_mul(d->kv_heads, d->value_dim, &w->v) &&
           qkv_mul(d->q_heads, d->value_dim, &w->joined);
}

static qkv_status check_layer_tensors(const qkv_self_attention_desc *d, const layer_widths *w,
                                      layer_problem *p)
{
    const qkv_linear *linears[WEIGHTS] = {&d->wq, &d->wk, &d->wv, &d->wo};
    const int64_t ins[WEIGHTS] = {d->model_dim, d->model_dim, d->model_dim, w->joined};
    const int64_t outs[WEIGHTS] = {w->q, w->k, w->v, d->out_dim};

    qkv_status status = qkv_view_tensor(&d->input, &(qkv_rows){d->batch, 1, d->seq_len},
                                        d->model_dim, QKV_INPUT, &p->input);
    p->has_wo = d->wo.weight != NULL;
    for (int i = 0; i < WEIGHTS && !status; i++) {
        if (i == WO && !p->has_wo)
            continue;
        status = check_linear(linears[i], d->flags, ins[i], outs[i], &p->linear[i]);
        p->projection[i] = projection_of(linears[i], d->flags, ins[i], outs[i]);
    }
    if (!status)
        status = qkv_view_tensor(&d->out, &(qkv_rows){d->batch, 1, d->seq_len},
                                 p->has_wo ? d->out_dim : w->joined, QKV_OUTPUT, &p->out);
    if (!status && d->lse.data && d->lse.dtype != QKV_F32)
        status = QKV_E_DTYPE;
    if (!status && d->lse.data)
        status = qkv_view_tensor(&d->lse, &(qkv_rows){d->batch, d->q_heads, d->seq_len}, 1,
                                 QKV_OUTPUT, &p->lse);
    return status;
}

/* The views of everything that a layer is given, for overlap checks. */
enum { LAYER_VIEWS = 3 + 2 * WEIGHTS };
static void layer_views(const layer_problem *p, const qkv_view *views[LAYER_VIEWS])
{
    *views++ = &p->out;
    *views++ = &p->lse;
    *views++ = &p->input;
    for (int i = 0; i < WEIGHTS; i++) {
        *views++ = &p->linear[i].weight;
        *views++ = &p->linear[i].bias;
    }
}

static qkv_status check_layer_overlap(const layer_problem *p)
{
    const qkv_view *views[LAYER_VIEWS];
    layer_views(p, views);
    for (int output = 0; output < 2; output++)
        for (int i = output + 1; i < LAYER_VIEWS; i++)
            if (qkv_views_overlap(views[output], views[i]))
                return QKV_E_OVERLAP;
    return QKV_OK;
}

/* [1][heads][rows][dim], the heads side by side in a row. */
static qkv_view joined_view(int64_t heads, int64_t rows, int64_t dim)
{
    return (qkv_view){.count = {1, heads, rows},
                      .stride = {0, heads > 1 ? dim : 0, rows > 1 ? heads * dim : 0},
                      .dim = dim};
}

/* Reserves rows * width floats at the next aligned place. */
static bool reserve(size_t *used, int64_t rows, int64_t width, size_t *at)
{
    int64_t floats, bytes;
    if (!qkv_mul(rows, width, &floats) || floats > PTRDIFF_MAX / 8 ||
        !qkv_add((int64_t)*used, qkv_align_floats(floats) * (int64_t)sizeof(float), &bytes) ||
        bytes > PTRDIFF_MAX)
        return false;
    *at = *used;
    *used = (size_t)bytes;
    return true;
}

static qkv_status lay_out_layer(const qkv_self_attention_desc *d, const layer_widths *w,
                                layer_problem *p)
{
    p->attention =
        (qkv_attention_problem){.query = joined_view(d->q_heads, d->seq_len, d->head_dim),
                                .key = joined_view(d->kv_heads, d->seq_len, d->head_dim),
                                .value = joined_view(d->kv_heads, d->seq_len, d->value_dim),
                                .out = joined_view(d->q_heads, d->seq_len, d->value_dim),
                                .batch = 1,
                                .q_heads = d->q_heads,
                                .kv_heads = d->kv_heads,
                                .group = d->q_heads / d->kv_heads,
                                .q_len = d->seq_len,
                                .kv_len = d->seq_len,
                                .head_dim = d->head_dim,
                                .value_dim = d->value_dim,
                                .causal = (d->flags & QKV_CAUSAL) != 0,
                                .narrow = !p->has_wo && p->out.dtype != QKV_F32,
                                .scale = p->attention.scale,
                                .scale_log2 = p->attention.scale_log2};
    size_t used = 0;
    if (!reserve(&used, d->seq_len, w->q, &p->q_at) ||
        !reserve(&used, d->seq_len, w->k, &p->k_at) ||
        !reserve(&used, d->seq_len, w->v, &p->v_at) ||
        !reserve(&used, d->seq_len, p->has_wo ? w->joined : 0, &p->joined_at))
        return QKV_E_OVERFLOW;

    p->kernels = qkv_kernels_active();
    p->plan = qkv_plan_attention(&p->attention, p->kernels);
    const size_t project = projection_bytes(p->has_wo ? p->out.dtype : QKV_F32);
    const size_t work = p->plan.worker_bytes > project ? p->plan.worker_bytes : project;
    if (used > (size_t)PTRDIFF_MAX - work)
        return QKV_E_OVERFLOW;
    p->work_at = used;
    p->need = used + work;
    return QKV_OK;
}

static qkv_status check_layer(const qkv_self_attention_desc *desc, layer_problem *p)
{
    qkv_self_attention_desc d;
    layer_widths w;
    *p = (layer_problem){.need = 0};
    qkv_status status = qkv_copy_desc(&d, sizeof d, NULL, desc);
    if (!status)
        status = check_layer_sizes(&d);
    if (status)
        return status;
    if (!layer_widths_of(&d, &w) || w.v > INT64_MAX / 1024)
        return QKV_E_OVERFLOW;
    p->batch = d.batch;
    status = qkv_check_scale(d.flags, d.scale, d.head_dim, &p->attention.scale,
                             &p->attention.scale_log2);
    if (status)
        return status;
    status = check_layer_tensors(&d, &w, p);
    if (!status)
        status = check_layer_overlap(p);
    if (!status && !qkv_view_empty(&p->out))
        status = lay_out_layer(&d, &w, p);
    return status;
}

qkv_status qkv_self_attention_scratch_size(const qkv_self_attention_desc *desc, size_t *bytes)
{
    layer_problem p;
    const qkv_status status = check_layer(desc, &p);
    if (status)
        return status;
    if (!bytes)
        return QKV_E_NULL;
    *bytes = p.need;
    return QKV_OK;
}

/* A view of one batch entry. */
static qkv_view of_batch(const qkv_view *view, int64_t batch)
{
    qkv_view one = *view;
    if (one.data)
        one.data = qkv_view_row(view, batch, 0, 0);
    one.count[QKV_AXIS_BATCH] = 1;
    one.stride[QKV_AXIS_BATCH] = 0;
    return one;
}

/* The heads of a [rows][heads * dim] matrix of the caller's as a view. */
static qkv_view split_heads(qkv_view rows, int64_t heads, int64_t dim)
{
    rows.count[QKV_AXIS_HEAD] = heads;
    rows.stride[QKV_AXIS_HEAD] = heads > 1 ? dim : 0;
    rows.dim = dim;
    return rows;
}

static void project_to(const layer_problem *p, int which, const qkv_view *input,
                       const qkv_view *out, float *work)
{
    qkv_projection projection = p->projection[which];
    projection.input = *input;
    projection.out = *out;
    qkv_run_projection(&projection, p->kernels, work);
}

static void run_sequence(const layer_problem *p, int64_t batch, char *scratch)
{
    float *work = (float *)(void *)(scratch + p->work_at);
    qkv_attention_problem a = p->attention;
    const qkv_view input = of_batch(&p->input, batch), out = of_batch(&p->out, batch);
    a.query.data = (float *)(void *)(scratch + p->q_at);
    a.key.data = (float *)(void *)(scratch + p->k_at);
    a.value.data = (float *)(void *)(scratch + p->v_at);
    if (p->has_wo)
        a.out.data = (float *)(void *)(scratch + p->joined_at);
    else
        a.out = split_heads(out, a.q_heads, a.value_dim);
    if (p->lse.data)
        a.lse = of_batch(&p->lse, batch);

    project_to(p, WQ, &input, &a.query, work);
    project_to(p, WK, &input, &a.key, work);
    project_to(p, WV, &input, &a.value, work);
    qkv_run_attention(&a, &p->plan, work);
    if (p->has_wo) {
        qkv_view joined = a.out;
        joined.dim *= a.q_heads;
        joined.count[QKV_AXIS_HEAD] = 1;
        joined.stride[QKV_AXIS_HEAD] = 0;
        project_to(p, WO, &joined, &out, work);
    }
}

qkv_status qkv_self_attention(const qkv_self_attention_desc *desc, void *scratch,
                              size_t scratch_size)
{
    layer_problem p;
    qkv_status status = check_layer(desc, &p);
    if (status)
        return status;
    const qkv_view *views[LAYER_VIEWS];
    layer_views(&p, views);
    status = qkv_check_scratch(scratch, scratch_size, p.need, views, LAYER_VIEWS);
    if (status || p.need == 0)
        return status;
    for (int64_t b = 0; b < p.batch; b++)
        run_sequence(&p, b, scratch);
    return QKV_OK;
}
