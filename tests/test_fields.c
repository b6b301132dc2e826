/* SPDX-License-Identifier: MIT */
/*
 * Every field of every descriptor, with every kind of bad value that its kind
 * of field can hold: each function that takes the descriptor gives the same code
 * and writes nothing. The lists below are complete: a byte of a descriptor that
 * belongs to no listed field fails the test, so that a new field cannot be
 * forgotten.
 */
#include "problem.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------ descriptions */

typedef enum kind {
    SIZE,     /* of the descriptor */
    FLAGS,    /* 'a' are the known ones */
    SCALE,    /* finite */
    CAP,      /* finite, and not negative */
    COUNT,    /* not negative; INT64_MAX gives 'a', 2^62 gives 'b' */
    POSITIVE, /* likewise, from 1 on */
    ANY,      /* any number is meant */
    WIDTH,    /* not negative, however large */
    STRIDE,   /* of an input */
    DISTANCE, /* of an output: too small is wrong as well */
    IGNORED,  /* a stride that does not matter here, but may not be negative */
    TYPE,     /* a dtype; 'a' is the first number that is none */
    STAGE,    /* 0 .. a - 1 */
    PAGE,     /* a power of two, 8 .. 256 */
    INPUT,    /* a pointer; 'a' is its alignment, 'b': it may not be NULL */
    TENSOR,   /* one of a tensor, whose last byte must be an address too */
    OUTPUT    /* one to what is written */
} kind;

typedef struct field {
    const char *name;
    size_t at, bytes;
    int64_t is[3]; /* its kind, a and b */
} field;

#define FIELD(type, member, ...)                                                                   \
    {                                                                                              \
#member, offsetof(type, member), sizeof(((type *)0)->member),                              \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
#define TENSOR_FIELDS(type, t, data_kind, align, needed, stride, batch_stride, head_stride,        \
                      no_type)                                                                     \
    FIELD(type, t.data, data_kind, align, needed), FIELD(type, t.stride_batch, batch_stride),      \
        FIELD(type, t.stride_head, head_stride), FIELD(type, t.stride_row, stride),                \
        FIELD(type, t.dtype, TYPE, no_type), FIELD(type, t.flags, FLAGS, QKV_TENSOR_STRIDED)
#define LINEAR_FIELDS(type, l, needed)                                                             \
    FIELD(type, l.weight, TENSOR, 4, needed), FIELD(type, l.stride, STRIDE),                       \
        FIELD(type, l.bias, TENSOR, 4), FIELD(type, l.dtype, TYPE, QKV_BOOL),                      \
        FIELD(type, l.reserved, FLAGS)

/* A descriptor and the functions that take it. */
typedef struct subject {
    const char *name;
    void *desc; /* right as it is, and as long as 'bytes' */
    size_t bytes;
    const field *fields;
    size_t n;
    void (*call)(const void *desc, const char *what, qkv_status want);
} subject;

/* All that a descriptor points to; no call gets as far as touching it. */
enum { FLOATS = 4096 };
static _Alignas(64) float memory[12][FLOATS];
static int64_t numbers[4][8];
static int32_t pages[16];
static const float *parts[2][2];

static void expect_code(const char *function, const char *what, qkv_status got, qkv_status want)
{
    if (got != want)
        fail_with("%s after '%s': %s, expected %s", function, what, qkv_strerror(got),
                  qkv_strerror(want));
}

/* Everything that a call is given, as it was before all the bad calls. */
static struct {
    float memory[12][FLOATS];
    int64_t numbers[4][8];
    int32_t pages[16];
    const float *parts[2][2];
} before;

static void *pointer_of(const subject *s, const field *f)
{
    void *pointer;
    memcpy(&pointer, (const char *)s->desc + f->at, sizeof pointer);
    return pointer;
}

/* Outputs hold NaNs behind zeros, which are right as lengths, starts and pages,
 * too, when an array lies over them. */
static void remember(const subject *s)
{
    enum { ZEROS = 32 };
    for (size_t i = 0; i < s->n; i++)
        if (s->fields[i].is[0] == OUTPUT) {
            float *out = pointer_of(s, &s->fields[i]);
            memset(out, 0, ZEROS * sizeof *out);
            canary_fill(out + ZEROS, FLOATS - ZEROS);
        }
    memcpy(before.memory, memory, sizeof memory);
    memcpy(before.numbers, numbers, sizeof numbers);
    memcpy(before.pages, pages, sizeof pages);
    memcpy(before.parts, parts, sizeof parts);
}

static void nothing_is_written(const char *what)
{
    if (memcmp(before.memory, memory, sizeof memory) != 0)
        for (int i = 0; i < 12; i++)
            if (memcmp(before.memory[i], memory[i], sizeof memory[i]) != 0)
                fail_with("after '%s': memory[%d] was written", what, i);
    if (memcmp(before.numbers, numbers, sizeof numbers) != 0 ||
        memcmp(before.pages, pages, sizeof pages) != 0 ||
        memcmp(before.parts, parts, sizeof parts) != 0)
        fail_with("after '%s': an array was written", what);
}

/* --------------------------------------------------------------- bad values */

static void with_value(const subject *s, const field *f, const void *value, const char *kind_of,
                       qkv_status want)
{
    char what[128];
    unsigned char *desc = malloc(s->bytes);
    memcpy(desc, s->desc, s->bytes);
    memcpy(desc + f->at, value, f->bytes);
    snprintf(what, sizeof what, "%s: %s %s", s->name, f->name, kind_of);
    s->call(desc, what, want);
    if (want != QKV_OK)
        nothing_is_written(what);
    free(desc);
    tally(0, 1);
}

static void with_int(const subject *s, const field *f, int64_t value, qkv_status want)
{
    char text[32];
    const int32_t narrow = (int32_t)value;
    snprintf(text, sizeof text, "= %lld", (long long)value);
    if (f->bytes == 4)
        with_value(s, f, &narrow, text, want);
    else
        with_value(s, f, &value, text, want);
}

static void with_float(const subject *s, const field *f, float value, qkv_status want)
{
    char text[32];
    snprintf(text, sizeof text, "= %g", (double)value);
    with_value(s, f, &value, text, want);
}

static void with_pointer(const subject *s, const field *f, uintptr_t value, const char *what,
                         qkv_status want)
{
    const void *pointer = (const void *)value;
    with_value(s, f, &pointer, what, want);
}

static bool is_pointer(const field *f)
{
    return f->is[0] == INPUT || f->is[0] == TENSOR || f->is[0] == OUTPUT;
}

/* Queries alone may be replaced by their output, in the very same place. */
static bool may_be_in_place(const field *a, const field *b)
{
    return (strcmp(a->name, "query.data") == 0 && strcmp(b->name, "out.data") == 0) ||
           (strcmp(b->name, "query.data") == 0 && strcmp(a->name, "out.data") == 0);
}

/* Over each output, and an output over everything else. */
static void overlapping_pointer(const subject *s, const field *f)
{
    for (size_t i = 0; i < s->n; i++) {
        const field *other = &s->fields[i];
        if (other == f || !is_pointer(other) || (f->is[0] != OUTPUT && other->is[0] != OUTPUT))
            continue;
        const uintptr_t there = (uintptr_t)pointer_of(s, other);
        char what[64];
        snprintf(what, sizeof what, "over %s", other->name);
        if (there)
            with_pointer(s, f, there + (may_be_in_place(f, other) ? 8 : 0), what, QKV_E_OVERLAP);
    }
}

static void bad_pointer(const subject *s, const field *f)
{
    const uintptr_t is = (uintptr_t)pointer_of(s, f);
    if (f->is[2])
        with_pointer(s, f, 0, "NULL", QKV_E_NULL);
    for (int64_t off = 1; off < f->is[1]; off++)
        with_pointer(s, f, is + (uintptr_t)off, "misaligned", QKV_E_ALIGN);
    if (f->is[0] == TENSOR || f->is[0] == OUTPUT)
        with_pointer(s, f, UINTPTR_MAX - 3, "at the end of all memory", QKV_E_OVERFLOW);
    overlapping_pointer(s, f);
}

static void bad_flags(const subject *s, const field *f)
{
    for (int bit = 0; bit < 32; bit++)
        if (!(f->is[1] >> bit & 1))
            with_int(s, f, (int32_t)(UINT32_C(1) << bit), QKV_E_FLAGS);
}

static void bad_number(const subject *s, const field *f)
{
    const int64_t huge = INT64_C(1) << 62;
    const bool stride = f->is[0] == STRIDE || f->is[0] == DISTANCE;
    const qkv_status negative = stride || f->is[0] == IGNORED ? QKV_E_STRIDE : QKV_E_SHAPE;
    with_int(s, f, -1, negative);
    with_int(s, f, INT64_MIN, negative);
    if (f->is[0] == POSITIVE)
        with_int(s, f, 0, QKV_E_SHAPE);
    if (f->is[0] == DISTANCE)
        with_int(s, f, 0, QKV_E_STRIDE);
    if (f->is[0] == WIDTH || f->is[0] == IGNORED)
        return;
    with_int(s, f, INT64_MAX, stride ? QKV_E_OVERFLOW : (qkv_status)f->is[1]);
    with_int(s, f, stride ? INT64_MAX - 1 : huge, stride ? QKV_E_OVERFLOW : (qkv_status)f->is[2]);
}

/* Sizes of versions before this one; that they work shows misuse/older_descriptors. */
static bool had_size(const subject *s, int64_t size)
{
    return s->bytes == sizeof(qkv_attention_desc) && (size == 272 || size == 616);
}

static void bad_values(const subject *s, const field *f)
{
    static const int64_t no_page[] = {INT64_MIN, -8, 1, 4, 12, 512, INT64_C(1) << 62};
    static const int64_t far[] = {-1, 999, INT_MAX, INT_MIN};
    switch (f->is[0]) {
    case SIZE:
        for (int64_t size = 0; size < (int64_t)s->bytes + 8; size++)
            if (size != (int64_t)s->bytes && !had_size(s, size))
                with_int(s, f, size, QKV_E_SIZE);
        with_int(s, f, 65544, QKV_E_SIZE);
        with_int(s, f, -1, QKV_E_SIZE);
        return;
    case FLAGS:
        bad_flags(s, f);
        return;
    case CAP:
        with_float(s, f, -1.0f, QKV_E_VALUE);
        with_float(s, f, 0x1p-149f, QKV_E_VALUE);
        /* fall through */
    case SCALE:
        with_float(s, f, NAN, QKV_E_VALUE);
        with_float(s, f, INFINITY, QKV_E_VALUE);
        with_float(s, f, -INFINITY, QKV_E_VALUE);
        return;
    case TYPE:
        with_int(s, f, f->is[1], QKV_E_DTYPE);
        for (int i = 0; i < 4; i++)
            with_int(s, f, far[i], QKV_E_DTYPE);
        return;
    case STAGE:
        with_int(s, f, f->is[1], QKV_E_VALUE);
        for (int i = 0; i < 4; i++)
            with_int(s, f, far[i], QKV_E_VALUE);
        return;
    case PAGE:
        for (size_t i = 0; i < sizeof no_page / sizeof *no_page; i++)
            with_int(s, f, no_page[i], QKV_E_SHAPE);
        return;
    case ANY:
        with_int(s, f, INT64_MIN, QKV_OK);
        with_int(s, f, INT64_MAX, QKV_OK);
        return;
    case INPUT:
    case TENSOR:
    case OUTPUT:
        bad_pointer(s, f);
        return;
    default:
        bad_number(s, f);
    }
}

/* Each byte of the descriptor belongs to exactly one field of the list. */
static void list_is_complete(const subject *s)
{
    unsigned char *count = calloc(s->bytes, 1);
    for (size_t i = 0; i < s->n; i++)
        for (size_t at = s->fields[i].at; at < s->fields[i].at + s->fields[i].bytes; at++)
            count[at]++;
    for (size_t at = 0; at < s->bytes; at++)
        if (count[at] != 1)
            fail_with("byte %zu of %s is in %d fields of the list", at, s->name, count[at]);
    free(count);
}

static void check_subject(const subject *s)
{
    s->call(s->desc, s->name, QKV_OK);
    remember(s);
    for (size_t i = 0; i < s->n; i++)
        bad_values(s, &s->fields[i]);
}

/* --------------------------------------------------------------- attention */

static void one_by_one(void *context, int64_t n, qkv_parallel_body *body, void *argument)
{
    (void)context;
    for (int64_t i = 0; i < n; i++)
        body(argument, i);
}

static void call_attention(const void *desc, const char *what, qkv_status want)
{
    static _Alignas(64) char scratch[1 << 21];
    const qkv_attention_desc *d = desc;
    qkv_attention_support support;
    size_t bytes;
    int64_t count;
    expect_code("supports", what, qkv_attention_supports(d, &support), want);
    expect_code("scratch_size", what, qkv_attention_scratch_size(d, 1, &bytes), want);
    expect_code("task_count", what, qkv_attention_task_count(d, &count), want);
    if (want == QKV_OK)
        return;
    expect_code("attention", what, qkv_attention(d, scratch, sizeof scratch), want);
    expect_code("begin", what, qkv_attention_begin(d, scratch, sizeof scratch), want);
    expect_code("run_task", what, qkv_attention_run_task(d, 0, 0, scratch, sizeof scratch), want);
    expect_code("parallel", what,
                qkv_attention_parallel(d, scratch, sizeof scratch, 1, one_by_one, NULL), want);
}

/* [batch 2][head 2][row 3], each stride its own. */
#define SPREAD(at)                                                                                 \
    {                                                                                              \
        .data = (at), .stride_batch = 600, .stride_head = 200, .stride_row = 64                    \
    }
/* The same of pages of 8 rows. */
#define SPREAD_PAGES(at)                                                                           \
    {                                                                                              \
        .data = (at), .stride_batch = 1040, .stride_head = 520, .stride_row = 64                   \
    }
#define OVERFLOWS QKV_E_OVERFLOW, QKV_E_OVERFLOW

#define A(...) FIELD(qkv_attention_desc, __VA_ARGS__)
#define A_TENSOR(...) TENSOR_FIELDS(qkv_attention_desc, __VA_ARGS__)

/* Plain sequences with every option but pages and starts. */
static qkv_attention_desc plain_desc(void)
{
    return (qkv_attention_desc){
        .size = sizeof(qkv_attention_desc),
        .flags = QKV_CAUSAL | QKV_WINDOW,
        .scale = 1.0f,
        .batch = 2,
        .q_heads = 2,
        .kv_heads = 2,
        .q_len = 3,
        .kv_len = 3,
        .head_dim = 4,
        .value_dim = 4,
        .query = SPREAD(memory[0]),
        .key = SPREAD(memory[1]),
        .value = SPREAD(memory[2]),
        .out = SPREAD(memory[3]),
        .lse = SPREAD(memory[4]),
        .kv_lens = numbers[0],
        .q_offsets = numbers[1],
        .softcap = 1.0f,
        .mask = {.data = memory[5],
                 .stride_batch = 600,
                 .stride_head = 200,
                 .stride_query = 64,
                 .stride_key = 1},
        .tree_mask = (const uint64_t *)(const void *)memory[6],
        .tree_stride = 1,
        .slopes = memory[7],
        .head_scales = memory[8],
        .sinks = memory[9],
        .row_max = SPREAD(memory[10]),
        .weights = SPREAD(memory[11]),
    };
}

#define COMMON_FIELDS                                                                              \
    A(size, SIZE),                                                                                 \
        A(flags, FLAGS, QKV_CAUSAL | QKV_SCALE_SET | QKV_WINDOW | QKV_INVARIANT | QKV_SPLIT),      \
        A(scale, SCALE), A(batch, COUNT, OVERFLOWS), A(q_len, COUNT, OVERFLOWS),                   \
        A(head_dim, POSITIVE, OVERFLOWS), A(value_dim, COUNT, OVERFLOWS)

static const field plain_fields[] = {
    COMMON_FIELDS,
    A(q_heads, COUNT, QKV_E_SHAPE, QKV_E_OVERFLOW),
    A(kv_heads, COUNT, QKV_E_SHAPE, QKV_E_SHAPE),
    A(kv_len, COUNT, OVERFLOWS),
    A_TENSOR(query, TENSOR, 4, 1, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    A_TENSOR(key, TENSOR, 4, 1, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    A_TENSOR(value, TENSOR, 4, 1, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    A_TENSOR(out, OUTPUT, 4, 1, DISTANCE, DISTANCE, DISTANCE, QKV_BOOL),
    A_TENSOR(lse, OUTPUT, 4, 0, DISTANCE, DISTANCE, DISTANCE, QKV_F16),
    A(kv_lens, INPUT, 8),
    A(q_offsets, INPUT, 8),
    A(window_left, ANY),
    A(window_right, ANY),
    A(sink_tokens, WIDTH),
    A(shared_len, COUNT, QKV_E_SHAPE, QKV_E_SHAPE),
    A(softcap, CAP),
    A(weights_stage, STAGE, 4),
    A(mask.data, TENSOR, 4),
    A(mask.stride_batch, STRIDE),
    A(mask.stride_head, STRIDE),
    A(mask.stride_query, STRIDE),
    A(mask.stride_key, STRIDE),
    A(mask.dtype, TYPE, QKV_Q8_0),
    A(mask.flags, FLAGS, QKV_TENSOR_STRIDED),
    A(tree_mask, INPUT, 8),
    A(tree_stride, DISTANCE),
    A(slopes, INPUT, 4),
    A(head_scales, INPUT, 4),
    A(sinks, INPUT, 4),
    A_TENSOR(row_max, OUTPUT, 4, 0, DISTANCE, DISTANCE, DISTANCE, QKV_F16),
    A_TENSOR(weights, OUTPUT, 4, 0, DISTANCE, DISTANCE, DISTANCE, QKV_F16),
    /* Those of the other two, which a test of their own covers. */
    A(q_starts, INPUT, 8),
    A(kv_starts, INPUT, 8),
    A(page_size, PAGE),
    A(pages, COUNT, QKV_E_SHAPE, QKV_E_SHAPE),
    A(page_table_stride, PAGE),
    A(page_table, INPUT, 1),
    A_TENSOR(key_scale, INPUT, 1, 0, STRIDE, STRIDE, STRIDE, QKV_F16),
    A_TENSOR(value_scale, INPUT, 1, 0, STRIDE, STRIDE, STRIDE, QKV_F16),
};
enum { OF_OTHERS = 6 + 2 * 6 };

Test(fields, attention)
{
    qkv_attention_desc desc = plain_desc();
    const size_t all = sizeof plain_fields / sizeof *plain_fields;
    const subject s = {"attention",  &desc,           sizeof desc,
                       plain_fields, all - OF_OTHERS, call_attention};
    subject whole = s;
    whole.n = all;
    numbers[0][0] = numbers[0][1] = 3;
    list_is_complete(&whole);
    check_subject(&s);
}

/* Sequences in pages of int8 rows. With starts the queries have no batch. */
static const field paged_fields[] = {
    COMMON_FIELDS,
    A_TENSOR(query, TENSOR, 4, 1, STRIDE, IGNORED, STRIDE, QKV_BOOL),
    A_TENSOR(key, TENSOR, 1, 1, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    A_TENSOR(value, TENSOR, 1, 1, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    A_TENSOR(out, OUTPUT, 4, 1, DISTANCE, IGNORED, DISTANCE, QKV_BOOL),
    A(q_starts, INPUT, 8),
    A(page_size, PAGE),
    A(pages, COUNT, OVERFLOWS),
    A(page_table_stride, STRIDE),
    A(page_table, INPUT, 4, 1),
    A_TENSOR(key_scale, TENSOR, 4, 1, STRIDE, STRIDE, STRIDE, QKV_F16),
    A_TENSOR(value_scale, TENSOR, 4, 1, STRIDE, STRIDE, STRIDE, QKV_F16),
};

Test(fields, attention_paged)
{
    qkv_attention_desc desc = plain_desc();
    memset(&desc.kv_lens, 0, sizeof desc - offsetof(qkv_attention_desc, kv_lens));
    desc.flags = QKV_CAUSAL;
    desc.lse = (qkv_tensor){0};
    desc.q_starts = numbers[2];
    desc.page_size = 8;
    desc.pages = 2;
    desc.page_table = pages;
    desc.page_table_stride = 1;
    desc.key.dtype = desc.value.dtype = QKV_I8;
    desc.key_scale = (qkv_tensor)SPREAD(memory[5]);
    desc.value_scale = (qkv_tensor)SPREAD(memory[6]);
    numbers[2][1] = 1;
    numbers[2][2] = 3;
    check_subject(&(subject){"paged attention", &desc, sizeof desc, paged_fields,
                             sizeof paged_fields / sizeof *paged_fields, call_attention});
}

static const field started_fields[] = {
    A_TENSOR(key, TENSOR, 4, 1, STRIDE, IGNORED, STRIDE, QKV_BOOL),
    A_TENSOR(value, TENSOR, 4, 1, STRIDE, IGNORED, STRIDE, QKV_BOOL),
    A(kv_starts, INPUT, 8),
    A(kv_len, COUNT, OVERFLOWS),
};

Test(fields, attention_with_starts)
{
    qkv_attention_desc desc = plain_desc();
    memset(&desc.kv_lens, 0, sizeof desc - offsetof(qkv_attention_desc, kv_lens));
    desc.flags = QKV_CAUSAL;
    desc.kv_starts = numbers[2];
    numbers[2][1] = 1;
    numbers[2][2] = 3;
    check_subject(&(subject){"attention with starts", &desc, sizeof desc, started_fields,
                             sizeof started_fields / sizeof *started_fields, call_attention});
}

/* --------------------------------------------------------------- the cache */

static void call_append(const void *desc, const char *what, qkv_status want)
{
    expect_code("kv_append", what, qkv_kv_append(desc), want);
}

#define C(...) FIELD(qkv_kv_append_desc, __VA_ARGS__)
#define C_TENSOR(...) TENSOR_FIELDS(qkv_kv_append_desc, __VA_ARGS__)

static const field append_fields[] = {
    C(size, SIZE),
    C(flags, FLAGS, QKV_ROTARY_NEIGHBOURS),
    C(reserved, FLAGS),
    C(batch, COUNT, OVERFLOWS),
    C(kv_heads, COUNT, OVERFLOWS),
    C(new_len, COUNT, OVERFLOWS),
    C(kv_len, WIDTH),
    C(head_dim, POSITIVE, OVERFLOWS),
    C(value_dim, COUNT, OVERFLOWS),
    C_TENSOR(new_key, TENSOR, 4, 0, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    C_TENSOR(new_value, TENSOR, 4, 0, STRIDE, STRIDE, STRIDE, QKV_BOOL),
    C(new_starts, INPUT, 8),
    C(positions, INPUT, 8),
    C_TENSOR(key, OUTPUT, 1, 1, DISTANCE, DISTANCE, DISTANCE, QKV_BOOL),
    C_TENSOR(value, OUTPUT, 1, 1, DISTANCE, DISTANCE, DISTANCE, QKV_BOOL),
    C_TENSOR(key_scale, OUTPUT, 4, 1, DISTANCE, DISTANCE, DISTANCE, QKV_F16),
    C_TENSOR(value_scale, OUTPUT, 4, 1, DISTANCE, DISTANCE, DISTANCE, QKV_F16),
    C(page_size, PAGE),
    C(pages, COUNT, OVERFLOWS),
    C(page_table_stride, STRIDE),
    C(page_table, INPUT, 4, 1),
    C(rotary_dim, COUNT, QKV_E_SHAPE, QKV_E_SHAPE),
    C(rotary_len, COUNT, OVERFLOWS),
    C(rotary_stride, STRIDE),
    C(cosines, INPUT, 4, 1),
    C(sines, INPUT, 4, 1),
};

Test(fields, kv_append)
{
    qkv_kv_append_desc desc = {.size = sizeof desc,
                               .batch = 2,
                               .kv_heads = 2,
                               .new_len = 3,
                               .kv_len = 8,
                               .head_dim = 4,
                               .value_dim = 4,
                               .new_key = SPREAD(memory[0]),
                               .new_value = SPREAD(memory[1]),
                               .positions = numbers[3],
                               .key = SPREAD_PAGES(memory[3]),
                               .value = SPREAD_PAGES(memory[4]),
                               .key_scale = SPREAD_PAGES(memory[5]),
                               .value_scale = SPREAD_PAGES(memory[6]),
                               .page_size = 8,
                               .pages = 2,
                               .page_table_stride = 1,
                               .page_table = pages,
                               .rotary_dim = 4,
                               .rotary_len = 8,
                               .rotary_stride = 2,
                               .cosines = memory[7],
                               .sines = memory[8]};
    desc.key.dtype = desc.value.dtype = QKV_I8;
    desc.key_scale.dtype = desc.value_scale.dtype = QKV_F32;
    pages[1] = 1;
    const subject s = {"kv_append",
                       &desc,
                       sizeof desc,
                       append_fields,
                       sizeof append_fields / sizeof *append_fields,
                       call_append};
    list_is_complete(&s);
    check_subject(&s);
}

/* --------------------------------------------------------------- the merge */

static void call_merge(const void *desc, const char *what, qkv_status want)
{
    expect_code("merge", what, qkv_merge(desc), want);
}

#define M(...) FIELD(qkv_merge_desc, __VA_ARGS__)

static const field merge_fields[] = {
    M(size, SIZE),
    M(flags, FLAGS),
    M(reserved, FLAGS),
    M(parts, COUNT, OVERFLOWS),
    M(rows, COUNT, OVERFLOWS),
    M(value_dim, COUNT, OVERFLOWS),
    M(out_stride, STRIDE),
    M(part_out, INPUT, 8, 1),
    M(part_lse, INPUT, 8, 1),
    M(out, OUTPUT, 4, 1),
    M(lse, OUTPUT, 4),
};

Test(fields, merge)
{
    parts[0][0] = memory[0];
    parts[0][1] = memory[1];
    parts[1][0] = memory[5];
    parts[1][1] = memory[6];
    const qkv_merge_desc desc = {.size = sizeof desc,
                                 .parts = 2,
                                 .rows = 3,
                                 .value_dim = 4,
                                 .out_stride = 8,
                                 .part_out = parts[0],
                                 .part_lse = parts[1],
                                 .out = memory[3],
                                 .lse = memory[4]};
    const subject s = {"merge",
                       (void *)(uintptr_t)&desc,
                       sizeof desc,
                       merge_fields,
                       sizeof merge_fields / sizeof *merge_fields,
                       call_merge};
    list_is_complete(&s);
    check_subject(&s);
}

/* --------------------------------------------------- projections and layers */

static void call_project(const void *desc, const char *what, qkv_status want)
{
    static _Alignas(64) char scratch[1 << 21];
    size_t bytes;
    expect_code("scratch_size", what, qkv_project_scratch_size(desc, &bytes), want);
    expect_code("project", what, qkv_project(desc, scratch, sizeof scratch), want);
}

#define P(...) FIELD(qkv_project_desc, __VA_ARGS__)

static const field project_fields[] = {
    P(size, SIZE),
    P(flags, FLAGS, QKV_WEIGHT_OUT_IN),
    P(reserved, FLAGS),
    P(batch, COUNT, OVERFLOWS),
    P(rows, COUNT, OVERFLOWS),
    P(in_dim, POSITIVE, OVERFLOWS),
    P(heads, COUNT, OVERFLOWS),
    P(head_dim, POSITIVE, OVERFLOWS),
    TENSOR_FIELDS(qkv_project_desc, input, TENSOR, 4, 1, STRIDE, STRIDE, IGNORED, QKV_BOOL),
    LINEAR_FIELDS(qkv_project_desc, linear, 1),
    TENSOR_FIELDS(qkv_project_desc, out, OUTPUT, 4, 1, DISTANCE, DISTANCE, DISTANCE, QKV_BOOL),
};

Test(fields, project)
{
    const qkv_project_desc desc = {.size = sizeof desc,
                                   .batch = 2,
                                   .rows = 3,
                                   .in_dim = 4,
                                   .heads = 2,
                                   .head_dim = 4,
                                   .input = SPREAD(memory[0]),
                                   .linear = {.weight = memory[1], .bias = memory[2]},
                                   .out = SPREAD(memory[3])};
    const subject s = {"project",
                       (void *)(uintptr_t)&desc,
                       sizeof desc,
                       project_fields,
                       sizeof project_fields / sizeof *project_fields,
                       call_project};
    list_is_complete(&s);
    check_subject(&s);
}

static void call_layer(const void *desc, const char *what, qkv_status want)
{
    static _Alignas(64) char scratch[1 << 22];
    size_t bytes;
    expect_code("scratch_size", what, qkv_self_attention_scratch_size(desc, &bytes), want);
    expect_code("self_attention", what, qkv_self_attention(desc, scratch, sizeof scratch), want);
}

#define L(...) FIELD(qkv_self_attention_desc, __VA_ARGS__)

static const field layer_fields[] = {
    L(size, SIZE),
    L(flags, FLAGS, QKV_CAUSAL | QKV_SCALE_SET | QKV_WEIGHT_OUT_IN),
    L(scale, SCALE),
    L(batch, COUNT, OVERFLOWS),
    L(seq_len, COUNT, OVERFLOWS),
    L(model_dim, POSITIVE, OVERFLOWS),
    L(q_heads, COUNT, QKV_E_SHAPE, QKV_E_OVERFLOW),
    L(kv_heads, COUNT, QKV_E_SHAPE, QKV_E_SHAPE),
    L(head_dim, POSITIVE, OVERFLOWS),
    L(value_dim, COUNT, OVERFLOWS),
    L(out_dim, COUNT, OVERFLOWS),
    TENSOR_FIELDS(qkv_self_attention_desc, input, TENSOR, 4, 1, STRIDE, STRIDE, IGNORED, QKV_BOOL),
    LINEAR_FIELDS(qkv_self_attention_desc, wq, 1),
    LINEAR_FIELDS(qkv_self_attention_desc, wk, 1),
    LINEAR_FIELDS(qkv_self_attention_desc, wv, 1),
    LINEAR_FIELDS(qkv_self_attention_desc, wo, 0),
    TENSOR_FIELDS(qkv_self_attention_desc, out, OUTPUT, 4, 1, DISTANCE, DISTANCE, IGNORED,
                  QKV_BOOL),
    TENSOR_FIELDS(qkv_self_attention_desc, lse, OUTPUT, 4, 0, DISTANCE, DISTANCE, DISTANCE,
                  QKV_F16),
};

Test(fields, self_attention)
{
    const qkv_self_attention_desc desc = {.size = sizeof desc,
                                          .batch = 2,
                                          .seq_len = 3,
                                          .model_dim = 4,
                                          .q_heads = 2,
                                          .kv_heads = 2,
                                          .head_dim = 4,
                                          .value_dim = 4,
                                          .out_dim = 4,
                                          .input = SPREAD(memory[0]),
                                          .wq = {.weight = memory[1], .bias = memory[2]},
                                          .wk = {.weight = memory[5], .bias = memory[6]},
                                          .wv = {.weight = memory[7], .bias = memory[8]},
                                          .wo = {.weight = memory[9], .bias = memory[10]},
                                          .out = SPREAD(memory[3]),
                                          .lse = SPREAD(memory[4])};
    const subject s = {"self_attention",
                       (void *)(uintptr_t)&desc,
                       sizeof desc,
                       layer_fields,
                       sizeof layer_fields / sizeof *layer_fields,
                       call_layer};
    list_is_complete(&s);
    check_subject(&s);
}
