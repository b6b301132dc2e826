/* SPDX-License-Identifier: MIT */
/*
 * The edges of every rule, with answers in closed form: queries of 0 make all
 * logits 0, so that an output is the mean of the values that are seen, and
 * value j is j. kernels/SEMANTICS.md lists the cases.
 */
#include "api.h"
#include "problem.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 700 };

/* One head with head_dim 1. */
typedef struct line {
    float q[MOST], k[MOST], v[MOST], out[MOST], lse[MOST];
    qkv_attention_desc desc;
} line;

static line line_make(int64_t q_len, int64_t kv_len)
{
    line x = {
        .desc = {
            .size = sizeof x.desc, .q_len = q_len, .kv_len = kv_len, .head_dim = 1, .scale = 1.0f}};
    for (int j = 0; j < MOST; j++)
        x.v[j] = (float)j;
    return x;
}

static qkv_status line_run(line *x)
{
    x->desc.query.data = x->q;
    x->desc.key.data = x->k;
    x->desc.value.data = x->v;
    x->desc.out.data = x->out;
    x->desc.lse.data = x->lse;
    size_t bytes = 0;
    const qkv_status status = qkv_attention_scratch_size(&x->desc, 1, &bytes);
    return status ? status : qkv_attention(&x->desc, scratch_alloc(bytes), bytes);
}

/* Every row is about the mean of keys begin .. end - 1, as 'sees' tells. */
static void expect_means(line *x, qkv_range (*sees)(int64_t))
{
    for_each_isa(isa)
    {
        cr_assert_eq(line_run(x), QKV_OK);
        for (int64_t i = 0; i < x->desc.q_len; i++) {
            const qkv_range r = sees(i);
            const double n = (double)(r.end - r.begin);
            const double want = n > 0 ? (double)(r.begin + r.end - 1) / 2 : 0;
            const double lse = n > 0 ? log(n) : -HUGE_VAL;
            /* Sums of integers below 2^24 are exact; division and log round. */
            const double bound = 4 * ORACLE_U * fabs(want), lse_bound = 4 * ORACLE_U * (1 + n);
            context("%s, row %d", qkv_isa_name(), (int)i);
            expect_close("mean", &x->out[i], &want, &bound, 1);
            expect_close("lse", &x->lse[i], &lse, &lse_bound, 1);
        }
        tally(isa, 1);
    }
}

static qkv_range last_four(int64_t i)
{
    return (qkv_range){i < 3 ? 0 : i - 3, i + 1};
}

/* A window of W has window_left W - 1: the query's own key counts. */
Test(edges, window_counts_its_own_key)
{
    line x = line_make(8, 8);
    x.desc.flags = QKV_CAUSAL | QKV_WINDOW;
    x.desc.window_left = 3;
    x.desc.window_right = -1;
    expect_means(&x, last_four);
    x.desc.flags = QKV_WINDOW;
    x.desc.window_right = 0; /* the same without a causal flag */
    expect_means(&x, last_four);
}

static qkv_range only_itself(int64_t i)
{
    return (qkv_range){i, i + 1};
}

static qkv_range causal(int64_t i)
{
    return (qkv_range){0, i + 1};
}

static qkv_range nothing(int64_t i)
{
    (void)i;
    return (qkv_range){0, 0};
}

Test(edges, window_widths)
{
    line x = line_make(40, 40);
    x.desc.flags = QKV_WINDOW;
    expect_means(&x, only_itself);
    x.desc.flags |= QKV_CAUSAL;
    x.desc.window_left = INT64_MAX;
    x.desc.window_right = INT64_MAX;
    expect_means(&x, causal);
    x.desc.window_left = -1;
    x.desc.window_right = INT64_MIN;
    expect_means(&x, causal);
    const int64_t far = 1000, before = -1000;
    x.desc.window_left = 5;
    x.desc.q_offsets = &far;
    expect_means(&x, nothing);
    x.desc.q_offsets = &before;
    expect_means(&x, nothing);
}

static qkv_range last_ten(int64_t i)
{
    return (qkv_range){i < 9 ? 0 : i - 9, i + 1};
}

/* Whole blocks hidden before the first that is seen. */
Test(edges, window_behind_hidden_blocks)
{
    line x = line_make(600, 600);
    x.desc.flags = QKV_CAUSAL | QKV_WINDOW;
    x.desc.window_left = 9;
    expect_means(&x, last_ten);
}

Test(edges, sink_tokens)
{
    for_each_isa(isa)
    {
        for (int64_t q_len = 1; q_len <= 600; q_len += 599) {
            line x = line_make(q_len, 600);
            x.desc.flags = QKV_CAUSAL | QKV_WINDOW;
            x.desc.window_left = 1;
            x.desc.sink_tokens = 2;
            cr_assert_eq(line_run(&x), QKV_OK);
            /* keys 0, 1, 598, 599 */
            cr_assert_float_eq(x.out[q_len - 1], 299.5f, 1e-3f, "%s: %g", qkv_isa_name(),
                               (double)x.out[q_len - 1]);
            if (q_len > 1)
                cr_assert_eq(x.out[0], 0.0f); /* key 1 is ahead */
            tally(isa, 1);
        }
    }
}

static qkv_range from_the_top(int64_t i)
{
    return (qkv_range){0, i + 1 < 5 ? i + 1 : 5};
}

static qkv_range to_the_bottom(int64_t i)
{
    return (qkv_range){0, i + 4};
}

Test(edges, causal_corners)
{
    line x = line_make(2, 5);
    x.desc.flags = QKV_CAUSAL;
    expect_means(&x, to_the_bottom);
    const int64_t top = 0;
    x.desc.q_offsets = &top;
    expect_means(&x, from_the_top);
    x.desc.q_len = 60;
    expect_means(&x, from_the_top);
}

static void expect_row(line *x, int64_t i, float out, float lse)
{
    for_each_isa(isa)
    {
        cr_assert_eq(line_run(x), QKV_OK);
        const float slack = 1e-6f;
        if (!(x->out[i] == out || fabsf(x->out[i] - out) <= slack * fabsf(out)) ||
            !(x->lse[i] == lse || fabsf(x->lse[i] - lse) <= slack * (1.0f + fabsf(lse))))
            fail_with("%s: out %.9g, lse %.9g, expected %.9g and %.9g", qkv_isa_name(),
                      (double)x->out[i], (double)x->lse[i], (double)out, (double)lse);
        tally(isa, 1);
    }
}

/* 0 times infinity or a NaN is a NaN where the key is seen: for 1 row and for 30, with a
 * mask and without, and whatever weight of 0 it has. */
Test(edges, odd_values_of_weight_0)
{
    const float odd[] = {INFINITY, -INFINITY, NAN};
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        for (int i = 0; i < 6; i++) {
            const float mask[3] = {0.0f, -1e4f, 0.0f};
            line x = line_make(q_len, 3);
            if (i < 3)
                x.desc.mask =
                    (qkv_mask){.data = mask, .stride_key = 1, .flags = QKV_TENSOR_STRIDED};
            for (int j = 0; j < q_len; j++)
                x.q[j] = 1.0f;
            x.k[1] = i < 3 ? 0.0f : -1e4f;
            x.v[1] = odd[i % 3];
            for_each_isa(isa)
            {
                context("%s, %d queries, case %d", qkv_isa_name(), (int)q_len, i);
                cr_assert_eq(line_run(&x), QKV_OK);
                for (int64_t row = 0; row < q_len; row++)
                    cr_assert(isnan(x.out[row]));
                tally(isa, 1);
            }
        }
    }
}

/* Finite numbers hide nothing, -infinity everything; for 1 row and for 30. */
Test(edges, additive_masks)
{
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        float mask[3] = {-FLT_MAX, -FLT_MAX, -FLT_MAX};
        line x = line_make(q_len, 3);
        x.desc.mask = (qkv_mask){.data = mask, .stride_key = 1, .flags = QKV_TENSOR_STRIDED};
        context("lowest finite");
        expect_row(&x, q_len - 1, 1.0f, -FLT_MAX);

        context("overflow to -infinity");
        for (int64_t i = 0; i < q_len; i++)
            x.q[i] = 1e38f;
        x.k[0] = x.k[1] = x.k[2] = -1.0f;
        expect_row(&x, q_len - 1, 0.0f, -INFINITY);
        memset(x.q, 0, sizeof x.q);

        context("all hidden");
        mask[0] = mask[1] = mask[2] = -INFINITY;
        expect_row(&x, q_len - 1, 0.0f, -INFINITY);

        context("all but one hidden, and NaN behind them");
        mask[2] = -40000.0f;
        x.k[0] = x.v[0] = NAN;
        x.k[1] = INFINITY;
        x.v[1] = -INFINITY;
        expect_row(&x, q_len - 1, 2.0f, -40000.0f);
    }
}

static qkv_range up_to_itself(int64_t i)
{
    return (qkv_range){0, i + 1};
}

/* A cap after the mask would make hidden keys visible again. */
Test(edges, softcap_comes_before_masks)
{
    line x = line_make(40, 40);
    x.desc.flags = QKV_CAUSAL;
    x.desc.softcap = 5.0f;
    expect_means(&x, up_to_itself);
}

Test(edges, softcap_of_large_logits)
{
    const float large[] = {1e6f, 3e38f, INFINITY};
    for (int n = 0; n < 3; n++) {
        for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
            line x = line_make(q_len, 2);
            x.desc.softcap = 1.0f;
            for (int64_t i = 0; i < q_len; i++)
                x.q[i] = 1.0f;
            x.k[0] = -large[n];
            x.k[1] = large[n];
            const double e = exp(-2.0);
            context("logits of %g", (double)large[n]);
            expect_row(&x, q_len - 1, (float)(1 / (1 + e)), (float)(1 + log(1 + e)));
        }
    }
}

/* exp(0) of the sink beside three keys. */
Test(edges, sinks)
{
    for (int64_t q_len = 1; q_len <= 30; q_len += 29) {
        line x = line_make(q_len, 3);
        float sink = 0.0f;
        x.desc.sinks = &sink;
        x.v[0] = x.v[1] = x.v[2] = 1.0f;
        context("sink 0");
        expect_row(&x, q_len - 1, 0.75f, logf(4.0f));
        context("no sink");
        sink = -INFINITY;
        expect_row(&x, q_len - 1, 1.0f, logf(3.0f));
        context("a sink alone");
        sink = 2.5f;
        x.desc.kv_len = 0;
        expect_row(&x, q_len - 1, 0.0f, 2.5f);
    }
}

/*
 * 'seen' rows behind 'hidden' ones that nobody may touch, and that nothing else
 * lies among: a tensor is where its descriptor says, read or not.
 */
static float *rows_behind_hidden(int64_t hidden, int64_t seen, int64_t dim)
{
    const size_t row = (size_t)dim * sizeof(float), page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t before = ((size_t)hidden * row + page - 1) / page * page;
    const size_t behind = ((size_t)seen * row + page - 1) / page * page;
    char *all = mmap(NULL, before + behind, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert(all != MAP_FAILED);
    cr_assert_eq(mprotect(all + before, behind, PROT_READ | PROT_WRITE), 0);
    return (float *)(void *)(all + before);
}

enum { HIDDEN_DIM = 16, HIDDEN_QUERIES = 40 };

/* Runs 'desc' on every ISA with its last 'seen' keys readable and no other. */
static void run_with_hidden(const char *name, qkv_attention_desc desc, int64_t seen)
{
    rng r = rng_make(name);
    const int64_t hidden = desc.kv_len - seen, dim = HIDDEN_DIM;
    float *k = rows_behind_hidden(hidden, seen, dim), *v = rows_behind_hidden(hidden, seen, dim);
    float q[HIDDEN_QUERIES * HIDDEN_DIM], out[HIDDEN_QUERIES * HIDDEN_DIM];
    fill_normal(&r, k, seen * dim, 1.0f);
    fill_normal(&r, v, seen * dim, 1.0f);
    fill_normal(&r, q, HIDDEN_QUERIES * dim, 1.0f);
    desc.size = sizeof desc;
    desc.head_dim = dim;
    desc.query.data = q;
    desc.key.data = k - hidden * dim;
    desc.value.data = v - hidden * dim;
    desc.out.data = out;
    for_each_isa(isa)
    {
        size_t bytes = 0;
        cr_assert_eq(qkv_attention_scratch_size(&desc, 1, &bytes), QKV_OK);
        void *scratch = scratch_alloc(bytes);
        cr_assert_eq(qkv_attention(&desc, scratch, bytes), QKV_OK);
        free(scratch);
        tally(isa, 1);
    }
}

/* Keys before the window's first block lie in memory that may not be read. */
Test(edges, keys_outside_the_window_are_not_read)
{
    /* A multiple of every block: of 96, 120, 144, 192 and 512 keys. */
    enum { FIRST = 23040, SEEN = 40 };
    for (int64_t q_len = 1; q_len <= HIDDEN_QUERIES; q_len += 13)
        run_with_hidden("edges window",
                        (qkv_attention_desc){.flags = QKV_WINDOW | QKV_CAUSAL,
                                             .q_len = q_len,
                                             .kv_len = FIRST + SEEN,
                                             .window_left = SEEN - q_len},
                        SEEN);
}

/* One query's window begins at no block's end: not a key before it is read. */
Test(edges, keys_outside_one_window_are_not_read)
{
    enum { SEEN = 256 };
    for (int64_t kv_len = 3000; kv_len < 3500; kv_len += 64) /* whole pages of hidden keys */
        run_with_hidden("edges one window",
                        (qkv_attention_desc){.flags = QKV_WINDOW | QKV_CAUSAL,
                                             .q_len = 1,
                                             .kv_len = kv_len / 64 * 64,
                                             .window_left = SEEN - 1},
                        SEEN);
}

/* A block that a mask hides from everybody is not read either. (What is seen
 * is long enough not to be taken along by the block before it.) */
Test(edges, masked_blocks_are_not_read)
{
    enum { HIDDEN = 23040, SEEN = 300 }; /* likewise */
    static uint8_t mask[HIDDEN + SEEN];
    memset(mask + HIDDEN, 1, SEEN);
    for (int64_t q_len = 1; q_len <= HIDDEN_QUERIES; q_len += 13)
        run_with_hidden("edges mask",
                        (qkv_attention_desc){.q_len = q_len,
                                             .kv_len = HIDDEN + SEEN,
                                             .mask = {.data = mask,
                                                      .stride_key = 1,
                                                      .dtype = QKV_BOOL,
                                                      .flags = QKV_TENSOR_STRIDED}},
                        SEEN);
}

/*
 * A row's bits with QKV_INVARIANT: all queries at once, and one by one against
 * as many keys as there were when it was the newest.
 */
Test(edges, invariant_bits)
{
    enum { DIM = 20, HEADS = 4, QUERIES = 11 };
    rng r = rng_make("edges invariant");
    static float q[HEADS * QUERIES * DIM], k[MOST * DIM], v[MOST * DIM];
    static float all[HEADS * QUERIES * DIM], one[HEADS * DIM];
    fill_normal(&r, q, HEADS * QUERIES * DIM, 1.0f);
    fill_normal(&r, k, MOST * DIM, 1.0f);
    fill_normal(&r, v, MOST * DIM, 1.0f);
    for (int64_t kv_len = QUERIES; kv_len < 600; kv_len += kv_len < 280 ? 7 : 61) {
        qkv_attention_desc desc = {
            .size = sizeof desc,
            .flags = QKV_CAUSAL | QKV_INVARIANT | (kv_len % 2 ? QKV_WINDOW : 0),
            .q_heads = HEADS,
            .kv_heads = 1,
            .q_len = QUERIES,
            .kv_len = kv_len,
            .head_dim = DIM,
            .window_left = kv_len % 2 ? 100 : 0,
            .query.data = q,
            .key.data = k,
            .value.data = v,
            .out.data = all,
        };
        for_each_isa(isa)
        {
            size_t bytes = 0;
            cr_assert_eq(qkv_attention_scratch_size(&desc, 1, &bytes), QKV_OK);
            cr_assert_eq(qkv_attention(&desc, scratch_alloc(bytes), bytes), QKV_OK);
            for (int64_t i = 0; i < QUERIES; i++) {
                qkv_attention_desc single = desc;
                single.q_len = 1;
                single.kv_len = kv_len - QUERIES + i + 1;
                single.query = (qkv_tensor){
                    .data = q + i * DIM, .stride_head = QUERIES * DIM, .stride_row = DIM};
                single.out.data = one;
                cr_assert_eq(qkv_attention(&single, scratch_alloc(bytes), bytes), QKV_OK);
                context("%s: kv_len %d, query %d", qkv_isa_name(), (int)kv_len, (int)i);
                for (int64_t h = 0; h < HEADS; h++)
                    expect_same_bits("row", one + h * DIM, all + (h * QUERIES + i) * DIM, DIM);
            }
            tally(isa, 1);
        }
    }
}

/* The same where heads are too large for tiles, and a window begins elsewhere for
 * every query. */
Test(edges, invariant_bits_of_large_heads)
{
    enum { DIM = 40000, VALUE_DIM = 5, KEYS = 700, HEADS = 2, QUERIES = 3 };
    rng r = rng_make("edges invariant large");
    float *q = malloc(sizeof(float[HEADS * QUERIES * DIM])), *k = malloc(sizeof(float[KEYS + DIM]));
    static float v[KEYS * VALUE_DIM];
    float all[HEADS * QUERIES * VALUE_DIM], one[HEADS * VALUE_DIM];
    fill_normal(&r, q, HEADS * QUERIES * DIM, 1.0f);
    fill_normal(&r, k, KEYS + DIM, 1.0f); /* each key begins an element further on */
    fill_normal(&r, v, KEYS * VALUE_DIM, 1.0f);
    const qkv_attention_desc desc = {.size = sizeof desc,
                                     .flags = QKV_CAUSAL | QKV_INVARIANT | QKV_WINDOW,
                                     .q_heads = HEADS,
                                     .kv_heads = 1,
                                     .q_len = QUERIES,
                                     .kv_len = KEYS,
                                     .head_dim = DIM,
                                     .value_dim = VALUE_DIM,
                                     .window_left = 600,
                                     .window_right = -1,
                                     .query.data = q,
                                     .key = {.data = k, .stride_row = 1},
                                     .value.data = v,
                                     .out.data = all};
    for_each_isa(isa)
    {
        size_t bytes = 0;
        qkv_attention_support support;
        cr_assert_eq(qkv_attention_supports(&desc, &support), QKV_OK);
        cr_assert_eq(support.path, QKV_PATH_GENERAL);
        cr_assert_eq(qkv_attention_scratch_size(&desc, 1, &bytes), QKV_OK);
        void *scratch = scratch_alloc(bytes);
        cr_assert_eq(qkv_attention(&desc, scratch, bytes), QKV_OK);
        for (int64_t i = 0; i < QUERIES; i++) {
            qkv_attention_desc single = desc;
            single.q_len = 1;
            single.kv_len = KEYS - QUERIES + i + 1;
            single.query =
                (qkv_tensor){.data = q + i * DIM, .stride_head = QUERIES * DIM, .stride_row = DIM};
            single.out.data = one;
            cr_assert_eq(qkv_attention(&single, scratch, bytes), QKV_OK);
            context("%s: query %d", qkv_isa_name(), (int)i);
            for (int64_t h = 0; h < HEADS; h++)
                expect_same_bits("row", one + h * VALUE_DIM, all + (h * QUERIES + i) * VALUE_DIM,
                                 VALUE_DIM);
        }
        free(scratch);
        tally(isa, 1);
    }
    free(q);
    free(k);
}

/* What a row does not see leaves no trace, not even in a bit. */
Test(edges, hidden_bits)
{
    enum { DIM = 13, KEYS = 300, QUERIES = 33 };
    rng r = rng_make("edges hidden");
    static float q[QUERIES * DIM], k[KEYS * DIM], v[KEYS * DIM];
    static float clean[QUERIES * DIM], out[QUERIES * DIM];
    static uint8_t mask[QUERIES * KEYS];
    for (int64_t q_len = 1; q_len <= QUERIES; q_len += 8) {
        fill_normal(&r, q, QUERIES * DIM, 1.0f);
        fill_normal(&r, k, KEYS * DIM, 1.0f);
        fill_normal(&r, v, KEYS * DIM, 1.0f);
        for (int i = 0; i < QUERIES * KEYS; i++)
            mask[i] = (uint8_t)(i % KEYS % 5 != 2 && rng_int(&r, 0, 2) > 0);
        qkv_attention_desc desc = {
            .size = sizeof desc,
            .q_len = q_len,
            .kv_len = KEYS,
            .head_dim = DIM,
            .mask = {.data = mask, .dtype = QKV_BOOL},
            .query.data = q,
            .key.data = k,
            .value.data = v,
        };
        for (int pass = 0; pass < 2; pass++) {
            for_each_isa(isa)
            {
                static float kept[QKV_ISA_COUNT][QUERIES * DIM];
                size_t bytes = 0;
                desc.out.data = pass ? out : clean;
                cr_assert_eq(qkv_attention_scratch_size(&desc, 1, &bytes), QKV_OK);
                cr_assert_eq(qkv_attention(&desc, scratch_alloc(bytes), bytes), QKV_OK);
                if (pass == 0)
                    memcpy(kept[isa], clean, sizeof clean);
                context("%s: q_len %d", qkv_isa_name(), (int)q_len);
                if (pass)
                    expect_same_bits("out", out, kept[isa], q_len * DIM);
                tally(isa, 1);
            }
            for (int j = 2; j < KEYS; j += 5)
                for (int d = 0; d < DIM; d++) {
                    k[j * DIM + d] = d % 2 ? NAN : INFINITY;
                    v[j * DIM + d] = d % 2 ? -INFINITY : NAN;
                }
        }
    }
}

/*
 * A prefix that sequences share is read once for all of them: their queries as
 * the rows of one sequence against it, each against its own suffix, and the two
 * merged. Queries of 0 make the result the mean of prefix and suffix.
 */
Test(edges, shared_prefix)
{
    enum { BATCH = 5, HEADS = 3, DIM = 4, PREFIX = 200, SUFFIX = 30 };
    static float q[BATCH * HEADS * DIM], prefix[HEADS * PREFIX * DIM];
    static float suffix[BATCH * HEADS * SUFFIX * DIM];
    static float out[2][BATCH * HEADS * DIM], lse[2][BATCH * HEADS];
    const int64_t lens[BATCH] = {0, 1, 7, 29, 30};
    for (int i = 0; i < HEADS * PREFIX * DIM; i++)
        prefix[i] = (float)(i / DIM % PREFIX + 10 * (i / DIM / PREFIX));
    for (int i = 0; i < BATCH * HEADS * SUFFIX * DIM; i++)
        suffix[i] = (float)(PREFIX + i / DIM % SUFFIX + 10 * (i / DIM / SUFFIX % HEADS));

    /* Row b of head h is query (b, h): what the batch calls [b][h][0]. */
    const qkv_tensor rows = {.stride_head = DIM, .stride_row = HEADS * DIM};
    qkv_attention_desc shared = {.size = sizeof shared,
                                 .q_heads = HEADS,
                                 .q_len = BATCH,
                                 .kv_len = PREFIX,
                                 .head_dim = DIM,
                                 .query = rows,
                                 .out = rows,
                                 .lse = {.stride_head = 1, .stride_row = HEADS}};
    shared.query.data = q;
    shared.key.data = shared.value.data = prefix;
    shared.out.data = out[0];
    shared.lse.data = lse[0];
    const qkv_attention_desc own = {.size = sizeof own,
                                    .batch = BATCH,
                                    .q_heads = HEADS,
                                    .q_len = 1,
                                    .kv_len = SUFFIX,
                                    .kv_lens = lens,
                                    .head_dim = DIM,
                                    .query.data = q,
                                    .key.data = suffix,
                                    .value.data = suffix,
                                    .out.data = out[1],
                                    .lse.data = lse[1]};
    const float *const outs[] = {out[0], out[1]}, *const lses[] = {lse[0], lse[1]};
    for_each_isa(isa)
    {
        size_t bytes = 0;
        cr_assert_eq(qkv_attention_scratch_size(&shared, 1, &bytes), QKV_OK);
        cr_assert_eq(qkv_attention(&shared, scratch_alloc(bytes), bytes), QKV_OK);
        cr_assert_eq(qkv_attention_scratch_size(&own, 1, &bytes), QKV_OK);
        cr_assert_eq(qkv_attention(&own, scratch_alloc(bytes), bytes), QKV_OK);
        const qkv_merge_desc merge = {.size = sizeof merge,
                                      .parts = 2,
                                      .rows = BATCH * HEADS,
                                      .value_dim = DIM,
                                      .part_out = outs,
                                      .part_lse = lses,
                                      .out = out[0],
                                      .lse = lse[0]};
        cr_assert_eq(qkv_merge(&merge), QKV_OK);
        for (int r = 0; r < BATCH * HEADS; r++) {
            const int64_t n = PREFIX + lens[r / HEADS];
            const double mean = 10.0 * (r % HEADS) + (double)(n - 1) / 2;
            /* The header's bound: |lse| and |lse - m| are below 5.5, and each part
             * is within 32 u of its mean. */
            const double bound = (32 + 4 + 2 * 5.5 + 4) * ORACLE_U * 260;
            const double log_n = log((double)n), log_bound = 32 * ORACLE_U * 5.5;
            context("%s: sequence %d, head %d", qkv_isa_name(), r / HEADS, r % HEADS);
            for (int d = 0; d < DIM; d++)
                expect_close("mean", &out[0][r * DIM + d], &mean, &bound, 1);
            expect_close("lse", &lse[0][r], &log_n, &log_bound, 1);
        }
        tally(isa, 1);
    }
}

Test(edges, alibi_slopes)
{
    float eight[8], twelve[12];
    cr_assert_eq(qkv_alibi_slopes(eight, 8), QKV_OK);
    for (int h = 0; h < 8; h++)
        cr_assert_eq(eight[h], ldexpf(1.0f, -h - 1));
    cr_assert_eq(qkv_alibi_slopes(twelve, 12), QKV_OK);
    for (int h = 0; h < 8; h++)
        cr_assert_eq(twelve[h], eight[h]);
    for (int h = 8; h < 12; h++)
        cr_assert_eq(twelve[h], (float)exp2(-0.5 * (2 * (h - 8) + 1)));
    cr_assert_eq(qkv_alibi_slopes(NULL, 0), QKV_OK);
    cr_assert_eq(qkv_alibi_slopes(NULL, 1), QKV_E_NULL);
    cr_assert_eq(qkv_alibi_slopes(eight, -1), QKV_E_SHAPE);
    tally(0, 1);
}

/* ----------------------------------------------------------------- refusals */

#define REFUSED(code, ...)                                                                         \
    do {                                                                                           \
        line x = line_make(4, 4);                                                                  \
        qkv_attention_desc *d = &x.desc;                                                           \
        __VA_ARGS__;                                                                               \
        const qkv_status status = line_run(&x);                                                    \
        if (status != (code))                                                                      \
            fail_with("%s: %s", #__VA_ARGS__, qkv_strerror(status));                               \
        for (int i = 0; i < 4; i++)                                                                \
            cr_assert_eq(x.out[i], 0.0f);                                                          \
        tally(0, 1);                                                                               \
    } while (0)

Test(edges, refusals)
{
    static float f[64];
    static uint64_t tree[64];
    REFUSED(QKV_E_FLAGS, d->window_left = 3);
    REFUSED(QKV_E_FLAGS, d->window_right = 1);
    REFUSED(QKV_E_FLAGS, d->sink_tokens = 1);
    REFUSED(QKV_E_SHAPE, d->flags = QKV_WINDOW; d->sink_tokens = -1);
    REFUSED(QKV_E_VALUE, d->softcap = -1.0f);
    REFUSED(QKV_E_VALUE, d->softcap = NAN);
    REFUSED(QKV_E_VALUE, d->softcap = INFINITY);
    REFUSED(QKV_E_VALUE, d->softcap = 1e-39f);
    REFUSED(QKV_E_VALUE, d->weights_stage = 4);
    REFUSED(QKV_E_DTYPE, d->mask.data = f; d->mask.dtype = QKV_I8);
    REFUSED(QKV_E_DTYPE, d->mask.dtype = 99);
    REFUSED(QKV_E_FLAGS, d->mask.data = f; d->mask.flags = 4);
    REFUSED(QKV_E_STRIDE, d->mask.data = f; d->mask.stride_key = -1);
    REFUSED(QKV_E_ALIGN, d->mask.data = (char *)f + 2);
    REFUSED(QKV_E_OVERFLOW, d->mask.data = f; d->mask.stride_query = INT64_MAX / 2);
    REFUSED(QKV_E_STRIDE, d->tree_mask = tree);
    REFUSED(QKV_E_ALIGN, d->tree_mask = (uint64_t *)(void *)((char *)tree + 4); d->tree_stride = 1);
    REFUSED(QKV_E_OVERFLOW, d->tree_mask = tree; d->tree_stride = INT64_MAX / 2);
    REFUSED(QKV_E_ALIGN, d->slopes = (float *)(void *)((char *)f + 1));
    REFUSED(QKV_E_ALIGN, d->sinks = (float *)(void *)((char *)f + 1));
    REFUSED(QKV_E_ALIGN, d->head_scales = (float *)(void *)((char *)f + 1));
    REFUSED(QKV_E_DTYPE, d->row_max.data = f; d->row_max.dtype = QKV_F16);
    REFUSED(QKV_E_DTYPE, d->weights.data = f; d->weights.dtype = QKV_BF16);
    REFUSED(QKV_E_OVERLAP, d->mask.data = x.out);
    REFUSED(QKV_E_OVERLAP, d->slopes = x.out);
    REFUSED(QKV_E_OVERLAP, d->sinks = x.lse);
    REFUSED(QKV_E_OVERLAP, d->row_max.data = x.lse);
    REFUSED(QKV_E_OVERLAP, d->weights.data = x.k);
    REFUSED(QKV_E_STRIDE, d->weights.data = f; d->weights.stride_row = 2);
}
