/* SPDX-License-Identifier: MIT */
#include "checks.h"

#include <math.h>

enum { SLOT_Q, SLOT_K, SLOT_S, SLOT_ONE };
enum { WANT, BOUND };

typedef struct dot_case {
    int64_t rows, keys, dim;
    int64_t q_pad, k_pad, s_pad; /* stride = length + pad; pad -length: stride 0 */
    int place;
    bool accumulate;
} dot_case;

typedef void fill_fn(rng *r, float *x, int64_t n);

static void fill_rows(rng *r, fill_fn *fill, float *x, int64_t rows, int64_t stride, int64_t n)
{
    for (int64_t i = 0; i < rows && (i == 0 || stride); i++)
        fill(r, x + i * stride, n);
}

static int64_t extent(int64_t rows, int64_t stride, int64_t n)
{
    return rows && n ? (rows - 1) * stride + n : 0;
}

static const float *key_at(const qkv_dot_args *a, int64_t j)
{
    return (const void *)((const char *)a->keys + j * a->keys_stride);
}

static void want_scores(const qkv_dot_args *a, const float *before, double *want, double *bound)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t j = 0; j < a->kv_len; j++) {
            const int64_t at = i * a->kv_len + j;
            double magnitude;
            want[at] = oracle_dot(a->queries + i * a->queries_stride, key_at(a, j), a->head_dim,
                                  &bound[at], &magnitude);
            if (a->accumulate) {
                const double old = (double)before[i * a->scores_stride + j];
                want[at] += old;
                bound[at] += ORACLE_U * (fabs(old) + magnitude);
            }
        }
    }
}

/* The same score computed by itself, elsewhere, has the same bits. */
static void check_position(const test_isa *isa, const qkv_dot_args *a, int place)
{
    for (int64_t i = 0; i < a->rows; i++) {
        for (int64_t j = 0; j < a->kv_len; j++) {
            float score = 0.0f;
            float *key = guarded(SLOT_ONE, a->head_dim, 1 + (place + 3) % (PLACES - 1));
            for (int64_t d = 0; d < a->head_dim; d++)
                key[d] = key_at(a, j)[d];
            const qkv_dot_args one = {.queries = a->queries + i * a->queries_stride,
                                      .keys = key,
                                      .scores = &score,
                                      .rows = 1,
                                      .kv_len = 1,
                                      .head_dim = a->head_dim};
            isa->table->dot_f32(&one);
            if (bits_of(score) != bits_of(a->scores[i * a->scores_stride + j]))
                fail_with("score %lld, %lld: other bits than alone", (long long)i, (long long)j);
        }
    }
}

/* Keys found by a list of their addresses, in the opposite order. */
static void check_listed(const test_isa *isa, const qkv_dot_args *a)
{
    const void *keys_at[70];
    float scores[20 * 70];
    if (a->rows > 20 || a->kv_len > 70)
        return;
    for (int64_t j = 0; j < a->kv_len; j++)
        keys_at[a->kv_len - 1 - j] = key_at(a, j);
    qkv_dot_args listed = *a;
    listed.keys = NULL;
    listed.keys_at = keys_at;
    listed.scattered = true;
    listed.scores = scores;
    listed.scores_stride = 70;
    isa->table->dot_f32(&listed);
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->kv_len; j++)
            if (bits_of(scores[i * 70 + a->kv_len - 1 - j]) !=
                bits_of(a->scores[i * a->scores_stride + j]))
                fail_with("score %lld, %lld: other bits from a list", (long long)i, (long long)j);
}

static void check_case(const test_isa *isa, rng *r, dot_case c, fill_fn *fill, bool positions)
{
    context("dot_f32 on %s: rows %lld, keys %lld, head_dim %lld, pads %lld %lld %lld, place %d, "
            "accumulate %d",
            isa->name, (long long)c.rows, (long long)c.keys, (long long)c.dim, (long long)c.q_pad,
            (long long)c.k_pad, (long long)c.s_pad, c.place, c.accumulate);
    qkv_dot_args a = {.queries_stride = c.dim + c.q_pad,
                      .keys_stride = (c.dim + c.k_pad) * (int64_t)sizeof(float),
                      .scores_stride = c.keys + c.s_pad,
                      .rows = c.rows,
                      .kv_len = c.keys,
                      .head_dim = c.dim,
                      .accumulate = c.accumulate};
    const int64_t scores_extent = extent(c.rows, a.scores_stride, c.keys);
    float *queries = guarded(SLOT_Q, extent(c.rows, a.queries_stride, c.dim), c.place);
    float *keys = guarded(SLOT_K, extent(c.keys, c.dim + c.k_pad, c.dim),
                          c.place ? 1 + (c.place + 4) % (PLACES - 1) : 0);
    float *scores = guarded(SLOT_S, scores_extent, c.place);
    fill_rows(r, fill, queries, c.rows, a.queries_stride, c.dim);
    fill_rows(r, fill, keys, c.keys, c.dim + c.k_pad, c.dim);
    if (c.accumulate)
        fill_rows(r, fill, scores, c.rows, a.scores_stride, c.keys);
    a.queries = queries;
    a.keys = keys;
    a.scores = scores;

    double *want = doubles(WANT, c.rows * c.keys), *bound = doubles(BOUND, c.rows * c.keys);
    want_scores(&a, scores, want, bound);
    guarded_freeze(SLOT_Q);
    guarded_freeze(SLOT_K);
    isa->table->dot_f32(&a);
    guards_intact();
    gaps_intact("scores", scores, c.rows, a.scores_stride, c.keys);
    expect_close_rows("scores", scores, a.scores_stride, want, bound, c.rows, c.keys);
    if (positions && !c.accumulate)
        check_position(isa, &a, c.place);
    if (!c.accumulate)
        check_listed(isa, &a);
    tally(isa->id, 1);
}

static void normal(rng *r, float *x, int64_t n)
{
    fill_normal(r, x, n, 1.0f);
}

static void integers(rng *r, float *x, int64_t n)
{
    fill_integers(r, x, n, 8);
}

static void denormal(rng *r, float *x, int64_t n)
{
    fill_binades(r, x, n, -75, -62); /* products from 2^-150 to 2^-122 */
}

static void large(rng *r, float *x, int64_t n)
{
    fill_binades(r, x, n, 40, 55);
}

/* Ones sum to n; one-hot vectors pick out each element: nothing is dropped
 * or counted twice in any tail. */
static void check_tails(const test_isa *isa)
{
    for (int64_t n = 0; n <= 300; n++) {
        if (!effort_takes(n))
            continue;
        context("dot_f32 on %s: ones and one-hot, n %lld", isa->name, (long long)n);
        float *query = guarded(SLOT_Q, n, PLACE_AT_END);
        float *key = guarded(SLOT_K, n, PLACE_AT_END);
        float score;
        qkv_dot_args a = {
            .queries = query, .keys = key, .scores = &score, .rows = 1, .kv_len = 1, .head_dim = n};
        for (int64_t d = 0; d < n; d++)
            query[d] = key[d] = 1.0f;
        isa->table->dot_f32(&a);
        if (score != (float)n)
            fail_with("ones sum to %.9g", (double)score);
        for (int64_t hot = 0; hot < n; hot++) {
            for (int64_t d = 0; d < n; d++)
                key[d] = d == hot ? 3.0f : 0.0f;
            query[hot] = (float)(hot + 1);
            isa->table->dot_f32(&a);
            if (score != 3.0f * (float)(hot + 1))
                fail_with("element %lld gives %.9g", (long long)hot, (double)score);
        }
        tally(isa->id, 1);
    }
}

/* NaN or infinity in one query and one key reach their scores alone. */
static void check_special(const test_isa *isa)
{
    enum { ROWS = 5, KEYS = 11, DIM = 21 };
    const float specials[] = {NAN, INFINITY, -INFINITY};
    for (int s = 0; s < 3; s++) {
        for (int at = 0; at < DIM; at++) {
            context("dot_f32 on %s: %g at %d", isa->name, (double)specials[s], at);
            float *q = guarded(SLOT_Q, ROWS * DIM, PLACE_AT_START);
            float *k = guarded(SLOT_K, KEYS * DIM, PLACE_AT_END);
            float *scores = guarded(SLOT_S, ROWS * KEYS, PLACE_AT_END);
            for (int i = 0; i < ROWS * DIM; i++)
                q[i] = 1.0f;
            for (int i = 0; i < KEYS * DIM; i++)
                k[i] = 2.0f;
            q[3 * DIM + at] = specials[s];
            k[7 * DIM + at] = -specials[s];
            const qkv_dot_args a = {.queries = q,
                                    .keys = k,
                                    .scores = scores,
                                    .queries_stride = DIM,
                                    .keys_stride = DIM * sizeof *k,
                                    .scores_stride = KEYS,
                                    .rows = ROWS,
                                    .kv_len = KEYS,
                                    .head_dim = DIM};
            isa->table->dot_f32(&a);
            for (int i = 0; i < ROWS; i++) {
                for (int j = 0; j < KEYS; j++) {
                    const float x = i == 3 ? specials[s] : 1.0f, y = j == 7 ? -specials[s] : 2.0f;
                    const float want = i == 3 || j == 7 ? x * y : 2.0f * DIM;
                    expect_same_values("score", &scores[i * KEYS + j], &want, 1);
                }
            }
            tally(isa->id, 1);
        }
    }
}

void check_dot_f32(const test_isa *isa)
{
    rng r = rng_make("dot_f32");
    check_tails(isa);
    check_special(isa);
    for (int64_t dim = 0; dim <= LENGTHS; dim++) {
        for (int place = 0; place < PLACES; place++) {
            if (place > 1 && !effort_takes(dim * 5 + place))
                continue;
            dot_case c = {.rows = rng_int(&r, 1, 6),
                          .keys = rng_int(&r, 1, 9),
                          .dim = dim,
                          .q_pad = rng_int(&r, 0, 3),
                          .k_pad = rng_int(&r, 0, 3),
                          .s_pad = rng_int(&r, 0, 3),
                          .place = place};
            check_case(isa, &r, c, normal, true);
            c.accumulate = true;
            check_case(isa, &r, c, normal, false);
        }
    }
    for (int64_t i = effort_cases(300); i > 0; i--) {
        fill_fn *const fills[] = {normal, normal, denormal, large};
        dot_case c = {.rows = rng_int(&r, 0, 20),
                      .keys = rng_int(&r, 0, 70),
                      .dim = rng_int(&r, 0, 300),
                      .q_pad = rng_int(&r, 0, 9),
                      .k_pad = rng_int(&r, 0, 9),
                      .s_pad = rng_int(&r, 0, 9),
                      .place = (int)rng_int(&r, 0, PLACES - 1),
                      .accumulate = rng_int(&r, 0, 1)};
        if (i % 8 == 0)
            c.q_pad = -c.dim;
        if (i % 8 == 1)
            c.k_pad = -c.dim;
        check_case(isa, &r, c, fills[rng_int(&r, 0, 3)], i % 4 == 0);
    }
    for (int64_t dim = 4090; dim <= 4096; dim++)
        check_case(isa, &r, (dot_case){.rows = 3, .keys = 5, .dim = dim}, normal, true);

    /* Integers: exact, so that every ISA has the same bits. */
    for (int64_t dim = 1; dim <= 300; dim++) {
        double none[1] = {0};
        float q[300], k[300], score;
        integers(&r, q, dim);
        integers(&r, k, dim);
        const qkv_dot_args a = {
            .queries = q, .keys = k, .scores = &score, .rows = 1, .kv_len = 1, .head_dim = dim};
        isa->table->dot_f32(&a);
        const double want = oracle_dot(q, k, dim, NULL, NULL);
        context("dot_f32 on %s: integers, n %lld", isa->name, (long long)dim);
        expect_close("score", &score, &want, none, 1);
        tally(isa->id, 1);
    }
}
