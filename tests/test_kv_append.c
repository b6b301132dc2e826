/* SPDX-License-Identifier: MIT */
/*
 * qkv_kv_append(): whole caches, bit for bit, against images that the oracle
 * encodes row by row, in every type, layout and rotation and on every ISA;
 * and every wrong argument.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "oracle/kv.h"

/* MANY rows are moved in turns by all heads. PAGES of a sequence. */
enum { MAX_DIM = 160, MANY = 600, PAGES = (MANY + 20) / 8 };
enum { SLOT_FROM, SLOT_TO = 2, SLOT_SCALE = 4, SLOT_COS = 6, SLOT_SIN };

static const kv_format format_of[] = {
    [QKV_F16] = KV_F16,         [QKV_BF16] = KV_BF16,       [QKV_Q8_0] = KV_Q8_0, [QKV_I8] = KV_I8,
    [QKV_F8_E4M3] = KV_F8_E4M3, [QKV_F8_E5M2] = KV_F8_E5M2, [QKV_Q4_0] = KV_Q4_0};

static int64_t bytes_of(int32_t dtype, int64_t n)
{
    return dtype == QKV_F32 ? 4 * n : oracle_kv_bytes(format_of[dtype], n);
}

static void encode(int32_t dtype, const float *x, int64_t n, void *row, float *scale)
{
    if (dtype == QKV_F32)
        memcpy(row, x, (size_t)n * sizeof *x);
    else
        oracle_kv_encode(format_of[dtype], x, n, row, scale);
}

static float element(int32_t dtype, const void *row, int64_t i)
{
    if (dtype == QKV_F32)
        return ((const float *)row)[i];
    return (float)oracle_kv_element(format_of[dtype], row, i, 1.0f);
}

/* One side, keys or values: what is given, and the image that must result. */
typedef struct side {
    int32_t from, to;
    int64_t dim, rows_bytes, cache_bytes, scales;
    char *new_rows, *cache, *image;
    float *scale, *scale_image;
} side;

typedef struct append_case {
    qkv_kv_append_desc d;
    side sides[2];
    int64_t starts[4], positions[3];
    int32_t table[3 * PAGES];
    float *cosines, *sines;
} append_case;

static void fill_bytes(rng *r, char *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = (char)rng_bits(r);
}

static void make_side(rng *r, side *s, int slot, int64_t new_rows, int64_t cache_rows)
{
    s->rows_bytes = bytes_of(s->from, new_rows * s->dim);
    s->cache_bytes = bytes_of(s->to, cache_rows * s->dim);
    s->scales = s->to == QKV_I8 ? cache_rows : 0;
    s->new_rows = guarded_bytes(SLOT_FROM + slot, (size_t)s->rows_bytes, PLACE_AT_END);
    s->cache = guarded_bytes(SLOT_TO + slot, (size_t)s->cache_bytes, PLACE_AT_END);
    s->scale = guarded(SLOT_SCALE + slot, s->scales, PLACE_AT_END);
    s->image = scratch_alloc((size_t)s->cache_bytes + 1);
    s->scale_image = scratch_alloc((size_t)s->scales * sizeof *s->scale_image + 1);
    for (int64_t i = 0; i < new_rows; i++) {
        float row[MAX_DIM], unused;
        fill_normal(r, row, s->dim, 2.0f);
        encode(s->from, row, s->dim, s->new_rows + bytes_of(s->from, i * s->dim), &unused);
    }
    fill_bytes(r, s->cache, s->cache_bytes);
    memcpy(s->image, s->cache, (size_t)s->cache_bytes);
    for (int64_t i = 0; i < s->scales; i++)
        s->scale[i] = s->scale_image[i] = rng_normal(r);
}

static qkv_tensor tensor(void *data, int32_t dtype)
{
    return (qkv_tensor){.data = data, .dtype = dtype};
}

/* The caller sets the sizes, types and layout first. */
static void make_case(rng *r, append_case *c)
{
    qkv_kv_append_desc *d = &c->d;
    const int64_t sources = d->new_starts ? d->new_len : d->batch * d->new_len;
    const int64_t rows = d->page_size ? d->pages * d->page_size : d->batch * d->kv_len;
    for (int i = 0; i < 2; i++)
        make_side(r, &c->sides[i], i, sources * d->kv_heads, rows * d->kv_heads);
    d->new_key = tensor(c->sides[0].new_rows, c->sides[0].from);
    d->new_value = tensor(c->sides[1].new_rows, c->sides[1].from);
    d->key = tensor(c->sides[0].cache, c->sides[0].to);
    d->value = tensor(c->sides[1].cache, c->sides[1].to);
    if (c->sides[0].scales)
        d->key_scale = tensor(c->sides[0].scale, QKV_F32);
    if (c->sides[1].scales)
        d->value_scale = tensor(c->sides[1].scale, QKV_F32);
    if (d->rotary_dim) {
        const int64_t n = (d->rotary_len - 1) * d->rotary_stride + d->rotary_dim / 2;
        c->cosines = guarded(SLOT_COS, n, PLACE_AT_END);
        c->sines = guarded(SLOT_SIN, n, PLACE_AT_END);
        fill_normal(r, c->cosines, n, 1.0f);
        fill_normal(r, c->sines, n, 1.0f);
        d->cosines = c->cosines;
        d->sines = c->sines;
    }
}

static void turn(const append_case *c, int64_t position, float *x)
{
    const int64_t pairs = c->d.rotary_dim / 2;
    const bool neighbours = c->d.flags & QKV_ROTARY_NEIGHBOURS;
    for (int64_t i = 0; i < pairs; i++) {
        float *first = neighbours ? &x[2 * i] : &x[i];
        float *second = neighbours ? first + 1 : first + pairs;
        const float a = *first, b = *second;
        const float cosine = c->cosines[position * c->d.rotary_stride + i];
        const float sine = c->sines[position * c->d.rotary_stride + i];
        const float ac = a * cosine, bs = b * sine, as = a * sine, bc = b * cosine;
        *first = ac - bs;
        *second = as + bc;
    }
}

/* What the image of one side must become. */
static void draw(append_case *c, int which)
{
    const qkv_kv_append_desc *d = &c->d;
    side *s = &c->sides[which];
    for (int64_t b = 0; b < d->batch; b++) {
        const int64_t first = d->new_starts ? d->new_starts[b] : 0;
        const int64_t count = d->new_starts ? d->new_starts[b + 1] - first : d->new_len;
        for (int64_t h = 0; h < d->kv_heads; h++) {
            for (int64_t i = 0; i < count; i++) {
                const int64_t position = (d->positions ? d->positions[b] : 0) + i;
                const int64_t source =
                    ((d->new_starts ? 0 : b) * d->kv_heads + h) * d->new_len + first + i;
                int64_t target = (b * d->kv_heads + h) * d->kv_len + position;
                if (d->page_size) {
                    const int64_t page =
                        d->page_table[b * d->page_table_stride + position / d->page_size];
                    target = (page * d->kv_heads + h) * d->page_size + position % d->page_size;
                }
                float row[MAX_DIM], unused;
                for (int64_t e = 0; e < s->dim; e++)
                    row[e] = element(s->from, s->new_rows + bytes_of(s->from, source * s->dim), e);
                if (which == 0)
                    turn(c, position, row);
                encode(s->to, row, s->dim, s->image + bytes_of(s->to, target * s->dim),
                       s->scales ? &s->scale_image[target] : &unused);
            }
        }
    }
}

static void run_case(append_case *c)
{
    draw(c, 0);
    draw(c, 1);
    const qkv_status status = qkv_kv_append(&c->d);
    if (status)
        fail_with("status %d: %s", (int)status, qkv_strerror(status));
    guards_intact();
    for (int i = 0; i < 2; i++) {
        const side *s = &c->sides[i];
        for (int64_t at = 0; at < s->cache_bytes; at++)
            if (s->cache[at] != s->image[at])
                fail_with("%s: byte %lld of the cache is %02x, not %02x", i ? "value" : "key",
                          (long long)at, (unsigned char)s->cache[at], (unsigned char)s->image[at]);
        expect_same_bits("scales", s->scale, s->scale_image, s->scales);
        free(c->sides[i].image);
        free(c->sides[i].scale_image);
    }
}

/* Pages in an order of their own, none shared. */
static void make_pages(rng *r, append_case *c, int64_t page_size)
{
    qkv_kv_append_desc *d = &c->d;
    d->page_size = page_size;
    d->page_table_stride = (d->kv_len + page_size - 1) / page_size;
    d->pages = d->batch * d->page_table_stride + 2;
    bool taken[3 * PAGES + 2] = {false};
    for (int64_t i = 0; i < d->batch * d->page_table_stride; i++) {
        int64_t page;
        do
            page = rng_int(r, 0, d->pages - 1);
        while (taken[page]);
        taken[page] = true;
        c->table[i] = (int32_t)page;
    }
    d->page_table = c->table;
}

static void random_case(rng *r, const char *isa, int n)
{
    append_case c = {.d = {.size = sizeof(qkv_kv_append_desc)}};
    qkv_kv_append_desc *d = &c.d;
    const int32_t sources[] = {QKV_F32, QKV_F16, QKV_BF16};
    const bool many = n % 11 == 10;
    for (int i = 0; i < 2; i++) {
        side *s = &c.sides[i];
        s->from = sources[rng_int(r, 0, 2)];
        s->to = (int32_t)(i == 0 ? n % 8 : rng_int(r, 0, 7));
        const int64_t step = s->to == QKV_Q8_0 || s->to == QKV_Q4_0 ? 32 : 1;
        s->dim = rng_int(r, 1, (many ? MAX_DIM / 4 : MAX_DIM) / step) * step;
    }
    d->batch = rng_int(r, 1, many ? 2 : 3);
    d->kv_heads = rng_int(r, 1, 3);
    d->new_len = many ? rng_int(r, MANY / 3, MANY) : rng_int(r, 1, 12);
    d->kv_len = d->new_len + rng_int(r, 0, 20);
    d->head_dim = c.sides[0].dim;
    d->value_dim = c.sides[1].dim;
    if (n % 3 == 0) {
        for (int64_t b = 1; b <= d->batch; b++)
            c.starts[b] = b == d->batch ? d->new_len : rng_int(r, c.starts[b - 1], d->new_len);
        d->new_starts = c.starts;
    }
    if (n % 5 != 0) {
        for (int64_t b = 0; b < d->batch; b++)
            c.positions[b] = rng_int(r, 0, d->kv_len - d->new_len);
        d->positions = c.positions;
    }
    if (n % 2)
        make_pages(r, &c, INT64_C(8) << rng_int(r, 0, 1));
    if (rng_int(r, 0, 2)) {
        d->rotary_dim = rng_int(r, 0, d->head_dim / 2) * 2;
        d->rotary_len = d->rotary_dim ? d->kv_len : 0;
        d->rotary_stride = d->rotary_dim ? d->rotary_dim / 2 + rng_int(r, 0, 3) : 0;
        d->flags = rng_int(r, 0, 1) ? QKV_ROTARY_NEIGHBOURS : 0;
    }
    context("qkv_kv_append on %s, case %d: types %d > %d, %d > %d, dims %lld, %lld, page_size "
            "%lld, rotary %lld",
            isa, n, (int)c.sides[0].from, (int)c.sides[0].to, (int)c.sides[1].from,
            (int)c.sides[1].to, (long long)d->head_dim, (long long)d->value_dim,
            (long long)d->page_size, (long long)d->rotary_dim);
    make_case(r, &c);
    run_case(&c);
}

Test(kv_append, images)
{
    rng r = rng_make("kv_append");
    for (int32_t i = 0; i < qkv_isa_count(); i++) {
        qkv_isa_info info;
        qkv_isa_get(i, &info);
        if (!info.supported || !info.compiled)
            continue;
        qkv_isa_select(info.name);
        for (int n = 0; n < effort_cases(2000); n++)
            random_case(&r, info.name, n);
        tally(i, effort_cases(2000));
    }
    qkv_isa_select(NULL);
}

/* Strided caches, and one side alone. */
Test(kv_append, strides_and_one_side)
{
    enum { HEADS = 2, ROWS = 3, LEN = 9, DIM = 32, GAP = 32 };
    float rows[ROWS * HEADS * DIM];
    unsigned char cache[LEN * (HEADS * 34 + 34)], image[sizeof cache];
    rng r = rng_make("kv_append strides");
    fill_normal(&r, rows, ROWS * HEADS * DIM, 1.0f);
    memset(cache, 0x5a, sizeof cache);
    memcpy(image, cache, sizeof cache);
    const int64_t position = 4;
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < ROWS; i++)
            oracle_kv_encode(KV_Q8_0, rows + (i * HEADS + h) * DIM, DIM,
                             image + (position + i) * (HEADS * 34 + 34) + h * 34, NULL);
    const qkv_kv_append_desc d = {
        .size = sizeof d,
        .kv_heads = HEADS,
        .new_len = ROWS,
        .kv_len = LEN,
        .head_dim = DIM,
        .new_value = {.data = rows, .stride_head = DIM, .stride_row = HEADS * DIM},
        .positions = &position,
        .value = {.data = cache,
                  .dtype = QKV_Q8_0,
                  .stride_head = DIM,
                  .stride_row = HEADS * DIM + GAP},
    };
    context("qkv_kv_append, values alone, [row][head] with gaps");
    const qkv_status status = qkv_kv_append(&d);
    if (status || memcmp(cache, image, sizeof cache) != 0)
        fail_with("status %d, or another image", (int)status);
}

/* ------------------------------------------------------------------ misuse */

#define HUGE_SIZE (INT64_C(1) << 62)
#define MISUSE(status, ...)                                                                        \
    case __COUNTER__ - FIRST - 1:                                                                  \
        *want = (status);                                                                          \
        *what = #__VA_ARGS__;                                                                      \
        __VA_ARGS__;                                                                               \
        return true;

static int64_t bad_numbers[4];
static float many_floats[8];

static bool misuse(int n, qkv_kv_append_desc *d, const char **what, qkv_status *want)
{
    enum { FIRST = __COUNTER__ };
    switch (n) {
        MISUSE(QKV_E_SIZE, d->size = 0)
        MISUSE(QKV_E_SIZE, d->size -= 8)
        MISUSE(QKV_E_FLAGS, d->flags = 1)
        MISUSE(QKV_E_FLAGS, d->reserved = 1)
        MISUSE(QKV_E_FLAGS, d->key.flags = 2)
        MISUSE(QKV_E_FLAGS, d->value_scale.data = many_floats)
        MISUSE(QKV_E_SHAPE, d->batch = -1)
        MISUSE(QKV_E_SHAPE, d->kv_heads = -1)
        MISUSE(QKV_E_SHAPE, d->new_len = -1)
        MISUSE(QKV_E_SHAPE, d->kv_len = -1)
        MISUSE(QKV_E_SHAPE, d->head_dim = 0)
        MISUSE(QKV_E_SHAPE, d->value_dim = -1)
        MISUSE(QKV_E_SHAPE, d->value_dim = 31)
        MISUSE(QKV_E_SHAPE, d->page_size = 12)
        MISUSE(QKV_E_SHAPE, d->page_size = 512)
        MISUSE(QKV_E_SHAPE, d->pages = -1)
        MISUSE(QKV_E_SHAPE, d->page_size = 0)
        MISUSE(QKV_E_SHAPE, d->page_table_stride = 1)
        MISUSE(QKV_E_SHAPE, d->rotary_dim = 3)
        MISUSE(QKV_E_SHAPE, d->rotary_dim = 34)
        MISUSE(QKV_E_SHAPE, d->rotary_dim = -2)
        MISUSE(QKV_E_SHAPE, d->rotary_dim = 0)
        MISUSE(QKV_E_SHAPE, d->rotary_len = 8)
        MISUSE(QKV_E_SHAPE, d->rotary_len = -1)
        MISUSE(QKV_E_SHAPE, d->kv_len = 8)
        MISUSE(QKV_E_SHAPE, bad_numbers[0] = -1; d->positions = bad_numbers)
        MISUSE(QKV_E_SHAPE, bad_numbers[0] = INT64_MAX; d->positions = bad_numbers)
        MISUSE(QKV_E_SHAPE, bad_numbers[0] = 2; bad_numbers[1] = 1; d->new_starts = bad_numbers)
        MISUSE(QKV_E_SHAPE, bad_numbers[0] = -1; d->new_starts = bad_numbers)
        MISUSE(QKV_E_SHAPE, bad_numbers[1] = 4; d->new_starts = bad_numbers)
        MISUSE(QKV_E_STRIDE, d->page_table_stride = -1)
        MISUSE(QKV_E_STRIDE, d->rotary_stride = 15)
        MISUSE(QKV_E_STRIDE, d->key.stride_row = -1)
        MISUSE(QKV_E_STRIDE, d->key.flags = QKV_TENSOR_STRIDED)
        MISUSE(QKV_E_STRIDE, d->value.stride_row = 33; d->value.stride_head = 33 * 8)
        MISUSE(QKV_E_DTYPE, d->new_key.dtype = 99)
        MISUSE(QKV_E_DTYPE, d->key.dtype = -1)
        MISUSE(QKV_E_DTYPE, d->value.dtype = QKV_BOOL)
        MISUSE(QKV_E_DTYPE, d->key_scale.dtype = QKV_F16)
        MISUSE(QKV_E_UNSUPPORTED, d->new_value.dtype = QKV_I8)
        MISUSE(QKV_E_NULL, d->new_key.data = NULL; d->new_value.data = NULL)
        MISUSE(QKV_E_NULL, d->key.data = NULL)
        MISUSE(QKV_E_NULL, d->value.data = NULL)
        MISUSE(QKV_E_NULL, d->key_scale.data = NULL)
        MISUSE(QKV_E_NULL, d->page_table = NULL)
        MISUSE(QKV_E_NULL, d->cosines = NULL)
        MISUSE(QKV_E_NULL, d->sines = NULL)
        MISUSE(QKV_E_ALIGN, d->new_key.data = (char *)d->new_key.data + 1)
        MISUSE(QKV_E_ALIGN, d->key_scale.data = (char *)d->key_scale.data + 2)
        MISUSE(QKV_E_ALIGN, d->cosines = (const float *)((const char *)d->cosines + 1))
        MISUSE(QKV_E_ALIGN, d->sines = (const float *)((const char *)d->sines + 2))
        MISUSE(QKV_E_ALIGN, d->page_table = (const int32_t *)((const char *)d->page_table + 1))
        MISUSE(QKV_E_ALIGN, d->positions = (const int64_t *)((const char *)bad_numbers + 4))
        MISUSE(QKV_E_ALIGN, d->new_starts = (const int64_t *)((const char *)bad_numbers + 4))
        MISUSE(QKV_E_OVERLAP, d->key.data = d->new_key.data)
        MISUSE(QKV_E_OVERLAP, d->key.data = d->new_value.data)
        MISUSE(QKV_E_OVERLAP, d->value.data = d->key.data)
        MISUSE(QKV_E_OVERLAP, d->key_scale.data = d->new_key.data)
        MISUSE(QKV_E_OVERLAP, d->key_scale.data = (void *)(uintptr_t)d->cosines)
        MISUSE(QKV_E_OVERLAP, d->key.data = (void *)(uintptr_t)d->page_table)
        MISUSE(QKV_E_OVERFLOW, d->batch = INT64_MAX)
        MISUSE(QKV_E_OVERFLOW, d->kv_heads = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->pages = HUGE_SIZE)
        MISUSE(QKV_E_OVERFLOW, d->rotary_len = HUGE_SIZE)
        MISUSE(QKV_E_INDEX, ((int32_t *)(uintptr_t)d->page_table)[0] = -1)
        MISUSE(QKV_E_INDEX, ((int32_t *)(uintptr_t)d->page_table)[1] = 3)
    default:
        return false;
    }
}

/* One sequence, 3 new rows from position 7 on, in pages of 8, keys in i8 and
 * turned, values in q8_0. */
Test(kv_append, misuse)
{
    static char cache[2][3 * 2 * 8 * 64], before[2][sizeof cache[0]];
    static float scales[3 * 2 * 8], rows[2][2 * 3 * 32], angles[2][16 * 16];
    for (int n = 0;; n++) {
        int32_t table[2] = {2, 0};
        const int64_t position = 7;
        qkv_kv_append_desc d = {
            .size = sizeof d,
            .kv_heads = 2,
            .new_len = 3,
            .kv_len = 16,
            .head_dim = 32,
            .new_key = {.data = rows[0]},
            .new_value = {.data = rows[1]},
            .positions = &position,
            .key = {.data = cache[0], .dtype = QKV_I8},
            .value = {.data = cache[1], .dtype = QKV_Q8_0},
            .key_scale = {.data = scales},
            .page_size = 8,
            .pages = 3,
            .page_table = table,
            .rotary_dim = 32,
            .rotary_len = 16,
            .cosines = angles[0],
            .sines = angles[1],
        };
        memset(bad_numbers, 0, sizeof bad_numbers);
        memset(cache, 0x77, sizeof cache);
        memcpy(before, cache, sizeof cache);
        if (n == 0 && qkv_kv_append(&d) != QKV_OK)
            fail_with("the descriptor is wrong before any misuse");
        memset(cache, 0x77, sizeof cache);
        const char *what;
        qkv_status want;
        if (!misuse(n, &d, &what, &want))
            break;
        const qkv_status got = qkv_kv_append(&d);
        if (got != want)
            fail_with("after '%s': %d (%s), expected %d (%s)", what, (int)got, qkv_strerror(got),
                      (int)want, qkv_strerror(want));
        if (memcmp(cache, before, sizeof cache) != 0)
            fail_with("after '%s': the cache was written", what);
    }
    if (qkv_kv_append(NULL) != QKV_E_NULL)
        fail_with("no descriptor");
    qkv_kv_append_desc wide = {.size = sizeof wide,
                               .new_len = 1,
                               .kv_len = 1,
                               .head_dim = 4097,
                               .new_key = {.data = rows[0], .dtype = QKV_F16},
                               .key = {.data = cache[0], .dtype = QKV_F16}};
    if (qkv_kv_append(&wide) != QKV_E_UNSUPPORTED)
        fail_with("a converted row that is too long");
}
