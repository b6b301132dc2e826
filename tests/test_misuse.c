/* SPDX-License-Identifier: MIT */
/*
 * Every wrong argument gets its code, from every function that looks at it,
 * and no output changes by a byte.
 */
#include "problem.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void expect_status(const char *call, const char *what, qkv_status got, qkv_status want)
{
    if (got != want)
        fail_with("%s after '%s': %d (%s), expected %d (%s)", call, what, (int)got,
                  qkv_strerror(got), (int)want, qkv_strerror(want));
}

static void *moved(void *pointer, ptrdiff_t bytes)
{
    return (char *)pointer + bytes;
}

#define HUGE_SIZE (INT64_C(1) << 62)

/* One wrong thing a case: 'what' is its text, 'want' what it must give. */
#define MISUSE(status, ...)                                                                        \
    case __COUNTER__ - FIRST - 1:                                                                  \
        *want = (status);                                                                          \
        *what = #__VA_ARGS__;                                                                      \
        __VA_ARGS__;                                                                               \
        return true;

/* -------------------------------------------------------------- attention */

static problem base_problem(rng *r)
{
    problem p = problem_make((shape){.batch = 2,
                                     .q_heads = 4,
                                     .kv_heads = 2,
                                     .q_len = 5,
                                     .kv_len = 7,
                                     .head_dim = 6,
                                     .value_dim = 6,
                                     .q = LAYOUT_BSHD,
                                     .kv = LAYOUT_BSHD,
                                     .out = LAYOUT_BSHD},
                             r);
    p.desc.lse = p.lse.desc;
    return p;
}

static bool misuse_attention(int n, qkv_attention_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_SIZE, d->size = 0)
        MISUSE(QKV_E_SIZE, d->size = 8)
        MISUSE(QKV_E_SIZE, d->size = offsetof(qkv_attention_desc, q_starts) - 8)
        MISUSE(QKV_E_SIZE, d->size = SIZE_MAX)
        MISUSE(QKV_E_SIZE, d->size = sizeof *d - 4)
        MISUSE(QKV_E_FLAGS, d->flags = 1 << 30)
        MISUSE(QKV_E_FLAGS, d->flags = -1)
        MISUSE(QKV_E_FLAGS, d->flags = QKV_WEIGHT_OUT_IN)
        MISUSE(QKV_E_VALUE, d->scale = NAN)
        MISUSE(QKV_E_VALUE, d->scale = INFINITY)
        MISUSE(QKV_E_VALUE, d->scale = -INFINITY)
        MISUSE(QKV_E_VALUE, d->scale = NAN; d->flags = QKV_SCALE_SET)
        MISUSE(QKV_E_SHAPE, d->batch = -1)
        MISUSE(QKV_E_SHAPE, d->q_heads = -1)
        MISUSE(QKV_E_SHAPE, d->kv_heads = -1)
        MISUSE(QKV_E_SHAPE, d->q_len = -1)
        MISUSE(QKV_E_SHAPE, d->kv_len = -1)
        MISUSE(QKV_E_SHAPE, d->head_dim = -1)
        MISUSE(QKV_E_SHAPE, d->head_dim = 0)
        MISUSE(QKV_E_SHAPE, d->value_dim = -1)
        MISUSE(QKV_E_SHAPE, d->batch = INT64_MIN)
        MISUSE(QKV_E_SHAPE, d->head_dim = INT64_MIN)
        MISUSE(QKV_E_SHAPE, d->kv_heads = 3)
        MISUSE(QKV_E_SHAPE, d->kv_heads = 8)
        MISUSE(QKV_E_NULL, d->query.data = NULL)
        MISUSE(QKV_E_NULL, d->key.data = NULL)
        MISUSE(QKV_E_NULL, d->value.data = NULL)
        MISUSE(QKV_E_NULL, d->out.data = NULL)
        MISUSE(QKV_E_DTYPE, d->query.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->key.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->value.dtype = -1)
        MISUSE(QKV_E_DTYPE, d->out.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->lse.dtype = 999)
        MISUSE(QKV_E_UNSUPPORTED, d->query.dtype = QKV_I8)
        MISUSE(QKV_E_UNSUPPORTED, d->query.dtype = QKV_F8_E4M3)
        MISUSE(QKV_E_DTYPE, d->key.dtype = QKV_BOOL)
        MISUSE(QKV_E_DTYPE, d->value.dtype = QKV_BIT)
        MISUSE(QKV_E_SHAPE, d->key.dtype = QKV_Q4_0)
        MISUSE(QKV_E_SHAPE, d->value.dtype = QKV_Q8_0)
        MISUSE(QKV_E_STRIDE, d->key.dtype = QKV_Q8_0; d->head_dim = 32)
        MISUSE(QKV_E_NULL, d->key.dtype = QKV_I8)
        MISUSE(QKV_E_NULL, d->value.dtype = QKV_I8)
        MISUSE(QKV_E_FLAGS, d->key_scale.data = d->lse.data)
        MISUSE(QKV_E_FLAGS, d->value_scale.data = d->lse.data)
        MISUSE(QKV_E_DTYPE, d->key.dtype = QKV_I8; d->key_scale = d->key;
               d->key_scale.dtype = QKV_F16)
        MISUSE(QKV_E_OVERLAP, d->value.dtype = QKV_I8; d->value_scale.data = d->lse.data)
        MISUSE(QKV_E_UNSUPPORTED, d->out.dtype = QKV_Q4_0)
        MISUSE(QKV_E_FLAGS, d->query.flags |= 2)
        MISUSE(QKV_E_FLAGS, d->key.flags |= INT_MIN)
        MISUSE(QKV_E_FLAGS, d->value.flags |= 1024)
        MISUSE(QKV_E_FLAGS, d->out.flags |= 2)
        MISUSE(QKV_E_FLAGS, d->lse.flags |= 2)
        MISUSE(QKV_E_STRIDE, d->query.stride_row = -24)
        MISUSE(QKV_E_STRIDE, d->query.stride_head = -1)
        MISUSE(QKV_E_STRIDE, d->key.stride_batch = -1)
        MISUSE(QKV_E_STRIDE, d->key.stride_row = INT64_MIN)
        MISUSE(QKV_E_STRIDE, d->value.stride_head = -1)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = -24)
        MISUSE(QKV_E_STRIDE, d->lse.stride_row = -1)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = 0)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = 5)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = 23)
        MISUSE(QKV_E_STRIDE, d->out.stride_head = 0)
        MISUSE(QKV_E_STRIDE, d->out.stride_head = 5)
        MISUSE(QKV_E_STRIDE, d->out.stride_batch = 0)
        MISUSE(QKV_E_STRIDE, d->out.stride_batch = 119)
        MISUSE(QKV_E_STRIDE, d->lse.stride_row = 0)
        MISUSE(QKV_E_STRIDE, d->lse.stride_batch = 0)
        MISUSE(QKV_E_ALIGN, d->query.data = moved(d->query.data, 1))
        MISUSE(QKV_E_ALIGN, d->key.data = moved(d->key.data, 2))
        MISUSE(QKV_E_ALIGN, d->value.data = moved(d->value.data, 3))
        MISUSE(QKV_E_ALIGN, d->out.data = moved(d->out.data, 1))
        MISUSE(QKV_E_ALIGN, d->lse.data = moved(d->lse.data, 2))
        MISUSE(QKV_E_OVERLAP, d->out.data = d->key.data)
        MISUSE(QKV_E_OVERLAP, d->out.data = d->value.data)
        MISUSE(QKV_E_OVERLAP, d->out.data = moved(d->value.data, 8))
        MISUSE(QKV_E_OVERLAP, d->out.data = moved(d->query.data, 4))
        MISUSE(QKV_E_OVERLAP, d->out.data = moved(d->query.data, 48))
        MISUSE(QKV_E_OVERLAP, d->out.data = d->query.data; d->value_dim = 5)
        MISUSE(QKV_E_OVERLAP, d->out.data = d->query.data; d->out.stride_row = 48;
               d->out.stride_batch = 240)
        MISUSE(QKV_E_OVERLAP, d->query.data = d->out.data; d->query.stride_batch = 0)
        MISUSE(QKV_E_OVERLAP, d->key.data = moved(d->out.data, 40))
        MISUSE(QKV_E_OVERLAP, d->lse.data = d->out.data)
        MISUSE(QKV_E_OVERLAP, d->lse.data = d->query.data)
        MISUSE(QKV_E_OVERLAP, d->lse.data = moved(d->key.data, 4))
        MISUSE(QKV_E_OVERLAP, d->lse.data = moved(d->value.data, 12))
        MISUSE(QKV_E_OVERFLOW, d->q_len = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->kv_len = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->batch = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->q_heads = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->head_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->value_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->value_dim = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->kv_len = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->kv_len = INT64_MAX - 100; /* of one row, repeated */
               d->key.stride_batch = d->key.stride_head = d->key.stride_row = 0;
               d->value.stride_batch = d->value.stride_head = d->value.stride_row = 0;
               d->key.flags = d->value.flags = QKV_TENSOR_STRIDED)
        MISUSE(QKV_E_OVERFLOW, d->query.stride_row = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->key.stride_row = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->value.stride_batch = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->out.stride_batch = INT64_MAX - 4)
        MISUSE(QKV_E_OVERFLOW, d->out.stride_row = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->lse.stride_row = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->key.stride_row = INT64_C(1) << 59)
        MISUSE(QKV_E_OVERFLOW, d->batch = INT64_C(1) << 40; d->q_heads = INT64_C(1) << 40;
               memset(&d->query.stride_batch, 0, 24); d->query.flags = 0)
        MISUSE(QKV_E_OVERFLOW, d->key.data = (void *)(UINTPTR_MAX - 63))
        /* Arrays of a number a head that no memory holds, though nothing is written. */
        MISUSE(QKV_E_OVERFLOW, d->q_len = 0; d->q_heads = HUGE_SIZE; d->slopes = d->key.data)
        MISUSE(QKV_E_OVERFLOW, d->q_len = 0; d->q_heads = HUGE_SIZE; d->head_scales = d->key.data)
        MISUSE(QKV_E_OVERFLOW, d->q_len = 0; d->q_heads = HUGE_SIZE; d->sinks = d->key.data)
    default:
        return false;
    }
}

static void outputs_intact(const problem *p, const char *what)
{
    if (!canary_intact(p->out.data, p->out.extent))
        fail_with("'%s': the output has changed", what);
    if (!canary_intact(p->lse.data, p->lse.extent))
        fail_with("'%s': the log-sum-exp has changed", what);
}

Test(misuse, attention)
{
    rng r = rng_make("misuse attention");
    for_each_isa(isa)
    {
        context("%s", qkv_isa_name());
        problem p = base_problem(&r);
        size_t bytes = 0;
        cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &bytes), QKV_OK);
        void *scratch = scratch_alloc(bytes);
        qkv_status want = QKV_OK;
        const char *what = "";
        int n = 0;
        for (;; n++) {
            qkv_attention_desc d = p.desc;
            if (!misuse_attention(n, &d, &what, &want))
                break;
            qkv_attention_support support;
            size_t size;
            int64_t tasks;
            expect_status("supports", what, qkv_attention_supports(&d, &support), want);
            expect_status("supports", what, qkv_attention_supports(&d, NULL), want);
            expect_status("scratch_size", what, qkv_attention_scratch_size(&d, 1, &size), want);
            expect_status("task_count", what, qkv_attention_task_count(&d, &tasks), want);
            expect_status("attention", what, qkv_attention(&d, scratch, bytes), want);
            expect_status("run_task", what, qkv_attention_run_task(&d, 0, 0, scratch, bytes), want);
            outputs_intact(&p, what);
            tally(isa, 1);
        }
        cr_assert_gt(n, 80);
        free(scratch);
    }
}

/* Packed tensors of small sizes, which are checked in fewer steps than others. */
static bool misuse_packed(int n, qkv_attention_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_NULL, d->query.data = NULL)
        MISUSE(QKV_E_NULL, d->key.data = NULL)
        MISUSE(QKV_E_NULL, d->value.data = NULL)
        MISUSE(QKV_E_NULL, d->out.data = NULL)
        MISUSE(QKV_E_ALIGN, d->query.data = moved(d->query.data, 2))
        MISUSE(QKV_E_ALIGN, d->key.data = moved(d->key.data, 1))
        MISUSE(QKV_E_ALIGN, d->value.data = moved(d->value.data, 3))
        MISUSE(QKV_E_ALIGN, d->out.data = moved(d->out.data, 2))
        MISUSE(QKV_E_ALIGN, d->lse.data = moved(d->lse.data, 2))
        MISUSE(QKV_E_DTYPE, d->query.dtype = -1)
        MISUSE(QKV_E_DTYPE, d->key.dtype = QKV_BIT + 1)
        MISUSE(QKV_E_UNSUPPORTED, d->out.dtype = QKV_Q8_0)
        MISUSE(QKV_E_FLAGS, d->key.flags = 2)
        MISUSE(QKV_E_FLAGS, d->out.flags = INT_MIN)
        MISUSE(QKV_E_STRIDE, d->query.stride_head = -1)
        MISUSE(QKV_E_STRIDE, d->out.flags = QKV_TENSOR_STRIDED)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = 5)
        MISUSE(QKV_E_OVERLAP, d->out.data = d->key.data)
        MISUSE(QKV_E_OVERLAP, d->out.data = moved(d->value.data, 4))
        MISUSE(QKV_E_OVERLAP, d->out.data = moved(d->query.data, 4))
        MISUSE(QKV_E_OVERLAP, d->lse.data = moved(d->out.data, 4))
        MISUSE(QKV_E_OVERLAP, d->lse.data = d->value.data)
        MISUSE(QKV_E_OVERFLOW, d->kv_len = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->batch = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->q_len = d->kv_len = INT64_C(1) << 60)
        MISUSE(QKV_E_OVERFLOW, d->key.data = (void *)(UINTPTR_MAX - 63))
        MISUSE(QKV_E_OVERFLOW, d->query.data = (void *)(UINTPTR_MAX - 3))
    default:
        return false;
    }
}

Test(misuse, packed)
{
    rng r = rng_make("misuse packed");
    problem p = problem_make((shape){.batch = 2,
                                     .q_heads = 4,
                                     .kv_heads = 2,
                                     .q_len = 1,
                                     .kv_len = 7,
                                     .head_dim = 6,
                                     .value_dim = 6},
                             &r);
    qkv_tensor *tensors[] = {&p.desc.query, &p.desc.key, &p.desc.value, &p.desc.out, &p.desc.lse};
    p.desc.lse = p.lse.desc;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        *tensors[i] = (qkv_tensor){.data = tensors[i]->data};
    size_t bytes = 0;
    cr_assert_eq(qkv_attention_scratch_size(&p.desc, 1, &bytes), QKV_OK);
    void *scratch = scratch_alloc(bytes);
    const char *what = "";
    qkv_status want = QKV_OK;
    for (int n = 0;; n++) {
        qkv_attention_desc d = p.desc;
        if (!misuse_packed(n, &d, &what, &want))
            break;
        expect_status("supports", what, qkv_attention_supports(&d, NULL), want);
        expect_status("attention", what, qkv_attention(&d, scratch, bytes), want);
        expect_status("run_task", what, qkv_attention_run_task(&d, 0, 0, scratch, bytes), want);
        outputs_intact(&p, what);
    }
    cr_assert_eq(qkv_attention(&p.desc, scratch, bytes), QKV_OK);
    free(scratch);
}

Test(misuse, attention_calls)
{
    rng r = rng_make("misuse calls");
    for_each_isa(isa)
    {
        context("%s", qkv_isa_name());
        problem p = base_problem(&r);
        size_t bytes = 0, size = 0;
        int64_t tasks = 0;
        cr_assert_eq(qkv_attention_scratch_size(&p.desc, 2, &bytes), QKV_OK);
        cr_assert_eq(qkv_attention_task_count(&p.desc, &tasks), QKV_OK);
        const size_t one = bytes / 2;
        char *scratch = scratch_alloc(bytes + 64);
        const qkv_attention_desc *d = &p.desc;

        expect_status("supports", "NULL", qkv_attention_supports(NULL, NULL), QKV_E_NULL);
        expect_status("size", "NULL", qkv_attention_scratch_size(NULL, 1, &size), QKV_E_NULL);
        expect_status("size", "bytes", qkv_attention_scratch_size(d, 1, NULL), QKV_E_NULL);
        expect_status("size", "0", qkv_attention_scratch_size(d, 0, &size), QKV_E_INDEX);
        expect_status("size", "-1", qkv_attention_scratch_size(d, -1, &size), QKV_E_INDEX);
        expect_status("size", "many", qkv_attention_scratch_size(d, INT64_MAX, &size),
                      QKV_E_OVERFLOW);
        expect_status("count", "NULL", qkv_attention_task_count(NULL, &tasks), QKV_E_NULL);
        expect_status("count", "count", qkv_attention_task_count(d, NULL), QKV_E_NULL);
        expect_status("attention", "NULL", qkv_attention(NULL, scratch, bytes), QKV_E_NULL);
        expect_status("attention", "no scratch", qkv_attention(d, NULL, bytes), QKV_E_SCRATCH);
        expect_status("attention", "size 0", qkv_attention(d, scratch, 0), QKV_E_SCRATCH);
        expect_status("attention", "size - 1", qkv_attention(d, scratch, one - 1), QKV_E_SCRATCH);
        for (int off = 1; off < QKV_SCRATCH_ALIGN; off += off < 4 ? 1 : 4)
            expect_status("attention", "misaligned", qkv_attention(d, scratch + off, one),
                          QKV_E_SCRATCH);
        expect_status("run", "task -1", qkv_attention_run_task(d, -1, 0, scratch, bytes),
                      QKV_E_INDEX);
        expect_status("run", "task", qkv_attention_run_task(d, tasks, 0, scratch, bytes),
                      QKV_E_INDEX);
        expect_status("run", "task", qkv_attention_run_task(d, INT64_MAX, 0, scratch, bytes),
                      QKV_E_INDEX);
        expect_status("run", "worker -1", qkv_attention_run_task(d, 0, -1, scratch, bytes),
                      QKV_E_INDEX);
        expect_status("run", "worker", qkv_attention_run_task(d, 0, INT64_MAX, scratch, bytes),
                      QKV_E_INDEX);
        expect_status("run", "scratch", qkv_attention_run_task(d, 0, 1, scratch, bytes - 1),
                      QKV_E_SCRATCH);
        expect_status("run", "scratch", qkv_attention_run_task(d, 0, 2, scratch, bytes),
                      QKV_E_SCRATCH);
        expect_status("run", "NULL", qkv_attention_run_task(d, 0, 0, NULL, bytes), QKV_E_SCRATCH);

        /* Scratch memory that lies over a tensor. */
        qkv_attention_desc over = p.desc;
        over.query.data = scratch;
        expect_status("attention", "scratch", qkv_attention(&over, scratch, bytes), QKV_E_OVERLAP);
        over = p.desc;
        over.lse.data = scratch + one - 4;
        expect_status("attention", "scratch", qkv_attention(&over, scratch, bytes), QKV_E_OVERLAP);
        outputs_intact(&p, "calls");
        tally(isa, 20);
        free(scratch);
    }
}

/* A program compiled with an older header: nothing behind its descriptor is read. */
Test(misuse, older_descriptors)
{
    static const size_t sizes[] = {272, 616};
    rng r = rng_make("older descriptors");
    problem p = base_problem(&r);
    enum { WANT = 7, GOT = 8 };
    cr_assert_eq(problem_run(&p), QKV_OK);
    const double *want = tensor_doubles(&p.out, WANT);
    const int64_t n = p.s.batch * p.s.q_heads * p.s.q_len * p.s.value_dim;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        problem_reset(&p);
        qkv_attention_desc *older = guarded_bytes(SLOT_FREE, sizes[i], PLACE_AT_END);
        memcpy(older, &p.desc, sizes[i]);
        older->size = sizes[i];
        size_t bytes;
        cr_assert_eq(qkv_attention_scratch_size(older, 1, &bytes), QKV_OK);
        void *scratch = scratch_alloc(bytes);
        cr_assert_eq(qkv_attention(older, scratch, bytes), QKV_OK);
        cr_assert_arr_eq(tensor_doubles(&p.out, GOT), want, (size_t)n * sizeof *want);
        free(scratch);
    }
}

/* A descriptor of a newer header: its unknown tail may hold only zeros. */
Test(misuse, descriptor_of_another_version)
{
    rng r = rng_make("misuse size");
    problem p = base_problem(&r);
    struct {
        qkv_attention_desc d;
        unsigned char tail[40];
    } newer = {.d = p.desc};
    newer.d.size = sizeof newer;
    cr_assert_eq(qkv_attention_supports(&newer.d, NULL), QKV_OK);
    for (size_t i = 0; i < sizeof newer.tail; i++) {
        newer.tail[i] = 1;
        cr_assert_eq(qkv_attention_supports(&newer.d, NULL), QKV_E_SIZE, "byte %zu", i);
        newer.tail[i] = 0;
    }
    newer.d.size = sizeof newer.d + 8;
    newer.tail[8] = 1; /* behind what 'size' covers */
    cr_assert_eq(qkv_attention_supports(&newer.d, NULL), QKV_OK);
}

/* Rows of the output between rows of the queries are apart: allowed. */
Test(misuse, legal_interleaving)
{
    rng r = rng_make("interleaved");
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        problem p = problem_make((shape){.batch = 1,
                                         .q_heads = 2,
                                         .kv_heads = 2,
                                         .q_len = q_len,
                                         .kv_len = 9,
                                         .head_dim = 6,
                                         .value_dim = 5},
                                 &r);
        const int64_t row = 2 * (6 + 5), count[3] = {1, 2, q_len};
        float *both = guarded(SLOT_FREE, q_len * row, PLACE_AT_END);
        p.query = tensor_at(both, count, (int64_t[]){0, 11, row}, 6);
        p.desc.query = p.query.desc;
        p.out = tensor_at(both + 6, count, (int64_t[]){0, 11, row}, 5);
        p.desc.out = p.out.desc;
        double *want = doubles(SLOTS - 1, 2 * q_len * 5),
               *bound = doubles(SLOTS - 2, 2 * q_len * 5);
        tensor_fill(&p.query, &r, 1.0f);
        const oracle_attention o = {.batch = 1,
                                    .q_heads = 2,
                                    .kv_heads = 2,
                                    .q_len = q_len,
                                    .kv_len = 9,
                                    .head_dim = 6,
                                    .value_dim = 5,
                                    .scale = 1.0 / sqrt(6.0),
                                    .q = tensor_doubles(&p.query, SLOTS - 3),
                                    .k = tensor_doubles(&p.key, SLOTS - 4),
                                    .v = tensor_doubles(&p.value, SLOTS - 5),
                                    .out = want,
                                    .out_bound = bound};
        oracle_attention_run(&o);
        for_each_isa(isa)
        {
            cr_assert_eq(problem_run(&p), QKV_OK);
            guards_intact();
            tensor_expect("out", &p.out, want, bound);
            tally(isa, 1);
        }
    }
}

/* Optional things left out, with each flag. */
Test(misuse, optional_pointers)
{
    rng r = rng_make("optional");
    for (int flags = 0; flags < 4; flags++) {
        shape s = {.batch = 1,
                   .q_heads = 1,
                   .kv_heads = 1,
                   .q_len = 4,
                   .kv_len = 4,
                   .head_dim = 4,
                   .value_dim = 4,
                   .causal = (flags & QKV_CAUSAL) != 0,
                   .scale_set = (flags & QKV_SCALE_SET) != 0,
                   .no_lse = true};
        check_shape(s, &r);
        problem p = problem_make(s, &r);
        p.desc.lse.dtype = 999; /* without data it is not looked at */
        cr_assert_eq(problem_run(&p), QKV_OK);
    }
}

/* Numbers that belong to what is left out mean nothing, whatever they are. */
Test(misuse, numbers_without_their_pointer)
{
    rng r = rng_make("no pointer");
    problem p = base_problem(&r);
    p.desc.lse.data = NULL;
    const int64_t odd[] = {1, INT64_MAX, INT64_MIN};
    for (int i = 0; i < 3; i++) {
        p.desc.tree_stride = odd[i];
        cr_assert_eq(problem_run(&p), QKV_OK);
    }
    qkv_attention_desc none = {
        .size = sizeof none, .batch = INT64_MAX, .head_dim = 4, .query = p.desc.query};
    cr_assert_eq(qkv_attention_supports(&none, NULL), QKV_OK);
    none.flags = QKV_SPLIT;
    cr_assert_eq(qkv_attention_supports(&none, NULL), QKV_OK);
}

/* What a call would do is told without a look at each of 2^40 sequences. */
Test(misuse, asking_takes_no_time, .timeout = 60)
{
    static float x[4];
    const qkv_tensor all_one = {.data = x, .flags = QKV_TENSOR_STRIDED};
    for (int64_t kv_len = 0; kv_len < 2; kv_len++) {
        qkv_attention_desc d = {.size = sizeof d,
                                .batch = INT64_C(1) << 40,
                                .q_len = 1,
                                .kv_len = kv_len,
                                .head_dim = 1,
                                .query = all_one,
                                .key = all_one,
                                .value = all_one,
                                .out = {.data = (void *)(UINTPTR_MAX / 4 + 1)}};
        qkv_attention_support support;
        size_t bytes;
        int64_t tasks;
        cr_assert_eq(qkv_attention_supports(&d, &support), QKV_OK);
        cr_assert_eq(support.path, kv_len ? QKV_PATH_TUNED : QKV_PATH_NONE);
        cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), QKV_OK);
        cr_assert_eq(qkv_attention_task_count(&d, &tasks), QKV_OK);
        cr_assert_eq(tasks, INT64_C(1) << 40);
    }
}

/* Nor does computing nothing, of any number of rows. */
Test(misuse, nothing_takes_no_time, .timeout = 60)
{
    const qkv_merge_desc merge = {.size = sizeof merge, .rows = INT64_C(1) << 62};
    const qkv_kv_append_desc append = {
        .size = sizeof append, .batch = INT64_C(1) << 59, .head_dim = 1};
    cr_assert_eq(qkv_merge(&merge), QKV_OK);
    cr_assert_eq(qkv_kv_append(&append), QKV_OK);
    cr_assert_eq(qkv_scale_softmax(NULL, 0, NULL, 0, NULL, INT64_C(1) << 62, 0, 1.0f), QKV_OK);
}

/* An output within a worker's part, of scratch memory that is said to be without end. */
Test(misuse, output_in_endless_scratch)
{
    enum { KEYS = 2000, DIM = 64 };
    static float x[KEYS * DIM], out[DIM];
    qkv_attention_desc d = {.size = sizeof d,
                            .flags = QKV_SPLIT,
                            .q_len = 1,
                            .kv_len = KEYS,
                            .head_dim = DIM,
                            .query = {.data = x},
                            .key = {.data = x},
                            .value = {.data = x},
                            .out = {.data = out}};
    size_t bytes;
    cr_assert_eq(qkv_attention_scratch_size(&d, 2, &bytes), QKV_OK);
    char *scratch = scratch_alloc(bytes);
    d.out.data = scratch + bytes - 4096;
    const size_t sizes[] = {bytes, PTRDIFF_MAX, SIZE_MAX};
    for (int i = 0; i < 3; i++)
        expect_status("begin", "out", qkv_attention_begin(&d, scratch, sizes[i]), QKV_E_OVERLAP);
    free(scratch);
}

/* Inputs that repeat one row and outputs that fit the address space, of which
 * something else does not: the sums of parts, what a task begins with, a mask. */
Test(misuse, sizes_that_no_memory_holds)
{
    static float x[4];
    static const int64_t lens[1] = {64 * QKV_KEY_BLOCK};
    const qkv_tensor one_row = {.data = x, .flags = QKV_TENSOR_STRIDED};
    const qkv_tensor out = {.data = (void *)(UINTPTR_MAX / 4 + 1)};
    const int64_t heads = INT64_C(1) << 55;
    qkv_attention_desc d = {.size = sizeof d,
                            .flags = QKV_SPLIT,
                            .q_heads = heads,
                            .q_len = 1,
                            .kv_len = 64 * QKV_KEY_BLOCK,
                            .head_dim = 1,
                            .query = one_row,
                            .key = one_row,
                            .value = one_row,
                            .out = out};
    size_t bytes;
    int64_t tasks;
    for (int i = 0; i < 2; i++) {
        expect_status("scratch_size", "parts", qkv_attention_scratch_size(&d, 1, &bytes),
                      QKV_E_OVERFLOW);
        expect_status("task_count", "parts", qkv_attention_task_count(&d, &tasks), QKV_E_OVERFLOW);
        expect_status("begin", "parts", qkv_attention_begin(&d, x, sizeof x), QKV_E_OVERFLOW);
        d.kv_lens = lens;
    }
    d.kv_lens = NULL;
    d.kv_len = 1;
    d.q_heads = 1;
    d.batch = INT64_C(1) << 59;
    expect_status("scratch_size", "entries", qkv_attention_scratch_size(&d, 1, &bytes),
                  QKV_E_OVERFLOW);
    d.batch = 1;
    d.flags = 0;
    d.q_heads = 2;
    d.q_len = d.kv_len = INT64_C(1) << 31;
    d.mask = (qkv_mask){.data = x, .dtype = QKV_BIT};
    expect_status("supports", "mask", qkv_attention_supports(&d, NULL), QKV_E_OVERFLOW);

    const qkv_linear w = {.weight = x, .stride = 0};
    const qkv_self_attention_desc layer = {.size = sizeof layer,
                                           .seq_len = INT64_C(1) << 40,
                                           .model_dim = 1,
                                           .q_heads = INT64_C(1) << 24,
                                           .kv_heads = 1,
                                           .head_dim = 1,
                                           .out_dim = 1,
                                           .input = one_row,
                                           .wq = w,
                                           .wk = w,
                                           .wv = w,
                                           .wo = w,
                                           .out = out};
    expect_status("scratch_size", "layer", qkv_self_attention_scratch_size(&layer, &bytes),
                  QKV_E_OVERFLOW);
}

/* Arrays that would go on past the last address are refused before an element is read. */
Test(misuse, arrays_past_the_last_address)
{
    enum { BATCH = 3, HEADS = 8, KEYS = 24 };
    static float x[BATCH * HEADS * KEYS], out[BATCH * HEADS];
    static const int64_t lens[BATCH] = {8, 16, 24};
    void *const last = (void *)((UINTPTR_MAX - 15) & ~(uintptr_t)15); /* 16 bytes are left */
    const qkv_attention_desc good = {.size = sizeof good,
                                     .batch = BATCH,
                                     .q_heads = HEADS,
                                     .kv_heads = HEADS,
                                     .q_len = 1,
                                     .kv_len = KEYS,
                                     .head_dim = 1,
                                     .query = {.data = x},
                                     .key = {.data = x},
                                     .value = {.data = x},
                                     .out = {.data = out}};
    qkv_attention_desc bad[9];
    for (int i = 0; i < 9; i++)
        bad[i] = good;
    bad[0].slopes = bad[1].head_scales = bad[2].sinks = last;
    bad[3].tree_mask = last;
    bad[3].tree_stride = 1;
    bad[4].kv_lens = bad[5].q_offsets = bad[6].q_starts = bad[7].kv_starts = last;
    bad[8].page_table = last;
    bad[8].page_size = 8;
    bad[8].pages = 1;
    for (int i = 0; i < 9; i++) {
        size_t bytes = 0;
        out[0] = 7.0f;
        expect_status("supports", "array", qkv_attention_supports(&bad[i], NULL), QKV_E_OVERFLOW);
        expect_status("scratch_size", "array", qkv_attention_scratch_size(&bad[i], 1, &bytes),
                      QKV_E_OVERFLOW);
        expect_status("attention", "array", qkv_attention(&bad[i], x, 0), QKV_E_OVERFLOW);
        cr_assert_eq(out[0], 7.0f);
    }

    const qkv_kv_append_desc rows = {.size = sizeof rows,
                                     .batch = BATCH,
                                     .kv_heads = 1,
                                     .new_len = 1,
                                     .kv_len = KEYS,
                                     .head_dim = 8,
                                     .positions = lens,
                                     .new_key = {.data = x},
                                     .key = {.data = out}};
    qkv_kv_append_desc append[4];
    for (int i = 0; i < 4; i++)
        append[i] = rows;
    append[0].new_starts = append[1].positions = last;
    append[2].rotary_dim = append[3].rotary_dim = 8;
    append[2].rotary_len = append[3].rotary_len = KEYS;
    append[2].cosines = append[3].sines = last;
    append[2].sines = append[3].cosines = x;
    for (int i = 0; i < 4; i++)
        expect_status("kv_append", "array", qkv_kv_append(&append[i]), QKV_E_OVERFLOW);

    const qkv_merge_desc merge = {.size = sizeof merge,
                                  .parts = BATCH,
                                  .rows = 1,
                                  .value_dim = 1,
                                  .part_out = last,
                                  .part_lse = last,
                                  .out = out};
    expect_status("merge", "array", qkv_merge(&merge), QKV_E_OVERFLOW);
    expect_status("alibi_slopes", "array", qkv_alibi_slopes(last, HEADS), QKV_E_OVERFLOW);
}

/* -------------------------------------------------------------- the steps */

typedef struct step_args {
    const float *a, *b; /* inputs */
    float *out, *lse;
    int64_t a_stride, b_stride, out_stride, rows, kv_len, dim;
    float scale;
} step_args;

static bool misuse_matrix(int n, step_args *s, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_NULL, s->a = NULL)
        MISUSE(QKV_E_NULL, s->out = NULL)
        MISUSE(QKV_E_SHAPE, s->rows = -1)
        MISUSE(QKV_E_SHAPE, s->kv_len = -1)
        MISUSE(QKV_E_SHAPE, s->rows = INT64_MIN)
        MISUSE(QKV_E_STRIDE, s->a_stride = -1)
        MISUSE(QKV_E_STRIDE, s->out_stride = -9)
        MISUSE(QKV_E_STRIDE, s->out_stride = 0)
        MISUSE(QKV_E_STRIDE, s->out_stride = 6)
        MISUSE(QKV_E_ALIGN, s->a = moved((void *)(uintptr_t)s->a, 1))
        MISUSE(QKV_E_ALIGN, s->out = moved(s->out, 2))
        MISUSE(QKV_E_OVERLAP, s->out = (float *)(uintptr_t)s->a + 1)
        MISUSE(QKV_E_OVERFLOW, s->rows = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, s->rows = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, s->a_stride = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, s->out_stride = INT64_MAX)
    default:
        return false;
    }
}

/* More that is wrong for the two functions with a second matrix. */
static bool misuse_second(int n, step_args *s, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_NULL, s->b = NULL)
        MISUSE(QKV_E_SHAPE, s->dim = -1)
        MISUSE(QKV_E_STRIDE, s->b_stride = -7)
        MISUSE(QKV_E_ALIGN, s->b = moved((void *)(uintptr_t)s->b, 3))
        MISUSE(QKV_E_OVERLAP, s->out = (float *)(uintptr_t)s->b)
        MISUSE(QKV_E_OVERLAP, s->out = (float *)(uintptr_t)s->b + 3)
        MISUSE(QKV_E_OVERFLOW, s->b_stride = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, s->dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, s->kv_len = HUGE_SIZE)
    default:
        return false;
    }
}

static bool misuse_softmax(int n, step_args *s, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_VALUE, s->scale = NAN)
        MISUSE(QKV_E_VALUE, s->scale = INFINITY)
        MISUSE(QKV_E_VALUE, s->scale = -INFINITY)
        MISUSE(QKV_E_ALIGN, s->lse = moved(s->lse, 1))
        MISUSE(QKV_E_OVERLAP, s->lse = s->out)
        MISUSE(QKV_E_OVERLAP, s->lse = (float *)(uintptr_t)s->a + 2)
        MISUSE(QKV_E_OVERLAP, s->out = (float *)(uintptr_t)s->a; s->out_stride = 8)
    default:
        return false;
    }
}

static qkv_status call_dot(const step_args *s)
{
    return qkv_dot(s->a, s->a_stride, s->b, s->b_stride, s->out, s->out_stride, s->rows, s->kv_len,
                   s->dim);
}

static qkv_status call_softmax(const step_args *s)
{
    return qkv_scale_softmax(s->a, s->a_stride, s->out, s->out_stride, s->lse, s->rows, s->kv_len,
                             s->scale);
}

static qkv_status call_weighted_sum(const step_args *s)
{
    return qkv_weighted_sum(s->a, s->a_stride, s->b, s->b_stride, s->out, s->out_stride, s->rows,
                            s->kv_len, s->dim);
}

typedef bool misuse_fn(int n, step_args *s, const char **what, qkv_status *want);

static void misuse_step(const char *name, qkv_status (*call)(const step_args *), misuse_fn *misuse)
{
    enum { N = 7 * 9 };
    float *a = guarded(0, N, PLACE_AT_END), *b = guarded(1, N, PLACE_AT_END);
    float *out = guarded(2, N, PLACE_AT_END), *lse = guarded(3, 7, PLACE_AT_END);
    for (int i = 0; i < N; i++)
        a[i] = b[i] = 0.5f;
    const step_args good = {.a = a,
                            .b = b,
                            .out = out,
                            .lse = lse,
                            .a_stride = 9,
                            .b_stride = 9,
                            .out_stride = 9,
                            .rows = 7,
                            .kv_len = 7,
                            .dim = 7,
                            .scale = 1.0f};
    for_each_isa(isa)
    {
        context("%s on %s", name, qkv_isa_name());
        const char *what = "";
        qkv_status want = QKV_OK;
        canary_fill(out, N);
        canary_fill(lse, 7);
        for (int n = 0;; n++) {
            step_args s = good;
            if (!misuse(n, &s, &what, &want))
                break;
            expect_status(name, what, call(&s), want);
            if (!canary_intact(out, N) || !canary_intact(lse, 7))
                fail_with("'%s': an output has changed", what);
            for (int i = 0; i < N; i++)
                if (a[i] != 0.5f || b[i] != 0.5f)
                    fail_with("'%s': an input has changed", what);
            tally(isa, 1);
        }
        expect_status(name, "nothing wrong", call(&good), QKV_OK);
    }
}

Test(misuse, dot)
{
    misuse_step("qkv_dot", call_dot, misuse_matrix);
    misuse_step("qkv_dot", call_dot, misuse_second);
}

Test(misuse, scale_softmax)
{
    misuse_step("qkv_scale_softmax", call_softmax, misuse_matrix);
    misuse_step("qkv_scale_softmax", call_softmax, misuse_softmax);
}

Test(misuse, weighted_sum)
{
    misuse_step("qkv_weighted_sum", call_weighted_sum, misuse_matrix);
    misuse_step("qkv_weighted_sum", call_weighted_sum, misuse_second);
}

/* --------------------------------------------------------- project, layer */

static bool misuse_project(int n, qkv_project_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_SIZE, d->size = 0)
        MISUSE(QKV_E_SIZE, d->size -= 8)
        MISUSE(QKV_E_FLAGS, d->flags = 1 << 20)
        MISUSE(QKV_E_FLAGS, d->flags = QKV_CAUSAL)
        MISUSE(QKV_E_SHAPE, d->batch = -1)
        MISUSE(QKV_E_SHAPE, d->rows = -1)
        MISUSE(QKV_E_SHAPE, d->in_dim = -1)
        MISUSE(QKV_E_SHAPE, d->in_dim = 0)
        MISUSE(QKV_E_SHAPE, d->heads = -1)
        MISUSE(QKV_E_SHAPE, d->head_dim = 0)
        MISUSE(QKV_E_SHAPE, d->head_dim = -5)
        MISUSE(QKV_E_NULL, d->input.data = NULL)
        MISUSE(QKV_E_NULL, d->out.data = NULL)
        MISUSE(QKV_E_NULL, d->linear.weight = NULL)
        MISUSE(QKV_E_DTYPE, d->input.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->out.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->linear.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->linear.dtype = -1)
        MISUSE(QKV_E_DTYPE, d->linear.dtype = QKV_BOOL)
        MISUSE(QKV_E_UNSUPPORTED, d->linear.dtype = QKV_Q8_0)
        MISUSE(QKV_E_UNSUPPORTED, d->input.dtype = QKV_I8)
        MISUSE(QKV_E_UNSUPPORTED, d->out.dtype = QKV_F8_E4M3)
        MISUSE(QKV_E_ALIGN, d->linear.dtype = QKV_F16;
               d->linear.weight = moved((void *)(uintptr_t)d->linear.weight, 1))
        MISUSE(QKV_E_ALIGN, d->out.dtype = QKV_BF16; d->out.data = moved(d->out.data, 1))
        MISUSE(QKV_E_FLAGS, d->linear.reserved = 1)
        MISUSE(QKV_E_STRIDE, d->linear.stride = -1)
        MISUSE(QKV_E_STRIDE, d->input.stride_row = -1)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = -1)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = 1; d->out.flags = QKV_TENSOR_STRIDED)
        MISUSE(QKV_E_ALIGN, d->input.data = moved(d->input.data, 1))
        MISUSE(QKV_E_ALIGN, d->out.data = moved(d->out.data, 2))
        MISUSE(QKV_E_ALIGN, d->linear.weight = moved((void *)(uintptr_t)d->linear.weight, 1))
        MISUSE(QKV_E_ALIGN, d->linear.bias = moved((void *)(uintptr_t)d->linear.bias, 1))
        MISUSE(QKV_E_OVERLAP, d->out.data = d->input.data)
        MISUSE(QKV_E_OVERLAP, d->out.data = moved((void *)(uintptr_t)d->linear.weight, 4))
        MISUSE(QKV_E_OVERLAP, d->linear.bias = (const float *)d->out.data + 3)
        MISUSE(QKV_E_OVERFLOW, d->rows = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->in_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->heads = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->head_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->batch = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->heads = INT64_C(1) << 33; d->head_dim = INT64_C(1) << 33)
        MISUSE(QKV_E_OVERFLOW, d->linear.stride = HUGE_SIZE)
    default:
        return false;
    }
}

Test(misuse, project)
{
    enum { ROWS = 3, IN = 4, WIDTH = 10 };
    float *x = guarded(0, ROWS * IN, PLACE_AT_END), *w = guarded(1, IN * WIDTH, PLACE_AT_END);
    float *bias = guarded(2, WIDTH, PLACE_AT_END), *y = guarded(3, ROWS * WIDTH, PLACE_AT_END);
    memset(x, 0, ROWS * IN * sizeof *x);
    memset(w, 0, IN * WIDTH * sizeof *w);
    memset(bias, 0, WIDTH * sizeof *bias);
    const qkv_project_desc good = {.size = sizeof good,
                                   .rows = ROWS,
                                   .in_dim = IN,
                                   .heads = 2,
                                   .head_dim = 5,
                                   .input = {.data = x},
                                   .linear = {.weight = w, .bias = bias},
                                   .out = {.data = y}};
    for_each_isa(isa)
    {
        context("%s", qkv_isa_name());
        size_t bytes = 0, size = 0;
        cr_assert_eq(qkv_project_scratch_size(&good, &bytes), QKV_OK);
        char *scratch = scratch_alloc(bytes + 64);
        const char *what = "";
        qkv_status want = QKV_OK;
        canary_fill(y, ROWS * WIDTH);
        for (int n = 0;; n++) {
            qkv_project_desc d = good;
            if (!misuse_project(n, &d, &what, &want))
                break;
            expect_status("scratch_size", what, qkv_project_scratch_size(&d, &size), want);
            expect_status("project", what, qkv_project(&d, scratch, bytes), want);
            tally(isa, 1);
        }
        expect_status("project", "NULL", qkv_project(NULL, scratch, bytes), QKV_E_NULL);
        expect_status("size", "NULL", qkv_project_scratch_size(NULL, &size), QKV_E_NULL);
        expect_status("size", "NULL", qkv_project_scratch_size(&good, NULL), QKV_E_NULL);
        if (bytes > 0) {
            expect_status("project", "scratch", qkv_project(&good, NULL, bytes), QKV_E_SCRATCH);
            expect_status("project", "scratch", qkv_project(&good, scratch, bytes - 1),
                          QKV_E_SCRATCH);
            expect_status("project", "scratch", qkv_project(&good, scratch + 4, bytes),
                          QKV_E_SCRATCH);
        }
        if (!canary_intact(y, ROWS * WIDTH))
            fail_with("the output has changed");
        expect_status("project", "nothing wrong", qkv_project(&good, scratch, bytes), QKV_OK);
        free(scratch);
    }
}

static bool misuse_layer(int n, qkv_self_attention_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_SIZE, d->size = 0)
        MISUSE(QKV_E_SIZE, d->size -= 8)
        MISUSE(QKV_E_FLAGS, d->flags = 1 << 20)
        MISUSE(QKV_E_VALUE, d->scale = NAN)
        MISUSE(QKV_E_VALUE, d->scale = INFINITY)
        MISUSE(QKV_E_SHAPE, d->batch = -1)
        MISUSE(QKV_E_SHAPE, d->seq_len = -1)
        MISUSE(QKV_E_SHAPE, d->model_dim = 0)
        MISUSE(QKV_E_SHAPE, d->q_heads = -2)
        MISUSE(QKV_E_SHAPE, d->kv_heads = 3)
        MISUSE(QKV_E_SHAPE, d->head_dim = 0)
        MISUSE(QKV_E_SHAPE, d->value_dim = -1)
        MISUSE(QKV_E_SHAPE, d->out_dim = -1)
        MISUSE(QKV_E_NULL, d->input.data = NULL)
        MISUSE(QKV_E_NULL, d->out.data = NULL)
        MISUSE(QKV_E_NULL, d->wq.weight = NULL)
        MISUSE(QKV_E_NULL, d->wk.weight = NULL)
        MISUSE(QKV_E_NULL, d->wv.weight = NULL)
        MISUSE(QKV_E_DTYPE, d->wq.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->wo.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->input.dtype = 999)
        MISUSE(QKV_E_DTYPE, d->lse.dtype = QKV_F16)
        MISUSE(QKV_E_UNSUPPORTED, d->wv.dtype = QKV_Q4_0)
        MISUSE(QKV_E_UNSUPPORTED, d->input.dtype = QKV_I8)
        MISUSE(QKV_E_UNSUPPORTED, d->out.dtype = QKV_F8_E5M2)
        MISUSE(QKV_E_STRIDE, d->wk.stride = -1)
        MISUSE(QKV_E_STRIDE, d->out.stride_row = -1)
        MISUSE(QKV_E_ALIGN, d->wv.weight = moved((void *)(uintptr_t)d->wv.weight, 1))
        MISUSE(QKV_E_ALIGN, d->input.data = moved(d->input.data, 2))
        MISUSE(QKV_E_ALIGN, d->out.data = moved(d->out.data, 1))
        MISUSE(QKV_E_OVERLAP, d->out.data = d->input.data)
        MISUSE(QKV_E_OVERLAP, d->wo.weight = d->out.data)
        MISUSE(QKV_E_OVERLAP, d->lse.data = d->out.data)
        MISUSE(QKV_E_OVERLAP, d->lse.data = d->input.data)
        MISUSE(QKV_E_OVERFLOW, d->seq_len = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->batch = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->model_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->head_dim = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->value_dim = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->q_heads = INT64_C(1) << 34; d->head_dim = INT64_C(1) << 34)
    default:
        return false;
    }
}

Test(misuse, self_attention)
{
    enum { LEN = 3, MODEL = 4 };
    float *x = guarded(0, LEN * MODEL, PLACE_AT_END), *w = guarded(1, MODEL * MODEL, PLACE_AT_END);
    float *y = guarded(3, LEN * MODEL, PLACE_AT_END), *lse = guarded(4, 2 * LEN, PLACE_AT_END);
    memset(x, 0, LEN * MODEL * sizeof *x);
    memset(w, 0, MODEL * MODEL * sizeof *w);
    const qkv_linear linear = {.weight = w};
    const qkv_self_attention_desc good = {.size = sizeof good,
                                          .seq_len = LEN,
                                          .model_dim = MODEL,
                                          .q_heads = 2,
                                          .head_dim = 2,
                                          .input = {.data = x},
                                          .wq = linear,
                                          .wk = linear,
                                          .wv = linear,
                                          .wo = linear,
                                          .out = {.data = y},
                                          .lse = {.data = lse}};
    for_each_isa(isa)
    {
        context("%s", qkv_isa_name());
        size_t bytes = 0, size = 0;
        cr_assert_eq(qkv_self_attention_scratch_size(&good, &bytes), QKV_OK);
        char *scratch = scratch_alloc(bytes + 64);
        const char *what = "";
        qkv_status want = QKV_OK;
        canary_fill(y, LEN * MODEL);
        canary_fill(lse, 2 * LEN);
        for (int n = 0;; n++) {
            qkv_self_attention_desc d = good;
            if (!misuse_layer(n, &d, &what, &want))
                break;
            expect_status("scratch_size", what, qkv_self_attention_scratch_size(&d, &size), want);
            expect_status("self_attention", what, qkv_self_attention(&d, scratch, bytes), want);
            tally(isa, 1);
        }
        expect_status("call", "NULL", qkv_self_attention(NULL, scratch, bytes), QKV_E_NULL);
        expect_status("size", "NULL", qkv_self_attention_scratch_size(&good, NULL), QKV_E_NULL);
        expect_status("call", "scratch", qkv_self_attention(&good, NULL, bytes), QKV_E_SCRATCH);
        expect_status("call", "scratch", qkv_self_attention(&good, scratch, bytes - 1),
                      QKV_E_SCRATCH);
        expect_status("call", "scratch", qkv_self_attention(&good, scratch + 32, bytes),
                      QKV_E_SCRATCH);
        if (!canary_intact(y, LEN * MODEL) || !canary_intact(lse, 2 * LEN))
            fail_with("an output has changed");
        expect_status("call", "nothing wrong", qkv_self_attention(&good, scratch, bytes), QKV_OK);
        free(scratch);
    }
}

/* ------------------------------------------------------------------ the rest */

Test(misuse, strerror_knows_every_status)
{
    for (int s = QKV_OK; s <= QKV_E_SYSTEM; s++)
        for (int t = QKV_OK; t < s; t++)
            cr_assert_str_neq(qkv_strerror(s), qkv_strerror(t));
    cr_assert_not_null(qkv_strerror(-1));
    cr_assert_not_null(qkv_strerror(INT32_MAX));
    cr_assert_eq(qkv_version(), QKV_VERSION);
}

/*
 * Descriptors of nothing but odd numbers: validation neither crashes nor
 * overflows (the sanitizers tell), and what it accepts it accepts everywhere.
 */
static int64_t odd_number(rng *r)
{
    const int64_t odd[] = {0,
                           0,
                           0,
                           1,
                           1,
                           2,
                           3,
                           8,
                           64,
                           -1,
                           1000,
                           INT64_C(1) << 20,
                           INT64_C(1) << 31,
                           INT64_C(1) << 32,
                           INT64_C(1) << 40,
                           INT64_C(1) << 59,
                           HUGE_SIZE,
                           INT64_MAX,
                           INT64_MIN,
                           INT64_MAX / 3};
    return odd[rng_int(r, 0, (int64_t)(sizeof odd / sizeof *odd) - 1)];
}

static qkv_tensor odd_tensor(rng *r)
{
    const uintptr_t places[] = {0, 0x1000, 0x1004, 0x10000000, 0x7fff00000000, UINTPTR_MAX - 3};
    return (qkv_tensor){.data = (void *)places[rng_int(r, 0, 5)],
                        .stride_batch = odd_number(r),
                        .stride_head = odd_number(r),
                        .stride_row = odd_number(r),
                        .flags = (int32_t)rng_int(r, 0, 1)};
}

Test(misuse, odd_descriptors)
{
    rng r = rng_make("odd");
    int accepted = 0;
    for (int64_t i = effort_cases(400000); i > 0; i--) {
        qkv_attention_desc d = {.size = sizeof d,
                                .flags = (int32_t)rng_int(&r, 0, 3),
                                .batch = odd_number(&r),
                                .q_heads = odd_number(&r),
                                .kv_heads = odd_number(&r),
                                .q_len = odd_number(&r),
                                .kv_len = odd_number(&r),
                                .head_dim = odd_number(&r),
                                .value_dim = odd_number(&r),
                                .query = odd_tensor(&r),
                                .key = odd_tensor(&r),
                                .value = odd_tensor(&r),
                                .out = odd_tensor(&r),
                                .lse = odd_tensor(&r)};
        size_t bytes = 0;
        int64_t tasks = 0;
        const qkv_status status = qkv_attention_supports(&d, NULL);
        accepted += status == QKV_OK;
        cr_assert_eq(qkv_attention_scratch_size(&d, 1, &bytes), status);
        cr_assert_eq(qkv_attention_task_count(&d, &tasks), status);
        cr_assert(status != QKV_OK || (tasks >= 0 && bytes <= PTRDIFF_MAX));

        qkv_project_desc p = {
            .size = sizeof p,
            .batch = d.batch,
            .rows = d.q_len,
            .in_dim = d.kv_len,
            .heads = d.q_heads,
            .head_dim = d.head_dim,
            .input = d.query,
            .out = d.out,
            .linear = {.weight = d.key.data, .stride = d.key.stride_row, .bias = d.value.data}};
        qkv_project_scratch_size(&p, &bytes);
        qkv_self_attention_desc l = {.size = sizeof l,
                                     .batch = d.batch,
                                     .seq_len = d.q_len,
                                     .model_dim = d.kv_len,
                                     .q_heads = d.q_heads,
                                     .kv_heads = d.kv_heads,
                                     .head_dim = d.head_dim,
                                     .value_dim = d.value_dim,
                                     .input = d.query,
                                     .wq = p.linear,
                                     .wk = p.linear,
                                     .wv = p.linear,
                                     .wo = p.linear,
                                     .out = d.out,
                                     .lse = d.lse};
        qkv_self_attention_scratch_size(&l, &bytes);
    }
    cr_assert_gt(accepted, 0);
}
