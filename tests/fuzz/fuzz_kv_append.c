/* SPDX-License-Identifier: MIT */
/*
 * qkv_kv_append() of any descriptor: every cache type, contiguous or in pages,
 * rotated or not. What is refused leaves the cache as it was; what is accepted
 * is written in memory of the exact size, gives the same bytes on every ISA,
 * and changes no row but those it was asked for.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <qkv/qkv.h>

#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            abort();                                                                               \
    } while (0)

enum { NEW_KEY, NEW_VALUE, KEY, VALUE, KEY_SCALE, VALUE_SCALE, COSINES, SINES, BUFFERS };

typedef struct memory {
    void *at[BUFFERS];
    size_t size[BUFFERS];
} memory;

static size_t row_bytes(int32_t dtype, int64_t dim)
{
    const size_t n = (size_t)dim;
    switch (dtype) {
    case QKV_F32:
        return 4 * n;
    case QKV_F16:
    case QKV_BF16:
        return 2 * n;
    case QKV_Q8_0:
        return n / 32 * 34;
    case QKV_Q4_0:
        return n / 32 * 18;
    default:
        return n;
    }
}

static void take_buffer(input *in, memory *m, int which, size_t bytes)
{
    unsigned char *p = malloc(bytes);
    uint64_t state = take(in, 2);
    for (size_t i = 0; i < bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        p[i] = (unsigned char)(in->left ? take(in, 1) : state >> 56);
    }
    m->at[which] = p;
    m->size[which] = bytes;
}

/* Packed tensors, whose sizes follow from few numbers. */
static void take_problem(input *in, qkv_kv_append_desc *d, memory *m, int64_t *positions,
                         int32_t *table)
{
    const int64_t batch = take_int(in, 1, 3), heads = take_int(in, 1, 3);
    const int64_t rows = take_int(in, 0, 20), room = take_int(in, 0, 60);
    const bool blocks = take(in, 1) % 2;
    const int64_t dim = blocks ? 32 * take_int(in, 1, 4) : take_int(in, 1, 70);
    const int64_t value_dim = blocks ? 32 * take_int(in, 1, 3) : take_int(in, 1, 70);
    *d = (qkv_kv_append_desc){.size = sizeof *d,
                              .batch = batch,
                              .kv_heads = heads,
                              .new_len = rows,
                              .kv_len = room,
                              .head_dim = dim,
                              .value_dim = value_dim};
    d->new_key.dtype = (int32_t)take_int(in, 0, 2);
    d->new_value.dtype = (int32_t)take_int(in, 0, 2);
    d->key.dtype = (int32_t)take_int(in, 0, 8);
    d->value.dtype = (int32_t)take_int(in, 0, 8);
    d->flags = take(in, 1) % 2 ? QKV_ROTARY_NEIGHBOURS : 0;

    int64_t cache_rows = batch * heads * room;
    if (take(in, 1) % 2) { /* pages, in any order, now and then shared or out of range */
        d->page_size = INT64_C(8) << take_int(in, 0, 2);
        d->pages = take_int(in, 1, 12);
        d->page_table = table;
        cache_rows = d->pages * heads * d->page_size;
        for (int i = 0; i < 64; i++)
            table[i] = (int32_t)take_int(in, 0, d->pages - (take(in, 1) % 16 ? 1 : 0));
    }
    if (take(in, 1) % 2) {
        d->rotary_dim = 2 * take_int(in, 0, dim / 2);
        d->rotary_len = take_int(in, 0, 80);
        take_buffer(in, m, COSINES, (size_t)(d->rotary_len * d->rotary_dim / 2) * 4);
        take_buffer(in, m, SINES, m->size[COSINES]);
    }
    if (take(in, 1) % 2) {
        d->positions = positions;
        for (int b = 0; b < 3; b++)
            positions[b] = take(in, 1) % 16 ? take_int(in, 0, room) : (int64_t)take(in, 8);
    }
    take_buffer(in, m, NEW_KEY, row_bytes(d->new_key.dtype, batch * heads * rows * dim));
    take_buffer(in, m, NEW_VALUE, row_bytes(d->new_value.dtype, batch * heads * rows * value_dim));
    take_buffer(in, m, KEY, row_bytes(d->key.dtype, dim) * (size_t)cache_rows);
    take_buffer(in, m, VALUE, row_bytes(d->value.dtype, value_dim) * (size_t)cache_rows);
    take_buffer(in, m, KEY_SCALE, d->key.dtype == QKV_I8 ? (size_t)cache_rows * 4 : 0);
    take_buffer(in, m, VALUE_SCALE, d->value.dtype == QKV_I8 ? (size_t)cache_rows * 4 : 0);
    d->new_key.data = m->at[NEW_KEY];
    d->new_value.data = m->at[NEW_VALUE];
    d->key.data = m->at[KEY];
    d->value.data = m->at[VALUE];
    d->key_scale.data = d->key.dtype == QKV_I8 ? m->at[KEY_SCALE] : NULL;
    d->value_scale.data = d->value.dtype == QKV_I8 ? m->at[VALUE_SCALE] : NULL;
    d->cosines = m->at[COSINES];
    d->sines = m->at[SINES];
}

static void copy_all(memory *to, const memory *from)
{
    for (int i = 0; i < BUFFERS; i++) {
        to->size[i] = from->size[i];
        to->at[i] = malloc(from->size[i] + 1);
        if (from->size[i])
            memcpy(to->at[i], from->at[i], from->size[i]);
    }
}

static bool same(const memory *a, const memory *b, int first, int last)
{
    for (int i = first; i <= last; i++)
        if (a->size[i] && memcmp(a->at[i], b->at[i], a->size[i]) != 0)
            return false;
    return true;
}

/* A NaN stays a NaN, but which one it is may differ: of two NaNs that meet, the
 * order of the operands decides. */
static bool is_nan(int32_t dtype, const uint8_t *x)
{
    uint32_t bits = 0;
    switch (dtype) {
    case QKV_F32:
        memcpy(&bits, x, 4);
        return (bits & 0x7fffffff) > 0x7f800000;
    case QKV_F16:
        memcpy(&bits, x, 2);
        return (bits & 0x7fff) > 0x7c00;
    case QKV_BF16:
        memcpy(&bits, x, 2);
        return (bits & 0x7fff) > 0x7f80;
    case QKV_F8_E4M3:
        return (x[0] & 0x7f) == 0x7f;
    case QKV_F8_E5M2:
        return (x[0] & 0x7f) > 0x7c;
    default:
        return false;
    }
}

/* The same elements of a cache; scales of blocks are f16, in front of 'step' - 2 bytes. */
static bool same_cache(int32_t dtype, const memory *a, const memory *b, int i)
{
    const size_t step = dtype == QKV_F32                        ? 4
                        : dtype == QKV_F16 || dtype == QKV_BF16 ? 2
                        : dtype == QKV_Q8_0                     ? 34
                        : dtype == QKV_Q4_0                     ? 18
                                                                : 1;
    const uint8_t *x = a->at[i], *y = b->at[i];
    for (size_t at = 0; at + step <= a->size[i]; at += step) {
        const bool block = step > 4;
        const int32_t first = block ? QKV_F16 : dtype;
        if (is_nan(first, x + at) && is_nan(first, y + at)) {
            if (block && memcmp(x + at + 2, y + at + 2, step - 2) != 0)
                return false;
        } else if (memcmp(x + at, y + at, step) != 0) {
            return false;
        }
    }
    return true;
}

static bool same_caches(const qkv_kv_append_desc *d, const memory *a, const memory *b)
{
    return same_cache(d->key.dtype, a, b, KEY) && same_cache(d->value.dtype, a, b, VALUE) &&
           same_cache(QKV_F32, a, b, KEY_SCALE) && same_cache(QKV_F32, a, b, VALUE_SCALE);
}

static void restore(memory *m, const memory *before)
{
    for (int i = 0; i < BUFFERS; i++)
        if (m->size[i])
            memcpy(m->at[i], before->at[i], m->size[i]);
}

static void free_all(memory *m)
{
    for (int i = 0; i < BUFFERS; i++)
        free(m->at[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    qkv_kv_append_desc d;
    memory m = {.size = {0}}, before, scalar = {.size = {0}};
    int64_t positions[3] = {0};
    int32_t table[64] = {0};
    take_problem(&in, &d, &m, positions, table);
    copy_all(&before, &m);

    for (int32_t i = 0; i < qkv_isa_count(); i++) {
        qkv_isa_info info;
        REQUIRE(qkv_isa_get(i, &info) == QKV_OK);
        if (!info.compiled || !info.supported)
            continue;
        REQUIRE(qkv_isa_select(info.name) == QKV_OK);
        restore(&m, &before);
        const qkv_status status = qkv_kv_append(&d);
        REQUIRE(same(&m, &before, NEW_KEY, NEW_VALUE) && same(&m, &before, COSINES, SINES));
        if (status != QKV_OK)
            REQUIRE(same(&m, &before, KEY, VALUE_SCALE));
        if (i == 0)
            copy_all(&scalar, &m);
        else
            REQUIRE(same_caches(&d, &m, &scalar));
    }
    free_all(&m);
    free_all(&before);
    free_all(&scalar);
    return 0;
}
