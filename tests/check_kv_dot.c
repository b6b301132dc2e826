/* SPDX-License-Identifier: MIT */
/*
 * Scores against the keys of a cache, in every format: within the bound of a
 * dot product of the exact values of the elements.
 */
#include "checks.h"

#include <math.h>
#include <string.h>

#include "oracle/kv.h"

enum { SLOT_Q, SLOT_K, SLOT_SCALES, SLOT_S, SLOT_ONE, SLOT_ONE_SCALE };
enum { WANT, BOUND };

typedef struct dot_case {
    int64_t rows, keys, dim, pad;
    int place;
    bool accumulate;
    bool small; /* denormal elements and products */
} dot_case;

/* Elements of a range where nothing overflows, written in the format. */
static void fill_keys(rng *r, kv_format f, char *keys, int64_t stride, float *scales, dot_case c)
{
    float row[4096];
    for (int64_t j = 0; j < c.keys; j++) {
        if (c.small)
            fill_binades(r, row, c.dim, -24, -3);
        else
            fill_normal(r, row, c.dim, 1.0f);
        oracle_kv_encode(f, row, c.dim, keys + j * stride, &scales[j * (1 + c.pad)]);
    }
}

/* What a product below the normal range loses; 2^8 times as much for e4m3,
 * which kernels multiply by 2^8 at last. */
static double lost_product(kv_format f)
{
    return (f == KV_F8_E4M3 ? 256 : 1) * ORACLE_TINY;
}

/*
 * Kernels but the scalar ones may round a row of queries to 16 bits for keys
 * of integers: by half a step of max|q| / 32767. Products and sums of those
 * are exact; two roundings of the scales come on top.
 */
static double query_rounding(qkv_dot_fn *fn, kv_format f, const float *query, int64_t n)
{
    if (fn == qkv_dot_q8_0_scalar || fn == qkv_dot_q4_0_scalar || fn == qkv_dot_i8_scalar ||
        (f != KV_Q8_0 && f != KV_Q4_0 && f != KV_I8))
        return 0;
    double max = 0;
    for (int64_t d = 0; d < n; d++)
        max = fmax(max, fabs((double)query[d]));
    return max / (ORACLE_U > 0x1p-24 ? 32767 : 65534); /* a whole step in directed rounding */
}

static void want_scores(const qkv_dot_args *a, qkv_dot_fn *fn, kv_format f, const float *before,
                        double *want, double *bound)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t j = 0; j < a->kv_len; j++) {
            const char *key = (const char *)a->keys + j * a->keys_stride;
            const float scale = a->key_scales ? a->key_scales[j * a->key_scales_stride] : 1.0f;
            const float *query = a->queries + i * a->queries_stride;
            const double rounding = query_rounding(fn, f, query, a->head_dim);
            double sum = 0, absolute = 0, inherited = 0;
            for (int64_t d = 0; d < a->head_dim; d++) {
                const double k = oracle_kv_element(f, key, d, scale);
                sum += (double)query[d] * k;
                absolute += (fabs((double)query[d]) + rounding) * fabs(k);
                inherited += rounding * fabs(k);
            }
            const double old = a->accumulate ? (double)before[i * a->scores_stride + j] : 0;
            const int64_t at = i * a->kv_len + j;
            want[at] = sum + old;
            bound[at] = inherited + (double)(a->head_dim + 2) * ORACLE_U * absolute +
                        (double)a->head_dim * lost_product(f) +
                        (a->accumulate ? ORACLE_U * (fabs(old) + absolute) : 0);
        }
    }
}

/* The same score computed by itself, elsewhere, has the same bits. */
static void check_position(const qkv_dot_args *a, qkv_dot_fn *fn, kv_format f, int place)
{
    const int64_t bytes = oracle_kv_bytes(f, a->head_dim);
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t j = 0; j < a->kv_len; j++) {
            float score = 0.0f;
            char *key = guarded_elements(SLOT_ONE, (size_t)bytes, 1 + (place + 3) % (PLACES_16 - 1),
                                         oracle_kv_align(f));
            memcpy(key, (const char *)a->keys + j * a->keys_stride, (size_t)bytes);
            qkv_dot_args one = *a;
            one.queries += i * a->queries_stride;
            one.keys = key;
            if (a->key_scales)
                one.key_scales += j * a->key_scales_stride;
            one.scores = &score;
            one.rows = one.kv_len = 1;
            fn(&one);
            if (bits_of(score) != bits_of(a->scores[i * a->scores_stride + j]))
                fail_with("score %lld, %lld: other bits than alone", (long long)i, (long long)j);
        }
    }
}

/* Keys found by a list of their addresses, in the opposite order. */
static void check_listed(const qkv_dot_args *a, qkv_dot_fn *fn)
{
    enum { KEYS = 70 };
    const void *keys_at[KEYS];
    float scales[KEYS], scores[QKV_ROWS_MAX * KEYS];
    for (int64_t j = 0; j < a->kv_len; j++) {
        const int64_t at = a->kv_len - 1 - j;
        keys_at[at] = (const char *)a->keys + j * a->keys_stride;
        scales[at] = a->key_scales ? a->key_scales[j * a->key_scales_stride] : 1.0f;
    }
    qkv_dot_args listed = *a;
    listed.keys = NULL;
    listed.keys_at = keys_at;
    listed.scattered = true;
    if (a->key_scales)
        listed.key_scales = scales;
    listed.key_scales_stride = 1;
    listed.scores = scores;
    listed.scores_stride = KEYS;
    fn(&listed);
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->kv_len; j++)
            if (bits_of(scores[i * KEYS + a->kv_len - 1 - j]) !=
                bits_of(a->scores[i * a->scores_stride + j]))
                fail_with("score %lld, %lld: other bits from a list", (long long)i, (long long)j);
}

static void check_case(const test_isa *isa, qkv_dot_fn *fn, const char *op, kv_format f, rng *r,
                       dot_case c, bool positions)
{
    context("%s on %s: rows %lld, keys %lld, head_dim %lld, pad %lld, place %d, accumulate %d", op,
            isa->name, (long long)c.rows, (long long)c.keys, (long long)c.dim, (long long)c.pad,
            c.place, c.accumulate);
    const int64_t bytes = oracle_kv_bytes(f, c.dim);
    qkv_dot_args a = {.queries_stride = c.dim + c.pad,
                      .keys_stride = bytes + c.pad,
                      .key_scales_stride = 1 + c.pad,
                      .scores_stride = c.keys + c.pad,
                      .rows = c.rows,
                      .kv_len = c.keys,
                      .head_dim = c.dim,
                      .accumulate = c.accumulate};
    const size_t align = oracle_kv_align(f);
    const int other = c.place ? 1 + (c.place + 4) % (PLACES - 1) : 0;
    const int floats = c.place ? 1 + (c.place - 1) % (PLACES - 1) : 0;
    float *queries = guarded(SLOT_Q, (c.rows - 1) * a.queries_stride + c.dim, floats);
    char *keys =
        guarded_elements(SLOT_K, (size_t)((c.keys - 1) * a.keys_stride + bytes), c.place, align);
    float *scales = guarded(SLOT_SCALES, (c.keys - 1) * a.key_scales_stride + 1, other);
    float *scores = guarded(SLOT_S, (c.rows - 1) * a.scores_stride + c.keys, floats);
    for (int64_t i = 0; i < c.rows; i++) {
        if (c.small)
            fill_binades(r, queries + i * a.queries_stride, c.dim, -140, -100);
        else
            fill_normal(r, queries + i * a.queries_stride, c.dim, 1.0f);
        if (c.accumulate)
            fill_normal(r, scores + i * a.scores_stride, c.keys, 1.0f);
    }
    fill_keys(r, f, keys, a.keys_stride, scales, c);
    a.queries = queries;
    a.keys = keys;
    a.key_scales = f == KV_I8 ? scales : NULL;
    a.scores = scores;

    double *want = doubles(WANT, c.rows * c.keys), *bound = doubles(BOUND, c.rows * c.keys);
    want_scores(&a, fn, f, scores, want, bound);
    guarded_freeze(SLOT_Q);
    guarded_freeze(SLOT_K);
    guarded_freeze(SLOT_SCALES);
    fn(&a);
    guards_intact();
    gaps_intact("scores", scores, c.rows, a.scores_stride, c.keys);
    expect_close_rows("scores", scores, a.scores_stride, want, bound, c.rows, c.keys);
    if (positions && !c.accumulate)
        check_position(&a, fn, f, c.place);
    if (!c.accumulate)
        check_listed(&a, fn);
    tally(isa->id, 1);
}

/* Every pattern of an element against queries of 1 and 0: its exact value,
 * also in the lanes and tails that a longer row puts it in. */
static void check_patterns(const test_isa *isa, qkv_dot_fn *fn, const char *op, kv_format f)
{
    enum { DIM = 43 };
    const int bytes = f == KV_F16 || f == KV_BF16 ? 2 : 1;
    for (int pattern = 0; pattern < 1 << 8 * bytes; pattern++) {
        const int hot = pattern % DIM;
        float query[DIM] = {0}, score;
        char key[DIM * 2] = {0};
        const float scale = 0.75f;
        query[hot] = 1.0f;
        memcpy(key + bytes * hot, &pattern, (size_t)bytes);
        context("%s on %s: pattern %04x at %d", op, isa->name, pattern, hot);
        const qkv_dot_args a = {.queries = query,
                                .keys = key,
                                .key_scales = f == KV_I8 ? &scale : NULL,
                                .scores = &score,
                                .rows = 1,
                                .kv_len = 1,
                                .head_dim = DIM};
        fn(&a);
        /* A query of 1 becomes 32767 * (1 / 32767), exact but for the scale. */
        const double want = oracle_kv_element(f, key, hot, scale);
        const double bound = (f == KV_I8 ? 4 * ORACLE_U * fabs(want) : 0) +
                             (ORACLE_TINY > 0x1p-149 ? ORACLE_TINY : 0);
        expect_close("score", &score, &want, &bound, 1);
    }
    tally(isa->id, 1 << 8 * bytes);
}

/* A NaN in one query and one key reaches their scores alone; so does an
 * infinity in a query. */
static void check_special(const test_isa *isa, qkv_dot_fn *fn, const char *op, kv_format f)
{
    enum { ROWS = 5, KEYS = 11, DIM = 96 };
    const float specials[] = {NAN, INFINITY, -INFINITY};
    const int64_t bytes = oracle_kv_bytes(f, DIM);
    for (int s = 0; s < 3; s++) {
        for (int at = 0; at < DIM; at += 5) {
            context("%s on %s: %g at %d", op, isa->name, (double)specials[s], at);
            float *q = guarded(SLOT_Q, ROWS * DIM, PLACE_AT_START), row[DIM];
            char *k = guarded_bytes(SLOT_K, (size_t)(KEYS * bytes), PLACE_AT_END);
            float *scales = guarded(SLOT_SCALES, KEYS, PLACE_AT_END);
            float *scores = guarded(SLOT_S, ROWS * KEYS, PLACE_AT_END);
            for (int i = 0; i < ROWS * DIM; i++)
                q[i] = 1.0f;
            q[3 * DIM + at] = specials[s];
            for (int j = 0; j < KEYS; j++) {
                for (int d = 0; d < DIM; d++)
                    row[d] = j == 7 && d == at ? NAN : 1.0f;
                oracle_kv_encode(f, row, DIM, k + j * bytes, &scales[j]);
            }
            const qkv_dot_args a = {.queries = q,
                                    .keys = k,
                                    .key_scales = f == KV_I8 ? scales : NULL,
                                    .scores = scores,
                                    .queries_stride = DIM,
                                    .keys_stride = bytes,
                                    .key_scales_stride = 1,
                                    .scores_stride = KEYS,
                                    .rows = ROWS,
                                    .kv_len = KEYS,
                                    .head_dim = DIM};
            fn(&a);
            for (int i = 0; i < ROWS; i++) {
                for (int j = 0; j < KEYS; j++) {
                    const bool nan = j == 7 || (i == 3 && s == 0);
                    const float got = scores[i * KEYS + j];
                    if (nan ? !isnan(got) : i == 3 ? got != specials[s] : !isfinite(got))
                        fail_with("score %d, %d is %g", i, j, (double)got);
                }
            }
            tally(isa->id, 1);
        }
    }
}

static void check_dot(const test_isa *isa, qkv_dot_fn *fn, const char *op, kv_format f)
{
    rng r = rng_make(op);
    const int64_t step = oracle_kv_step(f);
    const size_t align = oracle_kv_align(f);
    if (step == 1)
        check_patterns(isa, fn, op, f);
    check_special(isa, fn, op, f);
    for (int64_t dim = step; dim <= 70 * (step > 1 ? 4 : 1); dim += step) {
        for (int place = 0; place < places_of(align); place++) {
            if (place > 1 && !effort_takes(dim * 5 + place))
                continue;
            dot_case c = {.rows = rng_int(&r, 1, QKV_ROWS_MAX),
                          .keys = rng_int(&r, 1, 19),
                          .dim = dim,
                          .pad = rng_int(&r, 0, 3),
                          .place = place};
            check_case(isa, fn, op, f, &r, c, true);
            c.accumulate = true;
            check_case(isa, fn, op, f, &r, c, false);
        }
    }
    for (int64_t i = effort_cases(60); i > 0; i--) {
        const dot_case c = {.rows = rng_int(&r, 1, QKV_ROWS_MAX),
                            .keys = rng_int(&r, 1, 70),
                            .dim = rng_int(&r, 1, 320 / step) * step,
                            .pad = rng_int(&r, 0, 9),
                            .place = (int)rng_int(&r, 0, places_of(align) - 1),
                            .small = i % 5 == 0};
        check_case(isa, fn, op, f, &r, c, i % 4 == 0);
    }
    check_case(isa, fn, op, f, &r, (dot_case){.rows = 4, .keys = 5, .dim = 4096}, true);
}

#define CHECK(type, format)                                                                        \
    void check_dot_##type(const test_isa *isa)                                                     \
    {                                                                                              \
        check_dot(isa, isa->table->dot_##type, "dot_" #type, format);                              \
    }
KV_EACH(CHECK)
