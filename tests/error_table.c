/* SPDX-License-Identifier: MIT */
/*
 * Prints the worst error over adversarial inputs as a Markdown table: one line
 * for each function, element type and kind of input, one column for each ISA
 * that runs here. Exponentials are in ulp; everything else is a fraction of
 * the bound that the public header promises, which the oracle computes from
 * the same inputs. Fails if a figure exceeds 1.
 *
 * usage: error-table
 */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/drivers/typed.h"
#include "cpu.h"
#include "internal.h"
#include "oracle/oracle.h"
#include "validate.h"

enum { LONG = 100000, DIM = 64 };

static const char *const type_names[] = {
    [QKV_F32] = "f32", [QKV_F16] = "f16",         [QKV_BF16] = "bf16",       [QKV_Q8_0] = "q8_0",
    [QKV_I8] = "i8",   [QKV_F8_E4M3] = "f8_e4m3", [QKV_F8_E5M2] = "f8_e5m2", [QKV_Q4_0] = "q4_0"};

static bool runs[QKV_ISA_COUNT];
static bool beyond; /* a bound was exceeded */

static void *allocate(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, QKV_SCRATCH_ALIGN, bytes))
        exit(2);
    return memory;
}

static double noise(void)
{
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(state >> 11) * 0x1p-52 - 1.0;
}

/* Error as a fraction of the bound; both 0 is 0, and a NaN must be wanted. */
static double fraction(double got, double want, double bound)
{
    if (isnan(want) || isinf(want))
        return (isnan(want) && isnan(got)) || got == want ? 0.0 : HUGE_VAL;
    const double error = fabs(got - want);
    return error == 0 ? 0 : isnan(error) ? HUGE_VAL : error / bound;
}

static double worst_of(const float *got, const double *want, const double *bound, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++)
        worst = fmax(worst, fraction((double)got[i], want[i], bound[i]));
    return worst;
}

static void print_line(const char *what, const char *type, const char *input,
                       const double worst[QKV_ISA_COUNT])
{
    printf("| %s | %s | %s |", what, type, input);
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
        if (!runs[isa])
            continue;
        printf(" %.3g |", worst[isa]);
        beyond |= !(worst[isa] <= 1.0);
    }
    printf("\n");
    fflush(stdout);
}

/* Rows in an element type, with their scales if they have any. */
typedef struct stored_rows {
    void *data;
    float *scales;
} stored_rows;

/* Stores rows; 'x' becomes what is stored. */
static stored_rows stored(float *x, int64_t rows, int64_t dim, int32_t dtype)
{
    const qkv_kernels *k = qkv_kernels_of(0);
    const int64_t row_bytes = qkv_bytes(dtype, dim);
    char *data = allocate((size_t)(rows * row_bytes));
    float *scales = allocate((size_t)rows * sizeof *scales);
    for (int64_t i = 0; i < rows; i++) {
        qkv_narrow_typed(k, dtype, x + i * dim, data + i * row_bytes, &scales[i], dim);
        qkv_widen_typed(k, dtype, data + i * row_bytes, &scales[i], x + i * dim, dim);
    }
    return (stored_rows){data, scales};
}

/* ------------------------------------------------------------ exponentials */

static void exponentials(void)
{
    enum { CHUNK = 4096, STRIDE = 509 };
    static float x[CHUNK], y[CHUNK];
    for (int base2 = 0; base2 < 2; base2++) {
        double worst[QKV_ISA_COUNT] = {0};
        const float last_normal = base2 ? -126.0f : -87.33654f;
        uint32_t bits = UINT32_C(0x80000000), last;
        memcpy(&last, &last_normal, sizeof last);
        while (bits < last) {
            int64_t n = 0;
            for (; n < CHUNK && bits < last; n++, bits += STRIDE)
                memcpy(&x[n], &bits, sizeof bits);
            for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
                if (!runs[isa])
                    continue;
                const qkv_kernels *k = qkv_kernels_of(isa);
                (base2 ? k->exp2_f32 : k->exp_f32)(x, y, n);
                for (int64_t i = 0; i < n; i++) {
                    const double exact = base2 ? exp2((double)x[i]) : exp((double)x[i]);
                    worst[isa] = fmax(worst[isa], oracle_ulp_error(y[i], exact));
                }
            }
        }
        print_line(base2 ? "2^x (ulp)" : "e^x (ulp)", "f32",
                   "every 509th number with a normal result", worst);
    }
}

/* -------------------------------------------------------------------- dots */

typedef void dot_input(float *q, float *k, int64_t n);

static void cancelling(float *q, float *k, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        q[i] = (float)(1e4 * noise());
        k[i] = (float)noise();
        if (i % 2) { /* what came before comes back, a little changed */
            q[i] = -q[i - 1];
            k[i] = k[i - 1] * (1.0f + 0x1p-20f * (float)noise());
        }
    }
}

static void near_65504(float *q, float *k, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        q[i] = (i % 3 ? 65504.0f : -65472.0f);
        k[i] = (i % 5 ? 65504.0f : -65440.0f);
    }
}

static void denormals(float *q, float *k, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        q[i] = (float)(0x1p-70 * noise());
        k[i] = (float)(0x1p-70 * noise());
    }
}

static void one_sign(float *q, float *k, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        q[i] = (float)(1.0 + noise());
        k[i] = (float)(1.0 + noise());
    }
}

static const struct {
    const char *name;
    dot_input *fill;
} dot_inputs[] = {{"products cancel in pairs", cancelling},
                  {"values near the largest f16", near_65504},
                  {"products below the normal range", denormals},
                  {"all products positive", one_sign}};
enum { DOT_INPUTS = sizeof dot_inputs / sizeof *dot_inputs, DOT_LONGEST = 10000 };

static void dots(void)
{
    static const int64_t lengths[] = {1, 7, 64, 128, 1000, 4096, DOT_LONGEST};
    float *q = allocate(DOT_LONGEST * sizeof *q), *k = allocate(DOT_LONGEST * sizeof *k);
    for (int i = 0; i < DOT_INPUTS; i++) {
        double worst[QKV_ISA_COUNT] = {0};
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            for (int round = 0; round < 8; round++) {
                double bound;
                dot_inputs[i].fill(q, k, lengths[l]);
                const double want = oracle_dot(q, k, lengths[l], &bound, NULL);
                for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
                    float got = 0.0f;
                    if (!runs[isa])
                        continue;
                    qkv_isa_select(qkv_kernels_of(isa)->name);
                    qkv_dot(q, 0, k, 0, &got, 1, 1, 1, lengths[l]);
                    worst[isa] = fmax(worst[isa], fraction((double)got, want, bound));
                }
            }
        }
        print_line("qkv_dot", "f32", dot_inputs[i].name, worst);
    }
    free(q);
    free(k);
}

/* ------------------------------------------------------------- projections */

enum { COLUMNS = 40, MOST_ROWS = 40 };

/* Every row and every column is the same dot product, in all ways through the driver. */
static double project(const stored_rows *x, const stored_rows *w, int32_t dtype, int64_t n,
                      int64_t rows, const double *want, const double *bound)
{
    const int64_t size = qkv_bytes(dtype, 1);
    char *columns = allocate((size_t)(n * COLUMNS * size));
    for (int64_t i = 0; i < n * COLUMNS; i++)
        memcpy(columns + i * size, (char *)w->data + i / COLUMNS * size, (size_t)size);
    float out[MOST_ROWS * COLUMNS];
    const qkv_project_desc desc = {
        .size = sizeof desc,
        .rows = rows,
        .in_dim = n,
        .head_dim = COLUMNS,
        .input = {.data = x->data, .dtype = dtype, .flags = QKV_TENSOR_STRIDED},
        .linear = {.weight = columns, .dtype = dtype},
        .out = {.data = out}};
    size_t bytes = 0;
    qkv_project_scratch_size(&desc, &bytes);
    void *scratch = allocate(bytes);
    beyond |= qkv_project(&desc, scratch, bytes) != QKV_OK;
    free(columns);
    free(scratch);
    return worst_of(out, want, bound, rows * COLUMNS);
}

static void projections(int32_t dtype)
{
    static const int64_t lengths[] = {1, 7, 64, 1000, DOT_LONGEST}, rows[] = {1, 5, MOST_ROWS};
    float *x = allocate(DOT_LONGEST * sizeof *x), *w = allocate(DOT_LONGEST * sizeof *w);
    for (int i = 0; i < DOT_INPUTS; i++) {
        double worst[QKV_ISA_COUNT] = {0};
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            double want[MOST_ROWS * COLUMNS], bound[MOST_ROWS * COLUMNS];
            dot_inputs[i].fill(x, w, lengths[l]);
            const stored_rows xs = stored(x, 1, lengths[l], dtype);
            const stored_rows ws = stored(w, 1, lengths[l], dtype);
            want[0] = oracle_dot(x, w, lengths[l], &bound[0], NULL);
            for (int64_t c = 1; c < MOST_ROWS * COLUMNS; c++) {
                want[c] = want[0];
                bound[c] = bound[0];
            }
            for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
                if (!runs[isa])
                    continue;
                qkv_isa_select(qkv_kernels_of(isa)->name);
                for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
                    worst[isa] = fmax(worst[isa],
                                      project(&xs, &ws, dtype, lengths[l], rows[r], want, bound));
            }
            void *const all[] = {xs.data, xs.scales, ws.data, ws.scales};
            for (size_t a = 0; a < sizeof all / sizeof *all; a++)
                free(all[a]);
        }
        print_line("qkv_project", type_names[dtype], dot_inputs[i].name, worst);
    }
    free(x);
    free(w);
}

/* ----------------------------------------------------------------- softmax */

static float score_of(int kind, int64_t j)
{
    switch (kind) {
    case 0:
        return 3.25f; /* all equal */
    case 1:
        return j == 777 ? 40.0f : (float)noise(); /* one dominates */
    case 2:
        return (float)(88.0 * noise());
    case 3:
        return 1e4f + (float)(8.0 * noise());
    default: /* large ones first, then many that vanish beside one of them */
        return j < 8 ? 8.3f : -8.35f;
    }
}

static const char *const score_names[] = {"100,000 equal logits", "one dominating logit",
                                          "logits within 88 of 0", "logits near 1e4",
                                          "few large, many small"};
enum { SCORE_KINDS = 5 };

static void softmaxes(void)
{
    float *scores = allocate(LONG * sizeof *scores), *weights = allocate(LONG * sizeof *weights);
    double *want = allocate(LONG * sizeof *want), *bound = allocate(LONG * sizeof *bound);
    for (int kind = 0; kind < SCORE_KINDS; kind++) {
        double worst[QKV_ISA_COUNT] = {0}, lse, lse_bound;
        for (int64_t j = 0; j < LONG; j++)
            scores[j] = score_of(kind, j);
        oracle_softmax(scores, LONG, 1.0f, want, bound, &lse, &lse_bound);
        for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
            float got_lse;
            if (!runs[isa])
                continue;
            qkv_isa_select(qkv_kernels_of(isa)->name);
            qkv_scale_softmax(scores, LONG, weights, LONG, &got_lse, 1, LONG, 1.0f);
            worst[isa] = fmax(worst_of(weights, want, bound, LONG),
                              fraction((double)got_lse, lse, lse_bound));
        }
        print_line("qkv_scale_softmax", "f32", score_names[kind], worst);
    }
    free(scores);
    free(weights);
    free(want);
    free(bound);
}

static void weighted_sums(void)
{
    float *w = allocate(LONG * sizeof *w), *v = allocate(LONG * DIM * sizeof *v), out[DIM];
    double want[DIM], bound[DIM], worst[QKV_ISA_COUNT] = {0};
    for (int64_t j = 0; j < LONG; j++)
        w[j] = 1e-5f * (float)(1.0 + noise());
    for (int64_t i = 0; i < LONG * DIM; i++)
        v[i] = (float)(1e3 * noise());
    oracle_weighted_sum(w, v, DIM, LONG, DIM, want, bound);
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
        if (!runs[isa])
            continue;
        qkv_isa_select(qkv_kernels_of(isa)->name);
        qkv_weighted_sum(w, LONG, v, DIM, out, DIM, 1, LONG, DIM);
        worst[isa] = worst_of(out, want, bound, DIM);
    }
    print_line("qkv_weighted_sum", "f32", "100,000 keys, values of both signs", worst);
    free(w);
    free(v);
}

/* --------------------------------------------------------------- attention */

static void fill_attention(int kind, float *q, float *k, float *v, int64_t rows, int64_t keys)
{
    for (int64_t i = 0; i < rows * DIM; i++)
        q[i] = kind == 0 ? 0.0f : (float)noise();
    for (int64_t i = 0; i < keys * DIM; i++) {
        k[i] = (float)(noise() * (kind == 2 ? 12.0 : 1.0));
        v[i] = (float)(kind == 0 ? 1.0 + noise() : noise() * (kind == 3 ? 60000.0 : 1.0));
    }
    if (kind == 1) /* one key lies along the first query: its logit dominates */
        for (int64_t d = 0; d < DIM; d++)
            k[keys / 3 * DIM + d] = 30.0f * q[d];
}

/* Doubles of rows as they are stored; frees 'x'. */
static double *doubles_of(float *x, int64_t n)
{
    double *wide = allocate((size_t)n * sizeof *wide);
    for (int64_t i = 0; i < n; i++)
        wide[i] = (double)x[i];
    free(x);
    return wide;
}

/* A cache of a type; queries of 16 bits beside one of 16 bits, f32 beside all others. */
static void attention(int kind, const char *name, int32_t dtype, int64_t rows, int64_t keys)
{
    const int32_t query_dtype = dtype <= QKV_BF16 ? dtype : QKV_F32;
    float *q = allocate((size_t)(rows * DIM) * sizeof *q);
    float *k = allocate((size_t)(keys * DIM) * sizeof *k);
    float *v = allocate((size_t)(keys * DIM) * sizeof *v);
    float *out = allocate((size_t)(rows * DIM) * sizeof *out);
    double *want = allocate((size_t)(rows * DIM) * sizeof *want);
    double *bound = allocate((size_t)(rows * DIM) * sizeof *bound);
    double *lse = allocate((size_t)rows * sizeof *lse), *lse_bound = allocate((size_t)rows * 8);
    fill_attention(kind, q, k, v, rows, keys);
    const stored_rows qs = stored(q, rows, DIM, query_dtype);
    const stored_rows ks = stored(k, keys, DIM, dtype), vs = stored(v, keys, DIM, dtype);
    double *exact[] = {doubles_of(q, rows * DIM), doubles_of(k, keys * DIM),
                       doubles_of(v, keys * DIM)};
    const oracle_attention o = {.batch = 1,
                                .q_heads = 1,
                                .kv_heads = 1,
                                .q_len = rows,
                                .kv_len = keys,
                                .head_dim = DIM,
                                .value_dim = DIM,
                                .scale = 0.125,
                                .q = exact[0],
                                .k = exact[1],
                                .v = exact[2],
                                .out = want,
                                .out_bound = bound,
                                .lse = lse,
                                .lse_bound = lse_bound};
    oracle_attention_run(&o);

    double worst[QKV_ISA_COUNT] = {0};
    qkv_attention_desc desc = {.size = sizeof desc,
                               .q_len = rows,
                               .kv_len = keys,
                               .head_dim = DIM,
                               .query = {.data = qs.data, .dtype = query_dtype},
                               .key = {.data = ks.data, .dtype = dtype},
                               .value = {.data = vs.data, .dtype = dtype},
                               .out = {.data = out}};
    if (dtype == QKV_I8) {
        desc.key_scale.data = ks.scales;
        desc.value_scale.data = vs.scales;
    }
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
        size_t bytes = 0;
        if (!runs[isa])
            continue;
        qkv_isa_select(qkv_kernels_of(isa)->name);
        qkv_attention_scratch_size(&desc, 1, &bytes);
        void *scratch = allocate(bytes);
        beyond |= qkv_attention(&desc, scratch, bytes) != QKV_OK;
        free(scratch);
        worst[isa] = worst_of(out, want, bound, rows * DIM);
    }
    char input[96];
    snprintf(input, sizeof input, "%s, %s", name, rows > 8 ? "40 queries" : "1 query");
    print_line("qkv_attention", type_names[dtype], input, worst);
    void *const all[] = {exact[0], exact[1],  exact[2], qs.data, qs.scales, ks.data,   ks.scales,
                         vs.data,  vs.scales, want,     bound,   lse,       lse_bound, out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

int main(void)
{
    static const char *const names[] = {"equal logits", "one dominating key", "large logits",
                                        "values near 60,000"};
    printf("| function | type | input |");
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++) {
        runs[isa] = qkv_kernels_of(isa) && !qkv_isas_detect().missing[isa];
        if (runs[isa])
            printf(" %s |", qkv_kernels_of(isa)->name);
    }
    printf("\n|---|---|---|");
    for (int isa = 0; isa < QKV_ISA_COUNT; isa++)
        printf("%s", runs[isa] ? "--:|" : "");
    printf("\n");

    exponentials();
    dots();
    softmaxes();
    weighted_sums();
    for (int32_t dtype = QKV_F32; dtype <= QKV_BF16; dtype++)
        projections(dtype);
    for (int32_t dtype = QKV_F32; dtype <= QKV_Q4_0; dtype++) {
        for (int kind = 0; kind < 4; kind++) {
            const int64_t keys = kind == 0 ? LONG : 3000;
            attention(kind, names[kind], dtype, 1, keys);
            attention(kind, names[kind], dtype, 40, keys / 5);
        }
    }
    return beyond ? 1 : 0;
}
