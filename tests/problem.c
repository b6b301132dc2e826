/* SPDX-License-Identifier: MIT */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH, HEAD, ROW };
enum { SLOT_Q, SLOT_K, SLOT_V, SLOT_O, SLOT_L };
enum { D_Q, D_K, D_V, D_OUT, D_OUT_BOUND, D_LSE, D_LSE_BOUND };

int next_isa(int after)
{
    for (int id = after + 1; id < QKV_ISA_COUNT; id++) {
        const test_isa isa = test_isa_of(id);
        if (isa.missing)
            continue;
        if (qkv_isa_select(isa.name) != QKV_OK || strcmp(qkv_isa_name(), isa.name) != 0)
            fail_with("%s cannot be selected", isa.name);
        return id;
    }
    return QKV_ISA_COUNT;
}

/* ---------------------------------------------------------------- tensors */

static void set_strides(tensor *t, layout how)
{
    const int64_t heads = t->count[HEAD], rows = t->count[ROW], dim = t->dim;
    switch (how) {
    case LAYOUT_BSHD:
        t->stride[ROW] = heads * dim;
        t->stride[HEAD] = dim;
        t->stride[BATCH] = rows * heads * dim;
        break;
    case LAYOUT_PADDED:
        t->stride[ROW] = dim + 3;
        t->stride[HEAD] = rows * t->stride[ROW] + 5;
        t->stride[BATCH] = heads * t->stride[HEAD] + 7;
        break;
    default:
        t->stride[ROW] = dim;
        t->stride[HEAD] = how == LAYOUT_ONE_HEAD ? 0 : rows * dim;
        t->stride[BATCH] =
            how == LAYOUT_BROADCAST || how == LAYOUT_ONE_HEAD ? 0 : heads * rows * dim;
    }
}

static bool is_empty(const tensor *t)
{
    return t->count[BATCH] == 0 || t->count[HEAD] == 0 || t->count[ROW] == 0 || t->dim == 0;
}

tensor tensor_at(float *data, const int64_t count[3], const int64_t stride[3], int64_t dim)
{
    tensor t = {.data = data, .dim = dim, .extent = dim};
    for (int a = 0; a < 3; a++) {
        t.count[a] = count[a];
        t.stride[a] = stride[a];
        t.extent += (count[a] - 1) * stride[a];
    }
    if (is_empty(&t))
        t.extent = 0;
    t.desc = (qkv_tensor){.data = data,
                          .stride_batch = stride[BATCH],
                          .stride_head = stride[HEAD],
                          .stride_row = stride[ROW],
                          .flags = QKV_TENSOR_STRIDED};
    return t;
}

tensor tensor_make(int slot, int64_t batch, int64_t heads, int64_t rows, int64_t dim, layout how,
                   int place)
{
    tensor t = {.count = {batch, heads, rows}, .dim = dim};
    set_strides(&t, how);
    t = tensor_at(NULL, t.count, t.stride, dim);
    t.data = guarded(slot, t.extent, place);
    t.desc.data = t.data;
    if (how == LAYOUT_PACKED)
        t.desc = (qkv_tensor){.data = t.data};
    return t;
}

float *tensor_row(const tensor *t, int64_t batch, int64_t head, int64_t row)
{
    return t->data + batch * t->stride[BATCH] + head * t->stride[HEAD] + row * t->stride[ROW];
}

#define for_each_row(t, b, h, i)                                                                   \
    for (int64_t b = 0; b < (t)->count[BATCH]; b++)                                                \
        for (int64_t h = 0; h < (t)->count[HEAD]; h++)                                             \
            for (int64_t i = 0; i < (t)->count[ROW]; i++)

void tensor_fill(const tensor *t, rng *r, float sigma)
{
    for_each_row(t, b, h, i) fill_normal(r, tensor_row(t, b, h, i), t->dim, sigma);
}

void tensor_fill_value(const tensor *t, float value)
{
    tensor_fill_index(t, value, 0.0f);
}

void tensor_fill_index(const tensor *t, float offset, float step)
{
    for_each_row(t, b, h, i) for (int64_t d = 0; d < t->dim; d++) tensor_row(t, b, h, i)[d] =
        offset + step * (float)i;
}

double *tensor_doubles(const tensor *t, int slot)
{
    double *all = doubles(slot, is_empty(t) ? 0 : t->count[0] * t->count[1] * t->count[2] * t->dim);
    double *at = all;
    for_each_row(t, b, h, i) for (int64_t d = 0; d < t->dim; d++) *at++ =
        (double)tensor_row(t, b, h, i)[d];
    return all;
}

void tensor_only_rows_written(const char *what, const tensor *t)
{
    for_each_row(t, b, h, i) canary_fill(tensor_row(t, b, h, i), t->dim);
    if (!canary_intact(t->data, t->extent))
        fail_with("%s: memory between its rows has been written", what);
}

/* ------------------------------------------------------ tensors of 16 bits */

void narrow_16(int32_t dtype, const float *x, uint16_t *y, int64_t n)
{
    const qkv_kernels *scalar = qkv_kernels_of(QKV_ISA_scalar);
    (dtype == QKV_F16 ? scalar->narrow_f16 : scalar->narrow_bf16)(x, y, n);
}

void widen_16(int32_t dtype, const uint16_t *x, float *y, int64_t n)
{
    const qkv_kernels *scalar = qkv_kernels_of(QKV_ISA_scalar);
    (dtype == QKV_F16 ? scalar->widen_f16 : scalar->widen_bf16)(x, y, n);
}

static qkv_tensor same_view(const tensor *t, int32_t dtype, uint16_t *data)
{
    qkv_tensor desc = t->desc;
    desc.data = data;
    desc.dtype = dtype;
    return desc;
}

qkv_tensor tensor_stored(const tensor *t, int32_t dtype, int slot, int place)
{
    if (dtype == QKV_F32)
        return t->desc;
    uint16_t *copy = guarded_16(slot, t->extent, place);
    for_each_row(t, b, h, i)
    {
        float *row = tensor_row(t, b, h, i);
        narrow_16(dtype, row, copy + (row - t->data), t->dim);
        widen_16(dtype, copy + (row - t->data), row, t->dim);
    }
    return same_view(t, dtype, copy);
}

enum { UNWRITTEN = 0x5a };

qkv_tensor tensor_narrow(const tensor *t, int32_t dtype, int slot, int place)
{
    uint16_t *data = guarded_16(slot, t->extent, place);
    memset(data, UNWRITTEN, (size_t)t->extent * sizeof *data);
    return same_view(t, dtype, data);
}

void tensor_expect_rounded(const char *what, const tensor *t, const qkv_tensor *narrow)
{
    const size_t bytes = (size_t)t->extent * sizeof(uint16_t);
    uint16_t *want = malloc(bytes + 1);
    memset(want, UNWRITTEN, bytes);
    for_each_row(t, b, h, i)
    {
        const float *row = tensor_row(t, b, h, i);
        narrow_16(narrow->dtype, row, want + (row - t->data), t->dim);
    }
    if (memcmp(narrow->data, want, bytes) != 0)
        fail_with("%s is not the f32 output rounded, with nothing between its rows", what);
    free(want);
}

void tensor_expect(const char *what, const tensor *t, const double *want, const double *bound)
{
    for_each_row(t, b, h, i)
    {
        char name[96];
        snprintf(name, sizeof name, "%s of batch %lld, head %lld, row %lld", what, (long long)b,
                 (long long)h, (long long)i);
        expect_close(name, tensor_row(t, b, h, i), want, bound, t->dim);
        want += t->dim;
        bound += t->dim;
    }
}

void tensor_expect_bits(const char *what, const tensor *t, const tensor *other)
{
    for_each_row(t, b, h, i)
    {
        char name[96];
        snprintf(name, sizeof name, "%s of batch %lld, head %lld, row %lld", what, (long long)b,
                 (long long)h, (long long)i);
        expect_same_bits(name, tensor_row(t, b, h, i), tensor_row(other, b, h, i), t->dim);
    }
}

/* --------------------------------------------------------------- problems */

void shape_context(const shape *s)
{
    context("attention: batch %lld, heads %lld/%lld, q_len %lld, kv_len %lld, head_dim %lld, "
            "value_dim %lld%s%s, scale %s %g, layouts %d %d %d, place %d, sigma %g",
            (long long)s->batch, (long long)s->q_heads, (long long)s->kv_heads, (long long)s->q_len,
            (long long)s->kv_len, (long long)s->head_dim, (long long)s->value_dim,
            s->causal ? ", causal" : "", s->in_place ? ", in place" : "",
            s->scale_set ? "set" : "default or", (double)s->scale, (int)s->q, (int)s->kv,
            (int)s->out, s->place, (double)s->sigma);
}

problem problem_make(shape s, rng *r)
{
    shape_context(&s);
    problem p = {.s = s};
    p.query = tensor_make(SLOT_Q, s.batch, s.q_heads, s.q_len, s.head_dim, s.q, s.place);
    p.key = tensor_make(SLOT_K, s.batch, s.kv_heads, s.kv_len, s.head_dim, s.kv,
                        s.place ? 1 + (s.place + 5) % (PLACES - 1) : 0);
    p.value = tensor_make(SLOT_V, s.batch, s.kv_heads, s.kv_len, s.value_dim, s.kv, s.place);
    p.out = s.in_place
                ? p.query
                : tensor_make(SLOT_O, s.batch, s.q_heads, s.q_len, s.value_dim, s.out, s.place);
    p.lse = tensor_make(SLOT_L, s.batch, s.q_heads, s.q_len, 1, s.out, s.place);
    if (r) {
        const float sigma = s.sigma != 0.0f ? s.sigma : 1.0f;
        tensor_fill(&p.query, r, sigma);
        tensor_fill(&p.key, r, sigma);
        tensor_fill(&p.value, r, 1.0f);
    }
    p.desc = (qkv_attention_desc){
        .size = sizeof p.desc,
        .flags = (s.causal ? QKV_CAUSAL : 0) | (s.scale_set ? QKV_SCALE_SET : 0),
        .scale = s.scale,
        .batch = s.batch,
        .q_heads = s.q_heads,
        .kv_heads = s.kv_heads,
        .q_len = s.q_len,
        .kv_len = s.kv_len,
        .head_dim = s.head_dim,
        .value_dim = s.value_dim,
        .query = p.query.desc,
        .key = p.key.desc,
        .value = p.value.desc,
        .out = p.out.desc,
    };
    if (!s.no_lse)
        p.desc.lse = p.lse.desc;
    return p;
}

void problem_reset(problem *p)
{
    if (!p->s.in_place)
        canary_fill(p->out.data, p->out.extent);
    canary_fill(p->lse.data, p->lse.extent);
}

static void *scratch_for(const problem *p, int64_t workers, size_t *bytes)
{
    const qkv_status status = qkv_attention_scratch_size(&p->desc, workers, bytes);
    if (status != QKV_OK)
        fail_with("qkv_attention_scratch_size: %s", qkv_strerror(status));
    /* Flush against the page behind it, if that leaves it aligned. */
    return guarded_bytes(SLOT_SCRATCH, *bytes,
                         *bytes % QKV_SCRATCH_ALIGN == 0 ? PLACE_AT_END : PLACE_AT_START);
}

static void freeze_inputs(const problem *p)
{
    guarded_freeze(SLOT_K);
    guarded_freeze(SLOT_V);
    if (!p->s.in_place)
        guarded_freeze(SLOT_Q);
}

static void thaw_inputs(void)
{
    guarded_thaw(SLOT_K);
    guarded_thaw(SLOT_V);
    guarded_thaw(SLOT_Q);
}

qkv_status problem_run(problem *p)
{
    size_t bytes = 0;
    void *scratch = scratch_for(p, 1, &bytes);
    freeze_inputs(p);
    const qkv_status status = qkv_attention(&p->desc, scratch, bytes);
    thaw_inputs();
    return status;
}

qkv_status problem_run_tasks(problem *p, rng *r, int64_t workers)
{
    size_t bytes = 0;
    int64_t count = -1;
    char *scratch = scratch_for(p, workers, &bytes);
    qkv_status status = qkv_attention_task_count(&p->desc, &count);
    if (status != QKV_OK)
        return status;
    int64_t *order = malloc((size_t)(count + 1) * sizeof *order);
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = rng_int(r, 0, i);
        order[i] = order[k];
        order[k] = i;
    }
    freeze_inputs(p);
    for (int64_t i = 0; i < count && status == QKV_OK; i++)
        status =
            qkv_attention_run_task(&p->desc, order[i], rng_int(r, 0, workers - 1), scratch, bytes);
    thaw_inputs();
    free(order);
    return status;
}

static void ask_oracle(const problem *p, oracle_attention *o)
{
    const shape *s = &p->s;
    const int64_t rows = s->batch * s->q_heads * s->q_len;
    const bool standard = !s->scale_set && s->scale == 0.0f;
    *o = (oracle_attention){
        .batch = s->batch,
        .q_heads = s->q_heads,
        .kv_heads = s->kv_heads,
        .q_len = s->q_len,
        .kv_len = s->kv_len,
        .head_dim = s->head_dim,
        .value_dim = s->value_dim,
        .causal = s->causal,
        .scale = standard ? 1.0 / sqrt((double)s->head_dim) : (double)s->scale,
        .q = tensor_doubles(&p->query, D_Q),
        .k = tensor_doubles(&p->key, D_K),
        .v = tensor_doubles(&p->value, D_V),
        .out = doubles(D_OUT, rows * s->value_dim),
        .out_bound = doubles(D_OUT_BOUND, rows * s->value_dim),
        .lse = doubles(D_LSE, rows),
        .lse_bound = doubles(D_LSE_BOUND, rows),
    };
    oracle_attention_run(o);
}

void problem_check(problem *p)
{
    oracle_attention o;
    ask_oracle(p, &o);
    float *queries = malloc((size_t)(p->query.extent + 1) * sizeof *queries);
    memcpy(queries, p->query.data, (size_t)p->query.extent * sizeof *queries);
    for_each_isa(isa)
    {
        memcpy(p->query.data, queries, (size_t)p->query.extent * sizeof *queries);
        problem_reset(p);
        const qkv_status status = problem_run(p);
        if (status != QKV_OK)
            fail_with("%s: %s", qkv_isa_name(), qkv_strerror(status));
        guards_intact();
        tensor_expect(qkv_isa_name(), &p->out, o.out, o.out_bound);
        tensor_only_rows_written("out", &p->out);
        if (!p->s.no_lse)
            tensor_expect("log-sum-exp", &p->lse, o.lse, o.lse_bound);
        tensor_only_rows_written("lse", &p->lse);
        tally(isa, 1);
    }
    memcpy(p->query.data, queries, (size_t)p->query.extent * sizeof *queries);
    free(queries);
}

void check_shape(shape s, rng *r)
{
    problem p = problem_make(s, r);
    problem_check(&p);
}
