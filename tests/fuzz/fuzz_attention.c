/* SPDX-License-Identifier: MIT */
/*
 * qkv_attention() on any descriptor. What is refused must be refused by all
 * functions alike and leave every byte as it was. What is accepted and small
 * enough runs in memory of exactly the described size, as a whole and by
 * tasks, and must give what the f64 oracle gives.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <qkv/qkv.h>

#include "../oracle/oracle.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { Q, K, V, O, L, TENSORS };
enum { MOST_BYTES = 1 << 18, MOST_WORK = 1 << 20, ARENA = 1 << 12 };

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            abort();                                                                               \
    } while (0)

/* A tensor as this file understands the header, without the library's help. */
typedef struct rows {
    int64_t count[3], stride[3], dim, element;
    int32_t dtype;
    __int128 bytes; /* what the descriptor covers */
    bool odd;       /* a size or stride that no memory is made for */
} rows;

typedef struct problem {
    qkv_attention_desc d;
    unsigned char later_fields[sizeof(qkv_attention_desc)]; /* of a newer header's size */
    rows rows[TENSORS];
    void *memory[TENSORS];
    size_t size[TENSORS];
} problem;

static qkv_tensor *tensor_of(qkv_attention_desc *d, int which)
{
    qkv_tensor *const all[TENSORS] = {&d->query, &d->key, &d->value, &d->out, &d->lse};
    return all[which];
}

/* ------------------------------------------------------------ descriptors */

static void take_layout(input *in, qkv_tensor *t, int64_t heads, int64_t count, int64_t dim)
{
    switch (take(in, 1) % 8) {
    case 0: /* [batch][row][head] */
        t->stride_row = heads * dim;
        t->stride_head = dim;
        t->stride_batch = count * heads * dim;
        break;
    case 1: /* gaps */
        t->stride_row = dim + take_int(in, 0, 9);
        t->stride_head = count * t->stride_row + take_int(in, 0, 9);
        t->stride_batch = heads * t->stride_head + take_int(in, 0, 9);
        break;
    case 2: /* repeated memory, or one row */
        t->stride_row = take(in, 1) % 2 ? dim : 0;
        t->stride_head = take(in, 1) % 2 ? dim * count : 0;
        t->flags = QKV_TENSOR_STRIDED;
        break;
    case 3: /* anything small */
        t->stride_row = take_int(in, 0, 99);
        t->stride_head = take_int(in, 0, 99);
        t->stride_batch = take_int(in, 0, 99);
        t->flags = (int32_t)take_int(in, 0, 1);
        break;
    default: /* packed */
        break;
    }
}

/* A descriptor that makes sense, mostly. */
static void take_descriptor(input *in, qkv_attention_desc *d)
{
    static const int64_t heads[] = {0, 1, 1, 2, 3, 4, 6, 8, 16};
    *d = (qkv_attention_desc){.size = sizeof *d};
    d->flags = (int32_t)take_int(in, 0, 3);
    d->scale = d->flags & QKV_SCALE_SET ? (float)take_int(in, -20, 20) / 8.0f : 0.0f;
    d->batch = take_int(in, 0, 3);
    d->q_heads = heads[take(in, 1) % 9];
    d->kv_heads = heads[take(in, 1) % 9];
    d->q_len = take_int(in, 0, take(in, 1) % 4 ? 9 : 70);
    d->kv_len = take_int(in, 0, take(in, 1) % 4 ? 40 : 600);
    d->head_dim = take_int(in, 1, take(in, 1) % 8 ? 40 : 300);
    d->value_dim = take(in, 1) % 2 ? 0 : take_int(in, 1, 80);

    const int64_t q_heads = d->q_heads ? d->q_heads : 1;
    const int64_t kv_heads = d->kv_heads ? d->kv_heads : q_heads;
    const int64_t value_dim = d->value_dim ? d->value_dim : d->head_dim;
    take_layout(in, &d->query, q_heads, d->q_len, d->head_dim);
    take_layout(in, &d->key, kv_heads, d->kv_len, d->head_dim);
    take_layout(in, &d->value, kv_heads, d->kv_len, value_dim);
    take_layout(in, &d->out, q_heads, d->q_len, value_dim);
    take_layout(in, &d->lse, q_heads, d->q_len, 1);
    if (take(in, 1) % 2)
        for (int i = 0; i < L; i++)
            tensor_of(d, i)->dtype = (int32_t)take_int(in, 0, 2);
}

/*
 * Some of its numbers become anything at all. Not the pointers: those to
 * tensors are set later, the others stay NULL, since a pointer to nothing is
 * the caller's fault.
 */
static void damage(input *in, qkv_attention_desc *d)
{
    int64_t *const numbers[] = {&d->batch,
                                &d->q_heads,
                                &d->kv_heads,
                                &d->q_len,
                                &d->kv_len,
                                &d->head_dim,
                                &d->value_dim,
                                &d->page_size,
                                &d->pages,
                                &d->page_table_stride,
                                &d->window_left,
                                &d->window_right,
                                &d->sink_tokens,
                                &d->tree_stride,
                                &d->mask.stride_query,
                                &d->key_scale.stride_row,
                                &d->weights.stride_head};
    const size_t plain = sizeof numbers / sizeof *numbers;
    for (int64_t n = take_int(in, 0, 3); n > 0; n--) {
        const size_t which = take(in, 1) % (plain + TENSORS + 4);
        uint64_t value = take(in, 8);
        if (take(in, 1) % 2)
            value = UINT64_C(1) << (value % 64);
        if (which < plain) {
            memcpy(numbers[which], &value, sizeof value);
        } else if (which < plain + TENSORS) {
            qkv_tensor *t = tensor_of(d, (int)(which - plain));
            int64_t *const strides[] = {&t->stride_batch, &t->stride_head, &t->stride_row};
            if (value % 4 < 3)
                *strides[value % 4] = (int64_t)(value >> 2);
            else
                t->dtype = (int32_t)(value >> 8) % 16;
        } else if (which == plain + TENSORS) {
            memcpy(&d->scale, &value, sizeof d->scale);
        } else if (which == plain + TENSORS + 1) {
            memcpy(&d->softcap, &value, sizeof d->softcap);
        } else if (which == plain + TENSORS + 2) {
            d->flags = (int32_t)(value % 2 ? value >> 1 & 63 : value >> 1);
        } else {
            d->size = value % 2 ? (size_t)(value >> 1) % (2 * sizeof *d) : (size_t)value | 1 << 20;
        }
    }
}

/* What the plain oracle knows: no option of those that came after 0.1, and logits that
 * f32 can hold, of the dot products that fill() leads to. */
static bool is_plain(const qkv_attention_desc *d)
{
    static const qkv_attention_desc none;
    const size_t first = offsetof(qkv_attention_desc, q_starts);
    bool plain =
        !(d->flags & ~(QKV_CAUSAL | QKV_SCALE_SET)) &&
        memcmp((const char *)d + first, (const char *)&none + first, sizeof none - first) == 0;
    qkv_attention_desc copy = *d;
    for (int i = 0; i < TENSORS; i++)
        plain &= tensor_of(&copy, i)->dtype <= QKV_BF16;
    return plain && d->size == sizeof *d && fabsf(d->scale) <= 0x1p100f;
}

/* ----------------------------------------------------------------- memory */

static void measure(problem *p)
{
    const qkv_attention_desc *d = &p->d;
    const int64_t batch = d->batch ? d->batch : 1, q_heads = d->q_heads ? d->q_heads : 1;
    const int64_t kv_heads = d->kv_heads ? d->kv_heads : q_heads;
    const int64_t value_dim = d->value_dim ? d->value_dim : d->head_dim;
    const int64_t shapes[TENSORS][4] = {{batch, q_heads, d->q_len, d->head_dim},
                                        {batch, kv_heads, d->kv_len, d->head_dim},
                                        {batch, kv_heads, d->kv_len, value_dim},
                                        {batch, q_heads, d->q_len, value_dim},
                                        {batch, q_heads, d->q_len, 1}};
    for (int i = 0; i < TENSORS; i++) {
        const qkv_tensor *t = tensor_of(&p->d, i);
        rows *r = &p->rows[i];
        *r = (rows){.count = {shapes[i][0], shapes[i][1], shapes[i][2]},
                    .stride = {t->stride_batch, t->stride_head, t->stride_row},
                    .dim = shapes[i][3],
                    .dtype = t->dtype,
                    .element = t->dtype == QKV_F32 ? 4 : 2}; /* at most 2 in narrow types */
        __int128 all = r->dim;
        for (int a = 0; a < 3; a++) {
            if (r->count[a] < 0 || r->dim < 0 || r->stride[a] < 0)
                r->odd = true;
            if (r->count[a] == 0 || r->dim == 0)
                all = 0;
        }
        if (r->odd)
            continue;
        if (!(t->flags & QKV_TENSOR_STRIDED) && !t->stride_batch && !t->stride_head &&
            !t->stride_row) {
            const __int128 head = (__int128)r->count[2] * r->dim;
            const __int128 whole = head > INT64_MAX ? head : head * r->count[1];
            r->odd = whole > INT64_MAX;
            r->stride[2] = r->dim;
            r->stride[1] = (int64_t)head;
            r->stride[0] = (int64_t)whole;
            if (r->odd)
                continue; /* those strides mean nothing */
        }
        const __int128 enough = (__int128)1 << 100; /* no tensor has as many elements */
        for (int a = 0; a < 3 && all > 0; a++) {
            const __int128 steps = r->count[a] - 1;
            const bool beyond = steps > 0 && r->stride[a] > enough / steps;
            all = beyond ? enough : all + steps * r->stride[a];
        }
        r->bytes = all * r->element;
    }
}

/* Each tensor's memory as large as it is described, or a stand-in. */
static bool take_memory(input *in, problem *p)
{
    bool whole = true;
    const uint64_t shared = take(in, 1), absent = take(in, 1);
    for (int i = 0; i < TENSORS; i++) {
        const bool fits = !p->rows[i].odd && p->rows[i].bytes <= MOST_BYTES;
        whole &= fits;
        p->size[i] = fits ? (size_t)p->rows[i].bytes : ARENA;
        p->memory[i] = calloc(p->size[i], 1);
        tensor_of(&p->d, i)->data = p->memory[i];
    }
    if (shared % 4 == 0 && p->rows[O].bytes == p->rows[Q].bytes)
        p->d.out.data = p->d.query.data;
    if (absent % 4 != 0)
        p->d.lse.data = NULL;
    if (absent % 32 == 31)
        tensor_of(&p->d, (int)(absent / 32) % TENSORS)->data = NULL;
    return whole;
}

static float take_value(input *in, uint64_t kind)
{
    const int64_t raw = take_int(in, -128, 127);
    if (kind % 8 == 7 && raw == 77)
        return NAN;
    return kind % 4 == 3 ? (float)raw : (float)raw / 64.0f;
}

static float read_element(const void *at, int32_t dtype)
{
    uint16_t half;
    uint32_t bits;
    float x;
    if (dtype == QKV_F32) {
        memcpy(&x, at, sizeof x);
        return x;
    }
    memcpy(&half, at, sizeof half);
    if (dtype == QKV_BF16) {
        bits = (uint32_t)half << 16;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31)
        return fraction ? NAN : (float)sign * INFINITY;
    return (float)(sign *
                   (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24)));
}

/* Bytes that are small numbers in the tensor's type; now and then a NaN. */
static void fill(input *in, const rows *r, void *memory)
{
    const uint64_t kind = take(in, 1);
    uint64_t repeat = take(in, 4);
    for (int64_t at = 0; at < (int64_t)r->bytes; at += r->element) {
        /* The input's bytes first; then numbers made of one of them. */
        input one = {(const uint8_t *)&repeat, 1};
        repeat = repeat * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        repeat = repeat >> 33 | repeat << 31;
        const float x = take_value(in->left ? in : &one, kind);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (r->dtype == QKV_F32) {
            memcpy((char *)memory + at, &bits, 4);
        } else {
            /* Truncated to bf16, or an f16 of moderate size from the same bits. */
            const uint16_t f16 =
                isnan(x) ? 0x7e00 : (uint16_t)((bits >> 31 << 15) | 0x3400 | (bits >> 13 & 0x7ff));
            const uint16_t half = r->dtype == QKV_BF16 ? (uint16_t)(bits >> 16) : f16;
            memcpy((char *)memory + at, &half, 2);
        }
    }
}

/* ------------------------------------------------------------- comparison */

static const char *row_at(const rows *r, const void *memory, int64_t b, int64_t h, int64_t i)
{
    return (const char *)memory +
           (b * r->stride[0] + h * r->stride[1] + i * r->stride[2]) * r->element;
}

static double *doubles_of(const rows *r, const void *memory)
{
    const int64_t n = r->count[0] * r->count[1] * r->count[2] * r->dim;
    double *all = malloc((size_t)(n + 1) * sizeof *all), *at = all;
    for (int64_t b = 0; b < r->count[0]; b++)
        for (int64_t h = 0; h < r->count[1]; h++)
            for (int64_t i = 0; i < r->count[2]; i++)
                for (int64_t d = 0; d < r->dim; d++)
                    *at++ =
                        (double)read_element(row_at(r, memory, b, h, i) + d * r->element, r->dtype);
    return all;
}

/* Rounding an exact result to the output's type, at most. */
static double output_rounding(int32_t dtype, double want)
{
    return dtype == QKV_F16    ? fabs(want) * 0x1p-10 + 0x1p-24
           : dtype == QKV_BF16 ? fabs(want) * 0x1p-7
                               : 0;
}

static void expect_rows(const rows *r, const void *memory, const double *want, const double *bound)
{
    double *got = doubles_of(r, memory);
    const int64_t n = r->count[0] * r->count[1] * r->count[2] * r->dim;
    for (int64_t i = 0; i < n; i++) {
        const double most = bound[i] + output_rounding(r->dtype, fabs(want[i]) + bound[i]);
        if (isnan(want[i]))
            REQUIRE(isnan(got[i]));
        else if (isinf(want[i]))
            REQUIRE(got[i] == want[i]);
        else if (most < HUGE_VAL) /* beyond, and as a NaN, the bound says nothing */
            REQUIRE(fabs(got[i] - want[i]) <= most);
    }
    free(got);
}

static void ask_oracle(problem *p, oracle_attention *o)
{
    const qkv_attention_desc *d = &p->d;
    const rows *q = &p->rows[Q], *k = &p->rows[K], *out = &p->rows[O];
    const int64_t n_rows = q->count[0] * q->count[1] * q->count[2];
    const size_t outputs = (size_t)(n_rows * out->dim + 1), n = (size_t)n_rows + 1;
    *o = (oracle_attention){
        .batch = q->count[0],
        .q_heads = q->count[1],
        .kv_heads = k->count[1],
        .q_len = d->q_len,
        .kv_len = d->kv_len,
        .head_dim = d->head_dim,
        .value_dim = out->dim,
        .causal = (d->flags & QKV_CAUSAL) != 0,
        .scale = !(d->flags & QKV_SCALE_SET) && d->scale == 0.0f ? 1.0 / sqrt((double)d->head_dim)
                                                                 : (double)d->scale,
        .q = doubles_of(q, d->query.data),
        .k = doubles_of(k, d->key.data),
        .v = doubles_of(&p->rows[V], d->value.data),
        .out = calloc(outputs, sizeof(double)),
        .out_bound = calloc(outputs, sizeof(double)),
        .lse = calloc(n, sizeof(double)),
        .lse_bound = calloc(n, sizeof(double)),
    };
    oracle_attention_run(o);
}

static void free_oracle(oracle_attention *o)
{
    free((void *)(uintptr_t)o->q);
    free((void *)(uintptr_t)o->k);
    free((void *)(uintptr_t)o->v);
    free(o->out);
    free(o->out_bound);
    free(o->lse);
    free(o->lse_bound);
}

/* -------------------------------------------------------------------- run */

static void *scratch_of(size_t bytes)
{
    void *scratch = NULL;
    REQUIRE(posix_memalign(&scratch, QKV_SCRATCH_ALIGN, bytes ? bytes : 1) == 0);
    make_unknown(scratch, bytes);
    return scratch;
}

static void run_whole(const qkv_attention_desc *d)
{
    size_t bytes = 0;
    REQUIRE(qkv_attention_scratch_size(d, 1, &bytes) == QKV_OK);
    void *scratch = scratch_of(bytes);
    if (bytes > 0 && is_plain(d)) /* others need less than tasks do */
        REQUIRE(qkv_attention(d, scratch, bytes - 1) == QKV_E_SCRATCH);
    REQUIRE(qkv_attention(d, scratch, bytes) == QKV_OK);
    free(scratch);
}

/* By tasks, from the last to the first, on two workers in turn. */
static void run_tasks(const qkv_attention_desc *d)
{
    size_t bytes = 0;
    int64_t count = 0;
    REQUIRE(qkv_attention_scratch_size(d, 2, &bytes) == QKV_OK);
    REQUIRE(qkv_attention_task_count(d, &count) == QKV_OK);
    void *scratch = scratch_of(bytes);
    REQUIRE(qkv_attention_begin(d, scratch, bytes) == QKV_OK);
    for (int64_t task = count - 1; task >= 0; task--)
        REQUIRE(qkv_attention_run_task(d, task, task % 2, scratch, bytes) == QKV_OK);
    REQUIRE(count == 0 || qkv_attention_run_task(d, count, 0, scratch, bytes) == QKV_E_INDEX);
    free(scratch);
}

static void check_run(problem *p)
{
    const bool plain = is_plain(&p->d);
    oracle_attention o = {.batch = 0};
    if (plain)
        ask_oracle(p, &o);
    const size_t out_bytes = (size_t)p->rows[O].bytes;
    void *before = malloc(out_bytes + 1), *first = malloc(out_bytes + 1);
    if (out_bytes)
        memcpy(before, p->d.out.data, out_bytes);
    run_whole(&p->d);
    if (plain)
        expect_rows(&p->rows[O], p->d.out.data, o.out, o.out_bound);
    if (plain && p->d.lse.data)
        expect_rows(&p->rows[L], p->d.lse.data, o.lse, o.lse_bound);
    if (out_bytes) {
        memcpy(first, p->d.out.data, out_bytes);
        memcpy(p->d.out.data, before, out_bytes); /* the queries again, if in place */
    }
    run_tasks(&p->d);
    REQUIRE(!out_bytes || memcmp(first, p->d.out.data, out_bytes) == 0);
    free(before);
    free(first);
    free_oracle(&o);
}

/* Every function gives the same verdict, and a refusal writes nothing. */
static qkv_status verdict(problem *p)
{
    qkv_attention_support support;
    size_t bytes = 0;
    int64_t count = 0;
    const qkv_status status = qkv_attention_supports(&p->d, &support);
    const qkv_status sized = qkv_attention_scratch_size(&p->d, 1, &bytes);
    REQUIRE(sized == status);
    REQUIRE(qkv_attention_task_count(&p->d, &count) == status);
    REQUIRE(qkv_strerror(status) != NULL);
    if (status != QKV_OK) {
        void *scratch = scratch_of(4096);
        const size_t size = p->size[O];
        unsigned char *out = p->memory[O], *copy = malloc(size + 1);
        if (size)
            memcpy(copy, out, size);
        REQUIRE(qkv_attention(&p->d, scratch, 4096) == status);
        REQUIRE(!size || memcmp(copy, out, size) == 0);
        free(copy);
        free(scratch);
    }
    return status;
}

/* At least what the oracle has to do. Rows without elements take no memory, nor do
 * heads and sequences without rows: there may be any number of them. */
static double work_of(const problem *p)
{
    double work = (double)p->rows[Q].count[0] * (double)p->rows[Q].count[1] * (double)p->d.q_len *
                  (double)(p->d.kv_len + 1) * (double)(p->d.head_dim + p->rows[O].dim);
    for (int i = 0; i < TENSORS; i++) {
        const rows *r = &p->rows[i];
        double steps = 1.0 + (double)r->dim;
        for (int axis = 0; axis < 3; axis++)
            steps *= 1.0 + (double)r->count[axis];
        work += steps;
    }
    return work;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    problem p = {.d = {.size = 0}};
    take_descriptor(&in, &p.d);
    const bool damaged = take(&in, 1) % 2;
    if (damaged)
        damage(&in, &p.d);
    const uint64_t isa = take(&in, 1);
    qkv_isa_info info;
    REQUIRE(qkv_isa_get((int32_t)(isa % (uint64_t)qkv_isa_count()), &info) == QKV_OK);
    REQUIRE(qkv_isa_select(NULL) == QKV_OK);
    if (info.supported && info.compiled)
        REQUIRE(qkv_isa_select(info.name) == QKV_OK);

    measure(&p);
    const bool whole = take_memory(&in, &p);
    for (int i = 0; i < TENSORS && whole; i++)
        fill(&in, &p.rows[i], p.memory[i]);

    const qkv_status status = verdict(&p);
    if (status == QKV_OK && whole) {
        if (work_of(&p) <= MOST_WORK)
            check_run(&p);
    }
    for (int i = 0; i < TENSORS; i++)
        free(p.memory[i]);
    return 0;
}
